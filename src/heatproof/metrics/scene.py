"""What a run passes to a metric: the context of a batch, of a checkpoint, or a pool of images."""

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
    """One batch: its pictures, what is known about them, and their maps by every method."""

    model: Model
    batch: Batch
    maps: Mapping[str, Maps]  # as the store gives them back
    targets: Tensor  # "b", the explained classes
    layer: Any = None
    seed: int = 0
    passed: Callable[[int], object] | None = None
    then: Change | None = None  # what the store did to the maps
    caches: dict[Any, dict[Any, Any]] = field(default_factory=dict, repr=False)

    def cache(self, *key: str) -> dict[Any, Any]:
        """Results that metrics of this batch share."""
        return self.caches.setdefault(key, {})

    @property
    def classes(self) -> Tensor:
        """The explained classes as the model takes them; -1, where there is no map, is scored NaN anyway."""
        return self.targets.clamp(min=0)

    @cached_property
    def probabilities(self) -> Tensor:
        """ "b k", from a pass of its own: the same also for a metric that is added later."""
        return self.model.probabilities(self.model.logits(self.batch.images)).cpu()

    @property
    def passes(self) -> dict[str, Any]:
        """Options of everything that runs the model."""
        return {"seed": self.seed, "progress": self.passed}


@dataclass(frozen=True)
class ImagePool:
    """A checkpoint's network and pictures, for a metric of the checkpoint that runs it on some of them."""

    model: Model
    methods: tuple[str, ...]
    pictures: Callable[[int], Batch]  # at most so many; labels where they are explained
    layer: Any
    passes: Mapping[str, Any]  # options of everything that runs the model


@dataclass(frozen=True)
class CheckpointContext:
    """All images of a checkpoint that could be used."""

    maps: Any  # of one method, on the run's device; None for a metric that needs none
    labels: Tensor  # "b"
    probabilities: Tensor  # "b k"; zero where a class's probability was not kept
    seed: int
    # Probabilities of the same images at another checkpoint, by its name; zero where there are none.
    at: Callable[[str], Tensor] = lambda name: torch.zeros(0)
    # Where images may have several findings: thresholds of each, labels and probabilities of all images.
    # Without maps `labels` is that table; with them, each is a map of one finding of an image, and its label.
    limits: tuple[float, ...] | None = None
    every: tuple[Tensor, Tensor] | None = None
    rows: Sequence[int] = ()  # of each map, the image of `every` that it is of
