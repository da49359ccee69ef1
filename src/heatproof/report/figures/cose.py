"""Figures of COSE: how SSIM spreads, changes with magnitude, nears the final maps as accuracy grows.

daroya2023cose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from heatproof.metrics.agreement import Correlation
from heatproof.metrics.results import PerClass
from heatproof.report.figures import COLOURS, drawing, line_style

Spread = Mapping[str, Mapping[str, np.ndarray]]  # group -> method -> one value per image (or per study)
HALVES = ("consistency", "sensitivity", "value")


@contextmanager
def violins(panels: Mapping[str, Spread], methods: Sequence[str]) -> Iterator[Any]:
    """A panel per quantity, a place per method, groups side by side; white dot: median, bar: quartiles."""
    width, height = max(6.4, 0.9 * len(methods)), 2.9 * len(panels)
    with drawing(width, height, rows=len(panels), squeeze=False) as (figure, grid):
        for axes, (title, spread) in zip(grid[:, 0], panels.items(), strict=True):
            for k, (group, values) in enumerate(spread.items()):
                shift = (k - (len(spread) - 1) / 2) * 0.8 / len(spread)
                for i, method in enumerate(methods):
                    _violin(axes, values.get(method, np.array([])), i + shift, 0.75 / len(spread), COLOURS[k])
                if len(spread) > 1:
                    axes.plot([], [], color=COLOURS[k], linewidth=6, alpha=0.5, label=group)
            axes.set_xticks(range(len(methods)), [_short(m) for m in methods], rotation=30, ha="right")
            axes.set_xlim(-0.6, len(methods) - 0.4)
            axes.set_ylabel(title)
            if len(spread) > 1:
                axes.legend(loc="best")
        yield figure


@contextmanager
def bars(means: Mapping[str, Mapping[str, float]], methods: Sequence[str]) -> Iterator[Any]:
    """A group of bars per method, a bar per data set."""
    with drawing(max(6.4, 1.1 * len(methods)), 3.2) as (figure, axes):
        width = 0.8 / len(means)
        for k, (dataset, values) in enumerate(means.items()):
            at = [i + (k - (len(means) - 1) / 2) * width for i in range(len(methods))]
            heights = [values.get(m, np.nan) for m in methods]
            axes.bar(at, heights, width, color=COLOURS[k % len(COLOURS)], label=dataset)
        axes.set_xticks(range(len(methods)), [_short(m) for m in methods], rotation=30, ha="right")
        axes.set_ylabel("COSE, %")
        axes.legend(loc="best")
        yield figure


@contextmanager
def magnitudes(curves: Mapping[str, Mapping[str, Mapping[float, PerClass]]]) -> Iterator[Any]:
    """Columns: all, geometric, photometric; rows: consistency, sensitivity, COSE; a line per method."""
    titles = ("consistency", "sensitivity", "COSE, %")
    axes_shared: dict[str, Any] = {"sharex": True, "sharey": "row", "squeeze": False}
    with drawing(3.1 * len(curves), 6.6, 3, len(curves), **axes_shared) as (figure, grid):
        for column, (kind, by_method) in enumerate(curves.items()):
            for row, half in enumerate(HALVES):
                axes = grid[row, column]
                for k, (method, points) in enumerate(by_method.items()):
                    values = [getattr(score, half) for score in points.values()]
                    style = line_style(k) | {"ms": 3, "linewidth": 1.2, "label": _short(method)}
                    axes.plot(list(points), values, **style)
                if column == 0:
                    axes.set_ylabel(titles[row])
            grid[0, column].set_title(kind)
            grid[-1, column].set_xlabel("magnitude / largest")
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center")
        yield figure


@contextmanager
def to_final(
    points: Mapping[str, Mapping[str, tuple[float, float]]], fits: Mapping[str, Correlation]
) -> Iterator[Any]:
    """One panel per method: accuracy of each checkpoint across, SSIM of its maps to the final ones up."""
    columns = min(4, len(points))
    rows = -(-len(points) // columns)
    axes_shared: dict[str, Any] = {"sharex": True, "sharey": True, "squeeze": False}
    with drawing(2.3 * columns, 2.2 * rows, rows, columns, **axes_shared) as (figure, grid):
        for axes in grid.flat[len(points) :]:
            axes.set_visible(False)
        for k, (method, by_checkpoint) in enumerate(points.items()):
            axes = grid.flat[k]
            accuracy, near = (np.array(side) for side in zip(*by_checkpoint.values(), strict=True))
            axes.plot(accuracy, near, "o", color=COLOURS[0], markersize=4)
            fit = fits[method]
            if np.isfinite(fit.r):
                ends = np.array([np.nanmin(accuracy), np.nanmax(accuracy)])
                line = np.polyval(np.polyfit(accuracy, near, 1), ends)
                axes.plot(ends, line, color=COLOURS[1], linewidth=1)
            said = f"r = {fit.r:.2f}, p = {fit.p:.2g}" if np.isfinite(fit.r) else "r not defined"
            axes.set_title(f"{_short(method)}\n{said}", fontsize=8)
        figure.supxlabel("accuracy of the checkpoint")
        figure.supylabel("SSIM to the final maps")
        yield figure


def _violin(axes: Any, values: np.ndarray, at: float, width: float, colour: str) -> None:
    values = values[np.isfinite(values)]
    if not len(values):
        return
    if len(values) > 2 and np.ptp(values) > 1e-9:
        body = axes.violinplot([values], positions=[at], widths=width, showextrema=False)["bodies"][0]
        body.set(facecolor=colour, edgecolor=colour, alpha=0.45)
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    axes.vlines(at, values.min(), values.max(), color=colour, linewidth=0.8)
    axes.vlines(at, low, high, color=colour, linewidth=4)
    axes.plot([at], [middle], "o", color="white", markeredgecolor=colour, markersize=4, zorder=3)


def _short(method: str) -> str:
    """Long options are in the tables."""
    return method if len(method) <= 22 else f"{method.split('(')[0]}(...)"
