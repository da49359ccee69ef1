"""docs/published-numbers.md says what our own functions make of the published tables, digit by digit."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

import heatproof as hp

PAGE = (Path(__file__).parents[2] / "docs/published-numbers.md").read_text(encoding="utf-8")
ROWS = dict(line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| "))
ANIMALS = (1, 2, 3, 4, 92, 93, 129, 130, 207, 235, 250, 270, 281, 283, 284)  # ImageNet class numbers


def answer_to(printed: str) -> str:
    """What the page holds against a published statement that begins so."""
    (answer,) = (ours for theirs, ours in ROWS.items() if theirs.startswith(printed))
    return answer


def mean(values: Any) -> float:
    """The plain mean, by the function that tables of studies use."""
    values = list(values)
    return hp.metrics.overall(values, [1] * len(values))


@pytest.fixture
def cscore(papers: dict[str, Any]) -> dict[str, Any]:
    return papers["cscore"]


def test_auc_is_not_monotone_and_had_collapsed_before(cscore: dict[str, Any]) -> None:
    densenet, resnet = ([cscore["acc"][str(e)][a][0] for e in range(1, 31)] for a in (0, 2))
    falls = [e for e in range(2, 21) if densenet[e - 1] < densenet[e - 2]]
    assert f"falls at E{falls[0]} ({densenet[14]:.4f} to {densenet[15]:.4f})" in answer_to(
        "DenseNet201: AUC rises"
    )
    first = next(e for e, auc in enumerate(resnet, 1) if auc < 0.5)
    assert (
        f"at E{first} ({resnet[first - 1]:.4f})" in answer_to("ScoreCAM warns at E25") and resnet[24] > 0.99
    )


def test_gold_lists_are_those_of_recognised_images(cscore: dict[str, Any]) -> None:
    recognised = [round(row[1] / 100 * 1172) for row in cscore["acc"]["30"]]
    answer = answer_to("gold lists")
    assert "{:,}, {:,} and {}".format(*recognised) in answer
    follows = dict.fromkeys(("recognised", "anchored"), 0)
    for a, architecture in enumerate(cscore["archs"]):
        for method, scores in cscore["global"][architecture].items():
            for i, epoch in enumerate(cscore["epochs"]):
                classes = [cscore[name][architecture][method][i] for name in ("normal", "pneumonia")]
                total = round(cscore["acc"][str(epoch)][a][1] / 100 * 1172)
                splits = ((n, total - n) for n in range(max(0, total - 855), min(317, total) + 1))
                near = (
                    abs(hp.metrics.global_cscore(classes, sizes) - scores[i]) <= 0.001 for sizes in splits
                )
                follows["recognised"] += any(near)
                follows["anchored"] += abs(hp.metrics.global_cscore(classes, (317, 855)) - scores[i]) <= 0.001
    assert f"{follows['recognised']} of 126 global scores" in answer
    assert f"with 317 / 855 only {follows['anchored']} and" in answer


def test_the_average_changes_follow_from_no_set_of_methods(cscore: dict[str, Any]) -> None:
    printed = (0.267, 0.158, -0.162)
    assert ", ".join(f"{value:+.3f}" for value in printed) in PAGE
    changes = [{m: s[6] - s[4] for m, s in cscore["global"][a].items()} for a in cscore["archs"]]
    listed = [m for m in changes[0] if m != "MS-GradCAM++"]
    answer = answer_to("average change")
    for words, methods in (("six methods", list(changes[0])), ("five listed", listed)):
        means = [mean(change[m] for m in methods) for change in changes]
        assert f"{words}: {', '.join(f'{value:+.3f}' for value in means)}" in answer
    subsets = (some for size in range(1, 7) for some in combinations(changes[0], size))
    for some in subsets:
        means = [mean(change[m] for m in some) for change in changes]
        assert not all(math.isclose(a, b, abs_tol=0.001) for a, b in zip(means, printed, strict=True))


def test_gradcam_plus_plus_is_not_always_above_gradcam(cscore: dict[str, Any]) -> None:
    answer = answer_to("Grad-CAM++ consistently beats")
    for architecture, i in (("InceptionV3", 5), ("ResNet50V2", 0)):
        plus, plain = (cscore["global"][architecture][m][i] for m in ("GradCAM++", "GradCAM"))
        assert (
            f"{architecture} at E{cscore['epochs'][i]} ({plus:.3f} < {plain:.3f})" in answer and plus < plain
        )


def test_pneumonia_is_not_zero_for_resnet_at_epoch_30(cscore: dict[str, Any]) -> None:
    last = sorted(values[-1] for values in cscore["pneumonia"]["ResNet50V2"].values())
    assert f"{last[1]:.3f} to {last[-1]:.3f} for five of six" in answer_to("ResNet50V2, E30") and last[0] == 0


def test_leakmin_raises_the_structure_score_of_xgradcam_only(papers: dict[str, Any]) -> None:
    answer, table = answer_to("FT-LeakMin moves further up"), papers["cambench"]["table2"]

    def score(backbone: str, regime: str, method: str) -> float:
        leakage, finder, timing, distance, _ = table[f"{backbone}|{regime}"][method]
        return hp.metrics.structure_score(finder, timing, leakage, distance)

    for method in ("Layer", "Eigen", "X"):
        pairs = [[score(b, regime, method) for regime in ("FTS", "FTL")] for b in ("R50", "CNX")]
        assert [after > before for before, after in pairs] == [method == "X"] * 2
        if method != "X":
            changes = [f"{before:.3f} to {after:.3f}" for before, after in pairs]
            assert all(change in answer for change in changes)
    finder = {regime: table[f"R50|{regime}"]["X"][1] for regime in ("ZS", "FTS", "FTL")}
    lifted = answer_to('XGrad-CAM "lifts" FMR to .229')
    assert finder["FTL"] == 0.229 < finder["ZS"] < finder["FTS"]
    assert f"{finder['ZS']:.3f} (ZS) and {finder['FTS']:.3f} (FT-Struct)".replace("0.", ".") in lifted


def test_cose_s_claims_about_its_rows(papers: dict[str, Any]) -> None:
    cose = papers["cose"]
    methods, weights = cose["methods"], cose["weights"]
    values = {(data, model): dict(zip(methods, row, strict=True)) for data, model, row in cose["rows"]}
    best = Counter(max(row, key=row.__getitem__) for row in values.values())
    named = ("GradCAM", "BlurIG", "IG", "GradCAM++", "GuidedIG")
    shares = " / ".join(f"{100 * best[m] / len(values):g}" for m in named)
    assert f"give {shares} % ({', '.join(named)})" in answer_to("best method in") and set(best) <= set(named)
    oxford = {m: row["GuidedIG"] for (data, m), row in values.items() if data.startswith("Oxford")}
    kinds = (("Swin-T", "ViT-B/16"), ("ConvNext", "ResNet50"))
    plain = [mean(oxford[m] for m in kind) for kind in kinds]
    weighted = [hp.metrics.overall([oxford[m] for m in kind], [weights[m] for m in kind]) for kind in kinds]
    assert (
        f"{plain[0]:.3f} < {plain[1]:.3f}" in answer_to("transformers score higher") and plain[0] < plain[1]
    )
    assert weighted[0] > weighted[1]
    cifar = next(row for (d, m), row in values.items() if d.startswith("CIFAR") and m == "ViT-B/16")
    assert f"IG has {cifar['IG']}" in answer_to(f"second best on CIFAR10, ViT: BlurIG ({cifar['BlurIG']})")
    assert f"SparK {mean(cose['readme_acc']['SparK']):.2f} %" in answer_to("every model reaches 75 %")
    assert f"({'eleven' if sum(weights.values()) == 11 else ''} variants)" in answer_to("Overall row")


def test_the_thesis_s_claims_about_its_classes(papers: dict[str, Any]) -> None:
    table = {int(c): row[2] for c, row in papers["thesis"]["t2"].items()}
    pointing = hp.metrics.macro_mean([row[5] for row in table.values()], list(table))
    assert f"(table: {pointing.value:.4f})".replace("0.", ".") in PAGE and len(pointing.classes) == 43
    box, mask = (sum(table[c][i + 1] > table[c][i] for c in ANIMALS) for i in (0, 2))
    assert f"box IoU ({box} of {len(ANIMALS)} animals), not for mask IoU ({mask} of {len(ANIMALS)})" in PAGE
