"""Scores of explanations while a model trains: Monitor, with the alarms of verdict/.

    monitor = hp.monitor.Monitor(images, labels, methods)
    monitor.step(model, epoch)          inside any training loop

Callbacks for Lightning, Hugging Face, Keras, fastai and MONAI are in callbacks.py, loggers for experiment
trackers in trackers.py.
"""

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import lazy_loader

from heatproof.verdict.alarms import Alarm, Thresholds, find_alarms
from heatproof.verdict.trajectory import Trajectory

if TYPE_CHECKING:
    from heatproof.monitor.watch import AlarmRaised, Monitor

__getattr__, _, _ = lazy_loader.attach(__name__, submod_attrs={"watch": ["AlarmRaised", "Monitor"]})
__all__ = ["Alarm", "AlarmRaised", "Monitor", "Thresholds", "Trajectory", "find_alarms"]


def __dir__() -> list[str]:
    return __all__


def lazy_classes(module: str, parts: Mapping[str, tuple[type, Callable[[], type]]]) -> Callable[[str], Any]:
    """A module's __getattr__ that makes classes from hooks and a library's own base class.

    The library is imported only when the class is. parts: by class name, the hooks and a function that
    imports the base class.
    """

    def find(name: str) -> Any:
        if name not in parts:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        hooks, base = parts[name]
        made = type(name, (hooks, base()), {"__module__": module})
        setattr(sys.modules[module], name, made)
        return made

    return find
