"""A monitor in fastai: Learner(..., cbs=[HeatproofCallback(monitor)]), or learner.fit(5, cbs=[...]).

The monitored images go through the learner's model as they are, so give them as its batches are after the
transforms. The check runs before the first batch, a step after each epoch, counted from 1 in each fit.
"""

from __future__ import annotations

from typing import Any

from heatproof.errors import need
from heatproof.monitor import lazy_class
from heatproof.monitor.watch import MonitorHooks


class LearnerHooks(MonitorHooks):
    """Runs a monitor in a fastai learner."""

    learn: Any  # set by fastai
    order = 60  # after what advances the epoch, such as the Recorder

    def before_fit(self) -> None:
        if self._trains():
            self.monitor.check(self.learn.model)

    def after_epoch(self) -> None:
        if self._trains() and self.step_stops(self.learn.model, self.learn.epoch + 1):
            raise need("fastai.callback.core", "fastai").CancelFitException

    def _trains(self) -> bool:
        """Not in the learning-rate finder or in predictions."""
        return not hasattr(self.learn, "lr_finder") and not hasattr(self.learn, "gather_preds")


__getattr__ = lazy_class(
    __name__, "HeatproofCallback", LearnerHooks, lambda: need("fastai.callback.core", "fastai").Callback
)
