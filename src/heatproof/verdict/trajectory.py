"""A training run as a small table, from a run folder, a monitor or a published page; flags and events.

Per checkpoint it holds numbers of the classifier (AUC, accuracy, for each class its images and how many are
in its gold list) and of the explanations (C-Score per class and overall, with the number of maps, the share
of empty ones and the 95 % interval; elangovan2026cscore). Alarms read nothing else.

A gold list belongs to a class, not to a method: it is counted from the probabilities. The `n` of a method's
score can be smaller, if some of its maps could not be used.

Flags of every epoch, also between checkpoints (Table 2 of elangovan2026cscore):

    AUC below 0.5                        the ranking is inverted: the network has collapsed
    accuracy below 50 %, AUC intact      the ranking holds (AUC >= 0.75), but the threshold has left a class;
                                         with k classes it is 1 / k, the accuracy of guessing

Events of a training that may cause a collapse (section 6 of the paper names three and diagnosed none):

    gradient norm                 over all layers, jumps
    gradient norm over batches    sqrt of the sum over layers of its variance over an epoch's steps, jumps
    loss over batches             its standard deviation over the batches of an epoch, jumps
    learning rate                 at least twice that of the epoch before, also from one phase to the next

A number jumps if it is at least twice the median of the five epochs before it in its phase, and above it by
more than three of their robust standard deviations (1.4826 MAD, of logarithms). A phase's first two epochs
are not judged.

Early warning: of the epochs with an alarm, how many had an event in the epoch itself, which is trained before
it is measured, or in the five before, compared with all rotations of the list of epochs (which preserve the
number of events and their grouping):

    p = share of rotations, the true one among them, with at least as many alarms preceded by an event
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist, median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from heatproof.disk import valid_unicode
from heatproof.errors import InputError, UnknownNameError
from heatproof.metrics.classifier import accuracy, auc, auc_errors, f1, gold_mask, is_table, thresholds
from heatproof.metrics.results import PerClass, as_array
from heatproof.registry import parse_call
from heatproof.rows import PRETRAINED, RANDOM, epoch_of
from heatproof.store import RunFolder
from heatproof.store.ledger import known_record, write_record
from heatproof.store.scores import anchor_probabilities, read_predictions
from heatproof.train.recipe import Epoch, GradientNorm

if TYPE_CHECKING:
    from heatproof.types import ArrayLike

NAN = float("nan")
ABSENT = -1  # the class of images without a label, if each label is judged by itself
COLLAPSED = "AUC below 0.5"
INTACT = 0.75  # half way from guessing to perfect, as for alarms
PAST, TWICE, DEVIATIONS = 2, 2.0, 3.0
WINDOW = 5  # epochs from one checkpoint of the paper to the next
FILE = "gradients.json"

Norms = Mapping[str, GradientNorm]


@dataclass(frozen=True)
class ClassState:
    """Number of images of a class, and of those in its gold list."""

    total: int
    gold: int


@dataclass(frozen=True)
class LabelState:
    """One label of a multi-label dataset: its own AUC, and the images without it."""

    auc: float
    absent: ClassState  # gold: those for which it is not predicted
    moves: Mapping[str, float] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class CheckpointState:
    """Numbers of the classifier and of the explanations at one checkpoint."""

    name: str
    epoch: int | None
    auc: float
    accuracy: float
    classes: Mapping[int, ClassState]
    methods: Mapping[str, PerClass]  # consistency: over all classes, and by class
    moves: Mapping[str, float] = field(default_factory=dict, repr=False)  # by image: see auc_errors
    gradients: Mapping[str, GradientNorm] = field(default_factory=dict, repr=False)  # by layer, if logged
    labels: Mapping[int, LabelState] = field(default_factory=dict, repr=False)  # if there are several
    f1: float = NAN

    def of(self, label: int) -> CheckpointState:
        """The state reduced to one label: images with and without it are the two classes."""
        own = self.labels.get(label)
        if own is None:
            return replace(self, auc=NAN, moves={}, labels={})
        classes = {label: self.classes[label], ABSENT: own.absent}
        return replace(self, auc=own.auc, moves=own.moves, classes=classes, labels={})

    @staticmethod
    def measured(
        name: str,
        epoch: int | None,
        labels: Any,
        probs: Any,
        scores: Mapping[str, PerClass],
        tau: Any = 0.5,
        ids: Sequence[str] | None = None,
        listed: ArrayLike | None = None,
    ) -> CheckpointState:
        """Make the state from labels and probabilities.

        Args:
            name, epoch: of the checkpoint.
            labels, probs: "b" and "b k"; labels "b k" if an image may have several, with a tau for each.
            scores: results of cscore_by_class by method.
            tau: threshold of the gold lists.
            ids: of the images; by default their places, which must be the same at every checkpoint.
            listed: "b" bool (or "b k"), the gold lists if they are anchored.
        """
        y, probs = as_array(labels).astype(np.int64), as_array(probs)
        is_multilabel = is_table(y)
        names = ids or tuple(map(str, range(len(y))))
        gold = gold_mask(y, probs, tau) if listed is None else as_array(listed)
        limits = {"tau": thresholds(y, probs, tau).tolist()} if is_multilabel else {}
        return CheckpointState(
            name, epoch, auc(y, probs).value, accuracy(y, probs, **limits).value, _lists(y, gold), scores,
            _moves(names, y, probs), labels=_label_states(names, y, probs, tau) if is_multilabel else {},
            f1=f1(y, probs, **limits).value,
        )  # fmt: skip


@dataclass(frozen=True)
class Trajectory:
    """The checkpoints of a training in order.

    Args:
        checkpoints, class_names: states in order of training, and names of the classes if known.

    Example:
        >>> len(Trajectory((), ("cat", "dog")))
        0
    """

    checkpoints: tuple[CheckpointState, ...]
    class_names: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[CheckpointState]:
        return iter(self.checkpoints)

    def __len__(self) -> int:
        return len(self.checkpoints)

    def class_name(self, c: int) -> str:
        return self.class_names[c] if c < len(self.class_names) else f"class {c}"

    @staticmethod
    def from_run(folder: RunFolder, model: str | None = None) -> Trajectory:
        """Read a trajectory from a run folder. model: required if the folder holds several."""
        names = models(folder)
        if model is None and len(names) > 1:
            raise InputError(f"{folder.path} holds the models {', '.join(names)}; name one of them")
        if model is not None and model not in names:
            raise UnknownNameError("model", model, names)
        model = model if model is not None else names[0] if names else ""
        query = (
            "select distinct metric from scores where model = ? and metric ~ 'cscore(\\(.*\\))?' order by 1"
        )
        metrics = [row["metric"] for row in folder.scores().sql(query, [model])]
        if not metrics:
            raise InputError(
                f"{folder.path} holds no C-Score; add cscore to the metrics of its study and run it"
            )
        norms = read_gradients(folder.path)
        states = [
            replace(state, gradients=norms.get(name, {}))
            for name in ordered(folder, model)
            if (state := _read(folder, model, name, metrics[0]))
        ]
        return Trajectory(tuple(states), class_names(folder))


def models(folder: RunFolder) -> list[str]:
    """The models of a run folder's rows."""
    return [r["model"] for r in folder.scores().sql("select distinct model from scores order by 1")]


