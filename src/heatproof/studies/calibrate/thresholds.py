"""From measured members to a rule with known error rates.

Pairs of networks are put in two halves, every other one by name. On the first the rule is chosen: of those
with at most 5 % false alarms and 10 % misses, the one that leaves fewest methods undecided (where none is
that good, the one with fewest false alarms). What is published was counted on the second half:

    false alarm   of methods that follow by the contrast test (its interval lies above 1/2), said not to
    miss          of controls, which are known not to follow, said to
    undecided     of all methods

with Clopper-Pearson intervals (clopper1934binomial). A network's methods are judged together, as in a run;
each control joins them alone.

Where the rule was chosen before, by the pairs of an earlier calibration, pairs measured since choose nothing:
what is published is then counted on them and on the earlier other half, and each of the two is kept apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import beta

from heatproof.errors import InputError
from heatproof.metrics.stats import wins
from heatproof.studies.calibrate.collect import CONTROLS
from heatproof.verdict.follow import KINDS, FollowRule, answers

INFORMATIVE, YES, NO = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3), (0.0, 0.1, 0.2), (0.0, 0.05, 0.1)
SUMMARIES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "largest": lambda shadows: shadows.max(0),
    "median": lambda shadows: np.median(shadows, 0),
    "mean": lambda shadows: shadows.mean(0),
}
MOST_FALSE_ALARMS, MOST_MISSES = 0.05, 0.10
Member = Mapping[str, Any]  # as collect.Collected.as_json writes it


@dataclass(frozen=True)
class Share:
    """A count as a share, with its exact 95 % interval."""

    share: float
    low: float
    high: float
    n: int

    @staticmethod
    def of(count: int, n: int) -> Share:
        if not n:
            return Share(float("nan"), 0.0, 1.0, 0)
        low = beta.ppf(0.025, count, n - count + 1) if count else 0.0
        high = beta.ppf(0.975, count + 1, n - count) if count < n else 1.0
        return Share(count / n, float(low), float(high), n)

    @property
    def text(self) -> str:
        return f"{self.share:.1%} ({self.low:.1%} to {self.high:.1%}, n = {self.n})"


@dataclass(frozen=True)
class Rates:
    """What a rule gets wrong on some networks."""

    false_alarm: Share
    miss: Share
    undecided: Share
    networks: int


CHOSE, OTHER, SINCE = "chose the rule", "other half", "measured since"  # what a pair was for


@dataclass(frozen=True)
class Calibration:
    """A rule, and the pairs of networks behind it by what they were for."""

    rule: FollowRule
    lots: Mapping[str, Sequence[Member]]

    @property
    def measured(self) -> list[Member]:
        return [member for lot in self.lots.values() for member in lot]

    def rates(self, *lots: str) -> Rates:
        return rates([member for lot in lots for member in self.lots[lot]], self.rule)

    @property
    def clean(self) -> list[str]:
        """The lots that chose nothing, on which the published rates are counted."""
        return [lot for lot in self.lots if lot != CHOSE]

    def rows(self) -> Iterator[dict[str, Any]]:
        for lot, found in self.lots.items():
            for member in found:
                for row in judged_rows(member, self.rule):
                    yield {"lot": lot, **row}

    def as_json(self, made_by: str, network: Mapping[str, Any]) -> dict[str, Any]:
        """The content of rates.json."""
        kinds = {
            key: sorted({m["member"][key] for m in self.measured}) for key in ("data", "network", "token")
        }
        tests = {test: {"auc": round(auc, 4)} for test, (auc, *_) in separation(self.measured).items()}
        return {
            "schema": 1, "made_by": made_by, "rule": asdict(self.rule),
            "rates": asdict(self.rates(*self.clean)),
            "rates_by_lot": {lot: asdict(self.rates(lot)) for lot in self.lots},
            "rates_by_other_shadows": {
                name: asdict(found) for name, found in by_other_shadows(self.measured, self.rule).items()
            },
            "population": {"pairs": len(self.measured), **kinds}, "tests": tests, "network": dict(network),
        }  # fmt: skip


def read_members(folder: Path, fewest: int = 4) -> list[Member]:
    """Every member that was measured and whose planting held, by name."""
    found = [json.loads(path.read_text("utf-8")) for path in sorted((folder / "members").glob("*.json"))]
    held = [member for member in found if member["holds"]]
    if len(held) < fewest:
        raise InputError(
            f"{folder} holds {len(held)} pairs whose planting held; at least {fewest} are needed to judge"
        )
    return held


def calibrate(measured: Sequence[Member], earlier: Sequence[Member] = ()) -> Calibration:
    """The rule chosen on one half of the pairs, of the earlier ones where there are some."""
    first = earlier or measured
    lots = {CHOSE: first[::2], OTHER: first[1::2]} | ({SINCE: measured} if earlier else {})
    return Calibration(choose(first[::2]), lots)


def choose(chosen_on: Sequence[Member]) -> FollowRule:
    """Of the rules on the grid, the one that does best on these pairs."""
    tried = {
        FollowRule(*numbers): rates(chosen_on, FollowRule(*numbers))
        for numbers in product(INFORMATIVE, YES, NO)
    }
    good = {
        rule: found
        for rule, found in tried.items()
        if found.false_alarm.share <= MOST_FALSE_ALARMS and found.miss.share <= MOST_MISSES
    }
    if good:
        return min(good, key=lambda r: (good[r].undecided.share, good[r].false_alarm.share))
    return min(tried, key=lambda r: (tried[r].false_alarm.share, tried[r].undecided.share))


def rates(measured: Sequence[Member], rule: FollowRule) -> Rates:
    judged = [row for member in measured for row in judged_rows(member, rule)]
    methods = [row for row in judged if not row["control"]]
    controls = [row for row in judged if row["control"]]
    following = [row for row in methods if row["contrast_low"] > 0.5]
    return Rates(
        Share.of(sum(row["answer"] == "no" for row in following), len(following)),
        Share.of(sum(row["answer"] == "yes" for row in controls), len(controls)),
        Share.of(sum(row["answer"] == "undecided" for row in methods), len(methods)),
        2 * len(measured),
    )


def judged_rows(member: Member, rule: FollowRule) -> Iterator[dict[str, Any]]:
    """One row for each network and method or control: what truth says, both numbers, the answer."""
    for network, tests in member["tests"].items():
        values = {m: _numbers(found) for m, found in tests.items()}
        methods = {m: both for m, both in values.items() if m not in CONTROLS}
        said = answers(methods, rule)
        for method, (weights, place) in values.items():
            control = method in CONTROLS
            truth = member["contrast"][method]
            yield {
                **member["member"], "network_of_pair": network, "method": method, "control": control,
                "contrast_auc": truth["auc"], "contrast_low": truth["low"], "contrast_high": truth["high"],
                "weights": _mean(weights), "place": _mean(place), "n": int(np.isfinite(weights).sum()),
                "answer": (answers(methods | {method: (weights, place)}, rule) if control else said)[method],
            }  # fmt: skip


def by_other_shadows(measured: Sequence[Member], rule: FollowRule) -> dict[str, Rates]:
    """What the rates were if a map were held against another summary of its untrained maps than the largest.

    Of members that kept the raw numbers; none for those that did not.
    """
    raw = [m for m in measured if all("gain" in t for tests in m["tests"].values() for t in tests.values())]
    return (
        {name: rates([_held_against(m, of) for m in raw], rule) for name, of in SUMMARIES.items()}
        if raw
        else {}
    )


def _held_against(member: Member, summary: Callable[[np.ndarray], np.ndarray]) -> Member:
    def again(found: Mapping[str, Any]) -> dict[str, Any]:
        now = np.array(found["specificity_weights"], float)
        shadows = np.array([found[key] for key in found if key.startswith("gain_untrained_")], float)
        other = np.array(found["gain"], float) - summary(shadows)
        unmoved = not np.nan_to_num(now).any()  # maps that are their own shadows stay so
        return {**found, "specificity_weights": now if unmoved else np.where(np.isnan(now), np.nan, other)}

    tests = {network: {m: again(f) for m, f in of.items()} for network, of in member["tests"].items()}
    return {**member, "tests": tests}


def separation(measured: Sequence[Member]) -> dict[str, tuple[float, int, int]]:
    """By test: how often its mean is larger for a method that follows than for a control, and of how many."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for member in measured:
        for tests in member["tests"].values():
            for method, numbers in tests.items():
                control = method in CONTROLS
                if control or member["contrast"][method]["low"] > 0.5:
                    for test, values in numbers.items():
                        found.setdefault(test, ([], []))[control].append(_mean(np.array(values, float)))
    kept = {t: tuple([v for v in lot if not np.isnan(v)] for lot in lots) for t, lots in found.items()}
    return {t: (float(wins(a, b).mean()), len(a), len(b)) for t, (a, b) in kept.items() if a and b}


def _numbers(found: Mapping[str, Sequence[float | None]]) -> tuple[np.ndarray, np.ndarray]:
    weights, place = (np.array(found[f"specificity_{kind}"], float) for kind in KINDS)
    return weights, place


def _mean(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else float("nan")
