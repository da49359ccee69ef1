"""The linear barcode Code 128 (ISO/IEC 15417): bars and spaces one to four modules wide.

    finder  the guards: the start and the stop pattern, 11 and 13 columns
    timing  the bars between them, by whose edges a reader keeps step (the code has no separate clock)
    box     all modules

Every character takes 11 modules, so the version counts characters: v of code set B (ASCII), or 2 v digits of
code set C. A barcode has no rows of modules of its own; it is drawn two fifths as high as wide.
"""

from __future__ import annotations

import re

import numpy as np

from heatproof.errors import InputError
from heatproof.images.symbols import ALPHABET, Modules, Random, Symbol, register, too_long

CHARACTER, STOP_COLUMNS = 11, 13
START_B, START_C, STOP = 104, 105, 106
# Widths of bars and spaces in turn, by character value 0-106.
WIDTHS = re.findall(
    r"\d+",
    "212222 222122 222221 121223 121322 131222 122213 122312 132212 221213 221312 231212 112232 "
    "122132 122231 113222 123122 123221 223211 221132 221231 213212 223112 312131 311222 321122 "
    "321221 312212 322112 322211 212123 212321 232121 111323 131123 131321 112313 132113 132311 "
    "211313 231113 231311 112133 112331 132131 113123 113321 133121 313121 211331 231131 213113 "
    "213311 213131 311123 311321 331121 312113 312311 332111 314111 221411 431111 111224 111422 "
    "121124 121421 141122 141221 112214 112412 122114 122411 142112 142211 241211 221114 413111 "
    "241112 134111 111242 121142 121241 114212 124112 124211 411212 421112 421211 212141 214121 "
    "412121 111143 111341 131141 114113 114311 411113 411311 113141 114131 311141 411131 211412 "
    "211214 211232 2331112",
)


def shape(version: int) -> tuple[int, int]:
    """Rows and columns: start, the characters, a check character, stop.

    >>> shape(3)
    (27, 68)
    """
    columns = CHARACTER * (version + 2) + STOP_COLUMNS
    return 2 * columns // 5, columns


def values(text: str) -> list[int]:
    """Start and characters: pairs of digits in set C where the text is nothing else, set B otherwise."""
    if len(text) % 2 == 0 and text.isascii() and text.isdecimal():
        return [START_C, *(int(text[i : i + 2]) for i in range(0, len(text), 2))]
    if not text or not (text.isascii() and text.isprintable()):
        raise InputError("the text of a barcode must hold printable ASCII characters, at least one")
    return [START_B, *(ord(character) - 32 for character in text)]


def random_text(random: Random, version: int, level: str) -> str:
    if random.random() < 0.5:
        return "".join(random.choice(ALPHABET[:10], 2 * version))
    letter = str(random.choice(ALPHABET[10:36]))  # a letter first: the text cannot be read as pairs of digits
    return letter + "".join(random.choice(ALPHABET, version - 1))


def encode(text: str, version: int, level: str = "", random: Random | None = None) -> Modules:
    """ "rows columns" bool. A barcode cannot be padded: the text must have the version's length."""
    (version,) = BARCODE.check_versions([version])
    start, *characters = values(text)
    if len(characters) > version:
        raise too_long("barcode", text, version, f"{version} characters or {2 * version} digits")
    if len(characters) < version:
        raise InputError(f"{text!r} needs a barcode of version {len(characters)}, not {version}")
    check = (start + sum(i * value for i, value in enumerate(characters, 1))) % 103
    widths = "".join(WIDTHS[value] for value in (start, *characters, check, STOP))
    bars = np.repeat(np.arange(len(widths)) % 2 == 0, [int(width) for width in widths])
    return np.broadcast_to(bars, shape(version)).copy()


def part_masks(modules: Modules) -> dict[str, Modules]:
    """
    >>> {part: int(mask[0].sum()) for part, mask in part_masks(encode("123456", 3)).items()}
    {'finder': 24, 'timing': 22, 'box': 68}
    """
    finder = np.zeros(modules.shape, bool)
    finder[:, :CHARACTER] = finder[:, -STOP_COLUMNS:] = True
    return {"finder": finder, "timing": modules & ~finder, "box": np.ones(modules.shape, bool)}


BARCODE = register(
    Symbol(
        name="barcode",
        title="barcode",
        versions=range(1, 41),
        usual=range(2, 6),
        quiet_zones=(10,),  # as the standard asks: without it the guards are not found
        shape=shape,
        text=random_text,
        encode=encode,
        parts=part_masks,
        linear=True,
    )
)
