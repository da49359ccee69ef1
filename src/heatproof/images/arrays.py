"""Files whose values stay as they were measured: arrays, NIfTI volumes and DICOM series, read as Rasters.

    arrays        .npy, .npz, .tif with any number of channels or pages, 16-bit .png. `axes` names the axes,
                  such as "hwc", "chw", "dhw", "cdhw"; without it two axes are "hw" and three are "hwc"
    nifti         axes x, y, z as in the file, turned to run to the right, front and top (RAS); of several
                  volumes in a file each is a channel. The voxel size is that of the file's affine matrix
    dicom-series  a folder of slices is one volume, after rescale slope and intercept. Slices are sorted along
                  the normal of their plane, else by number; axes are z, y, x (slice, row, column)

`order` permutes the axes of volumes. volumes.py defines how values become fractions of 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from heatproof.errors import InputError, need
from heatproof.images.file_sources import class_labels, open_files, open_folder
from heatproof.images.files import MAX_PIXELS, check_bits, check_file, is_dicom_name, open_image, reading
from heatproof.images.source import Sample, Source
from heatproof.images.volumes import Raster, Seen, Spacing, check_axes, in_order, raster

USUAL = {2: "hw", 3: "hwc"}  # default axes by their number
VOLUMES = {3: "dhw", 4: "cdhw"}
SUFFIXES = (".npy", ".npz", ".tif", ".tiff", ".png")
NIFTI, SERIES = "xyz", "zyx"  # axes as the files hold them


def open_seen(path: Path, bits: int | None = None, volume: bool = False) -> Seen:
    """Read an image file, or a NIfTI file, .npy file or folder of DICOM slices.

    volume: whether the network takes volumes, so that an array of three axes is a volume.
    """
    try:
        if is_nifti_name(path):
            return read_nifti(path)
        if path.suffix.lower() in (".npy", ".npz"):
            return read_array(path, usual=VOLUMES if volume else USUAL, bits=bits)
        if path.is_dir() and volume:
            slices = sorted(file for file in path.iterdir() if file.is_file() and is_dicom_name(file))
            if not slices:
                raise InputError("there is no DICOM file in it")
            return read_series(slices)
    except InputError as error:
        raise InputError(f"cannot read {path}: {error}") from error
    return open_image(path, bits)


def raster_source(
    listed: Source, read: Callable[[Path], Raster], voxels: Callable[[Path], Spacing] | None = None
) -> Source:
    """The source with files and masks that are read as Rasters."""
    return replace(
        listed,
        read=lambda s: read(s.content),
        deep=True,
        read_mask=lambda mask: np.asarray(read(mask).values.any(0)),
        voxels=None if voxels is None else lambda s: voxels(s.content),
    )


def open_arrays(
    path: str | Path,
    *,
    axes: str | None = None,
    key: str | None = None,
    bits: int | None = None,
    class_names: Sequence[str] | None = None,
    level: str = "top",
    root: str | Path | None = None,
) -> Source:
    """Files with an array each, of a folder (see open_folder) or a CSV manifest (see open_csv); masks alike.

    axes: what the arrays' axes are: h, w, d of volumes, c of channels. key: the array in an .npz file, where
    it holds several. bits: the depth of whole numbers, else inferred, file by file.
    """
    if axes is not None:
        check_axes(axes)
    read = partial(read_array, axes=axes, key=key, bits=check_bits(bits))
    return raster_source(open_files(path, is_array_name, class_names, level, root), read)


def is_array_name(file: Path) -> bool:
    return file.suffix.lower() in SUFFIXES


def read_array(
    file: Path,
    axes: str | None = None,
    key: str | None = None,
    bits: int | None = None,
    usual: Mapping[int, str] = USUAL,
) -> Raster:
    """The array of one file."""
    with reading("the file is damaged or holds something else"):
        check_file(file)
        values = _values(file, key)
    if axes is None and values.ndim not in usual:
        raise InputError(f"it has the shape {values.shape}; say what its axes are with axes, such as 'cdhw'")
    return raster(values, axes or usual[values.ndim], bits)


def _values(file: Path, key: str | None) -> np.ndarray:
    ending = file.suffix.lower()
    if ending == ".npy":
        return np.asarray(np.load(file, allow_pickle=False))
    if ending == ".npz":
        with np.load(file, allow_pickle=False) as arrays:
            names = list(arrays)
            if key is None and len(names) != 1:
                raise InputError(f"it holds {', '.join(names) or 'nothing'}; name one with key")
            if key is not None and key not in names:
                raise InputError(f"it holds {', '.join(names) or 'nothing'}, but no {key!r}; correct key")
            return np.asarray(arrays[key or names[0]])
    if ending in (".tif", ".tiff"):
        from tifffile import imread  # comes with scikit-image

        return np.asarray(imread(file))
    with Image.open(file, formats=("PNG",)) as image:
        values = np.asarray(image)
    # Older Pillow returns 16-bit greys as 32-bit signed integers.
    return values.astype(np.uint16) if values.dtype == np.int32 and values.min() >= 0 else values


def check_order(order: str) -> None:
    if sorted(order) != ["x", "y", "z"]:
        raise InputError(f"order names x, y and z, each once, such as 'xyz' or 'zyx'; got {order!r}")


def axis_names(order: str, stored: str) -> str:
    """The network's axis, d, h or w, of each axis as it is stored."""
    return "".join("dhw"[order.index(axis)] for axis in stored)


