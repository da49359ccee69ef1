"""Monitor: consistency of explanations per class at every epoch, with alarms; training is not changed.

A step costs one pass over the monitored images (see measure.py) and the pairs of the C-Score. Errors in it
are logged once (logger "heatproof.monitor") and in the result's `problem`, and training continues; only
`stop_on`, or an `on_alarm` that raises, stops it. In distributed training call check and step in every
process: the first measures, writes and logs; all get its result, call on_alarm, and stop or raise together.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from heatproof.errors import HeatproofError, InputError, TargetError
from heatproof.explain.api import read_methods, shared_pass
from heatproof.images import Preprocess, Source
from heatproof.metrics.classifier import ListRule, Tau, Weights
from heatproof.metrics.cscores import gold_list
from heatproof.models import Model
from heatproof.models.heads import Multilabel
from heatproof.models.model import all_logits, as_model
from heatproof.models.running import same_randomness
from heatproof.monitor.measure import (
    Answers,
    Cost,
    StepResult,
    ValidationSet,
    example_maps,
    make_validation_set,
    measure,
    undisturbed,
    with_head,
)
from heatproof.monitor.trackers import Tracker
from heatproof.store.scores import FIRST
from heatproof.train.loop import GradientLog
from heatproof.types import ArrayLike, Batch
from heatproof.verdict.alarms import Alarm, find_alarms, read_mechanisms
from heatproof.verdict.trajectory import CheckpointState, Trajectory

if TYPE_CHECKING:
    from heatproof.monitor.record import Recorder

T = TypeVar("T")
log = logging.getLogger("heatproof.monitor")


class AlarmRaised(HeatproofError):
    """Raised by Monitor.step for an alarm named in `stop_on`; callbacks then end the training.

    Example:
        >>> str(AlarmRaised("class masking at epoch 5"))
        'class masking at epoch 5'
    """


class Monitor:
    """Score a network's explanations on fixed images while it trains.

    Args:
        images: model-ready "b c H W", a list of Batch, or a Source or folder of images with the model's
            `preprocess`. They stay in memory.
        labels: "b" classes, if images are a tensor; "b k" of 0 and 1 for multi-label images: each output is
            then the logit of one label.
        methods: as for hp.explain.
        every: measure the first epoch given and every n-th.
        limit: size of a stratified subset.
        batch_size: images per pass.
        class_names: of the classes, in order.
        preprocess: of the model, for a Source or folder.
        out: a run folder to write and to resume; its verdict.json is renewed at each step.
        metrics: further metrics per image by name, for `out`, such as the one that the verdict needs.
        layer: of CAMs; by default chosen automatically.
        tau: of the gold lists, see hp.metrics.gold_list; of multi-label images also one for each label.
        weights: of the C-Score, see hp.metrics.cscore_by_class.
        anchor: "first": the lists of the first measured epoch are used for all of them.
        gradients: also log the norms of each layer's gradients since the last step, see train/loop.py; from
            check() on, or from the first step.
        loggers: trackers, see trackers.py: objects with a method log(report).
        on_alarm: called with each new alarm, in every process, instead of a line in the log.
        stop_on: mechanisms ("class masking", ..., or "any") for which step() raises AlarmRaised; callbacks
            then end the training.
        max_seconds: a step that takes longer makes the subset smaller for the next ones.
        seed: of the subset, the maps and the intervals.

    Example:
        >>> import torch, heatproof as hp
        >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 2))
        >>> monitor = hp.monitor.Monitor(torch.rand(8, 3, 4, 4), [0, 1] * 4, methods="gradient")
        >>> monitor.step(network, epoch=1).epoch
        1
    """

    def __init__(
        self,
        images: ArrayLike | Sequence[Batch] | Source | PathLike[str],
        labels: ArrayLike | None = None,
        methods: str | Sequence[str] = ("gradcam", "layercam"),
        *,
        every: int = 1,
        limit: int | None = None,
        batch_size: int = 32,
        class_names: Sequence[str] | None = None,
        preprocess: Preprocess | None = None,
        out: str | PathLike[str] | None = None,
        metrics: Sequence[str] = (),
        layer: str | Sequence[str] | None = None,
        tau: Tau = 0.5,
        weights: Weights = "confidence",
        anchor: Literal["first"] | None = None,
        gradients: bool = False,
        loggers: Sequence[Tracker] = (),
        on_alarm: Callable[[Alarm], object] | None = None,
        stop_on: str | int | Sequence[str | int] = (),
        max_seconds: float | None = None,
        seed: int = 0,
    ) -> None:
        self._calls = read_methods(methods)
        self._stop_on = read_mechanisms(stop_on)
        lists = "a monitor anchors its lists to the 'first' epoch or not at all"
        for wrong, sentence in (
            (every < 1, f"every is a number of epochs, at least 1; got {every}"),
            (
                max_seconds is not None and not max_seconds > 0,
                f"max_seconds must be above 0; got {max_seconds}",
            ),
            (anchor not in (None, FIRST), f"{lists}; got {anchor!r}"),
            (seed < 0, f"seed must be 0 or more, got {seed}"),
            (metrics and out is None, "metrics go into a run folder; name one with out="),
        ):
            if wrong:
                raise InputError(sentence)
        for logger in loggers:
            if not callable(getattr(logger, "log", None)):
                raise InputError(f"a logger has a method log(report); {type(logger).__name__} has none")
        self.every, self.batch_size, self.layer, self.seed = every, batch_size, layer, seed
        self.rule = ListRule(tau, weights, anchor)
        self.loggers, self.on_alarm, self.max_seconds = tuple(loggers), on_alarm, max_seconds
        self._all = make_validation_set(
            images, labels, preprocess=preprocess, class_names=class_names, limit=limit, seed=seed,
            batch_size=batch_size,
        )  # fmt: skip
        self._rows = list(range(len(self._all)))
        self._expected = len(self._all.classes) if class_names is not None else None
        for failure in self._all.failures:
            log.warning("%s is left out: %s", failure.id, failure.reason)
        self.trajectory = Trajectory((), self._all.classes)
        self._known: tuple[Any, Model] | None = None
        self._listed: dict[str, Any] | None = None
        self._gradients = gradients
        self._log: GradientLog | None = None
        self._warned: set[str] = set()
        self._spent, self._born = 0.0, time.perf_counter()
        self._recorder: Recorder | None = None
        if out is not None:
            from heatproof.monitor.record import Recorder  # a monitor without a folder needs no database

            options: Any = {"batch_size": batch_size, "seed": seed, "rule": self.rule, "layer": layer}
            self._recorder = Recorder(out, self._all, self.methods, metrics=metrics, **options)
            self.trajectory = self._recorder.trajectory() or self.trajectory
            self._listed = self._recorder.anchored(self.rule) if anchor else None

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(call.text for call in self._calls)

    @property
    def images(self) -> ValidationSet:
        """The images of a step."""
        return self._all.take(self._rows)

    @property
    def cost(self) -> Cost:
        """Time of all steps so far."""
        return Cost(self._spent, self._spent / max(time.perf_counter() - self._born, 1e-9))

    def check(self, model: object) -> None:
        """Raise if a model does not fit, before training starts: one image of each class goes through it.

        Args:
            model: what load_model takes.
        """
        in_all_processes(lambda: self._check(model))

    def _check(self, model: Any) -> None:
        with same_randomness():
            answers = self._answers(self._model(model), self._all.first_images)
        count = max(2, answers.logits.shape[1])
        if self._expected not in (None, count):
            raise InputError(f"there are {self._expected} class names, but the model has {count} classes")

    def step(self, model: object, epoch: int) -> StepResult | None:
        """Measure the model after an epoch.

        Args:
            model: what load_model takes.
            epoch: its number.

        Returns:
            None if it is not due (see `every`).
        """
        step = partial(self._step, model, int(epoch))
        result, self.trajectory = in_all_processes(lambda: (step(), self.trajectory), by_first=True)
        if result is not None:
            if self.on_alarm is None and leads():
                for alarm in result.new_alarms:
                    log.warning("%s", alarm)
            in_all_processes(lambda: self._react(result))
        return result

    def _step(self, model: Any, epoch: int) -> StepResult | None:
        if len(self.trajectory) > 0 and epoch % self.every != 0:
            return None
        started = time.perf_counter()
        try:
            with same_randomness():
                result = self._measured(model, epoch, started)
                for logger in () if result.problem else self.loggers:
                    try:
                        logger.log(result)
                    except Exception as error:  # a tracker that is offline does not stop a training
                        name = type(logger).__name__
                        self._warn(f"{name} could not log epoch {epoch}: {error}", f"{name}: {error}")
        finally:
            seconds = time.perf_counter() - started
            self._spent += seconds
        self._keep_within(seconds)
        return result

    def _measured(self, model: Any, epoch: int, started: float) -> StepResult:
        images, name, verdict = self.images, f"epoch-{epoch:03d}", None
        classes = {c: images.classes[c] for c in images.explained.targets.unique().tolist()}
        result = StepResult(epoch, name, len(images), classes, 0.0)
        try:
            wrapped = self._model(model)
            norms = {} if self._log is None else self._log.take()
            answers = self._answers(wrapped, images)
            listed = self._anchored(images, answers)
            numbers = measure(answers, images.labels, self.rule, self.seed, listed)
            if self._recorder is not None:
                try:
                    name = self._recorder.write(wrapped, epoch, self._rows, answers, numbers, norms)
                    verdict = self._recorder.judged(self._warn)
                except (HeatproofError, OSError) as error:  # the scores are valid anyway
                    self._warn(f"epoch {epoch} is not stored: {error}", str(error))
            for method, count in numbers.unusable.items():
                if count:
                    left = f"{method} left {count} of {len(images)} images out"
                    self._warn(f"{left}: their maps have NaN or infinite values")
            state = CheckpointState.measured(
                name, epoch, images.labels, answers.probabilities, numbers.scores, self.rule.tau, images.ids,
                listed,
            )  # fmt: skip
            alarms, new = self._alarms(replace(state, gradients=norms))
            pictures, heat = example_maps(images, answers)
        except Exception as error:  # no error of a monitor may end a training
            problem = str(error) or type(error).__name__
            self._warn(f"epoch {epoch} was not measured: {problem}", problem)
            return replace(result, seconds=time.perf_counter() - started, problem=problem)
        return replace(
            result, checkpoint=name, seconds=time.perf_counter() - started, measured=numbers, alarms=alarms,
            new_alarms=new, pictures=pictures, heat=heat, gradients=norms, verdict=verdict,
        )  # fmt: skip

    def _answers(self, model: Model, images: ValidationSet) -> Answers:
        """Logits and maps of these images."""
        (batch, targets, _), size = images.explained, self.batch_size
        with undisturbed(model):
            try:
                maps, logits = shared_pass(
                    model, batch.images, self._calls, ids=batch.ids, targets=targets, layer=self.layer,
                    seed=self.seed, batch_size=size,
                )  # fmt: skip
            except TargetError as error:
                raise InputError(f"the labels do not match the model's outputs: {error}") from error
            model.head.need_classes("a monitor")
            if images.is_multilabel != isinstance(model.head, Multilabel):
                raise InputError("the model is multi-label; give labels as a table of 0 and 1")
            if images.is_multilabel:  # also those without a label
                logits = all_logits(model, images.images, size)
        return Answers(logits.cpu(), maps, images.is_multilabel)

    def _anchored(self, images: ValidationSet, answers: Answers) -> Tensor | None:
        """The gold list of the first epoch, if lists are anchored."""
        if self.rule.anchor is None:
            return None
        if self._listed is None and torch.isfinite(answers.logits).all():
            gold = gold_list(images.labels, answers.probabilities, self.rule.tau)
            self._listed = dict(zip(images.ids, gold.tolist(), strict=True))
        none, listed = torch.zeros_like(images.labels[0], dtype=torch.bool).tolist(), self._listed or {}
        return torch.tensor([listed.get(name, none) for name in images.ids])

    def _alarms(self, now: CheckpointState) -> tuple[tuple[Alarm, ...], tuple[Alarm, ...]]:
        """Add a checkpoint; return its alarms, and those of them that the checkpoint before did not have.

        A training that is resumed from an earlier epoch drops the later checkpoints.
        """
        past = tuple(c for c in self.trajectory if c.epoch is not None and c.epoch < (now.epoch or 0))
        if len(past) < len(self.trajectory):
            last = self.trajectory.checkpoints[-1].epoch
            order = "again" if last == now.epoch else f"after epoch {last}"
            self._warn(
                f"epoch {now.epoch} comes {order}, so the results from epoch {now.epoch} on are dropped; "
                "count epochs upwards, unless training was resumed from there"
            )
        self.trajectory = replace(self.trajectory, checkpoints=(*past, now))
        alarms = find_alarms(self.trajectory)
        here = tuple(alarm for alarm in alarms if alarm.checkpoint == now.name)
        # The first checkpoint alone raised none, so its alarms have not been reported yet.
        earlier = past[-1].name if len(past) > 1 else None
        known = {(a.mechanism, a.method, a.label) for a in alarms if a.checkpoint == earlier}
        return here, tuple(a for a in here if (a.mechanism, a.method, a.label) not in known)

    def _react(self, result: StepResult) -> None:
        for alarm in result.new_alarms:
            if self.on_alarm is not None:
                self.on_alarm(alarm)
        for alarm in result.new_alarms:
            if alarm.mechanism in self._stop_on:
                raise AlarmRaised(f"stopped after epoch {result.epoch}: {alarm}")

    def _keep_within(self, seconds: float) -> None:
        """Make the subset smaller after a step that took too long."""
        if self.max_seconds is None or seconds <= self.max_seconds:
            return
        had = len(self._rows)
        rows = self._all.at_most(int(had * self.max_seconds / seconds), self.seed)
        limit = f"more than {self.max_seconds:g} s"
        if len(rows) < had:
            self._rows = rows
            too_long = f"a step over {had} images took {seconds:.1f} s, {limit}"
            log.warning("%s; the next steps use %d images", too_long, len(rows))
        else:
            self._warn(f"a step takes {limit} also with {had} images, the fewest possible")

    def _warn(self, text: str, about: str = "") -> None:
        """Log a line, once for each text or subject."""
        if (about or text) not in self._warned:
            self._warned.add(about or text)
            log.warning("%s", text)

    def _model(self, model: Any) -> Model:
        """The module as a Model; the last one is cached, and a module is checked for changes (as_model)."""
        is_new = self._known is None or self._known[0] is not model
        if self._known is None or is_new or self._known[1].module is model:
            self._known = model, with_head(as_model(model), self._all.is_multilabel)
        if is_new:
            self._log = GradientLog(self._known[1].module) if self._gradients else None
        return self._known[1]


def leads() -> bool:
    """Whether this is the first process of a distributed training, or the only one."""
    return _alone() or torch.distributed.get_rank() == 0


def in_all_processes(work: Callable[[], T], by_first: bool = False) -> T:
    """Run `work` in every process, or only in the first, and return its result in all of them.

    An error in one process is raised in all. Every process must call this in the same order.
    """
    if _alone():
        return work()
    value, error = None, None
    if not by_first or leads():
        try:
            value = work()
        except Exception as raised:  # raised below, after the other processes were informed
            error = raised
    # The error itself may not be picklable.
    text = None if error is None else (isinstance(error, AlarmRaised), str(error) or type(error).__name__)
    results: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(results, (value if by_first else None, text))
    if error is not None:
        raise error
    for stops, sentence in (text for _, text in results if text):
        raise AlarmRaised(sentence) if stops else HeatproofError(f"in another process: {sentence}")
    return cast(T, value if leads() or not by_first else results[0][0])


def _alone() -> bool:
    group = torch.distributed
    return not (group.is_available() and group.is_initialized() and group.get_world_size() > 1)
