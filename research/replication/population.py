"""The trainings of the replication, fixed before anything is measured.

    warning    X-rays; three networks and three seeds, with learning rates such that some trainings collapse:
               constant rates, two phases as in the paper, rates that rise at every epoch, and BatchNorm
               whose statistics are trained in the second phase. Does a warning precede a fall of AUC?
    protocol   X-rays; the two phases of the C-Score paper, three networks with ImageNet weights, five seeds.
    cifar      CIFAR-10, ten classes; ResNet-20, ResNet-56 and a small ViT from random weights, three seeds.
    cose       X-rays; SqueezeNet with ImageNet weights, three seeds, all layers trained.

The last two train with COSE's transforms and are measured by cose.py at ten checkpoints. In the others every
epoch is a checkpoint. The split of the images is the same for all trainings; a seed sets the new head
(or all weights), the order of the images and dropout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from heatproof.errors import InputError
from heatproof.train.protocols import two_phase_recipe
from heatproof.train.recipe import Phase, Recipe

STUDIES = ("warning", "protocol", "cifar", "cose")
RATES = {
    "small": (1e-3, 4e-3, 1.5e-2, 5e-2),
    "squeezenet": (1e-4, 5e-4, 2e-3, 8e-3),
    "lite0": (3e-4, 2e-3, 1e-2, 5e-2),
}
SCHEDULES = ("constant", "two-phase")
RISING = {"small": 5e-4, "squeezenet": 3e-5, "lite0": 5e-5}  # rate of the first epoch
GROWTH = (1.4, 1.7)  # factor from one epoch to the next
STATISTICS = (1e-5, 1e-4, 5e-4)  # rates of the second phase, Lite0
SEEDS, PROTOCOL_SEEDS = 3, 5
PROTOCOL_NETWORKS = ("squeezenet", "lite0", "resnet50")
CIFAR_RATES = {"resnet56": 2e-3, "vit": 1e-3, "resnet20": 2e-3}  # the slowest network first
COSE_XRAYS = ("squeezenet", 1e-4)  # network and rate


@dataclass(frozen=True)
class Training:
    """One training of the population."""

    study: str
    network: str
    schedule: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.study}-{self.network}-{self.schedule}-{self.rate:g}-{self.seed}"

    @property
    def recipe(self) -> Recipe:
        batches: dict[str, Any] = {"batch_size": 50, "amp": True}
        augmented: dict[str, Any] = {"amp": True, "flip": True, "transforms": True}
        if self.study == "protocol":
            return two_phase_recipe(**batches)
        if self.schedule == "rising":  # rate is the growth; a new optimiser at every epoch
            start = RISING[self.network]
            return Recipe(tuple(Phase(1, start * self.rate**i, name="rising") for i in range(16)), **batches)
        if self.schedule in ("two-phase", "statistics"):  # the head first, then all layers at the rate
            first = Phase(5, 1e-3, "all" if self.network == "small" else "head", "transfer")
            return Recipe((first, Phase(11, self.rate, name="fine-tuning", schedule="constant")), **batches)
        if self.study == "cifar":
            return Recipe((Phase(40, self.rate, optimiser="adamw", weight_decay=0.02),), 200, **augmented)
        if self.study == "cose":
            return Recipe((Phase(20, self.rate),), 50, **augmented)
        return Recipe((Phase(16, self.rate, schedule="constant"),), **batches)


def _plan() -> Iterator[Training]:
    # Seeds first, so that a population that is cut short has all networks and rates.
    for seed, schedule, network in product(range(SEEDS), SCHEDULES, RATES):
        for rate in RATES[network]:
            yield Training("warning", network, schedule, rate, seed)
    for seed in range(SEEDS):
        for growth, network in product(GROWTH, RISING):
            yield Training("warning", network, "rising", growth, seed)
        for rate in STATISTICS:
            yield Training("warning", "lite0", "statistics", rate, seed)
    for seed, network in product(range(PROTOCOL_SEEDS), PROTOCOL_NETWORKS):
        yield Training("protocol", network, "paper", 1e-4, seed)
    for seed in range(SEEDS):
        yield Training("cose", COSE_XRAYS[0], "cosine", COSE_XRAYS[1], seed)
        for network, rate in CIFAR_RATES.items():
            yield Training("cifar", network, "cosine", rate, seed)


PLAN = tuple(_plan())


def select(studies: Sequence[str] = (), networks: Sequence[str] = ()) -> list[Training]:
    """The trainings of some studies and networks, in the order of the plan; all by default."""
    for name in studies:
        if name not in STUDIES:
            raise InputError(f"unknown study {name!r}; there are {', '.join(STUDIES)}")
    return [
        t for t in PLAN if (not studies or t.study in studies) and (not networks or t.network in networks)
    ]
