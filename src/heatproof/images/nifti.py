"""NIfTI volumes, by nibabel: rescaled to what was measured, turned to the usual orientation.

Axes are x, y, z as in the file's array, turned so that they run to the right, to the front and upwards
(RAS), which is what networks are given by most who train them; `order` says otherwise. Of several volumes in
a file each is a channel. The size of a voxel is that of the file's affine matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from heatproof.errors import HeatproofError, InputError, need
from heatproof.images.arrays import raster_source
from heatproof.images.files import check_file
from heatproof.images.source import Source
from heatproof.images.volumes import Raster, Spacing, in_order, raster

SUFFIXES = (".nii", ".nii.gz")


def open_nifti(
    path: str | Path,
    *,
    order: str = "xyz",
    canonical: bool = True,
    class_names: Sequence[str] | None = None,
    level: str = "top",
    root: str | Path | None = None,
) -> Source:
    """NIfTI files of a folder (see open_folder) or a CSV manifest (see open_csv), whose masks are NIfTI too.

    order: which axis is the network's first, second and third: "xyz", or "zyx" where those are slices.
    canonical: turn volumes to RAS first; false leaves them as they lie in the file.
    """
    need("nibabel", "volumes")
    check_order(order)
    read = partial(read_nifti, order=order, canonical=canonical)
    voxels = partial(voxel_size, order=order, canonical=canonical)
    return raster_source(path, is_nifti_name, read, class_names, level, root, voxels)


def check_order(order: str) -> None:
    if sorted(order) != ["x", "y", "z"]:
        raise InputError(f"order names x, y and z, each once, such as 'xyz' or 'zyx'; got {order!r}")


def is_nifti_name(file: Path) -> bool:
    return file.name.lower().endswith(SUFFIXES)


def read_nifti(file: Path, order: str = "xyz", canonical: bool = True) -> Raster:
    """The volume "c D H W", its axes in this order; the error gives the reason without the file's name."""
    nibabel = need("nibabel", "volumes")
    try:
        check_file(file)
        volume = nibabel.load(file)
        spacing = _spacing(nibabel, volume, canonical)
        volume = nibabel.as_closest_canonical(volume) if canonical else volume
        values = np.asarray(volume.dataobj)
    except HeatproofError:
        raise
    except FileNotFoundError:
        raise InputError("there is no such file") from None
    except Exception as error:  # damaged headers fail in their own ways
        detail = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"the file is damaged or no NIfTI: {detail}") from error
    if values.ndim == 5 and values.shape[3] == 1:  # what the standard calls a vector at every place
        values = values[:, :, :, 0]
    if values.ndim not in (3, 4):
        raise InputError(f"it has the shape {values.shape}; a volume has three axes, or four with channels")
    named = _named(order) + "c" * (values.ndim == 4)
    values = values.astype(np.float32) if values.dtype.kind == "f" else values
    return raster(values, named, spacing=spacing)


def voxel_size(file: Path, order: str = "xyz", canonical: bool = True) -> Spacing:
    """Millimetres along the network's axes, from the header alone; None where it cannot be read."""
    nibabel = need("nibabel", "volumes")
    try:
        return in_order(_spacing(nibabel, nibabel.load(file), canonical), _named(order))
    except Exception:  # whoever reads the volume will say what is wrong with it
        return None


def _named(order: str) -> str:
    """What x, y and z are to the network."""
    return "".join("dhw"[order.index(axis)] for axis in "xyz")


def _spacing(nibabel: Any, volume: Any, canonical: bool) -> tuple[float, ...]:
    """Millimetres along x, y and z, turned as the volume will be."""
    lengths = nibabel.affines.voxel_sizes(volume.affine)
    towards = nibabel.io_orientation(volume.affine)[:, 0] if canonical else range(3)
    return tuple(float(mm) for _, mm in sorted(zip(towards, lengths, strict=True)))
