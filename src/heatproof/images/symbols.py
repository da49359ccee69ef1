"""Printed symbols with known parts: QR codes by segno; Aztec codes, Data Matrix and Code 128 by zxing-cpp.

`register` adds a symbol; images, negatives, masks, distortions and files then work for it too. Parts are
finder (the pattern by which a reader finds the symbol), timing (the pattern that locates its modules) and box
(every module, without the quiet zone):

    QR code       finder  the three 7x7 corner patterns without their separators: 147 modules
                  timing  row 6 and column 6 between the finders: 2 (N - 14) modules (chakraborty2025cambench)
    Aztec code    finder  the bullseye: rings around the centre, 13 x 13 modules
                  timing  the reference grid outside the 15 x 15 core: every 16th row and column
    Data Matrix   finder  the solid L: left column and bottom row of each region (2 x 2 from 32 modules on)
                  timing  the alternating line: top row and right column of each region
    Code 128      finder  the guards: the start and the stop pattern, 11 and 13 columns
                  timing  the bars between them

Versions of a Data Matrix are numbered by size, of an Aztec code by layers (full range), of a barcode by
characters or pairs of digits. Quiet zones have 1 to 4 modules, as printed codes do. The mask pattern of a QR
code is random: every decoder reads all eight, and the standard's choice takes five times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np

from heatproof.errors import InputError, UnknownNameError, need

Random = np.random.Generator
Modules = np.ndarray  # "rows columns" bool, dark modules True

PARTS = ("finder", "timing", "box")
ALPHABET = np.array(list("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ $%*+-./:"))  # alphanumeric mode of QR codes
LETTERS = ALPHABET[10:36]
LEVELS = ("L", "M", "Q", "H")
SHORTEST_TEXT = 6
FINDER = 7
CHARACTER, STOP_COLUMNS = 11, 13  # columns of a barcode
BULLSEYE, CORE = 6, 7  # radius in modules
AZTEC_LETTERS = (15, 40, 68, 104, 144, 187, 236, 291)  # capacity by layers, with 23 % of error correction
MATRIX_SIDES = (10, 12, 14, 16, 18, 20, 22, 24, 26, 32, 36, 40, 44, 48)
MATRIX_WORDS = (3, 5, 8, 12, 18, 22, 30, 36, 44, 62, 86, 114, 144, 174)  # capacity, a word per character


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
    """A symbology. A version is its size, numbered from 1 as its standard does or by growing size."""

    name: str
    title: str
    versions: range  # that exist here
    usual: range  # that are drawn by default
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
        """The versions given, all of which must exist, or the usual ones."""
        chosen = tuple(self.usual if versions is None else versions)
        wrong = [version for version in chosen if version not in self.versions]
        if wrong or not chosen:
            first, last = self.versions[0], self.versions[-1]
            fault = f"there is no version {wrong[0]}" if wrong else "no version is given"
            raise InputError(f"{fault} of the {self.title}; name versions from {first} to {last}")
        return chosen


SYMBOLS: dict[str, Symbol] = {}


def register(symbol: Symbol) -> Symbol:
    if SYMBOLS.setdefault(symbol.name, symbol) is not symbol:
        raise InputError(f"the symbol {symbol.name!r} is registered twice")
    return symbol


def find_symbol(name: str) -> Symbol:
    if name not in SYMBOLS:
        raise UnknownNameError("symbol", name, SYMBOLS)
    return SYMBOLS[name]


def square(side: Callable[[int], int]) -> Callable[[int], tuple[int, int]]:
    """The shape of a symbol that is as high as wide."""
    return lambda version: (side(version), side(version))


def listed(numbers: Sequence[int]) -> Callable[..., int]:
    """A function of the version, and of a level that does not matter."""
    return lambda version, level="": numbers[version - 1]


def too_long(title: str, text: str, version: int, capacity: str = "") -> InputError:
    """The error of every encoder for a text that does not fit."""
    return InputError(
        f"{len(text)} characters do not fit into version {version} of the {title}{capacity}; shorten the "
        "text or take a larger version"
    )


@cache
def capacity(version: int, level: str) -> int:
    """Alphanumeric characters that fit into a QR code: two in 11 bits, a last one in 6."""
    consts = need("segno", "dev").consts
    header = 4 + (9 if version < 10 else 11 if version < 27 else 13)
    pairs, left = divmod(consts.SYMBOL_CAPACITY[version][consts.ERROR_MAPPING[level]] - header, 11)
    return int(2 * pairs + (left >= 6))


def text_maker(
    letters: np.ndarray, capacity: Callable[[int, str], int], shortest: int = 1
) -> Callable[[Random, int, str], str]:
    """A function that draws a text which fits a version and exceeds the next smaller one."""

    def random_text(random: Random, version: int, level: str) -> str:
        least = capacity(version - 1, level) + 1 if version > 1 else shortest
        return "".join(random.choice(letters, random.integers(least, capacity(version, level) + 1)))

    return random_text


def encode_qr(text: str, version: int, level: str = "M", random: Random | None = None) -> Modules:
    """Bool values "N N"; the mask pattern is random, or the standard's choice where `random` is None."""
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
    """Finder, timing and box of a QR code of n x n modules.

    >>> {part: int(mask.sum()) for part, mask in part_masks(25).items()}
    {'finder': 147, 'timing': 22, 'box': 625}
    """
    finder, timing = np.zeros((2, n, n), bool)
    finder[:FINDER, :FINDER] = finder[:FINDER, -FINDER:] = finder[-FINDER:, :FINDER] = True
    timing[FINDER - 1, :] = timing[:, FINDER - 1] = True
    return _parts(finder, timing)


