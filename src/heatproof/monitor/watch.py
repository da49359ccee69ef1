"""One line in a training loop: per-class consistency at every epoch, alarms, and training left as it is.

    monitor = Monitor(images, labels)          # before training; bad input is said here
    monitor.step(model, epoch)                 # after each epoch

A step costs one pass over the monitored images (see measure.py) and the pairs of the C-Score. What goes wrong
in it is said once in the log (logger "heatproof.monitor") and in the report's `problem`, and training goes
on; only `stop_on`, or an `on_alarm` of yours that raises, stops it. Nothing is written without `out`.

In distributed training call check and step in every process. The first one measures, writes and logs; all get
its report, call on_alarm, and stop or raise together.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from heatproof.errors import HeatproofError, InputError, TargetError
from heatproof.explain.api import read_methods, shared_pass
from heatproof.images import Preprocess, Source
from heatproof.metrics.cscores import gold_list
from heatproof.metrics.gold import FIRST, ListRule, Tau, Weights
from heatproof.models import Model, load_model
from heatproof.models.heads import Multilabel
from heatproof.models.queue import all_logits
from heatproof.monitor.held import HeldOut, hold
from heatproof.monitor.measure import Answers, measure, same_randomness, undisturbed, with_head
from heatproof.monitor.outcome import Cost, Report, shown
from heatproof.monitor.together import AlarmRaised, everywhere, from_first, leads
from heatproof.monitor.trackers import Tracker
from heatproof.train.loop import GradientLog
from heatproof.types import ArrayLike, Batch
from heatproof.verdict.alarms import Alarm, find_alarms, read_mechanisms
from heatproof.verdict.trajectory import CheckpointState, Trajectory

if TYPE_CHECKING:
    from heatproof.monitor.record import Recorder

log = logging.getLogger("heatproof.monitor")


class Monitor:
    """Watches a model's explanations on fixed images while it trains.

    Args:
        images: model-ready "b c H W", a list of Batch, or a Source or folder of pictures with the model's
            `preprocess`. They are kept in memory.
        labels: "b" classes, where images are a tensor; "b k" of 0 and 1 where an image may have several
            findings: each output is then read as one finding's logit.
        methods: as for hp.explain.
        every: measure the first epoch given and every n-th.
        limit: a stratified subset of so many images.
        batch_size: images per pass.
        class_names: of the classes, in order.
        preprocess: the model's own, for pictures.
        out: a run folder to write and to resume; its verdict.json is renewed at each step.
        metrics: more of each picture, for `out`, by name: the one that the verdict rests on, at its cost.
        layer: where CAMs look; found by itself where None.
        tau: of the gold lists, see hp.metrics.gold_list; of several findings also a list, one for each.
        weights: of the C-Score, see hp.metrics.cscore_by_class.
        anchor: "first": the lists of the first epoch that is measured hold for all of them.
        gradients: also log how large each layer's gradients were since the last step, see train/loop.py;
            from check() on, or from the first step.
        loggers: trackers, see trackers.py: what has a method log(report).
        on_alarm: called with each new alarm, in every process, instead of a line in the log.
        stop_on: mechanisms ("class masking", ..., or "any") for which step() raises AlarmRaised; callbacks
            then end the training.
        max_seconds: a step that takes longer makes the subset smaller for the next ones.
        seed: of the subset, the maps and the intervals.
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
        if every < 1:
            raise InputError(f"every is a number of epochs, at least 1; got {every}")
        if max_seconds is not None and not max_seconds > 0:
            raise InputError(f"max_seconds must be above 0; got {max_seconds}")
        if anchor not in (None, FIRST):
            raise InputError(
                f"a monitor anchors its lists to the 'first' epoch or not at all; got {anchor!r}"
            )
        if seed < 0:
            raise InputError(f"seed must be 0 or more, got {seed}")
        if metrics and out is None:
            raise InputError("metrics go into a run folder; name one with out=")
        for logger in loggers:
            if not callable(getattr(logger, "log", None)):
                raise InputError(f"a logger has a method log(report); {type(logger).__name__} has none")
        self.every, self.batch_size, self.layer, self.seed = every, batch_size, layer, seed
        self.rule = ListRule(tau, weights, anchor)
        self.loggers, self.on_alarm, self.max_seconds = tuple(loggers), on_alarm, max_seconds
        self._all = hold(
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
        self._said: set[str] = set()
        self._spent, self._born = 0.0, time.perf_counter()
        self._recorder: Recorder | None = None
        if out is not None:
            from heatproof.monitor.record import Recorder  # which needs duckdb and msgspec

            options: Any = {"batch_size": batch_size, "seed": seed, "rule": self.rule, "layer": layer}
            self._recorder = Recorder(out, self._all, self.methods, metrics=metrics, **options)
            self.trajectory = self._recorder.trajectory() or self.trajectory
            self._listed = self._recorder.anchored(self.rule) if anchor else None

    @property
    def methods(self) -> tuple[str, ...]:
        return tuple(call.text for call in self._calls)

    @property
    def images(self) -> HeldOut:
        """What a step looks at."""
        return self._all.take(self._rows)

    @property
    def cost(self) -> Cost:
        """All steps so far."""
        return Cost(self._spent, self._spent / max(time.perf_counter() - self._born, 1e-9))

    def check(self, model: object) -> None:
        """Refuse a model that does not fit, before training starts: one image of each class goes through.

        Args:
            model: what load_model takes.
        """
        everywhere(lambda: self._check(model))

    def _check(self, model: Any) -> None:
        with same_randomness():
            found = self._answers(self._model(model), self._all.take(self._all.first_of_each()))
        count = max(2, found.logits.shape[1])
        if self._expected not in (None, count):
            raise InputError(f"there are {self._expected} class names, but the model has {count} classes")

    def step(self, model: object, epoch: int) -> Report | None:
        """Measure the model after an epoch.

        Args:
            model: what load_model takes.
            epoch: its number.

        Returns:
            None where it is not due (see `every`).
        """
        report, self.trajectory = from_first(lambda: (self._step(model, int(epoch)), self.trajectory))
        if report is not None:
            self._tell(report)
        return report

    def _step(self, model: Any, epoch: int) -> Report | None:
        if len(self.trajectory) > 0 and epoch % self.every != 0:
            return None
        started = time.perf_counter()
        try:
            with same_randomness():
                report = self._measured(model, epoch, started)
                for logger in self.loggers:
                    self._send(logger, report)
        finally:
            seconds = time.perf_counter() - started
            self._spent += seconds
        self._keep_within(seconds)
        return report

    def _measured(self, model: Any, epoch: int, started: float) -> Report:
        held, name = self.images, f"epoch-{epoch:03d}"
        classes = {c: held.classes[c] for c in held.occur}
        report, verdict = Report(epoch, name, len(held), classes, 0.0), None
        try:
            wrapped = self._model(model)
            norms = {} if self._log is None else self._log.take()
            found = self._answers(wrapped, held)
            listed = self._anchored(held, found)
            numbers = measure(found, held.labels, self.rule, self.seed, listed)
            if self._recorder is not None:
                try:
                    name = self._recorder.write(wrapped, epoch, self._rows, found, numbers, norms)
                    verdict = self._recorder.judged(self._say)
                except (HeatproofError, OSError) as error:  # the numbers are good all the same
                    self._say(f"epoch {epoch} is not stored: {error}", str(error))
            for method, count in numbers.unusable.items():
                if count:
                    left = f"{method} left {count} of {len(held)} images out"
                    self._say(f"{left}: their maps have NaN or infinite values")
            state = CheckpointState.measured(
                name, epoch, held.labels, found.probabilities, numbers.scores, self.rule.tau, held.ids, listed
            )
            state = replace(state, gradients=norms)
            alarms, new = self._alarms(state)
            pictures, heat = shown(held, found)
        except Exception as error:  # training goes on, whatever it is
            problem = str(error) or type(error).__name__
            self._say(f"epoch {epoch} was not measured: {problem}", problem)
            return replace(report, seconds=time.perf_counter() - started, problem=problem)
        return replace(
            report, checkpoint=name, seconds=time.perf_counter() - started, measured=numbers, alarms=alarms,
            new_alarms=new, pictures=pictures, heat=heat, gradients=norms, verdict=verdict,
        )  # fmt: skip

    def _answers(self, model: Model, held: HeldOut) -> Answers:
        """Logits and maps of these images."""
        with undisturbed(model):
            try:
                (batch, targets, _), size = held.explained, self.batch_size
                maps, logits = shared_pass(
                    model, batch.images, self._calls, ids=batch.ids, targets=targets, layer=self.layer,
                    seed=self.seed, batch_size=size,
                )  # fmt: skip
            except TargetError as error:
                raise InputError(f"the labels do not match the model's outputs: {error}") from error
            model.head.need_classes("a monitor")
            if held.is_multilabel != isinstance(model.head, Multilabel):
                raise InputError(
                    "the model answers several findings at once; give labels as a table of 0 and 1"
                )
            if held.is_multilabel:  # also those without a finding
                logits = all_logits(model, held.images, size)
        return Answers(logits.cpu(), maps, held.is_multilabel)

    def _anchored(self, held: HeldOut, found: Answers) -> Tensor | None:
        """The list in force, where it is that of the first epoch."""
        if self.rule.anchor is None:
            return None
        if self._listed is None and torch.isfinite(found.logits).all():
            gold = gold_list(held.labels, found.probabilities, self.rule.tau)
            self._listed = dict(zip(held.ids, gold.tolist(), strict=True))
        none, listed = torch.zeros_like(held.labels[0], dtype=torch.bool).tolist(), self._listed or {}
        return torch.tensor([listed.get(name, none) for name in held.ids])

    def _alarms(self, now: CheckpointState) -> tuple[tuple[Alarm, ...], tuple[Alarm, ...]]:
        """Add the checkpoint; its alarms, and those of them that the checkpoint before did not have.

        A training that was taken up from an earlier epoch rewinds.
        """
        past = tuple(c for c in self.trajectory if c.epoch is not None and c.epoch < (now.epoch or 0))
        if len(past) < len(self.trajectory):
            last = self.trajectory.checkpoints[-1].epoch
            order = "again" if last == now.epoch else f"after epoch {last}"
            self._say(
                f"epoch {now.epoch} comes {order}, so that what was seen from epoch {now.epoch} on no longer "
                "counts; count epochs upwards, unless training was taken up from there"
            )
        self.trajectory = replace(self.trajectory, checkpoints=(*past, now))
        every = find_alarms(self.trajectory)
        # The first checkpoint alone raised none, so its alarms have not been reported yet.
        known = {_about(alarm) for alarm in every if len(past) > 1 and alarm.checkpoint == past[-1].name}
        here = tuple(alarm for alarm in every if alarm.checkpoint == now.name)
        return here, tuple(alarm for alarm in here if _about(alarm) not in known)

    def _tell(self, report: Report) -> None:
        if self.on_alarm is None and leads():
            for alarm in report.new_alarms:
                log.warning("%s", alarm)
        everywhere(lambda: self._decide(report))

    def _decide(self, report: Report) -> None:
        for alarm in report.new_alarms:
            if self.on_alarm is not None:
                self.on_alarm(alarm)
        for alarm in report.new_alarms:
            if alarm.mechanism in self._stop_on:
                raise AlarmRaised(f"stopped after epoch {report.epoch}: {alarm}")

    def _send(self, logger: Tracker, report: Report) -> None:
        if report.measured is None:
            return
        try:
            logger.log(report)
        except Exception as error:  # a tracker that is offline does not stop a training
            name = type(logger).__name__
            self._say(f"{name} did not take epoch {report.epoch}: {error}", f"{name}: {error}")

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
            log.warning("%s; the next ones look at %d images", too_long, len(rows))
        else:
            self._say(f"a step takes {limit} also with {had} images, the fewest possible")

    def _say(self, text: str, about: str = "") -> None:
        """A line in the log, once for each text, or for each thing it is about."""
        if (about or text) not in self._said:
            self._said.add(about or text)
            log.warning("%s", text)

    def _model(self, model: Any) -> Model:
        """The module as heatproof sees it; the last one is kept, with the layer that was found in it."""
        if self._known is None or self._known[0] is not model:
            self._known = model, with_head(load_model(model), self._all.is_multilabel)
            self._log = GradientLog(self._known[1].module) if self._gradients else None
        return self._known[1]


def _about(alarm: Alarm) -> tuple[Any, ...]:
    return alarm.mechanism, alarm.method, alarm.label
