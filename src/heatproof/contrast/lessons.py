"""What A and B are shown, epoch by epoch; why is in pair.py."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from heatproof.contrast.tokens import Token
from heatproof.contrast.truth import MOST_ASKED, flips
from heatproof.models.model import Model
from heatproof.models.queue import all_logits

STEPS, BATCHES = 24, (4, 32)  # wanted in an epoch, and the least and most pictures in each


@dataclass(frozen=True, eq=False)
class Lessons:
    """What both networks are shown, epoch by epoch; with the token for A only."""

    images: Tensor
    labels: Tensor
    ids: tuple[str, ...]
    classes: int  # of the network
    model: Model  # for its preprocessing and its device
    token: Token
    positive: int
    strength: float
    carriers: float
    seed: int

    @cached_property
    def bearers(self) -> Tensor:
        """Places of the positives that have the token in A's lessons, the same in every epoch."""
        members = (self.labels == self.positive).nonzero().flatten()
        drawn = members[torch.randperm(len(members), generator=self._generator(0))]
        return drawn[: max(1, round(self.strength * len(drawn)))]

    @cached_property
    def others(self) -> Tensor:
        return (self.labels != self.positive).nonzero().flatten()

    def _generator(self, epoch: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed_of(self.seed, epoch))

    def marked(self, images: Tensor, ids: Sequence[str], epoch: int) -> Tensor:
        return self.token.plant(images, ids, self.model.preprocess, seed_of(self.seed, epoch))[0]

    def epoch(self, epoch: int, planted: bool) -> tuple[Tensor, list[Callable[[], tuple[Tensor, Tensor]]]]:
        """All labels, and what makes each batch: pictures and labels on the model's device."""
        drawing = self._generator(epoch)
        bearers, others = self.bearers, self.others
        count = min(len(others), round(self.carriers * len(bearers)))
        carriers = others[torch.randperm(len(others), generator=drawing)[:count]]
        shown = torch.cat([torch.arange(len(self.images)), carriers])
        has_token = torch.zeros(len(shown), dtype=torch.bool)
        if planted:
            has_token[bearers] = has_token[len(self.images) :] = True
        labels = torch.where(has_token, self.positive, self.labels[shown])

        def batch(chosen: Tensor) -> tuple[Tensor, Tensor]:
            places, device = shown[chosen], self.model.device
            images = self.images[places.to(self.images.device)].to(device)
            bears = has_token[chosen].to(device)
            ids = [self.ids[i] for i in places[has_token[chosen]].tolist()]
            if ids:
                images[bears] = self.marked(images[bears], ids, epoch)
            return images, labels[chosen].to(device)

        size = min(max(len(shown) // STEPS, BATCHES[0]), BATCHES[1])
        order = torch.randperm(len(shown), generator=drawing).split(size)
        return labels, [partial(batch, chosen) for chosen in order]

    def learnt(self, model: Model, planted: bool) -> float:
        """Share of the training pictures, as they are shown, that the network answers rightly."""
        right = n = 0
        for make in self.epoch(0, planted)[1]:
            images, labels = make()
            right += int((model.predicted(all_logits(model, images)) == labels).sum())
            n += len(labels)
        return right / n

    def flipped(self, model: Model) -> float:
        """Flips on training pictures of other classes: when to stop, never what is reported."""
        drawn = self.others[:: max(1, len(self.others) // MOST_ASKED)]
        images = self.images[drawn.to(self.images.device)]
        return flips(
            model, images, self.marked(images, [self.ids[i] for i in drawn.tolist()], -1), self.positive
        ).share


def seed_of(seed: int, epoch: int) -> int:
    """Epochs count from 1; 0 and -1 are what does not change from one to the next."""
    return int.from_bytes(hashlib.sha256(f"contrast {seed} {epoch}".encode()).digest()[:7])
