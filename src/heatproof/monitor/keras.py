"""A monitor in Keras (torch backend): model.fit(..., callbacks=[HeatproofCallback(monitor)]).

The monitored images are "b c H W", also where Keras has channels last; the values are those that the model is
trained on.
"""

from __future__ import annotations

from typing import Any

from heatproof.models.keras_graph import import_keras
from heatproof.monitor import lazy_class
from heatproof.monitor.watch import MonitorHooks


class KerasHooks(MonitorHooks):
    """Runs a monitor in model.fit."""

    model: Any  # set by Keras

    def on_train_begin(self, logs: Any = None) -> None:
        self.monitor.check(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if self.step_stops(self.model, epoch + 1):
            self.model.stop_training = True


__getattr__ = lazy_class(__name__, "HeatproofCallback", KerasHooks, lambda: import_keras().callbacks.Callback)
