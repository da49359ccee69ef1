"""The figures of a C-Score study of several networks: what changed, scores at the ends, trajectories."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from heatproof.report.figures import drawing
from heatproof.report.figures.cscore import bars, defined, labels, line, methods, named, place, shaded
from heatproof.verdict.trajectory import Trajectory


@contextmanager
def net_changes(changes: Mapping[str, Mapping[str, float]]) -> Iterator[Any]:
    """Figure 3 of elangovan2026cscore: change of the C-Score by network and method."""
    every = list(dict.fromkeys(method for by_method in changes.values() for method in by_method))
    with drawing(6.6, 0.24 * len(every) * (len(changes) + 1) + 1.2) as (figure, axes):
        groups = [(name, [of.get(method, math.nan) for method in every]) for name, of in changes.items()]
        bars(axes, every, groups, "change of the C-Score over the second phase")
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=8)
        yield figure


@contextmanager
def end_scores(runs: Mapping[str, Trajectory], ends: Mapping[str, tuple[str, str]]) -> Iterator[Any]:
    """Figure 2: method x network at the end of each phase."""
    every = list(dict.fromkeys(method for run in runs.values() for method in methods(run)))
    with drawing(2.2 * len(runs) + 3.2, 0.3 * len(every) + 1.6, 1, 2, sharey=True) as (figure, grid):
        for side, axes in enumerate(grid):
            table = np.full((len(every), len(runs)), math.nan)
            for j, (name, run) in enumerate(runs.items()):
                found = named(run, ends[name][side]).methods
                table[:, j] = [found[m].overall.value if m in found else math.nan for m in every]
            image = shaded(axes, table, every, ("end of the first phase", "end of the second phase")[side])
            axes.set_xticks(range(len(runs)), list(runs), fontsize=8, rotation=20, ha="right")
        figure.colorbar(image, ax=grid.tolist(), label="C-Score")
        yield figure


@contextmanager
def panels(runs: Mapping[str, Trajectory]) -> Iterator[Any]:
    """Figures 1 and 4: a column for each network; over all classes, then class by class."""
    every = list(dict.fromkeys(method for run in runs.values() for method in methods(run)))
    classes = sorted({label for run in runs.values() for label in labels(run)})
    rows, shared = 1 + len(classes), {"squeeze": False, "sharey": True, "sharex": "col"}
    with drawing(2.8 * len(runs) + 1.4, 2.1 * rows + 0.4, rows, len(runs), **shared) as (figure, grid):
        for j, (name, run) in enumerate(runs.items()):
            grid[0, j].plot([place(run, c) for c in run], [c.auc for c in run], "--", color="#555555",
                            linewidth=1.2, label="AUC")  # fmt: skip
            for i, label in enumerate([None, *classes]):
                for k, method in enumerate(every):
                    line(grid[i, j], k, method, list(_points(run, method, label)), 3)
                grid[i, j].set_ylim(0, 1.06)
            grid[0, j].set_title(name, fontsize=9)
            known = all(c.epoch is not None for c in run)
            grid[-1, j].set_xlabel("epoch" if known else "checkpoint")
        first = next(iter(runs.values()))
        for i, label in enumerate([None, *classes]):
            grid[i, 0].set_ylabel("all classes" if label is None else first.class_name(label))
        grid[0, -1].legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=8)
        yield figure


def _points(run: Trajectory, method: str, label: int | None) -> Iterator[tuple[float, float]]:
    for c in run:
        if state := c.methods.get(method):
            if label is None:
                yield place(run, c), state.overall.value
            elif label in state.classes:
                yield place(run, c), defined(state.classes[label])
