"""The gate: check rules such as "cscore.pneumonia >= 0.5" on a run folder; docs/alarms.md lists all forms.

A metric or method named without options means all its variants, and everything that a rule matches must hold;
floors (random, edges, centre) are judged only if they are named. A number that is not defined, not computed
yet, or of fewer than `min_n` images holds no rule.
"""

from __future__ import annotations

import difflib
import json
import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from heatproof.errors import InputError, UnknownNameError, counted, did_you_mean
from heatproof.registry import key_of, metrics
from heatproof.rows import MIN_N, MIN_USABLE, epoch_of
from heatproof.store import RunFolder
from heatproof.store.manifest import Facts
from heatproof.verdict.alarms import NAMES, Alarm, find_alarms
from heatproof.verdict.answers import Answer, matching
from heatproof.verdict.data import ANSWERS, PAIR, read_run
from heatproof.verdict.judge import SEE_NOTES, judge
from heatproof.verdict.trajectory import Trajectory, class_names, models, ordered

NO_DONOR = "none of its images could be tested: the network must answer them correctly"
OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "==": operator.eq,
}  # fmt: skip
LAST, ALL = "last", "all"
FOLLOWS, LOOKS_THERE, NO_SHORTCUT, NO_DRIFT = "follows", "looks-there", "no-shortcut", "no-drift"
DRIFT_FILE = "drift.json"  # in the run folder of the live images
QUESTIONS = (FOLLOWS, LOOKS_THERE, NO_SHORTCUT, NO_DRIFT, "no-alarms")  # rules without a comparison
MECHANISMS = frozenset(NAMES)  # of alarms
EXAMPLES = "cscore.pneumonia >= 0.5, any(cscore >= 0.4), auc@last >= 0.9 or no-alarms(1)"


@dataclass(frozen=True)
class Rule:
    """A parsed rule: a comparison, no alarms of these mechanisms, or a question of the verdict."""

    text: str
    metric: str = ""
    parts: tuple[str, ...] = ()  # methods and classes
    operator: str = ">="
    limit: float = 0.0
    checkpoint: str = LAST
    any: bool = False
    mechanisms: frozenset[int] = frozenset()
    question: str = ""  # of the verdict: follows, looks-there, no-shortcut; or no-drift


_NAME = r"""(?:"([^"]+)"|'([^']+)'|([^\s.()<>=@"']+(?:\([^()]*\))?))"""
_PLACE = r"""(?:"([^"]+)"|'([^']+)'|([^\s<>=()"']+))"""
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"


def read_rule(text: str) -> Rule:
    """Parse a rule; raise InputError with the position of the error.

    >>> read_rule("cscore.gradcam.'no finding' >= .5").parts
    ('gradcam', 'no finding')
    """
    reader = _Reader(text)
    if reader.take(r"no-alarms?(?![\w.])"):
        numbers = reader.take(r"\(\s*([1-3](?:\s*,\s*[1-3])*)\s*\)")
        chosen = frozenset(map(int, re.findall(r"\d", numbers[1]))) if numbers else MECHANISMS
        at = reader.place() or ALL
        reader.need(r"$", "the end, or mechanisms such as (1) or (2, 3)")
        return Rule(text, checkpoint=at, mechanisms=chosen)
    if question := reader.take(rf"({FOLLOWS}|{LOOKS_THERE}|{NO_SHORTCUT}|{NO_DRIFT})(?![\w.-])"):
        name = reader.take(_NAME) if question[1] in (FOLLOWS, LOOKS_THERE) else None
        at = reader.place() or LAST
        reader.need(r"$", "the end")
        parts = tuple(filter(None, name.groups())) if name else ()
        return Rule(text, parts=parts, checkpoint=at, question=question[1])
    any_method = reader.take(r"any\s*\(") is not None
    metric = reader.name(_NAME, "a metric")
    of = []
    while reader.take(r"\."):
        of.append(reader.name(_NAME, "a method or a class"))
    place = reader.place()
    sign = reader.need(r"(>=|<=|==|>|<)", "one of >= <= > < ==")[1]
    limit = float(reader.need(_NUMBER, "a number")[0])
    place = place or reader.place() or LAST
    if any_method:
        reader.need(r"\)", "a closing bracket")
    reader.need(r"$", "the end")
    return Rule(text, metric, tuple(of), sign, limit, place, any_method)


