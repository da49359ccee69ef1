"""COSE and C-Scores of trainings with COSE's transforms: a small training, its tables, claims and pages."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_replication import published_rows

from heatproof.metrics.stability import cose as cose_score
from heatproof.train import small_net
from heatproof.train.recipe import Phase, Recipe
from research.jobs import Place
from research.replication import cose, cose_tables, cscore_pages, pages
from research.replication.claims import HOLDS, NOT, UNTESTED, overall
from research.replication.population import PLAN, Training
from research.replication.train import Data

CLASSES = 10


def images(count: int, seed: int) -> Data:
    """Ten classes: a bright stripe at the class's place."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 120, (count, 3, 32, 32), generator=generator, dtype=torch.uint8)
    labels = torch.arange(count) % CLASSES
    for i, label in enumerate(labels.tolist()):
        pixels[i, :, :, 3 * label : 3 * label + 4] = 250
    return Data(pixels, labels)


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    """One training as the device runs it, with generated images, a small network and few methods."""
    training = next(t for t in PLAN if t.study == "cifar" and t.network == "resnet20")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cose, "read_split", lambda training, data: (images(100, 0), images(40, 1)))
        patch.setattr(cose, "make_network", lambda training, data: small_net(CLASSES, 32, 4, training.seed))
        patch.setattr(Training, "recipe", Recipe((Phase(4, 1e-2),), 25))
        patch.setattr(cose, "CHECKPOINTS", {"cifar": (1, 2, 4)})
        patch.setattr(cose, "IMAGES", 4)
        made = cose.measure(training, Place(Path(), Path(), "cpu"))
    return json.loads(json.dumps(made))


@pytest.mark.trains
def test_a_training_is_measured_at_its_checkpoints(result: dict[str, Any]) -> None:
    assert [row["epoch"] for row in result["epochs"]] == [0, 1, 2, 4] and not result["problem"]
    assert [c["epoch"] for c in result["cose"]["checkpoints"]] == [0, 1, 2]
    assert set(result["cose"]["ssim"]) == set(cose.METHODS)
    assert np.shape(result["cose"]["same"]) == (4, 13) == np.shape(result["cose"]["ssim"]["gradcam"])
    assert set(result["epochs"][-1]["cscores"]) == set(cose.CAMS)
    edges = [v for c in result["cose"]["checkpoints"] for v in c["ssim"]["edges"]]
    assert edges == [1.0] * len(edges)  # does not use the network


@pytest.mark.trains
def test_scores_are_those_of_the_metric(result: dict[str, Any]) -> None:
    rows = {row["method"]: row for row in cose_tables.score_rows(result)}
    own, method = result["cose"], "ig(steps=10)"
    ssim, same = np.array(own["ssim"][method], dtype=float), np.array(own["same"], dtype=bool)
    models = np.array([c["ssim"][method] for c in own["checkpoints"]], dtype=float)
    stayed = np.array([c["same"] for c in own["checkpoints"]], dtype=bool)
    expected = cose_score(ssim[same], np.concatenate([ssim[~same], models[~stayed]]), resamples=1)
    row = rows[method]
    assert row["cose"] == pytest.approx(expected.value, nan_ok=True)
    assert row["consistency"] == pytest.approx(expected.consistency)
    assert row["same"] + row["changed"] == ssim.size + models.size
    halves = [r for r in cose_tables.magnitude_rows(result) if r["method"] == method]
    assert sum(r["pairs"] for r in halves) == 4 * 7  # every signed transform once


