"""Kinds of sources by name, recognition of the kind from a path, and sources of arrays and volumes.

    memory        arrays, tensors or Pillow images; npz: an .npz file laid out like MedMNIST's
    arrays        .npy, .npz, .tif with any number of channels or pages, 16-bit .png. `axes` names the axes,
                  such as "hwc", "chw", "dhw", "cdhw"; without it two axes are "hw" and three are "hwc"
    nifti         axes x, y, z as in the file, turned to run to the right, front and top (RAS); of several
                  volumes in a file each is a channel. The voxel size is that of the file's affine matrix
    dicom-series  a folder of slices is one volume, after rescale slope and intercept. Slices are sorted along
                  the normal of their plane, else by number; axes are z, y, x (slice, row, column)

The last three are read as Rasters, whose values stay as they were measured; `order` permutes the axes of
volumes. preprocess.py defines how values become fractions of 1. Sources of image files: file_sources.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from heatproof.errors import InputError, UnknownNameError, about, counted, did_you_mean, need
from heatproof.images import file_sources, files
from heatproof.images.file_sources import folder_labels, open_files, open_folder
from heatproof.images.files import (
    Box,
    Raster,
    Seen,
    Spacing,
    check_file,
    is_dicom_file,
    is_dicom_name,
    is_picture,
    raster,
    reading,
)
from heatproof.images.findings import SEPARATORS, check_labels, lists_several, number_findings, read_findings
from heatproof.images.source import Sample, Source, content_stamp, select

HELD_OUT = ("test", "testing", "val", "valid", "validation")  # in order of preference
SPLITS = {*HELD_OUT, "train", "training"}
USUAL = {2: "hw", 3: "hwc"}  # default axes by their number
VOLUMES = {3: "dhw", 4: "cdhw"}
SUFFIXES = (".npy", ".npz", ".tif", ".tiff", ".png")
NIFTI, SERIES = "xyz", "zyx"  # axes as the files hold them
CHANNELS = (1, 3)


def open_seen(path: Path, bits: int | None = None, volume: bool = False) -> Seen:
    """Read an image file, or a NIfTI file, .npy file or folder of DICOM slices.

    volume: whether the network takes volumes, so that an array of three axes is a volume.
    """
    with about(f"cannot read {path}"):
        if is_nifti_name(path):
            return read_nifti(path)
        if path.suffix.lower() in (".npy", ".npz"):
            return read_array(path, usual=VOLUMES if volume else USUAL, bits=bits)
        if path.is_dir() and volume:
            slices = sorted(file for file in path.iterdir() if file.is_file() and is_dicom_name(file))
            if not slices:
                raise InputError("there is no DICOM file in it")
            return read_series(slices)
    return files.open_image(path, bits)


def raster_source(
    listed: Source, read: Callable[[Path], Raster], voxels: Callable[[Sample], Spacing] | None = None
) -> Source:
    """The source with files and masks that are read as Rasters."""
    return replace(
        listed, read=lambda s: read(s.content), deep=True, voxels=voxels,
        read_mask=lambda mask: np.asarray(read(mask).values.any(0)),
    )  # fmt: skip


def open_arrays(
    path: str | Path, *, axes: str | None = None, key: str | None = None, bits: int | None = None,
    **listed: Any,
) -> Source:  # fmt: skip
    """Files with an array each, of a folder or CSV manifest (see open_files); masks alike.

    axes: what the arrays' axes are: h, w, d of volumes, c of channels. key: the array in an .npz file, where
    it holds several. bits: the depth of whole numbers, else inferred, file by file.
    """
    if axes is not None:
        files.check_axes(axes)
    read = partial(read_array, axes=axes, key=key, bits=files.check_bits(bits))
    return raster_source(open_files(path, lambda file: file.suffix.lower() in SUFFIXES, **listed), read)


def read_array(
    file: Path, axes: str | None = None, key: str | None = None, bits: int | None = None,
    usual: Mapping[int, str] = USUAL,
) -> Raster:  # fmt: skip
    """The array of one file."""
    with reading("the file is damaged or holds something else"):
        check_file(file)
        values = _values(file, key)
    if axes is None and values.ndim not in usual:
        raise InputError(f"it has the shape {values.shape}; name its axes with axes, such as 'cdhw'")
    return raster(values, axes or usual[values.ndim], bits)


def _values(file: Path, key: str | None) -> np.ndarray:
    ending = file.suffix.lower()
    if ending == ".npy":
        return np.asarray(np.load(file, allow_pickle=False))
    if ending == ".npz":
        with np.load(file, allow_pickle=False) as arrays:
            names = list(arrays)
            if key not in names and (key is not None or len(names) != 1):
                but = "" if key is None else f", but no {key!r}"
                raise InputError(f"it holds {', '.join(names) or 'nothing'}{but}; name one with key")
            return np.asarray(arrays[key or names[0]])
    if ending in (".tif", ".tiff"):
        from tifffile import imread  # comes with scikit-image

        return np.asarray(imread(file))
    with Image.open(file, formats=("PNG",)) as image:
        values = np.asarray(image)
    # Older Pillow returns 16-bit greys as 32-bit signed integers.
    return values.astype(np.uint16) if values.dtype == np.int32 and values.min() >= 0 else values


def axis_names(order: str, stored: str) -> str:
    """The network's axis, d, h or w, of each axis as it is stored."""
    if sorted(order) != ["x", "y", "z"]:
        raise InputError(f"order names x, y and z, each once, such as 'xyz' or 'zyx'; got {order!r}")
    return "".join("dhw"[order.index(axis)] for axis in stored)


