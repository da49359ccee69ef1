"""Files that hold an array each: .npy, .npz, .tif with any number of channels or pages, 16-bit .png.

What its axes mean nobody can tell from an array, so `axes` says it, such as "hwc", "chw", "dhw", "cdhw";
without it two axes are "hw" and three are "hwc". Values stay as they are: volumes.py says how they become
fractions of 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from heatproof.errors import HeatproofError, InputError
from heatproof.images.csv import open_csv
from heatproof.images.dicom import open_image
from heatproof.images.files import check_bits, check_file
from heatproof.images.folder import open_folder
from heatproof.images.source import Source
from heatproof.images.volumes import Raster, Seen, Spacing, check_axes, raster

USUAL = {2: "hw", 3: "hwc"}  # by the number of axes, where nobody says what they are
VOLUMES = {3: "dhw", 4: "cdhw"}
SUFFIXES = (".npy", ".npz", ".tif", ".tiff", ".png")


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
    it holds several. bits: the depth of whole numbers, else found, file by file.
    """
    if axes is not None:
        check_axes(axes)
    read = partial(read_array, axes=axes, key=key, bits=check_bits(bits))
    return raster_source(path, is_array_name, read, class_names, level, root)


def open_seen(path: Path, bits: int | None = None, volume: bool = False) -> Seen:
    """A picture file; or a NIfTI file, a folder of DICOM slices, an .npy file, for networks that take those.

    volume: whether an array of three axes is one.
    """
    from heatproof.images.nifti import is_nifti_name, read_nifti  # which builds on this file
    from heatproof.images.series import read_series, slices_in

    try:
        if is_nifti_name(path):
            return read_nifti(path)
        if path.suffix.lower() in (".npy", ".npz"):
            return read_array(path, usual=VOLUMES if volume else USUAL, bits=bits)
        if path.is_dir() and volume:
            return read_series(slices_in(path))
    except InputError as error:
        raise InputError(f"cannot read {path}: {error}") from error
    return open_image(path, bits)


def raster_source(
    path: str | Path,
    wanted: Callable[[Path], bool],
    read: Callable[[Path], Raster],
    class_names: Sequence[str] | None = None,
    level: str = "top",
    root: str | Path | None = None,
    voxels: Callable[[Path], Spacing] | None = None,
) -> Source:
    """Files of a folder or a CSV manifest that are read as Rasters, as are their masks."""
    if Path(path).is_file():
        listed = open_csv(path, root=root, class_names=class_names)
    else:
        listed = open_folder(path, wanted, class_names=class_names, level=level)

    def marked(mask: Path) -> np.ndarray:
        return np.asarray(read(mask).values.any(0))

    sized = None if voxels is None else lambda s: voxels(s.content)
    return replace(listed, read=lambda s: read(s.content), deep=True, read_mask=marked, voxels=sized)


def is_array_name(file: Path) -> bool:
    return file.suffix.lower() in SUFFIXES


def read_array(
    file: Path,
    axes: str | None = None,
    key: str | None = None,
    bits: int | None = None,
    usual: Mapping[int, str] = USUAL,
) -> Raster:
    """The array of one file; the error gives the reason without the file's name."""
    try:
        check_file(file)
        values = _values(file, key)
    except HeatproofError:
        raise
    except FileNotFoundError:
        raise InputError("there is no such file") from None
    except PermissionError:
        raise InputError("there is no permission to read the file") from None
    except Exception as error:  # damaged files fail in as many ways as there are formats
        detail = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"the file is damaged or holds something else: {detail}") from error
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
    with Image.open(file, formats=("PNG",)) as picture:
        values = np.asarray(picture)
    # Pillow gives 16-bit greys as 32-bit numbers of old, which have a sign they do not use.
    return values.astype(np.uint16) if values.dtype == np.int32 and values.min() >= 0 else values
