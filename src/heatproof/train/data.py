"""Training data: 8-bit images with labels and optional masks of parts, all in memory.

Images have the size of the network's input and are normalised batch by batch, on the device, by the model's
own Preprocess: a quarter of the memory of floats, and no decoding after the first epoch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from heatproof.errors import InputError
from heatproof.images.loader import Failure, batches
from heatproof.images.preprocess import Preprocess
from heatproof.images.source import Source
from heatproof.metrics.kit import as_tensor, same_length
from heatproof.show import eight_bit

RESIDENT_SHARE = 0.5  # of a GPU's free memory that images may take during a training


@dataclass(frozen=True, eq=False)
class Data:
    """Images "n c h w" uint8, their classes "n", and masks by part name, each "n h w" bool."""

    images: Tensor
    labels: Tensor
    masks: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        images, labels = as_tensor(self.images), as_tensor(self.labels)
        if images.ndim != 4 or images.dtype != torch.uint8:
            raise InputError(
                f"training images are 'n c h w' in 8 bits (torch.uint8); got {images.dtype} of shape "
                f"{tuple(images.shape)}"
            )
        if 0 in images.shape:
            raise InputError(f"there is nothing to train on: images have shape {tuple(images.shape)}")
        same_length(labels=labels, images=images)
        if labels.ndim != 1 or labels.is_floating_point() or labels.is_complex():
            raise InputError(
                f"labels are one class number per image; got {labels.dtype} of shape {tuple(labels.shape)}"
            )
        if int(labels.min()) < 0:
            raise InputError(f"an image has the label {int(labels.min())}; class numbers start at 0")
        wanted = (len(images), *images.shape[2:])
        masks = {part: as_tensor(mask) for part, mask in (self.masks or {}).items()}
        for part, mask in masks.items():
            if tuple(mask.shape) != wanted:
                raise InputError(f"the masks of {part!r} must be {wanted}; got shape {tuple(mask.shape)}")
        object.__setattr__(self, "images", images)
        object.__setattr__(self, "labels", labels.long())
        object.__setattr__(self, "masks", {part: mask != 0 for part, mask in masks.items()})

    def __len__(self) -> int:
        return len(self.images)

    def take(self, which: Any) -> Data:
        """A subset, with its labels and masks."""
        masks = {part: mask[which] for part, mask in self.masks.items()}
        return Data(self.images[which], self.labels[which], masks)

    def near(self, device: torch.device) -> Data:
        """The data on the device if it fits there; else unchanged, to be moved batch by batch."""
        if device.type == "cuda":
            needed = self.images.numel() + sum(mask.numel() for mask in self.masks.values())
            if self.images.device != device and needed > RESIDENT_SHARE * torch.cuda.mem_get_info(device)[0]:
                return self
        masks = {part: mask.to(device) for part, mask in self.masks.items()}
        return Data(self.images.to(device), self.labels.to(device), masks)

    def digest(self) -> str:
        """A short hash of the content, by which a resumed training checks that its data is the same."""
        content = hashlib.sha256()
        for name, tensor in {"images": self.images, "labels": self.labels, **self.masks}.items():
            content.update(f"{name}{tuple(tensor.shape)}".encode())
            content.update(tensor.detach().cpu().contiguous().numpy().data)
        return content.hexdigest()[:16]


def read_data(
    source: Source, preprocess: Preprocess, indices: Sequence[int] | None = None, batch_size: int = 64
) -> tuple[Data, list[Failure]]:
    """Read and preprocess a source's images and masks; also returns the images that failed."""
    if not source.labelled:
        raise InputError("these images have no labels, and a classifier cannot be trained without")
    images, labels, failures = [], [], []
    masks: dict[str, list[Tensor]] = {part: [] for part in source.parts}
    for batch, failed in batches(source, preprocess, batch_size, indices):
        # The loader normalises; undone, the 8 bits come back exactly.
        images.append(eight_bit(preprocess.restore(batch.images)))
        assert batch.labels is not None
        labels.append(batch.labels)
        for part, read in masks.items():
            assert batch.truth is not None
            read.append(batch.truth.masks[part])
        failures += failed
    if not images:
        raise InputError("there is nothing to train on: no image was chosen")
    parts = {part: torch.cat(read) for part, read in masks.items()}
    return Data(torch.cat(images), torch.cat(labels), parts), failures


def stratified_split(labels: Any, fraction: float = 0.2, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Indices of the training and of the held-out images, each class divided in the same proportion.

    Of a class with n images round(n * fraction) are held out, at least 1 and never all. Both lists ascend.

    >>> train, held_out = stratified_split([0] * 10 + [1] * 5, 0.2)
    >>> len(train), len(held_out)
    (12, 3)
    """
    classes = as_tensor(labels)
    if not 0 < fraction < 1:
        raise InputError(f"the held-out fraction must lie between 0 and 1; got {fraction}")
    if classes.ndim != 1 or len(classes) == 0:
        raise InputError(f"labels are one class number per image; got shape {tuple(classes.shape)}")
    generator = torch.Generator().manual_seed(seed)
    held_out = []
    for label in classes.unique().tolist():
        members = (classes == label).nonzero().flatten().cpu()
        if len(members) < 2:
            raise InputError(
                f"class {label} has a single image; at least 2 are needed to hold one of them out"
            )
        count = min(max(round(len(members) * fraction), 1), len(members) - 1)
        held_out.append(members[torch.randperm(len(members), generator=generator)[:count]])
    chosen = torch.zeros(len(classes), dtype=torch.bool)
    chosen[torch.cat(held_out)] = True
    return (~chosen).nonzero().flatten(), chosen.nonzero().flatten()
