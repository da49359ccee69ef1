"""The page of a contrast study: one HTML file that opens from disk and loads nothing."""

from __future__ import annotations

import math

import torch
from markupsafe import Markup
from PIL import Image

from heatproof.contrast.api import Contrast, ContrastPoint
from heatproof.contrast.score import SHOWN, TOKEN_REMOVED
from heatproof.explain.floors import is_floor
from heatproof.report.panels import Tile, sheet
from heatproof.report.pieces import (
    Grid,
    Line,
    LinePanel,
    Panels,
    asset,
    fill,
    named,
    number,
    policy,
    with_sub,
)
from heatproof.show import address, overlay
from heatproof.types import Maps

SIDE = 112  # pixels of a picture in a strip
A, B = "A uses the token", "B does not"


def contrast_page(found: Contrast) -> str:
    """The page as text."""
    judged = [point for point in found.points if point.scores]
    content = {
        "this": found,
        "policy": policy(""),
        "style": Markup(asset("page.css")),
        "answers": answers(found),
        "tables": [(point, table(point)) for point in found.points],
        "curves": _curves(found) if len(judged) > 1 else None,
        "strips": [(m, address(strip(found, m))) for m, score in found.scores.items() if score.maps],
    }
    return str(fill("contrast", content, "studies/contrast"))


def answers(found: Contrast) -> list[str]:
    """What each method shows, in a sentence."""
    said = []
    for method in found.methods:
        if method == TOKEN_REMOVED or is_floor(method):
            continue
        least = found.shown_from(method)
        best = max(point.scores[method].auc for point in found.points if method in point.scores)
        if least is not None:
            said.append(
                f"{method} shows the {found.token.name} once it is in {least:.0%} of the positives."
                if len(found.points) > 1
                else f"{method} shows the {found.token.name}."
            )
        elif any(p.scores[method].interval[0] > 0.5 for p in found.points if method in p.scores):
            said.append(
                f"{method} tells the networks apart (AUC {best:.2f}), but a person would not see the "
                f"{found.token.name} in most of its maps."
            )
        else:
            said.append(f"{method} does not tell the two networks apart (AUC {best:.2f}).")
    return said


def table(point: ContrastPoint) -> Grid | None:
    if not point.scores:
        return None
    rows = []
    for score in point.scores.values():
        kind = "floor" if is_floor(score.method) else "control" if score.method == TOKEN_REMOVED else ""
        low, high = score.interval
        seen = "–" if math.isnan(score.seen) else f"{score.seen:.0%}"
        rows.append(
            [
                with_sub(named(score.method), kind) if kind else named(score.method),
                with_sub(number(score.auc), f"{number(low)} to {number(high)}"),
                seen, number(float(score.a.mean())), number(float(score.b.mean())),
                f"{score.blank[0]} and {score.blank[1]}",
            ]
        )  # fmt: skip
    heads = [
        "Method",
        "AUC of A against B ↑",
        "a person would see it",
        "score under A",
        "under B",
        "blank maps",
    ]
    return Grid(heads, rows, f"Methods with the token in {point.strength:.0%} of the positives")


def _curves(found: Contrast) -> Panels:
    """A panel per method: AUC, and the share of pictures in which it is seen, over the strengths."""
    strengths = sorted(point.strength for point in found.points)
    ticks = [(strength, f"{strength:.0%}") for strength in strengths]
    panels = []
    for method in found.methods:
        if method == TOKEN_REMOVED:
            continue
        scored = [(p.strength, p.scores[method]) for p in reversed(found.points) if method in p.scores]
        lines = [
            Line("AUC", [(strength, score.auc) for strength, score in scored]),
            Line("seen", [(strength, score.seen) for strength, score in scored], "two"),
        ]
        n = max((score.n for _, score in scored), default=0)
        panels.append((f"{method}, n = {n}", LinePanel(f"{method} by strength", lines, ticks)))
    return Panels(panels)


def strip(found: Contrast, method: str, most: int = SHOWN, heading: str = "") -> Image.Image:
    """Pictures with the token, each beside its maps under A and under B; two of them in a row."""
    score, laid = found.scores[method], maps_over_pictures(found, method)
    tiles = []
    for i, picture in enumerate(found.pictures[:most]):
        tiles.append(Tile(picture, "the picture"))
        for drawn, inside, title in zip(laid, (score.a, score.b), (A, B), strict=True):
            tiles.append(Tile(drawn[i], title, f"{inside[i]:.0%} on the token"))
    rows = [tiles[start : start + 6] for start in range(0, len(tiles), 6)]
    return sheet(rows, heading=heading, side=SIDE)


def maps_over_pictures(found: Contrast, method: str) -> list[list[Image.Image]]:
    """A method's maps under A, then those under B, each laid over its picture."""
    size = (found.pictures[0].height, found.pictures[0].width)
    maps = [
        Maps(method, torch.from_numpy(values), size, torch.zeros(len(values))).for_display()
        for values in found.scores[method].maps
    ]
    return [[overlay(*both) for both in zip(found.pictures, heats, strict=False)] for heats in maps]
