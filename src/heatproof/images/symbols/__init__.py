"""Printed symbols with known parts, one file each. A new file here is found without editing anything.

A symbol's file makes one `Symbol` and hands it to `register`; making pictures, negatives, masks, distortions
and files then works for it too. Parts have the names that the structure metrics know, whatever the symbol:

    finder  the pattern by which a reader finds the symbol
    timing  the pattern that tells it where the modules lie
    box     every module, without the quiet zone
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from heatproof.errors import InputError, UnknownNameError

Random = np.random.Generator
Modules = np.ndarray  # "rows columns" bool, dark modules True

PARTS = ("finder", "timing", "box")
ALPHABET = np.array(list("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ $%*+-./:"))  # that QR codes write briefly


class Code(NamedTuple):
    """A text as a symbol."""

    symbol: str
    text: str
    version: int
    level: str  # of error correction; "" where the symbol has no levels
    modules: Modules

    @property
    def parts(self) -> dict[str, Modules]:
        """Finder, timing and box, in modules."""
        return SYMBOLS[self.symbol].parts(self.modules)


@dataclass(frozen=True)
class Symbol:
    """One symbology. A version is its size, numbered from 1 as its standard does or by growing size."""

    name: str
    title: str
    versions: range  # that exist here
    usual: range  # that are drawn where nobody asks for others
    shape: Callable[[int], tuple[int, int]]  # version -> rows, columns
    text: Callable[[Random, int, str], str]  # random, version, level -> a text that needs this version
    encode: Callable[..., Modules]  # text, version, level, random (free choices of the encoder)
    parts: Callable[[Modules], dict[str, Modules]]
    levels: tuple[str, ...] = ("",)
    quiet_zones: tuple[int, ...] = (1, 2, 3, 4)  # modules on every side, one of which is drawn
    linear: bool = False  # every row is the same

    def random(self, random: Random, version: int) -> Code:
        """A code that needs this version for its text."""
        level = str(random.choice(self.levels))
        text = self.text(random, version, level)
        return Code(self.name, text, version, level, self.encode(text, version, level, random))

    def check_versions(self, versions: Sequence[int] | None) -> tuple[int, ...]:
        """The versions asked for, or the usual ones."""
        chosen = tuple(self.usual if versions is None else versions)
        wrong = [version for version in chosen if version not in self.versions]
        if wrong or not chosen:
            first, last = self.versions[0], self.versions[-1]
            asked = f"there is no version {wrong[0]}" if wrong else "no version is given"
            raise InputError(f"{asked} of the {self.title}; name versions from {first} to {last}")
        return chosen


SYMBOLS: dict[str, Symbol] = {}


def square(side: Callable[[int], int]) -> Callable[[int], tuple[int, int]]:
    """The shape of a symbol that is as high as wide."""
    return lambda version: (side(version), side(version))


def register(symbol: Symbol) -> Symbol:
    if SYMBOLS.setdefault(symbol.name, symbol) is not symbol:
        raise InputError(f"the symbol {symbol.name!r} is registered twice")
    return symbol


def find_symbol(name: str) -> Symbol:
    if name not in SYMBOLS:
        raise UnknownNameError("symbol", name, SYMBOLS)
    return SYMBOLS[name]


def too_long(title: str, text: str, version: int, capacity: str = "") -> InputError:
    """The error every encoder raises for a text that does not fit."""
    return InputError(
        f"{len(text)} characters do not fit into version {version} of the {title}{capacity}; shorten the "
        "text or take a larger version"
    )


for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")
