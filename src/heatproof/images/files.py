"""Read image and DICOM files as 8-bit Pillow images, or raise InputError with the reason; Rasters.

EXIF orientation is applied, the first frame of an animation is read, and transparency is ignored, as training
pipelines do; an image that is transparent everywhere is refused. Greys of more than 8 bits are divided by
2^bits - 1, never by their own maximum, so that the images of a dataset stay comparable. `bits` is what the
caller states, else the smallest of 8, 10, 12, 14 and 16 that holds the values, because scanners write 12-bit
data into 16-bit files. The decoder cuts 16-bit colours to their upper 8 bits; an image that is nearly black
after that is refused. Floats are fractions of 1.

DICOM values go through the file's rescale slope and intercept (or modality table), then through a window of
centre c and width w to a grey in [0, 1] (DICOM PS3.3, C.11.2.1.2 and C.11.2.1.3):

    LINEAR         (x - (c - 1/2)) / (w - 1) + 1/2        (the standard's default)
    LINEAR_EXACT   (x - c) / w + 1/2
    SIGMOID        1 / (1 + exp(-4 (x - c) / w))

clipped, and inverted for MONOCHROME1. The window is the one given, else the file's first, else the file's VOI
table, else the range of the values. Of several frames the first is read.

A Raster holds values as they were measured, of an image or volume with any number of channels.
"""

from __future__ import annotations

import logging
import math
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from heatproof.errors import HeatproofError, InputError, UnknownNameError, first_line, need

log = logging.getLogger("heatproof.images")

MAX_PIXELS = 178_956_970  # Pillow's own limit: half a gigabyte of RGB
# Formats of plain pixels: others can run programs (EPS) or match any bytes (TGA).
FORMATS = ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "JPEG2000", "AVIF")
ORIENTATION = 0x0112  # of EXIF
DEPTHS = (8, 10, 12, 14, 16)
CUT = re.compile(";16[BLN]")  # Pillow's raw modes that keep the upper byte of each colour
DEEP = ("I", "F")  # how modes of more than 8 bits begin
DIM = 64  # of 256 levels: the upper byte of 14-bit data stays below it
EXAMPLE = "example:"  # prefix of the photographs that come with scikit-image
EXAMPLES = {
    "cat": "chelsea.png", "astronaut": "astronaut.png", "coffee": "coffee.png", "rocket": "rocket.jpg",
}  # fmt: skip
TOO_LARGE = f"its header declares {{}} than the {MAX_PIXELS:,} that are safe to decode; make it smaller"
FILE_KINDS = {"d": "a folder", "p": "a pipe", "s": "a socket", "c": "a device", "b": "a device"}
DICOM_SUFFIXES = (".dcm", ".dicom", ".ima")
DICOM_MARK, DICOM_PREAMBLE = b"DICM", 128

Size = tuple[int, int]  # width, height, in Pillow's order
Box = tuple[float, float, float, float]  # x0, y0, x1, y1
Spacing: TypeAlias = "tuple[float, ...] | None"  # millimetres from voxel to voxel


@dataclass(frozen=True)
class Raster:
    """Values as they were measured, "c H W" or "c D H W"."""

    values: np.ndarray
    bits: int | None = None  # the depth of whole numbers, where it is known
    spacing: Spacing = None  # of a volume, along depth, height and width, where its file states it

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


def named_file(path: str | Path) -> Path:
    """The path itself, or the file of the scikit-image photograph for example:NAME."""
    text = str(path)
    if not text.startswith(EXAMPLE):
        return Path(path)
    name = text.removeprefix(EXAMPLE)
    if name not in EXAMPLES:
        raise UnknownNameError("example", name, EXAMPLES)
    return Path(str(resources.files("skimage.data"))) / EXAMPLES[name]


def open_image(path: str | Path, bits: int | None = None) -> Image.Image:
    """Read an image or DICOM file completely.

    Args:
        path: a file, or a photograph that comes with heatproof: example:cat, astronaut, coffee or rocket.
        bits: depth of 16-bit grey values, if it is known.

    Raises:
        InputError: if the file does not exist or cannot be read completely.

    Example:
        >>> open_image("example:cat").mode
        'RGB'
    """
    file = named_file(path)
    try:
        return read_dicom(file) if is_dicom_file(file) else picture_reader(bits)(file)
    except InputError as error:
        if isinstance(error.__context__, FileNotFoundError):
            raise InputError(f"no such image: {path}") from None
        raise InputError(f"cannot read {path} as an image: {error}") from error


@contextmanager
def reading(damaged: str) -> Iterator[None]:
    """Turn any exception of a decoder into an InputError.

    The message does not name the file, so that it is the same on every machine. damaged: the message if the
    content is at fault.
    """
    try:
        yield
    except HeatproofError:
        raise
    except FileNotFoundError:
        raise InputError("there is no such file") from None
    except PermissionError:
        raise InputError("there is no permission to read the file") from None
    except MemoryError:
        raise InputError("there is not enough memory to decode it") from None
    except Exception as error:  # decoders fail in their own ways on broken bytes
        if isinstance(error, OSError) and error.strerror:
            raise InputError(f"the file cannot be read: {error.strerror}") from error
        raise InputError(f"{damaged}: {first_line(error)}") from error


