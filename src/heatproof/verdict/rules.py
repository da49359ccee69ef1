"""The syntax of the gate's rules, such as "cscore.pneumonia >= 0.5"; docs/alarms.md lists all forms."""

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
