"""Values as they were measured, of images and volumes with any number of channels.

A Raster holds numbers "c H W", or "c D H W" of a volume. They become fractions of 1

    window = [centre, width]   clip((x - centre) / width + 1/2, 0, 1): window and level of a CT
    window = "range"           (x - min) / (max - min) of each channel, for scanners without a scale
    no window                  unsigned integers by their bits (8, or those that hold them), fractions kept

and are resized and cropped along each axis by a small matrix, with Pillow's filters, so that a volume that is
constant along its third axis becomes what its slice would. The new size is `resize`, or follows from
`spacing`: an axis of n voxels that are s mm apart becomes round(n s / spacing) voxels, and is then cropped or
padded.
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
    spacing: Spacing = (
        None  # of a volume, where its file states it: millimetres along depth, height and width
    )

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
    placed = spacing and in_order(spacing, axes.replace("c", ""))
    return Raster(values.transpose([axes.index(axis) for axis in "cdhw" if axis in axes]), bits, placed)


def in_order(spacing: Sequence[float], axes: str) -> Spacing:
    """Spacing along depth, height and width; None unless all are positive lengths."""
    known = all(np.isfinite(mm) and mm > 0 for mm in spacing)
    return tuple(float(spacing[axes.index(axis)]) for axis in "dhw") if known else None


def check_axes(axes: str) -> None:
    if sorted(axes.replace("c", "", 1)) not in (["h", "w"], ["d", "h", "w"]):
        raise InputError(
            "axes names h and w, d of a volume, and c of channels, each once, such as 'hwc' or 'dhw'; "
            f"got {axes!r}"
        )


def check_window(window: Window) -> None:
    if window is None or window == RANGE:
        return
    if isinstance(window, str) or len(window) != 2 or not window[1] > 0:
        raise InputError(
            f"window is a centre and a width above 0, such as [40, 400], or 'range'; got {window!r}"
        )


def check_spacing(spacing: Spacing, size: tuple[int, ...]) -> None:
    if spacing is not None and not (len(spacing) == len(size) == 3 and all(mm > 0 for mm in spacing)):
        raise InputError(
            "spacing is of volumes: three lengths above 0 in millimetres, along the axes of size, such as "
            f"[1, 1, 1]; got {list(spacing)} for a size of {list(size)}"
        )


def uneven(spacings: Iterable[Spacing]) -> str:
    """A warning where the voxels of volumes differ in size, else ''."""
    sizes = sorted({tuple(round(mm, 2) for mm in spacing) for spacing in spacings if spacing})
    if len(sizes) < 2:
        return ""
    first, last = (" x ".join(f"{mm:g}" for mm in size) for size in (sizes[0], sizes[-1]))
    return (
        f"voxels differ between volumes, from {first} to {last} mm, and each volume is stretched to the same "
        "size; preprocess.spacing = [1, 1, 1] would make voxels of 1 mm of all of them"
    )


def fractions(image: Raster, window: Window) -> np.ndarray:
    """The values in [0, 1], float32."""
    values = image.values
    if window == RANGE:
        axes = tuple(range(1, values.ndim))
        low, high = (np.asarray(of(values, axes, keepdims=True), np.float32) for of in (np.min, np.max))
        result: np.ndarray = (values - low) / np.where(high > low, high - low, np.inf)
    elif isinstance(window, tuple):
        centre, width = window
        result = np.clip((values.astype(np.float32) - float(centre)) / float(width) + 0.5, 0, 1)
    else:
        lowest, highest, white = values.min(), values.max(), 1.0
        if values.dtype.kind == "u":
            white = 2.0 ** (image.bits or (8 if values.dtype.itemsize == 1 else bit_depth(int(highest)))) - 1
        if lowest < 0 or highest > white or values.dtype.kind == "i":
            raise InputError(
                f"its values run from {lowest:g} to {highest:g}; set preprocess.window to a centre and a "
                "width, such as [40, 400], or to 'range'"
            )
        result = values.astype(np.float32) / white
    return np.asarray(result, np.float32)


def resize_matrix(n: int, scaled: int, first: int, size: int, filter: str) -> np.ndarray:
    """Array "size n": weights of the n pixels of an axis, resized to `scaled`, in each pixel of the crop."""
    if filter not in FILTERS:
        raise InputError(f"volumes and arrays are resized by {', '.join(FILTERS)}; got {filter!r}")
    at = np.arange(first, first + size)
    if filter == "nearest":
        weights = (np.arange(n)[None] == ((2 * at + 1) * n // (2 * scaled))[:, None]).astype(np.float64)
    else:
        weigh, reach = FILTERS[filter]
        far = np.abs((np.arange(n) + 0.5)[None] - ((at + 0.5) * n / scaled)[:, None]) / max(n / scaled, 1.0)
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
    """Array "c ..." with each further axis multiplied by its matrix."""
    for axis, matrix in enumerate(matrices, 1):
        values = np.moveaxis(np.tensordot(values, matrix, (axis, 1)), -1, axis)
    return np.ascontiguousarray(values)