def open_nifti(
    path: str | Path,
    *,
    order: str = NIFTI,
    canonical: bool = True,
    class_names: Sequence[str] | None = None,
    level: str = "top",
    root: str | Path | None = None,
) -> Source:
    """NIfTI files of a folder (see open_folder) or a CSV manifest (see open_csv), whose masks are NIfTI too.

    order: which axis is the network's first, second and third: "xyz", or "zyx" where those are slices.
    canonical: turn volumes to RAS first; false leaves them as they lie in the file.
    """
    nibabel = need("nibabel", "volumes")
    check_order(order)

    def voxels(file: Path) -> Spacing:
        try:
            return in_order(_nifti_spacing(nibabel.load(file), canonical), axis_names(order, NIFTI))
        except Exception:  # reading the volume reports what is wrong with it
            return None

    read = partial(read_nifti, order=order, canonical=canonical)
    return raster_source(open_files(path, is_nifti_name, class_names, level, root), read, voxels)


def is_nifti_name(file: Path) -> bool:
    return file.name.lower().endswith((".nii", ".nii.gz"))


def read_nifti(file: Path, order: str = NIFTI, canonical: bool = True) -> Raster:
    """The volume "c D H W", its axes in this order."""
    nibabel = need("nibabel", "volumes")
    with reading("the file is damaged or no NIfTI"):
        check_file(file)
        volume = nibabel.load(file)
        spacing = _nifti_spacing(volume, canonical)
        volume = nibabel.as_closest_canonical(volume) if canonical else volume
        values = np.asarray(volume.dataobj)
    if values.ndim == 5 and values.shape[3] == 1:  # a vector at every voxel, in the standard's terms
        values = values[:, :, :, 0]
    if values.ndim not in (3, 4):
        raise InputError(f"it has the shape {values.shape}; a volume has three axes, or four with channels")
    values = values.astype(np.float32) if values.dtype.kind == "f" else values
    return raster(values, axis_names(order, NIFTI) + "c" * (values.ndim == 4), spacing=spacing)


def _nifti_spacing(volume: Any, canonical: bool) -> tuple[float, ...]:
    """Millimetres along x, y and z, in the orientation that the volume is turned to."""
    nibabel = need("nibabel", "volumes")
    lengths = nibabel.affines.voxel_sizes(volume.affine)
    towards = nibabel.io_orientation(volume.affine)[:, 0] if canonical else range(3)
    return tuple(float(mm) for _, mm in sorted(zip(towards, lengths, strict=True)))


