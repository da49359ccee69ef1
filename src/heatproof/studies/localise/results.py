"""Results of a localisation run: its rows by method and metric, tables, figures and flags, without a model.

A class mean is the mean over its images; the mean of a table is the mean of class means (macro mean), so that
every class counts the same. Its 95 % interval is a stratified bootstrap (1,000 resamples, seeded):
images are drawn with replacement within each class, so that every resample holds every class. A resample of n
images varies too little by a factor of (n - 1) / n: deviations from the class mean are scaled by the root of
n / (n - 1). A class with one image takes the deviations of all other classes.

tables.toml declares the tables, the thesis's numbers (keak2026budget) and the rules of the shortcut flags.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, groupby, islice
from typing import Any, NamedTuple

import numpy as np

from heatproof.explain.api import explain, read_methods
from heatproof.explain.baselines import is_floor
from heatproof.metrics.agreement import map_similarity
from heatproof.metrics.localisation import BUDGETS, budget_masks, mask_overlap
from heatproof.metrics.results import percentile_interval
from heatproof.models import Model
from heatproof.registry import call_text
from heatproof.report import figures
from heatproof.report.figures import GREY, Line, Panel, line_style
from heatproof.report.tables import Cell, Value
from heatproof.store import RunFolder
from heatproof.studies.common import TableFile, mean_value, rho_value
from heatproof.studies.settings import FlagThresholds, LocaliseSettings
from heatproof.types import Batch, Maps

READ = ("image", "label", "explained", "method", "metric", "value", "reason")
DEFAULT_BUDGET = 0.2  # its rows bear the metric's plain name
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
WITHOUT_BUDGET = ("degenerate", "centre_bias")
SURE = 0.5  # probability of the explained class
MOST = 400  # images that are in memory at once for evidence, objects and shared features
MOST_FLAGS = 8  # of each kind on the page; the others are in the table's files
DASHES = ("--", ":", "-.")
Rows = list[tuple[Cell, ...]]
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
        """Methods other than controls, which do not use the model."""
        return [method for method in self.methods if not is_floor(method)]

    @property
    def budgets(self) -> list[float]:
        return budgets_of(self.budget)

    def column(self, method: str, metric: str, budget: float | None = None) -> dict[str, float]:
        """A metric of every image; localisation at the study's budget unless another is named."""
        area, _, point = metric.partition("_at_")
        if area in FAITHFULNESS:
            name = self.faithfulness[area == "deletion"]
            name = f"{area}_at_{point}{name[len(area) :]}" if point else name
        else:
            name = metric if metric in WITHOUT_BUDGET else at_budget(metric, budget or self.budget)
        return self.values.get((method, name), {})

    def value(self, method: str, metric: str, image: str) -> float:
        return self.column(method, metric).get(image, math.nan)

    def chance(self, image: str, label: int) -> float:
        """Probability of a class; NaN where it is not known."""
        return self.chances.get((image, label), math.nan)

    def by_class(self, column: Mapping[str, float]) -> dict[int, list[float]]:
        groups: dict[int, list[float]] = {}
        for image, value in column.items():
            groups.setdefault(self.labels[image], []).append(value)
        return dict(sorted(groups.items()))

    @property
    def correct(self) -> dict[str, float]:
        """By image: 1 if its own class is predicted, else 0."""
        return {image: float(c == self.labels[image]) for image, c in self.predicted.items()}

    def recall(self) -> dict[int, list[float]]:
        """By class: `correct` of its images."""
        return self.by_class(self.correct)

    def probability(self) -> dict[str, float]:
        """By image: the probability of its true class."""
        return {i: self.chance(i, self.labels[i]) for i in self.images}

    def images_of(self, labels: Iterable[int]) -> list[str]:
        """The images of some classes."""
        wanted = set(labels)
        return [image for image in self.images if self.labels[image] in wanted]

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

    def budget_curve(self, method: str, metric: str) -> list[float]:
        """Macro means at every budget."""
        return [self.macro(method, metric, budget).value for budget in self.budgets]


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
        next(iter(folder.manifest.models)), tuple(config["methods"]), tuple(folder.manifest.classes), budget,
        (named["insertion"], named["deletion"]), seed=seed,
    )  # fmt: skip
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


TABLES = TableFile(
    "heatproof.studies.localise", macro=macro_value,
    more=[(metric, title) for metric, title in TITLES.items() if metric != "deletion"],
)  # fmt: skip
THESIS: dict[str, list[float]] = TABLES.content["order"]["thesis"]
RULES: dict[str, str] = TABLES.content["flags"]["rules"]
KINDS = HIT, OFF, WRONG, RISING, DISAGREE = tuple(RULES)
OF_A_METHOD = (HIT, OFF, RISING)  # the others are of an image