class _Reader:
    """Reads a text from left to right."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def take(self, pattern: str) -> re.Match[str] | None:
        if match := re.compile(rf"\s*{pattern}").match(self.text, self.at):
            self.at = match.end()
        return match

    def need(self, pattern: str, what: str) -> re.Match[str]:
        match = self.take(pattern)
        if match is None:
            rest = self.text[self.at :].strip()
            there = f"{rest!r} stands there" if rest else "the rule ends there"
            words = re.findall(r"\A\s*([\w-]+)(?=[\s@]|$)", self.text.lower())
            near = [q for w in words for q in difflib.get_close_matches(w, QUESTIONS, n=1) if q != w]
            hint = f"did you mean {near[0]!r}?" if near else f"write it like {EXAMPLES}"
            raise InputError(f"cannot read the rule {self.text!r}: expected {what}, but {there}; {hint}")
        return match

    def name(self, pattern: str, what: str) -> str:
        return next(part for part in self.need(pattern, what).groups() if part)

    def place(self) -> str | None:
        return self.name(_PLACE, "a checkpoint") if self.take("@") else None


class RuleLine(NamedTuple):
    """A reason for the result of a rule, as texts."""

    value: str
    n: str
    where: str
    why: str

    def __str__(self) -> str:
        return " ".join(filter(None, (self.value, f"(n = {self.n})", self.where, self.why)))


@dataclass(frozen=True)
class RuleValue:
    """One number that a rule is about."""

    model: str
    checkpoint: str
    method: str
    class_name: str  # "" over all classes
    metric: str
    value: float
    n: int  # images
    holds: bool
    reason: str = ""

    @property
    def where(self) -> str:
        return " / ".join(part for part in (self.method, self.class_name, self.checkpoint) if part)


@dataclass(frozen=True)
class RuleResult:
    """Whether a rule holds, with every number or alarm it was decided by."""

    rule: str
    holds: bool
    values: tuple[RuleValue, ...] = ()  # the worst first
    alarms: tuple[Alarm, ...] = ()
    reasons: tuple[str, ...] = ()  # why it fails, if not because of a number
    n: int = 0  # the fewest images that it was decided by

    @property
    def lines(self) -> list[RuleLine]:
        """All numbers and alarms that break the rule, or the number nearest to breaking it."""
        n = str(self.n)
        lines = [
            RuleLine("", n, f"{a.where} / {a.checkpoint}", f"{a.name}: {a.sentence}") for a in self.alarms
        ]
        lines += [RuleLine("", n, "", reason) for reason in self.reasons]
        for v in [v for v in self.values if v.holds == self.holds][: 1 if self.holds else None]:
            value = "not defined" if math.isnan(v.value) else f"{v.value:.4g}"
            lines.append(RuleLine(value, str(v.n), v.where, v.reason))
        return lines or [RuleLine("", n, "", "")]

    @property
    def sentence(self) -> str:
        """The rule, whether it is met, and the numbers that decided it."""
        return f"{self.rule}: {'holds' if self.holds else 'does not hold'}, {'; '.join(map(str, self.lines))}"


def check(
    folder: RunFolder | str | Path, rules: Sequence[str], min_n: int = MIN_N, min_usable: float = MIN_USABLE
) -> list[RuleResult]:
    """Check whether a run is complete, then each rule; raises InputError for one that cannot be read."""
    run = _Run(folder if isinstance(folder, RunFolder) else RunFolder.open(folder), min_n)
    parsed = [read_rule(text) for text in rules]
    return [whole(run.folder, min_usable), *map(run.check, parsed)]


def whole(folder: RunFolder, min_usable: float) -> RuleResult:
    """Whether a run is complete and enough of its images could be used."""
    # A rule that is met on half the images is no evidence, so an incomplete run never passes.
    status = folder.status()
    holds = status.complete and status.usable >= min_usable
    value = RuleValue("", "", "", "", "usable", status.usable, status.planned, holds, status.sentence)
    return RuleResult(f"complete run, usable >= {min_usable:g}", holds, (value,), n=status.planned)


@dataclass(frozen=True)
class _Run:
    """The names and numbers of a run folder."""

    folder: RunFolder
    min_n: int

    @property
    def facts(self) -> Facts:
        return self.folder.manifest.facts

    @cached_property
    def columns(self) -> list[tuple[str, str]]:
        """Each metric with each method that has it."""
        rows = self.folder.scores().sql("select distinct metric, method from scores order by all")
        columns = [(row["metric"], row["method"]) for row in rows if row["metric"] not in ANSWERS]
        if not columns:
            raise InputError(f"{self.folder.path} holds no score yet; let the run finish first")
        return columns

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(method for _, method in self.columns))

    @cached_property
    def checkpoints(self) -> dict[str, list[str]]:
        """By model."""
        return {model: ordered(self.folder, model) for model in models(self.folder)}

    @cached_property
    def classes(self) -> dict[int, str]:
        """Names by number; a class without a name is called by its number."""
        names = class_names(self.folder)
        query = "select distinct label from scores where label is not null order by 1"
        labels = [row["label"] for row in self.folder.scores().sql(query)]
        return {c: names[c] if c < len(names) else str(c) for c in sorted({*labels, *range(len(names))})}

    def check(self, rule: Rule) -> RuleResult:
        """Check a rule; raises InputError for an unknown name, also if the rule could not hold anyway."""
        if rule.mechanisms:
            return self._check_alarms(rule)
        if rule.question == NO_DRIFT:
            return self._check_drift(rule)
        return self._check_answers(rule) if rule.question else self._check_values(rule)

    def _places(self, rule: Rule) -> list[tuple[str, str]]:
        """Models and checkpoints that a rule is about."""
        return [(m, c) for m in self.checkpoints for c in self._checkpoints(m, rule.checkpoint)]

    def _names(self, rule: Rule) -> tuple[list[tuple[str, str]], list[int]]:
        """Metrics with methods, and classes (none: all together) that a comparison is about."""
        stored = list(dict.fromkeys(metric for metric, _ in self.columns))
        named = matching(rule.metric, stored, self.facts.metric)
        if not named:
            raise self._no_metric(rule.metric, stored)
        methods: list[str] = []
        classes: list[int] = []
        for part in rule.parts:
            as_methods, as_classes = matching(part, self.methods, self.facts.method), self._classes(part)
            if not as_methods and not as_classes:
                pairs = PAIR in part  # else not worth listing
                known = [*(m for m in self.methods if m and pairs >= (PAIR in m)), *self.classes.values()]
                raise UnknownNameError(f"method or class in the rule {rule.text!r}:", part, known)
            both = as_methods and as_classes
            if both or (methods if as_methods else classes):
                why = "is both a method and a class" if both else "is one too many"
                raise InputError(f"in the rule {rule.text!r}, {part!r} {why}; name one method and one class")
            methods += as_methods
            classes += as_classes
        for metric in named:
            having = [method for name, method in self.columns if name == metric]
            if methods and not set(having) & set(methods):
                of = f"that of {', '.join(filter(None, having))}" if any(having) else "one for the classifier"
                why = f"{metric} has no value of that method, only {of}"
                raise InputError(f"in the rule {rule.text!r}, {why}")
        if not methods:
            methods = [m for m in self.methods if not any(map(self.facts.is_floor, m.split(PAIR)))]
        columns = [(metric, m) for metric, m in self.columns if metric in named and m in methods]
        if not columns:
            raise InputError(f"in the rule {rule.text!r}, only controls have that metric; name one of them")
        return columns, classes

    def _question_names(self, rule: Rule) -> Sequence[str | int]:
        """The methods or classes that a question of the verdict is about; none: all of them."""
        if not rule.parts:
            return []
        methods = [m for m in self.methods if m and PAIR not in m and not self.facts.is_floor(m)]
        about_maps, name = rule.question == FOLLOWS, rule.parts[0]
        known = methods if about_maps else list(self.classes.values())
        names: Sequence[str | int] = (
            matching(name, methods, self.facts.method) if about_maps else self._classes(name)
        )
        if not names and not known and not about_maps:
            raise InputError(
                f"in the rule {rule.text!r}, no class can be named: the images of the run have no labels; "
                "write looks-there alone"
            )
        if not names:
            kind = "method" if about_maps else "class"
            raise UnknownNameError(f"{kind} in the rule {rule.text!r}:", name, known)
        return names

    def _check_values(self, rule: Rule) -> RuleResult:
        columns, classes = self._names(rule)
        values = [
            self._value(rule, model, checkpoint, metric, method, c)
            for model, checkpoint in self._places(rule)
            for metric, method in columns
            for c in classes or (None,)
        ]
        values.sort(key=lambda value: _margin(value.value, rule))
        holds = (any if rule.any else all)(value.holds for value in values)
        n = min(value.n for value in values if not rule.any or not holds or value.holds)
        return RuleResult(rule.text, holds, tuple(values), n=n)

    def _check_answers(self, rule: Rule) -> RuleResult:
        """Check a question of the verdict: every answer must be yes."""
        places, names = self._places(rule), self._question_names(rule)
        results = [
            (checkpoint, *answer)
            for model, checkpoint in places
            for answer in self._answers(rule, names, model, checkpoint)
        ]
        reasons = [f"{of} at {place}: {answer} ({why})" for place, of, answer, _, why in results if why]
        n = min((n for *_, n, _ in results), default=0)
        return RuleResult(rule.text, n > 0 and not reasons, reasons=tuple(reasons), n=n)

    def _answers(
        self, rule: Rule, names: Sequence[str | int], model: str, checkpoint: str
    ) -> Iterator[tuple[str, Answer, int, str]]:
        """Name, answer, images, and why it does not suffice ("" if it does)."""
        try:
            verdict = judge(read_run(self.folder, model, checkpoint))
        except InputError as error:  # not computed yet
            yield " ".join(rule.parts) or rule.question, "undecided", 0, str(error)
            return
        note, obstacles = verdict.network.note, "; ".join(verdict.notes)
        every: dict[str | int | None, tuple[str, Answer, int, str]]
        if rule.question == FOLLOWS:
            every = {
                m.method: (m.method, m.follows, min((t.n for t in m.tests if t.votes), default=0), m.note)
                for m in verdict.methods
            }
        elif rule.question == LOOKS_THERE:
            every = {
                label: (c.name, c.answer, c.test.n, note)
                for c in verdict.network.classes
                for label in c.members
            }
            note = NO_DONOR if verdict.network.is_tested else note
        else:
            n = sum(c.test.n for c in verdict.network.classes)
            answer: Answer = "yes" if verdict.no_shortcut else verdict.network.answer
            every = {None: ("network", answer, n, note)}
        chosen = list(dict.fromkeys(answer for key, answer in every.items() if not names or key in names))
        for of, answer, n, why in chosen or [(" ".join(rule.parts) or "network", "undecided", 0, note)]:
            few = self._too_few(n) if n < self.min_n else ""
            yield of, answer, n, few if answer == "yes" else why.replace(SEE_NOTES, obstacles)

    def _check_alarms(self, rule: Rule) -> RuleResult:
        alarms: list[Alarm] = []
        reasons: list[str] = []
        counts: list[int] = []
        for model in self.checkpoints:
            places = self._checkpoints(model, rule.checkpoint)
            try:
                run = Trajectory.from_run(self.folder, model)
            except InputError as error:
                reasons.append(str(error))
                continue
            if len(run) < 2:
                reasons.append("the run has one checkpoint, and alarms over training need at least two")
            unseen = [place for place in places if place not in {checkpoint.name for checkpoint in run}]
            reasons += [f"{place} has no C-Score yet, so its alarms are not known" for place in unseen]
            counts += [sum(c.total for c in state.classes.values()) for state in run if state.name in places]
            alarms += [
                a for a in find_alarms(run) if a.checkpoint in places and a.mechanism in rule.mechanisms
            ]
        if not self.checkpoints:
            reasons.append(f"{self.folder.path} holds no score yet")
        n = min(counts, default=0)
        reasons += [self._too_few(n)] * (n < self.min_n)
        return RuleResult(rule.text, not alarms and not reasons, (), tuple(alarms), tuple(reasons), n)

    def _check_drift(self, rule: Rule) -> RuleResult:
        """Check the result of `heatproof drift`, in which this run has the live images."""
        path = self.folder.path / DRIFT_FILE
        if not path.is_file():
            raise InputError(
                f"there is no {path}; write it with heatproof drift REFERENCE {self.folder.path}"
            )
        record = json.loads(path.read_text(encoding="utf-8"))
        reasons = [record["headline"]] if record["drifted"] else []
        now = self.folder.manifest.id, len(self.folder.done())
        if (record["live"]["id"], record["live"]["units"]) != now:
            reasons.append(f"{DRIFT_FILE} is of another state of the run; run heatproof drift again")
        n = record["live"]["images"]
        reasons += [self._too_few(n)] * (n < self.min_n)
        return RuleResult(rule.text, not reasons, reasons=tuple(reasons), n=n)

    def _value(
        self, rule: Rule, model: str, checkpoint: str, metric: str, method: str, c: int | None
    ) -> RuleValue:
        which = "(image <> '' or label is null)" if c is None else "label = ?"
        name = "" if c is None else self.classes[c]
        row: dict[str, Any] = self.folder.scores().sql(
            "select avg(value order by value) filter (not isnan(value)) as value, "
            "count(*) filter (not isnan(value)) as n, count(*) as total, max(reason) as reason, "
            "count(*) filter (image <> '') as images from scores "
            f"where model = ? and checkpoint = ? and metric = ? and method = ? and {which}",
            [model, checkpoint, metric, method, *([] if c is None else [c])],
        )[0]
        value, reason, n = row["value"], row["reason"] or "", row["n"]
        if n and not row["images"]:
            n = self._images_behind(model, checkpoint, metric, method, c)
        if value is None or n == 0:
            value, of = math.nan, f" of {name}" if name else ""
            reason = reason or f"there is no {metric}{of} at {checkpoint}"
        elif row["n"] < row["total"]:
            reason = f"not defined for {row['total'] - row['n']} of {row['total']} images: {reason}"
        if n < self.min_n and not math.isnan(value):
            reason = "; ".join(filter(None, (self._too_few(n), reason)))
        holds = n >= self.min_n and OPERATORS[rule.operator](value, rule.limit)  # False for NaN
        return RuleValue(model, checkpoint, method, name, metric, value, n, holds, reason)

    def _images_behind(self, model: str, checkpoint: str, metric: str, method: str, c: int | None) -> int:
        """Images of a number about a whole checkpoint or class: its gold list, or all with a prediction.

        The size of a gold list is itself a number about all images of its class.
        """
        base, bracket, options = metric.partition("(")
        stem = base.partition("_")[0]
        where = "model = ? and checkpoint = ? and label is not distinct from ?"
        if base != f"{stem}_n":
            rows = self.folder.scores().sql(
                f"select value from scores where {where} and metric = ? and method = ? and image = ''",
                [model, checkpoint, c, f"{stem}_n{bracket}{options}", method],
            )
            if rows:
                return int(rows[0]["value"])
        if c is None:
            where = "model = ? and checkpoint = ? and ? is null"
        rows = self.folder.scores().sql(
            f"select count(distinct image) as n from scores where {where} and metric = 'probability' "
            "and not isnan(value)",
            [model, checkpoint, c],
        )
        return int(rows[0]["n"])

    def _too_few(self, n: int) -> str:
        return f"{counted(n, 'image')} {'is' if n == 1 else 'are'} fewer than {self.min_n}"

    def _checkpoints(self, model: str, name: str) -> list[str]:
        every = self.checkpoints[model]
        if name in every:
            return [name]
        if name.lower() in (LAST, ALL):
            return every[-1:] if name.lower() == LAST else every
        of_epoch = [each for each in every if name.isdigit() and epoch_of(each) == int(name)]
        if not of_epoch:
            raise UnknownNameError("checkpoint", name, every)
        return of_epoch

    def _classes(self, name: str) -> list[int]:
        named = [c for c, each in self.classes.items() if key_of(each) == key_of(name)]
        return named or [c for c in self.classes if str(c) == name]

    def _no_metric(self, name: str, stored: list[str]) -> Exception:
        known, near = metrics.find(name.partition("(")[0]), did_you_mean(name, stored)
        if known is None:
            return UnknownNameError("metric", name, stored)
        absent = f"{self.folder.path} holds no {known.name}"
        return InputError(f"{absent}; add it to the metrics of its study (or {near})")


def _margin(value: float, rule: Rule) -> float:
    """Distance of a value from breaking the rule; below 0 if it does."""
    if math.isnan(value):
        return -math.inf
    difference = value - rule.limit
    return -abs(difference) if rule.operator == "==" else difference if ">" in rule.operator else -difference
