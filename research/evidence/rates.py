"""Form of the rule and effect sizes chosen on one half of the networks, wrong answers counted on the other.

The rule is that of heatproof.verdict.uses. Its form (the method whose maps choose windows, their sizes, and
whether statistics of whole images are transferred to the object too) and its six limits are chosen on the
half that CHOOSE names, among a grid that was fixed before: of those with at most 3 % of the clean networks
accused ("no") and at most 3 % of the cheating networks called fine ("yes"), which leaves room below the aim
of 5 %, the ones that leave the fewest undecided; of equals, the form that comes first, with fewer inputs,
and the middle limits. Counts on the other half have Clopper-Pearson intervals (clopper1934binomial), overall
and by kind of cue.
"""

from __future__ import annotations

import csv
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from heatproof.errors import InputError
from heatproof.metrics.evidence_record import PARTNERS, EvidenceRecord, ExchangeTest, PatchTest
from heatproof.verdict.answers import without_nan
from heatproof.verdict.uses import Effects, decide, evaluate, overall
from research.calibration.thresholds import Share
from research.evidence.cues import KINDS
from research.evidence.measure import METHODS, SIDES, WHOLE
from research.evidence.plan import CHOOSE, PUBLISH, halves
from research.evidence.train import CHEATS, CLEAN, NEITHER

MOST_WRONG = 0.03
GRID: tuple[tuple[float, ...], ...] = (  # of each field of Effects
    (0.05, 0.1, 0.15, 0.2, 0.3), (0.15, 0.2, 0.25, 0.3, 0.4), (0.1, 0.15, 0.2, 0.3), (0.15, 0.25, 0.35),
    (0.15, 0.25, 0.4, 0.6), (0.3, 0.4, 0.5, 0.6, 0.8),
)  # fmt: skip


OFF, BOTH = "off the object", "both"  # where statistics are transferred to


class Form(NamedTuple):
    """The part of a measurement that the rule reads."""

    method: str
    sides: tuple[int, ...]  # indices of SIDES
    statistics: str

    def of(self, record: Mapping[str, Any]) -> EvidenceRecord:
        """The evidence of a network in this form."""
        every = EvidenceRecord.from_json(record["evidence"])
        off, anywhere, exchange = every.off_object, every.anywhere, every.exchange
        if self.method != METHODS[0]:
            other = record["other_methods"][self.method]
            off, anywhere = (
                msgspec.convert(other[key], tuple[PatchTest, ...]) for key in ("off_object", "anywhere")
            )
            exchange = msgspec.convert(other["exchange"], ExchangeTest)
        whole = {test.name for test in every.properties if test.name.endswith(f", {WHOLE}")}
        left_out = {
            OFF: whole, WHOLE: {name.removesuffix(f", {WHOLE}") for name in whole}, BOTH: set[str](),
        }[self.statistics]  # fmt: skip
        return replace(
            every, methods=(self.method,), off_object=tuple(off[i] for i in self.sides),
            anywhere=tuple(anywhere[i] for i in self.sides), exchange=exchange,
            window_shares=tuple(every.window_shares[i] for i in self.sides),
            properties=tuple(test for test in every.properties if test.name not in left_out),
        )  # fmt: skip

    def described(self) -> dict[str, Any]:
        return self._asdict() | {"sides": [SIDES[i] for i in self.sides]}

    @classmethod
    def read(cls, described: Mapping[str, Any]) -> Form:
        """The form of an entry of rates.json."""
        sides = tuple(SIDES.index(side) for side in described["sides"])
        return cls(described["method"], sides, described["statistics"])


FORMS = tuple(
    Form(method, sides, statistics)
    for sides in ((0,), (1,), (0, 1)) for method in METHODS for statistics in (OFF, WHOLE, BOTH)
)  # fmt: skip


@dataclass(frozen=True)
class Network:
    """One measured network of the population."""

    record: Mapping[str, Any]
    form: Form = FORMS[0]

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
        return self.form.of(self.record)

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
        """Whether windows chosen without regions recur, which are then listed for the user to judge."""
        return any(max(test.partners, default=0) >= PARTNERS for test in self.evidence.anywhere)


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


def networks(records: Sequence[Mapping[str, Any]], form: Form = FORMS[0]) -> list[Network]:
    """The networks that do what they were trained for."""
    return [Network(record, form) for record in records if record["truth"] != NEITHER and record["evidence"]]


def left_out(records: Sequence[Mapping[str, Any]]) -> Counter[str]:
    """Networks that were trained and not measured, by kind of cue and network of the pair."""
    return Counter(f"{r['member']['kind']} {r['network']}" for r in records if r["truth"] == NEITHER)


def rates(some: Sequence[Network], effects: Effects) -> Rates:
    answers = [(network.truth, network.answer(effects)) for network in some]

    def share(given: str, truth: str | None) -> Share:
        of_truth = [answer for real, answer in answers if truth in (None, real)]
        return Share.of(sum(answer == given for answer in of_truth), len(of_truth))

    return Rates(share("yes", CHEATS), share("no", CLEAN), share("no", CHEATS), share("undecided", None))


def choose_form(records: Sequence[Mapping[str, Any]]) -> tuple[Form, Effects]:
    """The form that is best on the half that chooses, and its limits."""
    best = [(choose(choosing(networks(records, form))), form) for form in FORMS]
    (_, effects), form = min(best, key=lambda pair: pair[0][0])  # the first of equals
    return form, effects


class Cost(NamedTuple):
    """Of limits, smaller is better."""

    too_many_wrong: float
    undecided: float


def choose(some: Sequence[Network]) -> tuple[Cost, Effects]:
    """The best limits of the grid; of equals, the middle ones."""
    stating = list(itertools.product(*GRID[:2]))
    bounding = list(itertools.product(*GRID[2:]))
    # "no" depends on the first two limits, "yes" on the others where there is no "no".
    says_no = np.array([[n.answer(Effects._make((*v, 0, 0, 0, 0))) == "no" for v in stating] for n in some])
    says_yes = np.array([[n.answer(Effects._make((9, 9, *v))) == "yes" for v in bounding] for n in some])
    cheats = np.array([n.truth == CHEATS for n in some])
    choices: list[tuple[Cost, Effects]] = []
    for i, first in enumerate(stating):
        for j, second in enumerate(bounding):
            effects = Effects._make((*first, *second))
            if effects.transplant_bound < effects.transplant or effects.property_bound > effects.property:
                continue  # a "yes" must be stricter than the absence of a "no"
            no, yes = says_no[:, i], says_yes[:, j] & ~says_no[:, i]
            wrong = [float(answer.mean()) for answer in (yes[cheats], no[~cheats]) if len(answer)]
            undecided = float((~no & ~yes).mean())
            choices.append((Cost(max(0.0, max(wrong) - MOST_WRONG), undecided), effects))
    least = min(cost for cost, _ in choices)
    best = [effects for cost, effects in choices if cost == least]
    return least, best[len(best) // 2]


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
        "form": some[0].form.described(), "effects": effects._asdict(), "made_by": made_by,
        "pairs": len({n.name[:-2] for n in some}),
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
