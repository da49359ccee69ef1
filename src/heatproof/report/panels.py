"""Images side by side with their titles, drawn with Pillow; maps over images are in show.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

from heatproof.errors import InputError
from heatproof.show import colours

Colour = tuple[int, int, int]
PAPER, INK, FAINT = (255, 255, 255), (20, 20, 20), (110, 110, 110)
SMALLEST_TILE = 224
GAP, TEXT, LINE = 14, 15, 21  # pixels: between tiles, height of the letters, from line to line


def which_class(explained: int | None, label: int | None, predicted: int | None) -> str:
    """Which class of an image is explained.

    >>> which_class(1, 1, 0), which_class(0, None, 0)
    ('true label', 'prediction')
    """
    names = [name for name, c in (("true label", label), ("prediction", predicted)) if c == explained]
    return " and ".join(names) or "a chosen class"


def explains(explained: int, label: int | None, predicted: int | None, named: Callable[[int], str]) -> str:
    """The explained class of a map, with the prediction and the label if they differ.

    >>> explains(1, 1, 0, ["normal", "pneumonia"].__getitem__)
    'explains: pneumonia (true label); predicted: normal'
    """
    texts = [f"explains: {named(explained)} ({which_class(explained, label, predicted)})"]
    if predicted not in (explained, None):
        texts.append(f"predicted: {named(predicted)}")
    if label not in (explained, None):
        texts.append(f"true label: {named(label)}")
    return "; ".join(texts)


@dataclass(frozen=True)
class Tile:
    """An image of a panel with its title above it and a note below it."""

    picture: Image.Image
    title: str
    note: str = ""


def panel(
    tiles: Sequence[Tile], *, columns: int = 7, heading: str = "", cmap: str | None = None
) -> Image.Image:
    """Tiles side by side, at most `columns` in a row; with a colour bar if `cmap` is named."""
    rows = [tiles[start : start + columns] for start in range(0, len(tiles), columns)]
    return sheet(rows, heading=heading, cmap=cmap)


def sheet(
    rows: Sequence[Sequence[Tile]], *, heading: str = "", cmap: str | None = None, side: int = SMALLEST_TILE
) -> Image.Image:
    """Rows of tiles, each cell as large as the largest image; small ones are enlarged to about `side`."""
    if not rows or not all(rows):
        raise InputError("a panel needs at least one tile in every row")
    pictures = [[_enlarged(tile.picture, side) for tile in row] for row in rows]
    wide = max(p.width for row in pictures for p in row)
    noted = [LINE * any(tile.note for tile in row) for row in rows]
    tall = [LINE + max(p.height for p in row) + note for row, note in zip(pictures, noted, strict=True)]
    bottom = LINE + GAP if cmap else 0
    width = GAP + max(len(row) for row in rows) * (wide + GAP)
    title = _wrapped(heading, width - 2 * GAP)
    top = GAP + LINE * len(title) + GAP // 2 * bool(title)
    canvas = Image.new("RGB", (width, top + sum(tall) + GAP * len(rows) + bottom), PAPER)
    pen = ImageDraw.Draw(canvas)
    for i, line in enumerate(title):
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
    """Small images in whole multiples, so that every pixel stays a square."""
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
    pen: ImageDraw.ImageDraw, at: tuple[int, int], text: str, width: int, colour: Colour = INK
) -> None:
    pen.text(at, _fitted(text, width), fill=colour, font=_font())


def _wrapped(text: str, width: float) -> list[str]:
    lines: list[str] = []
    for word in text.split():
        if lines and _font().getlength(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def _fitted(text: str, width: float) -> str:
    """The text, shortened with three dots if it is wider than `width`."""
    if _font().getlength(text) <= width:
        return text
    shorter = (text[:end].rstrip() + "..." for end in range(len(text), 0, -1))
    return next((each for each in shorter if _font().getlength(each) <= width), "...")


@lru_cache
def _font() -> Any:
    return ImageFont.load_default(TEXT)
