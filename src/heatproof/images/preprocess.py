"""Preprocessing: from an image to the input of a model, with boxes and masks transformed alike.

An image of n columns is resized to n' and cropped from column `left` on. The centre of column j of the crop
lies in the image's column

    i(j) = floor((j + left + 1/2) n / n')

and rows likewise. A carried mask reads exactly these pixels (nearest). A carried box covers the columns with
x0 <= i(j) <= x1: it is the tight box of the carried mask of the box, to the pixel. Boxes are (x0, y0, x1, y1)
in pixel indices from 0, both corners inside. Pixels of the crop outside a small image are black and belong to
no box and no mask.

Values of a Raster become fractions of 1

    window = [centre, width]   clip((x - centre) / width + 1/2, 0, 1): window and level of a CT
    window = "range"           (x - min) / (max - min) of each channel, for scanners without a scale
    no window                  unsigned integers by their bits (8, or those that hold them), fractions kept

and are resized and cropped along each axis by a small matrix, with Pillow's filters, so that a volume that is
constant along its third axis becomes what its slice would. The new size is `resize`, or follows from
`spacing`: an axis of n voxels that are s mm apart becomes round(n s / spacing) voxels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from heatproof.errors import InputError
from heatproof.images import files
from heatproof.images.files import Box, Raster, Seen, Size, Spacing, check_box, listed_numbers

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RANGE = "range"
Window: TypeAlias = "tuple[float, ...] | str | None"


def _cubic(x: np.ndarray) -> np.ndarray:
    """Pillow's, with a = -1/2."""
    near = (1.5 * x - 2.5) * x * x + 1
    return np.asarray(np.where(x < 1, near, ((-0.5 * x + 2.5) * x - 4) * x + 2))


FILTERS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], float]] = {
    "nearest": (np.ones_like, 0.5), "bilinear": (lambda x: 1 - x, 1.0), "bicubic": (_cubic, 2.0),
}  # fmt: skip


