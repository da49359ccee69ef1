"""Figures of a C-Score study (elangovan2026cscore): one network over training, several networks compared."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from heatproof.metrics.results import PerClass
from heatproof.report.figures import COLOURS, drawing, line_style
from heatproof.verdict.alarms import Alarm
from heatproof.verdict.epochs import Norms, whole_norm
from heatproof.verdict.trajectory import CheckpointState, Trajectory

LEGEND = {"loc": "center left", "bbox_to_anchor": (1.01, 0.5), "fontsize": 8}
AUC = {"color": "#555555", "linestyle": "--", "linewidth": 1.2, "label": "AUC"}
PHASES = ("end of the first phase", "end of the second phase")


@contextmanager
def trajectories(
    run: Trajectory,
    alarms: Sequence[Alarm],
    auc: Sequence[tuple[int, float]],
    phase_end: float | None,
    norms: Sequence[tuple[int, Norms]] = (),
) -> Iterator[Any]:
    """Figure 1: the C-Score of every method and AUC by epoch, with alarms where they are raised.

    norms: gradient norms by epoch and layer, drawn below.
    """
    shape = {"squeeze": False, "sharex": True, "height_ratios": [3, 2][: 1 + bool(norms)]}
    with drawing(7.2, 3.8 + 2.2 * bool(norms), 1 + bool(norms), 1, **shape) as (figure, grid):
        axes = grid[0, 0]
        axes.plot(*zip(*auc, strict=True), **AUC)
        _curves(axes, run, methods([run]), size=4)
        for (name, about), mechanism in {(a.checkpoint, a.method): a.mechanism for a in alarms}.items():
            checkpoint = named(run, name)
            height = checkpoint.auc if about not in checkpoint.methods else score(checkpoint, str(about))
            if not math.isnan(height):
                axes.annotate(
                    str(mechanism), (place(run, checkpoint), height), xytext=(0, 9),
                    textcoords="offset points", ha="center", fontsize=7, color="white",
                    bbox={"boxstyle": "circle,pad=0.2", "facecolor": "#b00020", "edgecolor": "none"},
                )  # fmt: skip
        _finish(axes, run, phase_end, "C-Score, all classes")
        axes.legend(**LEGEND)
        if norms:
            axes.set_xlabel("")
            _gradients(grid[1, 0], norms, phase_end)
        yield figure


def _gradients(axes: Any, norms: Sequence[tuple[int, Norms]], phase_end: float | None) -> None:
    """Every layer as a thin line, all together as a thick one."""
    layers = list(dict.fromkeys(layer for _, known in norms for layer in known))
    for layer in layers:
        points = [(epoch, known[layer].mean) for epoch, known in norms if layer in known]
        axes.plot(*zip(*points, strict=True), color="#999999", linewidth=0.6, alpha=0.6)
    axes.plot([e for e, _ in norms], [whole_norm(known) for _, known in norms], color="black", linewidth=1.6,
              marker="o", markersize=3, label="all layers")  # fmt: skip
    axes.plot([], [], color="#999999", linewidth=0.6, label=f"each of {len(layers)} layers")
    if phase_end is not None:
        axes.axvline(phase_end, color="#888888", linewidth=0.8, linestyle=":")
    axes.set(yscale="log", xlabel="epoch", ylabel="gradient norm")
    axes.legend(**LEGEND)


@contextmanager
def depths(swept: Mapping[str, Trajectory]) -> Iterator[Any]:
    """C-Score of every CAM at every depth, a panel for each checkpoint."""
    names = list(dict.fromkeys(c.name for run in swept.values() for c in run))
    shared = {"squeeze": False, "sharey": True}
    with drawing(3.2 * len(names) + 1.6, 3.4, 1, len(names), **shared) as (figure, grid):
        for axes, name in zip(grid[0], names, strict=True):
            states = [named(run, name) for run in swept.values()]
            for k, method in enumerate(dict.fromkeys(m for state in states for m in state.methods)):
                axes.plot([score(s, method) for s in states], label=method, markersize=4, **line_style(k))
            axes.set_xticks(range(len(swept)), list(swept), rotation=40, ha="right", fontsize=7)
            axes.set_ylim(0, 1.06)
            axes.set_title(name, fontsize=9)
        grid[0, 0].set_ylabel("C-Score, all classes")
        grid[0, -1].legend(**LEGEND)
        yield figure


@contextmanager
def ends(run: Trajectory, names: Sequence[str]) -> Iterator[Any]:
    """Figure 2: method x class at the end of each phase."""
    panels = [(f"{c.name}, AUC {c.auc:.3f}", *score_table(run, c)) for c in (named(run, n) for n in names)]
    with _heatmaps(panels, methods([run]), 3.6 * len(names) + 0.8, 3.2) as figure:
        yield figure


@contextmanager
def network_ends(runs: Mapping[str, Trajectory], names: Mapping[str, tuple[str, str]]) -> Iterator[Any]:
    """Figure 2 for several networks: method x network at the end of each phase."""
    rows, panels = methods(runs.values()), []
    for side, title in enumerate(PHASES):
        chosen = [named(run, names[name][side]) for name, run in runs.items()]
        panels.append((title, np.array([[score(c, m) for c in chosen] for m in rows]), list(runs)))
    size = 2.2 * len(runs) + 3.2, 0.3 * len(rows) + 1.6
    with _heatmaps(panels, rows, *size, rotation=20, ha="right") as figure:
        yield figure


@contextmanager
def _heatmaps(
    panels: Sequence[tuple[str, np.ndarray, Sequence[str]]], rows: Sequence[str], width: float, height: float,
    **ticks: Any,
) -> Iterator[Any]:  # fmt: skip
    """Scores as colours with their numbers. panels: title, rows x columns, names of the columns."""
    with drawing(width, height, 1, len(panels), squeeze=False, sharey=True) as (figure, grid):
        for axes, (title, table, columns) in zip(grid[0], panels, strict=True):
            image = axes.imshow(table, vmin=0, vmax=1, cmap="viridis", aspect="auto")
            axes.set_yticks(range(len(rows)), rows, fontsize=8)
            axes.set_title(title, fontsize=9)
            axes.grid(False)
            for (i, j), value in np.ndenumerate(table):
                text, colour = f"{value:.2f}", "white" if value <= 0.6 else "black"
                axes.text(j, i, text.replace("nan", "–"), ha="center", va="center", fontsize=8, color=colour)
            axes.set_xticks(range(len(columns)), columns, fontsize=8, **ticks)
        figure.colorbar(image, ax=grid[0].tolist(), label="C-Score")
        yield figure


@contextmanager
def net_change(run: Trajectory, names: tuple[str, str]) -> Iterator[Any]:
    """Figure 3: change of the C-Score over the second phase by method, over all classes and for each."""
    (before, columns), (after, _) = (score_table(run, named(run, name)) for name in names)
    with drawing(6.4, 0.5 * len(before) + 1.4) as (figure, axes):
        changes = dict(zip(columns, (after - before).T, strict=True))
        _bars(axes, methods([run]), changes, f"change of the C-Score from {names[0]} to {names[1]}")
        axes.legend(fontsize=8)
        yield figure


@contextmanager
def network_changes(changes: Mapping[str, Mapping[str, float]]) -> Iterator[Any]:
    """Figure 3 for several networks: change of the C-Score by network and method."""
    rows = list(dict.fromkeys(method for by_method in changes.values() for method in by_method))
    with drawing(6.6, 0.24 * len(rows) * (len(changes) + 1) + 1.2) as (figure, axes):
        groups = {name: [of.get(method, math.nan) for method in rows] for name, of in changes.items()}
        _bars(axes, rows, groups, "change of the C-Score over the second phase")
        axes.legend(**LEGEND)
        yield figure


def _bars(axes: Any, rows: Sequence[str], groups: Mapping[str, Any], label: str) -> None:
    """For each row one bar of every group."""
    high = 0.8 / len(groups)
    for j, (group, values) in enumerate(groups.items()):
        y = np.arange(len(rows)) + (j - (len(groups) - 1) / 2) * high
        axes.barh(y, values, high * 0.9, color=COLOURS[j % 9], label=group)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlabel(label)


@contextmanager
def by_class(run: Trajectory, phase_end: float | None) -> Iterator[Any]:
    """Figure 4: a panel for each class, every method with its 95 % interval."""
    shared = {"squeeze": False, "sharex": True, "sharey": True}  # also where a class has no score at the end
    classes, x = labels([run]), [place(run, c) for c in run]
    with drawing(3.4 * len(classes) + 1.4, 3.2, 1, len(classes), **shared) as (figure, grid):
        for axes, label in zip(grid[0], classes, strict=True):
            _curves(axes, run, methods([run]), label)
            for k, method in enumerate(methods([run])):
                scores = [scored(c, method, label) for c in run]
                low, high = ([math.nan if s is None else s.interval[i] for s in scores] for i in (0, 1))
                axes.fill_between(x, low, high, color=COLOURS[k % 9], alpha=0.12, linewidth=0)
            _finish(axes, run, phase_end, "C-Score")
            axes.set_title(run.class_name(label), fontsize=9)
        grid[0][-1].legend(**LEGEND)
        yield figure


@contextmanager
def network_trajectories(runs: Mapping[str, Trajectory]) -> Iterator[Any]:
    """Figures 1 and 4: a column for each network; over all classes, then class by class."""
    names, panels = methods(runs.values()), [None, *labels(runs.values())]
    shared: dict[str, Any] = {"squeeze": False, "sharey": True, "sharex": "col"}
    size = 2.8 * len(runs) + 1.4, 2.1 * len(panels) + 0.4
    with drawing(*size, len(panels), len(runs), **shared) as (figure, grid):
        for j, (name, run) in enumerate(runs.items()):
            grid[0, j].plot([place(run, c) for c in run], [c.auc for c in run], **AUC)
            for i, label in enumerate(panels):
                _curves(grid[i, j], run, names, label)
                grid[i, j].set_ylim(0, 1.06)
            grid[0, j].set_title(name, fontsize=9)
            grid[-1, j].set_xlabel(_axis(run))
        first = next(iter(runs.values()))
        for i, label in enumerate(panels):
            grid[i, 0].set_ylabel("all classes" if label is None else first.class_name(label))
        grid[0, -1].legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=8)
        yield figure


def methods(runs: Iterable[Trajectory]) -> list[str]:
    """Methods of all checkpoints, in the order in which they first occur."""
    return list(dict.fromkeys(method for run in runs for checkpoint in run for method in checkpoint.methods))


def labels(runs: Iterable[Trajectory]) -> list[int]:
    return sorted({label for run in runs for checkpoint in run for label in checkpoint.classes})


def named(run: Trajectory, name: str) -> CheckpointState:
    return next(checkpoint for checkpoint in run if checkpoint.name == name)


def place(run: Trajectory, checkpoint: CheckpointState) -> float:
    """The checkpoint's position on the axis: its epoch, or its number if epochs are unknown."""
    if all(c.epoch is not None for c in run):
        return float(checkpoint.epoch or 0)
    return float(run.checkpoints.index(checkpoint) + 1)