@pytest.mark.trains
def test_pages_follow_from_the_tables(result: dict[str, Any], tmp_path: Path) -> None:
    results = []
    for network in ("resnet20", "resnet56", "vit"):
        for seed in range(2):
            other = copy.deepcopy(result)
            other["training"] |= {"network": network, "seed": seed}
            if network == "vit":
                for row in other["epochs"]:
                    row.pop("cscores", None)
            results.append(other)
    pages.write_tables(results, tmp_path)
    text = cose_tables.page(tmp_path / "cose")
    score = next(row for row in cose_tables.score_rows(result) if row["method"] == "gradcam")
    assert f"| GradCAM | {score['cose']:.1f}" in text and "{" not in text
    entries = {entry["text"].split(" (")[0]: entry for entry in cose_tables.claims(tmp_path / "cose")}
    assert len(entries) == len(cose_tables.CLAIMS) + len(cose_tables.NOT_HERE)
    first = cose_tables.Measures(pages.read_table("cose", tmp_path / "cose"), [], []).by_method("cose")
    best = max(first["resnet20", 0], key=lambda name: first["resnet20", 0][name])
    highest = entries["GradCAM has the highest COSE of the seven methods"]
    assert highest["answer"] == (HOLDS if best == "GradCAM" else NOT)  # equal trainings have no spread
    text = cscore_pages.ten_classes_page(tmp_path / "cscore-cifar")
    assert "## ResNet-56, 2 trainings" in text and "ViT" not in text and "{" not in text
    assert {entry["paper"] for entry in cscore_pages.claims(tmp_path / "cscore-cifar")} == {"cscore"}
    assert not (tmp_path / "warnings.csv").exists()  # tables of other studies stay


def test_published_numbers_of_cose_are_those_of_the_paper(papers: dict[str, Any]) -> None:
    stored = papers["cose"]
    assert stored["methods"] == list(cose.PAPER)
    rows = {f"{data}, {model}": tuple(values) for data, model, values in stored["rows"]}
    rows["Overall"] = tuple(stored["overall_pub"])
    assert all(rows[name] == values for name, values in cose_tables.PUBLISHED.items())


@pytest.mark.parametrize("claim", cscore_pages.CLAIMS, ids=lambda claim: claim.text)
def test_published_numbers_of_ten_classes_follow_from_the_tables(papers: dict[str, Any], claim: Any) -> None:
    numbers = [claim.number(published_rows(papers, n)) for n in range(len(claim.published))]
    assert numbers == pytest.approx(claim.published, abs=6e-4)


def test_published_changes_follow_from_the_tables(papers: dict[str, Any]) -> None:
    for n in range(3):
        rows = published_rows(papers, n)
        for method, changes in cscore_pages.PUBLISHED_CHANGES.items():
            before, after = (rows[e]["cscores"][method]["value"] for e in (20, 30))
            assert after - before == pytest.approx(changes[n], abs=6e-4)


def test_claims_that_compare_networks_need_all_of_them() -> None:
    rows = [
        {"network": network, "seed": seed, "method": method, "cose": value, "consistency": value,
         "sensitivity": value}
        for network, value in (("resnet20", 50.0), ("resnet56", 60.0), ("vit", 70.0))
        for seed in range(3) for method in cose.PAPER.values()
    ]  # fmt: skip
    claim = next(c for c in cose_tables.CLAIMS if c.text.startswith("Transformers have a higher COSE"))
    assert claim.number(cose_tables.Measures(rows, [], [])) == {name: [15.0] * 3 for name in cose.PAPER}
    some = [row for row in rows if row["network"] != "resnet56"]
    answers = [row for row in cose_tables.claim_rows(cose_tables.Measures(some, [], []))
               if row["claim"] == claim.text]  # fmt: skip
    assert answers == [] and overall([]) == UNTESTED


@pytest.mark.parametrize(
    ("name", "folder", "page"),
    [
        ("cscore", cscore_pages.XRAYS, cscore_pages.xray_page),
        ("cscore-cifar", cscore_pages.TEN, cscore_pages.ten_classes_page),
        ("cose", cose_tables.FOLDER, cose_tables.page),
    ],
)
def test_committed_pages_are_made_from_the_committed_tables(name: str, folder: Path, page: Any) -> None:
    if not folder.exists():
        pytest.skip(f"{name} is not measured yet")
    text = (pages.RESULTS / f"{name}.md").read_text("utf-8")
    assert text == page(), "run python -m research.replication pages"


def test_the_page_of_xrays_has_the_numbers_of_the_table() -> None:
    scores = pages.read_table("cscores")
    own = [r for r in scores if (r["network"], r["epoch"], r["method"]) == ("lite0", "30", "gradcam")]
    mean = np.mean([float(r["auc"]) for r in own])
    line = next(text for text in cscore_pages.xray_page().splitlines() if text.startswith("| AUC"))
    assert len(own) == 5 and line.split("|")[-2].strip().startswith(f"{mean:.2f} (")