@dataclass(frozen=True)
class Order:
    """Which of Grad-CAM and LIME is better on one mean, with its certainty."""

    metric: str
    title: str
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
        compared.append(Order(metric, TITLES[metric], (ours, theirs), gap))
    return compared


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


def swept_methods(settings: LocaliseSettings) -> dict[str, str]:
    """LIME, with the options it has in this study but one, by the value of that one."""
    given = next((dict(r.options) for r in read_methods(settings.methods) if r.entry.name == "lime"), {})
    changes: list[tuple[str, dict[str, Any]]]
    changes = [(f"{n} segments", {"segment_count": n}) for n in sorted(settings.segment_counts)]
    changes += [(kind, {"segments": kind}) for kind in settings.segmentations]
    changes += [(f"{n} samples", {"samples": n}) for n in sorted(settings.sample_counts)]
    return {name: call_text("lime", given | change) for name, change in changes}


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
    shares: dict[str, list[float]] = {}
    for first, second in combinations(maps.values(), 2):
        for image, share in zip(first.ids, overlaps_of(first, second, budget), strict=True):
            shares.setdefault(image, []).extend([] if math.isnan(share) else [share])
    return {image: sum(of) / len(of) if of else math.nan for image, of in shares.items()}


def overlaps_of(first: Maps, second: Maps, budget: float) -> list[float]:
    """Per image, the share of kept pixels that two maps have in common; NaN if one of them is constant."""
    masks = [budget_masks(maps, budget).flatten(1) for maps in (first, second)]
    return list(mask_overlap(*masks).masked_fill(first.degenerate | second.degenerate, math.nan).tolist())


def raise_flags(
    results: LocaliseResults, overlaps: Mapping[str, float], limits: FlagThresholds
) -> list[Flag]:
    """Every flag of a run, by kind, the worst first. Controls raise none: they do not use the model."""
    chance = results.budget if limits.overlap is None else limits.overlap
    flags: list[Flag] = []
    for image in results.images:
        guess, label = results.predicted[image], results.labels[image]
        sure, true = results.chance(image, guess), results.chance(image, label)
        if guess != label and sure > limits.confident:
            why = f"{results.class_name(guess)} with {sure:.0%}, true class {true:.0%}"
            flags.append(Flag(WRONG, image, "", sure, why))
        overlap = overlaps.get(image, math.nan)
        if overlap <= chance:
            why = f"methods share {overlap:.0%} of their pixels"
            flags.append(Flag(DISAGREE, image, "", chance - overlap, why))
        for method in results.real_methods:
            insertion, inside = (results.value(method, metric, image) for metric in ("insertion", "inside"))
            if results.value(method, "pointing", image) == 1 and insertion < limits.low_insertion:
                why = f"pointing hit, insertion {insertion:.2f}"
                flags.append(Flag(HIT, image, method, limits.low_insertion - insertion, why))
            fits = min(1.0, box_share(results, method, image) / results.budget)
            if insertion >= limits.high_insertion and inside < limits.off_object * fits:
                share = f"{inside:.0%} of the budget in the box where {fits:.0%} would fit"
                why = f"insertion {insertion:.2f}, {share}"
                flags.append(Flag(OFF, image, method, limits.off_object * fits - inside, why))
            curve = results.curve(method, "deletion", image)
            if (rise := max(curve) - curve[0]) >= limits.rise:
                why = f"deletion rises from {curve[0]:.2f} to {max(curve):.2f}"
                flags.append(Flag(RISING, image, method, rise, why))
    return sorted(flags, key=lambda f: (KINDS.index(f.kind), -f.severity, f.image, f.method))


def box_share(results: LocaliseResults, method: str, image: str) -> float:
    """The box's share of the crop, from the reachable mask IoU min(a, K) / max(a, K) at two budgets.

    If it rises with K, a lies above the smaller one. Boxes in the crop may cover other shares than in the
    whole image, which is what the filter looked at.
    """
    budgets = results.budgets[:2]
    first, second = (results.column(method, "reachable", k).get(image, math.nan) for k in budgets)
    return budgets[0] / first if second > first else first * budgets[0]


def method_means(results: LocaliseResults, metrics: Sequence[str]) -> list[tuple[str, dict[str, Value]]]:
    """Each method with its macro means."""
    return [(method, {m: results.macro(method, m) for m in metrics}) for method in results.methods]


def published_means(metrics: Sequence[str]) -> Rows:
    """Rows of the means that the thesis published."""
    return [
        (method, None, None, *(THESIS[m][k] if m in THESIS else None for m in metrics))
        for k, method in enumerate(("Grad-CAM (thesis)", "LIME (thesis)"))
    ]


