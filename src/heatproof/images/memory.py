"""Sources of arrays: images in memory, or in an .npz file laid out like MedMNIST's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from heatproof.errors import InputError, did_you_mean
from heatproof.images.files import (
    Box,
    bit_depth,
    check_bits,
    check_box,
    check_file,
    eight_bits,
    scale_to_bytes,
)
from heatproof.images.findings import check_labels, lists_several, number_findings, read_findings
from heatproof.images.source import Sample, Source, content_stamp
from heatproof.images.volumes import raster

CHANNELS = (1, 3)


def open_memory(
    images: Any,
    *,
    labels: Any = None,
    boxes: Sequence[Sequence[Box]] | None = None,
    masks: Mapping[str, Any] | None = None,
    ids: Sequence[str] | None = None,
    class_names: Sequence[str] | None = None,
    bits: int | None = None,
    box_labels: Sequence[Sequence[Any]] | None = None,
    axes: str | None = None,
) -> Source:
    """A batch of images, or a list of any sizes: arrays "h w" or "h w c", tensors "c h w", Pillow images.

    Values have 8 or 16 bits or are fractions of 1; all become 8-bit, before the model's preprocessing.

    Args:
        images: the images.
        labels: "n" class numbers; of multi-label images a table "n k" of 0 and 1, or a list of names or
            numbers for each.
        boxes: of each image.
        masks: part name -> "n h w". Of multi-label images a mask belongs to the finding of its name.
        ids: names of the images; else 000000, 000001, ...
        class_names: the model's classes in its own order.
        bits: the depth of 16-bit values; else the smallest that holds all arrays.
        box_labels: of multi-label images, the finding of each box.
        axes: of each array, such as "dhw" of volumes or "hwc" of many channels, whose values then stay as
            they are (see volumes.py).
    """
    images = list(images)
    highest = [int(a.max()) for a in images if getattr(a, "dtype", None) == np.uint16 and a.size]
    bits = check_bits(bits) or (bit_depth(max(highest)) if highest else None)
    contents: list[Any] = [_content(image, f"image {i}", bits, axes) for i, image in enumerate(images)]
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
            f"{i:06d}" if ids is None else str(ids[i]),
            numbers[i],
            () if boxes is None else tuple(check_box(box) for box in boxes[i]),
            {part: mask[i] for part, mask in parts.items()},
            content=contents[i],
            findings=findings[i],
            box_findings=box_findings[i],
        )
        for i in range(n)
    )
    if axes is not None:
        return Source(
            samples, classes, lambda s: s.content, lambda s: content_stamp(s.content.values), deep=True
        )
    return Source(samples, classes, lambda s: Image.fromarray(s.content), lambda s: content_stamp(s.content))


def _content(image: Any, name: str, bits: int | None, axes: str | None) -> Any:
    """A Raster of an image whose axes are named, else 8-bit pixels."""
    if axes is None:
        return to_pixels(image, name, bits)
    try:
        return raster(_array(image), axes, bits)
    except InputError as error:
        raise InputError(f"{name}: {error}") from error


def _box_findings(
    boxes: Sequence[Sequence[Box]],
    given: Sequence[Sequence[Any]] | None,
    findings: Sequence[tuple[int, ...]],
    classes: Sequence[str],
) -> list[tuple[tuple[int, ...], ...]]:
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
    path: str | Path,
    *,
    split: str | None = "test",
    class_names: Sequence[str] | None = None,
    bits: int | None = None,
    axes: str | None = None,
) -> Source:
    """Open the arrays SPLIT_images "n h w" or "n h w c", and SPLIT_labels, of an .npz file.

    Without a split, the arrays are images and labels. They stay in memory. bits, axes: as for open_memory.
    """
    prefix = "" if split is None else f"{split}_"
    try:
        check_file(Path(path))
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
            if f"{prefix}images" not in arrays:
                splits = [key.removesuffix("images").rstrip("_") for key in arrays if key.endswith("images")]
                hint = did_you_mean(split or "", splits)
                raise InputError(f"{path} has no array {prefix}images; set split to one it has ({hint})")
            images, labels = arrays[f"{prefix}images"], arrays.get(f"{prefix}labels")
            mark = arrays.zip.getinfo(f"{prefix}images.npy").CRC  # a checksum that the file already holds
    except InputError:
        raise
    except Exception as error:  # damaged archives fail in their own ways
        detail = getattr(error, "strerror", None) or "it is damaged or holds something else"
        raise InputError(f"cannot read {path} as an .npz file: {detail}") from error
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


def to_pixels(image: Any, name: str, bits: int | None = None) -> np.ndarray:
    """Array "h w" or "h w 3", 8-bit. Tensors have channels first, arrays last, unless only the other fits."""
    array = _array(eight_bits(image, bits) if isinstance(image, Image.Image) else image)
    shape = array.shape
    tensor = hasattr(image, "detach")
    if array.ndim == 3 and shape[0] in CHANNELS and (tensor or shape[2] not in CHANNELS):
        array = np.moveaxis(array, 0, 2)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    if 0 in shape or not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 3)):
        raise InputError(
            f"{name} must be 'h w', 'h w c' or 'c h w' with 1 or 3 channels; its shape is {shape}"
        )
    if array.dtype == bool:
        array = array.astype(np.uint8) * 255
    if array.dtype != np.uint8:
        if array.dtype != np.uint16 and array.dtype.kind != "f":
            raise InputError(
                f"{name} has {array.dtype} values; give 8 or 16 unsigned bits, or fractions of 1"
            )
        try:
            array = scale_to_bytes(array, bits)
        except InputError as error:
            raise InputError(f"{name}: {error}") from error
    return np.ascontiguousarray(array)
