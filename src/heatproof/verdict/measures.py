"""What the metric of a row means: the facts of its metric, its name in plain words, which way is better.

A row's metric is a registered name, perhaps with options ("insertion(steps=50)"), or a part of one
("randomisation_ssim", "cscore_low", "insertion_at_40"). Names nobody registered are shown as they are,
without a direction: nothing is then called best.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from heatproof.errors import InputError
from heatproof.registry import parse_call
from heatproof.store.facts import Facts, MetricFacts

FAMILIES = (  # in the order of the table; those of plug-ins follow
    "Maps", "Structure", "Localisation", "Faithfulness", "Consistency", "Consistency and sensitivity",
    "Sanity", "Robustness", "Causes", "Agreement", "Classifier",
)  # fmt: skip
REGISTRY = Facts()  # of everything that is registered
BESIDE = re.compile(r"_(n|low|high|degenerate|error|points|at_\d+)$")  # parts that only complete their metric
BLANK = MetricFacts(  # a row that every run has, of no registered metric
    "degenerate", higher_is_better=False, bounds=(0.0, 1.0), family="Maps", floors=(), title="blank maps",
    summary="The share of maps that are constant, so that nothing in them stands out.",
)  # fmt: skip


@dataclass(frozen=True)
class Measure:
    """One metric as rows name it."""

    name: str  # with its options, as in the rows
    base: str  # without them
    facts: MetricFacts

    @property
    def is_registered(self) -> bool:
        return bool(self.facts.module)

    @property
    def higher_is_better(self) -> bool | None:
        return self.facts.higher_is_better

    @property
    def plain(self) -> str:
        return self.facts.titles.get(self.base, self.base.replace("_", " "))

    @property
    def short(self) -> str:
        """For the middle of a sentence."""
        return self.plain.partition(":")[0]

    @property
    def options(self) -> str:
        return self.name.partition("(")[2].removesuffix(")")

    @property
    def arrow(self) -> str:
        return {True: "↑", False: "↓", None: ""}[self.higher_is_better]

    @property
    def direction(self) -> str:
        return {True: "higher is better", False: "lower is better", None: "no better direction"}[
            self.higher_is_better
        ]

    @property
    def has_floor(self) -> bool:
        """Whether a method that reads the network ought to score better than one that does not."""
        return bool(self.facts.floors) and self.higher_is_better is not None

    @property
    def is_test(self) -> bool:
        """Whether the verdict rests on it."""
        return self.facts.test and self.base in self.facts.titles


def measure(name: str, facts: Facts = REGISTRY) -> Measure:
    """What a row's metric means, by the facts of its run.

    >>> found = measure("randomisation_ssim(depths=3)")
    >>> found.base, found.facts.name, found.arrow, found.options
    ('randomisation_ssim', 'randomisation', '↓', 'depths=3')
    """
    try:
        base, _ = parse_call(name)
    except InputError:
        base = name
    return Measure(name, base, BLANK if base == BLANK.name else facts.metric_of(base) or MetricFacts(base))


def stands_beside(name: str, facts: Facts = REGISTRY) -> bool:
    """Whether a row only completes another metric's: its count, its interval, a point of its curve.

    >>> [stands_beside(name) for name in ("cscore_low", "insertion_at_40(steps=20)", "cscore", "my_n")]
    [True, True, False, False]
    """
    base = name.partition("(")[0]
    return bool(BESIDE.search(base)) and measure(name, facts).is_registered


def part(name: str, suffix: str) -> str:
    """The name of a metric's further number, where its options stand last.

    >>> part("cscore(alpha=1)", "low")
    'cscore_low(alpha=1)'
    """
    base, bracket, rest = name.partition("(")
    return f"{base}_{suffix}{bracket}{rest}"


def in_order(names: list[str], facts: Facts = REGISTRY) -> list[Measure]:
    """As the table shows them: by family, in the order of their files, those without a direction last."""
    words = [word for one in facts.every_metric for word in one.titles]
    families = {family: i for i, family in enumerate(FAMILIES)}

    def place(of: Measure) -> tuple[int, str, bool, int, str]:
        family, known = of.facts.family, of.base in words
        undirected = of.higher_is_better is None or not known
        at = words.index(of.base) if known else len(words)
        return families.get(family, len(families)), family, undirected, at, of.name

    return sorted((measure(name, facts) for name in names), key=place)
