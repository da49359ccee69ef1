"""A monitor in Keras (torch backend): model.fit(..., callbacks=[HeatproofCallback(monitor)]).

The monitored images are "b c H W", as everywhere here, also where Keras has channels last; the values are
those that the model is trained on. The check runs before the first batch, a step after each epoch, counted
from 1.
"""

from __future__ import annotations

from typing import Any

from heatproof.models.keras_graph import import_keras
from heatproof.monitor.callbacks import callback
from heatproof.monitor.together import AlarmRaised
from heatproof.monitor.watch import Monitor


class KerasHooks:
    """Runs a monitor in model.fit."""

    model: Any  # set by Keras

    def __init__(self, monitor: Monitor) -> None:
        super().__init__()
        self.monitor = monitor

    def on_train_begin(self, logs: Any = None) -> None:
        self.monitor.check(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        try:
            self.monitor.step(self.model, epoch + 1)
        except AlarmRaised:
            self.model.stop_training = True


__getattr__ = callback(__name__, KerasHooks, lambda: import_keras().callbacks.Callback)
