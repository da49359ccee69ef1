"""A monitor in the Hugging Face Trainer: Trainer(..., callbacks=[HeatproofCallback(monitor)]).

The check runs before the first batch; a step at the end of each epoch, counted from 1, or with at="evaluate"
after each evaluation, counted in optimiser steps.
"""

from __future__ import annotations

from typing import Any

from heatproof.errors import InputError, need
from heatproof.monitor.callbacks import callback
from heatproof.monitor.together import AlarmRaised
from heatproof.monitor.watch import Monitor

TIMES = ("epoch", "evaluate")


class TrainerHooks:
    """Runs a monitor in a Hugging Face trainer."""

    def __init__(self, monitor: Monitor, at: str = "epoch") -> None:
        if at not in TIMES:
            raise InputError(f"at is 'epoch' or 'evaluate'; got {at!r}")
        self.monitor, self.at = monitor, at

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.monitor.check(model)

    def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self.at == "epoch":
            self._step(model, round(state.epoch), control)

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self.at == "evaluate":
            self._step(model, state.global_step, control)

    def _step(self, model: Any, epoch: int, control: Any) -> None:
        try:
            self.monitor.step(model, epoch)
        except AlarmRaised:
            control.should_training_stop = True


__getattr__ = callback(__name__, TrainerHooks, lambda: need("transformers", "hf").TrainerCallback)
