"""Aztec codes, the full-range kind with 1 to 8 layers (ISO/IEC 24778), which has a reference grid.

    finder  the bullseye: rings around the centre, 13 x 13 modules
    timing  the reference grid outside the 15 x 15 core: every 16th row and column from the centre on
    box     all modules

The version is the number of layers. Texts use A-Z, space, 0-9, comma and full stop, by the upper-case and
digit modes; check words fill what the text leaves, at least 23 % and three words, as the standard recommends.
The compact kind has no reference grid, and therefore no second part to score. The standard asks for no quiet
zone.
"""

from __future__ import annotations

from math import ceil

import numpy as np

from heatproof.errors import InputError
from heatproof.images.symbols import Modules, Random, Symbol, register, square, too_long
from heatproof.images.symbols._reedsolomon import check_words

UPPER = " ABCDEFGHIJKLMNOPQRSTUVWXYZ"  # 5 bits, from 1
DIGIT = " 0123456789,."  # 4 bits, from 1
TO_DIGIT, TO_UPPER = "11110", "1110"  # latches
ALPHABET = np.array(list(UPPER + DIGIT[1:]))
FIELDS = {4: (16, 0x13), 6: (64, 0x43), 8: (256, 0x12D)}  # by bits per word
BULLSEYE, CORE = 6, 7  # radius in modules


def base(layers: int) -> int:
    """Modules along one side without the reference grid."""
    return 14 + 4 * layers


