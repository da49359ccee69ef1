"""heatproof: can this heatmap be trusted?

    hp.load_model    a classifier, by name or as a module      hp.open_image    a picture, from any file
    hp.explain       maps of several methods from one pass     hp.metrics       scores of maps
    hp.run           explain and score what a study says       hp.open_run      scores, maps, verdict of a run
    hp.monitor       the same while a model trains             hp.contrast      which maps show what it uses

Names are looked up when they are first used, so that importing heatproof takes no time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import lazy_loader

if TYPE_CHECKING:
    from heatproof import metrics, monitor
    from heatproof.api import Run, audit, compare, open_run, run
    from heatproof.contrast import contrast
    from heatproof.explain import explain
    from heatproof.images import open_image
    from heatproof.models import Model, load_model
    from heatproof.rows import Score, Unit
    from heatproof.types import Batch, Maps, Trace

__version__ = "0.2.0"
__all__ = [
    "Batch", "Maps", "Model", "Run", "Score", "Trace", "Unit", "audit", "compare", "contrast", "explain",
    "load_model", "metrics", "monitor", "open_image", "open_run", "run",
]  # fmt: skip

__getattr__, _attached, _ = lazy_loader.attach(
    __name__,
    submodules=[
        "errors", "images", "metrics", "models", "monitor", "registry", "report", "store", "studies", "train",
        "types", "verdict",
    ],
    submod_attrs={
        "images": ["open_image"],
        "models": ["Model", "load_model"],
        "api": ["Run", "audit", "compare", "open_run"],
        "types": ["Batch", "Maps", "Trace"],
        "rows": ["Score", "Unit"],
    },
)  # fmt: skip
_CALLED = {
    "heatproof.contrast": "contrast.api", "heatproof.explain": "explain.api", "heatproof.run": "api",
}  # rooms that are functions too  # fmt: skip


class _CalledRoom(ModuleType):
    """A room and the function of its name in one: heatproof.run.engine and hp.run(...) both work."""

    def __getattr__(self, name: str) -> Any:
        if name not in self.__all__:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"heatproof.{_CALLED[self.__name__]}"), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    @property
    def _function(self) -> Callable[..., Any]:
        return cast("Callable[..., Any]", getattr(self, self.__all__[0]))

    @property
    def __all__(self) -> list[str]:  # what help() shows
        return [self.__name__.rpartition(".")[2]]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.__all__]

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._function)


for _name in _CALLED:
    import_module(_name).__class__ = _CalledRoom


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_attached()})
