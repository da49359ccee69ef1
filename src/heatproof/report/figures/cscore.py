"""The figures of a C-Score study: trajectories, scores at the end of each phase, what changed, classes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from heatproof.metrics.consistency import CScore
from heatproof.report.figures import COLOURS, MARKERS, drawing
from heatproof.verdict.alarms import Alarm
from heatproof.verdict.epochs import Norms, whole_norm
from heatproof.verdict.trajectory import CheckpointState, Trajectory


@contextmanager
def trajectories(
    run: Trajectory,
    alarms: Sequence[Alarm],
    auc: Sequence[tuple[int, float]],
    phase_end: float | None,
    norms: Sequence[tuple[int, Norms]] = (),
) -> Iterator[Any]:
    """Figure 1: the C-Score of every method beside AUC by epoch, with alarms where they are raised.

    norms: of the gradients by epoch and layer, drawn below it.
    """
    shape = {"squeeze": False, "sharex": True, "height_ratios": [3, 2][: 1 + bool(norms)]}
    with drawing(7.2, 3.8 + 2.2 * bool(norms), 1 + bool(norms), 1, **shape) as (figure, grid):
        axes = grid[0, 0]
        epochs, values = zip(*auc, strict=True)
        axes.plot(epochs, values, color="#555555", linestyle="--", linewidth=1.2, label="AUC")
        for k, method in enumerate(methods(run)):
            points = [(place(run, c), c.methods[method].overall.value) for c in run if method in c.methods]
            line(axes, k, method, points, 4)
        for (name, about), raised in {(a.checkpoint, a.method): a.mechanism for a in alarms}.items():
            _mark(axes, run, named(run, name), about, raised)
        _finish(axes, run, phase_end, "C-Score, all classes")
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8)
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
    axes.set_yscale("log")
    axes.set_xlabel("epoch")
    axes.set_ylabel("gradient norm")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8)


@contextmanager
def depths(swept: Mapping[str, Trajectory]) -> Iterator[Any]:
    """C-Score of every CAM at every depth, a panel for each checkpoint."""
    names = list(dict.fromkeys(c.name for run in swept.values() for c in run))
    shared = {"squeeze": False, "sharey": True}
    with drawing(3.2 * len(names) + 1.6, 3.4, 1, len(names), **shared) as (figure, grid):
        for axes, name in zip(grid[0], names, strict=True):
            looks = [named(run, name).methods for run in swept.values()]
            for k, method in enumerate(dict.fromkeys(m for look in looks for m in look)):
                values = [look[method].overall.value if method in look else math.nan for look in looks]
                line(axes, k, method, list(enumerate(values)), 4)
            axes.set_xticks(range(len(swept)), list(swept), rotation=40, ha="right", fontsize=7)
            axes.set_ylim(0, 1.06)
            axes.set_title(name, fontsize=9)
        grid[0, 0].set_ylabel("C-Score, all classes")
        grid[0, -1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8)
        yield figure


@contextmanager
def ends(run: Trajectory, names: Sequence[str]) -> Iterator[Any]:
    """Figure 2: method x class at the end of each phase."""
    chosen = [named(run, name) for name in names]
    with drawing(3.6 * len(chosen) + 0.8, 3.2, 1, len(chosen), squeeze=False, sharey=True) as (figure, grid):
        for axes, checkpoint in zip(grid[0], chosen, strict=True):
            table, columns = score_table(run, checkpoint)
            image = shaded(axes, table, methods(run), f"{checkpoint.name}, AUC {checkpoint.auc:.3f}")
            axes.set_xticks(range(len(columns)), columns, fontsize=8)
        figure.colorbar(image, ax=grid[0].tolist(), label="C-Score")
        yield figure


def shaded(axes: Any, table: np.ndarray, rows: Sequence[str], title: str) -> Any:
    """Scores as colours with their numbers; the image, for a colour bar."""
    image = axes.imshow(table, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.set_title(title, fontsize=9)
    axes.grid(False)
    for (i, j), value in np.ndenumerate(table):
        text = "–" if math.isnan(value) else f"{value:.2f}"
        colour = "white" if value <= 0.6 else "black"
        axes.text(j, i, text, ha="center", va="center", fontsize=8, color=colour)
    return image


@contextmanager
def net_change(run: Trajectory, names: tuple[str, str]) -> Iterator[Any]:
    """Figure 3: what the second phase did to each method, over all classes and for each."""
    (before, columns), (after, _) = (score_table(run, named(run, name)) for name in names)
    with drawing(6.4, 0.5 * len(methods(run)) + 1.4) as (figure, axes):
        changes = list(zip(columns, (after - before).T, strict=True))
        bars(axes, methods(run), changes, f"change of the C-Score from {names[0]} to {names[1]}")
        axes.legend(fontsize=8)
        yield figure


def bars(axes: Any, rows: Sequence[str], groups: Sequence[tuple[str, Any]], label: str) -> None:
    """For each row one bar of every group."""
    high = 0.8 / len(groups)
    for j, (group, values) in enumerate(groups):
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
    count = len(labels(run))
    with drawing(3.4 * count + 1.4, 3.2, 1, count, **shared) as (figure, grid):
        for axes, label in zip(grid[0], labels(run), strict=True):
            for k, method in enumerate(methods(run)):
                states = [(place(run, c), c.methods[method].classes) for c in run if method in c.methods]
                scores = [(x, classes[label]) for x, classes in states if label in classes]
                line(axes, k, method, [(x, defined(score)) for x, score in scores], 3)
                low, high = ([score.interval[side] for _, score in scores] for side in (0, 1))
                axes.fill_between(
                    [x for x, _ in scores], low, high, color=COLOURS[k % 9], alpha=0.12, linewidth=0
                )
            _finish(axes, run, phase_end, "C-Score")
            axes.set_title(run.class_name(label), fontsize=9)
        grid[0][-1].legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8)
        yield figure


def methods(run: Trajectory) -> list[str]:
    return list(dict.fromkeys(method for checkpoint in run for method in checkpoint.methods))


def labels(run: Trajectory) -> list[int]:
    return sorted({label for checkpoint in run for label in checkpoint.classes})


def named(run: Trajectory, name: str) -> CheckpointState:
    return next(checkpoint for checkpoint in run if checkpoint.name == name)


def place(run: Trajectory, checkpoint: CheckpointState) -> float:
    """Where a checkpoint stands on the axis: its epoch, or its number where epochs are not known."""
    if all(c.epoch is not None for c in run):
        return float(checkpoint.epoch or 0)
    return float(run.checkpoints.index(checkpoint) + 1)


def score_table(run: Trajectory, checkpoint: CheckpointState) -> tuple[np.ndarray, list[str]]:
    """Methods x (all, each class), NaN where there is no score."""
    classes = sorted(checkpoint.classes)
    table = np.full((len(methods(run)), 1 + len(classes)), math.nan)
    for i, method in enumerate(methods(run)):
        if state := checkpoint.methods.get(method):
            known = (defined(state.classes[c]) if c in state.classes else math.nan for c in classes)
            table[i] = [state.overall.value, *known]
    return table, ["all", *(run.class_name(label) for label in classes)]


def defined(score: CScore) -> float:
    """The score; NaN for an empty gold list, whose 0 says nothing about maps."""
    return score.value if score.n else math.nan


def line(axes: Any, k: int, label: str, points: Sequence[tuple[float, float]], size: float) -> None:
    style = {"linestyle": "-", "color": COLOURS[k % 9], "markersize": size}
    axes.plot([x for x, _ in points], [y for _, y in points], MARKERS[k % 9], label=label, **style)


def _mark(
    axes: Any, run: Trajectory, checkpoint: CheckpointState, method: str | None, mechanism: int
) -> None:
    """The number of an alarm above the method's point, or above AUC where it is about all methods."""
    state = checkpoint.methods.get(str(method))
    height = state.overall.value if state else checkpoint.auc
    if not math.isnan(height):
        axes.annotate(
            str(mechanism), (place(run, checkpoint), height), xytext=(0, 9), textcoords="offset points",
            ha="center", fontsize=7, color="white",
            bbox={"boxstyle": "circle,pad=0.2", "facecolor": "#b00020", "edgecolor": "none"},
        )  # fmt: skip


def _finish(axes: Any, run: Trajectory, phase_end: float | None, what: str) -> None:
    if phase_end is not None:
        axes.axvline(phase_end, color="#888888", linewidth=0.8, linestyle=":")
    axes.set_ylim(0, 1.06)
    axes.set_xlabel("epoch" if all(c.epoch is not None for c in run) else "checkpoint")
    axes.set_ylabel(what)
