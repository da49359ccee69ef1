"""The pictures of a run as the model saw them, so that a report needs nothing but the run folder.

    pictures/NAME.png or .jpg     NAME from the image's id, so that any id makes a valid file name

Pictures with few colours (codes, drawings) stay exact as PNG; the others are JPEG of high quality. Of a
volume three planes are kept side by side, and the file's comment says which.
"""

from __future__ import annotations

import hashlib
import io
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from heatproof.disk import Content, valid_unicode
from heatproof.errors import StoreError
from heatproof.show import Sheet
from heatproof.store.ledger import damaged, plain

FEW_COLOURS = 256
QUALITY = 90
MOST_BYTES, MOST_PIXELS = 1 << 26, 1 << 26
SUFFIXES = (".png", ".jpg")
PLANES = re.compile(r"planes (\d{1,6}(?: \d{1,6}){2})")


class PictureStore:
    """A run's pictures by image id. sealed: returns the SHA-256 that a file must have, None for any."""

    def __init__(self, root: Path, sealed: Callable[[str], str | None] = lambda file: None) -> None:
        self.root, self._sealed = root, sealed

    def path(self, name: str) -> Path | None:
        """The file of an image, where it was kept."""
        stem = file_stem(name)
        return next((file for s in SUFFIXES if (file := self.root / f"{stem}{s}").exists()), None)

    def read(self, name: str) -> bytes | None:
        """PNG or JPEG; None where it was not kept. Raises DamagedError if it is not what was written."""
        path = self.path(name)
        if path is None:
            return None
        with plain(path).open("rb") as file:
            content, sealed = file.read(MOST_BYTES + 1), self._sealed(path.name)
        if sealed is not None and hashlib.sha256(content).hexdigest() != sealed:
            raise damaged(path, "its content is not what was written")
        return _checked(path, content)

    def planes(self, name: str) -> tuple[int, ...] | None:
        """Which planes of a volume its picture shows; None where nothing says so."""
        content = self.read(name)
        if content is None:
            return None
        with Image.open(io.BytesIO(content), formats=("PNG", "JPEG")) as picture:
            note = (
                str(picture.info.get("comment", b""), "ascii", "replace") if picture.format == "JPEG" else ""
            )
            found = PLANES.fullmatch(note or str(picture.info.get("comment", "")))
        return tuple(map(int, found[1].split())) if found else None

    def files(self, name: str, picture: np.ndarray | Sheet) -> dict[Path, Content]:
        """The file of one picture, "H W 3" uint8, and how to write it."""
        content, suffix = encode(*picture) if isinstance(picture, Sheet) else encode(picture)
        return {self.root / f"{file_stem(name)}{suffix}": content}


def encode(pixels: np.ndarray, planes: Sequence[int] = ()) -> tuple[bytes, str]:
    """The picture's file and its suffix; planes: of a volume, to be read back with it."""
    picture = Image.fromarray(pixels)
    out, note = io.BytesIO(), f"planes {' '.join(map(str, planes))}" if planes else ""
    if picture.getcolors(FEW_COLOURS) is not None:
        from PIL.PngImagePlugin import PngInfo

        told = PngInfo()
        if note:
            told.add_text("comment", note)
        picture.save(out, "PNG", pnginfo=told)
        return out.getvalue(), ".png"
    picture.save(out, "JPEG", quality=QUALITY, subsampling=0, comment=note.encode())
    return out.getvalue(), ".jpg"


def _checked(path: Path, content: bytes) -> bytes:
    """The content of a file that is a picture of a sane size: whoever shows it need not be afraid of it."""
    try:
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
