"""What a judgement needs before it can be favourable (the list stands in verdict.py)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from heatproof.metrics.stats import mean_interval
from heatproof.verdict.data import RunData
from heatproof.verdict.measures import Measure
from heatproof.verdict.rules import MIN_USABLE

ENOUGH = 30
NAMED = 5  # methods in a sentence; the table has all of them


def missing_evidence(data: RunData) -> Iterator[str]:
    """What a judgement needs and the run does not have, in half sentences."""
    status = data.folder.status()
    if status.state not in ("complete", "unknown") or status.usable < MIN_USABLE:
        yield f"the whole run ({status.sentence})"
    if not data.real:
        yield "a method that looks at the network"
    silent = sum(map(math.isnan, data.images.confidence))
    if silent or not data.images.ids:
        yield f"answers that are numbers (those to {silent} of {len(data.images.ids)} images are not)"
    yield from _not_above_chance(data)
    against_floors = [m for m in data.real if not _judged(data, m, floor_tests(data))]
    if against_floors:
        yield f"a comparison of {names(against_floors)} with the floors on {ENOUGH} images"
    faithful = [of for of in data.measures if of.is_test and of.facts.judges == "map"]
    unfaithful = [m for m in data.real if not _judged(data, m, faithful)]
    if unfaithful:
        yield (
            f"a test of faithfulness of {names(unfaithful)} on {ENOUGH} images (insertion or deletion "
            "beside the floors random and edges, or randomisation)"
        )


def _not_above_chance(data: RunData) -> Iterator[str]:
    known = [
        (r, label) for r, label in zip(data.images.right, data.images.labels, strict=True) if r is not None
    ]
    if len(known) < ENOUGH:
        yield f"{ENOUGH} answers to images whose true label is known (there are {len(known)})"
        return
    labels = [label for _, label in known]
    chance = max(labels.count(label) for label in set(labels)) / len(labels)
    right = [float(r) for r, _ in known]
    low, high = mean_interval(right)
    if not low > chance:
        yield (
            f"a network that is better than chance (it is right about {sum(right) / len(right):.1%}, 95 % "
            f"interval {low:.1%} to {high:.1%}, n = {len(right)}; the largest class has {chance:.1%})"
        )


def _judged(data: RunData, method: str, tests: Sequence[Measure]) -> bool:
    """Whether one of these numbers of a method has enough images, and floors where it can have some."""
    found = [(of, data.cells.get((of.name, method))) for of in tests]
    return any(c and (c.judged if of.has_floor else c.n or 0) >= ENOUGH for of, c in found)


def floor_tests(data: RunData) -> list[Measure]:
    """The numbers on which the verdict holds methods against their floors."""
    return [of for of in data.measures if of.is_test and of.has_floor]


def randomisations(data: RunData) -> list[Measure]:
    return [m for m in data.measures if m.entry is not None and m.entry.name == "randomisation"]


def names(methods: list[str]) -> str:
    """
    >>> names(["a", "b"]), names(list("abcdef"))
    ('a and b', 'a, b, c and 3 more')
    """
    if len(methods) > NAMED:
        return f"{', '.join(methods[:3])} and {len(methods) - 3} more"
    return methods[0] if len(methods) == 1 else f"{', '.join(methods[:-1])} and {methods[-1]}"
