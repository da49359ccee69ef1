"""The thesis's two tables: per class and as macro means, for every method, with the floors beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from heatproof.report.tables import Cell, Column, Table, Value
from heatproof.studies.localise import thesis
from heatproof.studies.localise.scored import FLOORS, ByClass, Scored, class_value, entry_name, macro_value

LOCALISATION = ("mask_iou", "box_iou", "inside", "pointing")
FAITHFULNESS = ("insertion", "deletion")
MEAN = "mean over classes"
BOX_NOTE = (
    "Box IoU flatters scattered maps: the tight box of pixels strewn all over is the whole picture, so that "
    "random gets the share of the picture that the box covers."
)
FLOOR_NOTE = (
    "random, edges and centre know nothing of the model: a method that is not above them explains nothing. "
    "Values are means of class means with 95 % bootstrap intervals over images; the best method is bold, the "
    "second slanted, floors and published rows do not compete. Constant maps say nothing; in insertion and "
    "deletion they are left out."
)


def head(metric: str) -> Column:
    return Column(thesis.NAMES[metric], ".3f", metric not in thesis.LOWER_IS_BETTER)


def method_table(scored: Scored, name: str, title: str, metrics: Sequence[str], seed: int = 0) -> Table:
    """A row per method: macro means; then what the thesis published."""
    rows: list[tuple[Cell, ...]] = []
    for method in scored.methods:
        constant = scored.column(method, "degenerate")
        share = sum(constant.values()) / max(1, len(constant))
        means = [scored.macro(method, metric, seed=seed) for metric in metrics]
        rows.append((method, min((m.n or 0) for m in means), share, *means))
    unranked = {i for i, method in enumerate(scored.methods) if entry_name(method) in FLOORS}
    for k, method in enumerate(("Grad-CAM (thesis)", "LIME (thesis)")):
        published = [thesis.MEANS[metric][k] if metric in thesis.MEANS else None for metric in metrics]
        unranked.add(len(rows))
        rows.append((method, None, None, *published))
    note = FLOOR_NOTE + (f" {BOX_NOTE}" if "box_iou" in metrics else "")
    columns = (Column("Method"), Column("images"), Column("constant maps", ".1%"), *map(head, metrics))
    return Table(name, title, columns, tuple(rows), note, unranked=frozenset(unranked))


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
    rows: list[tuple[Cell, ...]] = []
    for label, shown in classes.items():
        cells = [class_value(groups.get(label, ()), seed).value for _, groups in columns]
        rows.append((str(label), shown, sizes[label], *cells))
    means = [macro_value(groups, seed) for _, groups in columns]
    rows.append(("", MEAN, sum(sizes.values()), *means))
    heads = (Column("ID"), Column("Class"), Column("n"), *(column for column, _ in columns))
    return Table(name, title, heads, tuple(rows), note, marked=False)


def compared(scored: Scored) -> list[str]:
    """The two methods whose class tables go on the page: Grad-CAM and LIME, else the first two."""
    return list(thesis.pair_of(scored) or scored.real_methods[:2])


def class_tables(scored: Scored, seed: int = 0) -> list[Table]:
    """Tables 2 and 3 of the thesis, for two methods."""
    methods = compared(scored)
    sizes = {label: len(values) for label, values in scored.recall().items()}
    classes = {label: scored.class_name(label) for label in sizes}

    def columns(metrics: Sequence[str]) -> list[tuple[Column, ByClass]]:
        return [
            (Column(f"{thesis.NAMES[m]}, {method}", ".3f", head(m).higher_is_better),
             scored.by_class(scored.column(method, m)))
            for m in metrics for method in methods
        ]  # fmt: skip

    recall = [(Column("Recall", ".3f", True), scored.recall())]
    every = "The same for all methods, with intervals: tables/classes.csv."
    return [
        class_table("localisation_by_class", f"Localisation by class, {scored.budget:.0%}", classes, sizes,
                    columns(("box_iou", "mask_iou", "inside", "pointing")), every, seed),
        class_table("faithfulness_by_class", "Recall and faithfulness by class", classes, sizes,
                    recall + columns(("deletion", "insertion")), every, seed),
    ]  # fmt: skip


def long_table(scored: Scored, seed: int = 0) -> Table:
    """A row per class and method with every metric and its interval, for files."""
    metrics = (*LOCALISATION, *FAITHFULNESS)
    rows: list[tuple[Cell, ...]] = []
    recall = scored.recall()
    columns = {(m, k): scored.by_class(scored.column(m, k)) for m in scored.methods for k in metrics}
    for label, hits in recall.items():
        for method in scored.methods:
            values = [class_value(columns[method, k].get(label, ()), seed) for k in metrics]
            rows.append((str(label), scored.class_name(label), method, class_value(hits, seed), *values))
    heads = (Column("ID"), Column("Class"), Column("Method"), Column("Recall"), *map(head, metrics))
    return Table("classes", "Every class and method", heads, tuple(rows), marked=False)


def budget_table(scored: Scored, budgets: Sequence[float], metric: str = "mask_iou") -> Table:
    """A metric at every budget, macro means; the last row is the most that a mask of that size can reach."""
    rows: list[tuple[Cell, ...]] = [
        (method, *(scored.macro(method, metric, budget).value for budget in budgets))
        for method in scored.methods
    ]
    unranked = {i for i, method in enumerate(scored.methods) if entry_name(method) in FLOORS} | {len(rows)}
    reach = (scored.macro(scored.methods[0], "reachable", budget).value for budget in budgets)
    rows.append(("reachable", *reach))
    heads = (Column("Method"), *(Column(f"{budget:.0%}", ".3f", True) for budget in budgets))
    title = f"{thesis.NAMES[metric]} at budgets from {budgets[0]:.0%} to {budgets[-1]:.0%} of the pixels"
    return Table(f"budget_{metric}", title, heads, tuple(rows), unranked=frozenset(unranked))


def recall_value(scored: Scored, seed: int = 0) -> Value:
    return macro_value(scored.recall(), seed)
