"""Preprocessing: from an image to the input of a model, with boxes and masks transformed alike.

An image of n columns is resized to n' and cropped from column `left` on. The centre of column j of the crop
lies in the image's column

    i(j) = floor((j + left + 1/2) n / n')

and rows likewise. A carried mask reads exactly these pixels (nearest). A carried box covers the columns with
x0 <= i(j) <= x1: it is the tight box of the carried mask of the box, to the pixel. Boxes are (x0, y0, x1, y1)
in pixel indices from 0, both corners inside. Pixels of the crop outside a small image are black and belong to
no box and no mask.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from heatproof.errors import InputError
from heatproof.images.files import MAX_PIXELS, Box, Size, check_box, eight_bits, listed_numbers
from heatproof.images.volumes import (
    Raster,
    Seen,
    Spacing,
    Window,
    along_each_axis,
    check_spacing,
    check_window,
    fractions,
    resize_matrix,
)

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


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
        check_window(self.window)
        check_spacing(self.spacing, self.size)

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
            raise InputError(
                "preprocess.resize is one number or a height and a width, and a depth first of volumes"
            )
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
                "nothing says how large its voxels are, which preprocess.spacing needs; leave it out, or "
                "give NIfTI files or DICOM series"
            )
        sides = zip(image.size[::-1], own, self.spacing, strict=True)
        return replace(
            self, resize=tuple(max(1, round(n * mm / wanted)) for n, mm, wanted in sides), spacing=None
        )

    def axes(self, image_size: tuple[int, ...]) -> tuple[Side, ...]:
        """Resize and crop of columns, rows (and slices) of an image of this width and height (and depth)."""
        if len(image_size) != len(self.size):
            kind = "a picture" if len(image_size) == 2 else "a volume"
            wanted = "pictures" if len(self.size) == 2 else "volumes"
            raise InputError(
                f"it is {kind}, but the model takes {wanted}; set preprocess.size to what it takes"
            )
        if isinstance(self.resize, int):
            scaled = [max(1, int(side * self.resize / min(image_size))) for side in image_size]
        else:
            scaled = list(self.resize[::-1])
        if math.prod(scaled) > MAX_PIXELS:
            raise InputError(
                f"resized to {'x'.join(map(str, scaled))} it would have more than {MAX_PIXELS:,} pixels; "
                f"its sides, {' and '.join(map(str, image_size))}, differ too much"
            )
        sides = zip(image_size, scaled, self.size[::-1], strict=True)
        return tuple(Side(n, long, round((long - size) / 2), size) for n, long, size in sides)

    def crop(self, image: Image.Image) -> Image.Image:
        """The 8-bit image the model sees, after resize and centre crop."""
        if self.window is not None:
            raise InputError(
                "preprocess.window needs values as they were measured, and this is an 8-bit picture; read it "
                "as kind 'arrays', 'nifti' or 'dicom-series', or give a dicom source its options.window"
            )
        self.fitted(image)  # which refuses images where a spacing is set
        image = eight_bits(image).convert("L" if self.channels == 1 else "RGB")
        x, y = self.axes(image.size)
        if (x.scaled, y.scaled) != image.size:
            image = image.resize((x.scaled, y.scaled), Image.Resampling[self.interpolation.upper()])
        return image.crop((x.first, y.first, x.first + x.size, y.first + y.size))

    def values(self, image: Seen) -> np.ndarray:
        """Array "c H W" or "c D H W" in [0, 1], after resize and centre crop."""
        if not isinstance(image, Raster):
            return to_tensor(self.crop(image)).numpy()
        sides = self.fitted(image).axes(image.size)
        values = fractions(image, self.window)
        if len(values) not in (1, self.channels):
            raise InputError(
                f"it has {len(values)} channels, but the model takes {self.channels}; say with axes which "
                "axis they are, or wrap the network to make its channels from these"
            )
        matrices = [resize_matrix(*side, self.interpolation) for side in sides[::-1]]
        resized = along_each_axis(values, matrices).clip(0, 1)  # a cubic filter overshoots
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
                raise InputError("boxes are for pictures; mark the object of a volume by a mask")
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


def to_tensor(image: Image.Image) -> Tensor:
    """Tensor "c H W" in [0, 1]."""
    array = np.asarray(image, dtype=np.float32) / 255
    return torch.from_numpy(array if array.ndim == 3 else array[..., None]).permute(2, 0, 1)
