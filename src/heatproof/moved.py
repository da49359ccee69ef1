"""What 0.1 had elsewhere or otherwise, kept for one release; each use says so in a DeprecationWarning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

# Old module -> where its names are looked up now.
MODULES: dict[str, tuple[str, ...]] = {
    "images.code_files": ("images.codes",),
    "images.dicom_file": ("images.dicom",),
    "images.geometry": ("images.transforms",),
    "images.manifest": ("images.csv",),
    "images.photometric": ("images.transforms",),
    "images.qr": ("images.codes",),
    "metrics.cose": ("metrics.stability",),
    "metrics.cscore": ("metrics.consistency",),
    "metrics.localise": ("metrics.localisation",),
    "metrics.structure": ("metrics.kit", "metrics.on_parts"),
    "monitor.alarms": ("verdict.alarms",),
    "monitor.gate": ("verdict.gate",),
    "monitor.rules": ("verdict.rules",),
    "monitor.trajectory": ("verdict.trajectory",),
    "train.regimes": ("train.protocols",),
    "train.two_phase": ("train.protocols",),
}
# Functions today.
HIDDEN = ("metrics.cose", "metrics.cscore", "metrics.localise", "metrics.structure", "train.two_phase")

P = ParamSpec("P")
R = TypeVar("R")


class _Old(ModuleType):
    """A module by its old name; its names are looked up where they are now."""

    def __getattr__(self, name: str) -> Any:
        places = MODULES[self.__name__.removeprefix("heatproof.")]
        for place in [] if name.startswith("__") else places:
            module = import_module(f"heatproof.{place}")
            if hasattr(module, name):
                said = f"{self.__name__}.{name} is now heatproof.{place}.{name}"
                warnings.warn(said, DeprecationWarning, stacklevel=2)
                return getattr(module, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


class _OldNames:
    """Finds modules by their old names, after everything else."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        known = name.removeprefix("heatproof.") in MODULES and name.startswith("heatproof.")
        return ModuleSpec(name, self) if known else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Old(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: its names are looked up when they are asked for."""


def keep_old_names() -> None:
    """Let old imports work."""
    sys.meta_path.append(_OldNames())
    for name in HIDDEN:
        # Found here, import does not set them on heatproof.metrics, where functions have their names.
        sys.modules[f"heatproof.{name}"] = _Old(f"heatproof.{name}")


def model_first(function: Callable[P, R]) -> Callable[P, R]:
    """Let a metric be called as in 0.1, with model and images as the first two arguments."""

    @wraps(function)
    def called(*args: P.args, **named: P.kwargs) -> R:
        if args and hasattr(args[0], "forward"):  # a Model or a module, which no metric takes first today
            warnings.warn(
                f"{function.__name__} takes maps, masks or methods first; write model=... and images=...",
                DeprecationWarning,
                stacklevel=2,
            )
            in_any_order: Callable[..., R] = function
            return in_any_order(*args[2:], **dict(zip(("model", "images"), args, strict=False)), **named)
        return function(*args, **named)

    return called
