"""A training run as one small table, wherever it comes from: a run folder, a monitor, a published page.

Per checkpoint it holds what the classifier does (AUC, accuracy, for each class its images and how many are in
its gold list) and what the explanations do (C-Score per class and overall, with the number of maps, the share
of empty ones and the 95 % interval; elangovan2026cscore). Alarms read nothing else.

A gold list belongs to a class, not to a method: it is counted from the probabilities. The `n` of a method's
score can be smaller, where some of its maps could not be used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from heatproof.disk import valid_unicode
from heatproof.errors import InputError, UnknownNameError
from heatproof.registry import parse_call
from heatproof.rows import PRETRAINED, RANDOM, epoch_of
from heatproof.verdict.epochs import read_gradients

if TYPE_CHECKING:
    from heatproof.metrics.results import PerClass
    from heatproof.store import RunFolder
    from heatproof.train.recipe import GradientNorm
    from heatproof.types import ArrayLike

NAN = float("nan")
ABSENT = -1  # the class of images without a finding, where each is judged by itself


@dataclass(frozen=True)
class ClassState:
    """How many images a class has, and how many of them the model is sure enough of."""

    total: int
    gold: int


@dataclass(frozen=True)
class FindingState:
    """One finding of several that an image may have: its own AUC, and the images without it."""

    auc: float
    absent: ClassState  # gold: those in which it is not predicted
    moves: Mapping[str, float] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class MethodState:
    """One method's consistency: over all classes, and by class."""

    overall: PerClass
    classes: Mapping[int, PerClass]


@dataclass(frozen=True)
class CheckpointState:
    """One set of weights, as the classifier and as the explanations see it."""

    name: str
    epoch: int | None
    auc: float
    accuracy: float
    classes: Mapping[int, ClassState]
    methods: Mapping[str, MethodState]
    moves: Mapping[str, float] = field(default_factory=dict, repr=False)  # by image: see auc_errors
    gradients: Mapping[str, GradientNorm] = field(default_factory=dict, repr=False)  # by layer, where logged
    findings: Mapping[int, FindingState] = field(default_factory=dict, repr=False)  # where there are several

    def of(self, finding: int) -> CheckpointState:
        """The classifier as one finding sees it: with it and without it are the two classes."""
        own = self.findings.get(finding)
        if own is None:
            return replace(self, auc=NAN, moves={}, findings={})
        classes = {finding: self.classes[finding], ABSENT: own.absent}
        return replace(self, auc=own.auc, moves=own.moves, classes=classes, findings={})

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
        """From labels "b", probabilities "b k" and what cscore_by_class gave for each method.

        Labels "b k" are those of images that may have several findings, with a tau for each. Images without
        `ids` are known by their place, which must be the same at every checkpoint. `listed`, "b" bool (or
        "b k"), is the list in force where it is anchored.
        """
        from heatproof.metrics.classifier import accuracy, auc
        from heatproof.metrics.gold import gold_mask, is_table, thresholds
        from heatproof.metrics.stats import as_array

        y, probs = as_array(labels).astype(np.int64), as_array(probs)
        is_multilabel = is_table(y)
        methods = {method: MethodState(found.overall, found.classes) for method, found in scores.items()}
        names = ids or tuple(map(str, range(len(y))))
        gold = gold_mask(y, probs, tau) if listed is None else as_array(listed)
        right = (
            accuracy(y, probs, tau=thresholds(y, probs, tau).tolist())
            if is_multilabel
            else accuracy(y, probs)
        )
        return CheckpointState(
            name, epoch, auc(y, probs).value, right.value, _lists(y, gold), methods, _moves(names, y, probs),
            findings=_findings(names, y, probs, tau) if is_multilabel else {},
        )  # fmt: skip


@dataclass(frozen=True)
class Trajectory:
    """Checkpoints in the order of training. Names of classes are shown where they are known."""

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
        """From the rows of a run folder; `model` says whose, where the folder holds several."""
        names = models(folder)
        if model is None and len(names) > 1:
            raise InputError(f"{folder.path} holds the models {', '.join(names)}; name one of them")
        if model is not None and model not in names:
            raise UnknownNameError("model", model, names)
        chosen = model if model is not None else (names[0] if names else "")
        metric = _cscore_name(folder, chosen)
        found = [_read(folder, chosen, name, metric) for name in ordered(folder, chosen)]
        norms = read_gradients(folder.path)
        states = (replace(c, gradients=norms.get(c.name, {})) for c in found if c is not None)
        return Trajectory(tuple(states), class_names(folder))


