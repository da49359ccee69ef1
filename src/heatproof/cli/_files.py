"""Files the commands read and write; what goes wrong is one sentence."""

from __future__ import annotations

import glob
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heatproof.errors import InputError

if TYPE_CHECKING:
    from PIL import Image


def find_images(given: Sequence[str]) -> list[Path]:
    """The files that are meant: a folder means the pictures in it, a pattern the files that match."""
    from heatproof.images.arrays import is_nifti_name
    from heatproof.images.files import DICOM_SUFFIXES, named_file, suffixes

    found: list[Path] = []
    for text in given:
        path = named_file(text).expanduser()
        if path.is_dir():
            known = suffixes() | set(DICOM_SUFFIXES)
            matches = sorted(p for p in path.iterdir() if p.suffix.lower() in known or is_nifti_name(p))
        elif not path.exists() and glob.has_magic(text):
            matches = sorted(p for p in map(Path, glob.glob(str(path), recursive=True)) if p.is_file())
        else:
            matches = [path]  # a file that does not exist is reported like one that cannot be read
        if not matches:
            raise InputError(f"no image in {text!r}; name image files, a folder of them or a quoted pattern")
        found += matches
    return list(dict.fromkeys(found))


def unique_names(paths: Sequence[Path]) -> list[str]:
    """A name for each file's pictures; files that would share one are told apart by a number."""
    from heatproof.images.files import EXAMPLES, named_file

    examples = {named_file(f"example:{name}"): name for name in EXAMPLES}
    seen: Counter[str] = Counter()
    names = []
    for path in paths:
        stem = examples.get(path, path.stem)
        seen[stem] += 1
        names.append(stem if seen[stem] == 1 else f"{stem}-{seen[stem]}")
    return names


def file_part(method: str) -> str:
    """A method as part of a file's name.

    >>> file_part("lime(samples=200, segments='slic')")
    'lime_samples=200_segments=slic'
    """
    return re.sub(r"[^\w+.=-]+", "_", re.sub("['\"]", "", method)).strip("_")


def save(picture: Image.Image, path: Path) -> Path:
    try:
        picture.save(path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {path}: {error.strerror}") from error


def read_names(path: Path) -> list[str]:
    try:
        return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read class names from {path}: {error}") from error


def numbers(text: str) -> Any:
    """Numbers with commas between them; of anything else, the text."""
    try:
        return tuple(float(number) for number in text.split(","))
    except ValueError:
        return text
