"""Kinds of sources of pictures, by the name that a study gives them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from heatproof.errors import InputError, UnknownNameError, did_you_mean
from heatproof.images.arrays import open_arrays
from heatproof.images.csv import open_csv
from heatproof.images.folder import open_dicom, open_folder
from heatproof.images.hf import open_hf
from heatproof.images.imagenet import open_imagenet
from heatproof.images.memory import open_memory, open_npz
from heatproof.images.nifti import open_nifti
from heatproof.images.series import open_series
from heatproof.images.source import Source, select

SOURCES: dict[str, Callable[..., Source]] = {
    "folder": open_folder,
    "csv": open_csv,
    "imagenet": open_imagenet,
    "npz": open_npz,
    "hf": open_hf,
    "dicom": open_dicom,
    "dicom-series": open_series,
    "nifti": open_nifti,
    "arrays": open_arrays,
    "memory": open_memory,
}


def source_options(kind: str) -> dict[str, Any]:
    """What may be set for a kind of source, with the defaults: its own options, then the filters."""
    if kind not in SOURCES:
        raise UnknownNameError("kind of source", kind, SOURCES)
    return _options(SOURCES[kind]) | _options(select)


def open_source(kind: str, path: Any, **options: Any) -> Source:
    """The pictures of one kind of source, filtered.

    kind: folder, csv, imagenet, npz, hf, dicom, dicom-series, nifti, arrays or memory.
    path: a file or folder; for memory, the pictures.
    options: those of the kind (see its open_ function) and the filters of `select`.
    """
    known = source_options(kind)
    if isinstance(path, str | Path) and "\0" in str(path):
        raise InputError(f"the path {str(path)!r} holds a NUL character, which no file name can; correct it")
    for name in options:
        if name not in known:
            raise InputError(f"a {kind} source has no option {name!r}; {did_you_mean(name, known)}")
    filters = {name: value for name, value in options.items() if name in _options(select)}
    own = {name: value for name, value in options.items() if name not in filters}
    return select(SOURCES[kind](path, **own), **filters)


def _options(function: Callable[..., Source]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
