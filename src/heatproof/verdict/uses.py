"""What the network uses: the second answer, from interventions on its evidence (metrics/interventions.py).

Tests of a class, or of all classes with few donors together. k+ counts donors (or pairs) whose evidence turns
the answer and whose control does not, k- the opposite:

    transplant   (k+ - k-) / n over donors whose strongest patch off the object turns half of its recipients
    property     the same over pairs of a whole-image transfer; the property with the largest value
    recurring    share of donors with a turning patch that has three near-identical partners elsewhere
    removal      share of donors that keep the answer when the object is removed, less the share of
                 other images that get it in the same way
    exchange     mean of pointing and inside share of the own map, less those of other images' maps; over
                 all classes

    no           transplant or property is surely above its control (exact binomial test; 2.5 % for the
                 transplants of all classes and 2.5 % for all properties, each with Holm's correction) and its
                 value reaches the calibrated effect
    yes          the upper limits of transplant, property, recurring and removal are below their calibrated
                 bounds, exchange is surely above 0, and a method that chose the patches follows the network
    undecided    anything else; always without annotated objects

A class without objects beside annotated ones ("no code") is "yes" if none of its patches, wherever they lie,
and none of its properties turns other images; its patches never give a "no", since they may cover an object.
One class with "no" decides for the network; "yes" needs "yes" for every class. Effects and bounds were chosen
on one half of networks with planted evidence, error rates measured on the other half (rates.json).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from scipy.stats import binomtest

from heatproof.errors import counted
from heatproof.metrics.evidence_record import HALF, EvidenceRecord, PatchTest
from heatproof.metrics.results import mean_interval
from heatproof.verdict.answers import Answer, ClassAnswer, NetworkAnswer, Test, listed
from heatproof.verdict.follow import LEVEL, calibration, holm, p_above

FEWEST = 10  # donors of a class that is judged on its own
OTHERS = "other classes"
ON_OBJECT = 0.35
NOT_TESTED = "What the network uses was not tested"
ADD_IT = "add the metric evidence to the run"
TITLES = {
    "transplant": "patches off the object that turn other images",
    "property": "whole-image property that turns other images",
    "recurring": "recurring patches that turn other images",
    "removal": "answers kept without the object",
    "exchange": "position of the maps above that of other images' maps",
}


Tests = Mapping[str, tuple[Test, float]]  # with p values


class Effects(NamedTuple):
    """Calibrated limits of the values."""

    transplant: float  # from which on a shortcut is stated
    property: float
    transplant_bound: float  # below which the upper limits must lie for a "yes"
    property_bound: float
    recurring_bound: float
    removal_bound: float

    @classmethod
    def calibrated(cls) -> Effects:
        return cls(**calibration()["network"]["effects"])

    def limit(self, key: str) -> float:
        """Limit that is printed beside a test."""
        if key.startswith("property"):
            return self.property
        return {"transplant": self.transplant, "recurring": self.recurring_bound,
                "removal": self.removal_bound}.get(key, 0.0)  # fmt: skip


@dataclass(frozen=True)
class Group:
    """Donors that are judged together: those of one class, or of all classes with few."""

    label: int | None
    name: str
    donors: np.ndarray  # indices
    labels: tuple[int, ...]


def groups(record: EvidenceRecord) -> list[Group]:
    """Classes with enough donors, then the others as one group."""
    label = np.array(record.label)
    kinds, counts = np.unique(label, return_counts=True)
    large = [c for c, n in zip(kinds.tolist(), counts, strict=True) if n >= FEWEST]
    made = [Group(c, record.class_name(c), np.flatnonzero(label == c), (c,)) for c in large]
    small = tuple(c for c in kinds.tolist() if c not in large)
    if small:
        name = OTHERS if large else "all classes"
        made.append(Group(None, name, np.flatnonzero(np.isin(label, small)), small))
    return made


def paired_test(name: str, ahead: int, behind: int, n: int, title: str = "") -> tuple[Test, float]:
    """Value (ahead - behind) / n with its Clopper-Pearson interval, and the p value of ahead > behind."""
    title = title or TITLES[name]
    if not n:
        return Test(name, title, "undecided", math.nan, math.nan, math.nan, 0), 1.0
    low, high, p = _exact(ahead, behind, n)
    value, less = (ahead - behind) / n, behind / n
    return Test(name, title, "undecided", value, low - less, high - less, n), p


@lru_cache(maxsize=4096)  # the same counts come again and again
def _exact(ahead: int, behind: int, n: int) -> tuple[float, float, float]:
    """Clopper-Pearson interval of ahead of n, and the p value of ahead > behind."""
    low, high = binomtest(ahead, n).proportion_ci(0.95)
    p = binomtest(ahead, ahead + behind, 0.5, "greater").pvalue if ahead + behind else 1.0
    return float(low), float(high), float(p)


def _paired(name: str, turned: np.ndarray, control: np.ndarray, title: str = "") -> tuple[Test, float]:
    """The paired test of two bool arrays; where nothing turns, there are no controls."""
    behind = int((control & ~turned).sum()) if turned.any() else 0
    return paired_test(name, int((turned & ~control).sum()), behind, len(turned), title)


def _turning(tests: Sequence[PatchTest], control: bool = False) -> np.ndarray:
    """By donor: whether a patch of any size turns half of its recipients; NaN without a window."""
    table = np.array([t.control_turned if control else t.turned for t in tests], float)
    return np.where(np.isfinite(table).any(0), (np.nan_to_num(table) >= HALF).any(0), np.nan)


def has_objects(record: EvidenceRecord, group: Group) -> bool:
    """Whether a donor of the group has an annotated object; True if no image of the record has one."""
    shares = np.array(record.object_share, float)
    return not record.has_regions or bool(np.isfinite(shares[group.donors]).any())


def group_tests(record: EvidenceRecord, group: Group) -> Tests:
    """The tests of a group with their p values."""
    patches = record.off_object if has_objects(record, group) else record.anywhere
    own, control = (_turning(patches, c)[group.donors] for c in (False, True))
    known = np.isfinite(own)
    tests = {"transplant": _paired("transplant", own[known] == 1, control[known] == 1)}
    if patches is not record.off_object:
        tests["transplant"] = tests["transplant"][0], 1.0
    for of in record.properties:
        chosen = np.isin(np.array(of.label), group.labels)
        turned, beside = np.array(of.turned, bool)[chosen], np.array(of.control, bool)[chosen]
        if len(turned):
            tests[f"property: {of.name}"] = _paired("property", turned, beside, f"{of.name}, transferred")
    recurring = record.recurring()[group.donors]
    tests["recurring"] = paired_test("recurring", int(recurring.sum()), 0, len(recurring))
    if record.removal is not None and has_objects(record, group):
        tests["removal"] = _removal(record, group), 1.0
    if record.exchange is not None:
        # Over all classes: one class of two is often recognised by the absence of the other's features, and
        # its maps then lie anywhere.
        both = np.array([record.exchange.pointing, record.exchange.inside], float).mean(0)
        values = both[np.isfinite(both)]
        mean = float(values.mean()) if len(values) else math.nan
        test = Test("exchange", TITLES["exchange"], "undecided", mean, *mean_interval(values), len(values))
        tests["exchange"] = test, p_above(values, 0.0) if len(values) > 1 else 1.0
    return tests


def _removal(record: EvidenceRecord, group: Group) -> Test:
    """Difference of two shares with Newcombe's interval."""
    assert record.removal is not None
    kept = np.array(record.removal.kept, float)[group.donors]
    kept = kept[np.isfinite(kept)]
    pairs = [record.removal.others.get(c, (0, 0)) for c in group.labels]
    n, count = len(kept), sum(pair[0] for pair in pairs)
    if not n or not count:
        return Test("removal", TITLES["removal"], "undecided", math.nan, math.nan, math.nan, n)
    shares = [(int(kept.sum()), n), (sum(pair[1] for pair in pairs), count)]
    (a, b), ends = (
        (k / m for k, m in shares),
        [binomtest(k, m).proportion_ci(0.95, "wilson") for k, m in shares],
    )
    low = a - b - math.hypot(a - ends[0].low, ends[1].high - b)
    high = a - b + math.hypot(ends[0].high - a, b - ends[1].low)
    return Test("removal", TITLES["removal"], "undecided", a - b, float(low), float(high), n)


