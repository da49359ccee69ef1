"""A picture file in 8 bits, or one sentence that says why it cannot be read.

EXIF orientation is applied, of an animation the first frame counts, and transparency is ignored, as training
pipelines do; an image that is transparent everywhere is refused. A grey of more than 8 bits is divided by
2^bits - 1, never by its own maximum: pictures of one set must stay comparable. `bits` is what the caller
states, else the smallest of 8, 10, 12, 14 and 16 that holds the picture's values, because scanners write
12-bit data into 16-bit files, which would turn black; a depth below 16 that was found so is logged once.
Colours of 16 bits are cut to their upper 8 by the decoder, so a picture of which that leaves next to nothing
is refused. Floats are fractions of 1.
"""

from __future__ import annotations

import logging
import math
import re
import stat
from collections.abc import Callable, Iterable
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, UnidentifiedImageError

from heatproof.errors import InputError, UnknownNameError

log = logging.getLogger("heatproof.images")

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
DEPTHS = (8, 10, 12, 14, 16)
CUT = re.compile(";16[BLN]")  # what Pillow calls it when it keeps the upper byte of each colour
DIM = 64  # of 256 levels: what the upper byte of 14-bit data stays below
EXAMPLE = "example:"  # before a name: a photograph that comes with scikit-image
EXAMPLES = {
    "cat": "chelsea.png",
    "astronaut": "astronaut.png",
    "coffee": "coffee.png",
    "rocket": "rocket.jpg",
}
NO_FILE = {"d": "a folder", "p": "a pipe", "s": "a socket", "c": "a device", "b": "a device"}

Size = tuple[int, int]  # width, height, as Pillow has it
Box = tuple[float, float, float, float]  # x0, y0, x1, y1


def named_file(path: str | Path) -> Path:
    """The file that is meant: example:cat and its like lie in scikit-image."""
    text = str(path)
    if not text.startswith(EXAMPLE):
        return Path(path)
    name = text.removeprefix(EXAMPLE)
    if name not in EXAMPLES:
        raise UnknownNameError("example", name, EXAMPLES)
    return Path(str(resources.files("skimage.data"))) / EXAMPLES[name]


def picture_reader(bits: int | None = None) -> Callable[[Path | BinaryIO], Image.Image]:
    """`read_image` with a stated bit depth, checked before any picture is read."""
    return partial(read_image, bits=check_bits(bits))


def check_bits(bits: int | None) -> int | None:
    if bits is not None and bits not in range(8, 17):
        raise InputError(f"bits is how many bits a 16-bit grey really has, 8 to 16; got {bits!r}")
    return bits


def check_file(path: Path) -> None:
    """Refuse what is no plain file before it is opened: a pipe would wait for a writer for ever."""
    if "\0" in str(path):
        raise InputError("its path holds a NUL character, which no file name can; correct the path")
    kind = stat.filemode(path.stat().st_mode)[0]
    if kind != "-":
        raise InputError(f"it is {NO_FILE.get(kind, 'something else')}, not a file; name a picture file")


def picture_size(path: Path) -> Size:
    """Width and height of the upright picture, from its header."""
    try:
        check_file(path)
        with Image.open(path, formats=_formats()) as picture:
            width, height = picture.size
            return (height, width) if picture.getexif().get(ORIENTATION, 1) >= 5 else (width, height)
    except Exception as error:
        raise InputError("its size cannot be read") from error


def swaps_axes(path: Path) -> bool:
    """Whether the EXIF orientation of a readable file swaps its width and height."""
    with Image.open(path, formats=_formats()) as picture:
        return bool(picture.getexif().get(ORIENTATION, 1) >= 5)


