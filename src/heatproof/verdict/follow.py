"""Does the map follow the network? Asked of each method, by how far its maps lie above their own shadows.

Two numbers per picture, of the metric that is registered to vote: above the method's maps under random
weights, and above the map itself turned by half a turn. With w and p their means over pictures, and `best`
the largest min(w, p) among the methods of the run,

    does not follow     w is exactly 0 on every picture: random weights change nothing about these maps
    undecided           best < informative: on this network no map stands out from its shadows, as it is where
                        the evidence lies everywhere; nobody else is judged
    follows             w and p are surely above max(0, yes * best)
    does not follow     w or p is surely below max(0, no * best)
    undecided           otherwise

Where all maps of a run are stored, no known method sets the scale, and any map is the best of its own run:
there "follows" needs w and p surely above yes * max(1, best).

"Surely": a one-sided t test over pictures at 5 %, Holm-corrected over the methods of the run (and doubled
for "w or p"). informative, yes and no were chosen on one half of the networks of a population with planted
evidence; what they get wrong was counted on the other half (rates.json, docs/results/calibration.md).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from heatproof.store.facts import Facts, MetricFacts
from heatproof.verdict.answers import Answer

ENOUGH = 30  # pictures
LEVEL = 0.05
ALONE = 1.0  # mean of the best method, assumed where all maps of a run are stored
KINDS = ("weights", "place")  # the parts of the metric that votes
Values = Mapping[str, tuple[np.ndarray, np.ndarray]]  # by method: both numbers of every picture


@dataclass(frozen=True)
class FollowRule:
    """The three numbers that a calibration chooses."""

    informative: float
    yes: float
    no: float


@lru_cache(maxsize=1)
def calibration() -> Mapping[str, Any]:
    """What was measured: the rule, its rates, the population and the command behind them."""
    content: dict[str, Any] = json.loads(Path(__file__).with_name("rates.json").read_text("utf-8"))
    return content


def rule() -> FollowRule:
    return FollowRule(**calibration()["rule"])


def voter(facts: Facts | None = None) -> MetricFacts:
    """The metric that the question rests on, of a run or registered; it has both numbers as parts."""
    voting = (entry for entry in (facts or Facts()).every_metric if entry.test and entry.judges == "map")
    return next(entry for entry in voting if {*KINDS} <= entry.parts.keys())


def answers(values: Values, by: FollowRule, scale: float = 0.0) -> dict[str, Answer]:
    """By method, from both numbers of every picture; NaN is left out. scale: as for limits.

    >>> rng = np.random.default_rng(0)
    >>> high, low = rng.normal(0.5, 0.1, (2, 50)), rng.normal(0.0, 0.1, (2, 50))
    >>> answers({"gradcam": tuple(high), "noise": tuple(low)}, FollowRule(0.1, 0.2, 0.1))
    {'gradcam': 'yes', 'noise': 'no'}
    """
    found: dict[str, Answer] = dict.fromkeys(values, "undecided")
    judged = _judged(values)
    if (sides := limits(values, by, scale)) is not None:
        low, high = sides
        above = holm({m: max(p_above(one, high) for one in both) for m, both in judged.items()})
        below = holm({m: _chance_below(both, low) for m, both in judged.items()})
        found |= {m: decided(above[m], below[m]) for m in judged}
    return found | {m: "no" for m, both in judged.items() if ignores_weights(both)}


def ignores_weights(both: Sequence[np.ndarray]) -> bool:
    """Whether random weights change nothing about a method's maps: a proof, whatever other methods do."""
    weights = both[0][np.isfinite(both[0])]
    return len(weights) >= ENOUGH and not weights.any()


def limits(values: Values, by: FollowRule, scale: float = 0.0) -> tuple[float, float] | None:
    """Surely below the first: does not follow; surely above the second: follows. None: nobody is judged.

    scale: the least that counts as the best for "follows": ALONE where all maps of the run are stored.
    """
    best = max((min(one.mean() for one in both) for both in _judged(values).values()), default=-math.inf)
    return None if best < by.informative else (max(0.0, by.no * best), by.yes * max(scale, best))


def alone(both: Sequence[np.ndarray], sides: tuple[float, float] | None) -> tuple[Answer, ...]:
    """What each of the two numbers would say if it were the only one and its method the only method."""
    told: list[Answer] = []
    for kind, column in zip(KINDS, both, strict=True):
        defined = column[np.isfinite(column)]
        if kind == KINDS[0] and ignores_weights(both):
            told.append("no")
        elif sides is None or len(defined) < ENOUGH:
            told.append("undecided")
        else:
            told.append(decided(p_above(defined, sides[1]), p_above(-defined, -sides[0])))
    return tuple(told)


def _judged(values: Values) -> dict[str, list[np.ndarray]]:
    defined = {m: [one[np.isfinite(one)] for one in both] for m, both in values.items()}
    return {m: both for m, both in defined.items() if min(map(len, both)) >= ENOUGH}


def decided(above: float, below: float) -> Answer:
    """By the chance of each side."""
    return "yes" if above < LEVEL else "no" if below < LEVEL else "undecided"


def p_above(values: np.ndarray, threshold: float) -> float:
    """p of the one-sided t test that the mean is above the threshold; numbers that do not vary are sure."""
    error = values.std(ddof=1) / math.sqrt(len(values)) if np.ptp(values) else 0.0
    if error == 0:
        return float(values[0] <= threshold)
    from scipy.special import stdtr

    return float(stdtr(len(values) - 1, (threshold - values.mean()) / error))


def _chance_below(both: Sequence[np.ndarray], threshold: float) -> float:
    """p that w or p is below the threshold; 0 for maps that are the same whatever the network is."""
    if ignores_weights(both):
        return 0.0
    return min(1.0, 2 * min(p_above(-one, -threshold) for one in both))


def holm(chances: Mapping[Any, float]) -> dict[Any, float]:
    """Corrected for their number, the smallest by all of them.

    >>> holm({"a": 0.01, "b": 0.04, "c": 0.03})
    {'a': 0.03, 'c': 0.06, 'b': 0.06}
    """
    found, largest = {}, 0.0
    for i, (name, chance) in enumerate(sorted(chances.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, (len(chances) - i) * chance))
        found[name] = largest
    return found
