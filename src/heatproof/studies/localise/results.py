"""Results of a localisation run: its rows by method and metric, class means with intervals, tables as data.

A class mean is the mean over its images; the mean of a table is the mean of class means (macro mean), so that
every class counts the same. Its 95 % interval is a stratified bootstrap (1,000 resamples, seeded):
images are drawn with replacement within each class, so that every resample holds every class. A resample of n
images varies too little by a factor of (n - 1) / n: deviations from the class mean are scaled by the root of
n / (n - 1). A class with one image takes the deviations of all other classes.

THESIS: published means of keak2026budget, tables 2 and 3, over 43 classes: ResNet-18 (timm resnet18.a1_in1k),
1,122 validation photographs with one box that covers 10 to 80 % of the image, top 20 % of the pixels, blur.
They belong to another network and other images. The text beside table 2 prints LIME's pointing score as
0.8951; the table, and its 43 classes, give 0.8591.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import numpy as np

from heatproof.explain.api import explain, read_methods
from heatproof.explain.floors import is_floor
from heatproof.metrics.agreement import map_similarity
from heatproof.metrics.localisation import BUDGETS, budget_masks, mask_overlap
from heatproof.metrics.stats import percentile_interval
from heatproof.models import Model
from heatproof.registry import call_text
from heatproof.report.tables import Cell, Column, Table, TableSpec, Value
from heatproof.store import RunFolder
from heatproof.studies.common import floor_rows, mean_value, rho_value
from heatproof.studies.localise.settings import LocaliseSettings
from heatproof.types import Batch

READ = ("image", "label", "explained", "method", "metric", "value", "reason")
DEFAULT_BUDGET = 0.2  # its rows bear the metric's plain name
SURE = 0.5  # probability of the explained class
THESIS = {  # Grad-CAM, LIME
    "box_iou": (0.5922, 0.5532),
    "mask_iou": (0.3751, 0.2881),
    "pointing": (0.9728, 0.8591),
    "deletion": (0.1610, 0.2097),
    "insertion": (0.6369, 0.5957),
}
THESIS_RECALL = 0.7934
PAIR = ("gradcam", "lime")
COLUMNS = {
    "mask_iou": Column("Mask IoU", higher_is_better=True),
    "box_iou": Column("Box IoU", higher_is_better=True),
    "inside": Column("Inside share", higher_is_better=True),
    "pointing": Column("Pointing game", higher_is_better=True),
    "insertion": Column("Insertion AUC", higher_is_better=True),
    "deletion": Column("Deletion AUC", higher_is_better=False),
}
METRICS = tuple(COLUMNS)
LOCALISATION, FAITHFULNESS = METRICS[:4], METRICS[4:]
EVERY_METRIC = tuple(COLUMNS.values())
FLOOR_NOTE = (
    "random, edges and centre know nothing of the model: a method that is not above them explains nothing. "
    "Values are means of class means with 95 % bootstrap intervals over the images of each class; the best "
    "method is bold, the second slanted, floors and published rows do not compete. Constant maps are misses "
    "in the pointing game and left out of all other means."
)
BOX_NOTE = (
    " Box IoU flatters scattered maps: the tight box of pixels strewn all over is the whole picture, so that "
    "random gets the share of the picture that the box covers."
)
ByClass = Mapping[int, Sequence[float]]  # the values of a class's images, NaN where not defined


@dataclass(frozen=True)
class Scored:
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
    # (method, metric) -> image ->
    values: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)
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


def method_table(scored: Scored, name: str, title: str, metrics: Sequence[str]) -> Table:
    """A row per method: macro means; then the means that the thesis published."""
    rows: list[tuple[Cell, ...]] = []
    for method in scored.methods:
        constant = scored.column(method, "degenerate")
        means = [scored.macro(method, metric) for metric in metrics]
        share = sum(constant.values()) / max(1, len(constant))
        rows.append((method, min((m.n or 0) for m in means), share, *means))
    for k, method in enumerate(("Grad-CAM (thesis)", "LIME (thesis)")):
        rows.append((method, None, None, *(THESIS[m][k] if m in THESIS else None for m in metrics)))
    unranked = floor_rows(scored.methods) | {len(rows) - 2, len(rows) - 1}
    heads = Column("Method"), Column("images"), Column("constant maps", ".1%")
    note = FLOOR_NOTE + BOX_NOTE * ("box_iou" in metrics)
    columns = (*heads, *(COLUMNS[metric] for metric in metrics))
    return Table(name, title, columns, tuple(rows), note, unranked=unranked)


def class_table(
    name: str,
    title: str,
    classes: Mapping[int, str],
    sizes: Mapping[int, int],
    columns: Sequence[tuple[Column, ByClass]],
    note: str = "",
    seed: int = 0,
) -> Table:
    """A row per class with its mean in each column; the last row is the mean of the rows above it."""
    rows: list[tuple[Cell, ...]] = [
        (str(k), name_of, sizes[k], *(macro_value({k: of.get(k, ())}, seed).value for _, of in columns))
        for k, name_of in classes.items()
    ]
    means = [macro_value(groups, seed) for _, groups in columns]
    rows.append(("", "mean over classes", sum(sizes.values()), *means))
    heads = (Column("ID"), Column("Class"), Column("n"), *(column for column, _ in columns))
    return Table(name, title, heads, tuple(rows), note, marked=False)


def class_tables(scored: Scored) -> list[Table]:
    """Tables 2 and 3 of the thesis, for two methods: Grad-CAM and LIME, else the first two."""
    methods = pair_of(scored) or scored.real_methods[:2]
    recall = scored.recall()
    sizes = {label: len(values) for label, values in recall.items()}
    classes = {label: scored.class_name(label) for label in sizes}
    specs: Sequence[tuple[str, str, list[tuple[Column, ByClass]], Sequence[str]]] = (
        ("localisation_by_class", f"Localisation by class, {scored.budget:.0%}", [],
         ("box_iou", "mask_iou", "inside", "pointing")),
        ("faithfulness_by_class", "Recall and faithfulness by class",
         [(Column("Recall", higher_is_better=True), recall)], ("deletion", "insertion")),
    )  # fmt: skip
    made = []
    for name, title, first, metrics in specs:
        columns = [
            (replace(COLUMNS[m], name=f"{COLUMNS[m].name}, {method}"),
             scored.by_class(scored.column(method, m)))
            for m in metrics for method in methods
        ]  # fmt: skip
        note = "The same for all methods, with intervals: tables/classes.csv."
        made.append(class_table(name, title, classes, sizes, [*first, *columns], note, scored.seed))
    return made


def grouped_means(
    scored: Scored, groups: Mapping[Any, Iterable[int]]
) -> Iterable[tuple[Any, dict[int, list[float]], str, list[Value]]]:
    """For each group of classes and each method: the group, its recall, the method, its macro means."""
    recall, seed = scored.recall(), scored.seed
    columns = {m: [scored.by_class(scored.column(m, k)) for k in METRICS] for m in scored.methods}
    for group, labels in groups.items():
        own = {k: recall[k] for k in sorted(labels) if k in recall}
        for method in scored.methods if own else ():
            means = [macro_value({k: of[k] for k in own if k in of}, seed) for of in columns[method]]
            yield group, own, method, means


def long_table(scored: Scored) -> Table:
    """A row per class and method with every metric and its interval, for files."""
    spec = TableSpec(
        "classes", "Every class and method", ("ID", "Class", "Method", "Recall", *EVERY_METRIC),
        lambda label, recall, method, means: (
            str(label), scored.class_name(label), method, macro_value(recall, scored.seed), *means),
        marked=False,
    )  # fmt: skip
    return spec.fill(grouped_means(scored, {label: [label] for label in scored.recall()}))


def group_table(scored: Scored, groups: Mapping[str, Iterable[int]]) -> Table:
    """A row per group and method: means over the group's classes; no row for a group without images."""
    spec = TableSpec(
        "groups", "By group of classes", ("Group", "classes", "images", "Method", "Recall", *EVERY_METRIC),
        lambda group, recall, method, means: (
            group, len(recall), sum(map(len, recall.values())), method,
            macro_value(recall, scored.seed).value, *means),
        "Means over the classes of a group with 95 % bootstrap intervals over its images.", marked=False,
    )  # fmt: skip
    return spec.fill(grouped_means(scored, groups))


