"""What kind of source a path is, seen from its files: class folders, CSV, box files, DICOM, NIfTI, arrays."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from heatproof.errors import InputError
from heatproof.images.csv import CORNERS, SEPARATORS
from heatproof.images.dicom import is_dicom_file, is_dicom_name
from heatproof.images.folder import is_picture, walk
from heatproof.images.nifti import is_nifti_name

FILES = {".csv": "csv", ".npz": "npz"}
HELD_OUT = ("test", "testing", "val", "valid", "validation")  # the best first
SPLITS = {*HELD_OUT, "train", "training"}


class Guess(NamedTuple):
    """A kind of source, its path, what was seen there, as half a sentence, and options of the kind."""

    kind: str
    path: Path
    seen: str
    options: Mapping[str, Any] = {}


def guess_source(path: str | Path) -> Guess:
    """How the pictures at a path are listed; of folders for training and testing, those for testing."""
    root = Path(path).expanduser()
    if root.is_file():
        if kind := FILES.get(root.suffix.lower()):
            return _list(root) if kind == "csv" else Guess(kind, root, "arrays of pictures")
        raise InputError(
            f"{path} is one file; name a folder of pictures, or a .csv or .npz file that lists them"
        )
    if not root.is_dir():
        raise InputError(f"there is no folder or file {path}; name a folder of pictures")
    files = list(walk(root))
    lists = [file for file in files if file.parent == root and _lists_pictures(file)]
    if any(file.suffix.lower() == ".xml" for file in files) or (root / "boxes.csv").exists():
        return Guess("imagenet", root, "pictures with box files")
    if len(lists) == 1:
        return _list(lists[0])
    if any(map(is_picture, files)):
        return _folder(root, [file.relative_to(root) for file in files if is_picture(file)])
    if any(map(is_nifti_name, files)):
        return Guess("nifti", root, "NIfTI volumes")
    if any(is_dicom_name(file) and is_dicom_file(file) for file in files):
        return Guess("dicom", root, "DICOM files")
    raise InputError(f"there is no picture in {path}; name the folder that holds them")


def _folder(root: Path, files: list[Path]) -> Guess:
    tops = {file.parts[0] for file in files if len(file.parts) > 1}
    split = next((top for word in HELD_OUT for top in tops if top.lower() == word), None)
    if split and len(tops) > 1 and all(top.lower() in SPLITS for top in tops):
        return Guess("folder", root / split, f"the folder {split} beside those for training")
    return Guess("folder", root, "a folder for each class" if tops else "pictures without class folders")


def _list(file: Path) -> Guess:
    """A CSV file, with findings where columns of 0 and 1 or cells of several names say so."""
    seen, known = "a CSV file that lists pictures", {"path", "label", "width", "height", *CORNERS}
    try:
        with file.open(newline="", encoding="utf-8-sig") as text:
            rows = list(csv.DictReader(text))
    except (OSError, UnicodeDecodeError, csv.Error):  # whoever reads it will say what is wrong
        return Guess("csv", file, seen)
    if rows and is_nifti_name(Path(rows[0].get("path") or "")):
        return Guess("nifti", file, "a CSV file that lists NIfTI volumes")
    columns = [name for name in (rows[0] if rows else ()) if name and name not in known]
    columns = [name for name in columns if {str(row[name]).strip() for row in rows} == {"0", "1"}]
    if columns:
        told = f"{seen}, {len(columns)} finding{'s' * (len(columns) != 1)} each"
        return Guess("csv", file, told, {"label_columns": columns})
    if any(mark in (row.get("label") or "") for row in rows for mark in SEPARATORS):
        return Guess("csv", file, f"{seen}, several findings each", {"multilabel": True})
    return Guess("csv", file, seen)


def _lists_pictures(file: Path) -> bool:
    """Whether it is a CSV file with a column of paths."""
    if file.suffix.lower() != ".csv":
        return False
    with (
        suppress(OSError, UnicodeDecodeError, csv.Error),
        file.open(newline="", encoding="utf-8-sig") as text,
    ):
        return "path" in next(csv.reader(text), [])
    return False
