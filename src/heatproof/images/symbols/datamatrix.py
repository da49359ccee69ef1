"""Data Matrix ECC 200, square symbols of 10 to 48 modules (ISO/IEC 16022), ASCII encodation.

    finder  the solid L: left column and bottom row of each region
    timing  the alternating line: top row and right column of each region, without the L's ends
    box     all modules

A symbol of N <= 26 modules has one region: 2N - 1 finder and 2N - 3 timing modules. Larger ones have 2 x 2
regions, each with its own L and line. Versions are numbered by size: 1 is 10 x 10, 9 is 26 x 26. From 52
modules on, the check words are interleaved blocks; those sizes are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np

from heatproof.errors import InputError
from heatproof.images.symbols import ALPHABET, Modules, Random, Symbol, register, square, too_long
from heatproof.images.symbols._reedsolomon import check_words

FIELD = (256, 0x12D)
PAD = 129
LARGEST_OF_ONE_REGION = 26
Cell = tuple[int, int]


class Size(NamedTuple):
    side: int  # modules
    data: int  # codewords
    check: int


SIZES = tuple(
    Size(*size)
    for size in (
        (10, 3, 5), (12, 5, 7), (14, 8, 10), (16, 12, 12), (18, 18, 14), (20, 22, 18), (22, 30, 20),
        (24, 36, 24), (26, 44, 28), (32, 62, 36), (36, 86, 42), (40, 114, 48), (44, 144, 56), (48, 174, 68),
    )
)  # fmt: skip


def side(version: int) -> int:
    """Modules along one side."""
    return SIZES[version - 1].side


def codewords(text: str) -> list[int]:
    """Two digits share a word; any other ASCII character has its own.

    >>> codewords("A123")
    [66, 142, 52]
    """
    if not text or not text.isascii():
        raise InputError("the text of a Data Matrix must hold ASCII characters, at least one")
    pieces = re.findall(r"[0-9]{2}|[\x00-\x7f]", text)
    return [130 + int(p) if len(p) == 2 else 1 + ord(p) for p in pieces]


def random_text(random: Random, version: int, level: str) -> str:
    """A text that the next smaller symbol could not hold."""
    least = SIZES[version - 2].data + 1 if version > 1 else 1
    words = int(random.integers(least, SIZES[version - 1].data + 1))
    text = str(random.choice(ALPHABET))
    while True:
        longer = text + str(random.choice(ALPHABET))
        if len(codewords(longer)) > words:
            return text
        text = longer


def encode(text: str, version: int, level: str = "", random: Random | None = None) -> Modules:
    """ "N N" bool. There is one way to write a text, so nothing is left to chance or to a level."""
    (version,) = DATA_MATRIX.check_versions([version])
    size = SIZES[version - 1]
    words = codewords(text)
    if len(words) > size.data:
        raise too_long("Data Matrix", text, version, f"{size.data} codewords, and they need {len(words)}")
    words = padded(words, size.data)
    words += check_words(words, size.check, *FIELD)
    pieces = regions(size.side)
    inside = size.side - 2 * pieces
    cells = places(inside)
    data = np.zeros((inside, inside), bool)
    data[tuple(np.transpose(cells))] = np.unpackbits(np.array(words, np.uint8))
    if len(cells) < data.size:  # no word reaches the last corner, which has a fixed pattern
        data[-2, -2] = data[-1, -1] = True
    return framed(data, pieces)


def padded(words: list[int], count: int) -> list[int]:
    """Filled up: one pad word, then pad words scrambled by their position, counted from 1."""
    scrambled = [PAD + 149 * position % 253 + 1 for position in range(len(words) + 2, count + 1)]
    pads = [PAD, *(value if value <= 254 else value - 254 for value in scrambled)]
    return words + pads[: count - len(words)]


@cache
def places(side: int) -> tuple[Cell, ...]:
    """Where each bit goes in the data area: words in order, most significant bit first.

    A word is a staircase of eight cells around its last one; words lie along diagonals that run up and down
    in turn, a word that crosses an edge goes on at the other side, and corner shapes fill what is left.
    """
    taken: set[Cell] = set()
    order: list[Cell] = []

    def put(cells: list[Cell]) -> None:
        taken.update(cells)
        order.extend(cells)

    def staircase(row: int, column: int) -> list[Cell]:
        steps = ((-2, -2), (-2, -1), (-1, -2), (-1, -1), (-1, 0), (0, -2), (0, -1), (0, 0))
        return [wrapped(row + down, column + right, side) for down, right in steps]

    def diagonal(row: int, column: int, step: int) -> Cell:
        inside: Callable[[int], bool] = lambda k: 0 <= k < side  # noqa: E731
        while True:
            if inside(row) and inside(column) and (row, column) not in taken:
                put(staircase(row, column))
            row, column = row - step, column + step
            if (row < 0 or column >= side) if step > 0 else (row >= side or column < 0):
                return row, column

    row, column = 4, 0
    while row < side or column < side:
        for cells in corner(row, column, side):
            put(cells)
        row, column = diagonal(row, column, 2)
        row, column = diagonal(row + 1, column + 3, -2)
        row, column = row + 3, column + 1
    return tuple(order)


def wrapped(row: int, column: int, side: int) -> Cell:
    """A cell beyond the top or the left edge lies at the opposite side, shifted."""
    shift = 4 - (side + 4) % 8
    if row < 0:
        row, column = row + side, column + shift
    if column < 0:
        row, column = row + shift, column + side
    return row, column


def corner(row: int, column: int, side: int) -> list[list[Cell]]:
    """The shapes for words that would be torn at the corners, where the walk passes them."""
    last = side - 1
    right = [(0, last), (1, last), (2, last), (3, last)]
    left = [(last - 2, 0), (last - 1, 0), (last, 0)]
    shapes = []
    if (row, column) == (side, 0):
        shapes.append([(last, 0), (last, 1), (last, 2), (0, last - 1), *right])
    if (row, column) == (side - 2, 0) and side % 4:
        shapes.append([*left, (0, last - 3), (0, last - 2), (0, last - 1), (0, last), (1, last)])
    if (row, column) == (side - 2, 0) and side % 8 == 4:
        shapes.append([*left, (0, last - 1), *right])
    if (row, column) == (side + 4, 2) and side % 8 == 0:
        top = [(k, last - j) for k in (0, 1) for j in (2, 1, 0)]
        shapes.append([(last, 0), (last, last), *top])
    return shapes


def regions(side: int) -> int:
    """Regions along one side."""
    return 1 if side <= LARGEST_OF_ONE_REGION else 2


def framed(data: Modules, pieces: int) -> Modules:
    """The data area cut into regions, each with its L and its alternating line."""
    part = len(data) // pieces
    whole = np.zeros((len(data) + 2 * pieces,) * 2, bool)
    for i in range(pieces):
        for j in range(pieces):
            region = whole[i * (part + 2) : (i + 1) * (part + 2), j * (part + 2) : (j + 1) * (part + 2)]
            region[0, ::2] = region[1::2, -1] = True
            region[:, 0] = region[-1, :] = True
            region[1:-1, 1:-1] = data[i * part : (i + 1) * part, j * part : (j + 1) * part]
    return whole


def part_masks(modules: Modules) -> dict[str, Modules]:
    """
    >>> {part: int(mask.sum()) for part, mask in part_masks(np.zeros((26, 26), bool)).items()}
    {'finder': 51, 'timing': 49, 'box': 676}
    """
    side = len(modules)
    part = side // regions(side)
    finder, timing = np.zeros((side, side), bool), np.zeros((side, side), bool)
    finder[:, ::part] = finder[part - 1 :: part, :] = True
    timing[::part, :] = timing[:, part - 1 :: part] = True
    return {"finder": finder, "timing": timing & ~finder, "box": np.ones((side, side), bool)}


VERSIONS = range(1, len(SIZES) + 1)
DATA_MATRIX = register(
    Symbol("datamatrix", "Data Matrix", VERSIONS, range(1, 10), square(side), random_text, encode, part_masks)
)
