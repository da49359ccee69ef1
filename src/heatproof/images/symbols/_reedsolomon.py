"""Reed-Solomon check words over GF(2^m), as two-dimensional symbols use them (ISO/IEC 16022, 24778).

The message is a polynomial d(x), highest power first; the check words are the remainder of d(x) x^k divided
by g(x) = (x - a)(x - a^2)...(x - a^k), with a the element 2 of the field.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache


@cache
def _tables(size: int, polynomial: int) -> tuple[list[int], list[int]]:
    """Powers of 2, twice over so that sums of two logarithms need no modulus, and logarithms."""
    powers, logs = [1] * (2 * size), [0] * size
    value = 1
    for exponent in range(size - 1):
        powers[exponent] = powers[exponent + size - 1] = value
        logs[value] = exponent
        value <<= 1
        if value >= size:
            value ^= polynomial
    return powers, logs


def check_words(data: Sequence[int], count: int, size: int, polynomial: int) -> list[int]:
    """The check words that follow the data.

    >>> check_words([142, 164, 186], 5, 256, 0x12D)
    [114, 25, 5, 88, 102]
    """
    powers, logs = _tables(size, polynomial)

    def times(a: int, b: int) -> int:
        return powers[logs[a] + logs[b]] if a and b else 0

    generator = [1]
    for i in range(1, count + 1):
        shifted = [times(term, powers[i]) for term in generator]
        generator = [a ^ b for a, b in zip([*generator, 0], [0, *shifted], strict=True)]
    rest = [0] * count
    for word in data:
        factor = word ^ rest[0]
        rest = [a ^ times(factor, g) for a, g in zip([*rest[1:], 0], generator[1:], strict=True)]
    return rest
