"""The syntax of the gate's rules.

cscore >= 0.4                        over all classes, for every method
cscore.pneumonia >= 0.5              of one class (by name or number), for every method
cscore.gradcam.pneumonia > .5        of one method and class, in either order
any(cscore.pneumonia >= 0.5)         for at least one method
auc >= 0.9, insertion.gradcam >= 0.3, bl.gradcam <= 0.2    any metric of the run; the mean over its images
auc@epoch05 >= 0.8, auc@5 >= 0.8     at a checkpoint, by name or epoch; @last (the default), @all
no-alarms, no-alarms(1), no-alarms@last    see alarms.py; of any mechanism or of some, at any checkpoint
follows, follows gradcam             the verdict: every method's maps follow the network, or this one's
looks-there, looks-there pneumonia   the network uses the annotated object, for every class or for this one
no-shortcut                          interventions found no evidence off the object, and none that recurs
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from heatproof.errors import InputError
from heatproof.registry import key_of
from heatproof.store.manifest import MethodFacts, MetricFacts

Registered = Callable[[str], MetricFacts | MethodFacts | None]

LAST, ALL = "last", "all"
FOLLOWS, LOOKS_THERE, NO_SHORTCUT = "follows", "looks-there", "no-shortcut"
QUESTIONS = (FOLLOWS, LOOKS_THERE, NO_SHORTCUT, "no-alarms")  # rules without a comparison
MECHANISMS = frozenset((1, 2, 3))  # of alarms
MIN_USABLE = 0.95  # of the images that were planned
MIN_N = 30  # images behind a number, by default; the verdict needs as many
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
    question: str = ""  # of the verdict: follows, looks-there or no-shortcut


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
    if question := reader.take(rf"({FOLLOWS}|{LOOKS_THERE}|{NO_SHORTCUT})(?![\w.-])"):
        name = None if question[1] == NO_SHORTCUT else reader.take(_NAME)
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


def matching(given: str, stored: Sequence[str], registered: Registered) -> list[str]:
    """Stored names that match a given name: the same one, or any variant if no option is given.

    registered: returns the facts of a name, Facts.metric or Facts.method.
    """
    exact = [name for name in stored if key_of(name) == key_of(given)]
    if exact or "(" in given:
        return exact

    def key(name: str) -> str:
        facts = registered(name)
        return key_of(facts.name if facts else name)

    return [name for name in stored if " ~ " not in name and key(name.partition("(")[0]) == key(given)]


class _Reader:
    """Reads a text from left to right."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def take(self, pattern: str) -> re.Match[str] | None:
        match = re.compile(r"\s*" + pattern).match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        return re.match(pattern, match[0].lstrip())

    def need(self, pattern: str, what: str) -> re.Match[str]:
        match = self.take(pattern)
        if match is None:
            rest = self.text[self.at :].strip()
            there = f"{rest!r} stands there" if rest else "the rule ends there"
            word = re.match(r"\s*([\w-]+)(?=[\s@]|$)", self.text)
            near = difflib.get_close_matches(word[1].lower(), QUESTIONS, n=1) if word else []
            near = [question for question in near if word and question != word[1].lower()]
            hint = f"did you mean {near[0]!r}?" if near else f"write it like {EXAMPLES}"
            raise InputError(f"cannot read the rule {self.text!r}: expected {what}, but {there}; {hint}")
        return match

    def name(self, pattern: str, what: str) -> str:
        return next(part for part in self.need(pattern, what).groups() if part)

    def place(self) -> str | None:
        return self.name(_PLACE, "a checkpoint") if self.take("@") else None
