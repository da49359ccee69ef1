"""The rows of a localisation run by method and metric, the means a table shows of them, the flags they raise.

A class mean is the mean over its images; the mean of a table is the mean of class means (macro mean), so that
every class counts the same. Its 95 % interval is a stratified bootstrap (1,000 resamples, seeded):
images are drawn with replacement within each class, so that every resample holds every class. A resample of n
images varies too little by a factor of (n - 1) / n: deviations from the class mean are scaled by the root of
n / (n - 1). A class with one image takes the deviations of all other classes.

A flag is what the thesis finds by eye in its case studies, found by rule. It asks for a look and proves
nothing.

hit but unfaithful        the map's maximum lies in the box, but showing its pixels first does not bring the
                          class back: the map sits on the object for another reason than the model's
faithful but off-object   showing its pixels first brings the class back, but they lie beside the object: the
                          model reads the surroundings (the thesis's flames, containers, V-shaped horizons)
confident and wrong       another class gets more than half of the probability
rising deletion           taking the map's best pixels away makes the class more likely: they spoke against it
methods disagree          the methods' best pixels overlap no more than random ones would

keak2026budget describes these by words and pictures; the thresholds are ours, and each has its reason below.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import NamedTuple

import numpy as np

from heatproof.explain.floors import is_floor
from heatproof.metrics.localisation import BUDGETS, budget_masks, mask_overlap
from heatproof.metrics.stats import percentile_interval
from heatproof.report.tables import Value
from heatproof.store import RunFolder
from heatproof.studies.localise.settings import FlagThresholds
from heatproof.types import Maps

READ = ("image", "label", "explained", "method", "metric", "value", "reason")
DEFAULT_BUDGET = 0.2  # its rows bear the metric's plain name
HIT, OFF = "hit but unfaithful", "faithful but off-object"
WRONG, RISING, DISAGREE = "confident and wrong", "rising deletion", "methods disagree"
OF_A_METHOD = (HIT, OFF, RISING)  # the others are of an image
REASONS = {
    HIT: "pointing hit, insertion AUC below {low_insertion:g}: half of what the thesis's two methods reach "
    "on average",
    OFF: "insertion AUC of at least {high_insertion:g}, about the thesis's mean; less than {off_object:.0%} "
    "of the part of the budget that fits into the box lies in it: most of it could, and does not",
    WRONG: "the predicted class is wrong and has more than {confident:.0%} of the probability: more than all "
    "others together; the thesis calls less than that low confidence",
    RISING: "some point of the deletion curve is {rise:g} or more above its start: a tenth of the scale, so "
    "that a wobble does not count",
    DISAGREE: "two methods share on average at most {overlap:.0%} of their kept pixels: what two random "
    "choices share",
}
KINDS = tuple(REASONS)
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
    # (method, metric) -> image ->
    values: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)  # image -> reason
    seed: int = 0  # of the intervals

    @property
    def images(self) -> list[str]:
        return list(self.predicted)

    @property
    def real_methods(self) -> list[str]:
        """Those that look at the model."""
        return [method for method in self.methods if not is_floor(method)]

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

    def macro(self, method: str, metric: str, budget: float | None = None) -> Value:
        return macro_value(self.by_class(self.column(method, metric, budget)), self.seed)

    def mean_recall(self) -> float:
        return macro_value(self.recall(), self.seed).value

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


def read_scores(folder: RunFolder, budget: float, seed: int = 0) -> Scored:
    """The scores of a run's only checkpoint."""
    config = folder.manifest.config
    named = {m.partition("(")[0]: m for m in config["metrics"]}
    scored = Scored(
        checkpoint=next(iter(folder.manifest.models)),
        methods=tuple(config["methods"]),
        classes=tuple(folder.manifest.classes),
        budget=budget,
        faithfulness=(named["insertion"], named["deletion"]),
        seed=seed,
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


def macro_value(groups: ByClass, seed: int = 0, resamples: int = 1000) -> Value:
    """The mean of class means with its interval; n counts the images behind it.

    No interval where no class has two images.
    """
    known = {label: np.asarray(v)[~np.isnan(v)] for label, v in groups.items()}
    classes = [values for values in known.values() if len(values)]
    n = sum(map(len, classes))
    if not n:
        return Value(math.nan, None, 0)
    means = [math.fsum(values) / len(values) for values in classes]
    value = math.fsum(means) / len(means)
    spreads = [math.sqrt(len(v) / max(len(v) - 1, 1)) * (v - v.mean()) for v in classes]
    pooled = np.concatenate([spread for spread in spreads if len(spread) > 1] or [[]])
    if not len(pooled):
        return Value(value, None, n)
    draws = np.full(resamples, value)
    for i, spread in enumerate(spreads):
        source = spread if len(spread) > 1 else pooled
        places = np.random.default_rng((seed, i)).integers(0, len(source), (resamples, len(spread)))
        draws += source[places].mean(1) / len(classes)
    every = np.concatenate(classes)
    low, high = np.clip(percentile_interval(draws), every.min(), every.max()).tolist()
    return Value(value, (low, high), n)


class Flag(NamedTuple):
    """One rule that one image broke; severity is how far, to show the worst first."""

    kind: str
    image: str
    method: str  # "" for what concerns the image alone
    severity: float
    why: str


def raise_flags(scored: Scored, overlaps: Mapping[str, float], limits: FlagThresholds) -> list[Flag]:
    """Every flag of a run, by kind, the worst first. Floors raise none: they do not look at the model."""
    chance = scored.budget if limits.overlap is None else limits.overlap
    found: list[Flag] = []
    for image in scored.images:
        found += _confident_and_wrong(scored, image, limits)
        for method in scored.real_methods:
            found += _of_method(scored, image, method, limits)
        overlap = overlaps.get(image, math.nan)
        if overlap <= chance:
            why = f"methods share {overlap:.0%} of their pixels"
            found.append(Flag(DISAGREE, image, "", chance - overlap, why))
    return sorted(found, key=lambda f: (KINDS.index(f.kind), -f.severity, f.image, f.method))


def _confident_and_wrong(scored: Scored, image: str, limits: FlagThresholds) -> Iterator[Flag]:
    guess, label = scored.predicted[image], scored.labels[image]
    chance = scored.chances.get((image, guess), math.nan)
    if guess != label and chance > limits.confident:
        own = scored.chances.get((image, label), math.nan)
        why = f"{scored.class_name(guess)} with {chance:.0%}, true class {own:.0%}"
        yield Flag(WRONG, image, "", chance, why)


def _of_method(scored: Scored, image: str, method: str, limits: FlagThresholds) -> Iterator[Flag]:
    def value(metric: str) -> float:
        return scored.column(method, metric).get(image, math.nan)

    insertion, inside = value("insertion"), value("inside")
    if value("pointing") == 1 and insertion < limits.low_insertion:
        why = f"pointing hit, insertion {insertion:.2f}"
        yield Flag(HIT, image, method, limits.low_insertion - insertion, why)
    fits = min(1.0, box_share(scored, method, image) / scored.budget)
    if insertion >= limits.high_insertion and inside < limits.off_object * fits:
        why = f"insertion {insertion:.2f}, {inside:.0%} of the budget in the box where {fits:.0%} would fit"
        yield Flag(OFF, image, method, limits.off_object * fits - inside, why)
    curve = scored.curve(method, "deletion", image)
    rise = max(curve) - curve[0]
    if rise >= limits.rise:
        yield Flag(RISING, image, method, rise, f"deletion rises from {curve[0]:.2f} to {max(curve):.2f}")


def box_share(scored: Scored, method: str, image: str) -> float:
    """The box's share of the crop, from the reachable mask IoU min(a, K) / max(a, K) at two budgets.

    Where it rises with K, a lies above the smaller one. Boxes in the crop may cover other shares than in the
    whole picture, which is what the filter looked at.
    """
    small, next_one = budgets_of(scored.budget)[:2]
    at_small, at_next = (
        scored.column(method, "reachable", k).get(image, math.nan) for k in (small, next_one)
    )
    return small / at_small if at_next > at_small else at_small * small


def find_flags(scored: Scored, folder: RunFolder, limits: FlagThresholds) -> list[Flag]:
    """Every flag of a run, from its rows and its maps."""
    return raise_flags(scored, stored_overlaps(scored, folder), limits)


def stored_overlaps(scored: Scored, folder: RunFolder) -> dict[str, float]:
    """How much the methods' kept pixels overlap on each image; nothing where there is one method."""
    store, methods = folder.maps(), scored.real_methods
    if len(methods) < 2:
        return {}
    ids = store.shared([(scored.checkpoint, method) for method in methods])
    overlaps: dict[str, float] = {}
    for start in range(0, len(ids), 64):
        some = ids[start : start + 64]
        maps = {method: store.read(scored.checkpoint, method, some) for method in methods}
        overlaps |= overlap_of_methods(maps, scored.budget)
    return overlaps


def overlap_of_methods(maps: Mapping[str, Maps], budget: float) -> dict[str, float]:
    """Per image, the mean over pairs of methods of the share of kept pixels they have in common.

    Constant maps keep no pixel that means anything and are left out; NaN where fewer than two are left.
    """
    kept = {method: budget_masks(one, budget).flatten(1) for method, one in maps.items()}
    shares: dict[str, list[float]] = {}
    for a, b in combinations(maps, 2):
        usable = ~(maps[a].degenerate | maps[b].degenerate)
        common = mask_overlap(kept[a], kept[b])
        for image, share, use in zip(maps[a].ids, common.tolist(), usable.tolist(), strict=True):
            shares.setdefault(image, []).extend([share] if use else [])
    return {image: sum(lot) / len(lot) if lot else math.nan for image, lot in shares.items()}
