"""Gold lists: the images of a class that count for its C-Score, and their confidence weights.

    G(c) = {i : y_i = c and p_i(c) >= tau},  tau = 0.5, made anew at every checkpoint

p(c) is the softmax, or for a one-logit model p(1) = sigmoid(z) and p(0) = 1 - sigmoid(z).
elangovan2026cscore also says the list is anchored to the last epoch; its tables only fit a new list at
every checkpoint, so that is the default, and an anchored list is one made with the anchor's probabilities.

Beyond the paper, which names both as open:
- tau="adaptive": tau_c is the n_c-th largest p(c) of all images, where n_c of them carry the label c, so
  that c is predicted as often as it occurs. It depends on the ranking of p(c) alone, as AUC does: a
  shifted threshold cannot empty the list, a lost ranking still does.
- calibrated confidence: one temperature T, p**(1/T) renormalised, by least negative log-likelihood
  (guo2017calibration). It changes weights, never membership. The images of each class, in the order of p(c),
  go to two folds in turn, and each fold has the temperature of the other; or one fitted elsewhere is given.
- an anchored list: the one of another checkpoint, with today's confidence.
- multi-label images: y is a table "b k" of 0 and 1, p(c) a sigmoid of its own, and
  G(c) = {i : y_ic = 1 and p_i(c) >= tau_c}, each label with its own list and optionally its own tau_c.
  Calibrated, each label is a problem of two classes, p(c) and 1 - p(c), with its own temperature.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from heatproof.errors import InputError
from heatproof.metrics.stats import as_array, same_length
from heatproof.registry import call_text

if TYPE_CHECKING:
    from heatproof.types import ArrayLike

FIRST = "first"  # an anchor: the first checkpoint of a run or of a monitored training
Weights = Literal["confidence", "calibrated", "uniform"]
Tau = float | Literal["adaptive"] | Sequence[float]  # a sequence: one for each class


@dataclass(frozen=True)
class ListRule:
    """Options of gold lists in studies, runs and monitors: threshold, weights and anchor.

    >>> ListRule("adaptive", "calibrated").text
    "cscore(tau='adaptive', weights='calibrated')"
    """

    tau: Tau = 0.5
    weights: Weights = "confidence"
    anchor: str | None = None  # the checkpoint whose lists count at all others

    def __post_init__(self) -> None:
        checked_tau(self.tau)
        if self.weights not in get_args(Weights):
            raise InputError(f"weights must be 'confidence', 'calibrated' or 'uniform'; got {self.weights!r}")

    @property
    def options(self) -> dict[str, Any]:
        """Options that differ from the default, as arguments of cscore."""
        return {f.name: own for f in fields(self) if (own := getattr(self, f.name)) != f.default}

    @property
    def text(self) -> str:
        """The metric as runs name it."""
        return call_text("cscore", self.options)


@cache
def _scales() -> dict[str, list[tuple[float, str]]]:
    return tomllib.loads(files(__package__).joinpath("reading.toml").read_text(encoding="utf-8"))


def reading(score: float, scale: Literal["words", "colours"] = "words") -> str:
    """A C-Score by a scale of reading.toml; "" for NaN.

    >>> reading(0.85), reading(0.85, "colours"), reading(0.2, "colours"), reading(0.0, "colours")
    ('almost perfect', 'green', 'amber', 'red')
    """
    return next((name for end, name in _scales()[scale] if score < end), "")


def checked_tau(tau: Any) -> Tau:
    """Check tau: a probability, one for each class, or "adaptive"."""
    if isinstance(tau, str) and tau == "adaptive":
        return "adaptive"
    if isinstance(tau, (list, tuple)) and tau:
        for limit in tau:
            checked_tau(float(limit))
        return [float(limit) for limit in tau]
    if isinstance(tau, (str, bool)) or not 0 <= tau <= 1:
        raise InputError(f"tau must be a number in [0, 1] or 'adaptive'; got {tau!r}")
    return float(tau)


def class_probabilities(probs: ArrayLike) -> np.ndarray:
    """Array "b k" as given, or "b" or "b 1" (the probability of class 1) as "b 2"; float64, checked."""
    p = as_array(probs).astype(np.float64)
    if p.ndim == 1:
        p = p[:, None]
    if p.ndim != 2 or p.shape[1] == 0:
        raise InputError(f"probabilities must be 'b k', or 'b' for one-logit models; got {p.shape}")
    # Written as "not all within", so that NaN fails too.
    if not ((p >= 0) & (p <= 1)).all():
        raise InputError("probabilities must lie in [0, 1]; pass softmax or sigmoid outputs, not logits")
    return np.concatenate([1 - p, p], axis=1) if p.shape[1] == 1 else p


def class_labels(labels: ArrayLike, classes: int) -> np.ndarray:
    """Whole numbers "b" in 0 .. classes - 1, checked."""
    given = as_array(labels)
    fractions = given.dtype.kind == "f" and not (np.isfinite(given) & (given == np.round(given))).all()
    if given.ndim != 1 or given.dtype.kind not in "biuf" or fractions:
        raise InputError(f"labels must be 'b' whole numbers; got {given.dtype} of shape {given.shape}")
    y = given.astype(np.int64)
    outside = y[(y < 0) | (y >= classes)]
    if len(outside):
        raise InputError(
            f"label {int(outside[0])} is outside the {classes} classes of the probabilities; "
            f"use labels 0 to {classes - 1}"
        )
    return y


def is_table(labels: ArrayLike) -> bool:
    """Whether labels are multi-label: a table with a column per label."""
    shape = np.shape(labels)
    return len(shape) == 2 and shape[1] > 1


def finding_table(labels: ArrayLike, findings: int) -> np.ndarray:
    """Bool array "b k", checked."""
    table = as_array(labels)
    if table.shape[1] != findings or not ((table == 0) | (table == 1)).all():
        raise InputError(
            f"multi-label labels must be 0 or 1 in {findings} columns, one for each column of the "
            f"probabilities; got {table.dtype} of shape {table.shape}"
        )
    return table.astype(bool)


def gold_mask(labels: ArrayLike, probs: ArrayLike, tau: Tau = 0.5) -> np.ndarray:
    """As gold_list, without torch."""
    p, y = checked(labels, probs)
    limits = thresholds(y, p, tau)
    return y & (p >= limits) if y.ndim == 2 else p[np.arange(len(y)), y] >= limits[y]


def thresholds(labels: ArrayLike, probs: ArrayLike, tau: Tau = 0.5) -> np.ndarray:
    """Array "k": the threshold each class's gold list is made with."""
    p, y = checked(labels, probs)
    limit = checked_tau(tau)
    if isinstance(limit, float):
        return np.full(p.shape[1], limit)
    if not isinstance(limit, str):
        if len(limit) != p.shape[1]:
            raise InputError(f"there are {len(limit)} values of tau for {p.shape[1]} classes; give one each")
        return np.array(limit)
    if len(y) == 0:
        return np.ones(p.shape[1])
    size = y.sum(0) if y.ndim == 2 else np.bincount(y, minlength=p.shape[1])
    last: np.ndarray = np.sort(p, axis=0)[::-1][np.maximum(size - 1, 0), np.arange(p.shape[1])]
    return last


def anchored(anchor: ArrayLike, n: int) -> np.ndarray:
    """Bool array "b": a list given as a mask or as indices, checked."""
    chosen = as_array(anchor)
    if chosen.dtype == bool:
        same_length(labels=range(n), anchor=chosen)
        return chosen
    if chosen.dtype.kind == "f" and chosen.size:
        raise InputError("anchor must be a boolean mask or image indices")
    chosen = chosen.astype(np.int64)
    if chosen.ndim != 1 or ((chosen < 0) | (chosen >= n)).any():
        raise InputError(f"anchor must hold image indices from 0 to {n - 1}, or be a mask of {n} entries")
    listed = np.zeros(n, dtype=bool)
    listed[chosen] = True
    return listed


def checked(labels: ArrayLike, probs: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities "b k", and labels "b" or, for multi-label images, bool "b k"."""
    p = class_probabilities(probs)
    same_length(labels=labels, probs=p)
    return p, (finding_table if is_table(labels) else class_labels)(labels, p.shape[1])
