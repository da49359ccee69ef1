"""Printed symbols with known parts, one file each. A new file here is found without editing anything."""

from __future__ import annotations

import importlib
import pkgutil

from heatproof.errors import UnknownNameError
from heatproof.images.symbols._symbol import PARTS, SYMBOLS, Code, Modules, Random, Symbol, register

__all__ = ["PARTS", "SYMBOLS", "Code", "Modules", "Random", "Symbol", "find_symbol", "register"]

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")


def find_symbol(name: str) -> Symbol:
    if name not in SYMBOLS:
        raise UnknownNameError("symbol", name, SYMBOLS)
    return SYMBOLS[name]