def open_nifti(path: str | Path, *, order: str = NIFTI, canonical: bool = True, **listed: Any) -> Source:
    """NIfTI files of a folder or CSV manifest (see open_files), whose masks are NIfTI too.

    order: which axis is the network's first, second and third: "xyz", or "zyx" where those are slices.
    canonical: turn volumes to RAS first; false leaves them as they lie in the file.
    """
    nibabel, axes = need("nibabel", "volumes"), axis_names(order, NIFTI)
    return raster_source(
        open_files(path, is_nifti_name, **listed), partial(read_nifti, order=order, canonical=canonical),
        lambda sample: files.in_order(_nifti_spacing(nibabel.load(sample.content), canonical), axes),
    )  # fmt: skip


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
    pydicom, axes = need("pydicom", "dicom"), axis_names(order, SERIES)
    slices, root = open_folder(path, is_dicom_name, level="parent"), Path(path)
    volumes: dict[str, list[Path]] = {}
    for sample in slices.samples:
        folder = Path(sample.id).parent.as_posix()
        volumes.setdefault(root.name if folder == "." else folder, []).append(sample.content)
    labels, classes = folder_labels(list(map(Path, volumes)), "a series", class_names, level, root)

    def voxels(sample: Sample) -> Spacing:
        headers = [pydicom.dcmread(file, stop_before_pixels=True) for file in sample.content]
        return (spacing := _series_spacing(headers)) and files.in_order(spacing, axes)

    samples = tuple(
        Sample(name, label, content=tuple(sorted(slices)))
        for (name, slices), label in zip(volumes.items(), labels, strict=True)
    )
    return replace(
        slices, samples=samples, classes=classes, deep=True, voxels=voxels,
        read=lambda s: read_series(s.content, order),
    )  # fmt: skip


