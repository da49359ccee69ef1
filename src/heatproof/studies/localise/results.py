"""Results of a localisation run: its rows by method and metric, class means with intervals, orders, flags.

A class mean is the mean over its images; the mean of a table is the mean of class means (macro mean), so that
every class counts the same. Its 95 % interval is a stratified bootstrap (1,000 resamples, seeded):
images are drawn with replacement within each class, so that every resample holds every class. A resample of n
images varies too little by a factor of (n - 1) / n: deviations from the class mean are scaled by the root of
n / (n - 1). A class with one image takes the deviations of all other classes.

THESIS: published means of keak2026budget, tables 2 and 3, over 43 classes: ResNet-18 (timm resnet18.a1_in1k),
1,122 validation photographs with one box that covers 10 to 80 % of the image, top 20 % of the pixels, blur.
They belong to another network and other images. The text beside table 2 prints LIME's pointing score as
0.8951; the table, and its 43 classes, give 0.8591.

Shortcut flags are rules for what the thesis finds by eye in its case studies; a flag proves nothing.

hit but unfaithful        the map's maximum lies in the box, but showing its pixels first does not bring the
                          class back: the map sits on the object for another reason than the model's
faithful but off-object   showing its pixels first brings the class back, but they lie beside the object: the
                          model reads the surroundings (the thesis's flames, containers, V-shaped horizons)
confident and wrong       another class gets more than half of the probability
rising deletion           removing the map's best pixels makes the class more likely
methods disagree          the methods' best pixels overlap no more than random ones would

keak2026budget describes these in words and images; the thresholds are ours, with their reasons in REASONS.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from heatproof.explain.api import read_methods
from heatproof.explain.floors import is_floor
from heatproof.metrics.localisation import BUDGETS, budget_masks, mask_overlap
from heatproof.metrics.stats import percentile_interval
from heatproof.registry import call_text
from heatproof.report.tables import Value
from heatproof.store import RunFolder
from heatproof.studies.localise.settings import FlagThresholds, LocaliseSettings
from heatproof.types import Maps

READ = ("image", "label", "explained", "method", "metric", "value", "reason")
DEFAULT_BUDGET = 0.2  # its rows bear the metric's plain name
THESIS = {  # Grad-CAM, LIME
    "box_iou": (0.5922, 0.5532),
    "mask_iou": (0.3751, 0.2881),
    "pointing": (0.9728, 0.8591),
    "deletion": (0.1610, 0.2097),
    "insertion": (0.6369, 0.5957),
}
THESIS_RECALL = 0.7934
PAIR = ("gradcam", "lime")
TITLES = {
    "mask_iou": "Mask IoU",
    "box_iou": "Box IoU",
    "inside": "Inside share",
    "pointing": "Pointing game",
    "insertion": "Insertion AUC",
    "deletion": "Deletion AUC",
}
METRICS = tuple(TITLES)
LOCALISATION, FAITHFULNESS = METRICS[:4], METRICS[4:]
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
class LocaliseResults:
    """The rows of a run's only checkpoint, without its maps."""

    checkpoint: str
    methods: tuple[str, ...]
    classes: tuple[str, ...]
    budget: float
    faithfulness: tuple[str, str]  # names of insertion and deletion in the rows
    labels: dict[str, int] = field(default_factory=dict)
    explained: dict[str, int] = field(default_factory=dict)
    predicted: dict[str, int] = field(default_factory=dict)
    chances: dict[tuple[str, int], float] = field(default_factory=dict)  # (image, class) -> probability
    values: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)  # (method, metric) -> image
    broken: dict[str, str] = field(default_factory=dict)  # image -> reason
    seed: int = 0  # of the intervals

    @property
    def images(self) -> list[str]:
        return list(self.predicted)

    @property
    def real_methods(self) -> list[str]:
        """Methods other than floors, which do not look at the model."""
        return [method for method in self.methods if not is_floor(method)]

    def column(self, method: str, metric: str, budget: float | None = None) -> dict[str, float]:
        """A metric of every image; localisation at the study's budget unless another is named."""
        area, _, point = metric.partition("_at_")
        if area in FAITHFULNESS:
            name = self.faithfulness[area == "deletion"]
            name = f"{area}_at_{point}{name[len(area) :]}" if point else name
        else:
            name = metric if metric == "degenerate" else at_budget(metric, budget or self.budget)
        return self.values.get((method, name), {})

    def value(self, method: str, metric: str, image: str) -> float:
        return self.column(method, metric).get(image, math.nan)

    def by_class(self, column: Mapping[str, float]) -> dict[int, list[float]]:
        groups: dict[int, list[float]] = {label: [] for label in sorted(set(self.labels.values()))}
        for image, value in column.items():
            groups[self.labels[image]].append(value)
        return {label: values for label, values in groups.items() if values}

    def recall(self) -> dict[int, list[float]]:
        """By class: 1 for each image whose own class is predicted, else 0."""
        return self.by_class({i: float(c == self.labels[i]) for i, c in self.predicted.items()})

    def macro(self, method: str, metric: str, budget: float | None = None) -> Value:
        return macro_value(self.by_class(self.column(method, metric, budget)), self.seed)

    def constant_share(self, method: str) -> float:
        """Share of a method's maps that are constant."""
        constant = self.column(method, "degenerate")
        return sum(constant.values()) / max(1, len(constant))

    def class_name(self, label: int) -> str:
        return self.classes[label] if label < len(self.classes) else f"class {label}"

    def curve(self, method: str, kind: str, image: str) -> list[float]:
        """The 11 kept points of an image's insertion or deletion curve."""
        return [self.value(method, f"{kind}_at_{p}", image) for p in range(0, 101, 10)]


