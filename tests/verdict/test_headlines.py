"""The headlines in real runs: from pictures and weights to verdict.json, the command and the page."""

from __future__ import annotations

import csv
import json
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from contrast.discs import SIDE, TAG, model_ready, network
from heatproof.contrast import make_pair
from heatproof.registry import explainer, explainers
from heatproof.run.config import toml
from heatproof.show import pixels
from heatproof.types import Trace
from heatproof.verdict.answers import HEADLINES, LOW_ACCURACY, UNDECIDED
from heatproof.verdict.judge import FILE, IGNORES_WEIGHTS
from verdict.test_verdict import heatproof

pytestmark = pytest.mark.trains

EACH = 40
NETWORK = f"""
from torch import nn
from heatproof.images import Preprocess
from heatproof.models import Model

def discs():
    net = nn.Sequential(nn.Conv2d(3, 8, 5, 2, 2), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(),
                        nn.Conv2d(16, 16, 3, 1, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                        nn.Linear(16, 2))
    return Model(net, "discs", Preprocess(({SIDE}, {SIDE}), {SIDE}, (0.5,) * 3, (0.5,) * 3))
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two networks that know green from blue discs; A uses a tag. New pictures, with and without it."""
    folder = tmp_path_factory.mktemp("discs")
    model = network()
    pair = make_pair(model, *model_ready(model), TAG, positive=1, lr=3e-3, out=folder / "pair")
    assert pair.holds
    (folder / "net.py").write_text(NETWORK)
    for name, twin in (("a", pair.a), ("b", pair.b)):
        torch.save(twin.module.state_dict(), folder / f"{name}.pt")
    images, labels = model_ready(model, 4 * EACH, seed=9)
    tagged, masks = TAG.plant(images, [str(i) for i in range(len(images))], model.preprocess)
    boxes = [box_of(picture) for picture in pixels(images, model.preprocess)]
    apart = [
        not mask[y0 : y1 + 1, x0 : x1 + 1].any() for mask, (x0, y0, x1, y1) in zip(masks, boxes, strict=True)
    ]
    blue, green = ([i for i in range(len(images)) if labels[i] == c and apart[i]][:EACH] for c in (1, 0))
    assert len(blue) == len(green) == EACH
    tagged[labels == 0] = images[labels == 0]
    for name, group in (("plain", images), ("tagged", tagged)):
        (folder / name).mkdir()
        with (folder / f"{name}.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["path", "label", "x0", "y0", "x1", "y1"])
            for i in (*blue, *green):
                (picture,) = pixels(group[i : i + 1], model.preprocess)
                Image.fromarray(picture).save(folder / name / f"{i:03d}.png")
                rows.writerow([f"{name}/{i:03d}.png", ("green", "blue")[int(labels[i])], *boxes[i]])
    return folder


def box_of(picture: np.ndarray) -> tuple[int, ...]:
    """About the disc: all of one colour, which noise is not."""
    down, across = np.nonzero((picture[..., 0] < 75) & (picture[..., 0] > 45))
    return across.min(), down.min(), across.max(), down.max()


@pytest.fixture(autouse=True)
def two_that_never_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods of a plug-in: what is colourful in the picture, and a corner of it."""
    explainers.names()
    for name in ("_entries", "_keys"):
        monkeypatch.setattr(explainers, name, dict(getattr(explainers, name)))

    @explainer("colourful", cite="adebayo2018sanity")
    def colourful(trace: Trace) -> Tensor:
        """Where red, green and blue differ most."""
        smooth = F.avg_pool2d(trace.images, 5, 1, 2)
        return smooth.amax(1) - smooth.amin(1)

    @explainer("corner", cite="adebayo2018sanity")
    def corner(trace: Trace) -> Tensor:
        """The corner at the top left, a little of the picture's brightness with it."""
        steps = torch.linspace(1, 0, SIDE)
        return torch.outer(steps, steps) ** 4 + 1e-3 * trace.images.mean(1)


def judged(folder: Path, weights: str, pictures: str, methods: list[str]) -> tuple[dict[str, Any], str, str]:
    """verdict.json, what the command prints, and the page, of a run."""
    study = {
        "methods": [*methods, "random"],
        "metrics": ["specificity(draws=2, steps=6)", "evidence", "accuracy"],
        "run": {"batch_size": 40, "threads": 1, "workers": 1, "device": "cpu"},
        "model": {"spec": "net.py:discs", "checkpoints": [f"{weights}.pt"]},
        "images": {"kind": "csv", "path": f"{pictures}.csv", "options": {"class_names": ["green", "blue"]}},
    }
    path, out = folder / "study.toml", folder / f"{weights}-{pictures}-{'-'.join(methods)}"
    path.write_text(toml(study))
    ended = heatproof("run", path, "--out", out)
    assert ended.exit_code == 0, ended.output
    verdict = json.loads((out / FILE).read_text())
    result = heatproof("verdict", out)
    assert result.exit_code == 0
    assert heatproof("report", out, "-o", out / "page.html").exit_code == 0
    page = unescape((out / "page.html").read_text())
    head = page.partition('<section class="verdict')[2].partition("</section>")[0]
    assert f"{verdict['headline']}: heatproof verdict" in ended.output
    for text in (result.output, head):
        assert verdict["headline"] in text and verdict["sentence"] in text
    return verdict, result.output, head


@pytest.mark.parametrize(
    ("weights", "pictures", "method", "follows", "uses"),
    [
        ("b", "plain", "gradcam", "yes", ("yes", "undecided")),
        ("a", "tagged", "gradcam", "yes", ("no",)),
        ("b", "plain", "colourful", "no", ("undecided",)),
        ("a", "tagged", "corner", "no", ("no", "undecided")),
    ],
)
def test_each_headline_in_a_run_of_its_own(
    place: Path, weights: str, pictures: str, method: str, follows: str, uses: tuple[str, ...]
) -> None:
    verdict, output, page = judged(place, weights, pictures, [method])
    answer = verdict["network"]["answer"]
    assert answer in uses and verdict["headline"].startswith(HEADLINES[follows, answer]), verdict
    assert [method_answer["follows"] for method_answer in verdict["methods"]] == [follows]
    assert verdict["network"]["is_tested"] and verdict["network"]["read_from"] == [method]
    if follows == "no":
        assert all(
            IGNORES_WEIGHTS in text
            for text in (verdict["methods"][0]["note"], " ".join(output.split()), page)
        )
        (weights_alone, _) = (test for test in verdict["methods"][0]["tests"] if test["votes"])
        assert weights_alone["value"] == 0 and weights_alone["answer"] == "no"


def test_wrong_labels_stand_in_the_headline(place: Path) -> None:
    """The same images and network, with three of ten labels changed to the other class."""
    with (place / "plain.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for i, row in enumerate(rows):
        if i % 10 < 3:
            row["label"] = {"green": "blue", "blue": "green"}[row["label"]]
    with (place / "mislabelled.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        table.writerows(rows)
    verdict, _, page = judged(place, "b", "mislabelled", ["gradcam"])
    assert verdict["labels"]["n"] == 2 * EACH and 0.6 < verdict["labels"]["accuracy"] < LOW_ACCURACY
    share = f"only {verdict['labels']['accuracy']:.0%} of the predictions match the labels (n = {2 * EACH})"
    assert verdict["headline"].startswith(HEADLINES["yes", "undecided"]) and share in verdict["headline"]
    assert not page.startswith(" clear")


def test_other_methods_are_judged_beside_a_following_method(place: Path) -> None:
    verdict, _, _ = judged(place, "b", "plain", ["gradcam", "corner"])
    assert [method_answer["follows"] for method_answer in verdict["methods"]] == ["yes", "no"]
    assert verdict["headline"].startswith(HEADLINES["yes", "undecided"])
    assert verdict["network"]["read_from"] == ["gradcam"]


def test_where_no_map_stands_out_the_verdict_says_what_would_decide(place: Path) -> None:
    """A plug-in's noise that varies with the network: alone, it is like a map of evidence everywhere."""

    @explainer("dice", needs=("activations",), cite="adebayo2018sanity")
    def dice(trace: Trace) -> Tensor:
        """Noise that follows the activations' last digits and nothing else."""
        mixed = (trace.activation.sum(1) * 1e4).sin()
        return mixed - mixed.amin((1, 2), keepdim=True)

    verdict, _, page = judged(place, "b", "plain", ["dice"])
    assert verdict["headline"] == UNDECIDED and [
        method_answer["follows"] for method_answer in verdict["methods"]
    ] == ["undecided"]
    would = "no method is better than its control maps on this network, so none is judged"
    assert all(would in text for text in (verdict["methods"][0]["note"], verdict["sentence"], page))
