"""The images on which a monitor measures every epoch, checked before training starts.

They are in memory, model-ready, in a fixed order. A source or a folder is decoded once. A subset keeps the
proportions of the classes, and a smaller one is part of a larger one (see images.source.draw).
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
from heatproof.images.findings import check_labels, read_findings
from heatproof.images.loader import entries
from heatproof.images.source import draw
from heatproof.models import Model
from heatproof.show import pixels
from heatproof.types import Batch

FEWEST = 2  # images of a class: one has no pair


class Explained(NamedTuple):
    """The explained items: images, or labels of images, each with its class and its image's row."""

    batch: Batch
    targets: Tensor
    rows: Tensor


@dataclass(frozen=True)
class ValidationSet:
    """Images with their names and labels."""

    ids: tuple[str, ...]
    images: Tensor  # "b c H W", model-ready
    labels: Tensor  # "b"; "b k" bool of multi-label images
    classes: tuple[str, ...]
    preprocess: Preprocess | None = None  # that was applied here
    failures: tuple[Failure, ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: Sequence[int]) -> ValidationSet:
        chosen = list(rows)
        if len(chosen) == len(self):
            return self
        ids = tuple(self.ids[i] for i in chosen)
        return replace(self, ids=ids, images=self.images[chosen], labels=self.labels[chosen])

    @property
    def is_multilabel(self) -> bool:
        return self.labels.ndim == 2

    @cached_property
    def explained(self) -> Explained:
        """Every image with its class, or every label of every image."""
        if not self.is_multilabel:
            return Explained(Batch(self.ids, self.images, self.labels), self.labels, torch.arange(len(self)))
        batch = Batch(self.ids, self.images, findings=self.labels)
        return Explained(*entries(batch, self.labels, self.classes), self.labels.nonzero()[:, 0])

    @property
    def occur(self) -> list[int]:
        """Classes that have images."""
        return sorted(set(self.explained.targets.tolist()))

    def at_most(self, count: int, seed: int) -> list[int]:
        """Rows of a stratified subset of `count`, or of a few more, so that every class keeps a pair."""
        labels = [None] * len(self) if self.is_multilabel else self.labels.tolist()
        sizes = self._sizes(self.labels)
        least = torch.minimum(sizes, torch.tensor(FEWEST))
        for size in range(max(count, 1), len(self) + 1):
            rows = draw(labels, size, seed)
            if (self._sizes(self.labels[rows], len(sizes)) >= least).all():
                return rows
        return list(range(len(self)))

    def _sizes(self, labels: Tensor, classes: int = 0) -> Tensor:
        return labels.sum(0) if self.is_multilabel else torch.bincount(labels, minlength=classes)

    def first_maps(self) -> list[int]:
        """Index of the first map of every class."""
        targets = self.explained.targets.tolist()
        return sorted(targets.index(label) for label in set(targets))

    @property
    def first_images(self) -> ValidationSet:
        """The first image of every class."""
        return self.take(sorted({int(self.explained.rows[i]) for i in self.first_maps()}))

    @property
    def pixels(self) -> np.ndarray:
        """Images "b H W 3" uint8; stretched to the whole range without a preprocess."""
        return pixels(self.images, self.preprocess)

    @property
    def hash(self) -> str:
        """Hash of images, labels, names and classes."""
        digest = hashlib.sha256(repr((self.ids, self.labels.tolist(), self.classes)).encode())
        for image in self.images:
            digest.update(image.detach().float().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]


def make_validation_set(
    images: Any,
    labels: Any = None,
    *,
    preprocess: Preprocess | None = None,
    class_names: Sequence[str] | None = None,
    limit: int | None = None,
    seed: int = 0,
    batch_size: int = 32,
) -> ValidationSet:
    """Check images: model-ready "b c H W" with labels; a list of Batch; a Source or folder with `preprocess`.

    Raises InputError if images or labels cannot be used.
    """
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
                "the images have no labels; a C-Score needs the class of each image; pass labels"
            )
        if preprocess is None:
            raise InputError("images need preprocess=, such as the preprocess of hp.load_model(your_model)")
        if limit is not None:
            images = images.subset(draw([s.label for s in images.samples], limit, seed))
        loaded = list(batches(images, preprocess, batch_size))
        made = _from_batches([part.batch for part in loaded], None, class_names or images.classes)
        failures = tuple(failure for part in loaded for failure in part.failures)
        return replace(made, preprocess=preprocess, failures=failures)
    if isinstance(images, Batch):
        images = [images]
    if isinstance(images, (list, tuple)) and images and all(isinstance(part, Batch) for part in images):
        made = _from_batches(images, labels, class_names)
    else:
        tensors = _check_images(images)
        made = _check_set(tuple(f"{i:06d}" for i in range(len(tensors))), tensors, labels, class_names)
    return made if limit is None else made.take(made.at_most(limit, seed))


def _from_batches(parts: Sequence[Batch], labels: Any, class_names: Sequence[str] | None) -> ValidationSet:
    if labels is None:
        known = [part.labels if part.findings is None else part.findings for part in parts]
        if any(part is None for part in known):
            raise InputError("the batches have no labels; give them labels, or pass labels beside the images")
        labels = torch.cat([part for part in known if part is not None])
    shapes = {tuple(part.images.shape[1:]) for part in parts if len(part.ids)}
    if len(shapes) > 1:
        raise InputError(f"images of one size are needed; the batches have {' and '.join(map(str, shapes))}")
    images = _check_images(torch.cat([part.images for part in parts]))
    return _check_set(tuple(name for part in parts for name in part.ids), images, labels, class_names)


def _check_images(images: Any) -> Tensor:
    # These checks are the same for every network; there is none yet.
    return Model(nn.Identity()).check_images(images)


def _check_set(
    ids: tuple[str, ...], images: Tensor, labels: Any, class_names: Sequence[str] | None
) -> ValidationSet:
    if labels is None:
        raise InputError("a monitor needs labels, one class number per image")
    y = torch.as_tensor(labels).detach().cpu()
    if y.ndim and len(y) != len(images):
        raise InputError(f"there are {len(images)} images but {len(y)} labels; they must match")
    if y.ndim == 2 and y.shape[1] > 1:
        _, classes = read_findings(y.numpy(), class_names)
        table = y.bool()
        if not (table.any(0) & ~table.all(0)).any():
            raise InputError(
                "no label has both positive and negative images, which AUC and C-Score need; add images"
            )
        return ValidationSet(ids, images, table, classes)
    if isinstance(class_names, str):
        raise InputError(f"class_names is a list of names, not the text {class_names!r}")
    numbers, classes = check_labels(y, len(images), class_names or None)
    if len(set(ids)) < len(ids):
        raise InputError("two images have the same name; names must differ")
    if len(set(numbers)) < 2:
        raise InputError(
            f"all {len(numbers)} images have label {numbers[0]}; AUC and C-Score by class need two classes"
        )
    if len(set(classes)) < len(classes):
        raise InputError("two classes have the same name; names must differ")
    # Not torch.tensor(numbers): made in inference mode, it could not be used with gradients.
    y = y[:, 0] if y.ndim == 2 else y
    return ValidationSet(ids, images, y.long(), tuple(map(str, classes)))
