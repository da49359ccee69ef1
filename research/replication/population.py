"""The trainings of the replication, fixed before anything is measured.

    warning    X-rays; three networks and three seeds, with learning rates such that some trainings collapse:
               constant rates, two phases as in the paper, rates that rise at every epoch, and BatchNorm
               whose statistics are trained in the second phase. Does a warning precede a fall of AUC?
    protocol   X-rays; the two phases of the C-Score paper, three networks with ImageNet weights, five seeds.
    cifar      CIFAR-10, ten classes; ResNet-20 and ResNet-56 from random weights, three seeds.

Every epoch is a checkpoint. The split of the images is the same for all trainings; a seed sets the new head
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

STUDIES = ("warning", "protocol", "cifar")
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
CIFAR_NETWORKS = ("resnet20", "resnet56")


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
        if self.study == "protocol":
            return two_phase_recipe(**batches)
        if self.schedule == "rising":  # rate is the growth; a new optimiser at every epoch
            start = RISING[self.network]
            return Recipe(tuple(Phase(1, start * self.rate**i, name="rising") for i in range(16)), **batches)
        if self.schedule in ("two-phase", "statistics"):  # the head first, then all layers at the rate
            first = Phase(5, 1e-3, "all" if self.network == "small" else "head", "transfer")
            return Recipe((first, Phase(11, self.rate, name="fine-tuning", schedule="constant")), **batches)
        if self.study == "cifar":
            return Recipe((Phase(20, self.rate),), 100, flip=True, amp=True)
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
    for seed, network in product(range(SEEDS), CIFAR_NETWORKS):
        yield Training("cifar", network, "cosine", 1e-3, seed)


PLAN = tuple(_plan())


def select(studies: Sequence[str] = (), networks: Sequence[str] = ()) -> list[Training]:
    """The trainings of some studies and networks, in the order of the plan; all by default."""
    for name in studies:
        if name not in STUDIES:
            raise InputError(f"unknown study {name!r}; there are {', '.join(STUDIES)}")
    return [
        t for t in PLAN if (not studies or t.study in studies) and (not networks or t.network in networks)
    ]
