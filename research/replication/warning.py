"""Do alarms precede a fall of AUC? Warnings of each kind over a population of trainings.

    fall       the first epoch at which AUC on the validation images is below its best so far by more than
               DROP, after it was at least GOOD; a loss that is not finite is a fall at the next epoch
    at risk    the epochs before the fall (all epochs of a training without one)
    warning    judged at an epoch from this and earlier epochs only
    before     a warning at one of the WITHIN epochs before the fall

Compared are the share of epochs with a warning among those at most WITHIN epochs before a fall and among
the other epochs at risk. The ROC of a signal is over all epochs at risk: does a fall follow within WITHIN
epochs? Intervals are 95 %, bootstrap over trainings: epochs of a training are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from scipy.stats import rankdata

from heatproof.metrics.results import PerClass
from heatproof.train.recipe import Epoch, GradientNorm
from heatproof.verdict.alarms import NAMES, find_alarms
from heatproof.verdict.trajectory import CheckpointState, Trajectory, jumps, whole_norm

DROP, OTHER_DROPS, GOOD, WITHIN = 0.05, (0.02, 0.1), 0.75, 3
LOSS_RISE, AUC_DIP = 1.25, 0.01  # validation loss over its best; AUC below its best
RESAMPLES = 1000
WARNINGS = (
    *NAMES.values(),
    "any alarm",
    "jump of the gradients",
    "rise of the validation loss",
    "dip of AUC",
)


@dataclass(frozen=True)
class Course:
    """What one training showed, epoch by epoch."""

    name: str
    network: str
    schedule: str
    rate: float
    auc: tuple[float, ...]
    warnings: dict[str, frozenset[int]]  # by kind: epochs, from 1 on
    signals: dict[str, tuple[float, ...]]  # by name: a number per epoch; higher warns more
    diverged: bool

    def fall(self, drop: float = DROP) -> int | None:
        """The epoch of the first fall."""
        best = -math.inf
        for epoch, value in enumerate(self.auc, start=1):
            if best >= GOOD and value < best - drop:
                return epoch
            best = max(best, value)
        return len(self.auc) + 1 if self.diverged and best >= GOOD else None

    def at_risk(self, drop: float = DROP) -> list[tuple[int, bool]]:
        """Epochs at risk, and whether a fall follows within WITHIN epochs.

        Epochs before the first good AUC cannot fall and are left out.
        """
        fall = self.fall(drop)
        good = next((e for e, value in enumerate(self.auc, start=1) if value >= GOOD), len(self.auc) + 1)
        end = len(self.auc) if fall is None else fall - 1
        return [(e, fall is not None and fall - e <= WITHIN) for e in range(good, end + 1)]


def read_course(result: dict[str, Any]) -> Course:
    """The course of a training from its stored result (train.py)."""
    rows, training = result["epochs"], result["training"]
    trajectory = Trajectory(tuple(_state(row, result["labels"]) for row in rows), ("NORMAL", "PNEUMONIA"))
    warnings: dict[str, set[int]] = {kind: set() for kind in WARNINGS}
    for alarm in find_alarms(trajectory):
        assert alarm.epoch is not None
        warnings[alarm.name].add(alarm.epoch)
        warnings["any alarm"].add(alarm.epoch)
    warnings["jump of the gradients"] = set(
        jumps([_epoch(row) for row in rows], lambda epoch: whole_norm(epoch.gradients))
    )
    losses, aucs = [row["validation_loss"] for row in rows], [row["auc"] for row in rows]
    loss_ratio = [value / min(losses[: i + 1]) for i, value in enumerate(losses)]
    dip = [max(aucs[: i + 1]) - value for i, value in enumerate(aucs)]
    warnings["rise of the validation loss"] = {i for i, v in enumerate(loss_ratio, 1) if v > LOSS_RISE}
    warnings["dip of AUC"] = {i for i, v in enumerate(dip, 1) if v > AUC_DIP}
    signals = {f"C-Score of {method}": _drop(rows, method) for method in rows[0]["cscores"]} if rows else {}
    signals |= {
        "smallest gold list": [1 - min(c.gold / c.total for c in s.classes.values()) for s in trajectory],
        "norm of the gradients": _growth([row["gradient"] for row in rows]),
        "validation loss": loss_ratio, "AUC itself": dip,
    }  # fmt: skip
    return Course(
        result["name"], training["network"], training["schedule"], training["rate"], tuple(aucs),
        {kind: frozenset(epochs) for kind, epochs in warnings.items()},
        {name: tuple(values) for name, values in signals.items()}, bool(result["problem"]),
    )  # fmt: skip


def _state(row: dict[str, Any], labels: list[int]) -> CheckpointState:
    scores = {method: _score(own) for method, own in row["cscores"].items()}
    epoch = row["epoch"]
    return CheckpointState.measured(f"epoch{epoch:02d}", epoch, labels, row["probabilities"], scores)


def _score(stored: dict[str, Any]) -> PerClass:
    low, high = (math.nan if v is None else v for v in stored["interval"])
    classes = {int(c): _score(own) for c, own in stored.get("classes", {}).items()}
    return PerClass(
        stored["value"], stored["n"], interval=(low, high), degenerate=stored["degenerate"], classes=classes
    )


def _epoch(row: dict[str, Any]) -> Epoch:
    own = {key: row[key] for key in ("epoch", "phase", "loss", "accuracy", "auc", "lr")}
    norm = GradientNorm(row["gradient"], row["highest_gradient"])
    return Epoch(**own, seconds=0.0, gradients={"all": norm})


def _drop(rows: Sequence[dict[str, Any]], method: str) -> list[float]:
    """1 - C / (best C so far); NaN where C is not defined."""
    best, drops = 0.0, []
    for row in rows:
        value = row["cscores"][method]["value"]
        best = max(best, 0.0 if math.isnan(value) else value)
        drops.append(1 - value / best if best > 0 else math.nan)
    return drops


def _growth(norms: Sequence[float]) -> list[float]:
    """Logarithm of the norm over the median of the five epochs before."""
    return [
        math.log(max(norm, 1e-12) / max(median(norms[max(0, i - 5) : i] or [norm]), 1e-12))
        for i, norm in enumerate(norms)
    ]


def signal_rows(courses: Sequence[Course], drop: float = DROP, seed: int = 0) -> list[dict[str, Any]]:
    """A row per kind of warning."""
    falls = [(course, fall) for course in courses if (fall := course.fall(drop)) is not None]
    calm = [course for course in courses if course.fall(drop) is None]
    rows = []
    for kind in WARNINGS:
        leads = [_lead(course, fall, kind) for course, fall in falls]
        before, other, difference = _shares(courses, kind, drop, seed)
        rows.append({
            "warning": kind, "drop": drop, "falls": len(falls), "preceded": sum(v > 0 for v in leads),
            "median_lead": median([v for v in leads if v > 0] or [math.nan]),
            "calm_trainings": len(calm), "calm_with_warning": sum(bool(c.warnings[kind]) for c in calm),
            "share_before": before, "share_other": other, "difference": difference[0],
            "low": difference[1], "high": difference[2],
        })  # fmt: skip
    return rows


def _lead(course: Course, fall: int, kind: str) -> int:
    """Epochs from the first warning within WITHIN epochs before the fall to the fall; 0 if there is none."""
    return max((fall - e for e in course.warnings[kind] if 0 < fall - e <= WITHIN), default=0)


def _shares(
    courses: Sequence[Course], kind: str, drop: float, seed: int
) -> tuple[float, float, tuple[float, float, float]]:
    """Shares of epochs with a warning before a fall and elsewhere, and their difference with its interval."""
    counts = np.array([
        [sum(b and e in c.warnings[kind] for e, b in c.at_risk(drop)), sum(b for _, b in c.at_risk(drop)),
         sum(not b and e in c.warnings[kind] for e, b in c.at_risk(drop)),
         sum(not b for _, b in c.at_risk(drop))]
        for c in courses
    ], dtype=float)  # fmt: skip

    def difference(chosen: np.ndarray) -> float:
        warned, before, elsewhere, other = counts[chosen].sum(0)
        return warned / before - elsewhere / other if before and other else math.nan

    warned, before, elsewhere, other = counts.sum(0)
    low, high = _over_trainings(difference, len(courses), seed)
    shares = warned / before if before else math.nan, elsewhere / other if other else math.nan
    return (*shares, (difference(np.arange(len(courses))), low, high))


def roc_rows(courses: Sequence[Course], drop: float = DROP, seed: int = 0) -> list[dict[str, Any]]:
    """A row per signal: area under the ROC of "a fall follows within WITHIN epochs"."""
    rows = []
    for name in courses[0].signals:
        parts = [
            [(c.signals[name][e - 1], b) for e, b in c.at_risk(drop) if math.isfinite(c.signals[name][e - 1])]
            for c in courses
        ]

        def area(chosen: np.ndarray, parts: list[list[tuple[float, bool]]] = parts) -> float:
            pairs = [pair for i in chosen for pair in parts[i]]
            return _auc([v for v, _ in pairs], [b for _, b in pairs])

        low, high = _over_trainings(area, len(parts), seed)
        pairs = [pair for part in parts for pair in part]
        rows.append({
            "signal": name, "drop": drop, "auc": area(np.arange(len(parts))), "low": low, "high": high,
            "epochs": len(pairs), "before_a_fall": sum(b for _, b in pairs), "trainings": len(courses),
        })  # fmt: skip
    return rows


def _auc(values: Sequence[float], positive: Sequence[bool]) -> float:
    y = np.array(positive, bool)
    n, m = int(y.sum()), int((~y).sum())
    if not n or not m:
        return math.nan
    return float((rankdata(values)[y].sum() - n * (n + 1) / 2) / (n * m))


def _over_trainings(statistic: Callable[[np.ndarray], float], n: int, seed: int) -> tuple[float, float]:
    random = np.random.default_rng(seed)
    values = [statistic(random.integers(0, n, n)) for _ in range(RESAMPLES)]
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return float(low), float(high)


def training_rows(courses: Sequence[Course]) -> list[dict[str, Any]]:
    """A row per training: its fall, and the first warning of each kind."""
    rows = []
    for course in courses:
        first = {kind: min(epochs, default="") for kind, epochs in course.warnings.items()}
        rows.append({
            "training": course.name, "network": course.network, "schedule": course.schedule,
            "rate": course.rate, "epochs": len(course.auc), "best_auc": max(course.auc, default=math.nan),
            "last_auc": course.auc[-1] if course.auc else math.nan, "fall": course.fall() or "",
            "diverged": course.diverged, **first,
        })  # fmt: skip
    return rows
