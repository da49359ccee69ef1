"""The rows of a localisation run, by method and metric, and the means a table shows of them.

A class mean is the mean over its images; the mean of a table is the mean of class means (macro mean), so that
every class counts the same. Its 95 % interval is a bootstrap over images (1,000 resamples, seeded): images
are drawn with replacement from all of them, and the macro mean is taken over the classes that were drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from heatproof.explain.api import read_methods
from heatproof.metrics import macro_mean
from heatproof.metrics.localisation import BUDGETS
from heatproof.metrics.stats import percentile_interval, resample
from heatproof.report.tables import Value
from heatproof.store import RunFolder

FLOORS = ("random", "edges", "centre")
READ = ("image", "label", "explained", "method", "metric", "value", "reason")
DEFAULT_BUDGET = 0.2  # its rows bear the metric's plain name
ByClass = Mapping[int, Sequence[float]]  # the values of a class's images, NaN where not defined


@dataclass(frozen=True)
class Scored:
    """Everything a run says, without its maps."""

    checkpoint: str
    methods: tuple[str, ...]
    classes: tuple[str, ...]
    budget: float
    faithfulness: tuple[str, str]  # how the rows name insertion and deletion
    labels: dict[str, int] = field(default_factory=dict)
    explained: dict[str, int] = field(default_factory=dict)
    predicted: dict[str, int] = field(default_factory=dict)
    chances: dict[tuple[str, int], float] = field(default_factory=dict)  # (image, class) -> probability
    values: dict[tuple[str, str], dict[str, float]] = field(
        default_factory=dict
    )  # (method, metric) -> image ->
    broken: dict[str, str] = field(default_factory=dict)  # image -> reason

    @property
    def images(self) -> list[str]:
        return list(self.predicted)

    @property
    def real_methods(self) -> list[str]:
        """Those that look at the model."""
        return [method for method in self.methods if entry_name(method) not in FLOORS]

    def column(self, method: str, metric: str, budget: float | None = None) -> dict[str, float]:
        """A metric of every image; localisation at the study's budget unless another is named."""
        return self.values.get((method, self.row_name(metric, budget)), {})

    def row_name(self, metric: str, budget: float | None = None) -> str:
        area, _, point = metric.partition("_at_")
        if area in ("insertion", "deletion"):
            name = self.faithfulness[area == "deletion"]
            return f"{area}_at_{point}{name[len(area) :]}" if point else name
        return at_budget(metric, budget or self.budget) if metric != "degenerate" else metric

    def by_class(self, column: Mapping[str, float]) -> dict[int, list[float]]:
        groups: dict[int, list[float]] = {label: [] for label in sorted(set(self.labels.values()))}
        for image, value in column.items():
            groups[self.labels[image]].append(value)
        return {label: values for label, values in groups.items() if values}

    def recall(self) -> dict[int, list[float]]:
        """1 for each image whose own class is predicted, else 0."""
        return self.by_class({i: float(c == self.labels[i]) for i, c in self.predicted.items()})

    def macro(self, method: str, metric: str, budget: float | None = None, seed: int = 0) -> Value:
        return macro_value(self.by_class(self.column(method, metric, budget)), seed)

    def class_name(self, label: int) -> str:
        return self.classes[label] if label < len(self.classes) else f"class {label}"

    def curve(self, method: str, kind: str, image: str) -> list[float]:
        """The 11 kept points of an image's insertion or deletion curve."""
        return [self.column(method, f"{kind}_at_{p}").get(image, math.nan) for p in range(0, 101, 10)]


def at_budget(metric: str, budget: float) -> str:
    """How the run names a metric of localise at a budget.

    >>> at_budget("inside", 0.2), at_budget("inside", 0.05)
    ('inside', 'inside(budget=0.05)')
    """
    return metric if budget == DEFAULT_BUDGET else f"{metric}(budget={budget!r})"


def budgets_of(budget: float) -> list[float]:
    return sorted({*BUDGETS, budget})


def entry_name(method: str) -> str:
    """The registered name of a method written with options.

    >>> entry_name("lime(samples=200)")
    'lime'
    """
    return read_methods([method])[0].entry.name


def read_scores(folder: RunFolder, budget: float) -> Scored:
    """The scores of a run's only checkpoint."""
    config = folder.manifest.config
    named = {m.partition("(")[0]: m for m in config["metrics"]}
    scored = Scored(
        checkpoint=next(iter(folder.manifest.models)),
        methods=tuple(config["methods"]),
        classes=tuple(folder.manifest.classes),
        budget=budget,
        faithfulness=(named["insertion"], named["deletion"]),
    )
    rows = folder.scores().columns(f"select {', '.join(READ)} from scores where image <> '' order by image")
    columns = (rows[name].tolist() for name in READ)
    for image, label, explained, method, metric, value, reason in zip(*columns, strict=True):
        if metric == "image":
            scored.broken[image] = reason
            continue
        scored.labels[image] = label
        if metric == "predicted" and math.isnan(value):
            scored.broken[image] = reason
        elif metric == "predicted":
            scored.predicted[image] = int(value)
        elif metric == "probability":
            scored.chances[image, explained] = value
        else:
            scored.explained[image] = explained
            scored.values.setdefault((method, metric), {})[image] = value
    return scored


def class_value(values: Sequence[float], seed: int = 0) -> Value:
    """The mean of a class's images; an interval needs two."""
    return macro_value({0: values}, seed)


def macro_value(groups: ByClass, seed: int = 0, resamples: int = 1000) -> Value:
    """The mean of class means with its interval; n counts the images behind it."""
    flat = [(value, label) for label, values in groups.items() for value in values]
    if not flat:
        return Value(math.nan, None, 0)
    found = macro_mean([value for value, _ in flat], [label for _, label in flat])
    known = [(value, label) for value, label in flat if not math.isnan(value)]
    if len(known) < 2:
        return Value(found.value, None, len(known))
    return Value(found.value, _interval(known, seed, resamples), len(known))


def _interval(known: Sequence[tuple[float, int]], seed: int, resamples: int) -> tuple[float, float]:
    values, labels = np.array([value for value, _ in known]), np.array([label for _, label in known])
    numbers = np.unique(labels, return_inverse=True)[1]
    drawn = resample(len(values), resamples, seed)
    # Sums and sizes of every class in every resample, in one pass: places are resample x class laid flat.
    classes = int(numbers.max()) + 1
    places = (np.arange(resamples)[:, None] * classes + numbers[drawn]).ravel()
    sums = np.bincount(places, values[drawn].ravel(), resamples * classes).reshape(resamples, classes)
    sizes = np.bincount(places, minlength=resamples * classes).reshape(resamples, classes)
    means = np.divide(sums, sizes, out=np.zeros_like(sums), where=sizes > 0)
    return percentile_interval(means.sum(1) / (sizes > 0).sum(1))
