"""A monitor in Lightning: Trainer(callbacks=[HeatproofCallback(monitor)]), of lightning or pytorch_lightning.

The monitored images go through the LightningModule itself (its forward returns logits), or through what
`model` picks from it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from heatproof.errors import need
from heatproof.monitor import lazy_class
from heatproof.monitor.watch import Monitor, MonitorHooks

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


class LightningHooks(MonitorHooks):
    """Runs a monitor in a Lightning trainer."""

    def __init__(self, monitor: Monitor, model: Callable[[Any], Any] | None = None) -> None:
        super().__init__(monitor)
        self.model = model or (lambda module: module)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.monitor.check(self.model(pl_module))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self.step_stops(self.model(pl_module), trainer.current_epoch + 1):
            trainer.should_stop = True


def _base() -> Any:
    """The Callback of the package that is imported; if neither is, of the one that is installed."""
    used = [name for name in PACKAGES if name in sys.modules]
    installed = [name for name in PACKAGES if importlib.util.find_spec(name.split(".")[0])]
    return need((used or installed or list(PACKAGES))[0], "lightning").Callback


__getattr__ = lazy_class(__name__, "HeatproofCallback", LightningHooks, _base)