def _parts(finder: Modules, timing: Modules) -> dict[str, Modules]:
    return {"finder": finder, "timing": timing & ~finder, "box": np.ones(finder.shape, bool)}


def aztec_side(layers: int) -> int:
    base = 14 + 4 * layers
    return base + 1 + 2 * ((base // 2 - 1) // 15)


def barcode_shape(version: int) -> tuple[int, int]:
    """Rows and columns: start, the characters, a check character, stop."""
    columns = CHARACTER * (version + 2) + STOP_COLUMNS
    return 2 * columns // 5, columns


def barcode_text(random: Random, version: int, level: str) -> str:
    digits = random.random() < 0.5
    return "".join(random.choice(ALPHABET[:10], 2 * version) if digits else random.choice(LETTERS, version))


def zxing_encoder(name: str, kind: str, offset: int = 0) -> Callable[..., Modules]:
    """A function that encodes a text by zxing-cpp, whose versions are ours plus an offset."""

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
    rows, columns = np.indices(modules.shape) - len(modules) // 2
    ring = np.maximum(abs(rows), abs(columns))
    return _parts(ring <= BULLSEYE, ((rows % 16 == 0) | (columns % 16 == 0)) & (ring > CORE))


def matrix_parts(modules: Modules) -> dict[str, Modules]:
    side = len(modules)
    region = side if side <= 26 else side // 2
    finder, timing = np.zeros((2, side, side), bool)
    finder[:, ::region] = finder[region - 1 :: region, :] = True
    timing[::region, :] = timing[:, region - 1 :: region] = True
    return _parts(finder, timing)


def barcode_parts(modules: Modules) -> dict[str, Modules]:
    finder = np.zeros(modules.shape, bool)
    finder[:, :CHARACTER] = finder[:, -STOP_COLUMNS:] = True
    return _parts(finder, modules)


AZTEC = register(Symbol(
    "aztec", "Aztec code", range(1, 9), range(1, 5), square(aztec_side),
    text_maker(LETTERS, listed(AZTEC_LETTERS)), zxing_encoder("aztec", "Aztec", offset=4), aztec_parts,
))  # fmt: skip
DATA_MATRIX = register(Symbol(
    "datamatrix", "Data Matrix", range(1, 15), range(1, 10),
    square(listed(MATRIX_SIDES)), text_maker(ALPHABET, listed(MATRIX_WORDS)),
    zxing_encoder("datamatrix", "DataMatrix"), matrix_parts,
))  # fmt: skip
BARCODE = register(Symbol(
    "barcode", "barcode", range(1, 41), range(2, 6), barcode_shape,
    barcode_text, zxing_encoder("barcode", "Code128"), barcode_parts,
    linear=True, quiet_zones=(10,),  # as the standard requires: without it the guards are not read
))  # fmt: skip
QR = register(Symbol(
    "qr", "QR code", range(1, 41), range(1, 7), square(lambda version: 17 + 4 * version),
    text_maker(ALPHABET, capacity, SHORTEST_TEXT), encode_qr,
    lambda modules: part_masks(len(modules)), LEVELS,
))  # fmt: skip