def budget_table(scored: Scored, curves: Mapping[str, Sequence[float]], budgets: Sequence[float]) -> Table:
    """Mask IoU at every budget, macro means by method; last the most that a mask of that size can reach."""
    percents = [f"{budget:.0%}" for budget in budgets]
    return TableSpec(
        "budget_mask_iou", f"Mask IoU at budgets from {percents[0]} to {percents[-1]} of the pixels",
        ("Method", *(Column(percent, higher_is_better=True) for percent in percents)),
        lambda method, values: (method, *values),
    ).fill(curves.items(), unranked=floor_rows(scored.methods) | {len(curves) - 1})  # fmt: skip


@dataclass(frozen=True)
class Order:
    """Which of Grad-CAM and LIME is ahead on one mean, and how certain that is."""

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


def pair_of(scored: Scored) -> tuple[str, str] | None:
    """The run's Grad-CAM and LIME, as it names them."""
    known = {read_methods([method])[0].entry.name: method for method in reversed(scored.methods)}
    return (known[PAIR[0]], known[PAIR[1]]) if all(name in known for name in PAIR) else None


def orders(scored: Scored) -> list[Order]:
    """The thesis's five comparisons on this run; empty if one of the two methods is missing."""
    pair, compared = pair_of(scored), []
    for metric in THESIS if pair else ():
        first, second = (scored.column(method, metric) for method in pair or ())
        both = [i for i in first if not math.isnan(first[i] + second.get(i, math.nan))]
        sign = 1 if COLUMNS[metric].higher_is_better else -1
        columns = ({i: c[i] for i in both} for c in (first, second))
        apart = {i: sign * (first[i] - second[i]) for i in both}
        ours, theirs, gap = (macro_value(scored.by_class(c), scored.seed) for c in (*columns, apart))
        compared.append(Order(metric, (ours, theirs), gap))
    return compared