def ordered(folder: RunFolder, model: str) -> list[str]:
    """A model's checkpoints in the order of training, also those that are planned but not computed yet.

    By epoch; untrained and library weights before the first epoch, names without a number after the last.
    """
    query = "select distinct checkpoint from scores where model = ? order by 1"
    with_rows = [row["checkpoint"] for row in folder.scores().sql(query, [model])]
    planned = [valid_unicode(name) for name in folder.manifest.models] if len(models(folder)) < 2 else []

    def place(name: str) -> float:
        epoch = epoch_of(name)
        return (-math.inf if name in (RANDOM, PRETRAINED) else math.inf) if epoch is None else epoch

    return sorted(dict.fromkeys([*planned, *with_rows]), key=place)


def class_names(folder: RunFolder) -> tuple[str, ...]:
    """The names of the classes, () if the run does not know them."""
    options = folder.manifest.config.get("images", {}).get("options", {})
    return tuple(folder.manifest.classes) or tuple(options.get("class_names") or ())


def _read(folder: RunFolder, model: str, checkpoint: str, metric: str) -> CheckpointState | None:
    """One checkpoint from its rows; None if it has no C-Score yet."""
    rows = folder.scores().sql(
        "select method, label, metric, value, reason from scores where model = ? and checkpoint = ? "
        "and image = '' and (metric like 'cscore%' or metric = 'auc')",
        [model, checkpoint],
    )
    cells = {(r["method"], r["label"], r["metric"]): (r["value"], r["reason"]) for r in rows}
    methods = sorted({method for method, _, name in cells if name == metric})
    if not methods:
        return None
    options = metric.removeprefix("cscore")

    def score(method: str, label: int | None) -> PerClass:
        def part(name: str) -> float:
            return float(cells.get((method, label, f"cscore_{name}{options}"), (NAN, ""))[0])

        value, reason = cells[method, label, metric]
        n = part("n")
        interval = part("low"), part("high")
        return PerClass(value, 0 if math.isnan(n) else int(n), part("degenerate"), interval, reason)

    states = {}
    for method in methods:
        labels = [label for m, label, name in cells if m == method and name == metric and label is not None]
        states[method] = replace(score(method, None), classes={c: score(method, c) for c in sorted(labels)})
    answers = read_predictions(folder, checkpoint, model=model)
    known = answers.labels >= 0 if answers.limits is None else np.full(len(answers.ids), True)
    ids = [name for name, labelled in zip(answers.ids, known, strict=True) if labelled]
    y, probs = answers.labels[known], answers.probabilities[known]
    lists = parse_call(metric)[1]
    tau, listed = lists.get("tau", answers.limits or 0.5), None
    if anchor := lists.get("anchor"):
        listed = gold_mask(y, anchor_probabilities(folder, anchor, ids, model), tau)
    state = CheckpointState.measured(checkpoint, epoch_of(checkpoint), y, probs, states, tau, ids, listed)
    if answers.limits is not None:
        right, balanced = (of(y, probs, tau=answers.limits).value for of in (accuracy, f1))
        state = replace(state, accuracy=right, f1=balanced)
    if not (answers.complete and len(y) > 0):
        state = replace(state, auc=NAN, moves={})
    return replace(state, auc=cells.get(("", None, "auc"), (state.auc, ""))[0])


