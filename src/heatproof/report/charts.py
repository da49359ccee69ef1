"""Small charts as SVG: drawn here, so that they print and can be read without a script.

Each has a title and a description for those who do not see it. Colours come from the page's style sheet by
class; what a colour says is also said by a dash, a shape or a word. Charts are small and many rather than
large and crowded: one method per panel, so that no legend has to be matched.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from heatproof.report.pieces import Piece

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A name, its points (NaN: a gap) and the class of its style: one, two, or faint."""

    name: str
    points: Sequence[Point]
    style: str = "one"

    @property
    def known(self) -> list[Point]:
        return [(a, b) for a, b in self.points if not math.isnan(b)]


@dataclass(frozen=True)
class Mark:
    """A numbered sign at a point, or at the foot of the chart where its height is NaN: an alarm."""

    at: Point
    text: str
    says: str


@dataclass(frozen=True)
class Scale:
    """From a number to a place: `low` to `high` over the pixels `start` to `stop`."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return round(self.start + share * (self.stop - self.start), 1)


@dataclass(frozen=True)
class Chart(Piece):
    """What every chart has."""

    title: str

    @property
    def id(self) -> str:
        """Its own among the charts of a page, and the same in the next page of the run."""
        return f"chart-{hashlib.sha256(repr(self).encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class LinePanel(Chart):
    """Lines over one horizontal scale, whose ticks are given with their words."""

    lines: Sequence[Line]
    ticks: Sequence[tuple[float, str]]
    bounds: tuple[float, float] = (0.0, 1.0)
    marks: Sequence[Mark] = ()

    width, height = 260, 150

    @property
    def x(self) -> Scale:
        return Scale(self.ticks[0][0], self.ticks[-1][0], 34, self.width - 10)

    @property
    def y(self) -> Scale:
        return Scale(*self.bounds, self.height - 24, 10)

    @property
    def levels(self) -> list[float]:
        return nice_ticks(*self.bounds)

    @property
    def description(self) -> str:
        """Where each line begins and ends."""
        ends = [
            f"{line.name}: {line.known[0][1]:.3f} to {line.known[-1][1]:.3f}"
            for line in self.lines
            if line.known
        ]
        return "; ".join(ends) or "no value is defined"


@dataclass(frozen=True)
class DotRows(Chart):
    """One row per name: a dot for each (word, value in [0, 1]) and a bar for the value over all."""

    rows: Sequence[tuple[str, Sequence[tuple[str, float]], float]]
    description: str

    width, step = 380, 30

    @property
    def height(self) -> int:
        return self.step * len(self.rows) + 34

    @property
    def x(self) -> Scale:
        return Scale(0, 1, 132, self.width - 14)


def nice_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers between two bounds.

    >>> nice_ticks(0, 1), nice_ticks(-2.4, -1.1)
    ([0.0, 0.25, 0.5, 0.75, 1.0], [-2.0, -1.5])
    """
    span = high - low
    if not span > 0:
        return [low]
    power = 10 ** math.floor(math.log10(span))
    step = next(s * power for s in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0, 5.0) if span / (s * power) < most)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 10) + 0.0 for k in range(first, math.floor(high / step + 1e-9) + 1)]
