"""Whether maps follow the network: each method's maps are compared with control maps.

Two numbers per image, of the metric that is registered to vote: how much better the map is than the method's
maps under random weights, and than the map itself rotated by half a turn. With w and p their means over
images, and `best` the largest min(w, p) among the methods of the run,

    does not follow     w is exactly 0 on every image: random weights change nothing about these maps
    undecided           best < informative: no map of this network is better than its controls, which happens
                        if the evidence is everywhere; no other method is judged
    follows             w and p are surely above max(0, yes * best)
    does not follow     w or p is surely below max(0, no * best)
    undecided           otherwise

If all maps of a run are stored maps, no known method sets the scale, and any map is the best of its own run:
then "follows" needs w and p surely above yes * max(1, best).

"Surely": a one-sided t test over images at 5 %, Holm-corrected over the methods of the run (p doubled for
"w or p"). informative, yes and no were chosen on one half of the networks of a population with planted
evidence; their error rates were counted on the other half (rates.json, docs/results/calibration.md).

A sequential test, as of an audit, looks at a method's answer after each number of images that run.tested
names for it; the first answer stands. After n images 5 % (1 - FIRST_LOOK / 2 n) of the error is spent, or
5 % n / (2 FIRST_LOOK) if n < FIRST_LOOK, and each look tests at the level that was spent since the last one,
so any number of looks errs in at most 5 % of the cases (union bound).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import ndtri, stdtr

from heatproof.store.manifest import Facts, MetricFacts
from heatproof.verdict.answers import Answer

ENOUGH = 30  # images
LEVEL = 0.05
FIRST_LOOK = 40  # images of a sequential test: more than ENOUGH, since some decide nothing
ALONE = 1.0  # mean of the best method, assumed if all maps of a run are stored
RATES = Path(__file__).with_name("rates.json")
KINDS = ("weights", "place")  # the parts of the metric that votes
Values = Mapping[str, tuple[np.ndarray, np.ndarray]]  # by method: both numbers of every image


@dataclass(frozen=True)
class FollowRule:
    """The three numbers that a calibration chooses."""

    informative: float
    yes: float
    no: float


@lru_cache(maxsize=1)
def calibration() -> Mapping[str, Any]:
    """The calibrated rule with its error rates, the population and the command that measured them."""
    content: dict[str, Any] = json.loads(RATES.read_text("utf-8"))
    return content


def rule() -> FollowRule:
    return FollowRule(**calibration()["rule"])


def follow_metric(facts: Facts | None = None) -> MetricFacts:
    """The metric that votes, of a run or of the registry; both numbers are parts of it."""
    voting = (entry for entry in (facts or Facts()).every_metric if entry.test and entry.judges == "map")
    return next(entry for entry in voting if {*KINDS} <= entry.parts.keys())


def answers(
    values: Values, by: FollowRule, scale: float = 0.0, levels: Mapping[str, float] | None = None
) -> dict[str, Answer]:
    """Answers by method, from both numbers of every image; NaN is left out. scale: as for limits.

    levels: by method; others are not tested. Default: LEVEL for all.

    >>> rng = np.random.default_rng(0)
    >>> high, low = rng.normal(0.5, 0.1, (2, 50)), rng.normal(0.0, 0.1, (2, 50))
    >>> answers({"gradcam": tuple(high), "noise": tuple(low)}, FollowRule(0.1, 0.2, 0.1))
    {'gradcam': 'yes', 'noise': 'no'}
    """
    results: dict[str, Answer] = dict.fromkeys(values, "undecided")
    judged = _judged(values)
    if (thresholds := limits(values, by, scale)) is not None:
        low, high = thresholds
        # Holm, not Bonferroni: it bounds the chance of any wrong answer in a run at 5 % as well, with more
        # power. "Follows" needs both numbers, so the larger p counts; no further correction is needed for a
        # maximum.
        above = holm({m: max(p_above(column, high) for column in both) for m, both in judged.items()})
        below = holm({m: _p_below(both, low) for m, both in judged.items()})
        # Too few images, or no method that stands out, leaves "undecided": absence of evidence is not a "no".
        level = dict.fromkeys(judged, LEVEL) if levels is None else levels
        results |= {m: decided(above[m], below[m], level.get(m, 0.0)) for m in judged}
    return results | {m: "no" for m, both in judged.items() if ignores_weights(both)}


def looks(numbers: Iterable[int]) -> dict[int, float]:
    """Levels of the looks of a sequential test after these numbers of images.

    >>> {n: round(level, 4) for n, level in looks([40, 80, 104]).items()}
    {40: 0.025, 80: 0.0125, 104: 0.0029}
    """
    ordered, first = sorted({*numbers}), FIRST_LOOK
    spent = [LEVEL * (n / (2 * first) if n < first else 1 - first / (2 * n)) for n in ordered]
    return dict(zip(ordered, np.diff(spent, prepend=0.0).tolist(), strict=True))


def sequential_answers(
    values: Callable[[int], Values], tested: Mapping[str, Iterable[int]], by: FollowRule, scale: float = 0.0
) -> dict[str, Answer]:
    """Answers of a sequential test.

    values: returns both numbers of the first so many images. tested: numbers of images of a method's looks.
    """
    levels = {method: looks(numbers) for method, numbers in tested.items()}
    results: dict[str, Answer] = {}
    for n in sorted({n for own in levels.values() for n in own}):
        now = answers(values(n), by, scale, {m: own[n] for m, own in levels.items() if n in own})
        results = {m: now[m] if results.get(m, "undecided") == "undecided" else results[m] for m in now}
    return results


def ignores_weights(both: Sequence[np.ndarray]) -> bool:
    """Whether random weights change nothing about a method's maps."""
    weights = both[0][np.isfinite(both[0])]
    return len(weights) >= ENOUGH and not weights.any()