def _lists(y: np.ndarray, gold: np.ndarray) -> dict[int, ClassState]:
    """Images and gold lists by class."""
    if y.ndim == 2:
        sizes = zip(y.sum(0).tolist(), gold.sum(0).tolist(), strict=True)
        return {c: ClassState(total, listed) for c, (total, listed) in enumerate(sizes) if total}
    return {c: ClassState(int((y == c).sum()), int(gold[y == c].sum())) for c in sorted(set(y.tolist()))}


def _moves(ids: Sequence[str], y: np.ndarray, probs: np.ndarray) -> dict[str, float]:
    return dict(zip(ids, auc_errors(y, probs).tolist(), strict=True))


def _label_states(ids: Sequence[str], y: np.ndarray, probs: np.ndarray, tau: Any) -> dict[int, LabelState]:
    """States of the labels that occur."""
    values, limits = auc(y, probs).classes, thresholds(y, probs, tau)
    states = {}
    for c in np.flatnonzero(y.any(0)).tolist():
        own, p = y[:, c], probs[:, c]
        absent = ClassState(int((own == 0).sum()), int(((own == 0) & (p < limits[c])).sum()))
        states[c] = LabelState(values[c], absent, _moves(ids, own, p) if absent.total else {})
    return states


def auc_falls(trajectory: Trajectory, confidence: float = 0.95, label: int | None = None) -> list[bool]:
    """By checkpoint: whether AUC is below its best so far by more than sampling error.

        AUC_t < AUC_best - 1.96 SE(AUC_best - AUC_t),    best: the highest AUC of s < t

    label: its own AUC, if images may have several labels.
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    fallen: list[bool] = []
    best: CheckpointState | None = None
    for checkpoint in trajectory if label is None else (each.of(label) for each in trajectory):
        # By more than sampling error, so that noise is not a fall. False if one is NaN.
        fallen.append(best is not None and checkpoint.auc < best.auc - z * difference_error(checkpoint, best))
        if best is None or math.isnan(best.auc) or checkpoint.auc > best.auc:
            best = checkpoint
    return fallen


def difference_error(first: CheckpointState, second: CheckpointState) -> float:
    """Standard error of AUC - AUC': paired on the same images (delong1988auc), else of independent AUCs."""
    if first.moves and second.moves:
        images = sorted(first.moves.keys() | second.moves.keys())  # sums in one order
        moved = (first.moves.get(name, 0.0) - second.moves.get(name, 0.0) for name in images)
        if not math.isnan(paired := math.sqrt(sum(each * each for each in moved))):
            return paired
    # Without predictions per image (published tables) the pairing is lost: a wider, conservative error.
    return math.hypot(auc_error(first), auc_error(second))


