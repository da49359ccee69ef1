"""Error rates and cost of the sequential test of an audit, from measured members.

    python -m research.calibration.sequential docs/results/calibration/members.json.gz

writes sequential.csv and sizes.csv beside the file that `python -m research.calibration` writes, and the
rates by the number of methods that are judged together into the package's rates.json. The rule (informative,
yes, no), the looks, ten steps and two random networks were chosen before, on other networks; the tables also
have other cases, for comparison.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import norm

from heatproof.disk import write_whole
from heatproof.metrics.specific import DRAWS, STEPS
from heatproof.registry import parse_call
from heatproof.studies.audit.planner import DRAWS as AUDIT_DRAWS
from heatproof.studies.audit.planner import PATIENCE
from heatproof.studies.common import write_rows
from heatproof.verdict.follow import (
    FIRST_LOOK,
    KINDS,
    LEVEL,
    RATES,
    FollowRule,
    Values,
    answers,
    calibration,
    growth_needed,
    limits,
    looks,
    rule,
)
from research.calibration.collect import CONTROLS, IMAGES
from research.calibration.population import SIDES
from research.calibration.thresholds import Member, Share, is_gradient, read_members

Looks = Sequence[tuple[int, float]]
SIZES = range(1, 10)  # numbers of methods judged together; the last one: all
ERRORS = ("false_alarm", "miss", "undecided")
AUDIT = "as in an audit"
AUDIT_LOOKS: Looks = [*looks((FIRST_LOOK, 2 * FIRST_LOOK, IMAGES)).items()]
HEADER = ("pairs", "looks", "steps", "random networks", "false alarm", "of input gradients", "miss",
          "undecided", "images", "inputs")  # fmt: skip


def spent_by(share: Callable[[float], float]) -> Looks:
    """Looks of an audit of 100 images that spends LEVEL * share(t) of the error at the share t of them."""
    numbers = [n for n, _ in AUDIT_LOOKS]
    spent = [LEVEL * share(n / IMAGES) for n in numbers]
    return [(n, now - before) for n, now, before in zip(numbers, spent, [0.0, *spent], strict=False)]


SPENDING: dict[str, Looks] = {
    "one look": [(IMAGES, LEVEL)],
    AUDIT: AUDIT_LOOKS,
    "O'Brien-Fleming": spent_by(lambda t: 2 * norm.sf(norm.isf(LEVEL / 2) / t**0.5) / LEVEL),
    "Pocock": spent_by(lambda t: float(np.log1p((np.e - 1) * t))),
}


@dataclass
class Counts:
    """Answers and costs over networks."""

    alarms: int = 0
    following: int = 0
    gradient_alarms: int = 0
    gradients: int = 0  # that follow
    misses: int = 0
    controls: int = 0
    undecided: int = 0
    methods: int = 0
    images: int = 0  # on which methods were tested
    inputs: int = 0  # of these tests

    @property
    def rates(self) -> dict[str, Share]:
        return {
            "false_alarm": Share.of(self.alarms, self.following),
            "miss": Share.of(self.misses, self.controls),
            "undecided": Share.of(self.undecided, self.methods),
        }

    def row(self) -> list[str]:
        alarms, *others = self.rates.values()
        shares = [alarms, Share.of(self.gradient_alarms, self.gradients), *others]
        each = self.methods * IMAGES
        return [*(share.text for share in shares), f"{self.images / self.methods:.0f}",
                f"{self.inputs / each:.0f}"]  # fmt: skip


def count(
    members: Sequence[Member], by: FollowRule, schedule: Looks, steps: int = STEPS, draws: int = DRAWS,
    size: int | None = None,
) -> Counts:  # fmt: skip
    """Judge each method and each control of a network together with other methods.

    size: number of maps that are judged together, the others drawn at random; default: all methods.
    """
    counts, rng = Counts(), np.random.default_rng(0)
    for member in members:
        for tests in member["tests"].values():
            every = {m: numbers(own, steps, draws) for m, own in tests.items()}
            for method in every:
                others = [m for m in every if m not in CONTROLS and m != method]
                beside = others if size is None else rng.choice(others, size - 1, replace=False).tolist()
                together = {m: every[m] for m in (method, *beside)}
                _, answer, tested = next(judged(together, by, schedule))
                if method in CONTROLS:
                    counts.controls += 1
                    counts.misses += answer == "yes"
                    continue
                counts.methods += 1
                counts.undecided += answer == "undecided"
                counts.images += tested
                counts.inputs += tested * inputs(method, steps, draws)
                if member["contrast"][method]["low"] > 0.5:
                    counts.following += 1
                    counts.alarms += answer == "no"
                    counts.gradients += is_gradient(method)
                    counts.gradient_alarms += is_gradient(method) and answer == "no"
    return counts


def judged(values: Values, by: FollowRule, schedule: Looks) -> Iterator[tuple[str, str, int]]:
    """Each method, its answer, and the number of images on which it was tested, as in an audit of IMAGES."""
    result: dict[str, tuple[str, int]] = dict.fromkeys(values, ("undecided", 0))
    tested = {*values}
    for n, level in schedule:
        result |= {m: (result[m][0], n) for m in tested}
        upto: Any = {m: tuple(column[: result[m][1]] for column in both) for m, both in values.items()}
        now = answers(upto, by, levels=dict.fromkeys(tested, level))
        result |= {m: (now[m], n) for m in tested}
        tested = {m for m in tested if now[m] == "undecided"}
        waiting = sum(answer == "undecided" for answer, _ in result.values())
        thresholds, next_level = limits(upto, by), looks((n, 2 * n))[2 * n] / max(1, waiting)
        needed = {m: n * growth_needed(upto[m], thresholds, next_level) for m in tested}
        tested = {m for m in tested if needed[m] <= PATIENCE * IMAGES}
    return ((m, *own) for m, own in result.items())


def numbers(
    tests: Mapping[str, Sequence[float | None]], steps: int, draws: int
) -> tuple[np.ndarray, np.ndarray]:
    """Both numbers of every image, of so many steps, or against so many networks with random weights."""
    suffix = "" if steps == STEPS else f"_at_{steps}"
    weights, place = (np.array(tests[f"specificity_{kind}{suffix}"], float) for kind in KINDS)
    if draws < DRAWS and np.nan_to_num(weights).any():
        random = [np.array(tests[f"gain_untrained_{i}"], float) for i in range(draws)]
        own = np.array(tests["gain"], float) - np.mean(random, 0)
        weights = np.where(np.isnan(weights), np.nan, own)
    return weights, place


def inputs(method: str, steps: int, draws: int) -> int:
    """Inputs of the test of one map: its curves, those of its controls, and the method's control maps."""
    repeats = next((n for n in parse_call(method)[1].values() if isinstance(n, int)), 1)
    return 2 * (draws + 2) * (steps - 1) + draws * repeats


