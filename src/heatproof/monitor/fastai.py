"""A monitor in fastai: Learner(..., cbs=[HeatproofCallback(monitor)]), or learner.fit(5, cbs=[...]).

The monitored images go through the learner's model as they are, so give them as its batches are after the
transforms. The check runs before the first batch, a step after each epoch, counted from 1 in each fit.
"""

from __future__ import annotations

from typing import Any

from heatproof.errors import need
from heatproof.monitor.callbacks import callback
from heatproof.monitor.together import AlarmRaised
from heatproof.monitor.watch import Monitor


class LearnerHooks:
    """Runs a monitor in a fastai learner."""

    learn: Any  # set by fastai
    order = 60  # behind what moves the epoch on, such as the Recorder

    def __init__(self, monitor: Monitor) -> None:
        super().__init__()
        self.monitor = monitor

    def before_fit(self) -> None:
        if not self._aside:
            self.monitor.check(self.learn.model)

    def after_epoch(self) -> None:
        if self._aside:
            return
        try:
            self.monitor.step(self.learn.model, self.learn.epoch + 1)
        except AlarmRaised:
            raise need("fastai.callback.core", "fastai").CancelFitException from None

    @property
    def _aside(self) -> bool:
        """The learning-rate finder and predictions are no training."""
        return hasattr(self.learn, "lr_finder") or hasattr(self.learn, "gather_preds")


__getattr__ = callback(__name__, LearnerHooks, lambda: need("fastai.callback.core", "fastai").Callback)
