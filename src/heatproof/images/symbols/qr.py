"""QR codes, by segno, with the parts that make them one.

In a code N = 17 + 4 version modules wide:

    finder  the three 7x7 corner patterns without their separators: 147 modules
    timing  row 6 and column 6 between the finders: 2 (N - 14) modules
    box     all N x N modules

Definitions: CAMBench-QR (chakraborty2025cambench). Four modules of the timing lines are separators in the
words of ISO/IEC 18004; the paper's count takes them in.

The standard asks for a quiet zone of 4 modules; printed codes often have less, so 1 to 4 are drawn.

The mask pattern is drawn at random instead of by the standard's penalty: any of the eight is valid and read
by every decoder, and the choice costs five times as much as the rest of the code.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from heatproof.errors import InputError, need
from heatproof.images.symbols import ALPHABET, Modules, Random, Symbol, register, square, too_long

LEVELS = ("L", "M", "Q", "H")
SHORTEST_TEXT = 6
FINDER = 7


def side(version: int) -> int:
    """Modules along one side.

    >>> [side(v) for v in (1, 6)]
    [21, 41]
    """
    return 17 + 4 * version


@cache
def capacity(version: int, level: str) -> int:
    """Alphanumeric characters that fit, by segno's table of data bits and its count of a text's bits."""
    need("segno", "dev")
    from segno import consts, encoder

    table: Any = consts.SYMBOL_CAPACITY
    bits = table[version][consts.ERROR_MAPPING[level]]

    def fits(characters: int) -> bool:
        segments = encoder.prepare_data("A" * characters, consts.MODE_ALPHANUMERIC, None)
        return bool(segments.bit_length_with_overhead(version, False) <= bits)

    most = bits * 2 // 11  # eleven bits hold two characters; the header takes a few away
    return next(n for n in range(most, 0, -1) if fits(n))


def random_text(random: Random, version: int, level: str) -> str:
    """A text that the next smaller version could not hold."""
    shortest = SHORTEST_TEXT if version == 1 else capacity(version - 1, level) + 1
    return "".join(random.choice(ALPHABET, int(random.integers(shortest, capacity(version, level) + 1))))


def encode(text: str, version: int, level: str = "M", random: Random | None = None) -> Modules:
    """ "N N" bool; the mask pattern is random, or the standard's choice where `random` is None."""
    segno = need("segno", "dev")
    foreign = sorted(set(text) - set(ALPHABET.tolist()))
    if foreign or not text:
        what = f"holds {foreign[0]!r}" if foreign else "is empty"
        raise InputError(f"the text of a QR code {what}; use 0-9, A-Z, space and $%*+-./:")
    if level not in LEVELS:
        raise InputError(f"QR codes have the levels {', '.join(LEVELS)}; got {level!r}")
    (version,) = QR.check_versions([version])
    if len(text) > capacity(version, level):
        raise too_long("QR code", text, version, f", which holds {capacity(version, level)} at level {level}")
    mask = None if random is None else int(random.integers(8))
    code = segno.make(
        text, version=version, error=level, mask=mask, mode="alphanumeric", boost_error=False, micro=False
    )
    return np.array([list(row) for row in code.matrix], dtype=bool)


def part_masks(n: int) -> dict[str, Modules]:
    """Finder, timing and box of a code of n x n modules.

    >>> {part: int(mask.sum()) for part, mask in part_masks(25).items()}
    {'finder': 147, 'timing': 22, 'box': 625}
    """
    finder = np.zeros((n, n), bool)
    finder[:FINDER, :FINDER] = finder[:FINDER, -FINDER:] = finder[-FINDER:, :FINDER] = True
    timing = np.zeros((n, n), bool)
    timing[FINDER - 1, :] = timing[:, FINDER - 1] = True
    return {"finder": finder, "timing": timing & ~finder, "box": np.ones((n, n), bool)}


def parts_of(modules: Modules) -> dict[str, Modules]:
    return part_masks(len(modules))


QR = register(
    Symbol("qr", "QR code", range(1, 41), range(1, 7), square(side), random_text, encode, parts_of, LEVELS)
)
