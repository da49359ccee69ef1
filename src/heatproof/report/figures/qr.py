"""The figures of a QR study: depth (the paper's 4), structure against speed (its 5), distortions."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from heatproof.report.figures import COLOURS, MARKERS, drawing
from heatproof.report.tables import Cell, Value, number

OURS, PUBLISHED = "-", "--"
WIDE = 10  # slowest over fastest, from which on an axis of times is logarithmic


class Point(NamedTuple):
    """A method under a regime: milliseconds per picture, StructureScore."""

    method: str
    regime: str
    time: float
    score: float


@contextmanager
def depth(
    depths: Sequence[str],
    ours: tuple[Sequence[Cell], Sequence[Cell]],
    published: tuple[Sequence[float], Sequence[float]],
    method: str,
) -> Iterator[Any]:
    """Figure 4: FMR (left axis) and BL (right axis) against how much was trained."""
    with drawing(6.0, 3.4) as (figure, left):
        right = left.twinx()
        right.spines["right"].set_visible(True)
        right.grid(False)
        places = range(len(depths))
        for k, (axis, name) in enumerate(((left, "FMR"), (right, "BL"))):
            style = {"color": COLOURS[k], "marker": MARKERS[k], "markersize": 4}
            _line(axis, places, ours[k], f"{name}, {method}", style)
            axis.plot(
                places, published[k], linestyle=PUBLISHED, alpha=0.5, label=f"{name}, published", **style
            )
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
    with drawing(3.4 * len(panels) + 1.9, 3.6, columns=len(panels), squeeze=False) as (figure, grid):
        for axis, (title, points) in zip(grid[0], panels.items(), strict=True):
            for point in points:
                colour = (
                    "#999999" if point.method in floors else COLOURS[real.index(point.method) % len(COLOURS)]
                )
                marker = MARKERS[regimes.index(point.regime)]
                axis.plot(point.time, point.score, marker=marker, color=colour, linestyle="", markersize=6)
            best = frontier([p for p in points if p.method not in floors])
            axis.plot(
                [p.time for p in best], [p.score for p in best], color="black", linewidth=0.8, alpha=0.5
            )
            times = [p.time for p in points if not math.isnan(p.time)]
            wide = bool(times) and max(times) > WIDE * min(times)
            axis.set(title=title, xlabel="ms per picture", xscale="log" if wide else "linear")
        grid[0][0].set_ylabel("FMR + TMR - 3 BL - DtS")
        _legend(figure, real, regimes, floors)
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


def _line(axis: Any, places: Sequence[int], cells: Sequence[Cell], label: str, style: dict[str, Any]) -> None:
    values = [number(cell) for cell in cells]
    known = [
        c.interval if isinstance(c, Value) and c.interval else (v, v)
        for c, v in zip(cells, values, strict=True)
    ]
    below = [max(0.0, v - low) for v, (low, _) in zip(values, known, strict=True)]
    above = [max(0.0, high - v) for v, (_, high) in zip(values, known, strict=True)]
    axis.errorbar(places, values, yerr=[below, above], label=label, capsize=2, linestyle=OURS, **style)


def _legend(figure: Any, methods: Sequence[str], regimes: Sequence[str], floors: Collection[str]) -> None:
    from matplotlib.lines import Line2D  # drawing() has seen that it is there

    def mark(label: str, marker: str, colour: str, fill: str | None = None) -> Any:
        return Line2D(
            [], [], linestyle="", marker=marker, color=colour, label=label, markersize=5,
            markerfacecolor=fill or colour,
        )  # fmt: skip

    handles = [mark(m, "o", COLOURS[k % len(COLOURS)]) for k, m in enumerate(methods)]
    handles += [mark("floors", "o", "#999999")] if floors else []
    handles += [mark(regime, MARKERS[k], "black", "white") for k, regime in enumerate(regimes)]
    figure.legend(handles=handles, loc="outside right upper", fontsize=7)
