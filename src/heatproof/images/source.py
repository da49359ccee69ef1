"""A source is a list of samples that nobody has decoded yet, and one function that reads a sample.

Every kind of data (folder, csv, imagenet, npz, hf, dicom, memory) is a function that returns a Source, so
filters, loader and runs know one type. Labels are indices into `classes`; a source has labels for all its
samples or for none. Boxes are (x0, y0, x1, y1) in the picture's pixels, from 0, both corners inside.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from heatproof.errors import InputError, UnknownNameError
from heatproof.images.files import Box, Size, picture_size, read_image
from heatproof.images.volumes import Raster, Seen, Spacing, uneven

if TYPE_CHECKING:
    from torch import Tensor

    from heatproof.images.preprocess import Carried, Preprocess

HEADERS_READ = 32
SAME_SHAPE = 0.02  # sides may be rounded when a picture is resized; more is another shape


@dataclass(frozen=True)
class Sample:
    """What is known about one picture without decoding it."""

    id: str
    label: int | None = None
    boxes: tuple[Box, ...] = ()
    masks: Mapping[str, Any] = field(default_factory=dict)  # part name -> mask file, or "h w" array
    frame: Size | None = None  # width and height of the picture the boxes were drawn on, where known
    content: Any = None  # what the source's `read` needs: a file, a row, an array
    others: int = 0  # boxes of other classes in the picture
    findings: tuple[int, ...] | None = None  # of a picture that may have several; then it has no label
    box_findings: tuple[tuple[int, ...], ...] = ()  # of each box, where there may be several findings

    @property
    def stated(self) -> tuple[int, ...]:
        """The classes that it is said to be of: its label, its findings, or none."""
        return (self.findings or ()) if self.label is None else (self.label,)

    @property
    def objects(self) -> int:
        return len(self.boxes) + self.others


@dataclass(frozen=True)
class Source:
    """Samples in a fixed order, the names of their classes, and how to read one."""

    samples: tuple[Sample, ...]
    classes: tuple[str, ...]
    read: Callable[[Sample], Seen]
    stamp: Callable[[Sample], Any]  # a cheap mark of the picture's content, for the hash
    deep: bool = False  # whether it gives values as they were measured, in any number of channels and axes
    read_mask: Callable[[Path], np.ndarray] | None = None  # of a mask's file, where it is no picture
    voxels: Callable[[Sample], Spacing] | None = None  # of volumes whose files say it: their size, undecoded

    def __len__(self) -> int:
        return len(self.samples)

    def sample(self, i: int) -> Sample:
        return self.samples[i]

    def open(self, i: int) -> Seen:
        """The picture, upright, as "L" or "RGB"; or a Raster."""
        sample = self.samples[i]
        try:
            return self.read(sample)
        except InputError as error:
            raise InputError(f"cannot read {sample.id}: {error}") from error

    def truth(
        self, i: int, preprocess: Preprocess, picture: tuple[int, ...], finding: int | None = None
    ) -> tuple[Carried, dict[str, Tensor]]:
        """Boxes and masks in the pixels of the crop, for a picture that has this width and height.

        finding: only those that belong to it. A mask whose part is called like another finding does not.
        """
        sample = self.samples[i] if finding is None else self._about(self.samples[i], finding)
        if sample.boxes and sample.frame and not same_shape(sample.frame, picture):
            drawn, found = ("x".join(map(str, size)) for size in (sample.frame, picture))
            raise InputError(f"its boxes were drawn on a {drawn} picture, but the file has {found} pixels")
        boxes = preprocess.carry_boxes(sample.boxes, picture, sample.frame)
        masks = {name: read_mask(name, mask, self.read_mask) for name, mask in sample.masks.items()}
        return boxes, {name: preprocess.carry_mask(mask, picture) for name, mask in masks.items()}

    def _about(self, sample: Sample, finding: int) -> Sample:
        pairs = zip(sample.boxes, sample.box_findings, strict=True)
        others = {name for f, name in enumerate(self.classes) if f != finding}
        masks = {part: mask for part, mask in sample.masks.items() if part not in others}
        return replace(sample, boxes=tuple(box for box, of in pairs if finding in of), masks=masks)

    @property
    def labelled(self) -> bool:
        return bool(self.classes)

    @cached_property
    def is_multilabel(self) -> bool:
        """Whether a picture may have several findings, or none."""
        return any(sample.findings is not None for sample in self.samples)

    @cached_property
    def boxed(self) -> bool:
        """Whether any sample has a box."""
        return any(sample.boxes for sample in self.samples)

    @cached_property
    def parts(self) -> tuple[str, ...]:
        """Names of the masks, over all samples."""
        return tuple(sorted({name for sample in self.samples for name in sample.masks}))

    @cached_property
    def hash(self) -> str:
        """Changes when samples, labels, boxes, masks or class names do.

        It reads no pixels: a picture file counts by its name and its size in bytes, so one that is replaced
        by another of exactly the same size goes unnoticed. Times are left out: a copy hashes the same.
        """
        digest = hashlib.sha256(json.dumps(self.classes).encode())
        for s in self.samples:
            masks = [[name, content_stamp(mask)] for name, mask in sorted(s.masks.items())]
            row = [s.id, s.label, s.boxes, s.frame, masks, self.stamp(s), *stated_findings(s)]
            digest.update(json.dumps(row).encode())
        return digest.hexdigest()[:16]

    @property
    def warning(self) -> str:
        """What should be known of volumes that are seen together, from some of their headers; or ''."""
        if self.voxels is None:
            return ""
        some = self.samples[:: -(-len(self) // HEADERS_READ)]
        return uneven(map(self.voxels, some))

    def subset(self, indices: Iterable[int]) -> Source:
        """Some of the samples, in the order given; labels keep their meaning."""
        return replace(self, samples=tuple(self.samples[i] for i in indices))


def stated_findings(sample: Sample) -> list[Any]:
    """What hashes take in of findings: nothing of a picture that has one label."""
    return [] if sample.findings is None else [sample.findings, sample.box_findings]


def file_source(
    samples: Iterable[Sample], classes: Sequence[str], read: Callable[[Path], Image.Image]
) -> Source:
    """A source whose samples' contents are files."""
    return Source(
        tuple(samples), tuple(classes), lambda s: read(s.content), lambda s: content_stamp(s.content)
    )


