"""A monitor in Lightning: Trainer(callbacks=[HeatproofCallback(monitor)]), of lightning or pytorch_lightning.

The monitored images go through the LightningModule itself (its forward returns logits), or through what
`model` picks from it. The check runs before the first batch, a step after each epoch, counted from 1.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from heatproof.errors import need
from heatproof.monitor.callbacks import callback
from heatproof.monitor.together import AlarmRaised
from heatproof.monitor.watch import Monitor

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


class LightningHooks:
    """Runs a monitor in a Lightning trainer."""

    def __init__(self, monitor: Monitor, model: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self.monitor, self.model = monitor, model

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.monitor.check(self._model(pl_module))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        try:
            self.monitor.step(self._model(pl_module), trainer.current_epoch + 1)
        except AlarmRaised:
            trainer.should_stop = True

    def _model(self, pl_module: Any) -> Any:
        return pl_module if self.model is None else self.model(pl_module)


def _library() -> Any:
    """The one the user works with; where neither is imported, the one that is installed."""
    used = [name for name in PACKAGES if name in sys.modules]
    installed = [name for name in PACKAGES if importlib.util.find_spec(name.split(".")[0])]
    return need((used or installed or list(PACKAGES))[0], "lightning")


__getattr__ = callback(__name__, LightningHooks, lambda: _library().Callback)
