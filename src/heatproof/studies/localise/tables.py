"""The thesis's tables, per class and as macro means, for every method with the floors beside them; flags.

What the thesis published stands beside what a run found. Reference, never truth: another network, other
images. keak2026budget, tables 2 and 3, means over 43 classes: ResNet-18 (timm resnet18.a1_in1k), 1,122
validation photographs with one box that covers 10 to 80 % of the picture, top 20 % of the pixels, blur.
The text beside table 2 prints LIME's pointing score as 0.8951; the table, and its 43 classes, give 0.8591.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from heatproof.explain.api import read_methods
from heatproof.report.tables import Cell, Column, Table, Value
from heatproof.studies.localise.scored import OF_A_METHOD, REASONS, ByClass, Flag, Scored, macro_value
from heatproof.studies.localise.settings import FlagThresholds
from heatproof.studies.skeleton import floor_rows

THESIS = {  # Grad-CAM, LIME
    "box_iou": (0.5922, 0.5532),
    "mask_iou": (0.3751, 0.2881),
    "pointing": (0.9728, 0.8591),
    "deletion": (0.1610, 0.2097),
    "insertion": (0.6369, 0.5957),
}
THESIS_RECALL = 0.7934
PAIR = ("gradcam", "lime")
NAMES = {
    "mask_iou": "Mask IoU",
    "box_iou": "Box IoU",
    "inside": "Inside share",
    "pointing": "Pointing game",
    "insertion": "Insertion AUC",
    "deletion": "Deletion AUC",
}
LOWER_IS_BETTER = ("deletion",)
LOCALISATION = ("mask_iou", "box_iou", "inside", "pointing")
FAITHFULNESS = ("insertion", "deletion")
MEAN = "mean over classes"
BOX_NOTE = (
    "Box IoU flatters scattered maps: the tight box of pixels strewn all over is the whole picture, so that "
    "random gets the share of the picture that the box covers."
)
FLOOR_NOTE = (
    "random, edges and centre know nothing of the model: a method that is not above them explains nothing. "
    "Values are means of class means with 95 % bootstrap intervals over the images of each class; the best "
    "method is bold, the second slanted, floors and published rows do not compete. Constant maps are misses "
    "in the pointing game and left out of all other means."
)


def class_value(values: Sequence[float], seed: int = 0) -> Value:
    """The mean of a class's images; an interval needs two."""
    return macro_value({0: values}, seed)


def head(metric: str) -> Column:
    return Column(NAMES[metric], ".3f", metric not in LOWER_IS_BETTER)


def method_table(scored: Scored, name: str, title: str, metrics: Sequence[str]) -> Table:
    """A row per method: macro means; then what the thesis published."""
    rows: list[tuple[Cell, ...]] = []
    for method in scored.methods:
        constant = scored.column(method, "degenerate")
        share = sum(constant.values()) / max(1, len(constant))
        means = [scored.macro(method, metric) for metric in metrics]
        rows.append((method, min((m.n or 0) for m in means), share, *means))
    for k, method in enumerate(("Grad-CAM (thesis)", "LIME (thesis)")):
        published = [THESIS[metric][k] if metric in THESIS else None for metric in metrics]
        rows.append((method, None, None, *published))
    unranked = floor_rows(scored.methods) | {len(rows) - 2, len(rows) - 1}
    note = FLOOR_NOTE + (f" {BOX_NOTE}" if "box_iou" in metrics else "")
    columns = (Column("Method"), Column("images"), Column("constant maps", ".1%"), *map(head, metrics))
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
    rows: list[tuple[Cell, ...]] = []
    for label, shown in classes.items():
        cells = [class_value(groups.get(label, ()), seed).value for _, groups in columns]
        rows.append((str(label), shown, sizes[label], *cells))
    means = [macro_value(groups, seed) for _, groups in columns]
    rows.append(("", MEAN, sum(sizes.values()), *means))
    heads = (Column("ID"), Column("Class"), Column("n"), *(column for column, _ in columns))
    return Table(name, title, heads, tuple(rows), note, marked=False)


def class_tables(scored: Scored) -> list[Table]:
    """Tables 2 and 3 of the thesis, for two methods: Grad-CAM and LIME, else the first two."""
    methods = pair_of(scored) or scored.real_methods[:2]
    sizes = {label: len(values) for label, values in scored.recall().items()}
    classes = {label: scored.class_name(label) for label in sizes}

    def columns(metrics: Sequence[str]) -> list[tuple[Column, ByClass]]:
        return [
            (Column(f"{NAMES[m]}, {method}", ".3f", head(m).higher_is_better),
             scored.by_class(scored.column(method, m)))
            for m in metrics for method in methods
        ]  # fmt: skip

    recall = [(Column("Recall", ".3f", True), scored.recall())]
    every = "The same for all methods, with intervals: tables/classes.csv."
    return [
        class_table("localisation_by_class", f"Localisation by class, {scored.budget:.0%}", classes, sizes,
                    columns(("box_iou", "mask_iou", "inside", "pointing")), every, scored.seed),
        class_table("faithfulness_by_class", "Recall and faithfulness by class", classes, sizes,
                    recall + columns(("deletion", "insertion")), every, scored.seed),
    ]  # fmt: skip


