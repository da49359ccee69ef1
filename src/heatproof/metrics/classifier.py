"""Metrics of the classifier itself (accuracy, recall, F1, AUC), and gold lists. Imports no torch.

    accuracy = share of images whose own class has the highest probability (ties to the lower class)
    recall_c = the same over the images of class c; macro = plain mean over the classes that occur
    F1_c     = 2 TP_c / (images of class c + images predicted as c), TP_c of them rightly; macro as for recall
    AUC_c    = (sum of the ranks of class c - n_c (n_c + 1) / 2) / (n_c n_rest), ties at their mean rank

which is the Mann-Whitney statistic: the chance that an image of class c gets a higher p(c) than another.
Two classes: AUC of class 1. More: one against the rest, plain mean over the classes that can be ranked.

Two classifiers on the same images err on the same images, so that the difference of their AUCs is known far
better than each of them. Image i moves AUC by e_i (delong1988auc; more classes: the mean of what it does to
each class's AUC), and images are independent given their labels:

    e_i = sqrt(n_c / (n_c - 1)) (s_i - mean of s over its class c),     n_c images in class c
    s_i = mean over classes k of  V_k(i) / (n_k or n_rest),  V_k(i) = share of the other side that i beats
    Var(AUC) = sum e_i^2,    Var(AUC - AUC') = sum (e_i - e'_i)^2

Outputs are probabilities, or with logits=True the raw outputs of the model.

For multi-label images, labels are a table "b k" of 0 and 1 and each label is ranked and counted separately,
over all images: AUC_c and e_i as for two classes, the others with the label predicted from a probability of
tau_c (0.5) on. The value is the plain mean over the labels that occur.

Gold lists: the images of a class that count for its C-Score (cscores.py), and their confidence weights.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from scipy.optimize import linear_sum_assignment
from scipy.special import expit, log_softmax, logsumexp
from scipy.stats import rankdata

from heatproof.errors import InputError
from heatproof.metrics.results import NAN, PerClass, as_array, same_length
from heatproof.registry import call_text, metric

if TYPE_CHECKING:
    from heatproof.metrics.kit import CheckpointContext
    from heatproof.types import ArrayLike

NO_IMAGE = "has no image"
LEAST_GAIN, ERRORS = 0.2, 3  # of another class order: in mean AUC, and in standard errors
PAIRED = 8  # times the variance of an AUC: of a difference of two, and each may depend on another label's
LEAST_POSITIVES = 2  # of each label, in each half of the images
ASSUMED = 0.02  # AUC by which another output must be better
MOST_NAMES = 10
Weights = Literal["confidence", "calibrated", "uniform"]
Tau = float | Literal["adaptive"] | Sequence[float]  # a sequence: one for each class


def _in_a_run(function: Callable[..., Any], context: CheckpointContext, options: dict[str, Any]) -> Any:
    limits = {} if context.limits is None or function is auc else {"tau": context.limits}
    return function(context.labels, context.probabilities, **limits | options)


_metric = partial(
    metric, needs=("labels", "probabilities"), level="checkpoint", higher_is_better=True, bounds=(0, 1),
    family="Classifier", question="network", call=_in_a_run,
)  # fmt: skip


@_metric("accuracy", title="accuracy", own_class=True)
def accuracy(
    labels: ArrayLike, probs: ArrayLike, *, logits: bool = False, tau: float | Sequence[float] = 0.5
) -> PerClass:
    """Share of images whose own class is predicted; for multi-label images, share of correct labels.

    Args:
        labels: "b", the true classes; "b k" of 0 and 1 for multi-label images.
        probs: "b k", or "b" of class 1: probabilities, or raw outputs with `logits`.
        logits: whether probs are the raw outputs of the model.
        tau: of multi-label images: from which probability on each label is predicted.

    Returns:
        The share over all images; by label for multi-label images.

    Example:
        >>> accuracy([0, 1, 1], [0.2, 0.9, 0.4]).value
        0.6666666666666666
    """
    truth, predicted = _predicted(labels, probs, logits, tau)
    if is_table(labels):
        right = np.where(truth.any(0), (truth == predicted).sum(0) / max(len(truth), 1), NAN)
        return _macro(right.tolist(), len(truth), NO_IMAGE)
    if len(truth) == 0:
        return PerClass(reason="there are no images")
    return PerClass(float((truth & predicted).any(1).mean()), len(truth))


@_metric("recall", title="recall", own_class=True)
def recall(
    labels: ArrayLike, probs: ArrayLike, *, logits: bool = False, tau: float | Sequence[float] = 0.5
) -> PerClass:
    """Share of each class that is recognised; the value is the plain mean over classes that occur.

    Args:
        labels, probs, logits, tau: as for accuracy.

    Returns:
        The mean, and the share of each class.

    Example:
        >>> recall([0, 1, 1], [0.2, 0.9, 0.4]).classes
        {0: 1.0, 1: 0.5}
    """
    truth, predicted = _predicted(labels, probs, logits, tau)
    return _macro(_shares((truth & predicted).sum(0), truth.sum(0)), len(truth), NO_IMAGE)


@_metric("f1", title="F1", own_class=True)
def f1(
    labels: ArrayLike, probs: ArrayLike, *, logits: bool = False, tau: float | Sequence[float] = 0.5
) -> PerClass:
    """Harmonic mean of precision and recall; the value is the plain mean over classes that occur.

    Args:
        labels, probs, logits, tau: as for accuracy.

    Returns:
        The mean, and the score of each class.

    Example:
        >>> f1([0, 1, 1], [0.2, 0.9, 0.4]).value
        0.6666666865348816
    """
    truth, predicted = _predicted(labels, probs, logits, tau)
    listed = np.where(truth.any(0), truth.sum(0) + predicted.sum(0), 0)
    return _macro(_shares(2 * (truth & predicted).sum(0), listed), len(truth), NO_IMAGE)


@_metric("auc", title="AUC")
def auc(labels: ArrayLike, probs: ArrayLike, *, logits: bool = False) -> PerClass:
    """Area under the ROC curve by ranks; for more than two classes the mean of one against the rest.

    Args:
        labels, probs, logits: as for accuracy.

    Returns:
        The mean, and the area of each class.

    Example:
        >>> auc([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8]).value
        0.75
    """
    why = "has no image to rank or none to rank it against"
    if is_table(labels):
        scores, truth = checked(labels, probs, logits)
        return _macro(np.diag(_auc_matrix(truth, scores)).tolist(), len(truth), why)
    y, columns = _ranked(labels, probs, logits)
    values = [_auc_matrix((y == c)[:, None], column[:, None]).item() for c, column in columns.items()]
    both = 2 if len(values) == 1 else 1  # of two classes, each has the AUC of the other
    return _macro(values * both, len(y), why)


def auc_errors(labels: ArrayLike, probs: ArrayLike, *, logits: bool = False) -> np.ndarray:
    """Array "b": influence of each image on AUC; see the top. NaN where a class with one image has no spread.

    >>> first, second = (auc_errors([0, 0, 1, 1], p) for p in ([0.1, 0.4, 0.3, 0.8], [0.1, 0.2, 0.3, 0.8]))
    >>> [round(float((e**2).sum()) ** 0.5, 3) for e in (first, first - second, first - first)]
    [0.354, 0.354, 0.0]
    """
    if is_table(labels):
        scores, truth = checked(labels, probs, logits)
        both = zip(truth.T, scores.T, strict=True)
        ranked = [auc_errors(own, p, logits=logits) for own, p in both if 0 < own.sum() < len(own)]
        return np.mean(ranked, axis=0) if ranked else np.full(len(truth), NAN)
    y, every = _ranked(labels, probs, logits)
    moves = np.zeros(len(y))
    columns = {c: column for c, column in every.items() if 0 < (y == c).sum() < len(y)}
    for c, column in columns.items():
        ranks, own = rankdata(column), y == c
        for side, sign in ((own, 1), (~own, -1)):
            beaten = (ranks[side] - rankdata(column[side])) / (~side).sum()
            moves[side] += sign * beaten / side.sum() / len(columns)
    size = np.bincount(y).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):  # classes of no image or of one
        means = np.bincount(y, weights=moves) / size
        return np.asarray((moves - means[y]) * np.sqrt(size / (size - 1))[y])


def _ranked(labels: ArrayLike, probs: ArrayLike, logits: bool) -> tuple[np.ndarray, dict[int, np.ndarray]]:
    """Labels "b", and by class the scores that rank images; for two classes, class 1 only."""
    scores, y = checked(labels, probs, logits)
    if not logits and (scores >= 1).any():
        # Probabilities that round to 1 are distinguished by what is left for the other classes.
        scores, logits = np.log(np.maximum(scores, np.finfo(np.float64).tiny)), True
    if scores.shape[1] == 2:
        return y, {1: scores[:, 1] - scores[:, 0] if logits else scores[:, 1]}
    return y, dict(enumerate((_log_odds(scores) if logits else scores).T))


def _predicted(
    labels: ArrayLike, probs: ArrayLike, logits: bool, tau: float | Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """Bool array "b k" each: the labels, and the predicted ones; of one class per image, the most likely."""
    scores, truth = checked(labels, probs, logits)
    if truth.ndim == 1:
        each = np.arange(scores.shape[1])
        return truth[:, None] == each, scores.argmax(1)[:, None] == each
    p = expit(scores) if logits else scores
    return truth, p >= thresholds(truth, p, tau)


def _log_odds(z: np.ndarray) -> np.ndarray:
    """Log-odds log p(c) / (1 - p(c)) of a softmax: orders images as p(c) does, without ties."""
    log_p = log_softmax(z, axis=1)
    with np.errstate(divide="ignore"):  # p rounds to 1
        log_rest = np.log1p(-np.exp(log_p))
    # The most likely class may have a p that rounds to 1: the others are summed without it.
    top, rest = (np.arange(len(z)), z.argmax(1)), log_p.copy()
    rest[top] = -np.inf
    log_rest[top] = logsumexp(rest, axis=1)
    return np.asarray(log_p - log_rest)


def _shares(hits: np.ndarray, of: np.ndarray) -> list[float]:
    """Shares, NaN of an empty set; in single precision, as stored rows."""
    with np.errstate(invalid="ignore"):
        return list((hits.astype(np.float32) / of.astype(np.float32)).tolist())


def _auc_matrix(truth: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Table "labels outputs": AUC of each output for each label; NaN if all or no images have the label."""
    positives = truth.sum(0)[:, None]
    above = truth.T.astype(float) @ rankdata(scores, axis=0) - positives * (positives + 1) / 2
    with np.errstate(invalid="ignore"):
        return np.asarray(above / (positives * (len(truth) - positives)))


