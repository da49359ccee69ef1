"""Backgrounds and hard negatives of codes.

Codes and negatives get the same backgrounds (flat, gradient, clouds, grain, blocks, bars), so that none of
them gives the class away. Where photographs are given, half of the backgrounds are random pieces of them, at
least half as wide or high as the whole. Negatives share a code's size, colours and blackness, not its
patterns:

    checkerboard, clutter, barcode, stripes    other things made of dark and light cells
    finderless   a real code whose finder (and a module around it) is random
    shuffled     a real code cut into blocks of 1, 2, 4 or 7 modules in random order; of large blocks, whole
                 finders may remain at wrong places

Of a linear code, whole columns are random or shuffled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from PIL import Image

from heatproof.errors import InputError
from heatproof.images.file_sources import walk
from heatproof.images.files import is_picture, open_image
from heatproof.images.symbols import Modules, Random, Symbol

PHOTO_SHARE = 0.5
SHUFFLED_BLOCKS = (1, 2, 4, 7)


def flat(rows: np.ndarray, columns: np.ndarray, random: Random) -> np.ndarray:
    return np.zeros(rows.shape)


def gradient(rows: np.ndarray, columns: np.ndarray, random: Random) -> np.ndarray:
    angle = random.uniform(0, 2 * np.pi)
    return np.asarray(0.5 + (rows - 0.5) * np.sin(angle) + (columns - 0.5) * np.cos(angle))


def clouds(rows: np.ndarray, columns: np.ndarray, random: Random) -> np.ndarray:
    """A 5 x 5 grid of random values, linear in between along each axis."""
    values = random.random((5, 5))
    knots = np.arange(5)
    across, down = (np.linspace(0, 4, side) for side in rows.shape[::-1])
    wide = np.stack([np.interp(across, knots, line) for line in values])
    return np.stack([np.interp(down, knots, line) for line in wide.T], axis=1)


def grain(rows: np.ndarray, columns: np.ndarray, random: Random) -> np.ndarray:
    return random.random(rows.shape)


def blocks(rows: np.ndarray, columns: np.ndarray, random: Random) -> np.ndarray:
    cells = int(random.integers(4, 12))
    levels = random.random((cells + 1, cells + 1))
    return np.asarray(levels[(rows * cells).astype(int), (columns * cells).astype(int)])


def bars(rows: np.ndarray, columns: np.ndarray, random: Random) -> np.ndarray:
    angle, count = random.uniform(0, np.pi), random.uniform(4, 20)
    return np.asarray(np.floor((rows * np.sin(angle) + columns * np.cos(angle)) * count) % 2)


BACKGROUNDS: dict[str, Callable[[np.ndarray, np.ndarray, Random], np.ndarray]] = {
    kind.__name__: kind for kind in (flat, gradient, clouds, grain, blocks, bars)
}


def background(height: int, width: int, random: Random, photos: Sequence[Path] = ()) -> np.ndarray:
    """Array "H W 3" in [0, 255]: a blend of two random colours, or a photograph."""
    if photos and random.random() < PHOTO_SHARE:
        return photograph(photos[int(random.integers(len(photos)))], height, width, random)
    kind = list(BACKGROUNDS.values())[int(random.integers(len(BACKGROUNDS)))]
    rows, columns = np.indices((height, width)) / max(height, width)
    blend = np.clip(kind(rows, columns, random), 0, 1)[..., None]
    first, second = random.uniform(0, 255, (2, 3))
    return np.asarray(first + blend * (second - first))


def photograph(photo: Path, height: int, width: int, random: Random) -> np.ndarray:
    """A random piece, resized to "H W 3" float."""
    image = open_image(photo).convert("RGB")
    scale = min(image.width / width, image.height / height) * random.uniform(0.5, 1)
    left = random.uniform(0, image.width - scale * width)
    top = random.uniform(0, image.height - scale * height)
    frame = (left, top, left + scale * width, top + scale * height)
    return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR, box=frame), dtype=float)


def find_photos(photos: str | Path | None) -> list[Path]:
    """The images of a folder, in the order of their paths."""
    if photos is None:
        return []
    root = Path(photos)
    if not root.is_dir():
        raise InputError(f"there is no folder {root} of photographs")
    files = sorted(file for file in walk(root) if is_picture(file))
    if not files:
        raise InputError(f"there is no image in {root}; name a folder of photographs")
    return files


def checkerboard(random: Random, symbol: Symbol, version: int) -> Modules:
    cell = int(random.integers(1, 5))
    return np.asarray((np.indices(symbol.shape(version)) // cell).sum(0) % 2 == 0)


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
    shape, upright = symbol.shape(version), random.random() < 0.5
    n = shape[upright]
    edges = np.cumsum(random.integers(1, 5, n))
    bars = np.searchsorted(edges, np.arange(n), side="right") % 2 == 0
    return np.broadcast_to(bars if upright else bars[:, None], shape).copy()


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
    """Kinds of negatives for a symbol: bars are too much like a barcode to be a negative of it."""
    return [kind for kind in NEGATIVES if kind != symbol.name]
