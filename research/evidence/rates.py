"""Effect sizes chosen on one half of the networks, and how often the answer is wrong on the other.

The rule is that of heatproof.verdict.uses: its six limits are chosen on the half that CHOOSE names, among a
grid that was fixed before: of the limits with at most 5 % of the clean networks accused ("no") and at most
5 % of the cheating networks called fine ("yes"), those that leave the fewest undecided; of equals, the
middle ones. Counts on the other half have Clopper-Pearson intervals (clopper1934binomial), overall and by
kind of cue.
"""

from __future__ import annotations

import csv
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from heatproof.errors import InputError
from heatproof.metrics.evidence_record import EvidenceRecord
from heatproof.verdict.answers import without_nan
from heatproof.verdict.uses import Effects, decide, evaluate, overall
from research.calibration.thresholds import Share
from research.evidence.cues import KINDS
from research.evidence.plan import CHOOSE, PUBLISH, halves
from research.evidence.train import CHEATS, CLEAN, NEITHER

MOST_WRONG = 0.05
GRID: tuple[tuple[float, ...], ...] = (  # of each field of Effects
    (0.05, 0.1, 0.15, 0.2, 0.3), (0.15, 0.2, 0.25, 0.3, 0.4), (0.1, 0.15, 0.2, 0.3), (0.15, 0.25, 0.35),
    (0.15, 0.25, 0.4, 0.6), (0.3, 0.4, 0.5, 0.6, 0.8),
)  # fmt: skip


@dataclass(frozen=True)
class Network:
    """One measured network of the population."""

    record: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.record["name"])

    @property
    def kind(self) -> str:
        return str(self.record["member"]["kind"])

    @property
    def truth(self) -> str:
        return str(self.record["truth"])

    @cached_property
    def half(self) -> str:
        every = halves()
        pair = self.name.rpartition("-")[0]
        if pair not in every:
            raise InputError(f"{self.name} is not in the plan")
        return every[pair]

    @cached_property
    def evidence(self) -> EvidenceRecord:
        return EvidenceRecord.from_json(self.record["with_regions"])

    @cached_property
    def groups(self) -> list[Any]:
        return evaluate(self.evidence)

    def answer(self, effects: Effects) -> str:
        """The answer with regions, as if the maps follow the network."""
        return overall(decide(tests, p, True, True, effects)[0] for _, tests, p in self.groups)

    @property
    def numbers(self) -> dict[str, float]:
        """The tests of the class in which each is largest, for the table."""
        values: dict[str, float] = {}
        for _, tests, _ in self.groups:
            for key, (test, _p) in tests.items():
                short = key.partition(":")[0]
                values[short] = max(values.get(short, -9.0), test.value if test.value == test.value else -9.0)
        return values

    @property
    def recurs(self) -> bool:
        """Whether evidence recurs without regions, which is then listed for the user to judge."""
        items = self.record["without_regions"]["items"]
        return any(item["recurring"] for item in items)


@dataclass(frozen=True)
class Rates:
    """Of some networks: cheating called fine, clean accused, shortcuts stated, undecided."""

    called_fine: Share
    accused: Share
    stated: Share
    undecided: Share

    @property
    def row(self) -> list[str]:
        return [share.text for share in (self.called_fine, self.accused, self.stated, self.undecided)]


def networks(records: Sequence[Mapping[str, Any]]) -> list[Network]:
    """The networks that do what they were trained for."""
    return [Network(record) for record in records if record["truth"] != NEITHER and record["with_regions"]]


def left_out(records: Sequence[Mapping[str, Any]]) -> Counter[str]:
    """Networks that were trained and not measured, by kind of cue and network of the pair."""
    return Counter(f"{r['member']['kind']} {r['network']}" for r in records if r["truth"] == NEITHER)


def rates(some: Sequence[Network], effects: Effects) -> Rates:
    answers = [(network.truth, network.answer(effects)) for network in some]

    def share(given: str, truth: str | None) -> Share:
        of_truth = [answer for real, answer in answers if truth in (None, real)]
        return Share.of(sum(answer == given for answer in of_truth), len(of_truth))

    return Rates(share("yes", CHEATS), share("no", CLEAN), share("no", CHEATS), share("undecided", None))


def choose(some: Sequence[Network]) -> Effects:
    """The limits of the grid with few wrong answers and the fewest undecided; of equals, the middle one."""
    best: list[Effects] = []
    least: tuple[float, float] | None = None
    for values in itertools.product(*GRID):
        effects = Effects(*values)
        if effects.transplant_bound < effects.transplant or effects.property_bound > effects.property:
            continue  # a "yes" must be stricter than the absence of a "no"
        counted = rates(some, effects)
        wrong = max(counted.called_fine.share, counted.accused.share)
        cost = (max(0.0, wrong - MOST_WRONG), counted.undecided.share)
        if least is None or cost < least:
            best, least = [], cost
        if cost == least:
            best.append(effects)
    return best[len(best) // 2]


def rates_by_kind(some: Sequence[Network], effects: Effects) -> dict[str, Rates]:
    """Rates on the half that chose nothing, overall and by kind of cue."""
    other = [network for network in some if network.half == PUBLISH]
    by_kind = {kind: [n for n in other if n.kind == kind] for kind in KINDS}
    return {name: rates(own, effects) for name, own in {"all": other, **by_kind}.items()}


def choosing(some: Sequence[Network]) -> list[Network]:
    return [network for network in some if network.half == CHOOSE]


def as_json(some: Sequence[Network], effects: Effects, made_by: str) -> dict[str, Any]:
    """The entry `network` of heatproof/verdict/rates.json."""
    published = {n.name.rpartition("-")[0] for n in some if n.half == PUBLISH}
    content = {
        "effects": effects._asdict(), "made_by": made_by, "pairs": len({n.name[:-2] for n in some}),
        "rates": {"networks": sum(n.half == PUBLISH for n in some), "pairs": len(published)}
        | {name: asdict(own) for name, own in rates_by_kind(some, effects).items()},
    }  # fmt: skip
    return dict(without_nan(content))


def write_table(some: Sequence[Network], effects: Effects, path: Path) -> None:
    """A row for each network."""
    tests = ("transplant", "property", "recurring", "removal", "exchange")
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["network", "kind", "truth", "half", "answer", "recurs_without_regions", *tests])
        for network in sorted(some, key=lambda n: n.name):
            numbers = [f"{network.numbers.get(test, float('nan')):.3f}" for test in tests]
            row = [network.name, network.kind, network.truth, network.half, network.answer(effects)]
            table.writerow([*row, network.recurs, *numbers])