def read_image(file: Path | BinaryIO, bits: int | None = None) -> Image.Image:
    """A picture file's first frame, upright, as "L" or "RGB". bits: the depth of deep greys, else found.

    The error gives the reason alone, without the file's name, so that it reads the same on every machine.
    """
    try:
        if isinstance(file, Path):
            check_file(file)
        with Image.open(file, formats=_formats()) as picture:
            width, height = picture.size
            if width * height > MAX_PIXELS:
                raise InputError(_too_large(width * height))
            cut = CUT.search(str(picture.tile))
            picture.load()
            seen = eight_bits(_upright(picture), bits).copy()
            if cut and not is_deep(picture) and bits != 16:
                _check_not_dim(seen)
            return seen
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


def is_deep(picture: Image.Image) -> bool:
    return picture.mode.startswith("I") or picture.mode == "F"


def eight_bits(picture: Image.Image, bits: int | None = None) -> Image.Image:
    """Greys as "L", all else as "RGB"; deep greys are scaled, where Pillow would clip them."""
    if picture.mode in ("L", "RGB"):
        return picture
    if is_deep(picture):
        return Image.fromarray(scale_to_bytes(np.asarray(picture), bits))
    if picture.has_transparency_data and picture.convert("RGBA").getchannel("A").getbbox() is None:
        raise InputError("it is fully transparent, so that it shows nothing; give it an opaque background")
    if picture.mode in ("1", "LA", "La"):
        return picture.convert("L")
    if picture.mode == "P" and "transparency" in picture.info:
        picture = picture.convert("RGBA")  # straight to RGB, Pillow warns
    return picture.convert("RGB")


def scale_to_bytes(values: np.ndarray, bits: int | None = None) -> np.ndarray:
    """Integers of up to 16 bits, or fractions of 1, to 8 bits."""
    low, high = values.min(), values.max()
    top = 2 ** (bits or bit_depth(high)) - 1 if values.dtype.kind in "iu" else 1
    if not (low >= 0 and high <= top):
        known = f"{bits} bits hold 0 to {top}" if bits else "8 or 16 bits, or fractions of 1, are understood"
        raise InputError(f"its values run from {low:g} to {high:g}; {known}")
    return np.rint(values * (255 / top)).astype(np.uint8)


def bit_depth(highest: int) -> int:
    """The smallest usual depth that holds a value; 16 where no pixel says anything.

    >>> bit_depth(0), bit_depth(65535)
    (16, 16)
    """
    depth = next((d for d in DEPTHS if highest < 2**d), DEPTHS[-1]) if highest > 0 else DEPTHS[-1]
    if depth < DEPTHS[-1]:
        _say_depth(depth)
    return depth


@cache  # once for a process, not once for a picture
def _say_depth(depth: int) -> None:
    log.warning(
        "16-bit pictures whose values fit into %d bits are read as such (%d is white); set bits to the true "
        "depth, so that all pictures are scaled alike, or to 16 to leave them as dark as they are",
        depth, 2**depth - 1,
    )  # fmt: skip


def _check_not_dim(picture: Image.Image) -> None:
    highest = np.asarray(picture).max()
    if highest < DIM:
        raise InputError(
            f"its 16-bit colours reach only {highest} of 255 in 8 bits, as if they had 14 bits or less; "
            "save it with 8 bits per colour, or set bits to 16 if it is meant to be so dark"
        )


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


def check_box(box: Iterable[float]) -> Box:
    """Four finite numbers that do not run backwards."""
    corners = tuple(float(v) for v in box)
    if len(corners) != 4 or not all(map(math.isfinite, corners)):
        raise InputError(f"a box is four finite numbers x0, y0, x1, y1; got {box_text(corners)}")
    if corners[0] > corners[2] or corners[1] > corners[3]:
        raise InputError(
            f"the box {box_text(corners)} runs backwards; write x0, y0, x1, y1, not x, y, width, height"
        )
    return corners


def box_text(box: Iterable[float]) -> str:
    """Corners as messages show them."""
    return f"({listed_numbers(box)})"


def listed_numbers(numbers: Iterable[float]) -> str:
    return ", ".join(f"{v:g}" for v in numbers)
