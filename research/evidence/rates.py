"""Effect sizes chosen on one half of the networks, and how often the answer is wrong on the other.

An effect is a number in the record of a network, named by its path, such as `with_regions.transplant.effect`.
Per effect there are two limits, low <= high:

    no          some effect is above its high limit
    yes         every effect is at or below its low limit
    undecided   anything else

Limits are chosen on the half that CHOOSE names, among the values that occur there: of those with at most 5 %
of the clean networks accused (no) and at most 5 % of the cheating networks called fine (yes), the pair that
leaves the fewest undecided. Counts on the other half have Clopper-Pearson intervals
(clopper1934binomial), overall and by kind of cue.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from heatproof.errors import InputError
from research.calibration.thresholds import Share
from research.evidence.cues import KINDS
from research.evidence.plan import CHOOSE, PUBLISH, halves
from research.evidence.train import CHEATS, CLEAN, NEITHER

MOST_WRONG = 0.05
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Limits:
    """Of one effect."""

    low: float
    high: float

    def answer(self, effect: float) -> str:
        if not math.isfinite(effect):
            return "undecided"
        return "no" if effect > self.high else "yes" if effect <= self.low else "undecided"


@dataclass(frozen=True)
class Rates:
    """Of some networks: cheating ones called fine, clean ones accused, and undecided ones."""

    called_fine: Share
    accused: Share
    undecided: Share

    @property
    def row(self) -> list[str]:
        return [share.text for share in (self.called_fine, self.accused, self.undecided)]


def usable(records: Sequence[Record]) -> list[Record]:
    """The networks that do what they were trained for."""
    return [record for record in records if record["truth"] != NEITHER]


def left_out(records: Sequence[Record]) -> Counter[str]:
    """Networks that were trained and not measured, by kind of cue and network of the pair."""
    return Counter(
        f"{record['member']['kind']} {record['network']}" for record in records if record["truth"] == NEITHER
    )


def half_of(record: Record) -> str:
    name = record["name"].rpartition("-")[0]
    every = halves()
    if name not in every:
        raise InputError(f"{record['name']} is not in the plan")
    return every[name]


def effect_of(record: Record, path: str) -> float:
    """A number of a record; NaN if it is not defined."""
    value: Any = record
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise InputError(f"{record['name']} has no {path}")
        value = value[part]
    return math.nan if value is None else float(value)


def choose(records: Sequence[Record], effects: Sequence[str]) -> dict[str, Limits]:
    """Limits of each effect, chosen one effect after the other with those before it in place."""
    chosen: dict[str, Limits] = {}
    for path in effects:
        values = np.array([effect_of(record, path) for record in records])
        steps = sorted({-math.inf, *values[np.isfinite(values)].tolist()})
        pairs = [Limits(low, high) for i, low in enumerate(steps) for high in steps[i:]]
        chosen[path] = min(pairs, key=lambda limits: _cost(records, chosen | {path: limits}))
    return chosen


def _cost(records: Sequence[Record], limits: Mapping[str, Limits]) -> tuple[bool, float, float]:
    """An order: of the limits with few wrong answers those that leave fewest undecided."""
    counted = rates(records, limits)
    wrong = [share.share for share in (counted.called_fine, counted.accused)]
    too_many = max(value for value in (*wrong, 0.0) if not math.isnan(value))
    if too_many > MOST_WRONG:
        return True, too_many, 0.0
    return False, counted.undecided.share, too_many


def answer(record: Record, limits: Mapping[str, Limits]) -> str:
    answers = [limit.answer(effect_of(record, path)) for path, limit in limits.items()]
    if "no" in answers:
        return "no"
    return "yes" if all(each == "yes" for each in answers) else "undecided"


def rates(records: Sequence[Record], limits: Mapping[str, Limits]) -> Rates:
    answers = [(record["truth"], answer(record, limits)) for record in records]

    def share(wrong: str, truth: str | None) -> Share:
        of_truth = [given for real, given in answers if truth in (None, real)]
        return Share.of(sum(given == wrong for given in of_truth), len(of_truth))

    return Rates(share("yes", CHEATS), share("no", CLEAN), share("undecided", None))


def rates_by_kind(records: Sequence[Record], limits: Mapping[str, Limits]) -> dict[str, Rates]:
    """Rates on the half that chose nothing, overall and by kind of cue."""
    other = [record for record in records if half_of(record) == PUBLISH]
    by_kind = {kind: [r for r in other if r["member"]["kind"] == kind] for kind in KINDS}
    return {name: rates(some, limits) for name, some in {"all": other, **by_kind}.items()}


def choosing(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if half_of(record) == CHOOSE]