def scored(checkpoint: CheckpointState, method: str, label: int | None = None) -> PerClass | None:
    """A method's C-Score of a class, or over all classes; None if it has none."""
    state = checkpoint.methods.get(method)
    return None if state is None else state.overall if label is None else state.classes.get(label)


def score(checkpoint: CheckpointState, method: str, label: int | None = None) -> float:
    """The value of `scored`; NaN if there is none, and for a class whose gold list is empty."""
    known = scored(checkpoint, method, label)
    return math.nan if known is None or (label is not None and not known.n) else known.value


def score_table(run: Trajectory, checkpoint: CheckpointState) -> tuple[np.ndarray, list[str]]:
    """Methods x (all, each class), NaN where there is no score."""
    classes = sorted(checkpoint.classes)
    table = np.array([[score(checkpoint, m, c) for c in (None, *classes)] for m in methods([run])])
    return table, ["all", *(run.class_name(label) for label in classes)]


def _curves(
    axes: Any, run: Trajectory, names: Sequence[str], label: int | None = None, size: float = 3
) -> None:
    """The C-Score of each method over training."""
    x = [place(run, c) for c in run]
    for k, method in enumerate(names):
        y = [score(c, method, label) for c in run]
        axes.plot(x, y, label=method, markersize=size, **line_style(k))


def _axis(run: Trajectory) -> str:
    return "epoch" if all(c.epoch is not None for c in run) else "checkpoint"


def _finish(axes: Any, run: Trajectory, phase_end: float | None, ylabel: str) -> None:
    if phase_end is not None:
        axes.axvline(phase_end, color="#888888", linewidth=0.8, linestyle=":")
    axes.set(ylim=(0, 1.06), xlabel=_axis(run), ylabel=ylabel)
