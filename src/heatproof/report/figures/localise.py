"""Figures of the localisation protocol: scores against the budget, mean insertion and deletion curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from heatproof.explain.floors import is_floor
from heatproof.report.figures import drawing, line_style


def styles(methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Floors are grey and broken, methods have a colour and a mark."""
    strokes = ("--", ":", "-.")
    real = [method for method in methods if not is_floor(method)]
    floors = [method for method in methods if is_floor(method)]
    return {method: line_style(k) | {"markersize": 3.5} for k, method in enumerate(real)} | {
        method: {"color": "#888888", "linestyle": strokes[k % 3], "linewidth": 1.2}
        for k, method in enumerate(floors)
    }


@contextmanager
def curve_figure(
    curves: Mapping[str, Mapping[str, Sequence[float]]],
    x: Sequence[float],
    xlabel: str,
    reachable: Sequence[float] = (),
    chosen: float | None = None,
    ylabel: str = "",
) -> Iterator[Any]:
    """Panels side by side, a line per method in each. curves: title -> method -> a value for each x.

    reachable: the most that can be reached, in the first panel. chosen: a line marks this x.
    """
    with drawing(3.1 * len(curves) + 1.8, 3.2, columns=len(curves), squeeze=False) as (figure, grid):
        for axis, (title, lines) in zip(grid[0], curves.items(), strict=True):
            style = styles(list(lines))
            for method, y in lines.items():
                axis.plot(x, y, label=method, **style[method])
            axis.set(title=title, xlabel=xlabel, ylim=(0, 1.02))
        if reachable:
            grid[0][0].plot(x, reachable, color="black", linewidth=0.8, label="reachable")
        if chosen is not None:
            for axis in grid[0]:
                axis.axvline(chosen, color="black", linewidth=0.6, alpha=0.4)
        grid[0][0].set_ylabel(ylabel)
        figure.legend(*grid[0][0].get_legend_handles_labels(), loc="outside right upper")
        yield figure
