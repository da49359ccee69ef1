"""The panels of the localisation study: one picture, every view of its explanations, a row per method.

    original with box | heatmap | top-5 positive segments | top-10 segments, green for and red against |
    top-K mask | deletion (red) and insertion (green) curves

keak2026budget shows these for Grad-CAM and LIME; LIME's own three pictures are the heatmap and the two with
segments. For methods without segments of their own, a segment weighs what the map is worth in it on average.
Pillow only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from heatproof.report.panels import INK, PAPER, Tile, sheet
from heatproof.show import overlay

GREEN, RED, BOX = (0, 158, 60), (213, 40, 30), (0, 220, 70)
SHADE = 0.5  # weight of green and red over a segment
DIM = 0.25  # what is left of the picture outside a mask
SHARPER = 3  # curves are drawn this much larger, then made smaller


@dataclass(frozen=True)
class View:
    """One method's explanation of one picture, in the picture's pixels."""

    method: str
    heat: Any  # "H W" in [0, 1]
    positive: Any  # "H W": 1 in the segments that speak most for the class
    signed: Any  # "H W" of -1, 0, 1
    kept: Any  # "H W" bool, the budget's pixels
    deletion: Sequence[float]
    insertion: Sequence[float]
    notes: tuple[str, str] = ("", "")  # under the mask, under the curves


def case_study(
    picture: Image.Image, boxes: Sequence[Sequence[float]], views: Sequence[View], heading: str, budget: float
) -> Image.Image:
    """All views of one picture; the maps are the size of the picture."""
    shown = with_boxes(picture, boxes)
    rows = [
        [
            Tile(shown, "original, box"),
            Tile(overlay(picture, view.heat), view.method),
            Tile(tinted(picture, view.positive, dim=True), "top 5 for the class"),
            Tile(tinted(picture, view.signed), "top 10, for and against"),
            Tile(with_boxes(tinted(picture, view.kept, dim=True), boxes), f"top {budget:.0%}", view.notes[0]),
            Tile(curves(view.deletion, view.insertion, picture.size), "deletion, insertion", view.notes[1]),
        ]
        for view in views
    ]
    return sheet(rows, heading=heading, cmap="inferno")


@dataclass(frozen=True)
class ClassMap:
    """One method's map for one class of a confused picture."""

    method: str
    heat: Any  # "H W" in [0, 1]
    kept: Any  # "H W" bool


def confusion(
    picture: Image.Image,
    boxes: Sequence[Sequence[float]],
    sides: Sequence[Sequence[ClassMap]],
    classes: tuple[str, str],
    heading: str,
    budget: float,
) -> Image.Image:
    """A wrongly classified picture: each method's map for the true and for the predicted class, side by side.

    sides: for each method (true class, predicted class). classes: what to write above them, in that order.
    """
    shown = with_boxes(picture, boxes)
    rows = []
    for true, guessed in sides:
        both = tinted(picture, np.asarray(true.kept).astype(int) - np.asarray(guessed.kept).astype(int))
        rows.append(
            [
                Tile(shown, true.method),
                Tile(overlay(picture, true.heat), f"true: {classes[0]}"),
                Tile(overlay(picture, guessed.heat), f"predicted: {classes[1]}"),
                Tile(both, f"top {budget:.0%} of one only", "green: true class, red: predicted"),
            ]
        )
    return sheet(rows, heading=heading, cmap="inferno")


def with_boxes(picture: Image.Image, boxes: Sequence[Sequence[float]]) -> Image.Image:
    """The picture with a green frame around each box."""
    drawn = picture.convert("RGB")
    pen = ImageDraw.Draw(drawn)
    width = max(1, round(max(picture.size) / 100))
    for x0, y0, x1, y1 in boxes:
        pen.rectangle((x0, y0, x1, y1), outline=BOX, width=width)
    return drawn


def tinted(picture: Image.Image, marks: Any, dim: bool = False) -> Image.Image:
    """Green over marks above 0, red over those below; `dim`: marks stay as they are, the rest goes dark."""
    signs = np.asarray(marks.cpu() if hasattr(marks, "cpu") else marks).astype(int)
    pixels = np.asarray(picture.convert("RGB"), dtype=np.float64)
    if dim:
        mixed = np.where((signs > 0)[..., None], pixels, DIM * pixels)
    else:
        colour = np.where((signs > 0)[..., None], GREEN, RED)
        mixed = np.where((signs != 0)[..., None], (1 - SHADE) * pixels + SHADE * colour, pixels)
    return Image.fromarray(mixed.round().astype(np.uint8))


def curves(deletion: Sequence[float], insertion: Sequence[float], size: tuple[int, int]) -> Image.Image:
    """Probability against the share of pixels that were taken away (red) or shown (green)."""
    width, height = max(size[0], 224), max(size[1], 224)
    canvas = Image.new("RGB", (width * SHARPER, height * SHARPER), PAPER)
    pen = ImageDraw.Draw(canvas)
    font: Any = ImageFont.load_default(11 * SHARPER)
    left, right, top, bottom = 26 * SHARPER, (width - 8) * SHARPER, 8 * SHARPER, (height - 20) * SHARPER

    def at(x: float, y: float) -> tuple[float, float]:
        return left + x * (right - left), bottom - y * (bottom - top)

    for level in (0, 0.5, 1):
        pen.line([at(0, level), at(1, level)], fill=(215, 215, 215), width=SHARPER)
        pen.text((2 * SHARPER, at(0, level)[1] - 7 * SHARPER), f"{level:g}", fill=INK, font=font)
        start = min(at(level, 0)[0] - 9 * SHARPER, (width - 30) * SHARPER)
        pen.text((start, bottom + 3 * SHARPER), f"{level:.0%}", fill=INK, font=font)
    pen.line([at(0, 1), at(0, 0), at(1, 0)], fill=INK, width=SHARPER)
    for values, colour in ((deletion, RED), (insertion, GREEN)):
        points = [at(i / (len(values) - 1), float(v)) for i, v in enumerate(values) if v == v]
        if len(points) > 1:
            pen.line(points, fill=colour, width=2 * SHARPER, joint="curve")
    return canvas.resize((width, height), Image.Resampling.LANCZOS)
