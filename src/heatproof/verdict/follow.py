"""Does the map follow the network? Asked of each method, by how far its maps lie above their own shadows.

Two numbers per picture (metrics/specificity.py): above the method's maps under random weights, and above the
map itself turned by half a turn. With w and p their means over pictures, and `best` the largest min(w, p)
among the methods of the run,

    undecided           best < informative: on this network no map stands out from its shadows, as it is where
                        the evidence lies everywhere; nobody is judged
    follows             w and p are surely above max(0, yes * best)
    does not follow     w or p is surely below max(0, no * best)
    undecided           otherwise

"Surely": a one-sided t test over pictures at 5 %, Holm-corrected over the methods of the run (and doubled
for "w or p"). informative, yes and no were chosen on one half of the networks of a population with planted
evidence; what they get wrong was counted on the other half (rates.json, docs/results/calibration.md).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from heatproof.verdict.answers import Answer

ENOUGH = 30  # pictures
LEVEL = 0.05
KINDS = ("weights", "place")


@dataclass(frozen=True)
class Rule:
    """The three numbers that a calibration chooses."""

    informative: float
    yes: float
    no: float


@lru_cache(maxsize=1)
def calibration() -> Mapping[str, Any]:
    """What was measured: the rule, its rates, the population and the command behind them."""
    content: dict[str, Any] = json.loads(Path(__file__).with_name("rates.json").read_text("utf-8"))
    return content


def rule() -> Rule:
    return Rule(**calibration()["rule"])


def answers(values: Mapping[str, tuple[np.ndarray, np.ndarray]], by: Rule) -> dict[str, Answer]:
    """By method, from both numbers of every picture; NaN is left out.

    >>> rng = np.random.default_rng(0)
    >>> high, low = rng.normal(0.5, 0.1, (2, 50)), rng.normal(0.0, 0.1, (2, 50))
    >>> answers({"gradcam": tuple(high), "noise": tuple(low)}, Rule(0.1, 0.2, 0.1))
    {'gradcam': 'yes', 'noise': 'no'}
    """
    defined = {m: [one[np.isfinite(one)] for one in both] for m, both in values.items()}
    judged = {m: both for m, both in defined.items() if min(map(len, both)) >= ENOUGH}
    best = max((min(one.mean() for one in both) for both in judged.values()), default=-math.inf)
    found: dict[str, Answer] = dict.fromkeys(values, "undecided")
    if best < by.informative:
        return found
    high, low = max(0.0, by.yes * best), max(0.0, by.no * best)
    follow = {m: max(_chance(one, high) for one in both) for m, both in judged.items()}
    not_follow = {m: min(1.0, 2 * min(_chance(-one, -low) for one in both)) for m, both in judged.items()}
    for method in judged:
        if _holm(follow)[method] < LEVEL:
            found[method] = "yes"
        elif _holm(not_follow)[method] < LEVEL:
            found[method] = "no"
    return found


def _chance(values: np.ndarray, threshold: float) -> float:
    """p of a mean at or below the threshold, where it is above it; numbers that do not vary are sure."""
    if np.ptp(values) == 0:
        return float(values[0] <= threshold)
    return float(stats.ttest_1samp(values, threshold, alternative="greater").pvalue)


def _holm(chances: Mapping[str, float]) -> dict[str, float]:
    """Corrected for their number, the smallest by all of them.

    >>> _holm({"a": 0.01, "b": 0.04, "c": 0.03})
    {'a': 0.03, 'c': 0.06, 'b': 0.06}
    """
    found, largest = {}, 0.0
    for i, (name, chance) in enumerate(sorted(chances.items(), key=lambda item: item[1])):
        largest = max(largest, min(1.0, (len(chances) - i) * chance))
        found[name] = largest
    return found
