"""Inputs that a run passes to metrics: the context of a batch or a checkpoint, or a pool of images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from heatproof.models import Model
from heatproof.types import Batch, Maps

Change = Callable[[Maps], Maps]


@dataclass(frozen=True)
class BatchContext:
    """One batch: its images, labels and annotations, and their maps by every method."""

    model: Model
    batch: Batch
    maps: Mapping[str, Maps]  # as read back from the store
    targets: Tensor  # "b", the explained classes
    layer: Any = None
    seed: int = 0
    passed: Callable[[int], object] | None = None
    then: Change | None = None  # rounding of the store, to apply to control maps too
    caches: dict[Any, dict[Any, Any]] = field(default_factory=dict, repr=False)

    def cache(self, *key: str) -> dict[Any, Any]:
        """Results shared by the metrics of this batch."""
        return self.caches.setdefault(key, {})

    @property
    def classes(self) -> Tensor:
        """Explained classes as the model takes them; -1, for an image without a map, is scored NaN anyway."""
        return self.targets.clamp(min=0)

    @cached_property
    def probabilities(self) -> Tensor:
        """Tensor "b k", from a separate pass, so that a metric added later gets the same."""
        return self.model.probabilities(self.model.logits(self.batch.images)).cpu()

    @property
    def passes(self) -> dict[str, Any]:
        """Options of everything that runs the model."""
        return {"seed": self.seed, "progress": self.passed}


@dataclass(frozen=True)
class ImagePool:
    """A checkpoint's network and images, for metrics that run the network on some of them."""

    model: Model
    methods: tuple[str, ...]
    pictures: Callable[[int], Batch]  # largest number of images; labels if they are explained
    layer: Any
    passes: Mapping[str, Any]  # options of everything that runs the model
    annotated: Callable[[int], list[Batch]]  # largest number of images, with all labels and annotations
    classes: tuple[str, ...] = ()  # names by number


@dataclass(frozen=True)
class CheckpointContext:
    """All images of a checkpoint that could be used."""

    maps: Any  # of one method, on the run's device; None for a metric that needs none
    labels: Tensor  # "b"
    probabilities: Tensor  # "b k"; zero for a class whose probability was not stored
    seed: int
    # Probabilities of the same images at another checkpoint, by its name; zero where there are none.
    at: Callable[[str], Tensor] = lambda name: torch.zeros(0)
    # For multi-label images: thresholds per label, and labels and probabilities of all images.
    # Without maps `labels` is that table; with maps, each entry is one label of an image, with its map.
    limits: tuple[float, ...] | None = None
    every: tuple[Tensor, Tensor] | None = None
    rows: Sequence[int] = ()  # index into `every` of each map's image