def _macro(values: list[float], n: int, why: str) -> PerClass:
    """The mean over the classes that have a value, and the values."""
    classes = dict(enumerate(values))
    known = [v for v in values if v == v]
    missing = ", ".join(str(c) for c, v in classes.items() if v != v)
    reason = f"left out: class {missing} {why}" if missing else ""
    return PerClass(sum(known) / len(known) if known else NAN, n, classes=classes, reason=reason)


@dataclass(frozen=True)
class ClassOrder:
    """The output of each label, and how well labels and outputs agree before and after reordering."""

    outputs: Mapping[int, int]  # label -> output
    before: float
    after: float
    n: int
    single: bool  # whether the numbers are accuracies; else mean AUCs

    def sentence(self, names: Sequence[str], count: int) -> str:
        """The result in words. names: of the labels. count: of the network's outputs."""
        order: list[str | None] = [None] * count
        for label, output in self.outputs.items():
            order[output] = names[label]
        rest = iter([name for label, name in enumerate(names) if label not in self.outputs])
        order = [next(rest, None) if name is None else name for name in order]
        moved = {names[label]: output for label, output in self.outputs.items() if label != output}
        is_short = count <= MOST_NAMES and None not in order
        some = ", ".join(f"{name} is output {output}" for name, output in list(moved.items())[:MOST_NAMES])
        listed = ", ".join(map(str, order)) if is_short else some
        if self.single:
            gain = f"right on {self.after:.0%} of {self.n} images instead of {self.before:.0%}"
        else:
            gain = f"at a mean AUC of {self.after:.2f} instead of {self.before:.2f} (n = {self.n})"
        return (
            f"the classes seem to be in another order: {listed}; the network is then {gain}; name the "
            "classes in the order of its outputs (--class-names, or images.options.class_names in a study)"
        )


