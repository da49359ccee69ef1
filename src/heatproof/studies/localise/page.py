"""The page of a localisation study: tables, figures and flags, from the run folder alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import combinations, groupby, islice
from typing import Any

import numpy as np

from heatproof.explain.api import explain
from heatproof.explain.floors import is_floor
from heatproof.metrics.agreement import map_similarity
from heatproof.metrics.localisation import budget_masks, mask_overlap
from heatproof.models import Model
from heatproof.report import figures
from heatproof.report.figures import GREY, Line, Panel, line_style
from heatproof.report.tables import Cell, Table, Value
from heatproof.studies.common import TableFile, mean_value, rho_value
from heatproof.studies.localise.results import (
    FAITHFULNESS,
    KINDS,
    LOCALISATION,
    METRICS,
    OF_A_METHOD,
    REASONS,
    THESIS,
    TITLES,
    ByClass,
    Flag,
    LocaliseResults,
    budgets_of,
    crossing,
    macro_value,
    orders,
    pair_of,
)
from heatproof.studies.localise.settings import FlagThresholds, LocaliseSettings
from heatproof.types import Batch

TABLES = TableFile("heatproof.studies.localise", macro=macro_value)
SURE = 0.5  # probability of the explained class
MOST_FLAGS = 8  # of each kind on the page; the others are in the table's files
DASHES = ("--", ":", "-.")
Groups = Mapping[str, Iterable[int]]


def report_tables(results: LocaliseResults, groups: Groups) -> list[Table | None]:
    """Tables that the rows of the run give."""
    by_group = TABLES.fill("groups", grouped_means(results, groups), results=results)
    compared = orders(results)
    return [
        method_table(results, "localisation", LOCALISATION),
        method_table(results, "faithfulness", FAITHFULNESS),
        TABLES.fill("order", compared, titles=TITLES, thesis=THESIS) if compared else None,
        budget_table(results), sufficient_table(results), dispersion_table(results),
        by_group if by_group.rows else None, *class_tables(results),
    ]  # fmt: skip


def method_table(results: LocaliseResults, name: str, metrics: Sequence[str]) -> Table:
    """A row per method: macro means; then the means that the thesis published."""
    rows = [(method, {m: results.macro(method, m) for m in metrics}) for method in results.methods]
    published = [
        (method, None, None, *(THESIS[m][k] if m in THESIS else None for m in metrics))
        for k, method in enumerate(("Grad-CAM (thesis)", "LIME (thesis)"))
    ]
    return TABLES.fill(name, rows, published, results=results)


def class_rows(
    classes: Mapping[int, str], sizes: Mapping[int, int], columns: Sequence[ByClass], seed: int = 0
) -> list[tuple[Cell, ...]]:
    """A row per class with its mean in each column; the last row is the mean of the rows above it."""
    rows: list[tuple[Cell, ...]] = [
        (str(k), name, sizes[k], *(macro_value({k: of.get(k, ())}, seed).value for of in columns))
        for k, name in classes.items()
    ]
    means = [macro_value(groups, seed) for groups in columns]
    return [*rows, ("", "mean over classes", sum(sizes.values()), *means)]


def class_tables(results: LocaliseResults) -> list[Table]:
    """Tables by class for two methods: Grad-CAM and LIME, else the first two."""
    methods = list(pair_of(results) or results.real_methods[:2])
    recall = results.recall()
    sizes = {label: len(values) for label, values in recall.items()}
    classes = {label: results.class_name(label) for label in sizes}

    def rows(metrics: Sequence[str], first: Sequence[ByClass] = ()) -> list[tuple[Cell, ...]]:
        columns = [results.by_class(results.column(method, m)) for m in metrics for method in methods]
        return class_rows(classes, sizes, [*first, *columns], results.seed)

    words = {"budget": f"{results.budget:.0%}", "methods": methods}
    located = rows(("box_iou", "mask_iou", "inside", "pointing"))
    faithful = rows(("deletion", "insertion"), [recall])
    return [
        TABLES.fill("localisation_by_class", located, **words),
        TABLES.fill("faithfulness_by_class", faithful, **words),
    ]


def grouped_means(
    results: LocaliseResults, groups: Mapping[Any, Iterable[int]]
) -> Iterator[tuple[Any, ByClass, str, dict[str, Value]]]:
    """For each group of classes and each method: the group, its recall, the method, its means by metric."""
    recall = results.recall()
    columns = {m: {k: results.by_class(results.column(m, k)) for k in METRICS} for m in results.methods}
    for group, labels in groups.items():
        own = {k: recall[k] for k in sorted(labels) if k in recall}
        for method in results.methods if own else ():
            yield (
                group,
                own,
                method,
                {
                    metric: macro_value({k: of[k] for k in own if k in of}, results.seed)
                    for metric, of in columns[method].items()
                },
            )


def long_table(results: LocaliseResults) -> Table:
    """A row per class and method with every metric and its interval, for files."""
    rows = grouped_means(results, {label: [label] for label in results.recall()})
    return TABLES.fill("classes", rows, results=results)


def budget_table(results: LocaliseResults) -> Table:
    """Mask IoU at every budget; last the most that a mask of that size can reach."""
    budgets = [(f"{budget:.0%}", budget) for budget in budgets_of(results.budget)]
    reachable: list[Cell] = ["reachable", *budget_curve(results, results.methods[0], "reachable")]
    words = {"first": budgets[0][0], "last": budgets[-1][0], "budgets": budgets}
    return TABLES.fill("budget_mask_iou", results.methods, [reachable], results=results, **words)


def budget_curve(results: LocaliseResults, method: str, metric: str) -> list[float]:
    """Macro means at every budget."""
    return [results.macro(method, metric, budget).value for budget in budgets_of(results.budget)]


def sufficient_table(results: LocaliseResults) -> Table:
    """By method: mean crossing, and in how many images it lies within the budget."""
    rows = []
    for method in results.methods:
        curves = {i: [results.curve(method, kind, i) for kind in FAITHFULNESS] for i in results.images}
        shares = {image: crossing(*both) for image, both in curves.items()}
        known = [share for share in shares.values() if not math.isnan(share)]
        within = sum(share <= results.budget for share in known) / len(known) if known else math.nan
        rows.append((method, len(known), macro_value(results.by_class(shares), results.seed), within))
    return TABLES.fill("sufficient", rows, budget=f"{results.budget:.0%}")


def dispersion_table(results: LocaliseResults) -> Table:
    """By method: dispersion of its maps on confident and on unconfident images."""
    rows, seed = [], results.seed
    for method in results.methods:
        column = results.column(method, "dispersion")
        pairs = [(v, results.chances.get((i, results.explained[i]), math.nan)) for i, v in column.items()]
        known = np.array([pair for pair in pairs if not math.isnan(sum(pair))]).reshape(-1, 2)
        dispersion, chances = known.T
        means = (mean_value(dispersion[side], seed) for side in (chances >= SURE, chances < SURE))
        rows.append((method, len(known), *means, rho_value(dispersion.tolist(), chances.tolist(), seed)))
    return TABLES.fill("dispersion", rows, sure=f"{SURE:.0%}")


def flag_count_table(flags: Sequence[Flag], results: LocaliseResults, limits: FlagThresholds) -> Table:
    """How many images raise each flag, by method; the rule beside it."""
    given = {**vars(limits), "overlap": results.budget if limits.overlap is None else limits.overlap}
    rows = []
    for kind in KINDS:
        own = [flag for flag in flags if flag.kind == kind]
        methods = results.real_methods if kind in OF_A_METHOD else []
        by_method = ", ".join(f"{m}: {sum(flag.method == m for flag in own)}" for m in methods)
        images = f"{len({flag.image for flag in own})} of {len(results.images)}"
        rows.append((kind, images, by_method, REASONS[kind].format(**given)))
    return TABLES.fill("flags", rows)


def flag_table(flags: Iterable[Flag], results: LocaliseResults) -> Table:
    """Every flag with the image that raised it."""
    return TABLES.fill("flagged_images", flags, results=results)


def worst_flags(flags: Sequence[Flag], results: LocaliseResults) -> str:
    """A table of the first flags of each kind, as Markdown; flags are in the order of their kinds."""
    kinds = groupby(flags, key=lambda flag: flag.kind)
    worst = [flag for _, of in kinds for flag in islice(of, MOST_FLAGS)]
    return flag_table(worst, results).markdown() if worst else ""


def threshold_texts(limits: FlagThresholds) -> list[str]:
    return [f"{name} = {value}" for name, value in asdict(limits).items() if value is not None]


def repeat_table(
    model: Model, batches: Sequence[Batch], targets: Mapping[str, int], settings: LocaliseSettings
) -> Table:
    """By method: similarity of the maps of the same images under other seeds, over all pairs of seeds."""
    correlations: dict[str, list[float]] = {method: [] for method in settings.methods}
    overlaps: dict[str, list[float]] = {method: [] for method in settings.methods}
    for batch in batches:
        classes = [targets[name] for name in batch.ids]
        seeds = range(settings.seed, settings.seed + settings.repeats)
        made = [
            explain(model, batch.images, settings.methods, classes, settings.layer, seed) for seed in seeds
        ]
        for method in settings.methods:
            for first, second in combinations([maps[method] for maps in made], 2):
                masks = [budget_masks(maps, settings.budget).flatten(1) for maps in (first, second)]
                correlations[method] += map_similarity(first, second)["spearman"].tolist()
                constant = first.degenerate | second.degenerate
                overlaps[method] += mask_overlap(*masks).masked_fill(constant, math.nan).tolist()
    rows = (
        (m, mean_value(correlations[m], settings.seed), mean_value(overlaps[m], settings.seed),
         min((v for v in overlaps[m] if not math.isnan(v)), default=math.nan))
        for m in settings.methods
    )  # fmt: skip
    images = sum(len(batch.ids) for batch in batches)
    budget = f"{settings.budget:.0%}"
    return TABLES.fill("repeats", rows, images=images, repeats=settings.repeats, budget=budget)


def sweep_table(results: LocaliseResults, methods: Mapping[int, str]) -> Table:
    """By number of segments: localisation and faithfulness on the same images."""
    return TABLES.fill("segments", methods.items(), results=results, images=len(results.images))


def report_figures(results: LocaliseResults) -> dict[str, Any]:
    """Scores against the budget, and mean deletion and insertion curves."""
    budgets, tenths = budgets_of(results.budget), range(0, 101, 10)
    percents = [100 * budget for budget in budgets]

    def panel(title: str, x: Sequence[float], y: Mapping[str, Sequence[float]], **axes: Any) -> Panel:
        real, floors = ([m for m in y if is_floor(m) == is_] for is_ in (False, True))
        styles = {m: line_style(k) for k, m in enumerate(real)} | {
            m: {"color": GREY, "linestyle": DASHES[k % 3], "linewidth": 1.2} for k, m in enumerate(floors)
        }
        lines = [Line(x, of, m, styles[m]) for m, of in y.items()]
        return Panel(lines, {"title": title, "ylim": (0, 1.02), **axes})

    located = []
    for metric in ("mask_iou", "box_iou", "inside"):
        curves = {m: budget_curve(results, m, metric) for m in results.methods}
        drawn = panel(TITLES[metric], percents, curves, xlabel="kept pixels, %")
        more = []
        if metric == "mask_iou":
            reachable = budget_curve(results, results.methods[0], "reachable")
            more = [Line(percents, reachable, "reachable", {"color": "black", "linewidth": 0.8})]
        located.append(Panel([*drawn.lines, *more], drawn.axes, [100 * results.budget]))
    walked = []
    for kind in ("deletion", "insertion"):
        curves = {m: [results.macro(m, f"{kind}_at_{p}").value for p in tenths] for m in results.methods}
        labels = {"xlabel": "pixels, %", "ylabel": "probability of the class"}
        walked.append(panel(kind, tenths, curves, **labels))
    return {
        name: figures.lines([panels], 3.1 * len(panels) + 1.8, 3.2)
        for name, panels in (("budgets", located), ("faithfulness", walked))
    }