def read_series(slices: Sequence[Path], order: str = SERIES) -> Raster:
    """One volume of slices that belong together."""
    pydicom, pixels = need("pydicom", "dicom"), need("pydicom.pixels", "dicom")
    with reading("its slices cannot be read"):
        headers = [pydicom.dcmread(file) for file in slices]
        shapes = {(int(each.Rows), int(each.Columns)) for each in headers}
        series = {str(each.get("SeriesInstanceUID", "")) for each in headers}
        if len(shapes) > 1 or len(series) > 1:
            what = "sizes" if len(shapes) > 1 else "series"
            raise InputError(f"its slices are of {max(len(shapes), len(series))} {what}; give each a folder")
        if len(headers) * np.prod(shapes.pop()) > files.MAX_PIXELS:
            raise InputError(f"it has more than the {files.MAX_PIXELS:,} values that are safe to hold")
        headers.sort(key=_slice_position)
        values = [np.asarray(pixels.apply_modality_lut(s.pixel_array, s), np.float32) for s in headers]
    volume = np.concatenate([plane if plane.ndim == 3 else plane[None] for plane in values])
    return raster(volume, axis_names(order, SERIES), spacing=_series_spacing(headers))


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


def open_memory(
    images: Any, *, labels: Any = None, boxes: Sequence[Sequence[Box]] | None = None,
    masks: Mapping[str, Any] | None = None, ids: Sequence[str] | None = None,
    class_names: Sequence[str] | None = None, bits: int | None = None,
    box_labels: Sequence[Sequence[Any]] | None = None, axes: str | None = None,
) -> Source:  # fmt: skip
    """A batch of images, or a list of any sizes: arrays "h w" or "h w c", tensors "c h w", Pillow images.

    Values have 8 or 16 bits or are fractions of 1; all become 8-bit, before the model's preprocessing.

    labels: "n" class numbers; of multi-label images a table "n k" of 0 and 1, or a list of names or numbers
    for each. masks: part name -> "n h w"; of multi-label images a mask belongs to the finding of its name.
    ids: else 000000, 000001, ... class_names: the model's classes in its own order. bits: the depth of 16-bit
    values; else the smallest that holds all arrays. box_labels: of multi-label images, the finding of each
    box. axes: of each array, such as "dhw" of volumes or "hwc" of many channels, whose values then stay.
    """
    images = list(images)
    highest = [int(a.max()) for a in images if getattr(a, "dtype", None) == np.uint16 and a.size]
    bits = files.check_bits(bits) or (files.bit_depth(max(highest)) if highest else None)
    contents: list[Any] = []
    for i, image in enumerate(images):
        with about(f"image {i}"):
            contents.append(to_pixels(image, bits) if axes is None else raster(_array(image), axes, bits))
    if not contents:
        raise InputError("there is no image in memory to open")
    n = len(contents)
    given = {"labels": labels, "boxes": boxes, "ids": ids, "box_labels": box_labels}
    given |= {f"masks[{part!r}]": mask for part, mask in (masks or {}).items()}
    for name, values in given.items():
        if values is not None and len(values) != n:
            raise InputError(f"{name} has {len(values)} entries, but there are {n} images")
    numbers: Sequence[int | None] = [None] * n
    findings: Sequence[tuple[int, ...] | None] = [None] * n
    box_findings: Sequence[tuple[tuple[int, ...], ...]] = [()] * n
    if lists_several(labels):
        findings, classes = read_findings(labels, class_names)
        if boxes is not None:
            box_findings = _box_findings(boxes, box_labels, findings, classes)
    else:
        numbers, classes = check_labels(labels, n, class_names)
    parts = {part: _array(mask) for part, mask in (masks or {}).items()}
    samples = tuple(
        Sample(
            f"{i:06d}" if ids is None else str(ids[i]), numbers[i],
            () if boxes is None else tuple(files.check_box(box) for box in boxes[i]),
            {part: mask[i] for part, mask in parts.items()},
            content=contents[i], findings=findings[i], box_findings=box_findings[i],
        )
        for i in range(n)
    )  # fmt: skip
    return Source(
        samples, classes, lambda s: Image.fromarray(s.content) if axes is None else s.content,
        lambda s: content_stamp(s.content), deep=axes is not None,
    )  # fmt: skip


