"""What is imported when it is first used: torch, and the public names of a room.

Importing torch takes longer than all else that `heatproof --help` or `heatproof sql` does. Files that such
commands read too take torch from here, and tensors for type hints under `if TYPE_CHECKING`.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
else:

    class _Torch(ModuleType):
        """Stands for torch, and imports it when one of its names is read."""

        def __getattr__(self, name: str) -> Any:
            return getattr(import_module("torch"), name)

    torch = _Torch("torch")


@cache
def entry_points() -> Any:
    """Those of every package that is installed; looking for them takes time."""
    from importlib import metadata

    return metadata.entry_points()


class _Room(ModuleType):
    """A package that looks its names up when they are first used, where its type hints come from."""

    def __getattr__(self, name: str) -> Any:
        if name not in (homes := _homes(self.__name__)):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        module, there = homes[name]
        found = getattr(import_module(module), there)
        setattr(self, name, found)
        return found

    def __setattr__(self, name: str, value: object) -> None:
        # An import makes a file an attribute of its package; a public function of that name comes first.
        if not (isinstance(value, ModuleType) and name in _homes(self.__name__)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_homes(self.__name__)})


def names_are_late(package: str) -> None:
    """Import what stands under `if TYPE_CHECKING` in a package's __init__ only when it is asked for."""
    sys.modules[package].__class__ = _Room


@cache
def _homes(package: str) -> Mapping[str, tuple[str, str]]:
    """By public name: the module that it comes from, and its name there."""
    module = sys.modules[package]  # whose loader may be pytest's, which tells no source
    lines = linecache.getlines(str(module.__file__), vars(module))
    blocks = [node for node in ast.parse("".join(lines)).body if isinstance(node, ast.If)]
    imports = [line for block in blocks for line in block.body if isinstance(line, ast.ImportFrom)]
    return {
        alias.asname or alias.name: (str(line.module), alias.name) for line in imports for alias in line.names
    }