def check_file(path: Path) -> None:
    """Raise InputError unless it is a regular file: opening a pipe would block."""
    if "\0" in str(path):
        raise InputError("its path holds a NUL character, which no file name can; correct the path")
    kind = stat.filemode(path.stat().st_mode)[0]
    if kind != "-":
        raise InputError(f"it is {FILE_KINDS.get(kind, 'something else')}, not a file; name an image file")


@cache
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


@cache
def suffixes() -> frozenset[str]:
    """File endings of the formats that can be read."""
    return frozenset(end for end, name in Image.registered_extensions().items() if name in _formats())


def is_picture(file: Path) -> bool:
    return file.suffix.lower() in suffixes()


def picture_size(path: Path) -> Size:
    """Width and height of the upright image, from its header."""
    try:
        check_file(path)
        with Image.open(path, formats=_formats()) as image:
            width, height = image.size
            return (height, width) if image.getexif().get(ORIENTATION, 1) >= 5 else (width, height)
    except Exception as error:
        raise InputError("its size cannot be read") from error


def quantisation(path: Path) -> tuple[float, float]:
    """Means of the luminance and colour quantisation tables of a readable JPEG file; 0 for other files."""
    with Image.open(path, formats=_formats()) as image:
        means = [sum(table) / len(table) for table in getattr(image, "quantization", {}).values()]
    return (means[0], means[-1]) if means else (0.0, 0.0)


def swaps_axes(path: Path) -> bool:
    """Whether the EXIF orientation of a readable file swaps its width and height."""
    with Image.open(path, formats=_formats()) as image:
        return bool(image.getexif().get(ORIENTATION, 1) >= 5)


def picture_reader(bits: int | None = None) -> Callable[[Path | BinaryIO], Image.Image]:
    """`read_image` with a stated bit depth, validated before any image is read."""
    return partial(read_image, bits=check_bits(bits))


def check_bits(bits: int | None) -> int | None:
    if bits is not None and bits not in range(8, 17):
        raise InputError(f"bits is how many bits a 16-bit grey really has, 8 to 16; got {bits!r}")
    return bits


def read_image(file: Path | BinaryIO, bits: int | None = None) -> Image.Image:
    """The first frame of an image file, upright, as "L" or "RGB". bits: the depth of deep greys."""
    with reading("the file is damaged"):
        if isinstance(file, Path):
            check_file(file)
        try:
            with Image.open(file, formats=_formats()) as image:
                width, height = image.size
                if width * height > MAX_PIXELS:
                    raise InputError(TOO_LARGE.format(f"{width * height:,} pixels, more"))
                cut = not image.mode.startswith(DEEP) and CUT.search(str(image.tile))
                image.load()
                with suppress(Exception):  # the pixels are usable despite a broken EXIF block
                    ImageOps.exif_transpose(image, in_place=True)
                pixels = eight_bits(image, bits).copy()
                if cut and bits != 16 and (top := np.asarray(pixels).max()) < DIM:
                    raise InputError(
                        f"its 16-bit colours reach only {top} of 255 in 8 bits, as if they had 14 bits or "
                        "less; save it with 8 bits per colour, or set bits to 16 if it is meant to be so dark"
                    )
                return pixels
        except Image.DecompressionBombError:
            raise InputError(TOO_LARGE.format("more pixels")) from None
        except UnidentifiedImageError:
            if (file.stat().st_size if isinstance(file, Path) else file.seek(0, 2)) == 0:
                raise InputError("the file is empty") from None
            formats = ", ".join(_formats())
            raise InputError(f"its content is not a readable image ({formats})") from None


def eight_bits(image: Image.Image, bits: int | None = None) -> Image.Image:
    """Greys as "L", all else as "RGB"; deep greys are scaled, where Pillow would clip them."""
    if image.mode in ("L", "RGB"):
        return image
    if image.mode.startswith(DEEP):
        return Image.fromarray(scale_to_bytes(np.asarray(image), bits))
    if image.has_transparency_data and image.convert("RGBA").getchannel("A").getbbox() is None:
        raise InputError("it is fully transparent, so that it shows nothing; give it an opaque background")
    if image.mode in ("1", "LA", "La"):
        return image.convert("L")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # straight to RGB, Pillow warns
    return image.convert("RGB")