def class_order(truth: np.ndarray, scores: np.ndarray) -> ClassOrder | None:
    """Another order of the classes that explains the labels "n k" much better; None if there is none.

    Each label gets the output whose AUC for it is highest, no output twice (linear assignment). Each half of
    the images is scored with the assignment of the other half, so that an assignment that fits by chance
    gains nothing. Returned if the labels that move gain at least 0.2 in mean AUC and 3 standard errors.
    scores: "n outputs", probabilities, or 0 and 1 for the predicted class.

    >>> labels = np.arange(40) % 2
    >>> class_order(np.eye(2, dtype=bool)[labels], np.eye(2)[1 - labels]).outputs
    {0: 1, 1: 0}
    """
    scores = np.where(np.isnan(scores), np.inf, scores)
    half = np.empty(len(truth), dtype=bool)
    half[np.lexsort(truth.T)] = np.arange(len(truth)) % 2 == 0  # labels in equal shares
    counts = [np.minimum(truth[part].sum(0), (~truth[part]).sum(0)) for part in (half, ~half)]
    used = np.flatnonzero(np.minimum(*counts) >= LEAST_POSITIVES)
    if len(used) < 2 or scores.shape[1] <= used.max():
        return None
    chosen = _assigned(_auc_matrix(truth[:, used], scores), used)
    if (chosen == used).all():
        return None
    gain, error, moved = 0.0, 0.0, 0
    for part, other in ((half, ~half), (~half, half)):
        own = _assigned(_auc_matrix(truth[part][:, used], scores[part]), used)
        table = _auc_matrix(truth[other][:, used], scores[other])
        rows = np.flatnonzero(own != used)
        gain += float((table[rows, own[rows]] - table[rows, used[rows]]).sum())
        positives = truth[other][:, used[rows]].sum(0)
        negatives = other.sum() - positives
        error += float((PAIRED * (other.sum() + 1) / (12 * positives * negatives)).sum())
        moved += len(rows)
    if not moved or gain / moved < LEAST_GAIN or gain < ERRORS * error**0.5:
        return None
    table = _auc_matrix(truth[:, used], scores)
    single = bool((truth.sum(1) == 1).all() and np.isin(scores, (0, 1)).all())
    places = np.arange(len(used))
    before, after = table[places, used].mean(), table[places, chosen].mean()
    if single:
        label, to = truth.argmax(1), np.arange(truth.shape[1])
        to[used] = chosen
        before, after = (scores[np.arange(len(label)), at[label]].mean() for at in (np.arange(len(to)), to))
    outputs = dict(zip(used.tolist(), chosen.tolist(), strict=True))
    return ClassOrder(outputs, float(before), float(after), len(truth), single)


