"""QR codes on varied backgrounds, and hard negatives that only lack what makes a QR code one.

A positive is a real code: random alphanumeric text, versions 1-6, error correction L, M, Q or H, drawn with
whole pixels per module and a quiet zone on a plate somewhere in the picture. Because the geometry is known,
the masks are exact, in modules of a code N modules wide:

    finder  the three 7x7 corner patterns without their separators: 147 modules
    timing  row 6 and column 6 between the finders: 2 (N - 14) modules
    box     all N x N modules, without the quiet zone

A negative has the same kind of background, plate and colours, so that none of these gives the class away: a
checkerboard, rectangle clutter, a linear barcode, stripes, or a real code whose finders and separators are
replaced by random modules. Definitions: CAMBench-QR (chakraborty2025cambench).

Picture i follows from the seed and i alone: asking for more pictures does not change the first ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from heatproof.errors import InputError, need

Random = np.random.Generator

LEVELS = "LMQH"
ALPHABET = np.array(list("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ $%*+-./:"))
# Alphanumeric characters that fit, by version and level (ISO/IEC 18004, table 7).
CAPACITY = (
    (25, 20, 16, 10),
    (47, 38, 29, 20),
    (77, 61, 47, 35),
    (114, 90, 67, 50),
    (154, 122, 87, 64),
    (195, 154, 108, 84),
)
SHORTEST_TEXT = 6
FINDER = 7
MARGIN = 0.06  # of each side, kept free around the quiet zone, so that there is an outside to leak into
QUIET_ZONES = (1, 2, 3, 4)  # modules; the standard asks for 4, printed codes often have less
PARTS = ("finder", "timing", "box")


class QRSet(NamedTuple):
    """Pictures with their labels (1: a QR code) and the masks of its parts, empty for negatives."""

    pictures: np.ndarray  # "n H W 3", uint8
    labels: np.ndarray  # "n", int64
    masks: dict[str, np.ndarray]  # finder, timing, box: each "n H W", bool

    def take(self, which: slice | np.ndarray) -> QRSet:
        """Some of the pictures, with what belongs to them."""
        masks = {part: mask[which] for part, mask in self.masks.items()}
        return QRSet(self.pictures[which], self.labels[which], masks)


def make_qr(
    n_positive: int = 600, n_negative: int = 600, size: int | tuple[int, int] = 224, seed: int = 0
) -> QRSet:
    """Positives first, then negatives, kinds in turn. `size` is the side, or height and width."""
    height, width = (size, size) if isinstance(size, int) else size
    largest = _versions_that_fit(height, width)
    if n_positive < 0 or n_negative < 0:
        raise InputError(f"cannot make {n_positive} positives and {n_negative} negatives; ask for 0 or more")
    count = n_positive + n_negative
    pictures = np.empty((count, height, width, 3), np.uint8)
    labels = np.repeat(np.array([1, 0]), [n_positive, n_negative])
    masks = {part: np.zeros((count, height, width), bool) for part in PARTS}
    for i in range(n_positive):
        random = np.random.default_rng((seed, 1, i))
        modules = code_modules(random, _version(random, largest))
        pictures[i], spot = draw(modules, height, width, random)
        for part, mask in part_masks(len(modules)).items():
            masks[part][i, spot.rows, spot.columns] = enlarge(mask, spot.scale)
    kinds = list(NEGATIVES.values())
    for i in range(n_negative):
        random = np.random.default_rng((seed, 0, i))
        modules = kinds[i % len(kinds)](random, _version(random, largest))
        pictures[n_positive + i], _ = draw(modules, height, width, random)
    return QRSet(pictures, labels, masks)


def modules_of(version: int) -> int:
    """Modules along one side.

    >>> [modules_of(v) for v in (1, 6)]
    [21, 41]
    """
    return 17 + 4 * version


def code_modules(random: Random, version: int) -> np.ndarray:
    """ "N N" bool, dark modules True: a code that needs this version for its text and a random level."""
    level = int(random.integers(len(LEVELS)))
    shortest = SHORTEST_TEXT if version == 1 else CAPACITY[version - 2][level] + 1
    length = int(random.integers(shortest, CAPACITY[version - 1][level] + 1))
    text = "".join(random.choice(ALPHABET, length))
    return encode(text, version, LEVELS[level], mask=int(random.integers(8)))


def encode(text: str, version: int, level: str, mask: int | None = None) -> np.ndarray:
    """The code of a text, "N N" bool. A random mask pattern is valid too, and five times cheaper to make."""
    code = need("segno", "dev").make(
        text, version=version, error=level, mask=mask, mode="alphanumeric", boost_error=False, micro=False
    )
    return np.array([list(row) for row in code.matrix], dtype=bool)


def part_masks(n: int) -> dict[str, np.ndarray]:
    """Finder, timing and box of a code of n x n modules, each "n n" bool.

    >>> {part: int(mask.sum()) for part, mask in part_masks(25).items()}
    {'finder': 147, 'timing': 22, 'box': 625}
    """
    finder = np.zeros((n, n), bool)
    finder[:FINDER, :FINDER] = finder[:FINDER, -FINDER:] = finder[-FINDER:, :FINDER] = True
    timing = np.zeros((n, n), bool)
    timing[FINDER - 1, :] = timing[:, FINDER - 1] = True
    return {"finder": finder, "timing": timing & ~finder, "box": np.ones((n, n), bool)}


def checkerboard(random: Random, version: int) -> np.ndarray:
    cell = int(random.integers(1, 5))
    rows, columns = np.indices((modules_of(version),) * 2) // cell
    return (rows + columns) % 2 == 0


def clutter(random: Random, version: int) -> np.ndarray:
    """Rectangles over rectangles, dark and light in turn."""
    n = modules_of(version)
    modules = np.zeros((n, n), bool)
    for i in range(int(random.integers(15, 40))):
        top, left = random.integers(0, n - 1, 2)
        tall, wide = random.integers(1, n // 3, 2)
        modules[top : top + tall, left : left + wide] = i % 2 == 0
    return modules


def barcode(random: Random, version: int) -> np.ndarray:
    """Bars one to four modules wide, as linear barcodes have them, upright or lying."""
    n = modules_of(version)
    edges = np.cumsum(random.integers(1, 5, n))
    bars = np.broadcast_to(np.searchsorted(edges, np.arange(n), side="right") % 2 == 0, (n, n))
    return bars if random.random() < 0.5 else bars.T


def stripes(random: Random, version: int) -> np.ndarray:
    """Stripes of one width: upright, lying or diagonal."""
    rows, columns = np.indices((modules_of(version),) * 2)
    across = (rows, columns, rows + columns, rows - columns)[int(random.integers(4))]
    return across // int(random.integers(1, 5)) % 2 == 0


def finderless(random: Random, version: int) -> np.ndarray:
    """A real code whose finders and separators are random modules: only the finders tell it from a code."""
    modules = code_modules(random, version)
    corner = FINDER + 1
    for rows, columns in (
        (slice(corner), slice(corner)),
        (slice(corner), slice(-corner, None)),
        (slice(-corner, None), slice(corner)),
    ):
        modules[rows, columns] = random.random((corner, corner)) < 0.5
    return modules


NEGATIVES: dict[str, Callable[[Random, int], np.ndarray]] = {
    "checkerboard": checkerboard,
    "clutter": clutter,
    "barcode": barcode,
    "stripes": stripes,
    "finderless": finderless,
}


class Spot(NamedTuple):
    """Where the modules lie in the picture, without their quiet zone, and how many pixels each has."""

    rows: slice
    columns: slice
    scale: int


def draw(modules: np.ndarray, height: int, width: int, random: Random) -> tuple[np.ndarray, Spot]:
    """Modules with a quiet zone on a background: "H W 3" uint8, and where they are."""
    n = len(modules)
    room = min(_room(height), _room(width))
    quiet = int(random.choice([q for q in QUIET_ZONES if n + 2 * q <= room]))
    largest = room // (n + 2 * quiet)
    scale = int(random.integers((largest + 1) // 2, largest + 1))
    plate = (n + 2 * quiet) * scale
    top, left = (
        (side - _room(side)) // 2 + int(random.integers(_room(side) - plate + 1)) for side in (height, width)
    )
    dark, light = random.uniform(0, 70, 3), random.uniform(185, 255, 3)
    picture = background(height, width, random)
    picture[top : top + plate, left : left + plate] = light
    first_row, first_column = top + quiet * scale, left + quiet * scale
    spot = Spot(slice(first_row, first_row + n * scale), slice(first_column, first_column + n * scale), scale)
    picture[spot.rows, spot.columns][enlarge(modules, scale)] = dark
    return picture.round().astype(np.uint8), spot


def enlarge(modules: np.ndarray, scale: int) -> np.ndarray:
    """Every module as scale x scale pixels."""
    return modules.repeat(scale, 0).repeat(scale, 1)


def background(height: int, width: int, random: Random) -> np.ndarray:
    """ "H W 3" in [0, 255]: flat, a gradient, clouds, grain, blocks or bars, between two random colours."""
    kind = int(random.integers(6))
    rows, columns = np.indices((height, width)) / max(height, width)
    if kind == 0:
        blend = np.zeros((height, width))
    elif kind == 1:
        angle = random.uniform(0, 2 * np.pi)
        blend = 0.5 + (rows - 0.5) * np.sin(angle) + (columns - 0.5) * np.cos(angle)
    elif kind == 2:
        blend = _smooth(random.random((5, 5)), height, width)
    elif kind == 3:
        blend = random.random((height, width))
    elif kind == 4:
        cells = int(random.integers(4, 12))
        levels = random.random((cells + 1, cells + 1))
        blend = levels[(rows * cells).astype(int), (columns * cells).astype(int)]
    else:
        angle, bars = random.uniform(0, np.pi), random.uniform(4, 20)
        wave = (rows * np.sin(angle) + columns * np.cos(angle)) * bars
        blend = (np.floor(wave) % 2).astype(float)
    first, second = random.uniform(0, 255, (2, 3))
    return first + np.clip(blend, 0, 1)[..., None] * (second - first)


def _smooth(values: np.ndarray, height: int, width: int) -> np.ndarray:
    """A small grid enlarged to the picture, linear along each axis."""
    rows, columns = (np.linspace(0, len(values) - 1, side) for side in (height, width))
    knots = np.arange(len(values))
    wide = np.stack([np.interp(columns, knots, line) for line in values])
    return np.stack([np.interp(rows, knots, line) for line in wide.T], axis=1)


def _room(side: int) -> int:
    """Pixels along a side without the margins."""
    return side - 2 * math.ceil(side * MARGIN)


def _versions_that_fit(height: int, width: int) -> int:
    """The largest version that fits with a pixel per module, the thinnest quiet zone and the margin."""
    room = min(_room(height), _room(width)) - 2 * QUIET_ZONES[0]
    fitting = [v for v in range(1, len(CAPACITY) + 1) if modules_of(v) <= room]
    if not fitting:
        raise InputError(f"a QR code does not fit into {height}x{width} pixels; make them at least 32x32")
    return fitting[-1]


def _version(random: Random, largest: int) -> int:
    return int(random.integers(1, largest + 1))
