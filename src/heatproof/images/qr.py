"""QR codes on varied backgrounds, and hard negatives that only lack what makes a QR code one.

What is drawn, and what the masks mean, is in symbols/qr.py and codes.py; this is the usual way in.
"""

from __future__ import annotations

from typing import Any

from heatproof.images.codes import QRSet, make_codes
from heatproof.images.negatives import NEGATIVES
from heatproof.images.symbols import PARTS

__all__ = ["NEGATIVES", "PARTS", "QRSet", "make_qr"]


def make_qr(
    n_positive: int = 600,
    n_negative: int = 600,
    size: int | tuple[int, int] = 224,
    seed: int = 0,
    **options: Any,
) -> QRSet:
    """QR codes first, then negatives, kinds in turn; options are those of `make_codes`.

    >>> make_qr(1, 2, 64).kinds.tolist()
    ['qr', 'checkerboard', 'clutter']
    """
    return make_codes("qr", n_positive, n_negative, size, seed, **options)
