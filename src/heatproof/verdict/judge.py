"""The verdict on a run: both questions at one checkpoint, the alarms over training, what was not asked."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict

import numpy as np

from heatproof.disk import write_whole
from heatproof.metrics.stats import mean_interval
from heatproof.verdict.answers import Answer, MethodAnswer, Test, Verdict
from heatproof.verdict.data import RunData
from heatproof.verdict.follow import ENOUGH, KINDS, answers, calibration, rule
from heatproof.verdict.look import looks
from heatproof.verdict.measures import Measure
from heatproof.verdict.rules import MIN_USABLE

FILE = "verdict.json"
CONTRAST = "`heatproof contrast` would decide it"
BLANK = 0.05


def judge(data: RunData) -> Verdict:
    """The verdict on a run at the checkpoint shown."""
    notes = tuple(_in_the_way(data))
    tests = {kind: _column(data, kind) for kind in KINDS}
    nothing = np.full(len(data.images.ids), math.nan)
    values = {
        m: tuple(data.images.scores.get((tests[kind] or "", m), nothing) for kind in KINDS) for m in data.real
    }
    found = answers({m: (both[0], both[1]) for m, both in values.items()}, rule())
    if notes:  # nothing is said in favour of maps of a network that does not answer, or of half a run
        found = {m: "undecided" if answer == "yes" else answer for m, answer in found.items()}
    methods = tuple(_method(data, m, found[m], values[m], tests, bool(notes)) for m in data.real)
    network = looks(data, [m.method for m in methods if m.follows == "yes"])
    alarms = tuple(asdict(alarm) | {"name": alarm.name} for alarm in data.alarms)
    known = calibration()
    rates = {"rates": known["rates"], "population": known["population"], "made_by": known["made_by"]}
    return Verdict(data.checkpoint, methods, network, alarms, notes, rates)


def write_verdict(data: RunData) -> Verdict:
    """The verdict, also as verdict.json in the run's folder."""
    verdict = judge(data)
    content = json.dumps(verdict.as_json(), indent=1, ensure_ascii=False, allow_nan=False)
    write_whole({data.folder.path / FILE: content + "\n"})
    return verdict


def _column(data: RunData, kind: str) -> str | None:
    """The rows' name of the test that votes, with its options."""
    return next((of.name for of in data.measures if of.base == f"specificity_{kind}"), None)


def _method(
    data: RunData, method: str, follows: Answer, values: tuple[np.ndarray, ...],
    names: dict[str, str | None], in_the_way: bool,
) -> MethodAnswer:  # fmt: skip
    shown = []
    best = rule()
    for kind, column in zip(KINDS, values, strict=True):
        if (name := names[kind]) is not None:
            shown.append(_test(data, name, column, follows, best.no, True))
    for of in data.measures:
        cell = data.cells.get((of.name, method))
        if of.facts.judges == "map" and of.base not in {f"specificity_{kind}" for kind in KINDS} and cell:
            shown.append(
                Test(
                    of.name,
                    of.plain,
                    "undecided",
                    cell.value,
                    cell.low,
                    cell.high,
                    cell.n or 0,
                    math.nan,
                    False,
                )
            )
    blank = data.cells.get(("degenerate", method))
    share = blank.value if blank else math.nan
    return MethodAnswer(
        method, follows, tuple(shown), share, _note(follows, values, share, names, in_the_way)
    )


def _test(
    data: RunData, name: str, column: np.ndarray, answer: Answer, threshold: float, votes: bool
) -> Test:
    of: Measure = next(m for m in data.measures if m.name == name)
    defined = column[np.isfinite(column)]
    low, high = mean_interval(defined)
    mean = float(defined.mean()) if len(defined) else math.nan
    rates = calibration()["tests"].get(of.base, {})
    return Test(name, of.plain, answer, mean, low, high, len(defined), threshold, votes, rates)


def _note(
    follows: Answer,
    values: tuple[np.ndarray, ...],
    blank: float,
    names: dict[str, str | None],
    in_the_way: bool,
) -> str:
    """What would decide it, and how many maps are blank."""
    n = min(int(np.isfinite(column).sum()) for column in values)
    told = []
    if follows == "undecided" and not in_the_way:
        if None in names.values():
            told.append("add specificity to the metrics of the run")
        elif n < ENOUGH:
            told.append(f"{n} pictures on which the test can tell, {ENOUGH} are needed")
        else:
            told.append(f"too close to its shadows on {n} pictures: more pictures, or {CONTRAST}")
    if blank >= BLANK:
        told.append(f"{blank:.0%} of its maps are blank")
    return "; ".join(told)


def _in_the_way(data: RunData) -> Iterator[str]:
    """What stands in the way of saying anything good."""
    status = data.folder.status()
    if status.state not in ("complete", "unknown") or status.usable < MIN_USABLE:
        yield f"the run is not whole: {status.sentence}"
    silent = sum(map(math.isnan, data.images.confidence))
    if silent or not data.images.ids:
        yield f"the network's answers to {silent} of {len(data.images.ids)} pictures are not numbers"
    known = [
        (r, label) for r, label in zip(data.images.right, data.images.labels, strict=True) if r is not None
    ]
    labels = [label for _, label in known]
    if len(known) >= ENOUGH and len(set(labels)) > 1:  # of one class alone, chance is to be right always
        largest = max(labels.count(label) for label in set(labels)) / len(labels)
        right = [float(r) for r, _ in known]
        low, high = mean_interval(right)
        if not low > largest:
            yield (
                f"the network is not surely better than chance: right about {np.mean(right):.1%} (95 % "
                f"interval {low:.1%} to {high:.1%}, n = {len(right)}); the largest class has {largest:.1%}"
            )
