"""A monitor in the Hugging Face Trainer: Trainer(..., callbacks=[HeatproofCallback(monitor)]).

The check runs before the first batch; a step at the end of each epoch, counted from 1, or with at="evaluate"
after each evaluation, counted in optimiser steps.
"""

from __future__ import annotations

from typing import Any

from heatproof.errors import InputError, need
from heatproof.monitor import lazy_class
from heatproof.monitor.watch import Monitor, MonitorHooks


class TrainerHooks(MonitorHooks):
    """Runs a monitor in a Hugging Face trainer."""

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


__getattr__ = lazy_class(
    __name__, "HeatproofCallback", TrainerHooks, lambda: need("transformers", "hf").TrainerCallback
)
