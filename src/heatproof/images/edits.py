"""A code with one finder pattern taken away, put elsewhere, or swapped: does the map follow?

    remove   its pixels take the plate's light colour
    move     and it is printed again in the background, off the plate; codes without room for it are left out
    swap     it changes places with the data at the corner that has no finder

The finder is drawn from the seed. What is known of each edit: the pixels where the pattern was, and those
where it is now. For codes with three finders on a square (QR codes as they are drawn, not distorted).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.ndimage import find_objects, label

from heatproof.errors import InputError, did_you_mean
from heatproof.images.codes import QRSet, Spot
from heatproof.images.symbols import Random

EDITS = ("remove", "move", "swap")


class Edited(NamedTuple):
    """Pictures after an edit. Rows of codes that could not be edited are False in `done`."""

    pictures: np.ndarray  # "n H W 3", uint8
    before: np.ndarray  # "n H W", bool: where the finder was
    after: np.ndarray  # "n H W", bool: where it is now; nothing for remove
    done: np.ndarray  # "n", bool


def edit_finders(codes: QRSet, kind: str, seed: int = 0) -> Edited:
    """One finder of each code, edited."""
    if kind not in EDITS:
        raise InputError(f"there is no edit {kind!r}; {did_you_mean(kind, EDITS)}")
    pictures = codes.pictures.copy()
    before, after = (np.zeros(pictures.shape[:3], bool) for _ in range(2))
    done = np.zeros(len(pictures), bool)
    for i, (picture, spot) in enumerate(zip(pictures, codes.spots, strict=True)):
        random = np.random.default_rng((seed, 11, i))
        finders = find_objects(label(codes.masks["finder"][i])[0])
        if len(finders) != 3:
            continue
        finder = finders[int(random.integers(3))]
        target = _target(kind, finder, finders, spot, picture.shape[:2], random)
        if target is None and kind != "remove":
            continue
        pattern = picture[finder].copy()
        light = picture[spot.plate][0, 0].copy()
        picture[finder] = picture[target].copy() if kind == "swap" and target else light
        before[i][finder] = done[i] = True
        if target is not None:
            picture[target] = pattern
            after[i][target] = True
    return Edited(pictures, before, after, done)


Block = tuple[slice, slice]


def _target(
    kind: str, finder: Block, finders: list[Block], spot: Spot, frame: tuple[int, ...], random: Random
) -> Block | None:
    if kind == "remove":
        return None
    height, width = (side.stop - side.start for side in finder)
    if kind == "swap":
        corners = [
            (rows, columns)
            for rows in _ends(spot.rows, height)
            for columns in _ends(spot.columns, width)
            if not any(_meet((rows, columns), other) for other in finders)
        ]
        return corners[0] if corners else None
    free = [
        (slice(y, y + height), slice(x, x + width))
        for y in range(frame[0] - height + 1)
        for x in range(frame[1] - width + 1)
        if not _meet((slice(y, y + height), slice(x, x + width)), spot.plate)
    ]
    return free[int(random.integers(len(free)))] if free else None


def _ends(side: slice, length: int) -> tuple[slice, slice]:
    return slice(side.start, side.start + length), slice(side.stop - length, side.stop)


def _meet(first: Block, second: Block) -> bool:
    return all(a.start < b.stop and b.start < a.stop for a, b in zip(first, second, strict=True))