def content_stamp(content: Any) -> Any:
    """The size of a file in bytes (None where it is missing), a digest of an array."""
    if isinstance(content, Path):
        try:
            return content.stat().st_size
        except (OSError, ValueError):  # a NUL in the path; reading it will tell
            return None
    if isinstance(content, tuple):
        return [content_stamp(part) for part in content]
    array = np.ascontiguousarray(content)
    digest = hashlib.sha256(array.data.cast("B") if array.size else b"").hexdigest()[:16]
    return [str(array.dtype), array.shape, digest]


def read_mask(name: str, mask: Any, read: Callable[[Path], np.ndarray] | None = None) -> np.ndarray:
    """ "h w" bool. Of a file, the pixels at least half as bright as its brightest; of an array, all but 0."""
    if not isinstance(mask, Path):
        return np.asarray(np.asarray(mask) != 0)
    try:
        if read is not None:
            return np.asarray(read(mask) != 0)
        pixels = np.asarray(read_image(mask).convert("L"))
    except InputError as error:
        raise InputError(f"its mask of {name!r} cannot be read: {error}") from error
    return np.asarray(pixels >= max(1, pixels.max() / 2))


def select(
    source: Source,
    *,
    single_object: bool = False,
    box_share: tuple[float, float] | None = None,
    classes: Sequence[str | int] | None = None,
    limit: int | None = None,
    stratified: bool = True,
    growing: bool = False,
    seed: int = 0,
) -> Source:
    """Filters, then a random subset, in the source's order. Labels and class names stay as they are.

    single_object: exactly one box, of whatever class. box_share: the boxes cover a share of the picture in
    these bounds. classes: names or numbers. limit: at most so many, drawn with `seed`; `stratified` keeps the
    proportions of the classes. A larger limit adds pictures to those of a smaller one, up to rounding.
    growing: in random order, so that a larger limit adds them at the end.
    """
    indices = list(range(len(source)))
    left = [f"{len(indices)} in the source"]
    if classes is not None:
        wanted = class_numbers(classes, source.classes)
        indices = [i for i in indices if wanted.intersection(source.samples[i].stated)]
        left.append(f"{len(indices)} in the classes")
    if single_object:
        indices = [i for i in indices if source.samples[i].objects == 1]
        left.append(f"{len(indices)} with one box")
    if box_share is not None:
        if len(box_share) != 2 or not 0 <= box_share[0] < box_share[1] <= 1:
            raise InputError(f"box_share is a low and a high share such as (0.1, 0.8); got {box_share}")
        low, high = box_share
        indices = [i for i in indices if _share_within(source, i, low, high)]
        left.append(f"{len(indices)} whose boxes cover {low:g} to {high:g} of the picture")
    if not indices:
        raise InputError(f"no picture is left: {', '.join(left)}")
    if limit is not None and limit < 1:
        raise InputError(f"limit is a number of pictures, at least 1; got {limit}")
    labels = [source.samples[i].label if stratified else None for i in indices]
    if growing:
        indices = [indices[k] for k in in_turn(labels, seed)[:limit]]
    elif limit is not None:
        indices = [indices[k] for k in draw(labels, limit, seed)]
    return source if indices == list(range(len(source))) else source.subset(indices)


