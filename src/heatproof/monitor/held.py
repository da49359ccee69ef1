"""The images a monitor looks at again and again, checked before training starts.

They are kept in memory, model-ready, in one fixed order. A source or a folder is decoded once. A subset keeps
the proportions of the classes, and a smaller one is part of a larger one (see images.source.draw).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from heatproof.errors import InputError
from heatproof.images import Failure, Preprocess, Source, batches, open_source
from heatproof.images.findings import read_findings
from heatproof.images.loader import entries
from heatproof.images.source import draw
from heatproof.models import Model
from heatproof.show import pixels
from heatproof.types import Batch

FEWEST = 2  # images of a class: one has no pair


class Asked(NamedTuple):
    """What maps are of: images, or findings of images, each with its class and its image's row."""

    batch: Batch
    targets: Tensor
    rows: Tensor


@dataclass(frozen=True)
class HeldOut:
    """Images with their names and labels."""

    ids: tuple[str, ...]
    images: Tensor  # "b c H W", model-ready
    labels: Tensor  # "b"; "b k" bool where an image may have several findings
    classes: tuple[str, ...]
    preprocess: Preprocess | None = None  # where the pictures were made ready here
    failures: tuple[Failure, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: Sequence[int]) -> HeldOut:
        chosen = list(rows)
        if len(chosen) == len(self):
            return self
        ids = tuple(self.ids[i] for i in chosen)
        return replace(self, ids=ids, images=self.images[chosen], labels=self.labels[chosen])

    @property
    def is_multilabel(self) -> bool:
        """Whether an image may have several findings."""
        return self.labels.ndim == 2

    @cached_property
    def explained(self) -> Asked:
        """Every image with its class, or every finding of every image."""
        if not self.is_multilabel:
            return Asked(Batch(self.ids, self.images, self.labels), self.labels, torch.arange(len(self)))
        batch = Batch(self.ids, self.images, findings=self.labels)
        return Asked(*entries(batch, self.labels, self.classes), self.labels.nonzero()[:, 0])

    @property
    def occur(self) -> list[int]:
        """The classes or findings that there are images of."""
        return sorted(set(self.explained.targets.tolist()))

    def at_most(self, count: int, seed: int) -> list[int]:
        """Rows of a stratified subset of `count`, or of a few more, so that every class keeps a pair."""
        sizes = self._sizes(self.labels)
        kept = torch.minimum(sizes, torch.tensor(FEWEST))
        labels = [None] * len(self) if self.is_multilabel else self.labels.tolist()
        for size in range(max(count, 1), len(self) + 1):
            rows = draw(labels, size, seed)
            if (self._sizes(self.labels[rows], len(sizes)) >= kept).all():
                return rows
        return list(range(len(self)))

    def _sizes(self, labels: Tensor, classes: int = 0) -> Tensor:
        return labels.sum(0) if self.is_multilabel else torch.bincount(labels, minlength=classes)

    def first_of_each(self) -> list[int]:
        """The row of the first image of every class."""
        return sorted({int(self.explained.rows[i]) for i in self.first_maps()})

    def first_maps(self) -> list[int]:
        """The place of the first map of every class."""
        first: dict[int, int] = {}
        for i, label in enumerate(self.explained.targets.tolist()):
            first.setdefault(label, i)
        return sorted(first.values())

    @property
    def pixels(self) -> np.ndarray:
        """ "b H W 3" uint8, for people; stretched to the whole range where nobody knows their own."""
        return pixels(self.images, self.preprocess)

    @property
    def hash(self) -> str:
        """Changes when an image, a label, a name or a class does."""
        digest = hashlib.sha256(repr((self.ids, self.labels.tolist(), self.classes)).encode())
        for image in self.images:
            digest.update(image.detach().float().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]