def at_budget(metric: str, budget: float) -> str:
    """The name of a localisation metric in the rows.

    >>> at_budget("inside", 0.2), at_budget("inside", 0.05)
    ('inside', 'inside(budget=0.05)')
    """
    return metric if budget == DEFAULT_BUDGET else f"{metric}(budget={budget!r})"


def budgets_of(budget: float) -> list[float]:
    return sorted({*BUDGETS, budget})


def read_scores(folder: RunFolder, budget: float, seed: int = 0) -> LocaliseResults:
    """The scores of a run's only checkpoint."""
    config = folder.manifest.config
    named = {m.partition("(")[0]: m for m in config["metrics"]}
    results = LocaliseResults(
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
            results.broken[image] = reason
            continue
        results.labels[image] = label
        if metric == "predicted" and math.isnan(value):
            results.broken[image] = reason
        elif metric == "predicted":
            results.predicted[image] = int(value)
        elif metric == "probability":
            results.chances[image, explained] = value
        else:
            results.explained[image] = explained
            results.values.setdefault((method, metric), {})[image] = value
    return results


def macro_value(groups: ByClass, seed: int = 0, resamples: int = 1000) -> Value:
    """The mean of class means with its interval; n counts the images behind it.

    No interval if no class has two images.
    """
    known = (np.asarray(v)[~np.isnan(v)] for v in groups.values())
    classes = [values for values in known if len(values)]
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


@dataclass(frozen=True)
class Order:
    """Which of Grad-CAM and LIME is better on one mean, with its certainty."""

    metric: str
    ours: tuple[Value, Value]
    difference: Value  # Grad-CAM minus LIME, image by image; positive: Grad-CAM is better

    @property
    def agrees(self) -> bool:
        """The thesis has Grad-CAM ahead on all five."""
        return self.difference.value > 0

    @property
    def certain(self) -> bool:
        low, high = self.difference.interval or (-math.inf, math.inf)
        return low > 0 or high < 0

    @property
    def verdict(self) -> str:
        if not self.difference.value:
            return "level"
        word = "as in the thesis" if self.agrees else "the other way round"
        return word if self.certain else f"{word}, not certain"


def pair_of(results: LocaliseResults) -> tuple[str, str] | None:
    """The run's Grad-CAM and LIME, as it names them."""
    known = {read_methods([method])[0].entry.name: method for method in reversed(results.methods)}
    return (known[PAIR[0]], known[PAIR[1]]) if all(name in known for name in PAIR) else None


def orders(results: LocaliseResults) -> list[Order]:
    """The thesis's five comparisons on this run; empty if one of the two methods is missing."""
    pair, compared = pair_of(results), []
    for metric in THESIS if pair else ():
        first, second = (results.column(method, metric) for method in pair or ())
        both = [i for i in first if not math.isnan(first[i] + second.get(i, math.nan))]
        sign = -1 if metric == "deletion" else 1
        columns = ({i: c[i] for i in both} for c in (first, second))
        apart = {i: sign * (first[i] - second[i]) for i in both}
        ours, theirs, gap = (macro_value(results.by_class(c), results.seed) for c in (*columns, apart))
        compared.append(Order(metric, (ours, theirs), gap))
    return compared


def order_text(compared: list[Order]) -> str:
    """On which means the order is that of the thesis, and on which it is not."""
    if not compared:
        return "The thesis compares Grad-CAM with LIME; this run lacks one of them, so there is no order."
    uncertain = "The difference is not certain (its 95 % interval holds 0) for"
    agree = [TITLES[o.metric] for o in compared if o.agrees]
    others = {
        "LIME is ahead on": [o for o in compared if o.difference.value < 0],
        "They are level on": [o for o in compared if o.difference.value == 0],
        uncertain: [o for o in compared if not o.certain and o.difference.value],
    }
    text = f"In the thesis Grad-CAM is ahead of LIME on all five means. Here it is ahead on {len(agree)} of 5"
    text += f" ({', '.join(agree)})." if agree else "."
    return text + "".join(
        f" {what} {', '.join(TITLES[o.metric] for o in of)}." for what, of in others.items() if of
    )


def crossing(insertion: Sequence[float], deletion: Sequence[float]) -> float:
    """The share of pixels at which the two curves cross; points at equal steps from 0 to 1.

    From there on the pixels shown are worth more than those that are left. NaN if the class is as likely
    without any pixel as with all of them.

    >>> crossing([0.0, 0.5, 1.0], [1.0, 0.0, 0.0])
    0.3333333333333333
    >>> crossing([0.9, 1.0], [0.9, 0.0])
    nan
    """
    gaps = [i - d for i, d in zip(insertion, deletion, strict=True)]
    after = next((k for k, gap in enumerate(gaps) if gap >= 0), 0)
    if not after or any(map(math.isnan, gaps)):
        return math.nan
    low, high = gaps[after - 1], gaps[after]
    return (after - 1 + low / (low - high)) / (len(gaps) - 1)


def swept_methods(settings: LocaliseSettings) -> dict[int, str]:
    """LIME, with the options it has in this study, for each number of segments."""
    calls = [call for call in read_methods(settings.methods) if call.entry.name == "lime"]
    given: dict[str, Any] = dict(calls[0].options) if calls else {}
    counts = sorted(settings.segment_counts)
    return {count: call_text("lime", given | {"segment_count": count}) for count in counts}


class Flag(NamedTuple):
    """A rule that an image broke; severity is by how much."""

    kind: str
    image: str
    method: str  # "" for what concerns the image alone
    severity: float
    why: str


def find_flags(results: LocaliseResults, folder: RunFolder, limits: FlagThresholds) -> list[Flag]:
    """Every flag of a run, from its rows and its maps."""
    store, methods = folder.maps(), results.real_methods
    ids = store.shared([(results.checkpoint, method) for method in methods]) if len(methods) > 1 else []
    overlaps: dict[str, float] = {}
    for start in range(0, len(ids), 64):
        maps = {m: store.read(results.checkpoint, m, ids[start : start + 64]) for m in methods}
        overlaps |= overlap_of_methods(maps, results.budget)
    return raise_flags(results, overlaps, limits)


def overlap_of_methods(maps: Mapping[str, Maps], budget: float) -> dict[str, float]:
    """Per image, the mean over pairs of methods of the share of kept pixels they have in common.

    Constant maps keep no pixel that means anything and are left out; NaN if fewer than two are left.
    """
    masks = {method: budget_masks(of, budget).flatten(1) for method, of in maps.items()}
    shares: dict[str, list[float]] = {}
    for a, b in combinations(maps, 2):
        usable = ~(maps[a].degenerate | maps[b].degenerate)
        common = mask_overlap(masks[a], masks[b])
        for image, share, use in zip(maps[a].ids, common.tolist(), usable.tolist(), strict=True):
            shares.setdefault(image, []).extend([share] if use else [])
    return {image: sum(of) / len(of) if of else math.nan for image, of in shares.items()}


def raise_flags(
    results: LocaliseResults, overlaps: Mapping[str, float], limits: FlagThresholds
) -> list[Flag]:
    """Every flag of a run, by kind, the worst first. Floors raise none: they do not look at the model."""
    chance = results.budget if limits.overlap is None else limits.overlap
    flags: list[Flag] = []
    for image in results.images:
        flags += _confident_and_wrong(results, image, limits)
        for method in results.real_methods:
            flags += _of_method(results, image, method, limits)
        overlap = overlaps.get(image, math.nan)
        if overlap <= chance:
            why = f"methods share {overlap:.0%} of their pixels"
            flags.append(Flag(DISAGREE, image, "", chance - overlap, why))
    return sorted(flags, key=lambda f: (KINDS.index(f.kind), -f.severity, f.image, f.method))


def _confident_and_wrong(results: LocaliseResults, image: str, limits: FlagThresholds) -> Iterator[Flag]:
    guess, label = results.predicted[image], results.labels[image]
    chance = results.chances.get((image, guess), math.nan)
    if guess != label and chance > limits.confident:
        own = results.chances.get((image, label), math.nan)
        why = f"{results.class_name(guess)} with {chance:.0%}, true class {own:.0%}"
        yield Flag(WRONG, image, "", chance, why)


def _of_method(results: LocaliseResults, image: str, method: str, limits: FlagThresholds) -> Iterator[Flag]:
    insertion, inside = (results.value(method, metric, image) for metric in ("insertion", "inside"))
    if results.value(method, "pointing", image) == 1 and insertion < limits.low_insertion:
        why = f"pointing hit, insertion {insertion:.2f}"
        yield Flag(HIT, image, method, limits.low_insertion - insertion, why)
    fits = min(1.0, box_share(results, method, image) / results.budget)
    if insertion >= limits.high_insertion and inside < limits.off_object * fits:
        why = f"insertion {insertion:.2f}, {inside:.0%} of the budget in the box where {fits:.0%} would fit"
        yield Flag(OFF, image, method, limits.off_object * fits - inside, why)
    curve = results.curve(method, "deletion", image)
    rise = max(curve) - curve[0]
    if rise >= limits.rise:
        yield Flag(RISING, image, method, rise, f"deletion rises from {curve[0]:.2f} to {max(curve):.2f}")


def box_share(results: LocaliseResults, method: str, image: str) -> float:
    """The box's share of the crop, from the reachable mask IoU min(a, K) / max(a, K) at two budgets.

    If it rises with K, a lies above the smaller one. Boxes in the crop may cover other shares than in the
    whole image, which is what the filter looked at.
    """
    budgets = budgets_of(results.budget)[:2]
    first, second = (results.column(method, "reachable", k).get(image, math.nan) for k in budgets)
    return budgets[0] / first if second > first else first * budgets[0]