def draw(labels: Sequence[int | None], count: int, seed: int = 0) -> list[int]:
    """Ascending indices of `count` random entries, each label in its proportion (largest remainder).

    >>> draw([0, 0, 0, 0, 1, 1], 3)[-1] in (4, 5)
    True
    """
    if count >= len(labels):
        return list(range(len(labels)))
    groups: dict[int, list[int]] = {}
    for i, label in enumerate(labels):
        groups.setdefault(-1 if label is None else label, []).append(i)
    quota = {label: count * len(group) / len(labels) for label, group in groups.items()}
    take = {label: int(share) for label, share in quota.items()}
    by_remainder = sorted(groups, key=lambda label: (take[label] - quota[label], label))
    for label in by_remainder[: count - sum(take.values())]:
        take[label] += 1
    chosen: list[int] = []
    for label, group in groups.items():
        order = np.random.default_rng((seed, label + 1)).permutation(len(group))
        chosen += [group[k] for k in order[: take[label]]]
    return sorted(chosen)


def in_turn(labels: Sequence[int | None], seed: int = 0) -> list[int]:
    """All indices in random order, such that every beginning has the labels in about their proportions.

    >>> sorted([0, 0, 1, 1][i] for i in in_turn([0, 0, 1, 1])[:2])
    [0, 1]
    """
    order = np.random.default_rng(seed).permutation(len(labels)).tolist()
    counts, place = Counter(labels), dict.fromkeys(labels, 0.5)
    when = {}
    for i in order:
        when[i] = place[labels[i]] / counts[labels[i]]
        place[labels[i]] += 1
    return sorted(order, key=when.__getitem__)


def class_numbers(wanted: Sequence[str | int], classes: Sequence[str]) -> set[int]:
    """Classes by name or number; a name that several classes share means all of them."""
    numbers: set[int] = set()
    for one in wanted:
        found = {k for k, name in enumerate(classes) if k == one or name == one}
        if not found:
            raise UnknownNameError("class", str(one), classes)
        numbers |= found
    return numbers


def covered(boxes: Sequence[Box], size: tuple[int, ...]) -> float:
    """The share of a picture that its boxes cover together.

    >>> covered([(0, 0, 4, 9), (3, 0, 4, 9)], (10, 10))
    0.5
    """
    wide, high = size[:2]
    frames = [(max(x0, 0), max(y0, 0), min(x1 + 1, wide), min(y1 + 1, high)) for x0, y0, x1, y1 in boxes]
    xs, ys = (sorted({f[k] for f in frames} | {f[k + 2] for f in frames}) for k in (0, 1))
    area = sum(
        (right - left) * (bottom - top)
        for left, right in pairwise(xs)
        for top, bottom in pairwise(ys)
        if any(f[0] <= left and right <= f[2] and f[1] <= top and bottom <= f[3] for f in frames)
    )
    return area / (wide * high)


def _share_within(source: Source, i: int, low: float, high: float) -> bool:
    """False without a box. A picture that cannot be read stays in, so that the loader reports it."""
    sample = source.samples[i]
    if not sample.boxes:
        return False
    try:
        found = sample.frame or sample_size(sample) or source.read(sample).size
    except InputError:
        return True
    return low <= covered(sample.boxes, found) <= high


def sample_size(sample: Sample) -> tuple[int, ...] | None:
    """Width and height of the upright image, without decoding it; None where only decoding can tell."""
    if isinstance(sample.content, Path):
        with suppress(InputError):  # a DICOM file, or a broken one
            return picture_size(sample.content)
        return None
    if isinstance(sample.content, np.ndarray):
        return tuple(sample.content.shape[1::-1])
    return sample.content.size if isinstance(sample.content, Raster) else None


def same_shape(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Whether two widths and heights have the same aspect ratio, up to rounding."""
    return abs(a[0] * b[1] - a[1] * b[0]) <= SAME_SHAPE * max(a[0] * b[1], a[1] * b[0])
