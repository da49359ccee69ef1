"""CAMBench-QR with ImageNet backbones: recipes, claims on the paper's tables, a small training, the page."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from heatproof.studies.qr import trainings
from heatproof.train import Data, fit, small_net
from heatproof.train.protocols import REGIMES
from heatproof.train.recipe import Phase, Recipe
from research.evidence.networks import NETWORKS, Kind, _small
from research.jobs import Place
from research.qr import pages
from research.qr.claims import CLAIMS, EVERY_CLAIM, Numbers, claim_rows, same_order
from research.qr.measure import (
    BACKBONES,
    FULL,
    MASSES,
    METHODS,
    Size,
    Training,
    keep_statistics,
    measure,
    plan,
)
from research.qr.measure import recipes as own_recipes
from research.replication.claims import HOLDS, MIXED, NOT, UNTESTED

TINY = Size(train=8, test=12, robust=2, causal=12, head_epochs=1, epochs=1)


def test_trainings_are_those_of_the_study() -> None:
    settings = FULL.settings("resnet50")
    assert own_recipes(settings) == trainings.recipes(settings)
    assert len({training.name for training in plan()}) == len(plan()) == 51
    first = plan()[:18]
    assert {(t.network, t.regime) for t in first} == {(n, r) for n in BACKBONES for r in REGIMES}
    assert {t.seed for t in first} == {0, 1, 2}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("EigenGrad-CAM leaks least in every regime", -0.005),
        ("XGrad-CAM leaks most in every regime", 0.032),
        ("FT-LeakMin pushes all methods further up", -0.101),  # the paper contradicts its own Table 2
        ("FT-LeakMin flattens the growth of leakage", -0.07),
        ("After fine-tuning EigenGrad-CAM is the most causally aligned", 0.024),
        ("Deeper fine-tuning increases leakage", 0.014),
        ("A pull of alpha = 0.25 raises the mass on the parts", 0.08),
    ],
)
def test_published_numbers_follow_from_the_papers_tables(text: str, expected: float) -> None:
    (claim,) = (claim for claim in CLAIMS if claim.text == text)
    assert claim.number(pages.papers()["ResNet-50"]) == pytest.approx(expected, abs=6e-4)


def test_every_claim_has_a_published_number_and_an_answer() -> None:
    papers = pages.papers()
    rows = claim_rows({"resnet50": {0: papers["ResNet-50"], 1: papers["ResNet-50"]}}, papers)
    assert [row["claim"] for row in rows] == [claim.text for claim in EVERY_CLAIM]
    assert all(row["published"] for row in rows)
    answers = {row["claim"]: row["answer"] for row in rows}
    assert answers["FT-LeakMin reduces leakage"] == HOLDS
    assert answers["FT-LeakMin pushes all methods further up"] == NOT
    assert answers["XGrad-CAM is the fastest, EigenGrad-CAM the slowest"] == UNTESTED
    alone = claim_rows({"resnet50": {0: papers["ResNet-50"]}}, papers)
    assert {row["answer"] for row in alone} == {MIXED, UNTESTED}  # no interval over one training


def test_orders_of_two_networks_are_compared() -> None:
    first: Numbers = pages.papers()["ResNet-50"]
    assert same_order(first, pages.papers()["ConvNeXt-B"]) == 1
    turned = {key: {name: -value for name, value in own.items()} for key, own in first.items()}
    assert same_order(first, turned) == 0
    empty = {**first, ("zs", "layercam"): {"bl": math.nan, "dts": math.nan}}
    assert math.isnan(same_order(first, empty))


@pytest.mark.trains
def test_batch_norm_keeps_its_statistics() -> None:
    model = small_net(2, 16, 4)
    images = torch.randint(0, 256, (8, 3, 16, 16), generator=torch.Generator().manual_seed(0)).byte()
    data = Data(images, torch.arange(8) % 2)
    before = copy.deepcopy(model.module.state_dict())
    model.module.register_forward_pre_hook(keep_statistics)
    fit(model, data, data, Recipe((Phase(1, 1e-2),), 4))
    after = model.module.state_dict()
    changed = {name for name, values in after.items() if not torch.equal(values, before[name])}
    assert changed and not any("running" in name for name in changed)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A real training of a small network in place of EfficientNet-Lite0."""
    folder = tmp_path_factory.mktemp("qr")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(NETWORKS, "lite0", Kind(64, partial(_small, 8), 1e-3, 1))
        return measure(Training("lite0", "ft-leakmin", 0), Place(folder, folder), TINY)


@pytest.mark.trains
def test_a_training_is_measured_on_every_code(measured: Mapping[str, Any]) -> None:
    columns = measured["columns"]
    assert {*columns} == {"", *METHODS, "random", "edges"}
    assert len(columns["random"]["bl"]) == 12 and len(columns["random"]["bl(jpeg=0.5)"]) == 2
    assert 0 < measured["parameters"] < 1 and len(measured["losses"]) == 1
    rows = {row["method"]: row for row in pages.score_rows(measured)}
    assert rows["random"]["bl"] == pytest.approx(1 - np.mean(columns[""]["size"]) / 1e5, abs=0.02)
    bl, fmr, tmr, dts = (rows["edges"][name] for name in ("bl", "fmr", "tmr", "dts"))
    assert rows["edges"]["mass_score"] == pytest.approx(fmr + tmr - 3 * bl - dts, abs=1e-4)
    for method in ("gradcam", "random", "edges"):  # the same maps, scored by the metric and by masses()
        for mass in MASSES:
            assert columns[method][f"{mass}(clean=0)"] == pytest.approx(columns[method][mass][:2], abs=2)
    assert -1 <= rows["random"]["rho_finder"] <= 1 and rows["random"]["distorted"] == 2


@pytest.mark.trains
def test_the_page_is_made_from_the_tables(measured: Mapping[str, Any], tmp_path: Path) -> None:
    results = []
    for training in (t for t in plan() if t.seed < 2):
        result = copy.deepcopy(dict(measured)) | {"training": asdict(training)}
        leaks = result["columns"]["eigengradcam"]["bl"]
        shift = 1000 * training.seed + (5000 if training.regime == "ft-struct" else 0)
        result["columns"]["eigengradcam"]["bl"] = [None if v is None else v + shift for v in leaks]
        results.append(result)
    pages.write_tables(results, tmp_path)
    rows = pages.read_table("claims", tmp_path)
    (own,) = (r for r in rows if r["claim"] == "A small lambda reduces leakage")
    assert float(own["mean"]) == pytest.approx(-0.05) and own["answer"] == HOLDS and own["seeds"] == "2"
    text = pages.page(tmp_path)
    assert "A small lambda reduces leakage" in text and "{" not in text
    entries = pages.claims(tmp_path)
    assert len(entries) == len(EVERY_CLAIM) and {entry["paper"] for entry in entries} == {"cambench"}
    for name in ("leakage.png", "depths.png"):
        assert 5_000 < (tmp_path / name).stat().st_size < 120_000
    pages.write_tables(results[:3], tmp_path / "short")
    assert "Not measured." in pages.page(tmp_path / "short")  # a population that was cut short


def test_a_trainings_seed_draws_other_codes() -> None:
    assert replace(plan()[0], seed=1).name != plan()[0].name
    seeds = {4 * training.seed for training in plan()}
    assert 1 not in seeds  # the seed of the test codes


def test_the_committed_page_is_that_of_the_tables() -> None:
    assert pages.PAGE.read_text("utf-8") == pages.page(), "run python -m research.qr page"
