"""Figures of the localisation protocol: scores against the budget, and mean insertion and deletion curves."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from heatproof.report.figures import drawing, line_style


def styles(methods: Sequence[str], floors: Collection[str]) -> dict[str, dict[str, Any]]:
    """Floors are grey and broken, methods have a colour and a mark."""
    real = [method for method in methods if method not in floors]
    grey = [method for method in methods if method in floors]
    strokes = ("--", ":", "-.")
    return {method: line_style(k) | {"markersize": 3.5} for k, method in enumerate(real)} | {
        method: {"color": "#888888", "linestyle": strokes[k % 3], "linewidth": 1.2}
        for k, method in enumerate(grey)
    }


@contextmanager
def budget_figure(
    budgets: Sequence[float],
    curves: Mapping[str, Mapping[str, Sequence[float]]],
    reachable: Sequence[float],
    floors: Collection[str],
    chosen: float,
) -> Iterator[Any]:
    """Scores against the budget. curves: title -> method -> a value per budget.

    The first panel also shows the most that a mask of each size can reach; a line marks the chosen budget.
    """
    percents = [100 * budget for budget in budgets]
    with _panels(curves, percents, "kept pixels, %", floors) as (figure, axes):
        axes[0].plot(percents, reachable, color="black", linewidth=0.8, label="reachable")
        for axis in axes:
            axis.axvline(100 * chosen, color="black", linewidth=0.6, alpha=0.4)
        _legend(figure, axes)
        yield figure


@contextmanager
def faithfulness_figure(
    curves: Mapping[str, Mapping[str, Sequence[float]]], floors: Collection[str], ylabel: str
) -> Iterator[Any]:
    """Mean curves: title (deletion, insertion) -> method -> a value at every tenth of the pixels."""
    with _panels(curves, range(0, 101, 10), "pixels, %", floors) as (figure, axes):
        axes[0].set_ylabel(ylabel)
        _legend(figure, axes)
        yield figure


@contextmanager
def _panels(
    curves: Mapping[str, Mapping[str, Sequence[float]]],
    x: Sequence[float],
    xlabel: str,
    floors: Collection[str],
) -> Iterator[Any]:
    """Panels side by side, a line per method in each."""
    with drawing(3.1 * len(curves) + 1.8, 3.2, columns=len(curves), squeeze=False) as (figure, grid):
        for axis, (title, lines) in zip(grid[0], curves.items(), strict=True):
            style = styles(list(lines), floors)
            for method, y in lines.items():
                axis.plot(x, y, label=method, **style[method])
            axis.set(title=title, xlabel=xlabel, ylim=(0, 1.02))
        yield figure, grid[0]


def _legend(figure: Any, axes: Any) -> None:
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper")