def class_rows(
    classes: Mapping[int, str], sizes: Mapping[int, int], columns: Sequence[ByClass], seed: int = 0
) -> Rows:
    """A row per class with its mean in each column; the last row is the mean of the rows above it."""
    rows: Rows = [
        (str(k), name, sizes[k], *(macro_value({k: of.get(k, ())}, seed).value for of in columns))
        for k, name in classes.items()
    ]
    means = [macro_value(groups, seed) for groups in columns]
    return [*rows, ("", "mean over classes", sum(sizes.values()), *means)]


def by_class_rows(
    results: LocaliseResults, methods: Sequence[str], metrics: Sequence[str], answers: bool = False
) -> Rows:
    """A row per class: metrics of these methods. answers: after recall and probability."""
    recall = results.recall()
    sizes = {label: len(values) for label, values in recall.items()}
    classes = {label: results.class_name(label) for label in sizes}
    first = [recall, results.by_class(results.probability())] if answers else []
    columns = [results.by_class(results.column(method, m)) for m in metrics for method in methods]
    return class_rows(classes, sizes, [*first, *columns], results.seed)


def grouped_means(
    results: LocaliseResults, groups: Mapping[Any, Sequence[str]]
) -> Iterator[tuple[Any, ByClass, str, dict[str, Value]]]:
    """For each group of images and each method: the group, its recall by class, the method, its means.

    The means are those of the metrics, and `probability` of the true class.
    """
    correct, probability = results.correct, results.probability()
    for group, images in groups.items():
        recall = results.by_class({i: correct[i] for i in images})
        for method in results.methods if images else ():
            columns = {k: results.column(method, k) for k in METRICS} | {"probability": probability}
            chosen = {k: {i: of[i] for i in images if i in of} for k, of in columns.items()}
            means = {k: macro_value(results.by_class(of), results.seed) for k, of in chosen.items()}
            yield group, recall, method, means


def sufficient_rows(results: LocaliseResults) -> Rows:
    """By method: mean crossing, and in how many images it lies within the budget."""
    rows: Rows = []
    for method in results.methods:
        curves = {i: [results.curve(method, kind, i) for kind in FAITHFULNESS] for i in results.images}
        shares = {image: crossing(*both) for image, both in curves.items()}
        known = [share for share in shares.values() if not math.isnan(share)]
        within = sum(share <= results.budget for share in known) / len(known) if known else math.nan
        rows.append((method, len(known), macro_value(results.by_class(shares), results.seed), within))
    return rows


def dispersion_rows(results: LocaliseResults) -> Rows:
    """By method: dispersion of its maps on confident and on unconfident images."""
    rows, seed = Rows(), results.seed
    for method in results.methods:
        column = results.column(method, "dispersion")
        pairs = [(v, results.chance(i, results.explained[i])) for i, v in column.items()]
        known = np.array([pair for pair in pairs if not math.isnan(sum(pair))]).reshape(-1, 2)
        dispersion, chances = known.T
        means = (mean_value(dispersion[side], seed) for side in (chances >= SURE, chances < SURE))
        rows.append((method, len(known), *means, rho_value(dispersion.tolist(), chances.tolist(), seed)))
    return rows


def flag_rows(flags: Sequence[Flag], results: LocaliseResults, limits: FlagThresholds) -> Rows:
    """How many images raise each flag, by method; the rule beside it."""
    given = {**vars(limits), "overlap": results.budget if limits.overlap is None else limits.overlap}
    rows: Rows = []
    for kind, rule in RULES.items():
        own = [flag for flag in flags if flag.kind == kind]
        methods = results.real_methods if kind in OF_A_METHOD else []
        by_method = ", ".join(f"{m}: {sum(flag.method == m for flag in own)}" for m in methods)
        images = f"{len({flag.image for flag in own})} of {len(results.images)}"
        rows.append((kind, images, by_method, rule.format(**given)))
    return rows


def worst_flags(flags: Sequence[Flag], results: LocaliseResults) -> str:
    """A table of the first flags of each kind, as Markdown; flags are in the order of their kinds."""
    worst = [flag for _, of in groupby(flags, key=lambda flag: flag.kind) for flag in islice(of, MOST_FLAGS)]
    return TABLES.fill("flagged_images", worst, results=results).markdown() if worst else ""


