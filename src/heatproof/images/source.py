"""A source: a list of samples that are not decoded yet, and a function that reads a sample.

Every kind of data is a function that returns a Source, so that filters, loader and runs use one type. Labels
are indices into `classes`; a source has labels for all its samples or for none. Boxes are (x0, y0, x1, y1) in
the image's pixels, from 0, both corners inside.

`identify` hashes the contents of images, to detect a replaced image. A file is read once; then equal
size, times and inode mean that it is the same. With `by_mtime`, for sets too large to read, size and time of
change stand for the content, and must survive when the files are copied.
"""

from __future__ import annotations

import errno
import hashlib
import json
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from heatproof.disk import digest
from heatproof.errors import InputError, UnknownNameError, about
from heatproof.images.files import (
    Box,
    Raster,
    Seen,
    Size,
    Spacing,
    listed_numbers,
    picture_size,
    read_image,
    swaps_axes,
)

if TYPE_CHECKING:
    from torch import Tensor

    from heatproof.images.preprocess import Carried, Preprocess

SETTLED = 2_000_000_000  # nanoseconds: a file this young could change again without another time
THREADS = 8
HEADERS_READ = 32  # of volumes, to compare their voxel sizes
SAME_SHAPE = 0.02  # sides may be rounded when an image is resized; more is another aspect ratio
MAX_FAULTY = 0.05  # share of the boxes, or of the masks, that may not fit their images
TOLERANCE = 1  # pixels past an edge: tools that count edges, or pixels from 1, exceed the image by one


@dataclass(frozen=True)
class Sample:
    """What is known about an image before it is decoded: name, label, annotations.

    Args:
        id, label: name and class of the image.
        boxes, masks: (x0, y0, x1, y1) in pixels; a mask file or an array "h w" by part name.
        frame: width and height of the image that the boxes were drawn on, if known.
        content, others: what `read` of the source needs; number of boxes of other classes.
        findings, box_findings: labels of a multi-label image, which has no label, and of each of its boxes.

    Example:
        >>> Sample("a.png", label=1, boxes=((0, 0, 5, 5),)).objects
        1
    """

    id: str
    label: int | None = None
    boxes: tuple[Box, ...] = ()
    masks: Mapping[str, Any] = field(default_factory=dict)
    frame: Size | None = None
    content: Any = None
    others: int = 0
    findings: tuple[int, ...] | None = None
    box_findings: tuple[tuple[int, ...], ...] = ()

    @property
    def stated(self) -> tuple[int, ...]:
        """Classes of the sample: the label, the multi-label findings, or none."""
        return (self.findings or ()) if self.label is None else (self.label,)

    @property
    def objects(self) -> int:
        return len(self.boxes) + self.others