def _assigned(table: np.ndarray, used: np.ndarray) -> np.ndarray:
    """The output of each label: the assumed one unless others are better together."""
    table = table.copy()
    table[np.arange(len(used)), used] += ASSUMED
    columns: np.ndarray = linear_sum_assignment(table, maximize=True)[1]
    return used if (table.argmax(1) == used).all() else columns


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
    p = p[:, None] if p.ndim == 1 else p
    if p.ndim != 2 or p.shape[1] == 0:
        raise InputError(f"probabilities must be 'b k', or 'b' for one-logit models; got {p.shape}")
    # Written as "not all within", so that NaN fails too.
    if not ((p >= 0) & (p <= 1)).all():
        raise InputError("probabilities must lie in [0, 1]; pass softmax or sigmoid outputs, not logits")
    return np.concatenate([1 - p, p], axis=1) if p.shape[1] == 1 else p


def class_logits(values: ArrayLike) -> np.ndarray:
    """Array "b k" as given, or "b" or "b 1" (of one-logit models) as "b 2"; float64, checked."""
    z = as_array(values).astype(np.float64)
    z = z[:, None] if z.ndim == 1 else z
    if z.ndim != 2 or z.shape[1] == 0 or not np.isfinite(z).all():
        raise InputError(f"logits must be finite and 'b k', or 'b' for one-logit models; got {z.shape}")
    return np.concatenate([-z / 2, z / 2], axis=1) if z.shape[1] == 1 else z


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
    return np.isin(np.arange(n), chosen)


def checked(labels: ArrayLike, probs: ArrayLike, logits: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities or logits "b k", and labels "b" or, for multi-label images, bool "b k"."""
    p = class_logits(probs) if logits else class_probabilities(probs)
    same_length(labels=labels, probs=p)
    return p, (finding_table if is_table(labels) else class_labels)(labels, p.shape[1])
