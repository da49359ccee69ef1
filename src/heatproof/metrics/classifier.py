"""The classifier beside its explanations: accuracy, recall, AUC.

    accuracy = share of images whose own class has the highest probability (ties to the lower class)
    recall_c = the same over the images of class c; macro = plain mean over the classes that occur
    AUC_c    = (sum of the ranks of class c - n_c (n_c + 1) / 2) / (n_c n_rest), ties at their mean rank

which is the Mann-Whitney statistic: the chance that an image of class c gets a higher p(c) than another.
Two classes: AUC of class 1. More: one against the rest, plain mean over the classes that can be ranked.

Two classifiers on the same images err on the same images, so that the difference of their AUCs is known far
better than each of them. Image i moves AUC by e_i (delong1988auc; more classes: the mean of what it does to
each class's AUC), and images are independent given their labels:

    e_i = sqrt(n_c / (n_c - 1)) (s_i - mean of s over its class c),     n_c images in class c
    s_i = mean over classes k of  V_k(i) / (n_k or n_rest),  V_k(i) = share of the other side that i beats
    Var(AUC) = sum e_i^2,    Var(AUC - AUC') = sum (e_i - e'_i)^2

Outputs are probabilities as in gold.py, or with logits=True the raw outputs of the model.

Where an image may have several findings, labels are a table "b k" of 0 and 1 and each finding is ranked and
counted by itself, over all images: AUC_c and e_i as for two classes, recall_c and accuracy_c with the finding
predicted from a probability of tau_c (0.5) on. The value is the plain mean over the findings that occur.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from heatproof.errors import InputError
from heatproof.metrics.arrays import as_array, same_length
from heatproof.metrics.gold_masks import (
    class_labels,
    class_probabilities,
    finding_table,
    is_table,
    thresholds,
)
from heatproof.registry import metric

if TYPE_CHECKING:
    from heatproof.metrics.scene import CheckpointContext
    from heatproof.types import ArrayLike

NAN = float("nan")


@dataclass(frozen=True)
class ClassifierScore:
    """One number over all images, and the numbers of the classes it is made of."""

    value: float
    n: int
    classes: Mapping[int, float] = field(default_factory=dict)
    reason: str = ""


def _in_a_run(function: Callable[..., Any], group: CheckpointContext, options: dict[str, Any]) -> Any:
    limits = {} if group.limits is None else {"tau": group.limits}
    return function(group.labels, group.probabilities, **limits | options)


_metric = partial(
    metric, needs=("labels", "probabilities"), level="checkpoint", higher_is_better=True, bounds=(0, 1),
    family="Classifier", question="network", call=_in_a_run,
)  # fmt: skip


@_metric("accuracy", title="accuracy", own_class=True)
def accuracy(
    labels: ArrayLike, probs: ArrayLike, *, logits: bool = False, tau: float | Sequence[float] = 0.5
) -> ClassifierScore:
    """Share of images whose own class is the predicted one; of several findings, share of right answers.

    Args:
        labels: "b", the true classes; "b k" of 0 and 1 where an image may have several findings.
        probs: "b k", or "b" of class 1: probabilities, or what `logits` says.
        logits: whether probs are the raw outputs of the model.
        tau: of several findings: from which probability on each is predicted.

    >>> accuracy([0, 1, 1], [0.2, 0.9, 0.4]).value
    0.6666666666666666
    """
    if is_table(labels):
        truth, said = _said(labels, probs, logits, tau)
        right = np.where(truth.any(0), (truth == said).sum(0) / max(len(truth), 1), NAN)
        return _macro(right.tolist(), len(truth), "has no image")
    y, scores = _checked(labels, probs, logits)
    if len(y) == 0:
        return ClassifierScore(NAN, 0, reason="there are no images")
    return ClassifierScore(float((scores.argmax(1) == y).mean()), len(y))


@_metric("recall", title="recall", own_class=True)
def recall(
    labels: ArrayLike, probs: ArrayLike, *, logits: bool = False, tau: float | Sequence[float] = 0.5
) -> ClassifierScore:
    """Share of each class that is recognised; the value is the plain mean over classes that occur.

    Args:
        labels, probs, logits, tau: as for accuracy.
    """
    if is_table(labels):
        truth, said = _said(labels, probs, logits, tau)
        return _macro(_shares((truth & said).sum(0), truth.sum(0)), len(truth), "has no image")
    y, scores = _checked(labels, probs, logits)
    size, hits = (np.bincount(own, minlength=scores.shape[1]) for own in (y, y[scores.argmax(1) == y]))
    return _macro(_shares(hits, size), len(y), "has no image")


@_metric(
    "auc",
    title="AUC",
    call=lambda function, group, options: function(group.labels, group.probabilities, **options),
)
def auc(labels: ArrayLike, probs: ArrayLike, *, logits: bool = False) -> ClassifierScore:
    """Area under the ROC curve by ranks; for more than two classes the mean of one against the rest.

    Args:
        labels, probs, logits: as for accuracy.

    >>> auc([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8]).value
    0.75
    """
    why = "has no image to rank or none to rank it against"
    if is_table(labels):
        truth, findings = _findings(labels, probs, logits)
        columns = zip(findings.T, truth.T, strict=True)
        return _macro([_rank_auc(column, own) for column, own in columns], len(truth), why)
    y, scores = _ranked(labels, probs, logits)
    values = [_rank_auc(column, y == c) for c, column in scores.items()]
    both = 2 if len(values) == 1 else 1  # of two classes, each has the AUC of the other
    return _macro(values * both, len(y), why)


def auc_errors(labels: ArrayLike, probs: ArrayLike, *, logits: bool = False) -> np.ndarray:
    """ "b": how far each image moves AUC; see the top. NaN where a class with one image has no spread.

    >>> first, second = (auc_errors([0, 0, 1, 1], p) for p in ([0.1, 0.4, 0.3, 0.8], [0.1, 0.2, 0.3, 0.8]))
    >>> [round(float((e**2).sum()) ** 0.5, 3) for e in (first, first - second, first - first)]
    [0.354, 0.354, 0.0]
    """
    if is_table(labels):
        truth, findings = _findings(labels, probs, logits)
        both = zip(truth.T, findings.T, strict=True)
        ranked = [auc_errors(own, p, logits=logits) for own, p in both if 0 < own.sum() < len(own)]
        return np.mean(ranked, axis=0) if ranked else np.full(len(truth), NAN)
    y, scores = _ranked(labels, probs, logits)
    moves = np.zeros(len(y))
    columns = {c: column for c, column in scores.items() if 0 < (y == c).sum() < len(y)}
    for c, column in columns.items():
        ranks, own = _ranks(column), y == c
        for side, sign in ((own, 1), (~own, -1)):
            beaten = (ranks[side] - _ranks(column[side])) / (~side).sum()
            moves[side] += sign * beaten / side.sum() / len(columns)
    size = np.bincount(y).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):  # classes of no image or of one
        means = np.bincount(y, weights=moves) / size
        errors: np.ndarray = (moves - means[y]) * np.sqrt(size / (size - 1))[y]
    return errors


def _ranked(labels: ArrayLike, probs: ArrayLike, logits: bool) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Labels "b", and by class what its images are ranked by; of two classes, class 1 alone."""
    y, scores = _checked(labels, probs, logits)
    if not logits and (scores >= 1).any():
        # Probabilities that round to 1 are told apart by what is left for the other classes.
        scores, logits = np.log(np.maximum(scores, np.finfo(np.float64).tiny)), True
    if scores.shape[1] == 2:
        return y, {1: scores[:, 1] - scores[:, 0] if logits else scores[:, 1]}
    return y, dict(enumerate((_log_odds(scores) if logits else scores).T))


