"""A gate: rules about a run folder (rules.py says how they are written), so that a build can fail.

Names are matched as everywhere: case, hyphens, underscores and spaces do not matter; a name with a dot or a
bracket in it goes in quotes. A metric or method named without options means all its variants, and everything
that a rule matches must keep it; floors (random, edges, centre) are judged only where they are named. What is
not defined, not computed yet, or stands on fewer than `min_n` images (30) keeps no rule. n is the size of the
gold list for a C-Score, otherwise the number of images that the number is about.

One rule is always there: the run is complete, and at least `min_usable` of its images (95 %) could be used.
Where a folder does not say what was planned (a monitored training), only its images count.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heatproof.errors import InputError, UnknownNameError, counted, did_you_mean
from heatproof.registry import key_of, metrics
from heatproof.rows import epoch_of
from heatproof.store import RunFolder
from heatproof.store.facts import Facts
from heatproof.verdict.alarms import Alarm, find_alarms
from heatproof.verdict.rule_results import RuleResult, RuleValue
from heatproof.verdict.rules import ALL, FOLLOWS, LAST, MIN_N, MIN_USABLE, Rule, matching, read_rule
from heatproof.verdict.trajectory import Trajectory, class_names, models, ordered

if TYPE_CHECKING:
    from heatproof.verdict.answers import Answer

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt, "==": operator.eq,
}  # fmt: skip
NO_SCORES = ("image", "predicted", "probability")  # rows about the data and the answers
PAIR = " ~ "  # between two methods, in the rows of method_agreement


def check(
    folder: RunFolder | str | Path, rules: Sequence[str], min_n: int = MIN_N, min_usable: float = MIN_USABLE
) -> list[RuleResult]:
    """Judge a run: whether it is whole, then each rule.

    Every rule is read, and its names are looked up, before the first is judged.
    """
    run = _Run(folder if isinstance(folder, RunFolder) else RunFolder.open(folder), min_n)
    read = [read_rule(text) for text in rules]
    planned = [run.judging(rule) for rule in read]
    return [whole(run.folder, min_usable), *(judge_it() for judge_it in planned)]


def whole(folder: RunFolder, min_usable: float) -> RuleResult:
    """Whether a run is complete and enough of its images could be used."""
    status = folder.status()
    holds = status.complete and status.usable >= min_usable
    value = RuleValue("", "", "", "", "usable", status.usable, status.planned, holds, status.sentence)
    return RuleResult(f"complete run, usable >= {min_usable:g}", holds, (value,), n=status.planned)


@dataclass(frozen=True)
class _Plan:
    """What a rule is about, by the names that the rows use."""

    metrics: tuple[str, ...]
    methods: tuple[str, ...]
    classes: tuple[int, ...]  # none: all classes together
    checkpoints: tuple[tuple[str, str], ...]  # model and checkpoint


@dataclass(frozen=True)
class _Run:
    """A run folder as rules see it."""

    folder: RunFolder
    min_n: int

    @property
    def facts(self) -> Facts:
        return self.folder.manifest.facts

    @cached_property
    def columns(self) -> list[tuple[str, str]]:
        """Each metric with each method that has it."""
        rows = self.folder.scores().sql("select distinct metric, method from scores order by all")
        found = [(row["metric"], row["method"]) for row in rows if row["metric"] not in NO_SCORES]
        if not found:
            raise InputError(f"{self.folder.path} holds no score yet; let the run finish first")
        return found

    @cached_property
    def models(self) -> list[str]:
        return models(self.folder)

    @cached_property
    def checkpoints(self) -> dict[str, list[str]]:
        return {model: ordered(self.folder, model) for model in self.models}

    @cached_property
    def classes(self) -> dict[int, str]:
        """Names by number; a class without a name is called by its number."""
        names = class_names(self.folder)
        query = "select distinct label from scores where label is not null order by 1"
        seen = [row["label"] for row in self.folder.scores().sql(query)]
        return {c: names[c] if c < len(names) else str(c) for c in sorted({*seen, *range(len(names))})}

    def judging(self, rule: Rule) -> Callable[[], RuleResult]:
        """What judges a rule, once its names are looked up."""
        if rule.mechanisms:
            return partial(self.alarms, rule)
        if rule.question:
            return partial(self.answers, rule, self.asked(rule))
        return partial(self.judge, rule, self.plan(rule))

    def plan(self, rule: Rule) -> _Plan:
        """Look up every name of a rule."""
        stored = list(dict.fromkeys(metric for metric, _ in self.columns))
        named = matching(rule.metric, stored, self.facts.metric)
        if not named:
            raise self._no_metric(rule.metric, stored)
        methods = list(dict.fromkeys(method for _, method in self.columns))
        chosen_methods: list[str] = []
        chosen_classes: list[int] = []
        for part in rule.parts:
            as_methods, as_classes = matching(part, methods, self.facts.method), self._classes(part)
            if not as_methods and not as_classes:
                pairs = PAIR in part  # else not worth listing
                known = [*(m for m in methods if m and pairs >= (PAIR in m)), *self.classes.values()]
                raise UnknownNameError(f"method or class in the rule {rule.text!r}:", part, known)
            taken = chosen_methods if as_methods else chosen_classes
            if (as_methods and as_classes) or taken:
                why = "is both a method and a class" if as_methods and as_classes else "is one too many"
                raise InputError(f"in the rule {rule.text!r}, {part!r} {why}; name one method and one class")
            chosen_methods += as_methods
            chosen_classes += [] if as_methods else as_classes
        for metric in named:
            having = [method for name, method in self.columns if name == metric]
            if chosen_methods and not set(having) & set(chosen_methods):
                of = f"that of {', '.join(filter(None, having))}" if any(having) else "one for the classifier"
                why = f"{metric} has no value of that method, only {of}"
                raise InputError(f"in the rule {rule.text!r}, {why}")
        if not chosen_methods:
            chosen_methods = [m for m in methods if not any(map(self.facts.is_floor, m.split(PAIR)))]
            if not any(metric in named and method in chosen_methods for metric, method in self.columns):
                raise InputError(f"in the rule {rule.text!r}, only floors have that metric; name one of them")
        places = [(m, c) for m in self.models for c in self._places(m, rule.checkpoint)]
        return _Plan(tuple(named), tuple(chosen_methods), tuple(chosen_classes), tuple(places))

    def judge(self, rule: Rule, plan: _Plan) -> RuleResult:
        values = [
            self._value(rule, model, checkpoint, metric, method, c)
            for model, checkpoint in plan.checkpoints
            for metric, method in self.columns
            if metric in plan.metrics and method in plan.methods
            for c in plan.classes or (None,)
        ]
        values.sort(key=lambda value: _margin(value.value, rule))
        holds = (any if rule.any else all)(value.holds for value in values)
        n = min(value.n for value in values if not rule.any or not holds or value.holds)
        return RuleResult(rule.text, holds, tuple(values), n=n)

    def asked(self, rule: Rule) -> list[str] | list[int]:
        """The methods or classes that a question of the verdict is about; none: all of them."""
        for model in self.models:
            self._places(model, rule.checkpoint)
        if not rule.parts:
            return []
        methods = list(
            dict.fromkeys(m for _, m in self.columns if m and PAIR not in m and not self.facts.is_floor(m))
        )
        about_maps = rule.question == FOLLOWS
        known = methods if about_maps else list(self.classes.values())
        found = (
            matching(rule.parts[0], methods, self.facts.method)
            if about_maps
            else self._classes(rule.parts[0])
        )
        if not found and not known and not about_maps:
            raise InputError(
                f"in the rule {rule.text!r}, no class can be named: the images of the run have no labels; "
                "write looks-there alone"
            )
        if not found:
            kind = "method" if about_maps else "class"
            raise UnknownNameError(f"{kind} in the rule {rule.text!r}:", rule.parts[0], known)
        return found

    def answers(self, rule: Rule, asked: Sequence[str | int]) -> RuleResult:
        """A question of the verdict: it holds where every answer that is asked for is yes."""
        found = [
            (place, *told)
            for model in self.models
            for place in self._places(model, rule.checkpoint)
            for told in self._told(rule, asked, model, place)
        ]
        reasons = [f"{of} at {place}: {answer} ({why})" for place, of, answer, _, why in found if why]
        n = min((n for *_, n, _ in found), default=0)
        return RuleResult(rule.text, n > 0 and not reasons, reasons=tuple(reasons), n=n)

    def _told(
        self, rule: Rule, asked: Sequence[str | int], model: str, place: str
    ) -> Iterator[tuple[str, Answer, int, str]]:
        """Of what, the answer, its pictures, and why it is not enough."""
        from heatproof.verdict.data import read_run  # which rules about numbers do without
        from heatproof.verdict.judge import SEE_NOTES, judge

        try:
            verdict = judge(read_run(self.folder, model, place))
        except InputError as error:  # not computed yet
            yield " ".join(rule.parts) or rule.question, "undecided", 0, str(error)
            return
        note, in_the_way = verdict.network.note, "; ".join(verdict.notes)
        every: list[tuple[str | int | None, tuple[str, Answer, int, str]]] = [
            (m.method, (m.method, m.follows, min((t.n for t in m.tests if t.votes), default=0), m.note))
            for m in verdict.methods
        ]
        if rule.question != FOLLOWS:
            classes = verdict.network.classes
            every = [(c.label, (c.name, c.looks_there, c.test.n, note)) for c in classes]
        chosen = [told for key, told in every if not asked or key in asked]
        for of, answer, n, why in chosen or [(" ".join(rule.parts) or "network", "undecided", 0, note)]:
            few = self._too_few(n) if n < self.min_n else ""
            yield of, answer, n, few if answer == "yes" else why.replace(SEE_NOTES, in_the_way)

    def alarms(self, rule: Rule) -> RuleResult:
        found: list[Alarm] = []
        reasons: list[str] = []
        counts: list[int] = []
        for model in self.models:
            places = self._places(model, rule.checkpoint)
            try:
                run = Trajectory.from_run(self.folder, model)
            except InputError as error:
                reasons.append(str(error))
                continue
            if len(run) < 2:
                reasons.append("the run has one checkpoint, and alarms over training need at least two")
            unseen = [place for place in places if place not in {checkpoint.name for checkpoint in run}]
            reasons += [f"{place} has no C-Score yet, so its alarms are not known" for place in unseen]
            counts += [sum(c.total for c in one.classes.values()) for one in run if one.name in places]
            here = [alarm for alarm in find_alarms(run) if alarm.checkpoint in places]
            found += [alarm for alarm in here if alarm.mechanism in rule.mechanisms]
        if not self.models:
            reasons.append(f"{self.folder.path} holds no score yet")
        n = min(counts, default=0)
        reasons += [self._too_few(n)] * (n < self.min_n)
        return RuleResult(rule.text, not found and not reasons, (), tuple(found), tuple(reasons), n)

    def _value(
        self, rule: Rule, model: str, checkpoint: str, metric: str, method: str, c: int | None
    ) -> RuleValue:
        which, parameters = "(image <> '' or label is null)", [model, checkpoint, metric, method]
        name = ""
        if c is not None:
            which, name = "label = ?", self.classes[c]
            parameters.append(c)  # type: ignore[arg-type]
        row: dict[str, Any] = self.folder.scores().sql(
            "select avg(value order by value) filter (not isnan(value)) as value, "
            "count(*) filter (not isnan(value)) as n, count(*) as total, max(reason) as reason, "
            "count(*) filter (image <> '') as images from scores "
            f"where model = ? and checkpoint = ? and metric = ? and method = ? and {which}",
            parameters,
        )[0]
        value, reason, n = row["value"], row["reason"] or "", row["n"]
        if n and not row["images"]:
            n = self._behind(model, checkpoint, metric, method, c)
        if value is None or n == 0:
            value, of = math.nan, f" of {name}" if name else ""
            reason = reason or f"there is no {metric}{of} at {checkpoint}"
        elif row["n"] < row["total"]:
            reason = f"not defined for {row['total'] - row['n']} of {row['total']} images: {reason}"
        if n < self.min_n and not math.isnan(value):
            reason = "; ".join(filter(None, (self._too_few(n), reason)))
        holds = n >= self.min_n and OPERATORS[rule.operator](value, rule.limit)  # NaN keeps nothing
        return RuleValue(model, checkpoint, method, name, metric, value, n, holds, reason)

    def _behind(self, model: str, checkpoint: str, metric: str, method: str, c: int | None) -> int:
        """Images behind a number about a whole checkpoint or class: its gold list, or all that were answered.

        The size of a gold list is itself a number about all images of its class.
        """
        base, bracket, options = metric.partition("(")
        stem = base.partition("_")[0]
        where = "model = ? and checkpoint = ? and label is not distinct from ?"
        if base != f"{stem}_n":
            found = self.folder.scores().sql(
                f"select value from scores where {where} and metric = ? and method = ? and image = ''",
                [model, checkpoint, c, f"{stem}_n{bracket}{options}", method],
            )
            if found:
                return int(found[0]["value"])
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

    def _places(self, model: str, wanted: str) -> list[str]:
        every = self.checkpoints[model]
        if wanted in every:
            return [wanted]
        if wanted.lower() in (LAST, ALL):
            return every[-1:] if wanted.lower() == LAST else every
        found = [name for name in every if wanted.isdigit() and epoch_of(name) == int(wanted)]
        if not found:
            raise UnknownNameError("checkpoint", wanted, every)
        return found

    def _classes(self, part: str) -> list[int]:
        named = [c for c, name in self.classes.items() if key_of(name) == key_of(part)]
        return named or [c for c in self.classes if str(c) == part]

    def _no_metric(self, name: str, stored: list[str]) -> Exception:
        try:
            known = metrics.get(name.partition("(")[0]).name
        except UnknownNameError:
            return UnknownNameError("metric", name, stored)
        near = did_you_mean(name, stored)
        absent = f"{self.folder.path} holds no {known}"
        return InputError(f"{absent}; add it to the metrics of its study (or {near})")


def _margin(value: float, rule: Rule) -> float:
    """How far a value is from breaking the rule; below 0 where it does."""
    if math.isnan(value):
        return -math.inf
    difference = value - rule.limit
    return -abs(difference) if rule.operator == "==" else difference if ">" in rule.operator else -difference
