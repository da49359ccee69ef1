"""Scores of explanations while a model trains: Monitor, with the alarms of verdict/.

    monitor = hp.monitor.Monitor(images, labels, methods)
    monitor.step(model, epoch)          inside any training loop

Callbacks for Lightning, Hugging Face, Keras, fastai and MONAI, and an evaluator for MLflow, are in files of
those names; each imports its library.
"""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import lazy_loader

from heatproof.verdict.alarms import Alarm, Thresholds, find_alarms
from heatproof.verdict.trajectory import Trajectory

if TYPE_CHECKING:
    from heatproof.monitor.watch import AlarmRaised, Monitor

# MLflow imports its evaluators, and with them this package, at its own start: torch comes later.
__getattr__, _, _ = lazy_loader.attach(__name__, submod_attrs={"watch": ["AlarmRaised", "Monitor"]})
__all__ = ["Alarm", "AlarmRaised", "Monitor", "Thresholds", "Trajectory", "find_alarms"]


def __dir__() -> list[str]:
    return __all__


def lazy_class(module: str, name: str, hooks: type, base: Callable[[], type]) -> Callable[[str], Any]:
    """A module's __getattr__ that makes a class from hooks and a library's own base class.

    The library is imported only when the class is.
    """

    def find(attribute: str) -> Any:
        if attribute != name:
            raise AttributeError(f"module {module!r} has no attribute {attribute!r}")
        made = type(name, (hooks, base()), {"__module__": module})
        setattr(sys.modules[module], name, made)
        return made

    return find
