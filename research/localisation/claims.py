"""Claims of the thesis, each a number per network with a 95 % interval over photographs.

Means are means of class means, with the stratified bootstrap of heatproof's localisation study; differences
of methods are paired by photograph. Right and wrong predictions are compared by plain means of photographs,
because few classes have both. A claim holds for a network if the whole interval is above the limit.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from heatproof.metrics.results import percentile_interval, resample
from heatproof.report.tables import Value
from heatproof.studies.localise.images import GROUPS
from heatproof.studies.localise.results import macro_value
from research.localisation.measure import NETWORKS, SAMPLES, SEGMENTS

Column = Mapping[int, float]  # by photograph
METRICS = ("mask_iou", "box_iou", "inside", "pointing", "insertion", "deletion")
TITLES = dict(
    zip(METRICS, ("mask IoU", "box IoU", "inside", "pointing", "insertion", "deletion"), strict=True)
)
USUAL = (SEGMENTS, SAMPLES)
CONFIDENT = 0.5  # probability of the true class
DIGITS = 9  # so that differences of the last bits between machines do not change a rounded number


def in_group(label: int, group: str) -> bool:
    """Whether a class of ImageNet is in a group, such as "living things"."""
    return any(low <= label <= high for low, high in GROUPS["imagenet"][group])


@dataclass
class Network:
    """Everything that was measured with one network."""

    name: str
    photographs: dict[int, dict[str, float]] = field(default_factory=dict)
    scores: dict[str, dict[int, dict[str, float]]] = field(default_factory=dict)  # by method and photograph
    lime: dict[tuple[int, int], dict[int, dict[str, float]]] = field(default_factory=dict)

    @cached_property
    def filtered(self) -> list[int]:
        return [image for image, row in self.photographs.items() if row["filtered"]]

    def label(self, image: int) -> int:
        return int(self.photographs[image]["label"])

    def right(self, image: int) -> bool:
        return self.label(image) == self.photographs[image]["predicted"]

    def of_group(self, group: str) -> list[int]:
        return [image for image in self.filtered if in_group(self.label(image), group)]

    def column(self, method: str, metric: str, images: Iterable[int] | None = None) -> dict[int, float]:
        """A metric of the filtered photographs, or of those named."""
        key = "mask_iou_20" if metric == "mask_iou" else metric
        own = self.scores[method]
        return {i: own[i][key] for i in (self.filtered if images is None else images) if i in own}

    def ahead(
        self, first: str, second: str, metric: str, images: Iterable[int] | None = None
    ) -> dict[int, float]:
        """How much better the first method is, by photograph."""
        sign = -1 if metric == "deletion" else 1
        these, those = (self.column(method, metric, images) for method in (first, second))
        return {image: sign * (these[image] - those[image]) for image in these}

    def by_class(self, column: Column) -> dict[int, list[float]]:
        classes: dict[int, list[float]] = {}
        for image, value in sorted(column.items()):
            classes.setdefault(self.label(image), []).append(value)
        return dict(sorted(classes.items()))

    def mean(self, column: Column) -> Value:
        """Mean of class means with its interval."""
        return _rounded(macro_value(self.by_class(column)))

    def variant(self, key: str, of: tuple[int, int]) -> dict[int, float]:
        """A column of one form of LIME."""
        return {image: row[key] for image, row in self.lime.get(of, {}).items()}

    def variants_apart(self, key: str, first: tuple[int, int], second: tuple[int, int]) -> Value:
        those = self.variant(key, second)
        return self.mean({i: v - those[i] for i, v in self.variant(key, first).items() if i in those})


def apart(first: Iterable[float], second: Iterable[float]) -> Value:
    """Difference of the means of two groups of photographs; no interval if one has fewer than two."""
    groups = [np.array([v for v in own if not math.isnan(v)]) for own in (first, second)]
    n = sum(map(len, groups))
    if min(map(len, groups)) < 2:
        return Value(math.nan, None, n)
    draws = [own[resample(len(own), seed=seed)].mean(1) for seed, own in enumerate(groups)]
    value = float(groups[0].mean() - groups[1].mean())
    return _rounded(Value(value, percentile_interval(draws[0] - draws[1]), n))


def _rounded(value: Value) -> Value:
    interval = value.interval and (round(value.interval[0], DIGITS), round(value.interval[1], DIGITS))
    return Value(round(value.value, DIGITS), interval, value.n)


def _ahead(metric: str) -> Callable[[Network], Value]:
    return lambda network: network.mean(network.ahead("gradcam", "lime", metric))


def _lime_on_living_things(metric: str) -> Callable[[Network], Value]:
    return lambda network: network.mean(
        network.ahead("lime", "gradcam", metric, network.of_group("living things"))
    )


def _box_above_mask(method: str) -> Callable[[Network], Value]:
    def number(network: Network) -> Value:
        mask = network.column(method, "mask_iou")
        return network.mean({i: v - mask[i] for i, v in network.column(method, "box_iou").items()})

    return number


def _pointing(method: str) -> Callable[[Network], Value]:
    return lambda network: network.mean(network.column(method, "pointing"))


def _sides(network: Network, column: Column, first: Callable[[int], bool]) -> Value:
    return apart(*([v for i, v in column.items() if first(i) == side] for side in (True, False)))


def _right_against_wrong(method: str) -> Callable[[Network], Value]:
    return lambda network: _sides(network, network.column(method, "inside"), network.right)


def _dispersion(network: Network) -> Value:
    return _sides(network, network.column("gradcam", "dispersion"),
                  lambda i: network.photographs[i]["probability"] < CONFIDENT)  # fmt: skip


def _lime_where_wrong(network: Network) -> Value:
    wrong = [image for image in network.filtered if not network.right(image)]
    return network.mean(network.ahead("lime", "random", "inside", wrong))


def _agreement(network: Network) -> Value:
    return _sides(network, {i: network.photographs[i]["overlap"] for i in network.filtered}, network.right)


@dataclass(frozen=True)
class Claim:
    """A claim: where it is in the thesis, its number there, and the number of a network."""

    where: str
    text: str
    published: str
    measured: str  # what the number is
    number: Callable[[Network], Value]
    limit: float = 0.0


SEEN = "by eye, no number"
CLAIMS = (
    Claim("Table 2", "Grad-CAM has a higher mask IoU than LIME", "0.087", "Grad-CAM less LIME",
          _ahead("mask_iou")),
    Claim("Table 2", "Grad-CAM has a higher box IoU than LIME", "0.039", "Grad-CAM less LIME",
          _ahead("box_iou")),
    Claim("Table 2", "Grad-CAM is better in the pointing game", "0.114", "Grad-CAM less LIME",
          _ahead("pointing")),
    Claim("Table 3", "Grad-CAM has the lower deletion", "0.049", "LIME less Grad-CAM", _ahead("deletion")),
    Claim("Table 3", "Grad-CAM has the higher insertion", "0.041", "Grad-CAM less LIME",
          _ahead("insertion")),
    Claim("5.3.2", "On living things LIME has the higher box IoU", "0.008; higher in 11 of 17 classes",
          "LIME less Grad-CAM", _lime_on_living_things("box_iou")),
    Claim("5.3.2", "On living things LIME has the higher mask IoU",
          "stated for IoU in general; its Table 2 has -0.070 and 0 of 17 classes", "LIME less Grad-CAM",
          _lime_on_living_things("mask_iou")),
    Claim("5.3.1", "Box IoU of Grad-CAM is above its mask IoU", "0.217", "difference",
          _box_above_mask("gradcam")),
    Claim("5.3.1", "Box IoU of LIME is above its mask IoU", "0.265", "difference", _box_above_mask("lime")),
    Claim("6, 7", "Grad-CAM focuses on the correct region in most photographs", "0.973", "pointing game",
          _pointing("gradcam"), 0.5),
    Claim("6, 7", "LIME focuses on the correct region in most photographs", "0.859", "pointing game",
          _pointing("lime"), 0.5),
    Claim("6", "Grad-CAM is more fragmented where the network is not confident", SEEN,
          "dispersion where the true class has a probability below 0.5, less elsewhere", _dispersion),
    Claim("6", "Grad-CAM localises worse where the prediction is wrong", SEEN,
          "inside where it is right, less where it is wrong", _right_against_wrong("gradcam")),
    Claim("6", "LIME may focus on the object where the prediction is wrong", SEEN,
          "inside of LIME less that of random pixels, wrong predictions", _lime_where_wrong),
    Claim("6", "LIME's stability depends on the number of segments", SEEN,
          "overlap of two seeds with 30 segments less that with 300",
          lambda n: n.variants_apart("overlap", (30, SAMPLES), (300, SAMPLES))),
    Claim("6", "LIME's stability depends on the number of samples", SEEN,
          "overlap of two seeds with 1,000 samples less that with 250",
          lambda n: n.variants_apart("overlap", USUAL, (SEGMENTS, 250))),
    Claim("3.2.2", "30 segments are too few for LIME", SEEN, "mask IoU with 100 less that with 30",
          lambda n: n.variants_apart("mask_iou", USUAL, (30, SAMPLES))),
    Claim("3.2.2", "300 segments are too many for LIME", SEEN, "mask IoU with 100 less that with 300",
          lambda n: n.variants_apart("mask_iou", USUAL, (300, SAMPLES))),
    Claim("7", "Predictions on which both methods agree deserve more trust", SEEN,
          "share of pixels that Grad-CAM and LIME have in common: right less wrong", _agreement),
)  # fmt: skip


def read_networks(folder: Path) -> list[Network]:
    """The networks of the CSV files, in the order of the plan."""
    networks = {name: Network(name) for name in NETWORKS}
    for row in _read(folder / "photographs.csv"):
        networks[row["network"]].photographs[int(row["image"])] = _numbers(row)
    for row in _read(folder / "scores.csv"):
        own = networks[row["network"]].scores.setdefault(row["method"], {})
        own[int(row["image"])] = _numbers(row)
    for row in _read(folder / "lime.csv"):
        form = int(row["segments"]), int(row["samples"])
        own = networks[row["network"]].lime.setdefault(form, {})
        own[int(row["image"])] = _numbers(row)
    return [network for network in networks.values() if network.filtered]


def _read(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _numbers(row: Mapping[str, str]) -> dict[str, float]:
    return {key: float(text) for key, text in row.items() if key not in ("network", "method")}