ORDER = TableSpec(
    "order", "Grad-CAM against LIME, here and in the thesis",
    ("Mean", "thesis Grad-CAM", "thesis LIME", "our Grad-CAM", "our LIME", "Grad-CAM ahead by", "order"),
    lambda o: (
        COLUMNS[o.metric].name + ("" if COLUMNS[o.metric].higher_is_better else " (lower is better)"),
        *THESIS[o.metric], *o.ours, o.difference, o.verdict),
    "The thesis's numbers belong to another network and other photographs: compare the order, not the "
    "values. Means over the images on which both methods are defined. An order is certain where the 95 % "
    "interval of the paired difference leaves out 0.",
    marked=False,
)  # fmt: skip


def order_text(compared: list[Order]) -> str:
    """On which means the order is that of the thesis, and on which it is not."""
    if not compared:
        return "The thesis compares Grad-CAM with LIME; this run lacks one of them, so there is no order."
    uncertain = "The difference is not certain (its 95 % interval holds 0) for"
    agree = [COLUMNS[o.metric].name for o in compared if o.agrees]
    others = {
        "LIME is ahead on": [o for o in compared if o.difference.value < 0],
        "They are level on": [o for o in compared if o.difference.value == 0],
        uncertain: [o for o in compared if not o.certain and o.difference.value],
    }
    text = f"In the thesis Grad-CAM is ahead of LIME on all five means. Here it is ahead on {len(agree)} of 5"
    text += f" ({', '.join(agree)})." if agree else "."
    return text + "".join(
        f" {what} {', '.join(COLUMNS[o.metric].name for o in of)}." for what, of in others.items() if of
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


def sufficient_table(scored: Scored) -> Table:
    """By method: mean crossing, and in how many images it lies within the budget."""
    spec = TableSpec(
        "sufficient", "How many pixels suffice",
        ("Method", "images", Column("Sufficient share", higher_is_better=False),
         Column(f"within {scored.budget:.0%}", ".1%", True)),
        lambda method, shares, known: (
            method, len(known), macro_value(scored.by_class(shares), scored.seed),
            sum(share <= scored.budget for share in known) / len(known) if known else math.nan),
        "The share of pixels at which insertion and deletion cross, mean of class means with its 95 % "
        "interval; the thesis reads about 20 % off its curves. Pictures without a crossing are left out.",
    )  # fmt: skip
    rows = []
    for method in scored.methods:
        curves = {i: [scored.curve(method, kind, i) for kind in FAITHFULNESS] for i in scored.images}
        shares = {image: crossing(*both) for image, both in curves.items()}
        rows.append((method, shares, [share for share in shares.values() if not math.isnan(share)]))
    return spec.fill(rows, unranked=floor_rows(scored.methods))


DISPERSION = TableSpec(
    "dispersion", "Scattered maps and confidence",
    ("Method", "images", f"scattered, class at {SURE:.0%} or more", f"scattered, class below {SURE:.0%}",
     Column("rank correlation with the probability", "+.3f")),
    lambda method, dispersion, chances, seed: (
        method, len(chances),
        *(mean_value(dispersion[side], seed) for side in (chances >= SURE, chances < SURE)),
        rho_value(dispersion.tolist(), chances.tolist(), seed)),
    "The chance that two of the budget's pixels lie in different areas: 0 for one blob, 1 for dust. The "
    "thesis finds spread blobs where the network is not sure; that would be a negative correlation.",
    marked=False,
)  # fmt: skip


def dispersion_table(scored: Scored) -> Table:
    """By method: how scattered its maps are where the network is sure and where it is not."""
    rows = []
    for method in scored.methods:
        column = scored.column(method, "dispersion")
        pairs = [(v, scored.chances.get((i, scored.explained[i]), math.nan)) for i, v in column.items()]
        known = np.array([pair for pair in pairs if not math.isnan(sum(pair))]).reshape(-1, 2)
        rows.append((method, *known.T, scored.seed))
    return DISPERSION.fill(rows)


def repeat_table(
    model: Model, batches: Sequence[Batch], targets: Mapping[str, int], settings: LocaliseSettings
) -> Table:
    """By method: how alike the maps of the same images are under other seeds, over all pairs of seeds."""
    alike: dict[str, list[float]] = {method: [] for method in settings.methods}
    shared: dict[str, list[float]] = {method: [] for method in settings.methods}
    for batch in batches:
        classes = [targets[name] for name in batch.ids]
        seeds = range(settings.seed, settings.seed + settings.repeats)
        made = [
            explain(model, batch.images, settings.methods, classes, settings.layer, seed) for seed in seeds
        ]
        for method in settings.methods:
            for first, second in combinations([maps[method] for maps in made], 2):
                masks = [budget_masks(maps, settings.budget).flatten(1) for maps in (first, second)]
                alike[method] += map_similarity(first, second)["spearman"].tolist()
                constant = first.degenerate | second.degenerate
                shared[method] += mask_overlap(*masks).masked_fill(constant, math.nan).tolist()
    spec = TableSpec(
        "repeats", "The same picture, other seeds",
        ("Method", *(Column(name, higher_is_better=True) for name in (
            "rank correlation", f"overlap of the top {settings.budget:.0%}", "lowest overlap"))),
        lambda method: (
            method, mean_value(alike[method], settings.seed), mean_value(shared[method], settings.seed),
            min((v for v in shared[method] if not math.isnan(v)), default=math.nan)),
        f"{sum(len(batch.ids) for batch in batches)} pictures, each explained {settings.repeats} times with "
        "other seeds; all pairs of maps.",
    )  # fmt: skip
    return spec.fill((method,) for method in settings.methods)


def swept_methods(settings: LocaliseSettings) -> dict[int, str]:
    """LIME, with the options it has in this study, for each number of segments."""
    calls = [call for call in read_methods(settings.methods) if call.entry.name == "lime"]
    given: dict[str, Any] = dict(calls[0].options) if calls else {}
    counts = sorted(settings.segment_counts)
    return {count: call_text("lime", given | {"segment_count": count}) for count in counts}


def sweep_table(scored: Scored, methods: Mapping[int, str]) -> Table:
    """By number of segments: localisation and faithfulness on the same images."""
    return TableSpec(
        "segments", "LIME by number of segments", ("Segments", *EVERY_METRIC),
        lambda count, method: (str(count), *(scored.macro(method, metric) for metric in METRICS)),
        f"{len(scored.images)} pictures. By eye the thesis finds that 30 segments join object and "
        "background, that 200 are too small to mean anything, and takes 100.",
    ).fill(methods.items())  # fmt: skip