@dataclass(frozen=True)
class Source:
    """A dataset: samples in a fixed order, class names, and a function that reads a sample.

    Args:
        samples, classes: the samples, and names of the classes.
        read, stamp: functions of a sample: its image, and a cheap mark of its content for the hash.
        deep: whether `read` returns Rasters, of any number of channels and axes.
        read_mask, voxels: read a mask file that is not an image file; a volume's voxel size.

    Example:
        >>> import numpy as np
        >>> from heatproof.images import open_source
        >>> source = open_source("memory", np.zeros((3, 8, 8), np.uint8), labels=[0, 1, 1])
        >>> len(source), source.sample(1).label, source.open(1).size
        (3, 1, (8, 8))
    """

    samples: tuple[Sample, ...]
    classes: tuple[str, ...]
    read: Callable[[Sample], Seen]
    stamp: Callable[[Sample], Any]
    deep: bool = False
    read_mask: Callable[[Path], np.ndarray] | None = None
    voxels: Callable[[Sample], Spacing] | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def sample(self, i: int) -> Sample:
        return self.samples[i]

    def open(self, i: int) -> Seen:
        """The image, upright, as "L" or "RGB"; or a Raster."""
        sample = self.samples[i]
        with about(f"cannot read {sample.id}"):
            return self.read(sample)

    def truth(
        self, i: int, preprocess: Preprocess, size: tuple[int, ...], finding: int | None = None
    ) -> tuple[Carried, dict[str, Tensor]]:
        """Boxes and masks in the pixels of the crop, for an image of this width and height.

        finding: only those that belong to it. A mask whose part is called like another finding does not.
        """
        sample = self.samples[i]
        if finding is not None:
            others = {name for f, name in enumerate(self.classes) if f != finding}
            boxes = zip(sample.boxes, sample.box_findings, strict=True)
            sample = replace(
                sample,
                boxes=tuple(box for box, of in boxes if finding in of),
                masks={part: mask for part, mask in sample.masks.items() if part not in others},
            )
        if sample.boxes and sample.frame and not same_shape(sample.frame, size):
            raise InputError(
                f"its boxes were drawn on a {_by(sample.frame)} image, but the file has {_by(size)} pixels"
            )
        carried = preprocess.carry_boxes(sample.boxes, size, sample.frame)
        masks = {name: read_mask(name, mask, self.read_mask) for name, mask in sample.masks.items()}
        return carried, {name: preprocess.carry_mask(mask, size) for name, mask in masks.items()}

    @property
    def labelled(self) -> bool:
        return bool(self.classes)

    @cached_property
    def is_multilabel(self) -> bool:
        """Whether the images are multi-label."""
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
        """Hash of samples, labels, boxes, masks and class names.

        It reads no pixels: an image file counts by its name and its size in bytes, so that replacing it by
        another of the same size goes unnoticed. Times are left out: a copy has the same hash.
        """
        content = hashlib.sha256(json.dumps(self.classes).encode())
        for s in self.samples:
            masks = [[name, content_stamp(mask)] for name, mask in sorted(s.masks.items())]
            row = [s.id, s.label, s.boxes, s.frame, masks, self.stamp(s), *stated_findings(s)]
            content.update(json.dumps(row).encode())
        return content.hexdigest()[:16]

    @property
    def warning(self) -> str:
        """A warning about voxels of different size, from some of the volumes' headers; or ''."""
        if self.voxels is None:
            return ""
        found: set[tuple[float, ...]] = set()
        for sample in self.samples[:: -(-len(self) // HEADERS_READ)]:
            with suppress(Exception):  # reading the volume reports what is wrong with it
                found.add(tuple(round(mm, 2) for mm in self.voxels(sample) or ()))
        sizes = sorted(found - {()})
        if len(sizes) < 2:
            return ""
        first, last = (" x ".join(f"{mm:g}" for mm in size) for size in (sizes[0], sizes[-1]))
        return (
            f"voxels differ between volumes, from {first} to {last} mm, and each volume is stretched to the "
            "same size; preprocess.spacing = [1, 1, 1] would make voxels of 1 mm of all of them"
        )

    def subset(self, indices: Iterable[int]) -> Source:
        """Some of the samples, in the order given; labels keep their meaning."""
        return replace(self, samples=tuple(self.samples[i] for i in indices))


def stated_findings(sample: Sample) -> list[Any]:
    """The part of hashes that only multi-label images have."""
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
        except (OSError, ValueError):  # ValueError: a NUL in the path; reading the file reports it
            return None
    if isinstance(content, tuple):
        return [content_stamp(part) for part in content]
    array = np.ascontiguousarray(content.values if isinstance(content, Raster) else content)
    mark = hashlib.sha256(array.data.cast("B") if array.size else b"").hexdigest()[:16]
    return [str(array.dtype), array.shape, mark]


def read_mask(name: str, mask: Any, read: Callable[[Path], np.ndarray] | None = None) -> np.ndarray:
    """Mask "h w". Of a file, the pixels at least half as bright as its brightest; of an array, all but 0."""
    if not isinstance(mask, Path):
        return np.asarray(np.asarray(mask) != 0)
    with about(f"its mask of {name!r} cannot be read"):
        if read is not None:
            return np.asarray(read(mask) != 0)
        pixels = np.asarray(read_image(mask).convert("L"))
    return np.asarray(pixels >= max(1, pixels.max() / 2))


def select(
    source: Source, *, single_object: bool = False, box_share: tuple[float, float] | None = None,
    classes: Sequence[str | int] | None = None, limit: int | None = None, stratified: bool = True,
    growing: bool = False, seed: int = 0,
) -> Source:  # fmt: skip
    """Filter the images of a source, then draw a random subset, in the source's order.

    A larger limit adds images to those of a smaller one, up to rounding; labels do not change.

    Args:
        source: the images.
        single_object: keep images with exactly one box, of any class.
        box_share: keep images whose boxes cover a share of the image within these bounds.
        classes: names or numbers of the classes to keep.
        limit: largest number of images, drawn with `seed`.
        stratified: keep the proportions of the classes.
        growing: return images in random order, so that a larger limit adds them at the end.
        seed: of the draw.

    Example:
        >>> import numpy as np
        >>> from heatproof.images import open_source
        >>> source = open_source("memory", np.zeros((4, 8, 8), np.uint8), labels=[0, 0, 1, 1])
        >>> [sample.label for sample in select(source, limit=2).samples]
        [0, 1]
    """
    chosen = list(enumerate(source.samples))
    left = [f"{len(chosen)} in the source"]
    if classes is not None:
        wanted = class_numbers(classes, source.classes)
        chosen = [(i, s) for i, s in chosen if wanted.intersection(s.stated)]
        left.append(f"{len(chosen)} in the classes")
    if single_object:
        chosen = [(i, s) for i, s in chosen if s.objects == 1]
        left.append(f"{len(chosen)} with one box")
    if box_share is not None:
        if len(box_share) != 2 or not 0 <= box_share[0] < box_share[1] <= 1:
            raise InputError(f"box_share is a low and a high share such as (0.1, 0.8); got {box_share}")
        low, high = box_share
        chosen = [(i, s) for i, s in chosen if _share_within(source, s, low, high)]
        left.append(f"{len(chosen)} whose boxes cover {low:g} to {high:g} of the image")
    if not chosen:
        raise InputError(f"no image is left: {', '.join(left)}")
    if limit is not None and limit < 1:
        raise InputError(f"limit is a number of images, at least 1; got {limit}")
    labels = [s.label if stratified else None for _, s in chosen]
    indices = [i for i, _ in chosen]
    if growing:
        indices = [indices[k] for k in in_turn(labels, seed)[:limit]]
    elif limit is not None:
        indices = [indices[k] for k in draw(labels, limit, seed)]
    return source if indices == list(range(len(source))) else source.subset(indices)


def draw(labels: Sequence[int | None], count: int, seed: int = 0) -> list[int]:
    """Ascending indices of `count` random entries, each label in its proportion (largest remainder)."""
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
    """All indices in random order, such that every beginning has the labels in about their proportions."""
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
    for given in wanted:
        matches = {k for k, name in enumerate(classes) if given in (k, name)}
        if not matches:
            raise UnknownNameError("class", str(given), classes)
        numbers |= matches
    return numbers


def covered(boxes: Sequence[Box], size: tuple[int, ...]) -> float:
    """The share of an image that its boxes cover together."""
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


def _share_within(source: Source, sample: Sample, low: float, high: float) -> bool:
    """False without a box. An image that cannot be read stays in, so that the loader reports it."""
    if not sample.boxes:
        return False
    try:
        size = sample.frame or sample_size(sample) or source.read(sample).size
    except InputError:
        return True
    return low <= covered(sample.boxes, size) <= high


def sample_size(sample: Sample) -> tuple[int, ...] | None:
    """Width and height of the upright image; None where it would have to be decoded."""
    if isinstance(sample.content, Path):
        with suppress(InputError):  # a DICOM file, or a broken one
            return picture_size(sample.content)
        return None
    if isinstance(sample.content, np.ndarray):
        return tuple(sample.content.shape[1::-1])
    return sample.content.size if isinstance(sample.content, Raster) else None


def same_shape(a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether two widths and heights have the same aspect ratio, up to rounding."""
    return abs(a[0] * b[1] - a[1] * b[0]) <= SAME_SHAPE * max(a[0] * b[1], a[1] * b[0])


def check_annotations(source: Source) -> str:
    """Compare boxes and masks with the sizes of their images, which headers state; return a warning, or "".

    Raises InputError if more than 5 % of the boxes, or of the masks, do not fit their images.
    """
    boxes: list[tuple[Sample, Box, Sequence[int]]] = []
    masks: list[str] = []
    for sample in source.samples:
        size = (sample.frame or sample_size(sample)) if sample.boxes else None
        if size is not None and len(size) == 2:
            wrong = (box for box in sample.boxes if not _fits(box, size) or _is_normalised(box, size))
            boxes += [(sample, box, size) for box in wrong]
        if sample.masks and source.read_mask is None:  # of volumes, it is set
            masks += _mask_faults(sample, sample_size(sample) or ())
    warnings = []
    for kind, n in (("boxes", len(boxes)), ("masks", len(masks))):
        total = sum(len(getattr(sample, kind)) for sample in source.samples)
        if n:
            first = _box_sentence(boxes) if kind == "boxes" else masks[0]
            text = f"{n} of {total} {kind} do not fit their images; the first: {first}"
            if n > MAX_FAULTY * total:
                raise InputError(text)
            warnings.append(f"warning: {text}")
    return "\n".join(warnings)


def _fits(box: Box, size: Sequence[int]) -> bool:
    return min(box) >= -TOLERANCE and box[2] <= size[0] - 1 + TOLERANCE and box[3] <= size[1] - 1 + TOLERANCE


def _is_normalised(box: Box, size: Sequence[int]) -> bool:
    return max(map(abs, box)) <= 1 and min(size) > 2


def _box_sentence(faults: Sequence[tuple[Sample, Box, Sequence[int]]]) -> str:
    sample, box, size = faults[0]
    subject = f"the box ({listed_numbers(box)}) of {sample.id}, an image of {_by(size)} pixels,"
    if _is_normalised(box, size):
        unit = "has no number above 1 and seems to be given in fractions of the image"
        return f"{subject} {unit}; multiply x by the width and y by the height"
    x0, y0, x1, y1 = box
    outside = x0 >= size[0] or y0 >= size[1] or x1 < 0 or y1 < 0
    fault = f"{subject} {'lies outside' if outside else 'reaches past the edge'}"
    if sample.frame is None and _is_turned(sample) and _fits(box, size[::-1]):
        axes = "fits only the stored frame, whose axes the EXIF orientation swaps"
        return f"{fault} and {axes}; give boxes of the upright image"
    if all(_fits((b[1], b[0], b[3], b[2]), frame) for _, b, frame in faults):
        return f"{fault} and would fit with x and y swapped; the order is x0, y0, x1, y1"
    drawn = "if the boxes were drawn on an image of another size, scale them or state that size"
    return f"{fault}; correct it, or, {drawn} (columns width and height of a CSV file)"


def _mask_faults(sample: Sample, size: Sequence[int]) -> Iterator[str]:
    """One sentence for every mask of another aspect ratio than its image."""
    for part, mask in sample.masks.items():
        shape: Sequence[int] = ()
        with suppress(InputError):  # reading the mask reports what is wrong with it
            shape = picture_size(mask) if isinstance(mask, Path) else np.shape(mask)[::-1]
        if len(size) != 2 or len(shape) != 2 or same_shape(shape, size):
            continue
        remedy = "; save the mask in the shape of the image"
        if _is_turned(sample) and same_shape(shape, size[::-1]):
            remedy = ", whose EXIF orientation swaps its axes; save the mask upright"
        yield (
            f"the mask of {part!r} of {sample.id} has {_by(shape)} pixels, another aspect ratio than its "
            f"image of {_by(size)} pixels{remedy}"
        )


def _is_turned(sample: Sample) -> bool:
    return isinstance(sample.content, Path) and swaps_axes(sample.content)


def _by(size: Sequence[int]) -> str:
    return "x".join(map(str, size))


State = tuple[int, int, int, int]


def file_state(path: Path) -> State:
    """Size, times and inode: a file that keeps them all was not changed (ctime cannot be set back)."""
    info = path.stat()
    if not stat.S_ISREG(info.st_mode):  # a pipe or a device, which reading may never end
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino


def is_settled(state: State) -> bool:
    """Whether a later change must show in the file's times, whose steps may be milliseconds."""
    return time.time_ns() - max(state[1:3]) > SETTLED


@dataclass
class Hashes:
    """SHA-256 of files, cached by their state."""

    known: dict[str, tuple[Any, ...]] = field(default_factory=dict)  # path -> state, hash
    by_mtime: bool = False

    def of(self, path: Path) -> str | None:
        """The hash of a file's content; None if it cannot be read."""
        try:
            state, mark = file_state(path), digest(path)
        except (OSError, ValueError):  # ValueError: a NUL in the path
            return None
        if is_settled(state):
            self.known[str(path)] = *state, mark
        return mark

    def remembered(self, path: Path) -> str | None:
        """The cached hash of an unchanged file; None if it must be read."""
        try:
            state = file_state(path)
        except (OSError, ValueError):
            return None
        if self.by_mtime:
            return f"{state[0]} bytes of {state[1]}"
        *before, mark = self.known.get(str(path), (None,))
        return mark if tuple(before) == state else None


def files_of(sample: Sample) -> list[Path]:
    content = sample.content if isinstance(sample.content, tuple) else (sample.content,)
    return [part for part in (*content, *sample.masks.values()) if isinstance(part, Path)]


def identify(source: Source, hashes: Hashes) -> list[tuple[str, str]]:
    """Id and identity of every sample: image, masks, label and boxes."""
    files = {path for sample in source.samples for path in files_of(sample)}
    marks = {path: hashes.remembered(path) for path in files}
    unread = [path for path, mark in marks.items() if mark is None]
    with ThreadPoolExecutor(THREADS) as pool:  # hashing and reading release Python's lock
        shares = [unread[k::THREADS] for k in range(THREADS)]  # not a future per file: there may be millions
        for share, read in zip(shares, pool.map(lambda s: [hashes.of(p) for p in s], shares), strict=True):
            marks |= zip(share, read, strict=True)
    return [(sample.id, _identity(source, sample, marks)) for sample in source.samples]


def _identity(source: Source, sample: Sample, marks: Mapping[Path, str | None]) -> str:
    masks = [
        [name, marks[mask] if isinstance(mask, Path) else content_stamp(mask)]
        for name, mask in sorted(sample.masks.items())
    ]
    content = marks[sample.content] if isinstance(sample.content, Path) else source.stamp(sample)
    if isinstance(sample.content, tuple):  # the slices of a volume
        content = [marks[part] for part in sample.content]
    row = [sample.id, sample.label, sample.boxes, sample.frame, sample.objects, masks, content]
    return hashlib.sha256(json.dumps([*row, *stated_findings(sample)]).encode()).hexdigest()[:32]