def auc_error(checkpoint: CheckpointState) -> float:
    """Standard error of a checkpoint's AUC from its value and the sizes of the classes (hanley1982auc)."""
    a, every = checkpoint.auc, sum(state.total for state in checkpoint.classes.values())
    two_own, two_rest = a / (2 - a) - a * a, 2 * a * a / (1 + a) - a * a
    pairs = [(state.total, every - state.total) for state in checkpoint.classes.values()]
    errors = [
        math.sqrt(max(a * (1 - a) + (own - 1) * two_own + (rest - 1) * two_rest, 0.0) / (own * rest))
        for own, rest in pairs
        if own and rest
    ]
    return sum(errors) / len(errors) if errors else NAN


class AucDifference(NamedTuple):
    """One AUC less another, with its standard error."""

    value: float
    error: float
    paired: bool  # whether both were measured on the same images

    @property
    def p(self) -> float:
        """Two-sided p value of no difference."""
        if math.isnan(self.value) or math.isnan(self.error):
            return NAN
        if self.error == 0:
            return 1.0 if self.value == 0 else 0.0
        return 2 * NormalDist().cdf(-abs(self.value) / self.error)

    @property
    def interval(self) -> tuple[float, float]:
        """95 %."""
        reach = NormalDist().inv_cdf(0.975) * self.error
        return self.value - reach, self.value + reach

    @property
    def surely_below(self) -> bool:
        return self.interval[1] < 0


def auc_difference(
    first: CheckpointState, second: CheckpointState, same_images: bool = True
) -> AucDifference:
    """AUC of the first less AUC of the second.

    Args:
        first, second: checkpoints, of one network or of two.
        same_images: False if images of one name are not the same images.
    """
    paired = bool(same_images and first.moves and second.moves)
    error = difference_error(first, second) if paired else math.hypot(auc_error(first), auc_error(second))
    return AucDifference(first.auc - second.auc, error, paired)


def epoch_flag(auc: float, accuracy: float, classes: int = 2) -> str:
    """The flag of an epoch, "" if there is none.

    >>> epoch_flag(0.9852, 0.2705), epoch_flag(0.1034, 0.7295), epoch_flag(0.9945, 0.9420)
    ('accuracy below 50 %, AUC intact', 'AUC below 0.5', '')
    """
    if auc < 0.5:
        return COLLAPSED
    guessing = 1 / max(classes, 2)
    crossed = auc >= INTACT and accuracy < guessing
    return f"accuracy below {guessing:.0%}, AUC intact".replace("%", " %") if crossed else ""


