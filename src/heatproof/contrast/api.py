"""hp.contrast: the whole test on a network and images, at one strength or at several.

OUT/strength-100/a, b          both trainings (train/loop.py), so that methods can be added later
OUT/strength-100/restart-1     the same after a collapse (pair.py)
OUT/strength-100/scores.json   inside shares of every method under A and B, image by image
OUT/strength-100/maps.npz      maps of the first images
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from PIL import Image
from torch import Tensor, nn

from heatproof.contrast.pair import (
    SHOWN,
    TOKEN_REMOVED,
    ContrastScore,
    Pair,
    Planting,
    contrast_scores,
    make_pair,
)
from heatproof.contrast.tokens import Token, as_token
from heatproof.disk import write_whole
from heatproof.errors import InputError, StoreError
from heatproof.explain.api import read_methods
from heatproof.images import Failure, batches, open_source
from heatproof.images.source import class_numbers
from heatproof.metrics.kit import as_tensor
from heatproof.models.capture import refusal_in_a_sentence
from heatproof.models.model import Model, as_model
from heatproof.models.names import model_classes
from heatproof.show import pixels, plain_table, text
from heatproof.train.loop import TrainProgress

ProgressCallback = Callable[[float, str, TrainProgress | int], object]
FLOORS = ("random", "edges", "centre")
METHODS = ("gradcam", "gradcam++", "layercam", "hirescam", "eigencam", "integrated-gradients", *FLOORS)


class Labelled(NamedTuple):
    """Model-ready images with their classes as the model numbers them."""

    images: Tensor  # "n c H W"
    labels: Tensor
    ids: tuple[str, ...]
    names: Mapping[int, str]
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True)
class ContrastPoint:
    """Results at one strength; without scores if planting failed."""

    strength: float
    planting: Planting
    epochs: int
    scores: Mapping[str, ContrastScore]

    @property
    def holds(self) -> bool:
        return self.planting.holds


@dataclass(frozen=True, eq=False)
class Contrast:
    """Results of the test, strongest first, and some of its images."""

    model: str
    token: Token
    positive: str
    points: tuple[ContrastPoint, ...]
    pictures: tuple[Image.Image, ...]  # with the token
    failures: tuple[Failure, ...] = ()

    @property
    def scores(self) -> Mapping[str, ContrastScore]:
        """By method, at the highest strength."""
        return self.points[0].scores

    @property
    def methods(self) -> list[str]:
        """All methods that were judged at one strength or more; the control last."""
        return list(dict.fromkeys(m for p in self.points for m in sorted(p.scores, key=TOKEN_REMOVED.__eq__)))

    def shown_from(self, method: str) -> float | None:
        """The least strength at which the method shows the token (ContrastScore.shows)."""
        showing = (p.strength for p in self.points if method in p.scores and p.scores[method].shows)
        return min(showing, default=None)

    def _repr_html_(self) -> str:
        lines = "".join(f"<p>{p.strength:.0%}: {text(p.planting.sentence)}</p>" for p in self.points)
        rows = [
            [s.method, f"{p.strength:.0%}", s.auc, *s.interval, s.seen, s.n]
            for p in self.points
            for s in p.scores.values()
        ]
        heads = ["method", "strength", "AUC", "low", "high", "seen", "n"]
        return lines + (plain_table(heads, rows) if rows else "")


def contrast(
    model: Model | nn.Module,
    pictures: str | Path | Tensor | Labelled,
    labels: ArrayLike | None = None,
    methods: str | Sequence[str] = METHODS,
    *,
    token: Token | str | Path = "tag",
    positive: int | str | None = None,
    strength: float | Sequence[float] = 1.0,
    carriers: float = 1.0,
    epochs: int = 40,
    lr: float = 3e-4,
    layer: str | Sequence[str] | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    progress: ProgressCallback | None = None,
) -> Contrast:
    """Train copies of a network to use a token or not, and test which methods show the difference.

    Args:
        model: a Model, or a module; it is not changed.
        pictures: a folder with a subfolder for each class, or model-ready tensors "n c H W".
        labels: of tensors, the class of each.
        methods: names, with optional arguments, such as "lime(samples=200)".
        token: tag, tint, blur, texture or an image file; or a Token, which has a size.
        positive: the class that gets the token, by number or name; by default the most frequent.
        strength: share of its training images that have it; several make a detection curve.
        carriers: images of other classes that carry it too, for each of those (see contrast/pair.py).
        epochs: of each training, at most.
        lr: the learning rate of the first epoch.
        layer: of CAMs, by name; by default chosen automatically.
        seed: of everything random.
        out: a folder; a test that was stopped is resumed there, and methods can be added.
        progress: called with the strength, "A" or "B", and the state of that training; then with the
            strength, "maps", and the number of inputs that passed through a network.

    Returns:
        Scores of every method at every strength, and whether the token was learned.
    """
    model, token = as_model(model), as_token(token)
    read_methods(methods)
    strengths = sorted({strength} if isinstance(strength, (int, float)) else set(strength), reverse=True)
    if not strengths:
        raise InputError(
            "no strength is named; write the share of the positives that get the token, such as 1"
        )
    images = pictures if isinstance(pictures, Labelled) else labelled(model, pictures, labels)
    if isinstance(positive, str):
        known = [images.names.get(k, "") for k in range(max(images.names, default=-1) + 1)]
        positive = int(positive) if positive.isdecimal() else min(class_numbers([positive], known))
    points: list[ContrastPoint] = []
    for share in strengths:
        place = None if out is None else Path(out) / f"strength-{round(100 * share):03d}"
        report = None if progress is None else partial(progress, share)
        pair = make_pair(
            model, images.images, images.labels, token, positive, share, seed, place, report, ids=images.ids,
            carriers=carriers, epochs=epochs, lr=lr,
        )  # fmt: skip
        heard = report and partial(report, "maps")
        scores = _scores(pair, methods, layer, place, heard) if pair.holds else {}
        if not points:
            examples = pixels(pair.images[:SHOWN], model.preprocess)
        points.append(ContrastPoint(share, pair.planting, pair.epochs, scores))
    return Contrast(
        model.name, token, images.names.get(pair.positive, f"class {pair.positive}"), tuple(points),
        tuple(map(Image.fromarray, examples)), images.failures,
    )  # fmt: skip


def labelled(
    model: Model, pictures: str | Path | Tensor, labels: ArrayLike | None = None, **options: Any
) -> Labelled:
    """Labelled images of a folder, with options of its source (images/file_sources.py), or of tensors."""
    if not isinstance(pictures, (str, Path)):
        if labels is None:
            raise InputError("tensors need labels, one class number per image; or name a folder of classes")
        images = model.check_images(pictures)
        names = dict(enumerate(model.classes or ()))
        return Labelled(images, as_tensor(labels), tuple(map(str, range(len(images)))), names)
    source = open_source("folder", pictures, **options)
    if not source.labelled:
        raise InputError(f"{pictures} has no class folders; put the images of each class into a separate one")
    model.check_channels()
    loaded = list(batches(source, model.preprocess, 64))
    images = torch.cat([batch.images for batch, _ in loaded])
    classes = [int(label) for batch, _ in loaded if batch.labels is not None for label in batch.labels]
    with refusal_in_a_sentence(model, images[:1]):
        count = max(2, model.logits(images[:1]).shape[1])
    named, used = dict(enumerate(source.classes)), set(classes)
    numbers = model_classes(named, used, model.classes, count, model.name)
    return Labelled(
        images, torch.tensor([numbers[label] for label in classes]),
        tuple(name for batch, _ in loaded for name in batch.ids), {numbers[k]: named[k] for k in used},
        tuple(failure for _, failed in loaded for failure in failed),
    )  # fmt: skip


def _scores(
    pair: Pair, methods: str | Sequence[str], layer: str | Sequence[str] | None, place: Path | None,
    progress: Callable[[int], Any] | None,
) -> dict[str, ContrastScore]:  # fmt: skip
    """Scores of a pair; stored ones are read, and only missing methods are computed."""
    wanted = [request.text for request in read_methods(methods)]
    known = {} if place is None else _stored(place, layer, pair.seed)
    missing = [method for method in wanted if method not in known]
    if missing or not known:
        known |= contrast_scores(pair, missing or wanted, layer=layer, progress=progress)
        if place is not None:
            _store(place, layer, known)
    return {method: known[method] for method in (*wanted, TOKEN_REMOVED)}


def _store(place: Path, layer: Any, scores: Mapping[str, ContrastScore]) -> None:
    rows = {m: {"a": s.a.tolist(), "b": s.b.tolist(), "blank": s.blank} for m, s in scores.items()}
    maps = {f"{m}/{ab}": of for m, s in scores.items() for ab, of in zip("ab", s.maps, strict=False)}

    def write_maps(path: Path) -> None:
        with path.open("wb") as file:  # savez would add .npz to the name
            np.savez_compressed(file, allow_pickle=False, **maps)

    content = json.dumps({"layer": layer, "methods": rows}, indent=1)
    write_whole({place / "maps.npz": write_maps, place / "scores.json": content})


def _stored(place: Path, layer: Any, seed: int) -> dict[str, ContrastScore]:
    path = place / "scores.json"
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["layer"] != json.loads(json.dumps(layer)):
            return {}
        with np.load(place / "maps.npz") as maps:
            return {
                m: ContrastScore(
                    m, np.array(row["a"]), np.array(row["b"]), tuple(row["blank"]),
                    tuple(maps[f"{m}/{which}"] for which in "ab" if f"{m}/{which}" in maps), seed,
                )
                for m, row in content["methods"].items()
            }  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"cannot read {path} ({error}); remove {place} to compute it anew") from error