def _box_findings(
    boxes: Sequence[Sequence[Box]], given: Sequence[Sequence[Any]] | None,
    findings: Sequence[tuple[int, ...]], classes: Sequence[str],
) -> list[tuple[tuple[int, ...], ...]]:  # fmt: skip
    """The finding of each box of each image; the only finding of an image is the default."""
    result = []
    for i, (own, numbers) in enumerate(zip(boxes, findings, strict=True)):
        if given is None and len(own) and len(numbers) != 1:
            raise InputError(f"image {i} has boxes and {len(numbers)} labels; give box_labels too")
        named = [numbers] * len(own) if given is None else [[label] for label in given[i]]
        if len(named) != len(own):
            raise InputError(f"image {i} has {len(own)} boxes, but {len(named)} box_labels")
        result.append(tuple(number_findings(named, classes, "box_labels")[0]))
    return result


def open_npz(
    path: str | Path, *, split: str | None = "test", class_names: Sequence[str] | None = None,
    bits: int | None = None, axes: str | None = None,
) -> Source:  # fmt: skip
    """Open the arrays SPLIT_images "n h w" or "n h w c", and SPLIT_labels, of an .npz file.

    Without a split, the arrays are images and labels. They stay in memory. bits, axes: as for open_memory.
    """
    prefix = "" if split is None else f"{split}_"
    with about(f"cannot read {path} as an .npz file"), reading("it is damaged or holds something else"):
        check_file(Path(path))
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            if f"{prefix}images" not in arrays:
                splits = [key.removesuffix("images").rstrip("_") for key in arrays if key.endswith("images")]
                hint = did_you_mean(split or "", splits)
                raise InputError(f"it has no array {prefix}images; set split to one it has ({hint})")
            images, labels = arrays[f"{prefix}images"], arrays.get(f"{prefix}labels")
            mark = arrays.zip.getinfo(f"{prefix}images.npy").CRC  # a checksum that the file already holds
    usual = images.ndim in (3, 4) and (images.ndim == 3 or images.shape[3] in CHANNELS)
    if axes is None and not usual:
        raise InputError(
            f"{prefix}images must be 'n h w' or 'n h w c' with 1 or 3 channels; got {images.shape}: set "
            "axes, such as 'dhw' of volumes or 'hwc', where it is something else"
        )
    ids = [f"{prefix}{i:06d}" for i in range(len(images))]
    source = open_memory(images, labels=labels, ids=ids, class_names=class_names, bits=bits, axes=axes)
    return replace(source, stamp=lambda _: mark)


def _array(values: Any) -> np.ndarray:
    return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)


def to_pixels(image: Any, bits: int | None = None) -> np.ndarray:
    """Array "h w" or "h w 3", 8-bit. Tensors have channels first, arrays last, unless only the other fits."""
    array = _array(files.eight_bits(image, bits) if isinstance(image, Image.Image) else image)
    shape = array.shape
    tensor = hasattr(image, "detach")
    if array.ndim == 3 and shape[0] in CHANNELS and (tensor or shape[2] not in CHANNELS):
        array = np.moveaxis(array, 0, 2)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    if 0 in shape or not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 3)):
        raise InputError(f"it must be 'h w', 'h w c' or 'c h w' with 1 or 3 channels; got {shape}")
    if array.dtype == bool:
        array = array.astype(np.uint8) * 255
    if array.dtype != np.uint8:
        if array.dtype != np.uint16 and array.dtype.kind != "f":
            raise InputError(f"it has {array.dtype} values; give 8 or 16 bits, or fractions of 1")
        array = files.scale_to_bytes(array, bits)
    return np.ascontiguousarray(array)


SOURCES: dict[str, Callable[..., Source]] = {
    "folder": open_folder, "csv": file_sources.open_csv, "imagenet": file_sources.open_imagenet,
    "npz": open_npz, "hf": file_sources.open_hf, "dicom": file_sources.open_dicom,
    "dicom-series": open_series, "nifti": open_nifti, "arrays": open_arrays,
    "memory": open_memory,
}  # fmt: skip


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
