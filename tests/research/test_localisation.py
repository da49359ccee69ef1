"""The thesis's protocol: its published numbers, a small measurement, tables and page from made-up scores."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from heatproof.images.preprocess import Preprocess
from heatproof.models.model import Model
from heatproof.train import small_net
from research.localisation import measure, pages
from research.localisation.claims import CLAIMS, METRICS, Network, apart, in_group, read_networks
from research.localisation.measure import BUDGETS, METHODS, VARIANTS, Unit
from research.replication.claims import HOLDS, MIXED, NOT

LABELS = (1, 1, 207, 207, 403, 403, 972, 972)


def published(papers: dict[str, Any]) -> Network:
    """The tables of the thesis as a network with one photograph per class."""
    network = Network("resnet50", scores={"gradcam": {}, "lime": {}})
    for text, (_, _, where) in papers["thesis"]["t2"].items():
        label = int(text)
        how = papers["thesis"]["t3"][text][2]
        network.photographs[label] = {"filtered": 1, "label": label, "predicted": label}
        for k, method in enumerate(("gradcam", "lime")):
            network.scores[method][label] = {
                "box_iou": where[k], "mask_iou_20": where[2 + k], "pointing": where[4 + k],
                "deletion": how[1 + k], "insertion": how[3 + k],
            }  # fmt: skip
    return network


@pytest.mark.parametrize(
    "claim", [c for c in CLAIMS if c.published[0].isdigit()], ids=lambda claim: claim.text
)
def test_published_numbers_follow_from_the_tables_of_the_thesis(papers: dict[str, Any], claim: Any) -> None:
    number, _, count = claim.published.partition("; higher in ")
    network = published(papers)
    assert claim.number(network).value == pytest.approx(float(number), abs=6e-4)
    if count:
        by_class = network.ahead("lime", "gradcam", "box_iou", network.of_group("living things"))
        assert count == f"{sum(v > 0 for v in by_class.values())} of {len(by_class)} classes"


def test_groups_are_those_of_the_study() -> None:
    assert in_group(1, "living things") and in_group(985, "living things")
    assert not in_group(949, "living things") and in_group(972, "not living")


def made_up(network: str, gain: float) -> list[dict[str, Any]]:
    """Results of two units; Grad-CAM is `gain` better than LIME on every metric."""
    random = np.random.default_rng(0)
    photographs, scores, lime = [], [], []
    for image, label in enumerate(LABELS):
        photographs.append({
            "image": image, "label": label, "predicted": label if image % 3 else 0,
            "probability": 0.1 * image, "confidence": 0.9, "overlap": float(random.random()),
            "box_share": 0.3, "half_precision": 0.001,
        })  # fmt: skip
        noise = random.random()
        for method in METHODS:
            level = 0.3 + 0.1 * noise + (gain if method == "gradcam" else 0) + 0.01 * random.random()
            columns = {f"mask_iou_{round(100 * b)}": level * b for b in BUDGETS} | {"mask_iou_20": level}
            own = {"box_iou": level, "inside": level, "pointing": level, "insertion": level}
            scores.append({"image": image, "method": method, **columns, **own,
                           "deletion": 1 - level, "dispersion": noise})  # fmt: skip
        for segments, samples in VARIANTS:
            row = dict.fromkeys(("mask_iou", "box_iou", "inside", "pointing", "overlap", "spearman"), noise)
            lime.append({"image": image, "segments": segments, "samples": samples, **row})
    work = {"network": network, "inputs": 10, "seconds": 1.0}
    return [
        {"name": f"filtered-{network}-0", "part": "filtered", "photographs": photographs, "scores": scores,
         **work},
        {"name": f"lime-{network}-0", "part": "lime", "lime": lime, **work},
    ]  # fmt: skip


def test_tables_and_page_follow_from_results(tmp_path: Path) -> None:
    pages.write_tables([*made_up("lite0", 0.2), *made_up("resnet50", 0.2)], tmp_path)
    first, second = read_networks(tmp_path)
    assert [first.name, second.name] == ["lite0", "resnet50"] and len(first.filtered) == len(LABELS)
    answers = {entry["text"].partition(" (")[0]: entry["answer"] for entry in pages.claims(tmp_path)}
    assert [answers[claim.text] for claim in CLAIMS[:5]] == [HOLDS] * 5
    assert answers["On living things LIME has the higher box IoU"] == NOT
    assert answers["30 segments are too few for LIME"] == MIXED  # equal scores decide nothing
    pages.write_page(tmp_path, tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text("utf-8")
    assert "EfficientNet-Lite0 5 (LIME on 0)" in text and "{" not in text
    assert (tmp_path / "differences.png").stat().st_size < 120_000
    assert (tmp_path / "budgets.png").stat().st_size < 120_000
    pages.write_tables([*made_up("lite0", 0.2), *made_up("resnet50", -0.2)], tmp_path)
    assert pages.claims(tmp_path)[0]["answer"] == MIXED


def test_means_are_means_of_class_means(tmp_path: Path) -> None:
    pages.write_tables(made_up("lite0", 0.1), tmp_path)
    (network,) = read_networks(tmp_path)
    column = network.column("lime", "inside", network.filtered[:3])
    first, second, third = column.values()
    assert network.mean(column).value == pytest.approx(((first + second) / 2 + third) / 2)
    assert network.mean(network.ahead("gradcam", "lime", "deletion")).value > 0  # lower is better
    assert math.isnan(apart([1.0], [0.0, 0.5]).value)
    gap = apart([1.0, 0.8, 0.9], [0.1, 0.2, 0.3])
    assert gap.value == pytest.approx(0.7) and gap.interval is not None and gap.interval[0] > 0.4


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    """Twelve generated photographs; every third has two boxes, which the filter leaves out."""
    folder = tmp_path / "imagenet" / "images"
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    lines = ["file,class_index,wnid,class_name,width,height,x0,y0,x1,y1"]
    for i in range(12):
        name = f"ILSVRC2012_val_{i:08}.png"
        Image.fromarray(random.integers(0, 256, (40, 48, 3), np.uint8)).save(folder / name)
        boxes = ["8,8,30,30", "2,2,6,6"][: 2 if i % 3 == 2 else 1]
        lines += [f"{name},{i % 2},n{i % 2},class{i % 2},48,40,{box}" for box in boxes]
    (tmp_path / "imagenet" / "boxes.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_units_are_measured(photographs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def small(name: str, data: Path) -> Model:
        made = small_net(2, 32, 8, 0)
        return Model(made.module, name, Preprocess((32, 32), 36))

    monkeypatch.setattr(measure, "open_network", small)
    monkeypatch.setattr(measure, "PARTS", {"filtered": 4, "lime": 2, "others": 4})
    monkeypatch.setattr(measure, "SMALL", measure.Sizes(20, 8, 2, 2, 40))
    units = measure.plan(photographs, ("lite0",))
    assert [unit.name for unit in units] == [
        "filtered-lite0-0", "filtered-lite0-1", "lime-lite0-0", "others-lite0-0",
    ]  # fmt: skip
    units = measure.plan(photographs, ("lite0",), small=True)
    assert [unit.part for unit in units] == ["filtered", "lime", "others"]
    results = [measure.run(unit, photographs, "cpu") for unit in units]
    filtered, lime, others = results
    assert {row["method"] for row in filtered["scores"]} == set(METHODS)
    assert {row["method"] for row in others["scores"]} == {"gradcam", "lime", *measure.CONTROLS}
    assert [row["image"] % 3 == 2 for row in others["photographs"]] == [True] * 2
    assert len(lime["lime"]) == 2 * len(VARIANTS) and {row["image"] % 2 for row in lime["lime"]} == {0, 1}
    for row in (*filtered["scores"], *others["scores"]):
        assert {*METRICS[1:], "dispersion", "mask_iou_20"} < set(row)
        assert math.isnan(row["inside"]) or 0 <= row["insertion"] <= 1  # NaN: a constant map
    assert all(row["half_precision"] == 0 for row in filtered["photographs"])
    pages.write_tables(results, photographs)
    assert len(read_networks(photographs)[0].lime[30, 1000]) == 2


def test_mobilenet_has_the_padding_of_tensorflow(tmp_path: Path) -> None:
    torchvision = pytest.importorskip("torchvision")
    torch.save(torchvision.models.mobilenet_v2().state_dict(), tmp_path / "weights.pt")
    made = measure.mobilenet(tmp_path / "weights.pt")
    padded = [m for m in made.module.modules() if isinstance(m, torch.nn.ZeroPad2d)]
    assert len(padded) == 5  # one for each halving of the image
    assert made.logits(torch.zeros(1, 3, 64, 64)).shape == (1, 1000)


def test_the_plan_counts_inputs() -> None:
    assert measure.inputs_of(Unit("lime", "lite0", 0)) == measure.PARTS["lime"] * 2 * 3250


def test_the_page_is_made_from_the_tables() -> None:
    text = (pages.RESULTS / "localise.md").read_text("utf-8")
    assert text == pages.localise_page(), "run python -m research.localisation pages"
    stored = (pages.FOLDER / "claims.csv").read_text("utf-8")
    assert stored == pages.as_csv(pages.claim_rows(read_networks(pages.FOLDER)))