def side(layers: int) -> int:
    """Modules along one side.

    >>> [side(layers) for layers in (1, 4, 5, 8)]
    [19, 31, 37, 49]
    """
    return base(layers) + 1 + 2 * ((base(layers) // 2 - 1) // 15)


def word_bits(layers: int) -> int:
    return 6 if layers <= 2 else 8


def layer_bits(layers: int) -> int:
    return (112 + 16 * layers) * layers


def most_data_words(layers: int) -> int:
    total = layer_bits(layers) // word_bits(layers)
    return total - ceil(0.23 * total) - 3


def text_bits(text: str) -> str:
    """The text as a string of bits, changing between the modes where a character asks for it."""
    bits, mode = "", UPPER
    for character in text:
        if character not in mode:
            if character not in UPPER + DIGIT:
                raise InputError(f"the text of an Aztec code holds {character!r}; use A-Z 0-9 , . and space")
            bits += TO_DIGIT if mode is UPPER else TO_UPPER
            mode = DIGIT if mode is UPPER else UPPER
        bits += format(mode.index(character) + 1, "05b" if mode is UPPER else "04b")
    return bits


def stuffed(bits: str, size: int) -> list[int]:
    """Bits as words, none all zeros or all ones: a last bit that differs is put in where one would be."""
    words, at = [], 0
    while at < len(bits):
        head = bits[at : at + size - 1].ljust(size - 1, "1")
        if head == head[0] * (size - 1):
            words.append(head + ("1" if head[0] == "0" else "0"))
            at += size - 1
        else:
            words.append(bits[at : at + size].ljust(size, "1"))
            at += size
    return [int(word, 2) for word in words]


def random_text(random: Random, version: int, level: str) -> str:
    """A text with more bits than the next smaller code has room for."""
    smaller = most_data_words(version - 1) * word_bits(version - 1) if version > 1 else 0
    bits = int(random.integers(smaller, most_data_words(version) * word_bits(version)))
    text = str(random.choice(ALPHABET))
    while len(text_bits(text)) <= bits:
        longer = text + str(random.choice(ALPHABET))
        if len(stuffed(text_bits(longer), word_bits(version))) > most_data_words(version):
            break
        text = longer
    return text


def encode(text: str, version: int, level: str = "", random: Random | None = None) -> Modules:
    """ "N N" bool. There is one way to write a text here, so nothing is left to chance or to a level."""
    (layers,) = AZTEC.check_versions([version])
    size, most = word_bits(layers), most_data_words(layers)
    words = stuffed(text_bits(text), size)
    if len(words) > most or not words:
        raise too_long("Aztec code", text, version, f"1 to {most} words of {size} bits")
    mode = format(layers - 1, "05b") + format(len(words) - 1, "011b")
    total = layer_bits(layers) // size
    words += check_words(words, total - len(words), *FIELDS[size])
    data = as_bits(words, size)
    n = side(layers)
    modules = np.zeros((n, n), bool)
    draw_grid(modules)
    draw_layers(modules, layers, [0] * (layer_bits(layers) - len(data)) + data)
    quarters = [int(mode[i : i + 4], 2) for i in range(0, 16, 4)]
    draw_core(modules, as_bits(quarters + check_words(quarters, 6, *FIELDS[4]), 4))
    return modules


def as_bits(words: list[int], size: int) -> list[int]:
    return [word >> shift & 1 for word in words for shift in range(size - 1, -1, -1)]


def draw_grid(modules: Modules) -> None:
    """Alternating lines through the centre and every 16 modules from it; what lies on them is drawn later."""
    n = len(modules)
    centre = n // 2
    lines = [k for k in range(n) if (k - centre) % 16 == 0]
    dark = (np.arange(n) - centre) % 2 == 0
    modules[lines, :] = dark
    modules[:, lines] = dark[:, None]


def draw_layers(modules: Modules, layers: int, bits: list[int]) -> None:
    """Layers from the outside in, two modules thick, each in four sides that are turns of one another."""
    n, inner = len(modules), base(layers)
    # Positions without the grid -> positions with it: each grid line pushes what is beyond it outwards.
    steps = np.arange(inner // 2)
    outwards = steps + steps // 15 + 1
    spread = np.concatenate([n // 2 - outwards[::-1], n // 2 + outwards])
    left = iter(bits)
    for layer in range(layers):
        for turn in range(4):
            for along in range(4 * (layers - layer) + 12):
                for across in range(2):
                    x, y = 2 * layer + across, 2 * layer + along
                    for _ in range(turn):
                        x, y = y, inner - 1 - x
                    modules[spread[y], spread[x]] = next(left)


def draw_core(modules: Modules, mode: list[int]) -> None:
    """Bullseye, the marks that tell which way is up, and the mode message around it."""
    centre = len(modules) // 2
    rows, columns = np.indices((2 * CORE + 1,) * 2) - CORE
    ring = np.maximum(abs(rows), abs(columns))
    core = (ring % 2 == 0) & (ring <= BULLSEYE)
    # The grid's centre lines go through the mode message's ring.
    core[ring == CORE] = modules[centre - CORE : centre + CORE + 1, centre - CORE : centre + CORE + 1][
        ring == CORE
    ]
    for x, y in ((-7, -7), (-6, -7), (-7, -6), (7, -7), (7, -6), (7, 6)):
        core[y + CORE, x + CORE] = True
    for x, y in ((6, -7), (-7, 6), (-7, 7), (-6, 7), (6, 7), (7, 7)):
        core[y + CORE, x + CORE] = False
    along = [-5, -4, -3, -2, -1, 1, 2, 3, 4, 5]
    for turn in range(4):
        for i, bit in zip(along, mode[10 * turn : 10 * turn + 10], strict=True):
            x, y = i, -CORE
            for _ in range(turn):
                x, y = -y, x
            core[y + CORE, x + CORE] = bit
    modules[centre - CORE : centre + CORE + 1, centre - CORE : centre + CORE + 1] = core


def part_masks(modules: Modules) -> dict[str, Modules]:
    """
    >>> {part: int(mask.sum()) for part, mask in part_masks(np.zeros((31, 31), bool)).items()}
    {'finder': 169, 'timing': 32, 'box': 961}
    """
    n = len(modules)
    rows, columns = np.indices((n, n)) - n // 2
    ring = np.maximum(abs(rows), abs(columns))
    grid = (rows % 16 == 0) | (columns % 16 == 0)
    return {"finder": ring <= BULLSEYE, "timing": grid & (ring > CORE), "box": np.ones((n, n), bool)}


AZTEC = register(
    Symbol("aztec", "Aztec code", range(1, 9), range(1, 5), square(side), random_text, encode, part_masks)
)
