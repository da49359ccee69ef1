"""Pictures that are more than 8-bit colours: volumes, any number of channels, values as they were measured.

A Raster holds numbers "c H W", or "c D H W" of a volume. On its way to a network they become fractions of 1

    window = [centre, width]   clip((x - centre) / width + 1/2, 0, 1): window and level of a CT
    window = "range"           (x - min) / (max - min) of each channel, for scanners without a scale
    no window                  whole numbers without a sign by their bits (8, or those that hold them),
                               fractions of 1 as they are

and it is resized and cropped along each axis by one small matrix, with Pillow's filters, so that a volume
that does not change along its third axis becomes what its slice would. How large it becomes, `resize` says,
or `spacing`: an axis of n voxels that are s mm apart becomes round(n s / spacing) voxels, and is then cropped
or padded. How files are read is in arrays.py, nifti.py and series.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from PIL import Image

from heatproof.errors import InputError
from heatproof.images.files import MAX_PIXELS, bit_depth

Window: TypeAlias = "tuple[float, ...] | str | None"
Spacing: TypeAlias = "tuple[float, ...] | None"
RANGE = "range"


@dataclass(frozen=True)
class Raster:
    """Values as they were measured, "c H W" or "c D H W"."""

    values: np.ndarray
    bits: int | None = None  # the depth of whole numbers, where it is known
    spacing: Spacing = None  # of a volume, where its file says it: millimetres along depth, height and width

    @property
    def size(self) -> tuple[int, ...]:
        """Width, height and, of a volume, depth: in Pillow's order."""
        return tuple(self.values.shape[:0:-1])


Seen: TypeAlias = "Image.Image | Raster"


def raster(values: np.ndarray, axes: str, bits: int | None = None, spacing: Spacing = None) -> Raster:
    """An array whose axes are named, such as "hwc", "dhw" or "cdhw"; spacing: of those in space, in order."""
    check_axes(axes)
    if values.ndim != len(axes):
        raise InputError(f"it has the shape {values.shape}, but axes = {axes!r} names {len(axes)} axes")
    if not values.size or values.dtype.kind not in "iuf":
        raise InputError(f"it holds {values.dtype} values of shape {values.shape}; numbers are understood")
    if values.size > MAX_PIXELS:
        raise InputError(f"it has more than the {MAX_PIXELS:,} values that are safe to hold; make it smaller")
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise InputError("it has values that are NaN or infinite; fill them first")
    if "c" not in axes:
        values, axes = values[None], "c" + axes
    wanted = "cdhw" if "d" in axes else "chw"
    placed = spacing and in_order(spacing, axes.replace("c", ""))
    return Raster(values.transpose([axes.index(axis) for axis in wanted]), bits, placed)


def in_order(spacing: Sequence[float], axes: str) -> Spacing:
    """Along depth, height and width, of axes that are named; None where it is no length."""
    known = all(np.isfinite(mm) and mm > 0 for mm in spacing)
    return tuple(float(spacing[axes.index(axis)]) for axis in "dhw") if known else None


def check_axes(axes: str) -> None:
    if sorted(axes.replace("c", "", 1)) not in (["h", "w"], ["d", "h", "w"]):
        raise InputError(
            "axes names h and w, d of a volume, and c of channels, each once, such as 'hwc' or 'dhw'; "
            f"got {axes!r}"
        )


def check_window(window: Window) -> None:
    """Refuse what is neither a centre and a width nor a word that is known."""
    if window is None or window == RANGE:
        return
    if isinstance(window, str) or len(window) != 2 or not window[1] > 0:
        raise InputError(
            f"window is a centre and a width above 0, such as [40, 400], or 'range'; got {window!r}"
        )


def check_spacing(spacing: Spacing, size: tuple[int, ...]) -> None:
    """Refuse what is no length of each of three axes."""
    if spacing is not None and not (len(spacing) == len(size) == 3 and all(mm > 0 for mm in spacing)):
        raise InputError(
            "spacing is of volumes: three lengths above 0 in millimetres, along the axes of size, such as "
            f"[1, 1, 1]; got {list(spacing)} for a size of {list(size)}"
        )