class Side(NamedTuple):
    """One side of an image: n pixels are resized to `scaled`, of which `size` are cropped."""

    n: int
    scaled: int
    first: int  # of the crop; negative where the crop is larger than the image
    size: int

    def sources(self) -> np.ndarray:
        """The image's pixel under each pixel of the crop; -1 outside the image."""
        at = np.arange(self.first, self.first + self.size)
        inside = (at >= 0) & (at < self.scaled)
        return np.where(inside, (2 * at + 1) * self.n // (2 * self.scaled), -1)

    def span(self, low: float, high: float) -> tuple[int, int]:
        """First and last pixel of the crop that show pixels low to high; descending if there is none."""
        start, stop = max(math.ceil(low), 0), min(math.floor(high), self.n - 1) + 1
        first, end = (-((self.n - 2 * self.scaled * edge) // (2 * self.n)) for edge in (start, stop))
        return max(first - self.first, 0), min(end - 1 - self.first, self.size - 1)

    def weights(self, filter: str) -> np.ndarray:
        """Array "size n": weights of the side's pixels in each pixel of the crop."""
        if filter not in FILTERS:
            raise InputError(f"volumes and arrays are resized by {', '.join(FILTERS)}; got {filter!r}")
        if filter == "nearest":
            weights = (np.arange(self.n) == self.sources()[:, None]).astype(np.float64)
        else:
            weigh, reach = FILTERS[filter]
            ratio = self.n / self.scaled
            at = np.arange(self.first, self.first + self.size)[:, None]
            far = np.abs((np.arange(self.n) + 0.5) - (at + 0.5) * self.n / self.scaled) / max(ratio, 1.0)
            weights = np.where((far < reach) & (at >= 0) & (at < self.scaled), weigh(far), 0.0)
        total = weights.sum(1, keepdims=True)
        return np.asarray(weights / np.where(total == 0, 1, total), np.float32)


class Carried(NamedTuple):
    """Boxes in the pixels of the crop, and the reasons why others are lost.

    Args:
        boxes, lost: the boxes inside the crop, and a sentence for each of the others.

    Example:
        >>> Preprocess((4, 4), 4).carry_boxes([(0, 0, 3, 3)], (8, 8)).boxes
        ((0.0, 0.0, 1.0, 1.0),)
    """

    boxes: tuple[Box, ...]
    lost: tuple[str, ...] = ()


@dataclass(frozen=True)
class Preprocess:
    """Resize the shorter side, crop the centre, scale to [0, 1], subtract the mean, divide by the std.

    Args:
        size: height and width of the model's input; for volumes depth, height and width.
        resize: shorter side before the crop, or an exact height and width.
        mean, std, interpolation: per channel, after scaling to [0, 1]; and the filter of the resize.
        window: of measured values, the centre and width that become 0 to 1, or "range".
        spacing: of volumes, instead of resize: millimetres from voxel to voxel along each axis.

    Example:
        >>> Preprocess(size=(128, 128), resize=128, mean=(0.5,), std=(0.5,)).blank.shape
        torch.Size([1, 1, 128, 128])
    """

    size: tuple[int, ...] = (224, 224)
    resize: int | tuple[int, ...] = 256
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    interpolation: str = "bilinear"
    window: Window = None
    spacing: Spacing = None

    def __post_init__(self) -> None:
        window, spacing, size = self.window, self.spacing, self.size
        if isinstance(window, str):
            understood = window == RANGE
        else:
            understood = window is None or (len(window) == 2 and window[1] > 0)
        if not understood:
            raise InputError(
                f"window is a centre and a width above 0, such as [40, 400], or 'range'; got {window!r}"
            )
        if spacing is not None and not (len(spacing) == len(size) == 3 and all(mm > 0 for mm in spacing)):
            raise InputError(
                "spacing is of volumes: three lengths above 0 in millimetres, along the axes of size, such "
                f"as [1, 1, 1]; got {list(spacing)} for a size of {list(size)}"
            )

    @property
    def channels(self) -> int:
        return len(self.mean)

    @property
    def blank(self) -> Tensor:
        """One image of zeros, model-ready."""
        return torch.zeros(1, self.channels, *self.size)

    @property
    def description(self) -> str:
        """Resize, crop and normalisation in one line.

        >>> Preprocess((128, 128), 128, (0.5,), (0.5,)).description
        'shorter side resized to 128 px (bilinear), centre crop 128x128 px, mean 0.5, std 0.5'
        """
        size, resize = "x".join(map(str, self.size)), f"shorter side resized to {self.resize} px"
        if isinstance(self.resize, tuple):
            resize = f"resized to {'x'.join(map(str, self.resize))} px"
        if self.spacing is not None:
            resize = f"resampled to voxels of {listed_numbers(self.spacing)} mm"
        crop = "" if self.resize == self.size else f", centre crop {size} px"
        window = "" if self.window is None else f", window {self.window}"
        scale = f"mean {listed_numbers(self.mean)}, std {listed_numbers(self.std)}"
        return f"{resize} ({self.interpolation}){crop}{window}, {scale}"

    def replaced(self, given: Mapping[str, Any]) -> Preprocess:
        """This preprocessing with the keys of a study's [preprocess] table that are not None."""
        changes: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in given.items() if v is not None
        }
        if len(changes.get("size", ())) == 3:  # volumes are resized to what the model takes by default
            changes.setdefault("resize", changes["size"])
        merged = replace(self, **changes)
        if isinstance(merged.resize, tuple) and len(merged.resize) != len(merged.size):
            raise InputError("preprocess.resize is one number, or a height and width (depth, height, width)")
        if len(merged.mean) != len(merged.std) or not merged.mean:
            raise InputError("preprocess.mean and preprocess.std need one number each for every channel")
        return merged

    def fitted(self, image: Seen) -> Preprocess:
        """This preprocessing for a volume, with the resize that gives its voxels the spacing, if set."""
        if self.spacing is None:
            return self
        own = image.spacing if isinstance(image, Raster) else None
        if own is None:
            raise InputError(
                "its voxel size is unknown, and preprocess.spacing needs it; leave spacing out, or "
                "give NIfTI files or DICOM series"
            )
        sides = zip(image.size[::-1], own, self.spacing, strict=True)
        return replace(
            self, resize=tuple(max(1, round(n * mm / wanted)) for n, mm, wanted in sides), spacing=None
        )

    def axes(self, image_size: tuple[int, ...]) -> tuple[Side, ...]:
        """Resize and crop of columns, rows (and slices) of an image of this width and height (and depth)."""
        if len(image_size) != len(self.size):
            kind = "a 2D image" if len(image_size) == 2 else "a volume"
            wanted = "2D images" if len(self.size) == 2 else "volumes"
            raise InputError(
                f"it is {kind}, but the model takes {wanted}; set preprocess.size to what it takes"
            )
        if isinstance(self.resize, int):
            scaled = [max(1, int(side * self.resize / min(image_size))) for side in image_size]
        else:
            scaled = list(self.resize[::-1])
        if math.prod(scaled) > files.MAX_PIXELS:
            raise InputError(
                f"resized to {'x'.join(map(str, scaled))} it would have more than {files.MAX_PIXELS:,} "
                f"pixels; its sides, {' and '.join(map(str, image_size))}, differ too much"
            )
        sides = zip(image_size, scaled, self.size[::-1], strict=True)
        return tuple(Side(n, long, round((long - size) / 2), size) for n, long, size in sides)

    def crop(self, image: Image.Image) -> Image.Image:
        """The 8-bit image the model sees, after resize and centre crop."""
        if self.window is not None:
            raise InputError(
                "preprocess.window needs values as they were measured, and this is an 8-bit image; read it "
                "as kind 'arrays', 'nifti' or 'dicom-series', or give a dicom source its options.window"
            )
        self.fitted(image)  # which refuses images where a spacing is set
        image = files.eight_bits(image).convert("L" if self.channels == 1 else "RGB")
        x, y = self.axes(image.size)
        if (x.scaled, y.scaled) != image.size:
            image = image.resize((x.scaled, y.scaled), Image.Resampling[self.interpolation.upper()])
        return image.crop((x.first, y.first, x.first + x.size, y.first + y.size))

    def values(self, image: Seen) -> np.ndarray:
        """Array "c H W" or "c D H W" in [0, 1], after resize and centre crop."""
        if not isinstance(image, Raster):
            pixels = np.asarray(self.crop(image), dtype=np.float32) / 255
            return pixels.transpose(2, 0, 1) if pixels.ndim == 3 else pixels[None]
        sides = self.fitted(image).axes(image.size)
        values = fractions(image, self.window)
        if len(values) not in (1, self.channels):
            raise InputError(
                f"it has {len(values)} channels, but the model takes {self.channels}; name their "
                "axis with axes, or wrap the network to make its channels from these"
            )
        for axis, side in enumerate(sides[::-1], 1):
            values = np.tensordot(values, side.weights(self.interpolation), (axis, 1))
            values = np.moveaxis(values, -1, axis)
        resized = np.ascontiguousarray(values).clip(0, 1)  # a cubic filter overshoots
        return resized if len(resized) == self.channels else np.repeat(resized, self.channels, 0)

    def carry_boxes(
        self, boxes: Iterable[Box], image_size: tuple[int, ...], frame: Size | None = None
    ) -> Carried:
        """Boxes of an image of this width and height, in the pixels of its crop.

        `frame` is the width and height of the image the boxes were drawn on, where the file has since been
        resized. A box is clipped to the crop; one that lies outside it, or shrinks to nothing, is lost.
        """
        inside, lost, sides = [], [], self.axes(image_size)
        if len(sides) > 2:
            if tuple(boxes):
                raise InputError("boxes are for 2D images; mark the object of a volume by a mask")
            return Carried(())
        x, y = sides
        if frame is not None:
            x, y = x._replace(n=frame[0]), y._replace(n=frame[1])
        for box in boxes:
            x0, y0, x1, y1 = check_box(box)
            (left, right), (top, bottom) = x.span(x0, x1), y.span(y0, y1)
            if left <= right and top <= bottom:
                inside.append((float(left), float(top), float(right), float(bottom)))
            else:
                lost.append(
                    f"the box ({listed_numbers(box)}) was cropped or shrunk away: it holds no pixel of the "
                    f"{x.size}x{y.size} crop that the model sees"
                )
        return Carried(tuple(inside), tuple(lost))

    def carry_mask(self, mask: Any, image_size: tuple[int, ...]) -> Tensor:
        """A mask of an image of this width and height, as "H W" bool in the pixels of its crop.

        The mask, "h w" or "d h w", may have another size than the image: it is stretched over it.
        """
        device = mask.device if isinstance(mask, torch.Tensor) else None
        marked = np.asarray(mask.detach().cpu() if isinstance(mask, torch.Tensor) else mask) != 0
        sides = self.axes(image_size)[::-1]
        if marked.ndim != len(sides) or 0 in marked.shape:
            axes = "rows and columns" if len(sides) == 2 else "slices, rows and columns"
            raise InputError(f"a mask has {axes}; got shape {marked.shape}")
        sources = [side._replace(n=n).sources() for side, n in zip(sides, marked.shape, strict=True)]
        inside = reduce(np.logical_and.outer, [source >= 0 for source in sources])
        return torch.from_numpy(marked[np.ix_(*sources)] & inside).to(device)

    def normalise(self, pixels: Tensor) -> Tensor:
        """Turn "... c H W" in [0, 1] into model-ready images."""
        mean, std = self._scale(pixels)
        return (pixels - mean) / std

    def from_bytes(self, images: Tensor) -> Tensor:
        """8-bit images "... c H W" -> model-ready."""
        return self.normalise(images.float() / 255)

    def restore(self, images: Tensor) -> Tensor:
        """The inverse of normalise, clipped to [0, 1]."""
        mean, std = self._scale(images)
        return (images * std + mean).clamp(0, 1)

    def _scale(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and deviation, each "c 1 1"; for volumes "c 1 1 1"."""
        # Made on the CPU: a tensor made on the device would wait for all queued work.
        scale = torch.tensor((self.mean, self.std)).to(like.device, non_blocking=True)
        scale = scale.view(*scale.shape, *[1] * len(self.size))
        return scale[0], scale[1]

    def __call__(self, image: Seen) -> Tensor:
        return self.normalise(torch.from_numpy(self.values(image)))


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
            white = (
                2.0 ** (image.bits or (8 if values.dtype.itemsize == 1 else files.bit_depth(int(highest))))
                - 1
            )
        if lowest < 0 or highest > white or values.dtype.kind == "i":
            raise InputError(
                f"its values run from {lowest:g} to {highest:g}; set preprocess.window to a centre and a "
                "width, such as [40, 400], or to 'range'"
            )
        result = values.astype(np.float32) / white
    return np.asarray(result, np.float32)
