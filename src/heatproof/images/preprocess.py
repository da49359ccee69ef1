"""From a picture file to the tensor a model was trained on, with boxes and masks carried along.

A picture of n columns is resized to n' and cropped from column `left` on. Column j of the crop then shows, at
its centre, the picture's column

    i(j) = floor((j + left + 1/2) n / n')

and rows likewise. A carried mask reads exactly these pixels (nearest). A carried box covers the columns with
x0 <= i(j) <= x1: it is the tight box of the carried mask of the box, to the pixel.

Boxes are (x0, y0, x1, y1) in pixel indices from 0, both corners inside, as everywhere in this project. Pixels
of the crop that lie outside a small picture are black and belong to no box and no mask.

Files are read in 8 bits: 16-bit greys keep their whole range, EXIF orientation is applied, of an animation
the first frame counts, and transparency is ignored, as training pipelines do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from heatproof.errors import InputError

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MAX_PIXELS = 178_956_970  # where Pillow too stops: half a gigabyte of RGB
# Formats of plain pixels: others can run programs (EPS) or match any bytes (TGA).
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "JPEG2000", "AVIF")
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
ORIENTATION = 0x0112
SMALLEST_BOX = 2  # pixels along each side; the metrics take a thinner box for an empty one

Box = tuple[float, float, float, float]
Size = tuple[int, int]  # width, height, as Pillow has it


class Axis(NamedTuple):
    """One side of a picture on its way to the crop: n pixels become `scaled`, of which `size` are kept."""

    n: int
    scaled: int
    first: int  # of the kept pixels; negative where the crop is larger than the picture
    size: int

    def sources(self) -> np.ndarray:
        """The picture's pixel under each pixel of the crop; -1 where there is none."""
        at = np.arange(self.first, self.first + self.size)
        inside = (at >= 0) & (at < self.scaled)
        return np.where(inside, (2 * at + 1) * self.n // (2 * self.scaled), -1)

    def span(self, low: float, high: float) -> tuple[int, int]:
        """First and last pixel of the crop that show pixels low to high; backwards where there is none."""
        start, stop = max(math.ceil(low), 0), min(math.floor(high), self.n - 1) + 1
        first, end = (-((self.n - 2 * self.scaled * edge) // (2 * self.n)) for edge in (start, stop))
        return max(first - self.first, 0), min(end - 1 - self.first, self.size - 1)


class Carried(NamedTuple):
    """Boxes in the crop's pixels, and why each of the others is gone."""

    boxes: tuple[Box, ...]
    lost: tuple[str, ...] = ()


@dataclass(frozen=True)
class Preprocess:
    """Resize the shorter side, crop the centre, scale to [0, 1], subtract the mean, divide by the std."""

    size: tuple[int, int] = (224, 224)  # height, width of what the model sees
    resize: int | tuple[int, int] = 256  # shorter side before the crop, or an exact height and width
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD
    interpolation: str = "bilinear"

    @property
    def channels(self) -> int:
        return len(self.mean)

    def axes(self, picture: Size) -> tuple[Axis, Axis]:
        """What happens to the columns and to the rows of a picture of this width and height."""
        if isinstance(self.resize, int):
            short = min(picture)
            scaled = [max(1, int(side * self.resize / short)) for side in picture]
        else:
            scaled = [self.resize[1], self.resize[0]]
        if math.prod(scaled) > MAX_PIXELS:
            raise InputError(
                f"resized to {scaled[0]}x{scaled[1]} it would have more than {MAX_PIXELS:,} pixels; "
                f"its sides, {picture[0]} and {picture[1]}, differ too much"
            )
        kept = (self.size[1], self.size[0])
        columns, rows = (
            Axis(n, long, round((long - size) / 2), size)
            for n, long, size in zip(picture, scaled, kept, strict=True)
        )
        return columns, rows

    def crop(self, picture: Image.Image) -> Image.Image:
        """The 8-bit picture the model sees, after resize and centre crop."""
        picture = eight_bits(picture).convert("L" if self.channels == 1 else "RGB")
        x, y = self.axes(picture.size)
        if (x.scaled, y.scaled) != picture.size:
            picture = picture.resize((x.scaled, y.scaled), Image.Resampling[self.interpolation.upper()])
        return picture.crop((x.first, y.first, x.first + x.size, y.first + y.size))

    def carry_boxes(self, boxes: Iterable[Box], picture: Size, frame: Size | None = None) -> Carried:
        """Boxes of a picture of this width and height, in the pixels of its crop.

        `frame` is the width and height of the picture the boxes were drawn on, where the file has since
        been resized. A box is clipped to the crop; one that lies outside it, or shrinks to a line, is lost.
        """
        kept, lost = [], []
        x, y = self.axes(picture)
        if frame is not None:
            x, y = x._replace(n=frame[0]), y._replace(n=frame[1])
        for box in boxes:
            x0, y0, x1, y1 = check_box(box)
            (left, right), (top, bottom) = x.span(x0, x1), y.span(y0, y1)
            if min(right - left, bottom - top) + 1 >= SMALLEST_BOX:
                kept.append((float(left), float(top), float(right), float(bottom)))
            else:
                lost.append(
                    f"the box {_shown(box)} leaves less than {SMALLEST_BOX}x{SMALLEST_BOX} pixels "
                    f"in the {x.size}x{y.size} crop that the model sees"
                )
        return Carried(tuple(kept), tuple(lost))

    def carry_mask(self, mask: Any, picture: Size) -> Tensor:
        """A mask of a picture of this width and height, as "H W" bool in the pixels of its crop.

        The mask, "h w", may have another size than the picture: it is stretched over it.
        """
        device = mask.device if isinstance(mask, Tensor) else None
        marked = np.asarray(mask.detach().cpu() if isinstance(mask, Tensor) else mask) != 0
        if marked.ndim != 2 or 0 in marked.shape:
            raise InputError(f"a mask has rows and columns; got shape {marked.shape}")
        x, y = self.axes(picture)
        columns, rows = x._replace(n=marked.shape[1]).sources(), y._replace(n=marked.shape[0]).sources()
        seen = marked[np.ix_(rows, columns)]
        seen[rows < 0], seen[:, columns < 0] = False, False
        return torch.from_numpy(seen).to(device)

    def normalise(self, pixels: Tensor) -> Tensor:
        """ "... c H W" in [0, 1] -> model-ready."""
        mean = torch.tensor(self.mean, device=pixels.device).view(-1, 1, 1)
        std = torch.tensor(self.std, device=pixels.device).view(-1, 1, 1)
        return (pixels - mean) / std

    def restore(self, images: Tensor) -> Tensor:
        """The inverse of normalise, clipped to [0, 1]."""
        mean = torch.tensor(self.mean, device=images.device).view(-1, 1, 1)
        std = torch.tensor(self.std, device=images.device).view(-1, 1, 1)
        return (images * std + mean).clamp(0, 1)

    def __call__(self, picture: Image.Image) -> Tensor:
        return self.normalise(to_tensor(self.crop(picture)))


def check_box(box: Iterable[float]) -> Box:
    """Four finite numbers that do not run backwards."""
    corners = tuple(float(v) for v in box)
    if len(corners) != 4 or not all(map(math.isfinite, corners)):
        raise InputError(f"a box is four finite numbers x0, y0, x1, y1; got {_shown(corners)}")
    if corners[0] > corners[2] or corners[1] > corners[3]:
        raise InputError(
            f"the box {_shown(corners)} runs backwards; write x0, y0, x1, y1, not x, y, width, height"
        )
    return corners


def _shown(box: Iterable[float]) -> str:
    return f"({', '.join(f'{v:g}' for v in box)})"


def to_tensor(picture: Image.Image) -> Tensor:
    """ "c H W" in [0, 1]."""
    array = np.asarray(picture, dtype=np.float32) / 255
    return torch.from_numpy(array if array.ndim == 3 else array[..., None]).permute(2, 0, 1)


def open_image(path: str | Path) -> Image.Image:
    """Read a picture completely, or say in one sentence why that is not possible."""
    try:
        return read_image(Path(path))
    except InputError as error:
        if isinstance(error.__context__, FileNotFoundError):
            raise InputError(f"no such image: {path}") from None
        raise InputError(f"cannot read {path} as an image: {error}") from error


def read_image(file: Path | BinaryIO) -> Image.Image:
    """A picture file's first frame, upright, as "L" or "RGB".

    The error gives the reason alone, without the file's name, so that it reads the same on every machine.
    """
    try:
        with Image.open(file, formats=_formats()) as picture:
            width, height = picture.size
            if width * height > MAX_PIXELS:
                raise InputError(_too_large(width * height))
            picture.load()
            return eight_bits(_upright(picture)).copy()
    except InputError:
        raise
    except Image.DecompressionBombError:
        raise InputError(_too_large()) from None
    except UnidentifiedImageError:
        if _is_empty(file):
            raise InputError("the file is empty") from None
        raise InputError(f"its content is no picture that can be read ({', '.join(_formats())})") from None
    except FileNotFoundError:
        raise InputError("there is no such file") from None
    except PermissionError:
        raise InputError("there is no permission to read the file") from None
    except MemoryError:
        raise InputError("there is not enough memory to decode it") from None
    except Exception as error:  # decoders fail in their own ways on broken bytes
        if isinstance(error, OSError) and error.strerror:
            raise InputError(f"the file cannot be read: {error.strerror}") from error
        detail = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"the file is damaged: {detail}") from error


def eight_bits(picture: Image.Image) -> Image.Image:
    """Greys as "L", all else as "RGB"; deep greys are scaled, where Pillow would clip them."""
    if picture.mode in ("L", "RGB"):
        return picture
    if picture.mode.startswith("I") or picture.mode == "F":
        return Image.fromarray(scale_to_bytes(np.asarray(picture)))
    if picture.mode in ("1", "LA", "La"):
        return picture.convert("L")
    if picture.mode == "P" and "transparency" in picture.info:
        picture = picture.convert("RGBA")  # straight to RGB, Pillow warns
    return picture.convert("RGB")


def scale_to_bytes(values: np.ndarray) -> np.ndarray:
    """Integers of 16 bits, or fractions of 1, to 8 bits."""
    top = 65535 if values.dtype.kind in "iu" else 1
    low, high = values.min(), values.max()
    if not (low >= 0 and high <= top):
        raise InputError(
            f"its values run from {low:g} to {high:g}; 8 or 16 bits, or fractions of 1, are understood"
        )
    return np.rint(values * (255 / top)).astype(np.uint8)


def _upright(picture: Image.Image) -> Image.Image:
    try:
        turn = UPRIGHT.get(picture.getexif().get(ORIENTATION, 1))
    except Exception:  # a broken EXIF block does not spoil the pixels
        return picture
    return picture if turn is None else picture.transpose(turn)


@cache
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


@cache
def suffixes() -> frozenset[str]:
    """File endings of the formats that can be read."""
    known = _formats()
    return frozenset(end for end, name in Image.registered_extensions().items() if name in known)


def _is_empty(file: Path | BinaryIO) -> bool:
    return file.stat().st_size == 0 if isinstance(file, Path) else file.seek(0, 2) == 0


def _too_large(pixels: int | None = None) -> str:
    asks = "more pixels" if pixels is None else f"{pixels:,} pixels, more"
    return f"its header asks for {asks} than the {MAX_PIXELS:,} that are safe to decode; make it smaller"
