"""What lies behind a code: flat, a gradient, clouds, grain, blocks, bars, or a piece of a photograph.

Codes and negatives get the same backgrounds, so that none of them gives the class away. Where photographs are
given, half of the pictures have one: a random square-cornered piece, at least half as wide or high as the
whole, shrunk or enlarged to the picture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from heatproof.errors import InputError
from heatproof.images.dicom import open_image
from heatproof.images.folder import is_picture, walk
from heatproof.images.symbols import Random

PHOTO_SHARE = 0.5
Photos = Sequence[Path | np.ndarray]


def flat(rows: np.ndarray, columns: np.ndarray, random: Random) -> np.ndarray:
    return np.zeros(rows.shape)


def gradient(rows: np.ndarray, columns: np.ndarray, random: Random) -> np.ndarray:
    angle = random.uniform(0, 2 * np.pi)
    return np.asarray(0.5 + (rows - 0.5) * np.sin(angle) + (columns - 0.5) * np.cos(angle))


def clouds(rows: np.ndarray, columns: np.ndarray, random: Random) -> np.ndarray:
    """A 5 x 5 grid of random values, linear in between along each axis."""
    values = random.random((5, 5))
    knots = np.arange(5)
    across, down = (np.linspace(0, 4, side) for side in rows.shape[::-1])
    wide = np.stack([np.interp(across, knots, line) for line in values])
    return np.stack([np.interp(down, knots, line) for line in wide.T], axis=1)


def grain(rows: np.ndarray, columns: np.ndarray, random: Random) -> np.ndarray:
    return random.random(rows.shape)


def blocks(rows: np.ndarray, columns: np.ndarray, random: Random) -> np.ndarray:
    cells = int(random.integers(4, 12))
    levels = random.random((cells + 1, cells + 1))
    return np.asarray(levels[(rows * cells).astype(int), (columns * cells).astype(int)])


def bars(rows: np.ndarray, columns: np.ndarray, random: Random) -> np.ndarray:
    angle, count = random.uniform(0, np.pi), random.uniform(4, 20)
    return np.asarray(np.floor((rows * np.sin(angle) + columns * np.cos(angle)) * count) % 2)


BACKGROUNDS: dict[str, Callable[[np.ndarray, np.ndarray, Random], np.ndarray]] = {
    kind.__name__: kind for kind in (flat, gradient, clouds, grain, blocks, bars)
}


def background(height: int, width: int, random: Random, photos: Photos = ()) -> np.ndarray:
    """ "H W 3" in [0, 255]: a blend of two random colours, or a photograph."""
    if photos and random.random() < PHOTO_SHARE:
        return photograph(photos[int(random.integers(len(photos)))], height, width, random)
    kind = list(BACKGROUNDS.values())[int(random.integers(len(BACKGROUNDS)))]
    rows, columns = np.indices((height, width)) / max(height, width)
    blend = np.clip(kind(rows, columns, random), 0, 1)[..., None]
    first, second = random.uniform(0, 255, (2, 3))
    return np.asarray(first + blend * (second - first))


def photograph(photo: Path | np.ndarray, height: int, width: int, random: Random) -> np.ndarray:
    """A random piece of the picture's shape, "H W 3" float."""
    picture = Image.fromarray(photo) if isinstance(photo, np.ndarray) else open_image(photo).convert("RGB")
    largest = min(picture.width / width, picture.height / height)
    scale = largest * random.uniform(0.5, 1)
    left, top = (
        random.uniform(0, whole - scale * side)
        for whole, side in ((picture.width, width), (picture.height, height))
    )
    frame = (left, top, left + scale * width, top + scale * height)
    piece = picture.resize((width, height), Image.Resampling.BILINEAR, box=frame)
    return np.asarray(piece, dtype=float)


def find_photos(photos: str | Path | Sequence[Any] | None) -> Photos:
    """A folder's pictures, in the order of their paths, or arrays "H W 3" uint8 as they are given."""
    if photos is None:
        return ()
    if isinstance(photos, str | Path):
        root = Path(photos)
        if not root.is_dir():
            raise InputError(f"there is no folder {root} of photographs")
        files = sorted(file for file in walk(root) if is_picture(file))
        if not files:
            raise InputError(f"there is no picture in {root}; name a folder of photographs")
        return files
    arrays = [np.asarray(photo) for photo in photos]
    for i, array in enumerate(arrays):
        if array.ndim != 3 or array.shape[2] != 3 or array.dtype != np.uint8 or 0 in array.shape:
            raise InputError(
                f"photo {i} is {array.dtype} of shape {array.shape}; pass 8-bit arrays 'H W 3' or a folder"
            )
    return arrays
