"""Publication figures from data: panels of lines, bars, heatmaps and violins in one style.

matplotlib is an extra and is imported when a figure is drawn. Colours are the Okabe-Ito set, which is safe
for colour-blind readers; colour maps are perceptually uniform. Every function is a context manager that
yields a matplotlib figure and closes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from heatproof.errors import need

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933", "#882255")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
GREY = "#888888"
FORMATS = ("svg", "pdf", "png")
Values = Sequence[float] | np.ndarray


@dataclass(frozen=True)
class Line:
    """A line or a set of points. band: lower and upper end of its interval."""

    x: Values
    y: Values
    label: str = ""
    style: Mapping[str, Any] = field(default_factory=dict)
    band: tuple[Values, Values] | None = None


@dataclass(frozen=True)
class Panel:
    """Lines on one pair of axes."""

    lines: Sequence[Line]
    axes: Mapping[str, Any] = field(default_factory=dict)  # for Axes.set: title, labels, limits, ticks, ...
    marks: Sequence[float] = ()  # dotted vertical lines
    notes: Sequence[tuple[float, float, str]] = ()  # x, y and a short text in a red circle


def line_style(number: int, **style: Any) -> dict[str, Any]:
    """Colour and marker of a line by its number."""
    usual = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
    return usual | {"markersize": 3.5} | style


@contextmanager
def drawing(
    width: float = 6.4, height: float = 3.6, rows: int = 1, columns: int = 1, **options: Any
) -> Iterator[Any]:
    """A matplotlib figure and its axes in our style, closed afterwards; never opens a window.

    with drawing() as (figure, axes): ...
    """
    matplotlib = need("matplotlib", "plots")
    pyplot = need("matplotlib.pyplot", "plots")
    colours = {"axes.prop_cycle": matplotlib.cycler(color=COLOURS)}
    with matplotlib.rc_context(colours, Path(__file__).with_name("assets") / "figures.mplstyle"):
        figure, axes = pyplot.subplots(
            rows, columns, figsize=(width, height), layout="constrained", **options
        )
        try:
            yield figure, axes
        finally:
            pyplot.close(figure)


def save(figure: Any, folder: Path, name: str) -> None:
    """Write NAME.svg, NAME.pdf and NAME.png without dates, so that the same figure is the same file."""
    folder.mkdir(parents=True, exist_ok=True)
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    for suffix in FORMATS:
        figure.savefig(folder / f"{name}.{suffix}", metadata=dates.get(suffix, {}))


@contextmanager
def lines(
    grid: Sequence[Sequence[Panel | None]], width: float, height: float, legend: str = "right upper",
    **options: Any,
) -> Iterator[Any]:  # fmt: skip
    """Panels of lines in rows and columns with one legend for all. options: of pyplot.subplots."""
    with drawing(width, height, len(grid), len(grid[0]), squeeze=False, **options) as (figure, places):
        handles: dict[str, Any] = {}
        for panel, axes in zip((panel for row in grid for panel in row), places.flat, strict=True):
            if panel is None:
                axes.set_visible(False)
                continue
            for line in panel.lines:
                (drawn,) = axes.plot(line.x, line.y, label=line.label, **line.style)
                if line.band is not None:
                    axes.fill_between(line.x, *line.band, color=drawn.get_color(), alpha=0.12, linewidth=0)
                if line.label:
                    handles.setdefault(line.label, drawn)
            for x in panel.marks:
                axes.axvline(x, color=GREY, linewidth=0.8, linestyle=":")
            for x, y, text in panel.notes:
                axes.annotate(
                    text, (x, y), xytext=(0, 9), textcoords="offset points", ha="center", fontsize=7,
                    color="white",
                    bbox={"boxstyle": "circle,pad=0.2", "facecolor": "#b00020", "edgecolor": "none"},
                )  # fmt: skip
            axes.set(**panel.axes)
            axes.title.set_fontsize(9)
            if "xticklabels" in panel.axes:
                axes.tick_params(axis="x", labelrotation=30)
        if handles:
            columns = min(4, len(handles)) if legend.startswith("upper") else 1
            figure.legend(handles.values(), handles, loc=f"outside {legend}", fontsize=8, ncols=columns)
        yield figure


@contextmanager
def bars(groups: Mapping[str, Values], names: Sequence[str], label: str, width: float = 6.6) -> Iterator[Any]:
    """Horizontal bars, for each name one of every group."""
    with drawing(width, 0.24 * len(names) * (len(groups) + 1) + 1.2) as (figure, axes):
        high = 0.8 / len(groups)
        for k, (group, values) in enumerate(groups.items()):
            y = np.arange(len(names)) + (k - (len(groups) - 1) / 2) * high
            axes.barh(y, values, high * 0.9, color=COLOURS[k % len(COLOURS)], label=group)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.set_xlabel(label)
        figure.legend(loc="outside right upper", fontsize=8)
        yield figure


@contextmanager
def heatmaps(
    panels: Mapping[str, tuple[np.ndarray, Sequence[str]]], rows: Sequence[str], label: str
) -> Iterator[Any]:
    """Numbers between 0 and 1 as colours. panels: by title, "rows columns" and the columns' names."""
    width, height = 0.9 * sum(len(names) for _, names in panels.values()) + 3.2, 0.3 * len(rows) + 1.6
    with drawing(width, height, 1, len(panels), squeeze=False, sharey=True) as (figure, grid):
        for axes, (title, (table, names)) in zip(grid[0], panels.items(), strict=True):
            image = axes.imshow(table, vmin=0, vmax=1, cmap="viridis", aspect="auto")
            axes.set_yticks(range(len(rows)), rows, fontsize=8)
            axes.set_xticks(range(len(names)), names, fontsize=8, rotation=20, ha="right")
            axes.set_title(title, fontsize=9)
            axes.grid(False)
            for (i, j), value in np.ndenumerate(table):
                text, colour = f"{value:.2f}", "white" if value <= 0.6 else "black"
                axes.text(j, i, text.replace("nan", "–"), ha="center", va="center", fontsize=8, color=colour)
        figure.colorbar(image, ax=grid[0].tolist(), label=label)
        yield figure


@contextmanager
def violins(
    panels: Mapping[str, Mapping[str, Mapping[str, np.ndarray]]], names: Sequence[str]
) -> Iterator[Any]:
    """A panel per title, a place per name, groups side by side; white dot: median, thick bar: quartiles.

    panels: title -> group -> name -> values.
    """
    width, height = max(6.4, 0.9 * len(names)), 2.9 * len(panels)
    with drawing(width, height, len(panels), squeeze=False) as (figure, grid):
        for axes, (title, groups) in zip(grid[:, 0], panels.items(), strict=True):
            for k, (group, of) in enumerate(groups.items()):
                colour, shift = COLOURS[k], (k - (len(groups) - 1) / 2) * 0.8 / len(groups)
                axes.plot([], [], color=colour, linewidth=6, alpha=0.5, label=group)
                for i, name in enumerate(names):
                    _violin(axes, of.get(name, np.array([])), i + shift, 0.75 / len(groups), colour)
            axes.set_xticks(range(len(names)), [short(name) for name in names], rotation=30, ha="right")
            axes.set(xlim=(-0.6, len(names) - 0.4), ylabel=title)
            if len(groups) > 1:
                axes.legend(loc="best")
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


def short(method: str) -> str:
    """A method's name for an axis, without long options."""
    return method if len(method) <= 22 else f"{method.split('(')[0]}(...)"
