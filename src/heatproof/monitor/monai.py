"""A monitor in MONAI, or in any ignite engine: train_handlers=[HeatproofHandler(monitor)] of a trainer.

The network is the trainer's own, or what `model` picks from the engine if it has another name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from heatproof.errors import InputError, need
from heatproof.monitor.watch import Monitor, MonitorHooks


class HeatproofHandler(MonitorHooks):
    """Runs a monitor in an engine.

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
            raise InputError(
                "the engine has no network of its own; give HeatproofHandler(monitor, model=...)"
            )
        return engine.network