def open_series(
    path: str | Path, *, order: str = SERIES, class_names: Sequence[str] | None = None, level: str = "top"
) -> Source:
    """A folder per patient, each with the slices of one series; or one folder per class with those in it.

    order: which axis is the network's first, second and third: "zyx", or "xyz". class_names, level: as for
    open_folder.
    """
    pydicom = need("pydicom", "dicom")
    check_order(order)
    slices, root = open_folder(path, is_dicom_name, level="parent"), Path(path)
    volumes: dict[str, list[Path]] = {}
    for sample in slices.samples:
        folder = Path(sample.id).parent.as_posix()
        volumes.setdefault(root.name if folder == "." else folder, []).append(sample.content)
    parts = [name.split("/") for name in volumes]
    outside = [names[0] for names in parts if len(names) == 1]
    labels: list[int | None] = [None] * len(parts)
    classes: tuple[str, ...] = ()
    if 0 < len(outside) < len(parts):
        raise InputError(
            f"{root} holds class folders and also a series outside them, {outside[0]}; move it into one"
        )
    if not outside:
        named = [names[0 if level == "top" else -2] for names in parts]
        labels, classes = class_labels(named, class_names, root)

    def voxels(sample: Sample) -> Spacing:
        try:
            headers = [pydicom.dcmread(file, stop_before_pixels=True) for file in sample.content]
            spacing = _series_spacing(headers)
        except Exception:  # reading the volume reports what is wrong with it
            return None
        return spacing and in_order(spacing, axis_names(order, SERIES))

    samples = tuple(
        Sample(name, label, content=tuple(sorted(files)))
        for (name, files), label in zip(volumes.items(), labels, strict=True)
    )
    return replace(
        slices, samples=samples, classes=classes, deep=True, voxels=voxels,
        read=lambda s: read_series(s.content, order),
    )  # fmt: skip


def read_series(files: Sequence[Path], order: str = SERIES) -> Raster:
    """One volume of slices that belong together."""
    pydicom, pixels = need("pydicom", "dicom"), need("pydicom.pixels", "dicom")
    with reading("its slices cannot be read"):
        slices = [pydicom.dcmread(file) for file in files]
        shapes = {(int(each.Rows), int(each.Columns)) for each in slices}
        series = {str(each.get("SeriesInstanceUID", "")) for each in slices}
        if len(shapes) > 1 or len(series) > 1:
            what = "sizes" if len(shapes) > 1 else "series"
            raise InputError(f"its slices are of {max(len(shapes), len(series))} {what}; give each a folder")
        if len(slices) * np.prod(shapes.pop()) > MAX_PIXELS:
            raise InputError(f"it has more than the {MAX_PIXELS:,} values that are safe to hold")
        slices.sort(key=_slice_position)
        values = [np.asarray(pixels.apply_modality_lut(s.pixel_array, s), np.float32) for s in slices]
    volume = np.concatenate([plane if plane.ndim == 3 else plane[None] for plane in values])
    return raster(volume, axis_names(order, SERIES), spacing=_series_spacing(slices))


def _series_spacing(slices: Sequence[Any]) -> tuple[float, ...] | None:
    """Millimetres between slices, rows and columns: by the slices' positions, else by their headers."""
    first = slices[0]
    across = first.get("PixelSpacing")
    between = first.get("SpacingBetweenSlices") or first.get("SliceThickness")
    if len(slices) > 1 and first.get("ImagePositionPatient") is not None:
        between = np.median(np.diff(sorted(map(_slice_position, slices))))
    return (float(between), *map(float, across)) if between and across else None


def _slice_position(header: Any) -> float:
    """Distance along the normal of the slice's plane, or the slice's number."""
    at, along = header.get("ImagePositionPatient"), header.get("ImageOrientationPatient")
    if at is None or along is None:
        return float(header.get("InstanceNumber", 0) or 0)
    normal = np.cross(np.asarray(along[:3], float), np.asarray(along[3:], float))
    return float(normal @ np.asarray(at, float))