def limits(values: Values, by: FollowRule, scale: float = 0.0) -> tuple[float, float] | None:
    """Limits of "does not follow" (below) and "follows" (above); None if no method is judged.

    scale: the least that counts as the best for "follows": ALONE if all maps of the run are stored.
    """
    best = max((min(c.mean() for c in both) for both in _judged(values).values()), default=-math.inf)
    # Relative to the best method: the size of w and p depends on the network and its evidence, so an absolute
    # limit would reject every method on networks with diffuse evidence.
    return None if best < by.informative else (max(0.0, by.no * best), by.yes * max(scale, best))


def growth_needed(both: Sequence[np.ndarray], thresholds: tuple[float, float] | None, level: float) -> float:
    """Factor by which the number of images must grow for an answer at this level, if more are like these.

    Infinite if no method is judged, or the means are between the thresholds of both answers; with fewer than
    ENOUGH images, the factor that makes them enough.

    >>> rng = np.random.default_rng(0)
    >>> [round(growth_needed(rng.normal(mean, 0.1, (2, 50)), (0.1, 0.2), 0.01), 1) for mean in (0.15, 0.3)]
    [inf, 0.1]
    """
    defined = [column[np.isfinite(column)] for column in both]
    if (n := min(map(len, defined))) < ENOUGH:
        return ENOUGH / max(1, n)
    if thresholds is None:
        return math.inf

    def growth(values: np.ndarray, threshold: float, level: float) -> float:
        distance = values.mean() - threshold
        error = values.std(ddof=1) / math.sqrt(len(values))
        return float((ndtri(level) * error / distance) ** 2) if distance > 0 else math.inf

    low, high = thresholds
    yes = max(growth(column, high, level) for column in defined)
    return min(yes, *(growth(-column, -low, level / 2) for column in defined))


def per_test_answers(
    both: Sequence[np.ndarray], thresholds: tuple[float, float] | None
) -> tuple[Answer, ...]:
    """The answer of each of the two numbers, uncorrected for the other number and other methods."""
    results: list[Answer] = []
    for kind, column in zip(KINDS, both, strict=True):
        defined = column[np.isfinite(column)]
        if kind == KINDS[0] and ignores_weights(both):
            results.append("no")
        elif thresholds is None or len(defined) < ENOUGH:
            results.append("undecided")
        else:
            results.append(decided(p_above(defined, thresholds[1]), p_above(-defined, -thresholds[0])))
    return tuple(results)


def _judged(values: Values) -> dict[str, list[np.ndarray]]:
    """The defined numbers of methods with at least ENOUGH images."""
    defined = {m: [column[np.isfinite(column)] for column in both] for m, both in values.items()}
    return {m: both for m, both in defined.items() if min(map(len, both)) >= ENOUGH}


def decided(above: float, below: float, level: float = LEVEL) -> Answer:
    """The answer, from the p values of both one-sided tests."""
    return "yes" if above < level else "no" if below < level else "undecided"


def p_above(values: np.ndarray, threshold: float) -> float:
    """Compute p of the one-sided t test of a mean above the threshold; 0 or 1 if all values are equal."""
    error = values.std(ddof=1) / math.sqrt(len(values)) if np.ptp(values) else 0.0
    if error == 0:
        return float(values[0] <= threshold)
    return float(stdtr(len(values) - 1, (threshold - values.mean()) / error))


def _p_below(both: Sequence[np.ndarray], threshold: float) -> float:
    """Compute p that w or p is below the threshold; 0 for maps that ignore the weights."""
    if ignores_weights(both):
        return 0.0
    # "Does not follow" needs only one of both numbers: the smaller p, doubled for two attempts.
    return min(1.0, 2 * min(p_above(-column, -threshold) for column in both))


def holm(p_values: Mapping[Any, float]) -> dict[Any, float]:
    """Holm-corrected p values, the smallest first.

    >>> holm({"a": 0.01, "b": 0.04, "c": 0.03})
    {'a': 0.03, 'c': 0.06, 'b': 0.06}
    """
    ordered = sorted(p_values.items(), key=lambda item: item[1])
    corrected = [min(1.0, (len(ordered) - i) * p) for i, (_, p) in enumerate(ordered)]
    return dict(zip([name for name, _ in ordered], np.maximum.accumulate(corrected).tolist(), strict=True))