def _checked(labels: ArrayLike, probs: ArrayLike, logits: bool) -> tuple[np.ndarray, np.ndarray]:
    """Labels "b" and scores "b k", of which the highest is the prediction."""
    if not logits:
        scores = class_probabilities(probs)
    else:
        scores = as_array(probs).astype(np.float64)
        scores = scores[:, None] if scores.ndim == 1 else scores
        if scores.ndim != 2 or scores.shape[1] == 0 or not np.isfinite(scores).all():
            shape = scores.shape
            raise InputError(f"logits must be finite and 'b k', or 'b' for one-logit models; got {shape}")
        if scores.shape[1] == 1:
            scores = np.concatenate([-scores / 2, scores / 2], axis=1)
    same_length(labels=labels, probs=scores)
    return class_labels(labels, scores.shape[1]), scores


def _findings(labels: ArrayLike, probs: ArrayLike, logits: bool) -> tuple[np.ndarray, np.ndarray]:
    """ "b k" bool and "b k": which findings there are, and what each is ranked by."""
    scores = as_array(probs).astype(np.float64) if logits else class_probabilities(probs)
    if logits and not np.isfinite(scores).all():
        raise InputError(f"logits must be finite and 'b k'; got {scores.shape}")
    same_length(labels=labels, probs=scores)
    return finding_table(labels, scores.shape[1]), scores


