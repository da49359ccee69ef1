"""Kinds of sources by their names in a study, and recognition of the kind from a path."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from heatproof.errors import InputError, UnknownNameError, counted, did_you_mean
from heatproof.images import arrays, file_sources
from heatproof.images.arrays import is_nifti_name
from heatproof.images.files import is_dicom_file, is_dicom_name, is_picture
from heatproof.images.findings import SEPARATORS
from heatproof.images.source import Source, select

SOURCES: dict[str, Callable[..., Source]] = {
    "folder": file_sources.open_folder, "csv": file_sources.open_csv, "imagenet": file_sources.open_imagenet,
    "npz": arrays.open_npz, "hf": file_sources.open_hf, "dicom": file_sources.open_dicom,
    "dicom-series": arrays.open_series, "nifti": arrays.open_nifti, "arrays": arrays.open_arrays,
    "memory": arrays.open_memory,
}  # fmt: skip
HELD_OUT = ("test", "testing", "val", "valid", "validation")  # in order of preference
SPLITS = {*HELD_OUT, "train", "training"}


def source_options(kind: str) -> dict[str, Any]:
    """Options of a kind of source with their defaults: its own, then the filters of `select`.

    Args:
        kind: as for open_source.

    Example:
        >>> source_options("folder")["limit"] is None
        True
    """
    if kind not in SOURCES:
        raise UnknownNameError("kind of source", kind, SOURCES)
    return _options(SOURCES[kind]) | _options(select)


def open_source(kind: str, path: Any, **options: Any) -> Source:
    """Open a dataset and filter its images.

    Args:
        kind: folder, csv, imagenet, npz, hf, dicom, dicom-series, nifti, arrays or memory.
        path: a file or folder; for memory, the images.
        options: those of the kind (see its open_ function) and the filters of `select`.

    Raises:
        InputError: if the dataset cannot be read, an option is unknown, or no image is left.

    Example:
        >>> import numpy as np
        >>> len(open_source("memory", np.zeros((9, 8, 8), np.uint8), limit=4))
        4
    """
    known = source_options(kind)
    if isinstance(path, str | Path) and "\0" in str(path):
        raise InputError(f"the path {str(path)!r} holds a NUL character, which no file name can; correct it")
    for name in options:
        if name not in known:
            raise InputError(f"a {kind} source has no option {name!r}; {did_you_mean(name, known)}")
    filters = {name: options.pop(name) for name in _options(select) if name in options}
    return select(SOURCES[kind](path, **options), **filters)


def _options(function: Callable[..., Source]) -> dict[str, Any]:
    """Options that a function takes by name; further ones are those of open_files."""
    parameters = inspect.signature(function).parameters.values()
    more = any(p.kind is p.VAR_KEYWORD for p in parameters)
    own = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    return own | (_options(file_sources.open_files) if more else {})


class Guess(NamedTuple):
    """A kind of source, its path, a description as half a sentence, and options of the kind."""

    kind: str
    path: Path
    seen: str
    options: Mapping[str, Any] = {}


def guess_source(path: str | Path) -> Guess:
    """The kind of source at a path; of folders for training and testing, those for testing."""
    root = Path(path).expanduser()
    if root.is_file():
        if root.suffix.lower() == ".csv":
            return _guess_csv(root)
        if root.suffix.lower() == ".npz":
            return Guess("npz", root, "arrays of images")
        raise InputError(f"{path} is one file; name a folder of images, or a .csv or .npz file of them")
    if not root.is_dir():
        raise InputError(f"there is no folder or file {path}; name a folder of images")
    files = list(file_sources.walk(root))
    if any(file.suffix.lower() == ".xml" for file in files) or (root / "boxes.csv").exists():
        return Guess("imagenet", root, "images with box files")
    tables = [file for file in files if file.parent == root and file.suffix.lower() == ".csv"]
    lists = [file for file in tables if any("path" in row for row in _rows(file)[:1])]
    if len(lists) == 1:
        return _guess_csv(lists[0])
    if images := [file.relative_to(root) for file in files if is_picture(file)]:
        tops = {file.parts[0] for file in images if len(file.parts) > 1}
        split = next((top for word in HELD_OUT for top in tops if top.lower() == word), None)
        if split and len(tops) > 1 and all(top.lower() in SPLITS for top in tops):
            return Guess("folder", root / split, f"the folder {split} beside those for training")
        return Guess("folder", root, "a folder for each class" if tops else "images without class folders")
    if any(map(is_nifti_name, files)):
        return Guess("nifti", root, "NIfTI volumes")
    if any(is_dicom_name(file) and is_dicom_file(file) for file in files):
        return Guess("dicom", root, "DICOM files")
    raise InputError(f"there is no image in {path}; name the folder that holds them")


def _rows(file: Path) -> list[dict[str, str]]:
    """Rows of a CSV file up to one that cannot be read, which opening the source reports."""
    rows: list[dict[str, str]] = []
    with suppress(InputError):
        rows.extend(row for _, row in file_sources.read_rows(file))
    return rows


def _guess_csv(file: Path) -> Guess:
    """A CSV file, multi-label where columns of 0 and 1 or cells of several names show it."""
    seen, known = "a CSV file that lists images", {"path", "label", "width", "height", *file_sources.CORNERS}
    rows = _rows(file)
    if rows and is_nifti_name(Path(rows[0].get("path", ""))):
        return Guess("nifti", file, "a CSV file that lists NIfTI volumes")
    columns = [name for name in (rows[0] if rows else ()) if name and name not in known]
    columns = [name for name in columns if {row[name] for row in rows} == {"0", "1"}]
    if columns:
        return Guess(
            "csv", file, f"{seen}, {counted(len(columns), 'label')} each", {"label_columns": columns}
        )
    if any(mark in row.get("label", "") for row in rows for mark in SEPARATORS):
        return Guess("csv", file, f"{seen}, several labels each", {"multilabel": True})
    return Guess("csv", file, seen)
