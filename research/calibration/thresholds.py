"""From measured members to a rule with known error rates.

Pairs of networks are put in two halves, every other one by name. On the first the rule is chosen: of those
with at most 5 % false alarms, and at most 10 % misses of every kind of control, the one that leaves fewest
methods undecided (where none is that good, the one with fewest false alarms). Part of the rule is what of its
untrained maps a map is held against: their largest or their mean. What is published was counted on the second
half:

    false alarm   of methods that follow by the contrast test (its interval lies above 1/2), said not to
    miss          of controls, which are known not to follow, said to
    undecided     of all methods

with Clopper-Pearson intervals (clopper1934binomial). A network's methods are judged together, as in a run;
each control joins them alone.

Where the rule was chosen before, by the pairs of an earlier calibration, pairs measured since choose nothing:
they are judged by the rule of the package and added to the earlier rows. What is published is then counted on
them and on the earlier other half, and each of the two is kept apart.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import beta

from heatproof.errors import InputError
from heatproof.metrics.results import wins
from heatproof.verdict.follow import ALONE, KINDS, FollowRule, answers, calibration
from heatproof.verdict.follow import rule as follow_rule
from research.calibration.collect import CONTROLS, METHODS
from research.calibration.population import GENERATED, SIDES

INFORMATIVE, YES, NO = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3), (0.0, 0.1, 0.2), (0.0, 0.05, 0.1)
SUMMARIES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "largest": lambda controls: controls.max(0),
    "median": lambda controls: np.median(controls, 0),
    "mean": lambda controls: controls.mean(0),
}
CHOSEN_FROM = ("largest", "mean")
NUMBERS = ("strength", "contrast_auc", "contrast_low", "contrast_high", "weights", "place")
NETWORK = ("data", "network", "token", "strength", "seed", "network_of_pair")
MOST_FALSE_ALARMS, MOST_MISSES = 0.05, 0.10
Member = Mapping[str, Any]  # as collect.Collected.as_json writes it
JudgedRow = Mapping[str, Any]  # as judged_rows yields it
GRADIENTS = ("gradient", "smoothgrad", "integrated-gradients")  # methods at the resolution of the input


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
    worst_miss: float  # of the kind of control that is missed most


CHOSE, OTHER, SINCE = "chose the rule", "other half", "measured since"  # what a pair was for


@dataclass(frozen=True)
class Calibration:
    """A rule, and the judged methods of pairs of networks by what the pairs were for."""

    rule: FollowRule
    judged: Mapping[str, Sequence[JudgedRow]]
    measured: Sequence[Member]  # compared with this summary
    summary: str = ""  # the summary of a map's untrained maps that was chosen; "" where none could be
    candidates: Mapping[str, tuple[FollowRule, Rates]] = field(default_factory=dict)  # by summary

    def rates(self, *groups: str) -> Rates:
        return rates_of([row for name in groups for row in self.judged[name]])

    @property
    def clean(self) -> list[str]:
        """The groups that chose nothing, on which the published rates are counted."""
        return [name for name in self.judged if name != CHOSE]

    def rows(self) -> Iterator[dict[str, Any]]:
        for name, rows in self.judged.items():
            for row in rows:
                yield {"group": name, **row}

    def as_json(self, before: Mapping[str, Any]) -> dict[str, Any]:
        """The content of rates.json. before: the one in the package, which chose the rule of later pairs."""
        rows, clean = list(self.rows()), [row for row in self.rows() if row["group"] in self.clean]
        kinds = {key: sorted({row[key] for row in rows}) for key in ("data", "network", "token")}
        pairs = {tuple(row[key] for key in NETWORK[:-1]) for row in rows}
        named = list(dict.fromkeys(row["method"] for row in rows if not row["control"]))
        if SINCE in self.judged:
            made = {key: before[key] for key in ("candidates", "rates_by_other_summaries", "tests")}
        else:
            others = by_other_summaries(self.measured, self.rule)
            made = {
                "candidates": {
                    name: {"rule": asdict(rule), "rates": asdict(candidate)}
                    for name, (rule, candidate) in self.candidates.items()
                },
                "rates_by_other_summaries": {name: asdict(outcome) for name, outcome in others.items()},
                "tests": {
                    test: {"auc": round(auc, 4)} for test, (auc, *_) in separation(self.measured).items()
                },
            }
        command = made_by(kinds["data"], kinds["network"], named, list(made["tests"]), SINCE in self.judged)
        by_kind = {False: "class activation maps", True: "input gradients"}
        alarms = {
            name: asdict(rates_of([row for row in clean if is_gradient(row["method"]) == kind]).false_alarm)
            for kind, name in by_kind.items()
        }
        return {
            "schema": 1, "made_by": command, "rule": asdict(self.rule), "summary": self.summary,
            "rates": asdict(self.rates(*self.clean)) | {"false_alarm_by_kind": alarms},
            "rates_alone": rates_alone(clean, self.rule),
            "rates_by_group": {name: asdict(self.rates(name)) for name in self.judged},
            "population": {"pairs": len(pairs), **kinds}, **made, "network": before.get("network", {}),
            "rates_by_size": before.get("rates_by_size", {}),
        }  # fmt: skip


def is_gradient(method: str) -> bool:
    """Whether a method's maps are gradients of the input, rather than activations of a layer."""
    return method.partition("(")[0] in GRADIENTS


