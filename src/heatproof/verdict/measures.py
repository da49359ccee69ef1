"""What the metric of a row means: its registered metric, its name in plain words, which way is better.

A row's metric is a registered name, perhaps with options ("insertion(steps=50)"), or a part of one
("randomisation_ssim", "cscore_low", "insertion_at_40"). Names nobody registered are shown as they are,
without a direction: nothing is then called best.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from heatproof.errors import InputError
from heatproof.registry import Metric, metrics, parse_call, unregistered

FAMILIES = (  # in the order of the table; those of plug-ins follow
    "Maps", "Structure", "Localisation", "Faithfulness", "Consistency", "Consistency and sensitivity",
    "Sanity", "Robustness", "Causes", "Agreement", "Classifier",
)  # fmt: skip
BESIDE = re.compile(r"_(n|low|high|degenerate|error|points|at_\d+)$")  # parts that only complete their metric
BLANK = Metric(  # a row that every run has, of no registered metric
    "degenerate", higher_is_better=False, bounds=(0.0, 1.0), family="Maps", floors=(), title="blank maps",
    about="The share of maps that are constant, so that nothing in them stands out.",
)  # fmt: skip


@dataclass(frozen=True)
class Measure:
    """One metric as rows name it."""

    name: str  # with its options, as in the rows
    base: str  # without them
    facts: Metric

    @property
    def entry(self) -> Metric | None:
        """None where nobody registered it."""
        return None if self.facts.function is unregistered else self.facts

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


@lru_cache(maxsize=4096)
def measure(name: str) -> Measure:
    """What a row's metric means.

    >>> found = measure("randomisation_ssim(depths=3)")
    >>> found.base, found.entry.name, found.arrow, found.options
    ('randomisation_ssim', 'randomisation', '↓', 'depths=3')
    """
    try:
        base, _ = parse_call(name)
    except InputError:
        base = name
    return Measure(name, base, BLANK if base == BLANK.name else _entry(base) or Metric(base))


def _entry(base: str) -> Metric | None:
    """The registered metric of this name, or the one it is a part of."""
    parts = base.split("_")
    found = (metrics.find("_".join(parts[:end])) for end in range(len(parts), 0, -1))
    return next(filter(None, found), None)


def stands_beside(name: str) -> bool:
    """Whether a row only completes another metric's: its count, its interval, a point of its curve.

    >>> [stands_beside(name) for name in ("cscore_low", "insertion_at_40(steps=20)", "cscore", "my_n")]
    [True, True, False, False]
    """
    base = name.partition("(")[0]
    return bool(BESIDE.search(base)) and measure(name).entry is not None


def part(name: str, suffix: str) -> str:
    """The name of a metric's further number, where its options stand last.

    >>> part("cscore(alpha=1)", "low")
    'cscore_low(alpha=1)'
    """
    base, bracket, rest = name.partition("(")
    return f"{base}_{suffix}{bracket}{rest}"


def in_order(names: list[str]) -> list[Measure]:
    """As the table shows them: by family, in the order of their files, those without a direction last."""
    words = [word for entry in metrics.as_registered() for word in entry.titles]
    families = {family: i for i, family in enumerate(FAMILIES)}

    def place(of: Measure) -> tuple[int, str, bool, int, str]:
        family, known = of.facts.family, of.base in words
        undirected = of.higher_is_better is None or not known
        at = words.index(of.base) if known else len(words)
        return families.get(family, len(families)), family, undirected, at, of.name

    return sorted(map(measure, names), key=place)
