"""Scenes with several codes and things that are none, with a mask for each object.

Two codes in one picture ask what one cannot: does a map mark both, and leave the rest alone? The frame is
cut into cells of equal size, an object in each: real codes first, then distractors (negatives.py), in cells
that are shuffled. Scene i follows from the seed and i alone. The future work that chakraborty2025cambench
names.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from heatproof.errors import InputError
from heatproof.images.backgrounds import background, find_photos
from heatproof.images.codes import find_spot, stamp, versions_that_fit
from heatproof.images.negatives import NEGATIVES, negatives_of
from heatproof.images.symbols import find_symbol


class Scenes(NamedTuple):
    """Pictures and where each of their objects is, codes first."""

    pictures: np.ndarray  # "n H W 3", uint8
    codes: np.ndarray  # "n k H W", bool: the code itself, without its quiet zone
    distractors: np.ndarray  # "n d H W", bool
    kinds: tuple[tuple[str, ...], ...]  # of each scene's distractors


def make_scenes(
    count: int,
    size: int = 224,
    seed: int = 0,
    *,
    symbol: str = "qr",
    codes: int = 2,
    distractors: int = 1,
    photos: str | Path | Any = None,
) -> Scenes:
    """Pictures of several codes among distractors.

    >>> made = make_scenes(1, 128)
    >>> made.codes.shape, made.distractors.shape
    ((1, 2, 128, 128), (1, 1, 128, 128))
    """
    if count < 0 or codes < 1 or distractors < 0:
        raise InputError(f"a scene has 1 code or more; got {count} scenes of {codes} and {distractors}")
    kind, behind = find_symbol(symbol), find_photos(photos)
    across = math.ceil(math.sqrt(codes + distractors))
    cell = (size // across, size // across)
    fitting = versions_that_fit(kind, None, cell)
    wrong = negatives_of(kind)
    pictures = np.empty((count, size, size, 3), np.uint8)
    masks = np.zeros((count, codes + distractors, size, size), bool)
    names = []
    for i in range(count):
        random = np.random.default_rng((seed, 7, i))
        picture = background(size, size, random, behind)
        cells = random.permutation(across * across)[: codes + distractors]
        drawn = [str(random.choice(wrong)) for _ in range(distractors)]
        for k, place in enumerate(cells):
            version = fitting[int(random.integers(len(fitting)))]
            if k < codes:
                modules = kind.random(random, version).modules
            else:
                modules = NEGATIVES[drawn[k - codes]](random, kind, version)
            spot, inks = find_spot(modules, cell, random, kind.quiet_zones)
            row, column = divmod(int(place), across)
            spot = spot._replace(top=spot.top + row * cell[0], left=spot.left + column * cell[1])
            stamp(picture, modules, spot, inks)
            masks[i, k, spot.rows, spot.columns] = True
        pictures[i] = picture.round().astype(np.uint8)
        names.append(tuple(drawn))
    return Scenes(pictures, masks[:, :codes], masks[:, codes:], tuple(names))
