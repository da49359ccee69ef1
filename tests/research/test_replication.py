"""The replication: claims applied to the tables of the paper, falls of AUC, warnings, a small training."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from heatproof.contrast.pair import Flips, Pair, Planting
from heatproof.contrast.tokens import as_token
from heatproof.models.model import all_logits
from heatproof.train import small_net
from heatproof.train.recipe import Phase, Recipe
from research.calibration.population import open_pictures
from research.jobs import Place
from research.replication import pages, rankings, train, warning
from research.replication.claims import CLAIMS, HOLDS, MIXED, NOT, answer, claim_rows, overall, t_interval
from research.replication.population import PLAN, Training
from research.replication.warning import Course, roc_rows, signal_rows

NAMES = {"GradCAM": "gradcam", "GradCAM++": "gradcam++", "LayerCAM": "layercam", "EigenCAM": "eigencam",
         "ScoreCAM": "scorecam(channels=32)", "MS-GradCAM++": "ms-gradcam++"}  # fmt: skip


def published_rows(papers: dict[str, Any], network: int) -> dict[int, dict[str, Any]]:
    tables, name = papers["cscore"], papers["cscore"]["archs"][network]
    rows: dict[int, dict[str, Any]] = {}
    for epoch, values in tables["acc"].items():
        auc, accuracy = values[network]
        rows[int(epoch)] = {"auc": auc, "accuracy": accuracy / 100, "cscores": {}}
    for i, epoch in enumerate(tables["epochs"]):
        for method, own in NAMES.items():
            classes = {
                str(c): {"value": tables[part][name][method][i]}
                for c, part in enumerate(("normal", "pneumonia"))
            }
            score = {"value": tables["global"][name][method][i], "classes": classes}
            rows[epoch]["cscores"][own] = score
    return rows


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.text)
def test_published_numbers_follow_from_the_papers_tables(papers: dict[str, Any], claim: Any) -> None:
    numbers = [claim.number(published_rows(papers, network)) for network in range(3)]
    assert numbers == pytest.approx(claim.published, abs=6e-4)


def test_answers_follow_from_intervals() -> None:
    assert answer(0.1, 0.2, 0.0, True) == HOLDS and answer(0.1, 0.2, 0.0, False) == NOT
    assert answer(-0.1, 0.2, 0.0, True) == MIXED
    assert overall([HOLDS, HOLDS]) == HOLDS and overall([HOLDS, NOT]) == MIXED
    assert t_interval([1.0])[1] == -math.inf
    mean, low, high = t_interval([1.0, 2.0, 3.0])
    assert (mean, low, high) == pytest.approx(
        (2.0, 2 - 4.3027 / math.sqrt(3), 2 + 4.3027 / math.sqrt(3)), abs=1e-4
    )


def course(
    auc: list[float], warned: set[int], values: list[float] | None = None, diverged: bool = False
) -> Course:
    warnings = {kind: frozenset(warned) for kind in warning.WARNINGS}
    return Course(
        "a", "small", "constant", 1e-3, tuple(auc), warnings, {"signal": tuple(values or auc)}, diverged
    )


def test_a_fall_is_the_first_drop_below_the_best() -> None:
    assert course([0.8, 0.9, 0.88, 0.84, 0.5], set()).fall() == 4
    assert course([0.8, 0.9, 0.88], set()).fall() is None
    assert course([0.5, 0.4, 0.3], set()).fall() is None  # never good
    assert course([0.8, 0.9], set(), diverged=True).fall() == 3
    assert course([0.6, 0.8, 0.9, 0.9, 0.9, 0.5], set()).at_risk() == [
        (2, False),
        (3, True),
        (4, True),
        (5, True),
    ]


def test_warnings_before_falls_are_counted() -> None:
    fallen, calm = course([0.8, 0.9, 0.9, 0.9, 0.5], {4}), course([0.8, 0.9, 0.9, 0.9, 0.9], {2})
    row = signal_rows([fallen, calm])[0]
    assert (row["falls"], row["preceded"], row["median_lead"]) == (1, 1, 1)
    assert (row["calm_trainings"], row["calm_with_warning"]) == (1, 1)
    assert (row["share_before"], row["share_other"]) == pytest.approx((1 / 3, 1 / 6))


def test_the_roc_is_that_of_scikit_learn() -> None:
    random = np.random.default_rng(0)
    courses = [
        course([0.8, 0.9, 0.9, 0.9, 0.5 if i % 2 else 0.9], set(), random.random(5).tolist())
        for i in range(6)
    ]
    pairs = [(c.signals["signal"][e - 1], b) for c in courses for e, b in c.at_risk()]
    row = roc_rows(courses)[0]
    assert row["auc"] == pytest.approx(roc_auc_score([b for _, b in pairs], [v for v, _ in pairs]))
    assert row["low"] <= row["auc"] <= row["high"]


def test_names_of_trainings_differ() -> None:
    assert len({training.name for training in PLAN}) == len(PLAN) == 120


def test_a_training_is_measured_at_every_epoch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Generated images instead of X-rays; the rest is what the population runs."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (60, 3, 32, 32), generator=generator, dtype=torch.uint8)
    labels = torch.arange(60) % 2
    images[labels == 1, :, :16] //= 4
    monkeypatch.setattr(train, "xrays", lambda data, side: train.Data(images, labels))
    monkeypatch.setitem(train.SIDES, "small", 32)
    monkeypatch.setattr(Training, "recipe", Recipe((Phase(2, 1e-3),), 20))
    result = train.run(replace(PLAN[0], network="small"), Place(tmp_path, tmp_path))
    assert [row["epoch"] for row in result["epochs"]] == [1, 2]
    row = result["epochs"][-1]
    assert set(row["cscores"]) == set(train.METHODS) and row["gradient"] > 0
    assert len(row["probabilities"]) == len(result["labels"])
    read = warning.read_course(result)
    assert len(read.auc) == 2 and all(len(values) == 2 for values in read.signals.values())
    assert claim_rows([result]) == []  # thirty epochs are needed


def test_pages_are_made_from_the_tables() -> None:
    for name, text in (("early-warning.md", pages.warning_page()), ("index.md", pages.index_page())):
        assert (pages.RESULTS / name).read_text("utf-8") == text, "run python -m research.replication pages"


def test_tables_of_the_pages_agree() -> None:
    trainings, warnings = pages.read_table("trainings"), pages.read_table("warnings")
    falls = sum(bool(row["fall"]) for row in trainings)
    own = [row for row in warnings if row["group"] == pages.ALL and float(row["drop"]) == warning.DROP]
    assert {int(row["falls"]) for row in own} == {falls}
    scores = pages.read_table("cscores")
    assert len({(row["network"], row["seed"]) for row in scores}) == 15
    rows = {row["claim"]: row for row in pages.read_table("claims") if row["network"] == "lite0"}
    values = [
        {row["epoch"]: float(row["cscore"]) for row in scores
         if (row["network"], row["seed"], row["method"]) == ("lite0", str(seed), "eigencam")}
        for seed in range(5)
    ]  # fmt: skip
    mean = np.mean([abs(own["20"] - own["1"]) for own in values])
    assert float(rows["EigenCAM is stable during transfer learning"]["mean"]) == pytest.approx(mean, abs=2e-5)


def test_metrics_are_ranked_beside_the_truth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rankings, "METHODS", ("gradcam", "gradient"))
    monkeypatch.setattr(rankings, "FLOORS", ("random", "centre"))
    monkeypatch.setattr(rankings, "IMAGES", 6)
    monkeypatch.setattr(rankings, "VARIANTS", 1)
    codes = next(member for member in rankings.plan(["mini"]) if member.data == "qr")
    pictures = open_pictures(codes, None)
    first, second = (small_net(2, 32, 8, seed) for seed in (0, 1))
    logits = all_logits(first, first.preprocess.from_bytes(pictures.images[::10]))
    *_, last = (part for part in first.module.modules() if isinstance(part, torch.nn.Linear))
    with torch.no_grad():
        last.bias.sub_(logits.median(0).values)  # each class is predicted for half of the images
    rows = (pictures.labels == 1).nonzero()[:8, 0]
    images = first.preprocess.from_bytes(pictures.images[rows])
    masks = torch.zeros(8, 32, 32, dtype=torch.bool)
    masks[:, :6, :6] = True
    planting = Planting(Flips(1.0, 8, 8), Flips(0.0, 8, 8))
    ids = tuple(map(str, rows.tolist()))
    pair = Pair(first, second, as_token("tag"), 1, 1.0, images, images, masks, ids, planting, 1)
    scores = rankings.scores_of(codes, pair, pictures.objects[rows], pictures)
    assert {*scores} == {*rankings.TRUTHS, *rankings.METRICS}
    assert all({*own} == {"gradcam", "gradient", "random", "centre"} for own in scores.values())
    assert scores["contrast"]["random"] == scores["contrast"]["centre"] == 0  # do not use the network
    assert scores["contrast"]["gradient"] != 0


def test_correlations_are_means_over_pairs() -> None:
    values = {"contrast": (1, 2, 3, 4), "cscore": (4, 3, 2, 1), "cose": (2, 4, 6, 8)}
    rows = [
        {"pair": pair, "score": score, "method": f"m{i}", "value": value if pair == "p" else -value}
        for pair in "pq" for score, own in values.items() for i, value in enumerate(own)
    ]  # fmt: skip
    by_pair = {(r["first"], r["second"]): r for r in rankings.correlation_rows(rows, controls=False)}
    assert [by_pair["contrast", s]["rho"] for s in ("cscore", "cose")] == [-1, 1]
    assert by_pair["cscore", "cose"]["pairs"] == 2
    constant = [row | {"value": 1} if row["score"] == "cose" else row for row in rows]
    assert rankings.correlation_rows(constant, controls=False)[1]["pairs"] == 0  # no ranking at all