def long_table(scored: Scored) -> Table:
    """A row per class and method with every metric and its interval, for files."""
    metrics, seed = (*LOCALISATION, *FAITHFULNESS), scored.seed
    rows: list[tuple[Cell, ...]] = []
    columns = {(m, k): scored.by_class(scored.column(m, k)) for m in scored.methods for k in metrics}
    for label, hits in scored.recall().items():
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
    unranked = floor_rows(scored.methods) | {len(rows)}
    reach = (scored.macro(scored.methods[0], "reachable", budget).value for budget in budgets)
    rows.append(("reachable", *reach))
    heads = (Column("Method"), *(Column(f"{budget:.0%}", ".3f", True) for budget in budgets))
    title = f"{NAMES[metric]} at budgets from {budgets[0]:.0%} to {budgets[-1]:.0%} of the pixels"
    return Table(f"budget_{metric}", title, heads, tuple(rows), unranked=unranked)


@dataclass(frozen=True)
class Order:
    """Which of the two methods is ahead on one mean, and how sure that is."""

    metric: str
    ours: tuple[Value, Value]
    difference: Value  # Grad-CAM minus LIME, image by image, turned so that positive means Grad-CAM is better

    @property
    def agrees(self) -> bool:
        """The thesis has Grad-CAM ahead on all five."""
        return self.difference.value > 0

    @property
    def certain(self) -> bool:
        low, high = self.difference.interval or (float("-inf"), float("inf"))
        return low > 0 or high < 0

    @property
    def verdict(self) -> str:
        if not self.difference.value:
            return "level"
        word = "as in the thesis" if self.agrees else "the other way round"
        return word if self.certain else f"{word}, not certain"


def pair_of(scored: Scored) -> tuple[str, str] | None:
    """The run's Grad-CAM and LIME, as it names them."""
    found = {read_methods([method])[0].entry.name: method for method in reversed(scored.methods)}
    return (found[PAIR[0]], found[PAIR[1]]) if all(name in found for name in PAIR) else None


def orders(scored: Scored) -> list[Order]:
    """The thesis's five comparisons on this run; empty where one of the two methods is missing."""
    pair = pair_of(scored)
    if pair is None:
        return []
    found = []
    for metric in THESIS:
        columns = [scored.column(method, metric) for method in pair]
        both = [i for i in columns[0] if not any(math.isnan(one.get(i, math.nan)) for one in columns)]
        ours = [{image: one[image] for image in both} for one in columns]
        sign = -1 if metric in LOWER_IS_BETTER else 1
        apart = {image: sign * (ours[0][image] - ours[1][image]) for image in both}
        first, second, gap = (macro_value(scored.by_class(c), scored.seed) for c in (*ours, apart))
        found.append(Order(metric, (first, second), gap))
    return found


def order_table(found: list[Order]) -> Table:
    rows = [
        (
            NAMES[order.metric] + (" (lower is better)" if order.metric in LOWER_IS_BETTER else ""),
            *THESIS[order.metric], *order.ours, order.difference, order.verdict,
        )
        for order in found
    ]  # fmt: skip
    heads = (
        "Mean",
        "thesis Grad-CAM",
        "thesis LIME",
        "our Grad-CAM",
        "our LIME",
        "Grad-CAM ahead by",
        "order",
    )
    note = (
        "The thesis's numbers belong to another network and other photographs: compare the order, not the "
        "values. Means over the images on which both methods are defined. An order is certain where the 95 % "
        "interval of the paired difference leaves out 0."
    )
    title = "Grad-CAM against LIME, here and in the thesis"
    return Table("order", title, tuple(map(Column, heads)), tuple(rows), note, marked=False)


def order_text(found: list[Order]) -> str:
    """Where the order is that of the thesis, and where it is not."""
    if not found:
        return "The thesis compares Grad-CAM with LIME; this run lacks one of them, so there is no order."
    agree = [NAMES[o.metric] for o in found if o.agrees]
    others = {
        "LIME is ahead on": [o for o in found if o.difference.value < 0],
        "They are level on": [o for o in found if o.difference.value == 0],
        "The difference is not certain (its 95 % interval holds 0) for": [
            o for o in found if not o.certain and o.difference.value
        ],
    }
    text = f"In the thesis Grad-CAM is ahead of LIME on all five means. Here it is ahead on {len(agree)} of 5"
    text += f" ({', '.join(agree)})." if agree else "."
    said = (f" {what} {', '.join(NAMES[o.metric] for o in some)}." for what, some in others.items() if some)
    return text + "".join(said)


def count_table(flags: list[Flag], scored: Scored, limits: FlagThresholds) -> Table:
    """How many images raise each flag, by method; the rule beside it."""
    given = {**vars(limits), "overlap": scored.budget if limits.overlap is None else limits.overlap}
    rows: list[tuple[Cell, ...]] = []
    for kind, reason in REASONS.items():
        mine = [flag for flag in flags if flag.kind == kind]
        methods = scored.real_methods if kind in OF_A_METHOD else []
        by_method = [f"{m}: {sum(f.method == m for f in mine)}" for m in methods]
        images = f"{len({flag.image for flag in mine})} of {len(scored.images)}"
        rows.append((kind, images, ", ".join(by_method), reason.format(**given)))
    heads = (Column("Flag"), Column("images"), Column("by method"), Column("rule and its reason"))
    return Table("flags", "Shortcut flags", heads, tuple(rows), marked=False)


def flag_table(flags: list[Flag], scored: Scored) -> Table:
    """Every flag with the image that raised it."""

    def classes(image: str) -> tuple[str, str]:
        return scored.class_name(scored.labels[image]), scored.class_name(scored.predicted[image])

    rows = tuple((f.kind, f.image, *classes(f.image), f.method, f.why) for f in flags)
    heads = map(Column, ("Flag", "image", "true class", "predicted", "method", "what was seen"))
    return Table("flagged_images", "Images that raised a flag", tuple(heads), rows, marked=False)
