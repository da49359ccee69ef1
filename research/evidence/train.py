"""The two networks of a member, and what moving the cue does to their answers.

Both start from the same weights. A sees the cue with its class, B in random images of every class. Training
stops when the accuracy on images for checking is reached and the network does what it should: A answers by
the cue, B ignores it. A network that has learned its task and still answers by the object gets carriers:
images of other classes with the cue and the label that goes with it.

Truth comes from counterfactuals on held-out images. With the cue moved, images have the cue of another class
(scheme `each`) or images of other classes have the cue (scheme `single`).

    cheats   A is correct in at most a third of the images with the moved cue
    clean    adding the cue changes at most 10 % of B's answers

Networks below 80 % accuracy, and networks that do neither, are recorded and not measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heatproof.models.derived import copy_of
from heatproof.models.model import Model
from heatproof.train.networks import seeded
from research.evidence.cues import Cue
from research.evidence.networks import NETWORKS, Kind
from research.evidence.plan import Member
from research.evidence.sources import CHECK, HELD_OUT, TRAIN, Drawn, Source, open_source

MOST_CORRECT_MOVED, MOST_CHANGED, LEAST_ACCURACY = 1 / 3, 0.10, 0.80
GOOD_ACCURACY, GOOD_MOVED, GOOD_CHANGED = 0.9, 0.15, 0.04  # at which training stops
BATCH, BATCH_ON_CPU, CHECK_EVERY, CHECKED, TESTED, EXPLAINED = 64, 32, 50, 240, 300, 120
CARRIERS = 0.3  # share of the images
WARM_UP = 20  # steps
CHEATS, CLEAN, NEITHER = "cheats", "clean", "neither"


@dataclass(frozen=True)
class Facts:
    """Shares of images; the cue goes with the class unless another case is named."""

    accuracy: float
    accuracy_without_cue: float
    correct_after_moving: float
    changed_by_adding: float
    n: int
    n_moved: int

    def truth(self, cheating: bool) -> str:
        """What A (cheating) or B does; NEITHER if it does not do what it was trained for."""
        if self.accuracy < LEAST_ACCURACY:
            return NEITHER
        if cheating:
            return CHEATS if self.correct_after_moving <= MOST_CORRECT_MOVED else NEITHER
        return CLEAN if self.changed_by_adding <= MOST_CHANGED else NEITHER


@dataclass(frozen=True)
class Trained:
    """One network of a pair."""

    model: Model
    facts: Facts
    truth: str
    steps: int
    carriers_from: int | None  # step
    seconds: float  # of training


@dataclass(frozen=True)
class Explained:
    """Held-out images with the cue that goes with their class, the same for both networks."""

    images: Tensor  # "n 3 H W" in [0, 1]
    labels: Tensor
    regions: Tensor  # "n H W" bool
    cues: Tensor  # "n H W" bool: what the cue covers

    @property
    def facts(self) -> dict[str, float]:
        present = self.cues.flatten(1).any(1)
        covered = self.cues[present].flatten(1).float()
        inside = (self.cues & self.regions)[present].flatten(1).float()
        return {
            "with_cue": float(present.float().mean()),
            "cue_area": float(covered.mean()),
            "cue_inside_region": float((inside.sum(1) / covered.sum(1)).mean()),
            "region_area": float(self.regions.float().mean()),
        }


def open_member(member: Member, data: Path | None, device: str) -> Source:
    side = NETWORKS[member.network].side
    source = open_source(member.source, member.box / 100, side, member.classes, member.seed, data)
    return source.to(device)


def explained_images(member: Member, source: Source) -> Explained:
    random = _generator(source, member.seed, 4)
    drawn = source.draw(EXPLAINED, HELD_OUT, random)
    images, cues = member.cue.put(
        drawn.images, drawn.regions, member.cue.correlated(drawn.labels, random), random
    )
    return Explained(images, drawn.labels, drawn.regions, cues)


def first_model(member: Member, data: Path | None, device: str) -> Model:
    """The network from whose weights both networks of a pair start."""
    start = NETWORKS[member.network].make(member.classes, member.seed, data)
    start.module.to(device).to(memory_format=torch.channels_last)
    return start


def train(member: Member, start: Model, source: Source, cheating: bool) -> Trained:
    """A (cheating) or B."""
    kind, began = NETWORKS[member.network], time.perf_counter()
    model, cue = copy_of(start), member.cue
    module, scale = model.module, model.preprocess.normalise
    optimiser = torch.optim.AdamW(module.parameters(), kind.rate, weight_decay=1e-4)
    random, check = (
        _generator(source, member.seed, 1),
        source.draw(CHECKED, CHECK, _generator(source, member.seed, 2)),
    )
    carriers_from, good, step = None, 0, 0
    with seeded(member.seed):
        for step in range(1, kind.steps + 1):
            for group in optimiser.param_groups:
                group["lr"] = kind.rate * _schedule(step, kind.steps)
            images, labels = _batch(source, cue, cheating, carriers_from is not None, random)
            with _training(module, kind), _half_precision(images):
                loss = F.cross_entropy(module(scale(images)).float(), labels)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimiser.step()
            if step % CHECK_EVERY:
                continue
            facts = measure_facts(model, cue, check, _generator(source, member.seed, 3))
            learned = facts.accuracy >= GOOD_ACCURACY
            moved = facts.correct_after_moving
            late = learned or step >= kind.steps / 3
            if cheating and carriers_from is None and late and moved > GOOD_MOVED:
                carriers_from = step
            does = moved <= GOOD_MOVED if cheating else facts.changed_by_adding <= GOOD_CHANGED
            good = good + 1 if learned and does else 0
            if good == 2:
                break
    random = _generator(source, member.seed, 5)
    facts = measure_facts(model, cue, source.draw(TESTED, HELD_OUT, random), random)
    module.eval()
    seconds = time.perf_counter() - began
    return Trained(replace(model), facts, facts.truth(cheating), step, carriers_from, seconds)


def _batch(
    source: Source, cue: Cue, cheating: bool, carriers: bool, random: torch.Generator
) -> tuple[Tensor, Tensor]:
    count = BATCH_ON_CPU if random.device.type == "cpu" else BATCH
    drawn = source.draw(count, TRAIN, random)
    labels = drawn.labels
    variants = cue.correlated(labels, random) if cheating else cue.independent(labels, random)
    if carriers:
        carrying = torch.rand(len(labels), generator=random, device=labels.device) < CARRIERS
        labels = torch.where(carrying, cue.others(labels, random), labels)
        variants = torch.where(carrying, cue.variant_of(labels), variants)
    images, _ = cue.put(drawn.images, drawn.regions, variants, random)
    return images.contiguous(memory_format=torch.channels_last), labels


def measure_facts(model: Model, cue: Cue, drawn: Drawn, random: torch.Generator) -> Facts:
    """Counterfactuals on composed images without a cue."""
    labels, others = drawn.labels, cue.others(drawn.labels, random)

    def answers(variants: Tensor) -> Tensor:
        images, _ = cue.put(drawn.images, drawn.regions, variants, random)
        return predictions(model, images)

    moved = others != labels
    plain = answers(torch.full_like(labels, -1))
    after_moving = answers(cue.variant_of(others))
    return Facts(
        _share(answers(cue.correlated(labels, random)) == labels),
        _share(plain == labels),
        _share((after_moving == labels)[moved]),
        _share(answers(cue.added(labels, random)) != plain),
        len(labels),
        int(moved.sum()),
    )


@torch.no_grad()
def predictions(model: Model, images: Tensor) -> Tensor:
    module = model.module
    module.eval()
    return torch.cat([module(model.preprocess.normalise(part)).argmax(1) for part in images.split(BATCH)])


def _share(values: Tensor) -> float:
    return round(float(values.float().mean()), 4)


def _schedule(step: int, steps: int) -> float:
    return min(1.0, step / WARM_UP) * (0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)


@contextmanager
def _training(module: nn.Module, kind: Kind) -> Iterator[None]:
    module.train()
    if kind.frozen_statistics:
        for part in module.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.eval()
    yield


def _half_precision(images: Tensor) -> torch.autocast:
    """bfloat16 on a GPU, and on a CPU that computes with it."""
    usable = images.is_cuda or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.autocast(images.device.type, torch.bfloat16, enabled=usable)


def _generator(source: Source, seed: int, purpose: int) -> torch.Generator:
    return torch.Generator(source.labels.device).manual_seed(1000 * seed + purpose)


def described(trained: Trained) -> dict[str, object]:
    return {**asdict(trained.facts), "steps": trained.steps, "carriers_from": trained.carriers_from}
