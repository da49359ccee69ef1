"""A small audit from nothing: make QR pictures, train a network on them, explain it, score the maps.

QR codes are used because one knows where the evidence is: hard negatives differ from codes mainly in the
three finder patterns, so a map of the class "QR code" ought to lie on them. Nothing is stored beforehand;
every number and picture is computed here, from a seed.

Each stage is one function that takes what the stage before it made: data, train, explain, score, draw.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from heatproof.explain import explain
from heatproof.images.preprocess import Preprocess
from heatproof.images.qr import NEGATIVES, QRSet, make_qr
from heatproof.metrics._inputs import mean_interval
from heatproof.metrics.structure import structure
from heatproof.models.model import Model, predicted, probabilities
from heatproof.report.panels import Tile, overlay, sheet
from heatproof.types import Maps

LIGHT = ("gradcam", "gradcam++", "layercam", "xgradcam", "hirescam", "eigencam", "eigengradcam", "gradient")
FLOORS = ("random", "edges", "centre")
HEAVY = ("lime(samples=300)",)
SCORES = ("fmr", "tmr", "bl", "dts")
CLASSES = ("no QR code", "QR code")
QR = 1


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    train: int = 400  # positives, and as many negatives
    test: int = 100
    epochs: int = 8
    pixels: int = 64
    heavy: int = 8  # test positives for methods that need hundreds of passes


FULL = Sizes()
QUICK = Sizes(train=300, test=40, heavy=4)


class Progress(Protocol):
    """What a stage reports to: finished steps, and inputs passed through the network."""

    def done(self, what: str | None, steps: int = 1) -> None: ...
    def inputs(self, count: int) -> None: ...


Steps = Callable[[str, int], AbstractContextManager[Progress]]


@dataclass(frozen=True)
class Line:
    """One method's scores over the test positives: mean and 95 % interval by name."""

    method: str
    count: int
    degenerate: int
    scores: Mapping[str, tuple[float, tuple[float, float]]]


@dataclass(frozen=True)
class Result:
    model: Model
    accuracy: float
    recall_by_kind: Mapping[str, float]  # of each kind of test picture, the share that is classified rightly
    lines: tuple[Line, ...]
    chance: Mapping[
        str, float
    ]  # what a map that is the same everywhere would get: the parts' share of the area
    picture: Path


def run(out: Path, steps: Steps, sizes: Sizes = FULL, seed: int = 0) -> Result:
    """All stages, one after the other; writes one sheet of heatmaps into `out`."""
    with one_thread():
        return _run(out, steps, sizes, seed)


