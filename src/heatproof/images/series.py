"""DICOM series: a folder of slices is one volume, in the units that were measured (Hounsfield units of a CT).

Slices are sorted by where they lie along the normal of their plane, else by their number. Values go through
each slice's rescale slope and intercept. Axes are z, y, x (slice, row, column); `order` says otherwise. They
are as far apart as the slices' places say, else their headers; rows and columns by PixelSpacing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from heatproof.errors import HeatproofError, InputError, need
from heatproof.images.dicom import is_dicom_name
from heatproof.images.files import MAX_PIXELS
from heatproof.images.folder import open_folder
from heatproof.images.nifti import check_order
from heatproof.images.source import Sample, Source
from heatproof.images.volumes import Raster, Spacing, in_order, raster


def open_series(
    path: str | Path, *, order: str = "zyx", class_names: Sequence[str] | None = None, level: str = "top"
) -> Source:
    """A folder per patient, each with the slices of one series; or one folder per class with those in it.

    order: which axis is the network's first, second and third: "zyx", or "xyz". class_names, level: as for
    open_folder.
    """
    need("pydicom", "dicom")
    check_order(order)
    slices = open_folder(path, is_dicom_name, level="parent")
    volumes: dict[str, list[Path]] = {}
    for sample in slices.samples:
        folder = Path(sample.id).parent.as_posix()
        volumes.setdefault(Path(path).name if folder == "." else folder, []).append(sample.content)
    labels, classes = _labels(list(volumes), class_names, level, Path(path))
    samples = tuple(
        Sample(name, label, content=tuple(sorted(files)))
        for (name, files), label in zip(volumes.items(), labels, strict=True)
    )
    read = partial(read_series, order=order)
    return replace(
        slices, samples=samples, classes=classes, deep=True, read=lambda s: read(s.content),
        voxels=lambda s: voxel_size(s.content, order),
    )  # fmt: skip


def _labels(
    folders: Sequence[str], class_names: Sequence[str] | None, level: str, root: Path
) -> tuple[list[int | None], tuple[str, ...]]:
    """The class of each volume by the folder around its own; none where patients lie side by side."""
    depths = {name.count("/") for name in folders}
    if depths == {0}:
        return [None] * len(folders), ()
    if 0 in depths:
        loose = next(name for name in folders if "/" not in name)
        raise InputError(
            f"{root} holds class folders and also a series outside them, {loose}; move it into one"
        )
    named = [name.split("/")[0 if level == "top" else -2] for name in folders]
    classes = tuple(class_names) if class_names is not None else tuple(sorted(set(named)))
    if unknown := sorted(set(named) - set(classes)):
        raise InputError(f"{root} has a folder {unknown[0]!r} that class_names does not list")
    return [classes.index(name) for name in named], classes


def slices_in(folder: Path) -> list[Path]:
    """The DICOM files that lie in a folder."""
    found = sorted(file for file in folder.iterdir() if file.is_file() and is_dicom_name(file))
    if not found:
        raise InputError("there is no DICOM file in it")
    return found


def read_series(files: Sequence[Path], order: str = "zyx") -> Raster:
    """One volume of slices that belong together."""
    pydicom, pixels = need("pydicom", "dicom"), need("pydicom.pixels", "dicom")
    try:
        read = [pydicom.dcmread(file) for file in files]
        shapes = {(int(one.Rows), int(one.Columns)) for one in read}
        series = {str(one.get("SeriesInstanceUID", "")) for one in read}
        if len(shapes) > 1 or len(series) > 1:
            what = "sizes" if len(shapes) > 1 else "series"
            raise InputError(f"its slices are of {max(len(shapes), len(series))} {what}; give each a folder")
        if len(read) * np.prod(shapes.pop()) > MAX_PIXELS:
            raise InputError(f"it has more than the {MAX_PIXELS:,} values that are safe to hold")
        read.sort(key=_place)
        values = [np.asarray(pixels.apply_modality_lut(one.pixel_array, one), np.float32) for one in read]
    except HeatproofError:
        raise
    except Exception as error:  # broken headers and missing decoders fail in their own ways
        detail = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"its slices cannot be read: {detail}") from error
    volume = np.concatenate([one if one.ndim == 3 else one[None] for one in values])
    return raster(volume, _named(order), spacing=_spacing(read))


def voxel_size(files: Sequence[Path], order: str = "zyx") -> Spacing:
    """Millimetres along the network's axes, from the headers alone; None where they do not say it."""
    pydicom = need("pydicom", "dicom")
    try:
        found = _spacing([pydicom.dcmread(file, stop_before_pixels=True) for file in files])
    except Exception:  # whoever reads the volume will say what is wrong with it
        return None
    return found and in_order(found, _named(order))


def _named(order: str) -> str:
    """What slices, rows and columns are to the network."""
    return "".join("dhw"[order.index(axis)] for axis in "zyx")


def _spacing(slices: Sequence[Any]) -> tuple[float, ...] | None:
    """Millimetres between slices, rows and columns."""
    first = slices[0]
    across = first.get("PixelSpacing")
    between = first.get("SpacingBetweenSlices") or first.get("SliceThickness")
    if len(slices) > 1 and first.get("ImagePositionPatient") is not None:
        between = np.median(np.diff(sorted(map(_place, slices))))
    return (float(between), *map(float, across)) if between and across else None


def _place(slice_: Any) -> float:
    """How far along the normal of its plane a slice lies."""
    at, along = slice_.get("ImagePositionPatient"), slice_.get("ImageOrientationPatient")
    if at is None or along is None:
        return float(slice_.get("InstanceNumber", 0) or 0)
    normal = np.cross(np.asarray(along[:3], float), np.asarray(along[3:], float))
    return float(normal @ np.asarray(at, float))
