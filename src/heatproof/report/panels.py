"""Heatmaps over pictures, and pictures side by side with their names. Pillow only.

An overlay is (1 - alpha) grey + alpha colour(map): the picture loses its own colours, so that every colour
left in it speaks of the map. The colour maps are perceptually uniform (equal steps of the map look equal)
and are kept as sixteen points, linear in between; that is within 7 of 255 of matplotlib's tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from heatproof.errors import InputError, UnknownNameError

COLOUR_MAPS = {
    "inferno": "000004 0c0826 240c4f 420a68 5d126e 781c6d 932667 ae305c c73e4c dd513a ed6925 f8850f fca50a "
    "fac62d f2e661 fcffa4",
    "magma": "000004 0b0924 20114b 3b0f70 57157e 721f81 8c2981 a8327d c43c75 de4968 f1605d fa7f5e fe9f6d "
    "febf84 fddea0 fcfdbf",
    "viridis": "440154 481a6c 472f7d 414487 39568c 31688e 2a788e 23888e 1f988b 22a884 35b779 54c568 7ad151 "
    "a5db36 d2e21b fde725",
    "grey": "000000 ffffff",
}
PAPER, INK, FAINT = (255, 255, 255), (20, 20, 20), (110, 110, 110)
SMALLEST_TILE = 224
GAP, TEXT, LINE = 14, 15, 21  # pixels: between tiles, height of the letters, from line to line


def colours(values: Any, cmap: str = "inferno") -> np.ndarray:
    """Values in [0, 1] of any shape -> the same shape with a last axis of red, green, blue (uint8).

    >>> colours([0.0, 1.0], "grey").tolist()
    [[0, 0, 0], [255, 255, 255]]
    """
    table = _points(cmap)
    values = np.clip(np.asarray(values, dtype=np.float64), 0, 1)
    at = np.linspace(0, 1, len(table))
    return np.stack([np.interp(values, at, column) for column in table.T], -1).round().astype(np.uint8)


@lru_cache
def _points(cmap: str) -> np.ndarray:
    if cmap not in COLOUR_MAPS:
        raise UnknownNameError("colour map", cmap, COLOUR_MAPS)
    return np.array([list(bytes.fromhex(point)) for point in COLOUR_MAPS[cmap].split()], dtype=np.float64)


def overlay(picture: Image.Image, heat: Any, cmap: str = "inferno", alpha: float = 0.6) -> Image.Image:
    """The map, "H W" in [0, 1], laid over the picture of the same size."""
    if not 0 <= alpha <= 1:
        raise InputError(f"alpha must be in [0, 1], got {alpha}")
    heat = np.asarray(heat.detach().cpu() if hasattr(heat, "detach") else heat)
    if heat.shape != (picture.height, picture.width):
        raise InputError(
            f"the map is {' x '.join(map(str, heat.shape))} but the picture is "
            f"{picture.height} x {picture.width}; upsample the map to the picture first"
        )
    grey = picture.convert("L").convert("RGB")
    return Image.blend(grey, Image.fromarray(colours(heat, cmap)), alpha)


def which_class(explained: int | None, label: int | None, predicted: int | None) -> str:
    """What the explained class is to its picture.

    >>> which_class(1, 1, 0), which_class(0, None, 0)
    ('true label', 'prediction')
    """
    names = [name for name, c in (("true label", label), ("prediction", predicted)) if c == explained]
    return " and ".join(names) or "a chosen class"


def explains(explained: int, label: int | None, predicted: int | None, named: Callable[[int], str]) -> str:
    """Which class a map is about, and where the network's answer is another one, that too.

    >>> explains(1, 1, 0, ["normal", "pneumonia"].__getitem__)
    'explains: pneumonia (true label); the network says: normal'
    """
    said = [f"explains: {named(explained)} ({which_class(explained, label, predicted)})"]
    if predicted not in (explained, None):
        said.append(f"the network says: {named(predicted)}")
    if label not in (explained, None):
        said.append(f"the true label is: {named(label)}")
    return "; ".join(said)


@dataclass(frozen=True)
class Tile:
    """One picture of a panel: its title above it, what is worth knowing below it."""

    picture: Image.Image
    title: str
    note: str = ""


def panel(
    tiles: Sequence[Tile], *, columns: int = 7, heading: str = "", cmap: str | None = None
) -> Image.Image:
    """Tiles side by side, at most `columns` in a row; with a colour bar where `cmap` is named."""
    rows = [tiles[start : start + columns] for start in range(0, len(tiles), columns)]
    return sheet(rows, heading=heading, cmap=cmap)


def sheet(
    rows: Sequence[Sequence[Tile]], *, heading: str = "", cmap: str | None = None, side: int = SMALLEST_TILE
) -> Image.Image:
    """Rows of tiles, each cell as large as the largest picture; small ones are enlarged to about `side`."""
    if not rows or not all(rows):
        raise InputError("a panel needs at least one tile in every row")
    pictures = [[_enlarged(tile.picture, side) for tile in row] for row in rows]
    wide = max(p.width for row in pictures for p in row)
    noted = [LINE * any(tile.note for tile in row) for row in rows]
    tall = [LINE + max(p.height for p in row) + note for row, note in zip(pictures, noted, strict=True)]
    bottom = LINE + GAP if cmap else 0
    width = GAP + max(len(row) for row in rows) * (wide + GAP)
    told = _wrapped(heading, width - 2 * GAP)
    top = GAP + LINE * len(told) + GAP // 2 * bool(told)
    canvas = Image.new("RGB", (width, top + sum(tall) + GAP * len(rows) + bottom), PAPER)
    pen = ImageDraw.Draw(canvas)
    for i, line in enumerate(told):
        _write(pen, (GAP, GAP - 4 + LINE * i), line, width - 2 * GAP)
    y = top
    for row, made, height in zip(rows, pictures, tall, strict=True):
        for i, (tile, picture) in enumerate(zip(row, made, strict=True)):
            x = GAP + i * (wide + GAP)
            _write(pen, (x, y), tile.title, wide)
            canvas.paste(picture, (x, y + LINE))
            if tile.note:
                _write(pen, (x, y + LINE + picture.height + 3), tile.note, wide, FAINT)
        y += height + GAP
    if cmap:
        _colour_bar(canvas, pen, y, cmap)
    return canvas


def _enlarged(picture: Image.Image, side: int) -> Image.Image:
    """Small pictures in whole multiples, so that every pixel stays a square one can see."""
    factor = max(1, round(side / max(picture.size)))
    return ImageOps.scale(picture.convert("RGB"), factor, Image.Resampling.NEAREST)


def _colour_bar(canvas: Image.Image, pen: ImageDraw.ImageDraw, y: int, cmap: str) -> None:
    length, thick = min(220, canvas.width // 2), 12
    strip = np.broadcast_to(np.linspace(0, 1, length), (thick, length))
    words = ("map: lowest", "highest")
    start = GAP + round(_font().getlength(words[0])) + 8
    _write(pen, (GAP, y), words[0], canvas.width, FAINT)
    canvas.paste(Image.fromarray(colours(strip, cmap)), (start, y + 4))
    _write(pen, (start + length + 8, y), words[1], canvas.width, FAINT)


def _write(
    pen: ImageDraw.ImageDraw,
    at: tuple[int, int],
    text: str,
    width: int,
    colour: tuple[int, int, int] = INK,
) -> None:
    pen.text(at, _fitted(text, width), fill=colour, font=_font())


def _wrapped(text: str, width: float) -> list[str]:
    """Lines of whole words that fit."""
    lines: list[str] = []
    for word in text.split():
        if lines and _font().getlength(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _fitted(text: str, width: float) -> str:
    """The text, shortened with three dots where it is wider than its place."""
    if _font().getlength(text) <= width:
        return text
    kept = len(text)
    while kept and _font().getlength(text[:kept].rstrip() + "...") > width:
        kept -= 1
    return text[:kept].rstrip() + "..."


@lru_cache
def _font() -> Any:
    return ImageFont.load_default(TEXT)