def _run(out: Path, steps: Steps, sizes: Sizes, seed: int) -> Result:
    train_set = make_qr(sizes.train, sizes.train, sizes.pixels, seed)
    test_set = make_qr(sizes.test, sizes.test, sizes.pixels, seed + 1)
    model = small_model(sizes.pixels, seed)
    with steps("training", sizes.epochs) as progress:
        train(model, train_set, sizes.epochs, seed, progress)
    right = correct(model, test_set)
    positives = test_set.take(test_set.labels == QR)
    lines = []
    with steps("explaining", 2) as progress:
        for methods, data in (((*LIGHT, *FLOORS), positives), (HEAVY, positives.take(slice(sizes.heavy)))):
            images = ready(model, data.pictures)
            maps = explain(model, images, methods, targets=QR, seed=seed, progress=progress.inputs)
            lines += [score(of_method, data) for of_method in maps.values()]
            progress.done(f"{', '.join(methods)}: {len(images)} codes")
    return Result(
        model=model,
        accuracy=float(right.mean()),
        recall_by_kind=by_kind(right, test_set),
        lines=tuple(sorted(lines, key=lambda line: line.method in FLOORS)),
        chance=area_shares(positives),
        picture=draw(model, test_set, out, seed),
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """For a network this small, threads wait for each other longer than they work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def small_model(pixels: int, seed: int) -> Model:
    """Four convolutions to a grid a quarter of the picture's side, then the strongest place of each channel.

    With a mean instead of the maximum, gradients would be the same everywhere and five of the CAMs one map.
    """
    widths, strides = (8, 16, 32, 32), (1, 2, 2, 1)
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for before, width, stride in zip((3, *widths), widths, strides, strict=False):
            layers += [
                nn.Conv2d(before, width, 3, stride, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
            ]
        head = nn.Linear(widths[-1], len(CLASSES))
    module = nn.Sequential(*layers, nn.AdaptiveMaxPool2d(1), nn.Flatten(), head)
    preprocess = Preprocess((pixels, pixels), (pixels, pixels), (0.5,) * 3, (0.25,) * 3)
    return Model(module.to(memory_format=torch.channels_last), "small CNN", preprocess, CLASSES)


def train(
    model: Model, data: QRSet, epochs: int, seed: int, progress: Progress, batch: int = 32, rate: float = 1e-2
) -> None:
    """Cross-entropy, AdamW, one cycle of the learning rate."""
    images, labels = ready(model, data.pictures), torch.from_numpy(data.labels)
    order = torch.Generator().manual_seed(seed)
    module = model.module.train()
    optimiser = torch.optim.AdamW(module.parameters(), rate)
    batches = -(-len(labels) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=epochs * batches)
    for epoch in range(epochs):
        losses = []
        for chosen in torch.randperm(len(labels), generator=order).split(batch):
            loss = nn.functional.cross_entropy(module(images[chosen]), labels[chosen])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
            losses.append(loss.item())
        progress.done(f"epoch {epoch + 1}: loss {np.mean(losses):.3f}")
    module.eval()


def ready(model: Model, pictures: np.ndarray) -> Tensor:
    """ "n H W 3" uint8 -> model-ready "n 3 H W"."""
    pixels = torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 255
    return model.preprocess.normalise(pixels).contiguous(memory_format=torch.channels_last)


def correct(model: Model, data: QRSet) -> np.ndarray:
    """ "n" bool: which pictures are classified rightly."""
    return predicted(model.logits(ready(model, data.pictures))).numpy() == data.labels


def by_kind(right: np.ndarray, data: QRSet) -> dict[str, float]:
    """The share that is right among the codes and among each kind of negative (which come in turn)."""
    negatives = right[data.labels == 0]
    kinds = {kind: negatives[i :: len(NEGATIVES)].mean() for i, kind in enumerate(NEGATIVES)}
    return {CLASSES[QR]: float(right[data.labels == QR].mean())} | {k: float(v) for k, v in kinds.items()}


def score(maps: Maps, data: QRSet) -> Line:
    """Mass on the finders and timing lines, leakage and distance, over images whose map is not constant."""
    values = structure(maps, data.masks["finder"], data.masks["timing"], data.masks["box"])
    scores = {name: (float(values[name].nanmean()), mean_interval(values[name])) for name in SCORES}
    return Line(maps.method, len(maps), int(maps.degenerate.sum()), scores)


def area_shares(data: QRSet) -> dict[str, float]:
    box = float(data.masks["box"].mean())
    return {
        "fmr": float(data.masks["finder"].mean()),
        "tmr": float(data.masks["timing"].mean()),
        "bl": 1 - box,
    }


def draw(model: Model, data: QRSet, out: Path, seed: int) -> Path:
    """A row per picture (three codes, one negative of each kind that looks like one), a column per method."""
    first_negative = int((data.labels == QR).sum())
    kinds = list(NEGATIVES)
    shown = {f"QR code {i + 1}": i for i in range(3)}
    shown |= {kind: first_negative + kinds.index(kind) for kind in ("finderless", "barcode")}
    pictures = data.pictures[list(shown.values())]
    images = ready(model, pictures)
    chances = probabilities(model.logits(images))
    maps = explain(model, images, (*LIGHT, *HEAVY, *FLOORS[:2]), seed=seed)
    rows = []
    for i, name in enumerate(shown):
        picture = Image.fromarray(pictures[i])
        target = int(chances[i].argmax())
        row = [Tile(picture, name, f"{chances[i, target]:.1%} {CLASSES[target]}")]
        row += [Tile(overlay(picture, of.upsample()[i]), method) for method, of in maps.items()]
        rows.append(row)
    out.mkdir(parents=True, exist_ok=True)
    path = out / "heatmaps.png"
    heading = "heatmaps of the class that the network predicts"
    sheet(rows, heading=heading, cmap="inferno", side=192).save(path)
    return path


def above_floor(
    lines: Sequence[Line], score: str = "fmr", floor: str = "edges"
) -> tuple[list[str], list[str]]:
    """Methods whose interval lies above the floor's mean, and the others."""
    level = next(line.scores[score][0] for line in lines if line.method == floor)
    methods = [line for line in lines if line.method not in FLOORS]
    above = [line.method for line in methods if line.scores[score][1][0] > level]
    return above, [line.method for line in methods if line.method not in above]