def models(folder: RunFolder) -> list[str]:
    """The models a run folder has rows of."""
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
    """The names of the classes as the run knows them, none where it does not."""
    options = folder.manifest.config.get("images", {}).get("options", {})
    return tuple(folder.manifest.classes) or tuple(options.get("class_names") or ())


def _cscore_name(folder: RunFolder, model: str) -> str:
    """How the rows name the C-Score: with the options of the study, plain where there are several."""
    query = "select distinct metric from scores where model = ? and metric ~ 'cscore(\\(.*\\))?' order by 1"
    found: list[str] = [row["metric"] for row in folder.scores().sql(query, [model])]
    if not found:
        raise InputError(f"{folder.path} holds no C-Score; add cscore to the metrics of its study and run it")
    return found[0]


def _read(folder: RunFolder, model: str, checkpoint: str, metric: str) -> CheckpointState | None:
    """One checkpoint's rows; None where it has no C-Score yet."""
    from heatproof.metrics.classifier import accuracy, auc
    from heatproof.metrics.gold import gold_mask
    from heatproof.metrics.results import PerClass
    from heatproof.run.predictions import anchor_of, anchor_probabilities, read_predictions

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
        states[method] = MethodState(score(method, None), {c: score(method, c) for c in sorted(labels)})
    answers = read_predictions(folder, checkpoint, model=model)
    is_multilabel = answers.limits is not None
    known = np.full(len(answers.ids), True) if is_multilabel else answers.labels >= 0
    ids = [name for name, labelled in zip(answers.ids, known, strict=True) if labelled]
    y, probs = answers.labels[known], answers.probabilities[known]
    ranked = answers.complete and len(y) > 0
    ranking = cells.get(("", None, "auc"), (NAN, ""))[0]
    if ranked and ("", None, "auc") not in cells:  # the run was not asked for it
        ranking = auc(y, probs).value
    lists = parse_call(metric)[1]
    listed = probs
    if anchor := lists.get("anchor"):
        listed = anchor_probabilities(folder, anchor_of(anchor, list(folder.manifest.models)), ids, model)
    tau = lists.get("tau", answers.limits or 0.5)
    gold = gold_mask(y, listed, tau)
    counted = _accuracy(folder, model, checkpoint)
    right = counted if answers.limits is None else accuracy(y, probs, tau=answers.limits).value
    return CheckpointState(
        checkpoint, epoch_of(checkpoint), ranking, right, _lists(y, gold), states,
        _moves(ids, y, probs) if ranked else {},
        findings=_findings(ids, y, probs, tau) if is_multilabel else {},
    )  # fmt: skip


def _lists(y: np.ndarray, gold: np.ndarray) -> dict[int, ClassState]:
    """Images and gold lists by class."""
    if y.ndim == 2:
        sizes = zip(y.sum(0).tolist(), gold.sum(0).tolist(), strict=True)
        return {c: ClassState(total, listed) for c, (total, listed) in enumerate(sizes) if total}
    return {c: ClassState(int((y == c).sum()), int(gold[y == c].sum())) for c in sorted(set(y.tolist()))}


def _moves(ids: Sequence[str], y: np.ndarray, probs: np.ndarray) -> dict[str, float]:
    from heatproof.metrics.classifier import auc_errors

    return dict(zip(ids, auc_errors(y, probs).tolist(), strict=True))


def _findings(ids: Sequence[str], y: np.ndarray, probs: np.ndarray, tau: Any) -> dict[int, FindingState]:
    """Each finding that occurs, as if it were the only one."""
    from heatproof.metrics.classifier import auc
    from heatproof.metrics.gold import thresholds

    values, limits = auc(y, probs).classes, thresholds(y, probs, tau)
    found = {}
    for c in np.flatnonzero(y.any(0)).tolist():
        own, p = y[:, c], probs[:, c]
        absent = ClassState(int((own == 0).sum()), int(((own == 0) & (p < limits[c])).sum()))
        found[c] = FindingState(values[c], absent, _moves(ids, own, p) if absent.total else {})
    return found


def _accuracy(folder: RunFolder, model: str, checkpoint: str) -> float:
    (row,) = folder.scores().sql(
        "select count(*) as total, count(*) filter (value = label) as hits from scores where model = ? "
        "and checkpoint = ? and metric = 'predicted' and label is not null and not isnan(value)",
        [model, checkpoint],
    )
    return row["hits"] / row["total"] if row["total"] else NAN
