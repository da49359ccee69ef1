"""Hard negatives: they share a code's size, colours and blackness, and lack what makes it one.

    checkerboard, clutter, barcode, stripes    other things made of dark and light cells
    finderless   a real code whose finder (and a module around it) is random: only that tells it from a code
    shuffled     a real code cut into blocks of 1, 2, 4 or 7 modules, which are put back in random order

Of a linear code, whole columns are random or shuffled.

A shuffled code of large blocks may keep whole finders, at the wrong places.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from heatproof.images.symbols import Modules, Random, Symbol

SHUFFLED_BLOCKS = (1, 2, 4, 7)


def checkerboard(random: Random, symbol: Symbol, version: int) -> Modules:
    cell = int(random.integers(1, 5))
    rows, columns = np.indices(symbol.shape(version)) // cell
    return np.asarray((rows + columns) % 2 == 0)


def clutter(random: Random, symbol: Symbol, version: int) -> Modules:
    """Rectangles over rectangles, dark and light in turn."""
    tall, wide = symbol.shape(version)
    modules = np.zeros((tall, wide), bool)
    for i in range(int(random.integers(15, 40))):
        top, left = random.integers(0, tall - 1), random.integers(0, wide - 1)
        rows, columns = random.integers(1, max(2, tall // 3)), random.integers(1, max(2, wide // 3))
        modules[top : top + rows, left : left + columns] = i % 2 == 0
    return modules


def barcode(random: Random, symbol: Symbol, version: int) -> Modules:
    """Bars one to four modules wide, as linear barcodes have them, upright or lying."""
    tall, wide = symbol.shape(version)
    upright = random.random() < 0.5
    n = wide if upright else tall
    edges = np.cumsum(random.integers(1, 5, n))
    bars = np.searchsorted(edges, np.arange(n), side="right") % 2 == 0
    return np.broadcast_to(bars if upright else bars[:, None], (tall, wide)).copy()


def stripes(random: Random, symbol: Symbol, version: int) -> Modules:
    """Stripes of one width: upright, lying or diagonal."""
    rows, columns = np.indices(symbol.shape(version))
    across = (rows, columns, rows + columns, rows - columns)[int(random.integers(4))]
    return np.asarray(across // int(random.integers(1, 5)) % 2 == 0)


def finderless(random: Random, symbol: Symbol, version: int) -> Modules:
    code = symbol.random(random, version)
    # One module more on every side: a QR code's separators outline the finder as clearly as its own ring.
    around = sliding_window_view(np.pad(code.parts["finder"], 1), (3, 3)).any((2, 3))
    tall, wide = code.modules.shape
    return np.where(around, random.random((1 if symbol.linear else tall, wide)) < 0.5, code.modules)


def shuffled(random: Random, symbol: Symbol, version: int) -> Modules:
    modules = symbol.random(random, version).modules.copy()
    block = int(random.choice(SHUFFLED_BLOCKS))
    high = len(modules) if symbol.linear else block
    down, across = modules.shape[0] // high, modules.shape[1] // block
    whole = modules[: down * high, : across * block]  # what is left over at two edges stays
    blocks = whole.reshape(down, high, across, block).swapaxes(1, 2).reshape(-1, high, block)
    mixed = random.permutation(blocks, axis=0)
    whole[:] = mixed.reshape(down, across, high, block).swapaxes(1, 2).reshape(whole.shape)
    return modules


NEGATIVES: dict[str, Callable[[Random, Symbol, int], Modules]] = {
    kind.__name__: kind for kind in (checkerboard, clutter, barcode, stripes, finderless, shuffled)
}


def negatives_of(symbol: Symbol) -> list[str]:
    """The kinds that are no such code: bars alone are too much like a barcode to be none.

    >>> from heatproof.images.symbols import SYMBOLS
    >>> negatives_of(SYMBOLS["barcode"])
    ['checkerboard', 'clutter', 'stripes', 'finderless', 'shuffled']
    """
    return [kind for kind in NEGATIVES if kind != symbol.name]
