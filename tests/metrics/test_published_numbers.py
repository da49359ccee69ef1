"""The statements of docs/published-numbers.md that the published tables themselves can settle."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest

ANIMALS = (1, 2, 3, 4, 92, 93, 129, 130, 207, 235, 250, 270, 281, 283, 284)  # ImageNet class numbers


@pytest.fixture
def cscore(papers: dict[str, Any]) -> dict[str, Any]:
    return papers["cscore"]


def test_auc_is_not_monotone_and_had_collapsed_before(cscore: dict[str, Any]) -> None:
    densenet, resnet = ([cscore["acc"][str(e)][a][0] for e in range(1, 31)] for a in (0, 2))
    assert densenet[14] == 0.9903 and densenet[15] == 0.989
    assert resnet[22] == 0.0287 and resnet[24] > 0.99


def test_recognised_images_at_epoch_30(cscore: dict[str, Any]) -> None:
    assert [round(row[1] / 100 * 1172) for row in cscore["acc"]["30"]] == [1104, 1109, 855]


def test_the_average_changes_follow_from_no_set_of_methods(cscore: dict[str, Any]) -> None:
    printed = {"DenseNet201": 0.267, "InceptionV3": 0.158, "ResNet50V2": -0.162}
    changes = {a: {m: scores[6] - scores[4] for m, scores in cscore["global"][a].items()} for a in printed}
    listed = [m for m in changes["DenseNet201"] if m != "MS-GradCAM++"]
    assert [round(float(np.mean(list(c.values()))), 3) for c in changes.values()] == [0.313, 0.205, -0.2]
    assert [round(float(np.mean([c[m] for m in listed])), 3) for c in changes.values()] == [
        0.341,
        0.199,
        -0.22,
    ]
    for size in range(1, 7):
        for some in combinations(changes["DenseNet201"], size):
            means = [np.mean([changes[a][m] for m in some]) for a in printed]
            assert not np.allclose(means, list(printed.values()), atol=0.001)


def test_gradcam_plus_plus_is_not_always_above_gradcam(cscore: dict[str, Any]) -> None:
    inception, resnet = (cscore["global"][a] for a in ("InceptionV3", "ResNet50V2"))
    assert (inception["GradCAM++"][5], inception["GradCAM"][5]) == (0.808, 0.875)
    assert (resnet["GradCAM++"][0], resnet["GradCAM"][0]) == (0.32, 0.422)


def test_pneumonia_is_not_zero_for_resnet_at_epoch_30(cscore: dict[str, Any]) -> None:
    last = sorted(values[-1] for values in cscore["pneumonia"]["ResNet50V2"].values())
    assert last[0] == 0 and last[1] == 0.37 and last[-1] == 0.495


def test_leakmin_raises_the_structure_score_of_xgradcam_only(papers: dict[str, Any]) -> None:
    score = papers["cambench"]["structure_score_fig5"]
    for backbone in ("R50", "CNX"):
        rises = {
            m: score[f"{backbone}|FTL|{m}"] > score[f"{backbone}|FTS|{m}"] for m in ("Layer", "Eigen", "X")
        }
        assert rises == {"Layer": False, "Eigen": False, "X": True}


def test_xgradcam_s_finder_mass_falls_under_leakmin(papers: dict[str, Any]) -> None:
    mass = [papers["cambench"]["table2"][f"R50|{regime}"]["X"][1] for regime in ("ZS", "FTS", "FTL")]
    assert mass == [0.265, 0.281, 0.229]


def test_cose_s_claims_about_its_rows(papers: dict[str, Any]) -> None:
    methods, rows = papers["cose"]["methods"], papers["cose"]["rows"]
    values = {(data, model): np.array(row) for data, model, row in rows}
    best = [methods[int(row.argmax())] for row in values.values()]
    shares = {m: 100 * best.count(m) / len(best) for m in methods if m in best}
    assert shares == {"GradCAM": 65, "BlurIG": 15, "IG": 15, "GradCAM++": 5}
    guided = methods.index("GuidedIG")
    oxford = {model: row[guided] for (data, model), row in values.items() if data.startswith("Oxford")}
    transformers = np.mean([oxford["Swin-T"], oxford["ViT-B/16"]])
    assert transformers < np.mean([oxford["ConvNext"], oxford["ResNet50"]])
    cifar = next(
        row for (data, model), row in values.items() if data.startswith("CIFAR") and model == "ViT-B/16"
    )
    assert cifar[methods.index("IG")] == 66.68 > cifar[methods.index("BlurIG")] == 66.46
    assert np.mean(papers["cose"]["readme_acc"]["SparK"]) == pytest.approx(68.456)


def test_the_thesis_s_claims_about_its_classes(papers: dict[str, Any]) -> None:
    table = {int(k): row[2] for k, row in papers["thesis"]["t2"].items()}
    assert len(table) == 43
    assert round(float(np.mean([row[5] for row in table.values()])), 4) == 0.8591
    assert sum(table[c][1] > table[c][0] for c in ANIMALS) == 10
    assert sum(table[c][3] > table[c][2] for c in ANIMALS) == 0
