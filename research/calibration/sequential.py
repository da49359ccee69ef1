"""Error rates and cost of the sequential test of an audit, from measured members.

    python -m research.calibration.sequential OUT

reads OUT/members. The rule itself (informative, yes, no) was chosen before, on other networks. Candidates for
the spending of the error and for the number of steps are compared on one half of the pairs, every other one by
name; the rates of the other half are what is published. Numbers at 5 steps come from every second point of
curves of 10 steps, which are the same points.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.stats import norm

from heatproof.metrics.specific import DRAWS
from heatproof.registry import parse_call
from heatproof.verdict.follow import (
    ENOUGH,
    FIRST_LOOK,
    KINDS,
    LEVEL,
    FollowRule,
    Values,
    answers,
    looks,
    rule,
)
from research.calibration.collect import CONTROLS, IMAGES
from research.calibration.thresholds import Member, Share, read_members

Looks = Sequence[tuple[int, float]]


def spent_by(share: Callable[[float], float]) -> Looks:
    """Looks of an audit of 100 images that spends LEVEL * share(t) of the error at the share t of them."""
    numbers = [n for n, _ in looks(IMAGES)]
    spent = [LEVEL * share(n / IMAGES) for n in numbers]
    return [(n, now - before) for n, now, before in zip(numbers, spent, [0.0, *spent], strict=False)]


SPENDING: dict[str, Looks] = {
    "one look": [(IMAGES, LEVEL)],
    "1 - 40 / 2n (used)": list(looks(IMAGES)),
    "O'Brien-Fleming": spent_by(lambda t: 2 * norm.sf(norm.isf(LEVEL / 2) / t**0.5) / LEVEL),
    "Pocock": spent_by(lambda t: float(np.log1p((np.e - 1) * t))),
}


@dataclass
class Counts:
    """Answers and costs over networks."""

    alarms: int = 0
    following: int = 0
    misses: int = 0
    controls: int = 0
    undecided: int = 0
    methods: int = 0
    images: int = 0  # on which methods were tested
    inputs: int = 0  # of these tests

    def row(self) -> list[str]:
        shares = [(self.alarms, self.following), (self.misses, self.controls), (self.undecided, self.methods)]
        each = self.methods * IMAGES
        return [*(Share.of(*pair).text for pair in shares), f"{self.images / self.methods:.0f}",
                f"{self.inputs / each:.0f}"]  # fmt: skip


def count(members: Sequence[Member], by: FollowRule, schedule: Looks, steps: int) -> Counts:
    """Judge every method of a network together, and each control beside them."""
    counts = Counts()
    for member in members:
        for tests in member["tests"].values():
            every = {m: numbers(own, steps) for m, own in tests.items()}
            methods = {m: both for m, both in every.items() if m not in CONTROLS}
            for method, answer, tested in judged(methods, by, schedule):
                counts.methods += 1
                counts.undecided += answer == "undecided"
                counts.images += tested
                counts.inputs += tested * inputs(method, steps)
                if member["contrast"][method]["low"] > 0.5:
                    counts.following += 1
                    counts.alarms += answer == "no"
            for control in every.keys() & set(CONTROLS):
                beside = judged(methods | {control: every[control]}, by, schedule)
                counts.controls += 1
                counts.misses += dict((m, a) for m, a, _ in beside)[control] == "yes"
    return counts


def judged(values: Values, by: FollowRule, schedule: Looks) -> Iterator[tuple[str, str, int]]:
    """Each method, its answer, and the number of images on which it was tested, as in an audit."""
    result: dict[str, tuple[str, int]] = {m: ("undecided", 0) for m in values}
    for n, level in schedule:
        for m, (answer, _) in result.items():
            result[m] = (answer, n) if answer == "undecided" else result[m]
        upto = {m: tuple(column[: result[m][1]] for column in both) for m, both in values.items()}
        now = answers(upto, by, level=level)  # type: ignore[arg-type]
        result = {m: (now[m] if own[0] == "undecided" else own[0], own[1]) for m, own in result.items()}
    return ((m, *own) for m, own in result.items())


def numbers(tests: dict[str, list[float | None]], steps: int) -> tuple[np.ndarray, np.ndarray]:
    suffix = "_at_5" if steps == 5 else ""
    weights, place = (np.array(tests[f"specificity_{kind}{suffix}"], float) for kind in KINDS)
    return weights, place


def inputs(method: str, steps: int) -> int:
    """Inputs of the test of one map: five maps on two curves, and the method under random weights."""
    repeats = next((n for n in parse_call(method)[1].values() if isinstance(n, int)), 1)
    return 2 * (DRAWS + 2) * (steps - 1) + DRAWS * repeats


def main(out: Path) -> None:
    members, by = read_members(out, fewest=2), rule()
    print(f"{len(members)} pairs, {by}, first look {FIRST_LOOK}, at least {ENOUGH}")
    for half, name in enumerate(("chose the spending", "other half")):
        for spending, schedule in SPENDING.items():
            for steps in (10, 5):
                row = count(members[half::2], by, schedule, steps).row()
                print(f"| {name} | {spending} | {steps} | {' | '.join(row)} |")
    columns = [
        (numbers(t, 10), numbers(t, 5)) for m in members for own in m["tests"].values() for t in own.values()
    ]
    off = [np.nanmean(b - a) for fine, coarse in columns for a, b in zip(fine, coarse, strict=True)]
    error = [np.nanstd(a) / IMAGES**0.5 for fine, _ in columns for a in fine]
    print(f"5 steps move a mean by {np.nanmedian(np.abs(off)):.4f} (median); its standard error over "
          f"{IMAGES} images is {np.nanmedian(error):.4f}")  # fmt: skip


if __name__ == "__main__":
    main(Path(sys.argv[1]))