def scale_to_bytes(values: np.ndarray, bits: int | None = None) -> np.ndarray:
    """Integers of up to 16 bits, or fractions of 1, to 8 bits."""
    low, high = values.min(), values.max()
    top = 2 ** (bits or bit_depth(high)) - 1 if values.dtype.kind in "iu" else 1
    if not (low >= 0 and high <= top):
        known = f"{bits} bits hold 0 to {top}" if bits else "8 or 16 bits, or fractions of 1, are understood"
        raise InputError(f"its values run from {low:g} to {high:g}; {known}")
    return np.rint(values * (255 / top)).astype(np.uint8)


def bit_depth(highest: int) -> int:
    """The smallest usual depth that holds a value; 16 where all values are 0."""
    depth = next((d for d in DEPTHS if highest < 2**d), DEPTHS[-1]) if highest > 0 else DEPTHS[-1]
    if depth < DEPTHS[-1]:
        _log_depth(depth)
    return depth


@cache  # once per process, not once per image
def _log_depth(depth: int) -> None:
    log.warning(
        "16-bit images whose values fit into %d bits are read as such (%d is white); set bits to the true "
        "depth, so that all images are scaled alike, or to 16 to leave them as dark as they are",
        depth, 2**depth - 1,
    )  # fmt: skip


def is_dicom_name(file: Path) -> bool:
    return file.suffix.lower() in ("", *DICOM_SUFFIXES) and file.name != "DICOMDIR"


def is_dicom_file(path: Path) -> bool:
    """Whether the content is DICOM; False for a file that cannot be read, which reading it reports."""
    try:
        check_file(path)
        with path.open("rb") as file:
            return file.read(DICOM_PREAMBLE + len(DICOM_MARK))[DICOM_PREAMBLE:] == DICOM_MARK
    except (OSError, InputError):
        return False


def read_dicom(path: Path, window: tuple[float, float] | None = None) -> Image.Image:
    """The first frame in 8 bits, "L" or "RGB"."""
    pydicom = need("pydicom", "dicom")
    pixels = need("pydicom.pixels", "dicom")
    with reading("the DICOM file cannot be decoded"):
        check_file(path)
        try:
            file = pydicom.dcmread(path)
        except pydicom.errors.InvalidDicomError:
            raise InputError("its content is not DICOM") from None
        if int(file.Rows) * int(file.Columns) > MAX_PIXELS:
            raise InputError(f"it has more than the {MAX_PIXELS:,} pixels that are safe to decode")
        values = pixels.pixel_array(file, index=0)
        kind = str(file.PhotometricInterpretation)
        if values.ndim == 3 and values.shape[2] == 3 and values.dtype == np.uint8:
            return Image.fromarray(values)
        if not kind.startswith("MONOCHROME"):
            raise InputError(f"its pixels are {kind}, which is not supported; convert them to RGB or grey")
        grey = _windowed(pixels, file, values, window)
        return Image.fromarray(np.rint((1 - grey if kind == "MONOCHROME1" else grey) * 255).astype(np.uint8))


def _windowed(pixels: Any, file: Any, values: np.ndarray, window: tuple[float, float] | None) -> np.ndarray:
    """Greys in [0, 1]."""
    own = file.get("WindowWidth") is not None
    if window is None and not own and "VOILUTSequence" in file:
        table = file.VOILUTSequence[0]
        greys = pixels.apply_voi(pixels.apply_modality_lut(values, file), file)
        return np.asarray(greys / (2 ** table.LUTDescriptor[2] - 1))
    x = np.asarray(pixels.apply_modality_lut(values, file), dtype=np.float64)
    shape = str(file.get("VOILUTFunction", "LINEAR") if window is None else "LINEAR")
    if window is None and own:  # each may have several values, of which the first is to be shown first
        centre, width = (float(np.ravel(value)[0]) for value in (file.WindowCenter, file.WindowWidth))
    elif window is not None:
        centre, width = window
    else:
        low, high = x.min(), x.max()
        return (x - low) / (high - low) if high > low else np.zeros_like(x)
    if shape == "SIGMOID":
        return 1 / (1 + np.exp(np.clip(-4 * (x - centre) / width, -700, 700)))
    if shape == "LINEAR_EXACT":
        return np.clip((x - centre) / width + 0.5, 0, 1)
    if width <= 1:  # the standard's formula becomes a step here
        return (x > centre - 0.5).astype(np.float64)
    return np.clip((x - (centre - 0.5)) / (width - 1) + 0.5, 0, 1)


def check_box(box: Iterable[float]) -> Box:
    """Raise InputError unless a box is four finite numbers in ascending order."""
    corners = tuple(float(v) for v in box)
    if len(corners) != 4 or not all(map(math.isfinite, corners)):
        raise InputError(f"a box is four finite numbers x0, y0, x1, y1; got ({listed_numbers(corners)})")
    if corners[0] > corners[2] or corners[1] > corners[3]:
        raise InputError(
            f"the box ({listed_numbers(corners)}) runs backwards; write x0, y0, x1, y1, "
            "not x, y, width, height"
        )
    return corners


def listed_numbers(numbers: Iterable[float]) -> str:
    return ", ".join(f"{v:g}" for v in numbers)
