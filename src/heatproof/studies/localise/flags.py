"""What the thesis finds by eye in its case studies, found by rule. A flag asks for a look, it proves nothing.

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
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import NamedTuple

from heatproof.metrics.localisation import budget_masks, kept_pixels
from heatproof.report.tables import Cell, Column, Table
from heatproof.studies.localise.scored import Scored, budgets_of
from heatproof.studies.localise.settings import Thresholds
from heatproof.types import Maps

HIT, OFF = "hit but unfaithful", "faithful but off-object"
WRONG, RISING, DISAGREE = "confident and wrong", "rising deletion", "methods disagree"
KINDS = (HIT, OFF, WRONG, RISING, DISAGREE)


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


class Flag(NamedTuple):
    """One rule that one image broke; severity is how far, to show the worst first."""

    kind: str
    image: str
    method: str  # "" for what concerns the image alone
    severity: float
    why: str


def raise_flags(scored: Scored, overlaps: Mapping[str, float], limits: Thresholds) -> list[Flag]:
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


def _confident_and_wrong(scored: Scored, image: str, limits: Thresholds) -> Iterator[Flag]:
    guess, label = scored.predicted[image], scored.labels[image]
    chance = scored.chances.get((image, guess), math.nan)
    if guess != label and chance > limits.confident:
        own = scored.chances.get((image, label), math.nan)
        why = f"{scored.class_name(guess)} with {chance:.0%}, true class {own:.0%}"
        yield Flag(WRONG, image, "", chance, why)


def _of_method(scored: Scored, image: str, method: str, limits: Thresholds) -> Iterator[Flag]:
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
    )  # fmt: skip
    return small / at_small if at_next > at_small else at_small * small


def overlap_of_methods(maps: Mapping[str, Maps], budget: float) -> dict[str, float]:
    """Per image, the mean over pairs of methods of the share of kept pixels they have in common.

    Constant maps keep no pixel that means anything and are left out; NaN where fewer than two are left.
    """
    kept = {method: budget_masks(one, budget).flatten(1) for method, one in maps.items()}
    shares: dict[str, list[float]] = {}
    for a, b in combinations(maps, 2):
        count = kept_pixels(budget, maps[a].image_size)
        usable = ~(maps[a].degenerate | maps[b].degenerate)
        common = (kept[a] & kept[b]).sum(1) / count
        for image, share, use in zip(maps[a].ids, common.tolist(), usable.tolist(), strict=True):
            shares.setdefault(image, []).extend([share] if use else [])
    return {image: sum(lot) / len(lot) if lot else math.nan for image, lot in shares.items()}


def count_table(flags: list[Flag], scored: Scored, limits: Thresholds) -> Table:
    """How many images raise each flag, by method; the rule beside it."""
    given = {**vars(limits), "overlap": scored.budget if limits.overlap is None else limits.overlap}
    rows: list[tuple[Cell, ...]] = []
    for kind in KINDS:
        mine = [flag for flag in flags if flag.kind == kind]
        methods = scored.real_methods if kind in (HIT, OFF, RISING) else [""]
        by_method = [f"{m}: {sum(f.method == m for f in mine)}" for m in methods if m]
        images = len({flag.image for flag in mine})
        rows.append(
            (kind, f"{images} of {len(scored.images)}", ", ".join(by_method), REASONS[kind].format(**given))
        )
    heads = (Column("Flag"), Column("images"), Column("by method"), Column("rule and its reason"))
    return Table("flags", "Shortcut flags", heads, tuple(rows), marked=False)


def flag_table(flags: list[Flag], scored: Scored) -> Table:
    """Every flag with the image that raised it."""

    def classes(image: str) -> tuple[str, str]:
        return scored.class_name(scored.labels[image]), scored.class_name(scored.predicted[image])

    rows = tuple((f.kind, f.image, *classes(f.image), f.method, f.why) for f in flags)
    heads = tuple(Column(n) for n in ("Flag", "image", "true class", "predicted", "method", "what was seen"))
    return Table("flagged_images", "Images that raised a flag", heads, rows, marked=False)