def hold(
    images: Any,
    labels: Any = None,
    *,
    preprocess: Preprocess | None = None,
    class_names: Sequence[str] | None = None,
    limit: int | None = None,
    seed: int = 0,
    batch_size: int = 32,
) -> HeldOut:
    """Model-ready images "b c H W" with labels; a list of Batch; a Source or a folder with `preprocess`."""
    if batch_size < 1:
        raise InputError(f"batch_size must be at least 1, got {batch_size}")
    if limit is not None and limit < 1:
        raise InputError(f"limit is a number of images, at least 1; got {limit}")
    if isinstance(images, (str, Path)):
        images = open_source("folder", images)
    if isinstance(images, Source):
        if labels is not None:
            raise InputError("a source brings its own labels; leave labels out")
        if not images.labelled:
            raise InputError(
                "the pictures have no labels; a C-Score is about the images of a class, so give some"
            )
        if preprocess is None:
            raise InputError("pictures need preprocess=, such as the preprocess of hp.load_model(your_model)")
        if limit is not None:
            images = images.subset(draw([s.label for s in images.samples], limit, seed))
        loaded = list(batches(images, preprocess, batch_size))
        held = _from_batches([one.batch for one in loaded], None, class_names or images.classes)
        failures = tuple(failure for one in loaded for failure in one.failures)
        return replace(held, preprocess=preprocess, failures=failures)
    if isinstance(images, Batch):
        images = [images]
    if isinstance(images, (list, tuple)) and images and all(isinstance(one, Batch) for one in images):
        held = _from_batches(images, labels, class_names)
    else:
        pixels = _ready(images)
        held = _checked(tuple(f"{i:06d}" for i in range(len(pixels))), pixels, labels, class_names)
    return held if limit is None else held.take(held.at_most(limit, seed))


def _from_batches(given: Sequence[Batch], labels: Any, class_names: Sequence[str] | None) -> HeldOut:
    if labels is None:
        known = [one.labels if one.findings is None else one.findings for one in given]
        if any(one is None for one in known):
            raise InputError("the batches have no labels; give them labels, or pass labels beside the images")
        labels = torch.cat([one for one in known if one is not None])
    shapes = {tuple(one.images.shape[1:]) for one in given if len(one.ids)}
    if len(shapes) > 1:
        raise InputError(f"images of one size are needed; the batches have {' and '.join(map(str, shapes))}")
    pixels = _ready(torch.cat([one.images for one in given]))
    return _checked(tuple(name for one in given for name in one.ids), pixels, labels, class_names)


def _ready(images: Any) -> Tensor:
    # These checks are the same for every network; none is there yet.
    return Model(nn.Identity()).check_images(images)


def _checked(ids: tuple[str, ...], images: Tensor, labels: Any, class_names: Sequence[str] | None) -> HeldOut:
    if labels is None:
        raise InputError("a monitor needs labels, one class number per image")
    y = torch.as_tensor(labels).detach().cpu()
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim == 2:
        return _with_findings(ids, images, y, class_names)
    if y.ndim != 1 or y.is_floating_point() or y.is_complex():
        raise InputError(f"labels are one class number per image; got {y.dtype} of shape {tuple(y.shape)}")
    y = y.long()
    if len(y) != len(images):
        raise InputError(f"there are {len(images)} images but {len(y)} labels; they must match")
    if len(set(ids)) < len(ids):
        raise InputError("two images have the same name; names must differ")
    if y.min() < 0:
        raise InputError(f"an image has the label {int(y.min())}; class numbers start at 0")
    if len(y.unique()) < 2:
        raise InputError(
            f"all {len(y)} images have label {int(y[0])}; AUC and C-Score by class need two classes"
        )
    if isinstance(class_names, str):
        raise InputError(f"class_names is a list of names, not the text {class_names!r}")
    count = int(y.max()) + 1
    if class_names is not None and len(class_names) < count:
        raise InputError(f"labels go up to {count - 1}, but there are only {len(class_names)} class names")
    classes = tuple(map(str, class_names)) if class_names else tuple(map(str, range(count)))
    if len(set(classes)) < len(classes):
        raise InputError("two classes have the same name; names must differ")
    return HeldOut(ids, images, y, classes)


def _with_findings(
    ids: tuple[str, ...], images: Tensor, labels: Tensor, class_names: Sequence[str] | None
) -> HeldOut:
    """Images that may have several findings, or none: a table of 0 and 1."""
    if len(labels) != len(images):
        raise InputError(f"there are {len(images)} images but {len(labels)} labels; they must match")
    _, classes = read_findings(labels.numpy(), class_names)
    table = labels.bool()
    if not (table.any(0) & ~table.all(0)).any():
        raise InputError("no finding is in some images and not in others; AUC and C-Score need such a one")
    return HeldOut(ids, images, table, classes)
