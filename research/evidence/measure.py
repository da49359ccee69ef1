"""What is measured of one network of the plan.

Windows of two sizes by the maps of two methods, and transfers of statistics with and without the object, are
stored beside each other: the half of the networks that chooses effect sizes chooses among them too.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from heatproof.metrics.interventions import Interventions
from heatproof.metrics.properties import STATISTICS, Transfer
from research.evidence.plan import Member
from research.evidence.train import (
    NEITHER,
    Explained,
    Trained,
    described,
    explained_images,
    first_model,
    open_member,
    train,
)
from research.jobs import Place

METHODS = ("gradcam", "ms-gradcam++")
SIDES = (1 / 5, 2 / 7)  # of the windows, as shares of the image's side
WHOLE = "whole image"  # statistics that the object takes over too


@dataclass(frozen=True)
class Network:
    """One network of a pair: A learns the cue with the class, B learns that the cue says nothing."""

    member: Member
    letter: str

    @property
    def name(self) -> str:
        return f"{self.member.name}-{self.letter}"


def networks_of(members: Iterable[Member]) -> list[Network]:
    return [Network(member, letter) for member in members for letter in "AB"]


def measure(network: Network, place: Place, with_evidence: bool = True) -> dict[str, Any]:
    """Train and measure a network."""
    member, start = network.member, time.perf_counter()
    source = open_member(member, place.data, place.device)
    explained = explained_images(member, source)
    first = first_model(member, place.data, place.device)
    opened = time.perf_counter() - start
    trained = train(member, first, source, cheating=network.letter == "A")
    record = network_record(network, trained, explained, with_evidence)
    seconds = {"opening": opened, "training": trained.seconds, "all": time.perf_counter() - start - opened}
    record["seconds"] = {name: round(value, 1) for name, value in seconds.items()}
    return record | {"device": place.device}


def describe(record: Mapping[str, Any]) -> str:
    """The truth of a network and its facts, in a line."""
    facts, seconds = record["facts"], record["seconds"]
    return (
        f"{record['truth']} (accuracy {facts['accuracy']:.2f}, moved {facts['correct_after_moving']:.2f}, "
        f"changed {facts['changed_by_adding']:.2f}, {facts['steps']} steps"
        f"{', carriers' if facts['carriers_from'] else ''}, {seconds['training']:.0f} s training, "
        f"{seconds['all'] - seconds['training']:.0f} s evidence)"
    )


def network_record(
    network: Network, trained: Trained, explained: Explained, with_evidence: bool = True
) -> dict[str, Any]:
    """What is stored about one network."""
    record: dict[str, Any] = {
        "name": network.name, "member": asdict(network.member), "network": network.letter,
        "truth": trained.truth, "facts": described(trained), "images": explained.facts,
        "evidence": None, "other_methods": {},
    }  # fmt: skip
    if trained.truth == NEITHER or not with_evidence:
        return record
    first, *others = METHODS
    model = trained.model
    images = model.preprocess.normalise(explained.images)
    tests = Interventions(model, images, explained.labels, methods=[first], regions=explained.regions)
    whole = {f"{name}, {WHOLE}": tests.transfers[name] for name in STATISTICS}
    off = {name: off_object(tests.transfers[name]) for name in STATISTICS}
    tests.transfers |= off | whole
    numbers = tuple(map(str, range(len(images))))
    record["evidence"] = tests.record(SIDES, numbers, (), None).as_json()
    for method in others:
        again = Interventions(model, images, explained.labels, methods=[method], regions=explained.regions)
        windows, anywhere = again.transplants(SIDES)
        results: dict[str, Any] = {"off_object": windows, "anywhere": anywhere, "exchange": again.exchange()}
        record["other_methods"][method] = msgspec.to_builtins(results)
    return record


def off_object(transfer: Transfer) -> Transfer:
    """The transfer without effect on the object."""

    def changed(images: Tensor, others: Tensor, weights: Tensor, other_weights: Tensor) -> Tensor:
        return torch.where(weights[:, None] > 0, transfer(images, others, weights, other_weights), images)

    return changed
