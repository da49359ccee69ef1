"""Aztec codes, Data Matrix and the barcode Code 128, encoded by zxing-cpp; the masks of their parts are ours.

    Aztec code (ISO/IEC 24778), full range, 1 to 8 layers; the version is the number of layers
        finder  the bullseye: rings around the centre, 13 x 13 modules
        timing  the reference grid outside the 15 x 15 core: every 16th row and column from the centre on
    Data Matrix ECC 200 (ISO/IEC 16022), square, 10 to 48 modules; versions are numbered by size
        finder  the solid L: left column and bottom row of each region (2 x 2 regions from 32 modules on)
        timing  the alternating line: top row and right column of each region, without the ends of the L
    barcode Code 128 (ISO/IEC 15417); the version is the number of characters, or half the number of digits
        finder  the guards: the start and the stop pattern, 11 and 13 columns
        timing  the bars between them, by whose edges a reader keeps step (the code has no separate clock)

The compact Aztec code has no reference grid and therefore no second part to score. A barcode has no rows of
its own; it is drawn two fifths as high as wide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from heatproof.errors import InputError, need
from heatproof.images.symbols import ALPHABET, SYMBOLS, Modules, Random, Symbol, register, square, too_long

CHARACTER, STOP_COLUMNS = 11, 13  # columns of a barcode
BULLSEYE, CORE = 6, 7  # radius in modules
AZTEC_LETTERS = (15, 40, 68, 104, 144, 187, 236, 291)  # capacity by layers, with 23 % of error correction
MATRIX_SIDES = (10, 12, 14, 16, 18, 20, 22, 24, 26, 32, 36, 40, 44, 48)
MATRIX_WORDS = (3, 5, 8, 12, 18, 22, 30, 36, 44, 62, 86, 114, 144, 174)  # capacity, a word per character
LETTERS = ALPHABET[10:36]


def aztec_side(layers: int) -> int:
    """Modules along one side.

    >>> [aztec_side(layers) for layers in (1, 4, 5, 8)]
    [19, 31, 37, 49]
    """
    base = 14 + 4 * layers
    return base + 1 + 2 * ((base // 2 - 1) // 15)


def barcode_shape(version: int) -> tuple[int, int]:
    """Rows and columns: start, the characters, a check character, stop.

    >>> barcode_shape(3)
    (27, 68)
    """
    columns = CHARACTER * (version + 2) + STOP_COLUMNS
    return 2 * columns // 5, columns


def text_maker(letters: np.ndarray, capacity: Sequence[int]) -> Callable[[Random, int, str], str]:
    """Returns a function that draws a text which fits a version and exceeds the next smaller one."""

    def random_text(random: Random, version: int, level: str) -> str:
        least = capacity[version - 2] + 1 if version > 1 else 1
        return "".join(random.choice(letters, random.integers(least, capacity[version - 1] + 1)))

    return random_text


def barcode_text(random: Random, version: int, level: str) -> str:
    digits = random.random() < 0.5
    return "".join(random.choice(ALPHABET[:10], 2 * version) if digits else random.choice(LETTERS, version))


def encoder(name: str, kind: str, offset: int = 0) -> Callable[..., Modules]:
    """Returns the function that encodes a text by zxing-cpp, whose versions are ours plus an offset."""

    def encode(text: str, version: int, level: str = "", random: Random | None = None) -> Modules:
        zxing = need("zxingcpp", "codes")
        symbol = SYMBOLS[name]
        (version,) = symbol.check_versions([version])
        if not text or not (text.isascii() and text.isprintable()):
            raise InputError(
                f"the text of a {symbol.title} must hold printable ASCII characters, at least one"
            )
        options = {} if symbol.linear else {"version": version + offset}
        try:
            made = zxing.create_barcode(text, getattr(zxing.BarcodeFormat, kind), **options)
        except ValueError as error:
            raise too_long(symbol.title, text, version) from error
        modules: Modules = np.array(made.to_image(scale=1, add_quiet_zones=False)) == 0
        shape = symbol.shape(version)
        if modules.shape[1] != shape[1]:
            needed = (modules.shape[1] - STOP_COLUMNS) // CHARACTER - 2
            raise InputError(f"{text!r} needs a {symbol.title} of version {needed}, not {version}")
        return np.broadcast_to(modules[0], shape).copy() if symbol.linear else modules

    return encode


def aztec_parts(modules: Modules) -> dict[str, Modules]:
    """
    >>> {part: int(mask.sum()) for part, mask in aztec_parts(np.zeros((31, 31), bool)).items()}
    {'finder': 169, 'timing': 32, 'box': 961}
    """
    n = len(modules)
    rows, columns = np.indices((n, n)) - n // 2
    ring = np.maximum(abs(rows), abs(columns))
    grid = (rows % 16 == 0) | (columns % 16 == 0)
    return {"finder": ring <= BULLSEYE, "timing": grid & (ring > CORE), "box": np.ones((n, n), bool)}


def matrix_parts(modules: Modules) -> dict[str, Modules]:
    """
    >>> {part: int(mask.sum()) for part, mask in matrix_parts(np.zeros((26, 26), bool)).items()}
    {'finder': 51, 'timing': 49, 'box': 676}
    """
    side = len(modules)
    part = side if side <= 26 else side // 2  # a region
    finder, timing = np.zeros((side, side), bool), np.zeros((side, side), bool)
    finder[:, ::part] = finder[part - 1 :: part, :] = True
    timing[::part, :] = timing[:, part - 1 :: part] = True
    return {"finder": finder, "timing": timing & ~finder, "box": np.ones((side, side), bool)}


def barcode_parts(modules: Modules) -> dict[str, Modules]:
    finder = np.zeros(modules.shape, bool)
    finder[:, :CHARACTER] = finder[:, -STOP_COLUMNS:] = True
    return {"finder": finder, "timing": modules & ~finder, "box": np.ones(modules.shape, bool)}


AZTEC = register(Symbol(
    "aztec", "Aztec code", range(1, 9), range(1, 5), square(aztec_side),
    text_maker(LETTERS, AZTEC_LETTERS), encoder("aztec", "Aztec", offset=4), aztec_parts,
))  # fmt: skip
DATA_MATRIX = register(Symbol(
    "datamatrix", "Data Matrix", range(1, 15), range(1, 10),
    square(lambda version: MATRIX_SIDES[version - 1]), text_maker(ALPHABET, MATRIX_WORDS),
    encoder("datamatrix", "DataMatrix"), matrix_parts,
))  # fmt: skip
BARCODE = register(Symbol(
    "barcode", "barcode", range(1, 41), range(2, 6), barcode_shape,
    barcode_text, encoder("barcode", "Code128"), barcode_parts,
    linear=True, quiet_zones=(10,),  # as the standard requires: without it the guards are not read
))  # fmt: skip
