"""The scores: a row for each method, columns by families, floors as lines in each cell.

Families fill tables of at most six columns, so that no table is wider than a page; a longer family is cut
into tables of about the same size. A cell's strip runs from the least to the largest number of its column:
a bar for the interval, a dot for the mean, a line for each floor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from heatproof.report.pieces import Piece, Section
from heatproof.verdict.data import Cell, RunData
from heatproof.verdict.measures import Measure

WIDEST = 6  # columns of one table


@dataclass(frozen=True)
class ScoreColumn:
    """One metric: what every method and every floor has."""

    of: Measure
    cells: Mapping[str, Cell | None]  # by method
    floors: Mapping[str, Cell]  # by floor
    best: frozenset[str]

    @property
    def most(self) -> int | None:
        """Images behind most of its numbers."""
        known = [cell.n for cell in (*self.cells.values(), *self.floors.values()) if cell is not None]
        return max((n for n in known if n is not None), default=None)

    @property
    def lines(self) -> list[float]:
        """Where the floors stand in a strip, in per cent of its length."""
        return [self.place(cell.value) for cell in self.floors.values() if not math.isnan(cell.value)]

    def place(self, value: float) -> float:
        """Where a number stands in a strip, in per cent of its length."""
        cells = [cell for cell in (*self.cells.values(), *self.floors.values()) if cell is not None]
        known = [x for cell in cells for x in (cell.value, cell.low, cell.high) if math.isfinite(x)]
        low, high = min(known, default=0.0), max(known, default=1.0)
        return round(100 * (value - low) / (high - low), 1) if high > low else 50.0


@dataclass(frozen=True)
class ScoreTable(Piece):
    """Some families of metrics, side by side."""

    methods: Sequence[str]
    families: Sequence[tuple[str, Sequence[ScoreColumn]]]

    @property
    def columns(self) -> list[ScoreColumn]:
        return [column for _, columns in self.families for column in columns]

    @property
    def caption(self) -> str:
        return f"Scores: {', '.join(dict.fromkeys(family for family, _ in self.families))}"


def scores(data: RunData, widest: int = WIDEST) -> Section:
    """Methods down, metrics across, at most `widest` in a table; each mean with its interval and n."""
    title, methods = "Scores", data.real or data.floors
    if not data.measures or not methods:
        return Section("scores", title, missing="no metric was computed for any method")
    families: dict[str, list[ScoreColumn]] = {}
    for of in data.measures:
        cells = {method: data.cells.get((of.name, method)) for method in methods}
        floors = {f: data.cells[of.name, f] for f in data.floors if (of.name, f) in data.cells}
        best = best_methods(of, {method: cells[method] for method in data.real})
        families.setdefault(of.facts.family, []).append(
            ScoreColumn(of, cells, floors if data.real else {}, frozenset(best))
        )
    tables = [ScoreTable(methods, lot) for lot in packed(families, widest)]
    return Section("scores", title, {"data": data, "tables": tables})


def packed(
    families: Mapping[str, Sequence[ScoreColumn]], widest: int = WIDEST
) -> Iterator[list[tuple[str, Sequence[ScoreColumn]]]]:
    """Families in their order, as many side by side as fit."""
    lot: list[tuple[str, Sequence[ScoreColumn]]] = []
    for family, columns in families.items():
        parts = -(-len(columns) // widest)
        each = -(-len(columns) // parts)
        for start in range(0, len(columns), each):
            part = columns[start : start + each]
            if lot and sum(len(other) for _, other in lot) + len(part) > widest:
                yield lot
                lot = []
            lot.append((family, part))
    if lot:
        yield lot


def best_methods(of: Measure, cells: Mapping[str, Cell | None]) -> set[str]:
    """Those with the best mean; nobody where there is no direction or no difference."""
    known = {m: c.value for m, c in cells.items() if c is not None and not math.isnan(c.value)}
    if of.higher_is_better is None or len(set(known.values())) < 2:
        return set()
    top = (max if of.higher_is_better else min)(known.values())
    return {method for method, value in known.items() if value == top}
