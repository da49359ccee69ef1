"""Validation of boxes and masks against the sizes of their images, which headers state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from heatproof.errors import InputError
from heatproof.images.files import Box, Size, box_text, picture_size, swaps_axes
from heatproof.images.source import Sample, Source, same_shape, sample_size

MAX_FAULTY = 0.05  # share of the boxes, or of the masks, that may not fit their images
TOLERANCE = 1  # pixels past an edge: tools that count edges, or pixels from 1, exceed the image by one


class Fault(NamedTuple):
    """A box that does not fit its image of this width and height."""

    sample: Sample
    box: Box
    size: Size


def check_annotations(source: Source) -> str:
    """Validate all boxes and masks.

    Returns:
        A warning with the number of boxes and masks that do not fit their images, or "".

    Raises:
        InputError: if more than 5 % of the boxes, or of the masks, do not fit their images.
    """
    faults, count = list(_box_faults(source)), sum(len(sample.boxes) for sample in source.samples)
    sentences = [(_box_sentence(faults), len(faults), count, "boxes")] if faults else []
    wrong, count = list(_mask_faults(source)), sum(len(sample.masks) for sample in source.samples)
    sentences += [(wrong[0], len(wrong), count, "masks")] if wrong else []
    warnings = []
    for sentence, n, total, kind in sentences:
        text = f"{n} of {total} {kind} do not fit their images; the first: {sentence}"
        if n > MAX_FAULTY * total:
            raise InputError(text)
        warnings.append(f"warning: {text}")
    return "\n".join(warnings)


def _box_faults(source: Source) -> Iterator[Fault]:
    for sample in source.samples:
        size = (sample.frame or sample_size(sample)) if sample.boxes else None
        if size is not None and len(size) == 2:
            for box in sample.boxes:
                if not _fits(box, size) or _is_normalised(box, size):
                    yield Fault(sample, box, (size[0], size[1]))


def _fits(box: Box, size: Sequence[int]) -> bool:
    return min(box) >= -TOLERANCE and box[2] <= size[0] - 1 + TOLERANCE and box[3] <= size[1] - 1 + TOLERANCE


def _is_normalised(box: Box, size: Sequence[int]) -> bool:
    return max(map(abs, box)) <= 1 and min(size) > 2


def _box_sentence(faults: Sequence[Fault]) -> str:
    sample, box, size = faults[0]
    subject = f"the box {box_text(box)} of {sample.id}, an image of {_by(size)} pixels,"
    if _is_normalised(box, size):
        return (
            f"{subject} has no number above 1 and seems to be given in fractions of the image; multiply x by "
            "the width and y by the height"
        )
    x0, y0, x1, y1 = box
    outside = x0 >= size[0] or y0 >= size[1] or x1 < 0 or y1 < 0
    fault = f"{subject} {'lies outside' if outside else 'reaches past the edge'}"
    if sample.frame is None and _is_turned(sample) and _fits(box, size[::-1]):
        return (
            f"{fault} and fits only the stored frame, whose axes the EXIF orientation swaps; give boxes of "
            "the upright image"
        )
    if all(_fits((b[1], b[0], b[3], b[2]), frame) for _, b, frame in faults):
        return f"{fault} and would fit with x and y swapped; the order is x0, y0, x1, y1"
    return (
        f"{fault}; correct it, or, if the boxes were drawn on an image of another size, scale them or state "
        "that size (columns width and height of a CSV file)"
    )


def _mask_faults(source: Source) -> Iterator[str]:
    """One sentence for every mask of another aspect ratio than its image."""
    if source.read_mask is not None:  # volumes
        return
    for sample in source.samples:
        size = sample_size(sample) if sample.masks else None
        if size is None or len(size) != 2:
            continue
        for part, mask in sample.masks.items():
            shape = _mask_size(mask)
            if shape is None or len(shape) != 2 or same_shape(shape, size):
                continue
            remedy = "; save the mask in the shape of the image"
            if _is_turned(sample) and same_shape(shape, size[::-1]):
                remedy = ", whose EXIF orientation swaps its axes; save the mask upright"
            yield (
                f"the mask of {part!r} of {sample.id} has {_by(shape)} pixels, another aspect ratio than its "
                f"image of {_by(size)} pixels{remedy}"
            )


def _mask_size(mask: Any) -> tuple[int, ...] | None:
    if not isinstance(mask, Path):
        return tuple(np.shape(mask)[::-1])
    try:
        return picture_size(mask)
    except InputError:  # reading it will tell
        return None


def _is_turned(sample: Sample) -> bool:
    return isinstance(sample.content, Path) and swaps_axes(sample.content)


def _by(size: Sequence[int]) -> str:
    return "x".join(map(str, size))
