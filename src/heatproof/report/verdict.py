"""A verdict in plain words, by rules that can be read here and on the page.

Each rule looks at one kind of evidence at the checkpoint shown and gives facts: failures, warnings, or what
went well. A method is judged only where at least 30 images stand behind a number (below that an interval from
resampling is too narrow); otherwise the rule says that there is not enough data.

    alarms          an alarm at this checkpoint is a failure; at an earlier one, a warning (verdict/alarms.py)
    floors          a method must beat `random` and `edges` on the same images (and `centre` where objects are
                    found): a failure where the mean difference is not above zero, a warning where it is but
                    its 95 % interval reaches zero; what would be shown as 0.000 is zero
    blank maps      a failure where at least half of a method's maps are constant, a warning from 5 %
    randomisation   a failure where maps stay alike once the weights are random: the interval of SSIM or of
                    the rank correlation lies above 1/2 (adebayo2018sanity)
    disagreement    a warning where the methods' mean rank correlation is below 0.2, or one method's with all
                    others is (krishna2022disagreement)
    classifier      a warning where AUC is below 0.75, the alarms' own bound: there is little to explain; a
                    warning where some of the network's answers are not numbers

Floors are judged on one number per family (structure score, overlap with the object, insertion, deletion).
Intervals are not corrected for the number of comparisons.

    do not rely on these maps    every method has a failure
    not enough data              otherwise, where something is missing that a judgement needs:
                                 - the run is complete, and 95 % of its images could be used
                                 - every answer of the network is a number
                                 - it is better than chance: the 95 % interval of its accuracy lies above the
                                   share of the largest class, which a network that never looks reaches
                                 - every method is held against its floors, on 30 images or more
                                 - every method has a test of faithfulness on as many: insertion or deletion
                                   against the floors, or randomisation
    rely with care               some method has a failure, or there is a warning
    no failure found             neither; never "these maps are right"

The three facts shown are failures before warnings before what went well; within these the rules' order above,
then those about more methods, then those of larger effect; one fact per rule first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from heatproof.report.evidence import ENOUGH, floor_tests, missing_evidence, names, randomisations
from heatproof.show import text
from heatproof.verdict.alarms import Thresholds
from heatproof.verdict.data import SMALLEST, RunData
from heatproof.verdict.measures import Measure, measure

BLANK, MOSTLY_BLANK = 0.05, 0.5
UNCHANGED = 0.5
DISAGREE = 0.2
CHANCE = Thresholds().high_auc
FAILURE, WARNING, GOOD, THIN = "failure", "warning", "good", "not enough data"
RANK = {FAILURE: 0, WARNING: 1, GOOD: 2, THIN: 3}
RULES = ("alarms", "floors", "blank maps", "randomisation", "disagreement", "classifier")
LEVELS = {
    "stop": "Do not rely on these maps",
    "care": "Rely with care",
    "clear": "No failure found",
    "thin": "Not enough data to judge",
}


@dataclass(frozen=True)
class Fact:
    """One finding: a sentence, the section that shows it, and the methods it speaks against."""

    kind: str
    rule: str
    sentence: str
    section: str  # the anchor of its section on the page
    methods: tuple[str, ...] = ()
    effect: float = 0.0  # how far beyond the threshold, to order facts of one kind


@dataclass(frozen=True)
class Verdict:
    level: str  # a key of LEVELS
    sentence: str
    facts: list[Fact]  # the strongest, at most three
    every: list[Fact] = field(default_factory=list)
    untested: list[str] = field(default_factory=list)  # rules without data, and why
    missing: list[str] = field(default_factory=list)  # what a judgement needs and this run does not have

    @property
    def title(self) -> str:
        return LEVELS[self.level]

    def __str__(self) -> str:
        return f"{self.title}. {self.sentence}" + "".join(f"\n  {f.kind}: {f.sentence}" for f in self.facts)

    def _repr_html_(self) -> str:
        facts = "".join(f"<li><b>{text(fact.kind)}</b> {text(fact.sentence)}</li>" for fact in self.facts)
        return f"<h3>{text(self.title)}</h3><p>{text(self.sentence)}</p><ol>{facts}</ol>"


def judge(data: RunData) -> Verdict:
    """The verdict on a run at the checkpoint shown."""
    every = [
        fact
        for rule in (_alarms, _floors, _blank, _randomised, _disagree, _classifier)
        for fact in rule(data)
    ]
    judged = [fact for fact in every if fact.kind != THIN]
    failed = [m for m in data.real if any(m in f.methods for f in judged if f.kind == FAILURE)]
    missing = list(missing_evidence(data))
    if data.real and len(failed) == len(data.real):
        level = "stop"
    elif missing:
        level = "thin"
    else:
        level = "care" if any(f.kind in (FAILURE, WARNING) for f in judged) else "clear"
    untested = [f.sentence for f in every if f.kind == THIN]
    sentence = _sentence(level, data, failed, judged, missing)
    return Verdict(level, sentence, _strongest(judged), every, untested, missing)


def _sentence(level: str, data: RunData, failed: list[str], judged: list[Fact], missing: list[str]) -> str:
    tests = len({fact.rule for fact in judged})
    count = f"{len(data.real)} method{'s' * (len(data.real) != 1)}"
    failures = f"{len(failed)} of {count} failed a test: {names(failed)}." if failed else ""
    if level == "thin":
        return f"{failures} Missing: {'; '.join(missing)}.".strip()
    if level == "stop":
        who = f"{failed[0]} failed a test" if len(failed) == 1 else f"None of {count} passed every test"
        return f"{who} at {data.checkpoint}."
    if level == "clear":
        return (
            f"None of {tests} kind{'s' * (tests != 1)} of test found a failure in {count}. That is no proof "
            "that the maps are right: it says only that these tests did not catch them."
        )
    if failed:
        return f"{failures} No failure was found in {names([m for m in data.real if m not in failed])}."
    return f"No test found a failure in {count}, but there is a warning."


def _strongest(facts: list[Fact], most: int = 3) -> list[Fact]:
    order = sorted(facts, key=lambda f: (RANK[f.kind], RULES.index(f.rule), -len(f.methods), -f.effect))
    seen: set[tuple[str, str]] = set()
    first = [f for f in order if (f.kind, f.rule) not in seen and not seen.add((f.kind, f.rule))]  # type: ignore[func-returns-value]
    chosen = sorted([*first, *(f for f in order if f not in first)], key=lambda f: RANK[f.kind])
    return chosen[:most]


def _alarms(data: RunData) -> Iterator[Fact]:
    if not any(measure(name).base == "cscore" for name, _ in data.paths):
        yield Fact(THIN, "alarms", "Alarms need cscore among the metrics.", "trajectories")
        return
    now = [alarm for alarm in data.alarms if alarm.checkpoint == data.checkpoint]
    for alarm in now:
        whom = (alarm.method,) if alarm.method else tuple(data.real)
        yield Fact(
            FAILURE, "alarms", f"{alarm.name.capitalize()}. {alarm.sentence}", "trajectories", whom,
            float(alarm.severity == "critical"),
        )  # fmt: skip
    for alarm in data.alarms:
        if alarm not in now:
            yield Fact(
                WARNING, "alarms", f"Earlier, {alarm.name}. {alarm.sentence}", "trajectories",
                (alarm.method,) if alarm.method else tuple(data.real), float(alarm.severity == "critical"),
            )  # fmt: skip
    known = any(
        not math.isnan(v)
        for (name, _), path in data.paths.items()
        if measure(name).base == "cscore"
        for v in path
    )
    if not known:
        yield Fact(
            THIN, "alarms", "Alarms need a C-Score that is defined at some checkpoint.", "trajectories"
        )
    elif not data.alarms:
        checkpoints = f"{len(data.checkpoints)} checkpoint{'s' * (len(data.checkpoints) != 1)}"
        yield Fact(GOOD, "alarms", f"No alarm was raised at {checkpoints}.", "trajectories")


def _floors(data: RunData) -> Iterator[Fact]:
    tested = False
    for of in floor_tests(data):
        cells = {m: data.cells[of.name, m] for m in data.real if (of.name, m) in data.cells}
        cells = {m: c for m, c in cells.items() if c.margins}
        enough = {m: c for m, c in cells.items() if c.judged >= ENOUGH}
        if cells and not enough:
            n = max(c.judged for c in cells.values())
            yield _too_few("floors", f"{of.short} against its floors", n, "scores")
        failed = [m for m, c in enough.items() if c.no_better]
        unsure = [m for m, c in enough.items() if c.failed and m not in failed]
        passed = [m for m in enough if m not in (*failed, *unsure)]
        tested = tested or bool(enough)
        if failed:
            yield _floor_fact(data, of, failed, FAILURE)
        if unsure:
            yield _floor_fact(data, of, unsure, WARNING)
        if passed:
            yield _floor_success(data, of, passed)
    if not tested and not data.floors:
        yield Fact(THIN, "floors", "Floors need the methods random and edges in the study.", "scores")


def _floor_fact(data: RunData, of: Measure, methods: list[str], kind: str) -> Fact:
    """Names the difference that is farthest from what it should be."""
    pairs = [(m, floor) for m in methods for floor in data.cells[of.name, m].failed]
    method, floor = min(pairs, key=lambda pair: data.cells[of.name, pair[0]].margins[pair[1]].mean)
    margin = data.cells[of.name, method].margins[floor]
    low, high = margin.interval
    between = f"95 % interval {_signed(low)} to {_signed(high)}"
    numbers = f"(difference {_signed(margin.mean)}, {between}, n = {margin.n})"
    if kind == WARNING:
        how, all_of = "is not surely better than", f"{names(methods)} do not surely beat the floors"
    else:
        how = "is worse than" if high <= -SMALLEST else "is no better than"
        everyone = len(methods) == len(data.real)
        all_of = "No method beats its floors" if everyone else f"{names(methods)} do not beat the floors"
    if len(methods) == 1:
        sentence = f"{method} {how} {floor} on {of.short}, and {floor} never looks at the network {numbers}."
    else:
        sentence = (
            f"{all_of} on {of.short}: {method} {how} {floor}, which never looks at the network {numbers}."
        )
    return Fact(kind, "floors", sentence, "scores", tuple(methods), -margin.mean)


def _floor_success(data: RunData, of: Measure, passed: list[str]) -> Fact:
    margins = {m: min(data.cells[of.name, m].margins.values(), key=lambda x: x.mean) for m in passed}
    method, margin = max(margins.items(), key=lambda item: item[1].mean)
    low, high = margin.interval
    sentence = (
        f"{names(passed)} {'beats' if len(passed) == 1 else 'beat'} every floor on {of.short}; {method} by "
        f"{margin.mean:.3f} (95 % interval {low:.3f} to {high:.3f}, n = {margin.n})."
    )
    return Fact(GOOD, "floors", sentence, "scores", tuple(passed), margin.mean)


def _blank(data: RunData) -> Iterator[Fact]:
    cells = {m: data.cells["degenerate", m] for m in data.real if ("degenerate", m) in data.cells}
    enough = {m: c for m, c in cells.items() if (c.n or 0) >= ENOUGH}
    if not enough:
        yield _too_few(
            "blank maps", "blank maps", max((c.n or 0 for c in cells.values()), default=0), "scores"
        )
        return
    for method, cell in enough.items():
        if cell.value >= BLANK:
            kind = FAILURE if cell.value >= MOSTLY_BLANK else WARNING
            sentence = f"{cell.value:.0%} of the {method} maps are blank: they say nothing (n = {cell.n})."
            yield Fact(kind, "blank maps", sentence, "scores", (method,), cell.value)
    if all(cell.value < BLANK for cell in enough.values()):
        most = max(cell.value for cell in enough.values())
        share = "No map is blank" if most == 0 else f"At most {most:.1%} of a method's maps are blank"
        yield Fact(GOOD, "blank maps", f"{share}.", "scores")


def _randomised(data: RunData) -> Iterator[Fact]:
    of_rule = randomisations(data)
    if not of_rule:
        yield Fact(THIN, "randomisation", "Randomisation needs that metric in the study.", "scores")
        return
    failed: dict[str, tuple[float, Measure]] = {}
    judged, most = 0, 0
    for of in of_rule:
        for method in data.real:
            cell = data.cells.get((of.name, method))
            if cell is None:
                continue
            most = max(most, cell.n or 0)
            if (cell.n or 0) < ENOUGH:
                continue
            judged += 1
            if cell.low > UNCHANGED and cell.value > failed.get(method, (0.0, of))[0]:
                failed[method] = cell.value, of
    if not judged:
        yield _too_few("randomisation", "similarity after randomisation", most, "scores")
    elif failed:
        method, (value, of) = max(failed.items(), key=lambda item: item[1][0])
        kind = "SSIM" if of.base.endswith("ssim") else "rank correlation"
        cell = data.cells[of.name, method]
        sentence = (
            f"{names(list(failed))} hardly {'notices' if len(failed) == 1 else 'notice'} when the weights "
            f"are replaced by random ones: maps of {method} stay alike ({kind} {value:.2f}, 95 % interval "
            f"{cell.low:.2f} to {cell.high:.2f}, n = {cell.n})."
        )
        yield Fact(FAILURE, "randomisation", sentence, "scores", tuple(failed), value)
    else:
        yield Fact(GOOD, "randomisation", "Every method's maps change when the weights are random.", "scores")


def _disagree(data: RunData) -> Iterator[Fact]:
    pairs = data.agreement.get("spearman", {})
    real = {pair: v for pair, v in pairs.items() if set(pair) <= set(data.real) and not math.isnan(v)}
    values = list(real.values())
    if not values or len(data.images.ids) < ENOUGH:
        why = "method_agreement and two methods" if not values else f"{ENOUGH} images"
        yield Fact(THIN, "disagreement", f"Agreement between methods needs {why}.", "agreement")
        return
    mean = sum(values) / len(values)
    pairs_text = f"{len(values)} pair{'s' * (len(values) != 1)} of methods"
    if mean < DISAGREE:
        sentence = f"The methods contradict each other: mean rank correlation {mean:.2f} over {pairs_text}."
        yield Fact(WARNING, "disagreement", sentence, "agreement", effect=DISAGREE - mean)
    elif alone := {m: v for m in data.real if (v := _with_others(real, m)) < DISAGREE}:
        least = min(alone, key=alone.__getitem__)
        apart = (
            f"{names(list(alone))} {'stands' if len(alone) == 1 else 'stand'} apart from the other methods"
        )
        sentence = (
            f"{apart}: mean rank correlation {_signed(alone[least], 2)} of {least} with the others, where "
            f"all {pairs_text} have {mean:.2f}."
        )
        yield Fact(WARNING, "disagreement", sentence, "agreement", tuple(alone), DISAGREE - alone[least])
    else:
        sentence = f"The methods agree to some extent: mean rank correlation {mean:.2f} over {pairs_text}."
        yield Fact(GOOD, "disagreement", sentence, "agreement", effect=mean)


def _with_others(pairs: Mapping[tuple[str, str], float], method: str) -> float:
    own = [v for pair, v in pairs.items() if method in pair]
    return sum(own) / len(own) if own else math.nan


def _classifier(data: RunData) -> Iterator[Fact]:
    auc = data.classifier("auc")
    value = auc[data.checkpoints.index(data.checkpoint)] if auc else math.nan
    n, silent = len(data.images.ids), sum(map(math.isnan, data.images.confidence))
    if silent:
        sentence = f"The network's answers to {silent} of {n} images are not numbers."
        yield Fact(WARNING, "classifier", sentence, "trajectories", effect=silent / n)
    if math.isnan(value) or n < ENOUGH:
        why = "auc among the metrics" if math.isnan(value) else f"{ENOUGH} images"
        yield Fact(THIN, "classifier", f"The classifier's test needs {why}.", "trajectories")
    elif value < CHANCE:
        sentence = f"The classifier itself is weak (AUC {value:.3f}, n = {n}): there is little to explain."
        yield Fact(WARNING, "classifier", sentence, "trajectories", effect=CHANCE - value)
    else:
        yield Fact(
            GOOD, "classifier", f"The classifier separates its classes: AUC {value:.3f}.", "trajectories"
        )


def _too_few(rule: str, what: str, n: int, section: str) -> Fact:
    return Fact(THIN, rule, f"Not enough data for {what}: {n} images, {ENOUGH} are needed.", section)


def _signed(number: float, digits: int = 3) -> str:
    """With a true minus sign.

    >>> _signed(-0.25), _signed(0.5, 2)
    ('−0.250', '+0.50')
    """
    return f"{number:+.{digits}f}".replace("-", "−")
