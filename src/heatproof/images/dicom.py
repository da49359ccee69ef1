"""DICOM files as a source; how one is read is in dicom_file.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from heatproof.errors import InputError, need
from heatproof.images.csv import list_csv
from heatproof.images.dicom_file import SUFFIXES, read_dicom
from heatproof.images.folder import list_folder
from heatproof.images.source import Source, file_source


def open_dicom(
    path: str | Path,
    *,
    window: tuple[float, float] | None = None,
    class_names: Sequence[str] | None = None,
    level: str = "top",
    root: str | Path | None = None,
    first_pixel: int = 0,
) -> Source:
    """DICOM files of a folder (see open_folder) or a CSV manifest (see open_csv). window: centre, width."""
    need("pydicom", "dicom")
    if window is not None and not (len(window) == 2 and window[1] >= 1):
        raise InputError(f"a window is a centre and a width of at least 1; got {window}")
    if Path(path).is_file():
        samples, classes = list_csv(Path(path), root, class_names, first_pixel)
    else:
        samples, classes = list_folder(Path(path), is_dicom, class_names, level)
    return file_source(samples, classes, partial(read_dicom, window=window))


def is_dicom(file: Path) -> bool:
    return file.suffix.lower() in ("", *SUFFIXES) and file.name != "DICOMDIR"
