"""What the thesis published, beside what a run found. Reference, never truth: another network, other images.

keak2026budget, tables 2 and 3, means over 43 classes: ResNet-18 (timm resnet18.a1_in1k), 1,122 validation
photographs with one box that covers 10 to 80 % of the picture, top 20 % of the pixels, blur baseline.
The text beside table 2 prints LIME's pointing score as 0.8951; the table, and its 43 classes, give 0.8591.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from heatproof.report.tables import Column, Table, Value
from heatproof.studies.localise.scored import Scored, entry_name, macro_value

MEANS = {  # Grad-CAM, LIME
    "box_iou": (0.5922, 0.5532),
    "mask_iou": (0.3751, 0.2881),
    "pointing": (0.9728, 0.8591),
    "deletion": (0.1610, 0.2097),
    "insertion": (0.6369, 0.5957),
}
RECALL = 0.7934
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
        word = (
            "as in the thesis"
            if self.agrees
            else "the other way round"
            if self.difference.value < 0
            else "level"
        )
        return word if self.certain or not self.difference.value else f"{word}, not certain"


def pair_of(scored: Scored) -> tuple[str, str] | None:
    """The run's Grad-CAM and LIME, as it names them."""
    found = {entry_name(method): method for method in reversed(scored.methods)}
    return (found[PAIR[0]], found[PAIR[1]]) if all(name in found for name in PAIR) else None


def orders(scored: Scored, seed: int = 0) -> list[Order]:
    """The thesis's five comparisons on this run; empty where one of the two methods is missing."""
    pair = pair_of(scored)
    if pair is None:
        return []
    found = []
    for metric in MEANS:
        columns = [scored.column(method, metric) for method in pair]
        both = [i for i in columns[0] if not any(math.isnan(one.get(i, math.nan)) for one in columns)]
        ours = [{image: one[image] for image in both} for one in columns]
        sign = -1 if metric in LOWER_IS_BETTER else 1
        apart = {image: sign * (ours[0][image] - ours[1][image]) for image in both}
        means = (macro_value(scored.by_class(ours[0]), seed), macro_value(scored.by_class(ours[1]), seed))
        found.append(Order(metric, means, macro_value(scored.by_class(apart), seed)))
    return found


def order_table(found: list[Order]) -> Table:
    rows = [
        (
            NAMES[order.metric] + (" (lower is better)" if order.metric in LOWER_IS_BETTER else ""),
            *MEANS[order.metric], *order.ours, order.difference, order.verdict,
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
    return Table(
        "order",
        "Grad-CAM against LIME, here and in the thesis",
        tuple(Column(name) for name in heads),
        tuple(rows),
        "The thesis's numbers belong to another network and other photographs: compare the order, not the "
        "values. Means over the images on which both methods are defined. An order is certain where the 95 % "
        "interval of the paired difference leaves out 0.",
        marked=False,
    )


def order_text(found: list[Order]) -> str:
    """Where the order is that of the thesis, and where it is not."""
    if not found:
        return "The thesis compares Grad-CAM with LIME; this run lacks one of them, so there is no order."
    agree = [NAMES[o.metric] for o in found if o.agrees]
    differ = [NAMES[o.metric] for o in found if o.difference.value < 0]
    level = [NAMES[o.metric] for o in found if o.difference.value == 0]
    unsure = [NAMES[o.metric] for o in found if not o.certain and o.difference.value]
    text = f"In the thesis Grad-CAM is ahead of LIME on all five means. Here it is ahead on {len(agree)} of 5"
    text += f" ({', '.join(agree)})." if agree else "."
    if differ:
        text += f" LIME is ahead on {', '.join(differ)}."
    if level:
        text += f" They are level on {', '.join(level)}."
    if unsure:
        text += f" The difference is not certain (its 95 % interval holds 0) for {', '.join(unsure)}."
    return text
