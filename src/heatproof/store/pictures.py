"""The pictures of a run as the model saw them, so that a report needs nothing but the run folder.

    pictures/NAME.png or .jpg     NAME from the image's id, so that any id makes a valid file name

PictureStore with few colours (codes, drawings) stay exact as PNG; the others are JPEG of high quality.
"""

from __future__ import annotations

import hashlib
import io
import math
from pathlib import Path

import numpy as np
from PIL import Image

from heatproof.disk import Content, valid_unicode
from heatproof.errors import StoreError
from heatproof.store.ledger import plain

FEW_COLOURS = 256
QUALITY = 90
MOST_BYTES, MOST_PIXELS = 1 << 26, 1 << 26
SUFFIXES = (".png", ".jpg")


class PictureStore:
    """A run's pictures by image id."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, name: str) -> Path | None:
        """The file of an image, where it was kept."""
        stem = file_stem(name)
        return next((file for s in SUFFIXES if (file := self.root / f"{stem}{s}").exists()), None)

    def read(self, name: str) -> bytes | None:
        """PNG or JPEG; None where the picture was not kept."""
        path = self.path(name)
        return None if path is None else _checked(plain(path))

    def files(self, name: str, pixels: np.ndarray) -> dict[Path, Content]:
        """The file of one picture, "H W 3" uint8, and how to write it."""
        content, suffix = encode(pixels)
        return {self.root / f"{file_stem(name)}{suffix}": content}


def encode(pixels: np.ndarray) -> tuple[bytes, str]:
    """The picture's file and its suffix."""
    picture = Image.fromarray(pixels)
    out = io.BytesIO()
    if picture.getcolors(FEW_COLOURS) is not None:
        picture.save(out, "PNG")
        return out.getvalue(), ".png"
    picture.save(out, "JPEG", quality=QUALITY, subsampling=0)
    return out.getvalue(), ".jpg"


def _checked(path: Path) -> bytes:
    """The content of a file that is a picture of a sane size: whoever shows it need not be afraid of it."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        with Image.open(io.BytesIO(content), formats=("PNG", "JPEG")) as picture:
            if len(content) <= MOST_BYTES and math.prod(picture.size) <= MOST_PIXELS:
                return content
        why = "it is too large"
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning):
        why = "it is no picture of a sane size"
    raise StoreError(f"cannot show {path}: {why}; heatproof verify names all damage")


def file_stem(name: str) -> str:
    """A name for an image's file that is valid whatever its id."""
    return hashlib.sha256(valid_unicode(name).encode()).hexdigest()[:24]
