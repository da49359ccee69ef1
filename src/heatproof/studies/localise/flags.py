"""Shortcut flags: rules for what the thesis finds by eye in its case studies; a flag proves nothing.

hit but unfaithful        the map's maximum lies in the box, but showing its pixels first does not bring the
                          class back: the map sits on the object for another reason than the model's
faithful but off-object   showing its pixels first brings the class back, but they lie beside the object: the
                          model reads the surroundings (the thesis's flames, containers, V-shaped horizons)
confident and wrong       another class gets more than half of the probability
rising deletion           taking the map's best pixels away makes the class more likely: they spoke against it
methods disagree          the methods' best pixels overlap no more than random ones would

keak2026budget describes these in words and images; the thresholds are ours, with their reasons in REASONS.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import NamedTuple

from heatproof.metrics.localisation import budget_masks, mask_overlap
from heatproof.store import RunFolder
from heatproof.studies.localise.results import LocaliseResults, budgets_of
from heatproof.studies.localise.settings import FlagThresholds
from heatproof.types import Maps

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
