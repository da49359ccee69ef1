"""Whole-image properties that predict the class, tested on a dataset before any network is trained.

For each property (metrics/properties.py) the class of every image is predicted from the NEIGHBOURS other
images whose property is most similar, each vote divided by the size of its class. The image itself is held
out, and of near-duplicates one image is used. The control repeats this with permuted labels; p values are
Holm-corrected over the properties.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from scipy.spatial import cKDTree
from scipy.stats import rankdata

from heatproof.disk import output_path, write_whole
from heatproof.errors import InputError, counted
from heatproof.images.duplicates import MOST, SIDE, near_duplicates
from heatproof.images.files import is_picture, quantisation
from heatproof.images.source import Source, draw
from heatproof.metrics.properties import measured
from heatproof.report.pieces import Grid, html_page, named, number
from heatproof.verdict.follow import LEVEL, holm

SCHEMA = "heatproof-data-check-1"
NEIGHBOURS, LEAST = 9, 10  # votes for an image; images of a class, of which smaller ones are left out
PERMUTATIONS, AT_ONCE = 999, 50
EXAMPLES, LARGEST = 5, 160  # images of either side of a page, and their pixels
THREADS = 4


@dataclass(frozen=True, eq=False)
class PropertyScore:
    """How well one property predicts the class of held-out images."""

    name: str
    accuracy: float  # mean recall of the classes
    control: float  # the same with permuted labels: mean,
    control_high: float  # and the value that 5 % of the permutations exceed
    p: float  # Holm-corrected
    class_name: str  # the class with the highest recall,
    recall: float  # which is this
    typical: tuple[np.ndarray, ...] = ()  # images of this class that the property identifies best
    others: tuple[np.ndarray, ...] = ()  # images of other classes that differ most from them

    @property
    def predicts(self) -> bool:
        return self.p < LEVEL

    def __str__(self) -> str:
        return (
            f"{self.name}: balanced accuracy {self.accuracy:.2f} on held-out images, {self.control:.2f} with "
            f"permuted labels (p = {self.p:.3f}); recall of '{self.class_name}' {self.recall:.2f}"
        )


@dataclass(frozen=True, eq=False)
class DataCheck:
    """Properties of a dataset, the best predictor of the class first."""

    properties: tuple[PropertyScore, ...]
    classes: tuple[str, ...]  # those with enough images
    n: int  # images tested
    duplicates: int = 0  # near-duplicates left out
    broken: tuple[dict[str, str], ...] = ()  # images that cannot be read, with the reason

    @property
    def named(self) -> list[PropertyScore]:
        """Properties that surely predict the class."""
        return [score for score in self.properties if score.predicts]

    @property
    def headline(self) -> str:
        tested = f"{len(self.properties)} properties tested on {counted(self.n, 'image')}"
        if not self.named:
            return f"No whole-image property predicts the class ({tested})"
        best, rest = "; ".join(s.name for s in self.named[:3]), len(self.named) - 3
        return f"The class can be predicted from {best}{f' and {rest} more' * (rest > 0)} ({tested})"

    def __str__(self) -> str:
        return "\n".join([f"{self.headline}.", *(f"  {score}" for score in self.named)])

    def as_json(self) -> dict[str, Any]:
        """The content of data.json."""
        own = {k: v for k, v in vars(self).items() if k != "properties"}
        images = ("typical", "others")
        scores = [{k: v for k, v in vars(s).items() if k not in images} for s in self.properties]
        names = [score.name for score in self.named]
        return {"schema": SCHEMA, "headline": self.headline, "named": names, **own, "properties": scores}

    def report(self, path: str | Path = "data.html") -> Path:
        """Write the page, one HTML file, and data.json beside it.

        Args:
            path: of the page.
        """
        path = output_path(path)
        rows = [
            [named(s.name), number(s.accuracy), number(s.control), number(s.control_high), number(s.p),
             named(s.class_name), number(s.recall)]
            for s in self.properties
        ]  # fmt: skip
        heads = ["Property", "Balanced accuracy", "Permuted labels", "95 % of them below", "p", "Class",
                 "Recall"]  # fmt: skip
        content = {"this": self, "numbers": Grid(heads, rows, "Every property")}
        record = json.dumps(self.as_json(), indent=1, ensure_ascii=False, allow_nan=False)
        page = html_page("data_check", content).encode("utf-8", errors="replace")
        write_whole({path: page, path.with_suffix(".json"): record})
        return path


def check_data(source: Source, limit: int | None = None, seed: int = 0) -> DataCheck:
    """Test which properties predict the class. limit: images to read, at most; MOST by default."""
    if source.is_multilabel or not source.labelled:
        raise InputError("the check needs one class per image: a folder per class, or a CSV column label")
    indices = np.array(draw([sample.label for sample in source.samples], limit or MOST, seed))
    np.random.default_rng(seed).shuffle(indices)  # equal neighbours must not be of one class
    with ThreadPoolExecutor(THREADS) as pool:
        read = list(pool.map(lambda i: _read(source, i), indices.tolist()))
    broken, usable = [], []
    for i, entry in zip(indices.tolist(), read, strict=True):
        if isinstance(entry, str):
            broken.append({"image": source.sample(i).id, "reason": entry})
        else:
            usable.append((i, *entry))
    if not usable:
        raise InputError(f"no image could be read, the first because {broken[0]['reason']}; check the files")
    group = near_duplicates(np.stack([thumbnail for _, _, thumbnail in usable]))
    single = [entry for k, entry in enumerate(usable) if group[k] == k]
    of_all = np.array([source.sample(i).label for i, *_ in single])
    large = [c for c, n in zip(*np.unique(of_all, return_counts=True), strict=True) if n >= LEAST]
    if len(large) < 2:
        raise InputError(
            f"the check needs two classes with {LEAST} different images each, and there are {len(large)}; "
            "name a folder with more images"
        )
    rows = [entry for entry, label in zip(single, of_all, strict=True) if label in large]
    labels = np.searchsorted(large, of_all[np.isin(of_all, large)]).astype(np.int16)
    classes = tuple(source.classes[c] for c in large)
    scored = []
    for name in rows[0][1]:
        features = np.array([numbers[name] for _, numbers, _ in rows])
        if np.ptp(features, axis=0).any():
            scored.append(_score(name, features, labels, classes, seed))
    corrected = holm({score.name: score.p for score, _ in scored})
    scores = []
    for score, examples in scored:
        score = replace(score, p=corrected[score.name])
        if score.predicts:
            typical, others = (tuple(_thumbnail(source, rows[k][0]) for k in side) for side in examples)
            score = replace(score, typical=typical, others=others)
        scores.append(score)
    scores.sort(key=lambda score: (score.p, -round(score.accuracy, 2)))
    return DataCheck(tuple(scores), classes, len(rows), len(usable) - len(single), tuple(broken))


def _read(source: Source, i: int) -> tuple[dict[str, tuple[float, ...]], np.ndarray] | str:
    """Properties and thumbnail of an image; the reason if it cannot be read."""
    try:
        image = source.open(i)
    except InputError as error:
        return str(error)
    if not isinstance(image, Image.Image):
        raise InputError("the check reads images, not volumes or arrays of channels")
    image, content = image.convert("RGB"), source.sample(i).content
    is_file = isinstance(content, Path) and is_picture(content)
    numbers = measured(image) | {"compression": quantisation(content) if is_file else (0.0, 0.0)}
    return numbers, np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BOX))


def _score(
    name: str, features: np.ndarray, labels: np.ndarray, classes: Sequence[str], seed: int
) -> tuple[PropertyScore, list[list[int]]]:
    """The result for one property, its p value not yet corrected, and the places of its examples."""
    ranks = rankdata(features, axis=0) / len(features)
    nearest = cKDTree(ranks).query(ranks, k=min(NEIGHBOURS + 1, len(ranks)))[1]
    own = nearest == np.arange(len(ranks))[:, None]
    own[~own.any(1), -1] = True  # many equal images: the image itself is not among the nearest
    nearest = nearest[~own].reshape(len(ranks), -1)
    counts = np.bincount(labels)

    def hits(given: np.ndarray) -> np.ndarray:
        """Whether each image gets its label, "b n", for labels "b n"."""
        votes = given[:, nearest]
        support = (votes[..., None] == votes[..., None, :]).sum(-1, dtype=np.int8) / counts[votes]
        best = np.take_along_axis(votes, support.argmax(-1)[..., None], -1)[..., 0]
        return np.asarray(best == given)

    def accuracies(given: np.ndarray) -> np.ndarray:
        return np.asarray((hits(given) / counts[given]).sum(1) / len(counts))

    random, blocks = np.random.default_rng((seed, 1)), range(0, PERMUTATIONS, AT_ONCE)
    sizes = (min(AT_ONCE, PERMUTATIONS - start) for start in blocks)
    permuted = (random.permuted(np.tile(labels, (size, 1)), axis=1) for size in sizes)
    control, accuracy = np.concatenate([*map(accuracies, permuted)]), float(accuracies(labels[None])[0])
    recall = np.bincount(labels, hits(labels[None])[0]) / counts
    best = int(recall.argmax())
    share, extreme, is_best = (labels[nearest] == best).mean(1), np.abs(ranks - 0.5).sum(1), labels == best
    examples = [
        [i for i in np.lexsort((-extreme, sign * share)).tolist() if is_best[i] == is_class][:EXAMPLES]
        for sign, is_class in ((-1, True), (1, False))
    ]
    p = (1 + int((control >= accuracy - 1e-9).sum())) / (1 + PERMUTATIONS)
    numbers = accuracy, float(control.mean()), float(np.quantile(control, 0.95)), p
    return PropertyScore(name, *numbers, classes[best], float(recall[best])), examples


def _thumbnail(source: Source, i: int) -> np.ndarray:
    image = source.open(i)
    assert isinstance(image, Image.Image)  # as _read checked
    image = image.convert("RGB")
    image.thumbnail((LARGEST, LARGEST))
    return np.asarray(image)