def made_by(
    data: Sequence[str], networks: Sequence[str], methods: Sequence[str], tests: Sequence[str], since: bool
) -> str:
    """The command that measures such pairs, read from what was measured: they may come from many machines."""
    options = {
        "--quick": {*networks} <= {*SIDES},
        "--data DATA": not {*data} <= {*GENERATED},
        f"--methods {','.join(methods)}": {*methods} != {*METHODS},
        "--only-voting": {*tests} <= {f"specificity_{kind}" for kind in KINDS},
        "--earlier JUDGED": since,
    }
    return " ".join(
        ["python -m research.calibration", *(option for option, given in options.items() if given)]
    )


def read_members(path: Path, fewest: int = 4) -> list[Member]:
    """Every member that was measured and whose planting held, by name; from a folder or a joined file."""
    if path.is_dir():
        members = [json.loads(file.read_text("utf-8")) for file in sorted((path / "members").glob("*.json"))]
    else:
        members = json.loads(gzip.decompress(path.read_bytes()))
    held = [member for member in members if member["holds"]]
    if len(held) < fewest:
        raise InputError(
            f"{path} holds {len(held)} pairs whose planting held; at least {fewest} are needed to judge"
        )
    return held


def joined(members: Sequence[Member]) -> bytes:
    """Members in one file, with the numbers of the voting test alone, in three digits."""

    def short(tests: Mapping[str, Sequence[float | None]]) -> dict[str, list[float | None]]:
        own = {k: v for k, v in tests.items() if k == "gain" or k.startswith(("specificity", "gain_untr"))}
        return {k: [None if n is None else round(n, 3) for n in numbers] for k, numbers in own.items()}

    content = [
        {key: m[key] for key in ("member", "holds", "flips", "contrast")}
        | {"tests": {net: {k: short(own) for k, own in tests.items()} for net, tests in m["tests"].items()}}
        for m in members
    ]
    return gzip.compress(json.dumps(content, separators=(",", ":")).encode(), mtime=0)


def read_judged(path: Path) -> dict[str, list[JudgedRow]]:
    """Rows of judged.csv by group."""
    groups: dict[str, list[JudgedRow]] = {}
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            group, numbers = row.pop("group"), {key: float(row[key] or "nan") for key in NUMBERS}
            whole = {"control": row["control"] == "True", "seed": int(row["seed"]), "n": int(row["n"])}
            groups.setdefault(group, []).append({**row, **numbers, **whole})
    return groups


def calibrate(
    measured: Sequence[Member], earlier: Mapping[str, Sequence[JudgedRow]] | None = None
) -> Calibration:
    """The rule chosen on one half of the pairs; with earlier rows, that of the package."""
    if earlier is None:
        candidates = choose(measured[::2])
        summary = min(candidates, key=lambda name: _worse(candidates[name][1]))
        by, groups = candidates[summary][0], {CHOSE: measured[::2], OTHER: measured[1::2]}
    else:
        candidates, summary, by, groups = {}, calibration()["summary"], follow_rule(), {SINCE: measured}
    if summary and len(_with_raw_numbers(measured)) == len(measured):
        groups = {
            group: [_held_against(m, SUMMARIES[summary]) for m in members]
            for group, members in groups.items()
        }
    judged = {name: [row for m in members for row in judged_rows(m, by)] for name, members in groups.items()}
    held = [member for members in groups.values() for member in members]
    return Calibration(by, {**(earlier or {}), **judged}, held, summary, candidates)


def choose(chosen_on: Sequence[Member]) -> dict[str, tuple[FollowRule, Rates]]:
    """By summary, where members kept the numbers to tell them apart: the rule on the grid that does best."""
    against: dict[str, Sequence[Member]] = {"": chosen_on}
    if len(_with_raw_numbers(chosen_on)) == len(chosen_on):
        against = {name: [_held_against(m, SUMMARIES[name]) for m in chosen_on] for name in CHOSEN_FROM}
    rules = [FollowRule(*numbers) for numbers in product(INFORMATIVE, YES, NO)]
    every = {name: [(rule, rates(members, rule)) for rule in rules] for name, members in against.items()}
    return {name: min(tried, key=lambda pair: _worse(pair[1])) for name, tried in every.items()}


def _worse(outcome: Rates) -> tuple[bool, float, float]:
    """An order: of those that err seldom enough the one that says most, else the one with fewest alarms."""
    alarms, silence = outcome.false_alarm.share, outcome.undecided.share
    good = alarms <= MOST_FALSE_ALARMS and outcome.worst_miss <= MOST_MISSES
    return (False, silence, alarms) if good else (True, alarms, silence)


def _with_raw_numbers(measured: Sequence[Member]) -> list[Member]:
    return [m for m in measured if all("gain" in t for tests in m["tests"].values() for t in tests.values())]


