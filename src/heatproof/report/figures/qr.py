"""The figures of a QR study: depth (the paper's 4), structure against speed (its 5), distortions."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from heatproof.report.figures import COLOURS, MARKERS, drawing
from heatproof.report.tables import Cell, Value, number

FLOORS = "#999999"
WIDE = 10  # slowest over fastest, from which on an axis of times is logarithmic


class Point(NamedTuple):
    """A method under a regime: milliseconds per picture, StructureScore."""

    method: str
    regime: str
    time: float
    score: float


@contextmanager
def depth(depths: Sequence[str], lines: Mapping[str, Sequence[Sequence[Cell]]], method: str) -> Iterator[Any]:
    """Figure 4: FMR (left axis) and BL (right axis), ours and published, against how much was trained."""
    with drawing(6.0, 3.4) as (figure, left):
        right = left.twinx()
        right.spines["right"].set_visible(True)
        right.grid(False)
        places = range(len(depths))
        for k, (axis, (name, (ours, published))) in enumerate(zip((left, right), lines.items(), strict=True)):
            style = {"color": COLOURS[k], "marker": MARKERS[k], "markersize": 4}
            _with_intervals(axis, places, ours, f"{name}, {method}", style)
            dashed = style | {"linestyle": "--", "alpha": 0.5, "label": f"{name}, published"}
            axis.plot(places, [*map(number, published)], **dashed)
            axis.set_ylabel(name, color=COLOURS[k])
            axis.set_ylim(bottom=0)
        left.set_xticks(list(places), depths)
        left.set_xlabel("trained")
        handles = [h for axis in (left, right) for h in axis.get_legend_handles_labels()[0]]
        figure.legend(handles=handles, loc="outside upper center", ncols=4, fontsize=7)
        yield figure


@contextmanager
def pareto(panels: Mapping[str, Sequence[Point]], floors: Collection[str] = ()) -> Iterator[Any]:
    """Figure 5: StructureScore against time, a panel per source; the line joins what nothing else beats."""
    methods = list(dict.fromkeys(p.method for points in panels.values() for p in points))
    regimes = list(dict.fromkeys(p.regime for points in panels.values() for p in points))
    real = [method for method in methods if method not in floors]
    colours = {method: COLOURS[k % len(COLOURS)] for k, method in enumerate(real)}
    with drawing(3.4 * len(panels) + 1.9, 3.6, columns=len(panels), squeeze=False) as (figure, grid):
        for axis, (title, points) in zip(grid[0], panels.items(), strict=True):
            for point in points:
                marker, colour = MARKERS[regimes.index(point.regime)], colours.get(point.method, FLOORS)
                axis.plot(point.time, point.score, marker=marker, color=colour, linestyle="", markersize=6)
            best = frontier([p for p in points if p.method not in floors])
            line = {"color": "black", "linewidth": 0.8, "alpha": 0.5}
            axis.plot([p.time for p in best], [p.score for p in best], **line)
            times = [p.time for p in points if not math.isnan(p.time)]
            wide = bool(times) and max(times) > WIDE * min(times)
            axis.set(title=title, xlabel="ms per picture", xscale="log" if wide else "linear")
        grid[0][0].set_ylabel("FMR + TMR - 3 BL - DtS")
        _legend(figure, colours | ({"floors": FLOORS} if floors else {}), regimes)
        yield figure


def frontier(points: Sequence[Point]) -> list[Point]:
    """Points that no other is both faster and better than, by time.

    >>> [p.method for p in frontier([Point("a", "", 1, 0), Point("b", "", 2, 1), Point("c", "", 3, 0.5)])]
    ['a', 'b']
    """
    best: list[Point] = []
    defined = [p for p in points if not (math.isnan(p.time) or math.isnan(p.score))]
    for point in sorted(defined, key=lambda p: (p.time, -p.score)):
        if not best or point.score > best[-1].score:
            best.append(point)
    return best


@contextmanager
def distortions(
    severities: Sequence[float], curves: Mapping[str, Mapping[str, Sequence[float]]], method: str
) -> Iterator[Any]:
    """BL against severity: distortion -> regime -> a value per severity."""
    with drawing(7.4, 4.2, rows=2, columns=3, sharex=True, sharey=True) as (figure, grid):
        for axis, (kind, lines) in zip(grid.flat, curves.items(), strict=True):
            for k, (regime, values) in enumerate(lines.items()):
                axis.plot(
                    severities, values, marker=MARKERS[k], markersize=3.5, color=COLOURS[k], label=regime
                )
            axis.set_title(kind.replace("_", " "), fontsize=9)
        for axis in grid[1]:
            axis.set_xlabel("severity")
        for axis in grid[:, 0]:
            axis.set_ylabel(f"BL, {method}")
        handles, labels = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
        yield figure


def _with_intervals(
    axis: Any, places: Sequence[int], cells: Sequence[Cell], label: str, style: dict[str, Any]
) -> None:
    below, above = [], []
    for cell in cells:
        value = number(cell)
        low, high = (cell.interval if isinstance(cell, Value) else None) or (value, value)
        below.append(max(0.0, value - low))
        above.append(max(0.0, high - value))
    axis.errorbar(
        places, [*map(number, cells)], [below, above], label=label, capsize=2, linestyle="-", **style
    )


def _legend(figure: Any, colours: Mapping[str, str], regimes: Sequence[str]) -> None:
    from matplotlib.lines import Line2D  # drawing() has seen that it is there

    def mark(label: str, marker: str, colour: str, fill: str) -> Any:
        style: Any = {"linestyle": "", "markersize": 5, "markerfacecolor": fill}
        return Line2D([], [], marker=marker, color=colour, label=label, **style)

    handles = [mark(method, "o", colour, colour) for method, colour in colours.items()]
    handles += [mark(regime, MARKERS[k], "black", "white") for k, regime in enumerate(regimes)]
    figure.legend(handles=handles, loc="outside right upper", fontsize=7)