def rates_by_size(members: Sequence[Member]) -> dict[str, dict[str, Any]]:
    """Rates with one look and in the form of an audit by the number of methods, for rates.json."""
    networks = sum(len(member["tests"]) for member in members)
    cases = {
        "tested once": (SPENDING["one look"], DRAWS),
        "tested sequentially": (SPENDING[AUDIT], AUDIT_DRAWS),
    }
    result: dict[str, dict[str, Any]] = {}
    for name, (schedule, draws) in cases.items():
        for size in SIZES:
            others = size if size < SIZES[-1] else None
            rates = count(members, rule(), schedule, STEPS, draws, others).rates
            shares = {kind: asdict(share) for kind, share in rates.items()}
            result.setdefault(name, {})[str(size)] = shares | {"networks": networks, "images": IMAGES}
    return result


def main(path: Path) -> None:
    members, by = read_members(path, fewest=2), rule()
    small = [m for m in members if m["member"]["network"] in SIDES]
    groups = {"all": members, "larger networks": [m for m in members if m not in small], "small ones": small}
    cases = [("one look", STEPS, DRAWS), (AUDIT, STEPS, DRAWS), (AUDIT, STEPS, AUDIT_DRAWS)]
    others = [(AUDIT, STEPS, 1), (AUDIT, STEPS // 2, DRAWS)]
    others += [(name, STEPS, DRAWS) for name in SPENDING if (name, STEPS, DRAWS) not in cases]
    rows = []
    for name, group in groups.items():
        for looked, steps, draws in cases + others * (group is members):
            counts = count(group, by, SPENDING[looked], steps, draws)
            rows.append([f"{name} ({len(group)})", looked, str(steps), str(draws), *counts.row()])
            print(" | ".join(rows[-1]))
    write_rows(path.parent / "sequential.csv", HEADER, rows)
    by_size = rates_by_size(members)
    sizes = [
        [size, name, *(Share(**rates[kind]).text for kind in ERRORS)]
        for name, own in by_size.items()
        for size, rates in own.items()
    ]
    write_rows(path.parent / "sizes.csv", ("methods", "looks", *ERRORS), sizes)
    content = {**calibration(), "rates_by_size": by_size}
    write_whole({RATES: json.dumps(content, indent=1) + "\n"})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