def rates(measured: Sequence[Member], rule: FollowRule) -> Rates:
    return rates_of([row for member in measured for row in judged_rows(member, rule)])


def rates_of(judged: Sequence[JudgedRow]) -> Rates:
    methods = [row for row in judged if not row["control"]]
    controls = [row for row in judged if row["control"]]
    following = [row for row in methods if row["contrast_low"] > 0.5]
    kinds = [[row["answer"] == "yes" for row in controls if row["method"] == kind] for kind in CONTROLS]
    return Rates(
        Share.of(sum(row["answer"] == "no" for row in following), len(following)),
        Share.of(sum(row["answer"] == "yes" for row in controls), len(controls)),
        Share.of(sum(row["answer"] == "undecided" for row in methods), len(methods)),
        len({tuple(row[key] for key in NETWORK) for row in judged}),
        max((sum(kind) / len(kind) for kind in kinds if kind), default=float("nan")),
    )


def rates_alone(judged: Iterable[Mapping[str, Any]], rule: FollowRule) -> dict[str, Any]:
    """Rates for stored maps alone in a run, from means: upper bounds of misses, lower bounds of undecided.

    Only maps that random weights do not change are said not to follow, so there are no false alarms.
    """
    rows = [(row, min(row["weights"], row["place"]) > rule.yes * ALONE) for row in judged]
    controls = [passes for row, passes in rows if row["control"]]
    methods = [passes for row, passes in rows if not row["control"]]
    following = [row for row, _ in rows if not row["control"] and row["contrast_low"] > 0.5]
    networks = {tuple(row[key] for key in NETWORK) for row, _ in rows}
    return {
        "false_alarm": asdict(Share.of(0, len(following))),
        "miss": asdict(Share.of(sum(controls), len(controls))),
        "undecided": asdict(Share.of(len(methods) - sum(methods), len(methods))),
        "networks": len(networks),
    }


def judged_rows(member: Member, rule: FollowRule) -> Iterator[dict[str, Any]]:
    """One row for each network and method or control: what truth says, both numbers, the answer."""
    for network, tests in member["tests"].items():
        values = {m: _numbers(numbers) for m, numbers in tests.items()}
        methods = {m: both for m, both in values.items() if m not in CONTROLS}
        given = answers(methods, rule)
        for method, (weights, place) in values.items():
            control = method in CONTROLS
            truth = member["contrast"][method]
            yield {
                **member["member"], "network_of_pair": network, "method": method, "control": control,
                "contrast_auc": truth["auc"], "contrast_low": truth["low"], "contrast_high": truth["high"],
                "weights": _mean(weights), "place": _mean(place), "n": int(np.isfinite(weights).sum()),
                "answer": (answers(methods | {method: (weights, place)}, rule) if control else given)[method],
            }  # fmt: skip


def by_other_summaries(measured: Sequence[Member], rule: FollowRule) -> dict[str, Rates]:
    """What this rule's rates were with a map held against each summary of its untrained maps.

    Of members that kept the raw numbers; none for those that did not.
    """
    raw = _with_raw_numbers(measured)
    every = {name: [_held_against(m, of) for m in raw] for name, of in SUMMARIES.items() if raw}
    return {name: rates(members, rule) for name, members in every.items()}


def _held_against(member: Member, summary: Callable[[np.ndarray], np.ndarray]) -> Member:
    def again(values: Mapping[str, Any]) -> dict[str, Any]:
        now = np.array(values["specificity_weights"], float)
        controls = np.array([values[key] for key in values if key.startswith("gain_untrained_")], float)
        other = np.array(values["gain"], float) - summary(controls)
        unmoved = not np.nan_to_num(now).any()  # equal to its control maps
        return {**values, "specificity_weights": now if unmoved else np.where(np.isnan(now), np.nan, other)}

    tests = {network: {m: again(f) for m, f in of.items()} for network, of in member["tests"].items()}
    return {**member, "tests": tests}


def separation(measured: Sequence[Member]) -> dict[str, tuple[float, int, int]]:
    """By test: how often its mean is larger for a method that follows than for a control, and of how many."""
    by_test: dict[str, tuple[list[float], list[float]]] = {}
    for member in measured:
        for tests in member["tests"].values():
            for method, numbers in tests.items():
                control = method in CONTROLS
                if control or member["contrast"][method]["low"] > 0.5:
                    for test, values in numbers.items():
                        by_test.setdefault(test, ([], []))[control].append(_mean(np.array(values, float)))
    usable = {
        t: tuple([v for v in group if not np.isnan(v)] for group in groups) for t, groups in by_test.items()
    }
    return {t: (float(wins(a, b).mean()), len(a), len(b)) for t, (a, b) in usable.items() if a and b}


def _numbers(tests: Mapping[str, Sequence[float | None]]) -> tuple[np.ndarray, np.ndarray]:
    weights, place = (np.array(tests[f"specificity_{kind}"], float) for kind in KINDS)
    return weights, place


def _mean(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else float("nan")