def network_answer(
    record: EvidenceRecord | None, follows: bool = True, effects: Effects | None = None, why: str = ""
) -> NetworkAnswer:
    """The answer for the network and for each class.

    Args:
        record: the interventions; None if there were none.
        follows: whether the maps that chose the patches follow the network.
        effects: limits instead of the calibrated ones.
        why: the reason why there is no record.
    """
    if record is None:
        return NetworkAnswer(note=f"{NOT_TESTED}: {why or ADD_IT}")
    effects = effects or Effects.calibrated()
    classes = []
    for group, tests, p_values in evaluate(record):
        own, shortcuts = decide(tests, p_values, record.has_regions, follows, effects)
        decided = shortcuts if own == "no" else ()
        members = {c: record.class_name(c) for c in group.labels}
        rows = tuple(
            replace(
                test,
                answer="no" if key in decided else "undecided",
                threshold=effects.limit(key),
                votes=True,
            )
            for key, (test, _) in tests.items()
        )
        classes.append(ClassAnswer(group.label, group.name, own, rows, members))
    answer = overall(c.answer for c in classes)
    return NetworkAnswer(
        answer, tuple(classes), record.methods, record.items, record.has_regions, True,
        _note(record, answer, classes, follows), record.inputs, calibration()["network"].get("rates", {}),
    )  # fmt: skip


def overall(classes: Iterable[Answer]) -> Answer:
    """The answer for the network: one "no" is enough, "yes" needs all classes."""
    answers = set(classes)
    return "no" if "no" in answers else "yes" if answers == {"yes"} else "undecided"


