"""The page of runs side by side: verdicts, the maps that moved most, every number with what it became."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup
from PIL import Image

from heatproof.disk import write_whole
from heatproof.report.charts import Chart, Scale, nice_ticks
from heatproof.report.compare import Difference, Moved, RunComparison, RunSide
from heatproof.report.page import asset, policy
from heatproof.report.panels import Tile, sheet
from heatproof.report.pieces import Grid, Panels, fill, named, number, output_path, with_sub
from heatproof.show import address, overlay
from heatproof.store.ledger import DamagedError
from heatproof.verdict.answers import WORDS

PIXELS = 112  # of a picture's side
METHODS = 2  # of a picture that moved
PANELS = 12
ORDER = ("worse", "better", "unclear")


@dataclass(frozen=True)
class Intervals(Chart):
    """One row per name: a change with its interval, and the line of no change."""

    rows: Sequence[tuple[str, float, float, float, str]]  # name, change, low, high, answer

    width, step = 300, 24

    @property
    def height(self) -> int:
        return self.step * len(self.rows) + 34

    @property
    def x(self) -> Scale:
        ends = [e for _, *numbers, _ in self.rows for e in numbers if math.isfinite(e)]
        return Scale(min([0.0, *ends]), max([0.0, *ends]), 112, self.width - 14)

    @property
    def ticks(self) -> list[float]:
        return nice_ticks(self.x.low, self.x.high, 4)

    @property
    def description(self) -> str:
        return "; ".join(f"{name}: {change:+.3f}, {answer}" for name, change, _, _, answer in self.rows)


def write_comparison(found: RunComparison, path: str | Path) -> Path:
    """Write the page as one HTML file."""
    path = output_path(path)
    others = [
        {
            "name": side.name,
            "same": found.same.get(k, 0),
            "pictures": len(side.data.images.ids),
            "charts": charts([d for d in found.differences if d.sides[1] == k]),
            "numbers": numbers([d for d in found.differences if d.sides[1] == k], side.name),
        }
        for k, side in enumerate(found.sides)
        if k
    ]
    content = {
        "this": found,
        "policy": policy(""),
        "style": Markup(asset("page.css")),
        "verdicts": verdicts(found),
        "moved": [(one, strip(found, one)) for one in found.moved],
        "others": others,
    }
    write_whole({path: fill("compare", content).encode("utf-8", errors="replace")})
    return path


def verdicts(found: RunComparison) -> list[tuple[RunSide, str]]:
    """Each side, and what is said of its methods."""
    told = []
    for side in found.sides:
        shown = [m for m in side.verdict.methods if side.method in ("", m.method)]
        told.append((side, "; ".join(f"{m.method} {WORDS[m.follows]}" for m in shown) or "no method"))
    return told


def charts(differences: Sequence[Difference]) -> Panels | None:
    """A panel for each number that surely changed for a method, all methods in it."""
    moved = {d.of.name: d.of for d in differences if d.answer != "unclear"}
    panels = []
    for name, of in list(moved.items())[:PANELS]:
        own = [d for d in differences if d.of.name == name]
        rows = [(d.method or "network", d.change, d.low, d.high, d.answer) for d in own]
        title = f"{of.plain} {of.arrow}, n = {max(max(d.n) for d in own)}"
        panels.append((title, Intervals(f"Change of {of.short}", rows)))
    return Panels(panels) if panels else None


def numbers(differences: Sequence[Difference], name: str) -> Grid | None:
    """Every number of both sides, what surely changed first."""
    rows = []
    for one in sorted(differences, key=lambda d: ORDER.index(d.answer)):
        interval = "no interval" if math.isnan(one.low) else f"{number(one.low)} to {number(one.high)}"
        n = f"n = {one.n[0]}, paired" if one.paired else f"n = {one.n[0]} and {one.n[1]}"
        rows.append(
            [
                with_sub(named(f"{one.of.plain} {one.of.arrow}".strip()), one.of.options),
                named(one.method), number(one.before), number(one.after),
                with_sub(number(one.change), interval), n, one.answer,
            ]
        )  # fmt: skip
    heads = ["Number", "Method", "Before", "After", "Change", "Pictures", "Answer"]
    return Grid(heads, rows, f"Every number, from the first run to {name}") if rows else None


def strip(found: RunComparison, one: Moved) -> str:
    """The picture beside its maps on both sides, a row for each of the methods that moved most."""
    rows = []
    for methods in one.methods[:METHODS]:
        tiles: list[Tile] = []
        for k, method in zip(one.sides, methods[:2], strict=True):
            side = found.sides[k]
            maps = side.data.folder.maps().read(side.data.checkpoint, method, [one.image])
            picture = _picture(found, one, maps.image_size)
            tiles = tiles or [Tile(picture, method if methods[0] == methods[1] else "the picture")]
            explained = side.data.class_name(int(maps.explained[0]))
            tiles.append(Tile(overlay(picture, maps.for_display()[0]), side.name, f"explains {explained}"))
        rows.append(tiles)
    return address(sheet(rows, side=PIXELS))


def _picture(found: RunComparison, one: Moved, size: tuple[int, ...]) -> Image.Image:
    """As the model saw it, grey where no run kept it."""
    for k in one.sides:
        with suppress(DamagedError):  # the stored image is not what was written
            if content := found.sides[k].data.folder.pictures().read(one.image):
                return Image.open(io.BytesIO(content)).convert("RGB").resize((size[1], size[0]))
    return Image.new("RGB", (size[1], size[0]), (128, 128, 128))
