"""A monitor in Lightning, the Hugging Face Trainer, Keras, fastai, MONAI and other ignite engines.

    Trainer(callbacks=[LightningCallback(monitor)])                     lightning or pytorch_lightning
    Trainer(..., callbacks=[HuggingFaceCallback(monitor)])
    model.fit(..., callbacks=[KerasCallback(monitor)])                  Keras on the torch backend
    Learner(..., cbs=[FastaiCallback(monitor)])                         or learner.fit(5, cbs=[...])
    SupervisedTrainer(..., train_handlers=[MonaiHandler(monitor)])      or its attach(engine)

The check runs before the first batch, a step after each epoch, counted from 1. The monitored images go
through the model as they are: the values that it is trained on, "b c H W" also where Keras has channels last,
for fastai as its batches are after the transforms. A class imports its library when it is first used.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from heatproof.errors import InputError, need
from heatproof.models.keras_graph import import_keras
from heatproof.monitor import lazy_classes
from heatproof.monitor.watch import AlarmRaised, Monitor

LIGHTNING = ("lightning.pytorch", "pytorch_lightning")


class MonitorHooks:
    """Base of the callbacks."""

    def __init__(self, monitor: Monitor) -> None:
        super().__init__()
        self.monitor = monitor

    def step_stops(self, model: Any, epoch: int) -> bool:
        """Measure an epoch; whether training should stop."""
        try:
            self.monitor.step(model, epoch)
        except AlarmRaised:
            return True
        return False


class LightningHooks(MonitorHooks):
    """model: from the LightningModule to the network; by default the module, whose forward returns logits."""

    def __init__(self, monitor: Monitor, model: Callable[[Any], Any] | None = None) -> None:
        super().__init__(monitor)
        self.model = model or (lambda module: module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.monitor.check(self.model(pl_module))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.step_stops(self.model(pl_module), trainer.current_epoch + 1):
            trainer.should_stop = True


class HuggingFaceHooks(MonitorHooks):
    """at: "epoch", or "evaluate" for a step after each evaluation, counted in optimiser steps."""

    def __init__(self, monitor: Monitor, at: str = "epoch") -> None:
        if at not in ("epoch", "evaluate"):
            raise InputError(f"at is 'epoch' or 'evaluate'; got {at!r}")
        super().__init__(monitor)
        self.at = at

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.monitor.check(model)

    def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self.at == "epoch" and self.step_stops(model, round(state.epoch)):
            control.should_training_stop = True

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self.at == "evaluate" and self.step_stops(model, state.global_step):
            control.should_training_stop = True


class KerasHooks(MonitorHooks):
    """Runs a monitor in model.fit."""

    model: Any  # set by Keras

    def on_train_begin(self, logs: Any = None) -> None:
        self.monitor.check(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.step_stops(self.model, epoch + 1):
            self.model.stop_training = True


class FastaiHooks(MonitorHooks):
    """Runs a monitor in a learner; not in its learning-rate finder or in predictions."""

    learn: Any  # set by fastai
    order = 60  # after what advances the epoch, such as the Recorder

    def before_fit(self) -> None:
        if self._trains():
            self.monitor.check(self.learn.model)

    def after_epoch(self) -> None:
        if self._trains() and self.step_stops(self.learn.model, self.learn.epoch + 1):
            raise need("fastai.callback.core", "fastai").CancelFitException

    def _trains(self) -> bool:
        return not hasattr(self.learn, "lr_finder") and not hasattr(self.learn, "gather_preds")


class MonaiHandler(MonitorHooks):
    """Runs a monitor in an ignite engine.

    Args:
        monitor: what it runs.
        model: from the engine to its network; by default its attribute `network`.
    """

    def __init__(self, monitor: Monitor, model: Callable[[Any], Any] | None = None) -> None:
        self._events = need("ignite.engine", "monai").Events
        super().__init__(monitor)
        self.model = model

    def attach(self, engine: Any) -> None:
        """Called by MONAI with the trainer, or by you with an engine."""
        engine.add_event_handler(self._events.STARTED, self._start)
        engine.add_event_handler(self._events.EPOCH_COMPLETED, self._epoch)

    def _start(self, engine: Any) -> None:
        self.monitor.check(self._network(engine))

    def _epoch(self, engine: Any) -> None:
        if self.step_stops(self._network(engine), engine.state.epoch):
            engine.terminate()

    def _network(self, engine: Any) -> Any:
        if self.model is not None:
            return self.model(engine)
        if not hasattr(engine, "network"):
            raise InputError("the engine has no network of its own; give MonaiHandler(monitor, model=...)")
        return engine.network


def _lightning() -> Any:
    """The package that is imported; if neither is, the one that is installed."""
    used = [name for name in LIGHTNING if name in sys.modules]
    installed = [name for name in LIGHTNING if importlib.util.find_spec(name.split(".")[0])]
    return need((used or installed or list(LIGHTNING))[0], "lightning")


__getattr__ = lazy_classes(
    __name__,
    {
        "LightningCallback": (LightningHooks, lambda: _lightning().Callback),
        "HuggingFaceCallback": (HuggingFaceHooks, lambda: need("transformers", "hf").TrainerCallback),
        "KerasCallback": (KerasHooks, lambda: import_keras().callbacks.Callback),
        "FastaiCallback": (FastaiHooks, lambda: need("fastai.callback.core", "fastai").Callback),
    },
)