def evaluate(record: EvidenceRecord) -> list[tuple[Group, Tests, dict[str, float]]]:
    """The groups with their tests, and the corrected p values of those that may state a shortcut."""
    made = groups(record)
    tests = [group_tests(record, group) for group in made]
    # Holm over classes and properties: with many, one would be above its control by chance. Transplants have
    # half of the error probability for themselves, since there is one for each class and many properties.
    p_values: dict[tuple[int, str], float] = {}
    for family in (("transplant",), tuple(key for of in tests for key in of if key.startswith("property"))):
        own = {(i, key): p for i, of in enumerate(tests) for key, (_, p) in of.items() if key in family}
        p_values |= {key: min(1.0, 2 * p) for key, p in holm(own).items()}
    return [
        (group, of, {key: p_values[i, key] for key in of if (i, key) in p_values})
        for i, (group, of) in enumerate(zip(made, tests, strict=True))
    ]


def decide(
    tests: Tests, p_values: Mapping[str, float], has_regions: bool, follows: bool, effects: Effects
) -> tuple[Answer, set[str]]:
    """The answer of a group, and the tests that state a shortcut."""
    donors = tests["recurring"][0].n
    shortcuts = {
        key
        for key, p in p_values.items()
        if donors >= FEWEST and p < LEVEL and tests[key][0].value >= effects.limit(key)
    }
    if not has_regions:
        return "undecided", shortcuts
    if shortcuts:
        return "no", shortcuts
    bounds = {"transplant": effects.transplant_bound, "recurring": effects.recurring_bound,
              "removal": effects.removal_bound}  # fmt: skip
    is_clear = all(tests[key][0].high < bound for key, bound in bounds.items() if key in tests)
    properties = [test.value for key, (test, _) in tests.items() if key.startswith("property")]
    is_clear &= max(properties, default=math.inf) < effects.property_bound
    return ("yes" if is_clear and follows and tests["exchange"][1] < LEVEL else "undecided"), shortcuts


def _note(record: EvidenceRecord, answer: Answer, classes: Sequence[ClassAnswer], follows: bool) -> str:
    """One or two sentences: the strongest evidence, and what would decide."""
    if answer == "no":
        accused = [c for c in classes if c.answer == "no"]
        labels = {c.label for c in accused}
        items = [item for item in record.items if item.label in labels or None in labels]
        items = [i for i in items if i.kind == "property" or (i.on_object or 0.0) < ON_OBJECT]
        best = max(items, key=lambda item: item.turned - item.control_turned, default=None)
        names = listed([c.name for c in accused], most=5)
        text = f"The network uses something other than the object for {names}"
        return text if best is None else f"{text}: {best.sentence(record.class_name(best.label))}"
    if answer == "yes":
        return f"The network uses the annotated object ({counted(len(record.label), 'image')} tested)"
    listed_items = [
        i
        for i in record.items
        if (i.recurring or (i.kind == "property" and not record.has_regions)) and (i.on_object or 0.0) < HALF
    ]
    best = max(listed_items, key=lambda item: item.turned - item.control_turned, default=None)
    if not record.has_regions:
        rest = "annotate the objects (boxes or masks) to have it judged"
        if best is None:
            return f"What the network uses is shown, not judged: no evidence recurs; {rest}"
        name = record.class_name(best.label)
        kind = "Recurring evidence" if best.recurring else "A property of whole images"
        return f"{kind}: judge whether it belongs to '{name}': {best.sentence(name)}; or {rest}"
    open_classes = [c for c in classes if c.answer == "undecided"]
    reasons = sorted({_obstacle(c, follows) for c in open_classes})
    names = listed([c.name for c in open_classes], most=5)
    text = f"Whether the network uses the object is undecided for {names}: {'; '.join(reasons)}"
    return text if best is None else f"{text}; {best.sentence(record.class_name(best.label))}"


def _obstacle(answer: ClassAnswer, follows: bool) -> str:
    """What keeps an undecided class from an answer, and the remedy."""
    tests = {test.name: test for test in answer.tests}
    if not follows:
        return "no method whose maps chose the patches is known to follow the network"
    donors, few = tests["recurring"].n, tests["transplant"].n
    if donors < FEWEST:
        return f"{counted(donors, 'image')} could be tested, {FEWEST} are needed; add images"
    if few < FEWEST:
        return f"{counted(few, 'image')} with room off the object, {FEWEST} are needed; add annotated images"
    if (
        "recurring" in tests
        and tests["recurring"].high >= tests["recurring"].threshold
        and tests["recurring"].value > 0
    ):
        return "evidence on the object recurs nearly unchanged; judge whether it belongs to the class"
    if "removal" in tests and not tests["removal"].high < tests["removal"].threshold:
        return "answers are kept although the object is removed; check what else the images share"
    if "exchange" in tests and not tests["exchange"].low > 0:
        return "maps lie where those of other images lie; add images with objects at other places"
    return "the tests are too close to their limits; add annotated images"