def _said(
    labels: ArrayLike, probs: ArrayLike, logits: bool, tau: float | Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """ "b k" bool each: the findings that there are, and those that are predicted."""
    truth, scores = _findings(labels, probs, logits)
    p = (1 + np.tanh(scores / 2)) / 2 if logits else scores
    return truth, p >= thresholds(truth, p, tau)


def _log_odds(z: np.ndarray) -> np.ndarray:
    """log p(c) / (1 - p(c)) of a softmax: orders images as p(c) does, without the ties of a saturated p."""
    shifted = z - z.max(1, keepdims=True)
    log_p = shifted - _log_sum(shifted)
    with np.errstate(divide="ignore"):  # p = 1 to the last digit
        log_rest = np.log1p(-np.exp(log_p))
    # The likeliest class may have p = 1 to the last digit: what the others hold is summed on its own.
    top, rest = (np.arange(len(z)), z.argmax(1)), log_p.copy()
    rest[top] = -np.inf
    log_rest[top] = _log_sum(rest)[:, 0]
    odds: np.ndarray = log_p - log_rest
    return odds


def _log_sum(z: np.ndarray) -> np.ndarray:
    """ "b 1": log of the sum of exp z."""
    largest = z.max(1, keepdims=True)
    found: np.ndarray = largest + np.log(np.exp(z - largest).sum(1, keepdims=True))
    return found


def _shares(hits: np.ndarray, of: np.ndarray) -> list[float]:
    """NaN of nothing; in single precision, as rows have always had them."""
    with np.errstate(invalid="ignore"):
        shares: list[float] = (hits.astype(np.float32) / of.astype(np.float32)).tolist()
    return shares


def _rank_auc(scores: np.ndarray, positive: np.ndarray) -> float:
    n, hits = len(scores), int(positive.sum())
    if hits in (0, n):
        return NAN
    rank = _ranks(scores)
    return float((rank[positive].sum() - hits * (hits + 1) / 2) / (hits * (n - hits)))


def _ranks(scores: np.ndarray) -> np.ndarray:
    """Ranks from 1, ties at their mean."""
    _, where, counts = np.unique(scores, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[where]


def _macro(values: list[float], n: int, why: str) -> ClassifierScore:
    classes = dict(enumerate(values))
    known = [v for v in values if v == v]
    missing = ", ".join(str(c) for c, v in classes.items() if v != v)
    reason = f"left out: class {missing} {why}" if missing else ""
    return ClassifierScore(sum(known) / len(known) if known else NAN, n, classes, reason)