def uneven(found: Iterable[Spacing]) -> str:
    """A sentence where volumes that are seen together have voxels of different size, else ''."""
    sizes = sorted({tuple(round(mm, 2) for mm in one) for one in found if one})
    if len(sizes) < 2:
        return ""
    first, last = (" x ".join(f"{mm:g}" for mm in one) for one in (sizes[0], sizes[-1]))
    return (
        f"voxels differ between volumes, from {first} to {last} mm, and each volume is stretched to the same "
        "size; preprocess.spacing = [1, 1, 1] would make voxels of 1 mm of all of them"
    )


def fractions(picture: Raster, window: Window) -> np.ndarray:
    """The values in [0, 1], float32."""
    values = picture.values
    if window == RANGE:
        low, high = (one(values, tuple(range(1, values.ndim)), keepdims=True) for one in (np.min, np.max))
        span = np.asarray(high, np.float32) - np.asarray(low, np.float32)
        found = (values - low.astype(np.float32)) / np.where(span > 0, span, np.inf)
    elif isinstance(window, tuple):
        centre, width = window
        found = np.clip((values.astype(np.float32) - float(centre)) / float(width) + 0.5, 0, 1)
    else:
        found = values.astype(np.float32) / _top(picture)
    return np.asarray(found, np.float32)


def _top(picture: Raster) -> float:
    """What is white, where nothing but the values says so."""
    values, kind = picture.values, picture.values.dtype.kind
    low, high = values.min(), values.max()
    top = 1.0
    if kind == "u":
        top = 2.0 ** (picture.bits or (8 if values.dtype.itemsize == 1 else bit_depth(int(high)))) - 1
    if low < 0 or high > top or kind == "i":
        raise InputError(
            f"its values run from {low:g} to {high:g}; set preprocess.window to a centre and a width, "
            "such as [40, 400], or to 'range'"
        )
    return top


def resize_matrix(n: int, scaled: int, first: int, size: int, filter: str) -> np.ndarray:
    """ "size n": how each pixel of the crop is made of the n pixels of an axis resized to `scaled`."""
    if filter not in FILTERS:
        raise InputError(f"volumes and arrays are resized by {', '.join(FILTERS)}; got {filter!r}")
    at = np.arange(first, first + size)
    weigh, reach = FILTERS[filter]
    shrink = max(n / scaled, 1.0) if filter != "nearest" else 1.0
    far = np.abs((np.arange(n) + 0.5)[None] - ((at + 0.5) * n / scaled)[:, None]) / shrink
    if filter == "nearest":
        weights = (np.arange(n)[None] == ((2 * at + 1) * n // (2 * scaled))[:, None]).astype(np.float64)
    else:
        weights = np.where(far < reach, weigh(far), 0.0)
    weights[(at < 0) | (at >= scaled)] = 0
    total = weights.sum(1, keepdims=True)
    return np.asarray(weights / np.where(total == 0, 1, total), np.float32)


def _cubic(x: np.ndarray) -> np.ndarray:
    """Pillow's, with a = -1/2."""
    near = (1.5 * x - 2.5) * x * x + 1
    return np.asarray(np.where(x < 1, near, ((-0.5 * x + 2.5) * x - 4) * x + 2))


FILTERS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], float]] = {
    "nearest": (np.ones_like, 0.5),
    "bilinear": (lambda x: 1 - x, 1.0),
    "bicubic": (_cubic, 2.0),
}


def along_each_axis(values: np.ndarray, matrices: Sequence[np.ndarray]) -> np.ndarray:
    """ "c ..." with each further axis multiplied by its matrix."""
    for axis, matrix in enumerate(matrices, 1):
        values = np.moveaxis(np.tensordot(values, matrix, (axis, 1)), -1, axis)
    return np.ascontiguousarray(values)