def stability(
    model: Model, batches: Sequence[Batch], targets: Mapping[str, int], methods: Iterable[str],
    settings: LocaliseSettings,
) -> dict[str, tuple[Value, Value, float]]:  # fmt: skip
    """By method: mean rank correlation, mean overlap and lowest overlap of maps under other seeds.

    Over all images and pairs of seeds; two seeds unless `repeats` is more.
    """
    texts = list(dict.fromkeys(methods))
    correlations: dict[str, list[float]] = {method: [] for method in texts}
    overlaps: dict[str, list[float]] = {method: [] for method in texts}
    for batch in batches:
        classes = [targets[name] for name in batch.ids]
        seeds = range(settings.seed, settings.seed + max(2, settings.repeats))
        made = [explain(model, batch.images, texts, classes, settings.layer, seed) for seed in seeds]
        for method in texts:
            for first, second in combinations([maps[method] for maps in made], 2):
                correlations[method] += map_similarity(first, second)["spearman"].tolist()
                overlaps[method] += overlaps_of(first, second, settings.budget)
    return {
        m: (mean_value(correlations[m], settings.seed), mean_value(overlaps[m], settings.seed),
            min((v for v in overlaps[m] if not math.isnan(v)), default=math.nan))
        for m in texts
    }  # fmt: skip


def centre_rows(results: LocaliseResults, objects: Mapping[str, float]) -> Rows:
    """By method: centre bias of its maps and of the objects, on the images where both are defined."""
    rows, seed = Rows(), results.seed
    for method in results.methods:
        column = results.column(method, "centre_bias")
        known = [i for i in column if not math.isnan(column[i] + objects.get(i, math.nan))]
        own, truth = ([of[image] for image in known] for of in (column, objects))
        apart = [a - b for a, b in zip(own, truth, strict=True)]
        rows.append(
            (method, *(mean_value(of, seed) for of in (own, truth, apart)), rho_value(own, truth, seed))
        )
    return rows


def table_content(
    results: LocaliseResults, groups: Mapping[str, Iterable[int]], flags: Sequence[Flag],
    limits: FlagThresholds,
) -> dict[str, Any]:  # fmt: skip
    """What the tables of the page name, as far as it needs no model."""
    correct, budgets = results.correct, [(f"{budget:.0%}", budget) for budget in results.budgets]
    return {
        "results": results, "flags": flags, "limits": limits, "orders": orders(results), "thesis": THESIS,
        "method_means": method_means, "published_means": published_means, "by_class_rows": by_class_rows,
        "grouped_means": grouped_means, "sufficient_rows": sufficient_rows, "centre_rows": centre_rows,
        "dispersion_rows": dispersion_rows, "flag_rows": flag_rows,
        "localisation": LOCALISATION, "faithfulness": FAITHFULNESS,
        "budget": f"{results.budget:.0%}", "budgets": budgets, "first": budgets[0][0],
        "last": budgets[-1][0], "sure": f"{SURE:.0%}", "most": MOST,
        "group_images": {group: results.images_of(labels) for group, labels in groups.items()},
        "by_answer": {
            name: [i for i in correct if correct[i] == is_] for name, is_ in (("right", 1), ("wrong", 0))
        },
        "pair": list(pair_of(results) or results.real_methods[:2]),
        "class_images": {label: results.images_of([label]) for label in results.recall()},
    }  # fmt: skip


def report_figures(results: LocaliseResults) -> dict[str, Any]:
    """Scores against the budget, and mean deletion and insertion curves."""
    tenths, percents = range(0, 101, 10), [100 * budget for budget in results.budgets]
    real, floors = ([m for m in results.methods if is_floor(m) == is_] for is_ in (False, True))
    styles = {m: line_style(k) for k, m in enumerate(real)} | {
        m: {"color": GREY, "linestyle": DASHES[k % 3], "linewidth": 1.2} for k, m in enumerate(floors)
    }
    located, walked = [], []
    for metric in ("mask_iou", "box_iou", "inside"):
        curves = [Line(percents, results.budget_curve(m, metric), m, styles[m]) for m in results.methods]
        if metric == "mask_iou":
            reachable = results.budget_curve(results.methods[0], "reachable")
            curves.append(Line(percents, reachable, "reachable", {"color": "black", "linewidth": 0.8}))
        axes = {"title": TITLES[metric], "ylim": (0, 1.02), "xlabel": "kept pixels, %"}
        located.append(Panel(curves, axes, [100 * results.budget]))
    for kind in ("deletion", "insertion"):
        means = {m: [results.macro(m, f"{kind}_at_{p}").value for p in tenths] for m in results.methods}
        axes = {"title": kind, "ylim": (0, 1.02), "xlabel": "pixels, %", "ylabel": "probability of the class"}
        walked.append(Panel([Line(tenths, of, m, styles[m]) for m, of in means.items()], axes))
    return {
        name: figures.lines([panels], 3.1 * len(panels) + 1.8, 3.2)
        for name, panels in (("budgets", located), ("faithfulness", walked))
    }