def whole_norm(norms: Norms) -> float:
    """The norm over all layers; NaN if none was logged."""
    return math.sqrt(sum(norm.mean**2 for norm in norms.values())) if norms else math.nan


def whole_deviation(norms: Norms) -> float:
    """Deviation of the norms over the steps of an epoch, over all layers; NaN if none was logged."""
    return math.sqrt(sum(norm.deviation**2 for norm in norms.values())) if norms else math.nan


def jumps(epochs: Sequence[Epoch], value: Callable[[Epoch], float]) -> list[int]:
    """The epochs at which a number jumps; 0 and NaN are not judged."""
    past: dict[str, list[float]] = {}
    jumped = []
    for epoch in epochs:
        logs, number = past.setdefault(epoch.phase, []), value(epoch)
        if not number > 0:
            continue
        if len(logs) >= PAST:
            middle = median(logs[-WINDOW:])
            spread = 1.4826 * median(abs(value - middle) for value in logs[-WINDOW:])
            if math.log(number) > middle + max(math.log(TWICE), DEVIATIONS * spread):
                jumped.append(epoch.epoch)
        logs.append(math.log(number))
    return jumped


def training_events(epochs: Sequence[Epoch]) -> dict[str, list[int]]:
    """The epochs with each event of the top that can be judged; gradients only if they were logged."""
    judged: dict[str, Callable[[Epoch], float]] = {
        "gradient norm": lambda epoch: whole_norm(epoch.gradients),
        "gradient norm over batches": lambda epoch: whole_deviation(epoch.gradients),
        "loss over batches": lambda epoch: epoch.loss_deviation,
    }
    events = {
        name: jumps(epochs, value) for name, value in judged.items() if any(value(e) > 0 for e in epochs)
    }
    rises = [now.epoch for before, now in pairwise(epochs) if now.lr >= TWICE * before.lr > 0]
    return events | {"learning rate": rises}


def grown_layers(before: Norms, now: Norms, count: int = 3) -> list[str]:
    """The layers whose norms grew most, by factor."""
    shared = [name for name, norm in before.items() if name in now and norm.mean > 0]
    return sorted(shared, key=lambda name: now[name].mean / before[name].mean, reverse=True)[:count]


class EarlyWarning(NamedTuple):
    """How many epochs with an alarm were preceded by an event."""

    alarms: int  # epochs with an alarm
    preceded: int
    p: float  # NaN if there is nothing to test


def early_warning(epochs: Sequence[int], events: Sequence[int], alarms: Sequence[int]) -> EarlyWarning:
    """Test whether events precede alarms more often than by chance.

    Args:
        epochs: all of a training, in order.
        events, alarms: those of them with one.
    """
    raised, flags = sorted(set(alarms) & set(epochs)), [epoch in set(events) for epoch in epochs]

    def preceded(shift: int) -> int:
        at = {epoch for k, epoch in enumerate(epochs) if flags[k - shift]}
        return sum(any(epoch - WINDOW <= other <= epoch for other in at) for epoch in raised)

    p = math.nan
    if raised and any(flags):
        p = sum(preceded(shift) >= preceded(0) for shift in range(len(epochs))) / len(epochs)
    return EarlyWarning(len(raised), preceded(0), p)


def write_gradients(run: Path, checkpoint: str, norms: Norms) -> None:
    """Add a checkpoint's norms to those of a run folder."""
    stored = (known_record(run / FILE) or {}).get("checkpoints", {})
    write_record(run / FILE, {"checkpoints": {**stored, checkpoint: norms}}, indent=None)


def read_gradients(run: Path) -> dict[str, dict[str, GradientNorm]]:
    """Norms that a monitor logged, by checkpoint and layer; {} if it did not."""
    stored = (known_record(run / FILE) or {}).get("checkpoints", {})
    return {
        checkpoint: {layer: GradientNorm(*norm) for layer, norm in norms.items()}
        for checkpoint, norms in stored.items()
    }
