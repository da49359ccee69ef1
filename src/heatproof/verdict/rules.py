"""Rules of the gate as text: what they may say.

cscore >= 0.4                        over all classes, for every method
cscore.pneumonia >= 0.5              of one class (by name or number), for every method
cscore.gradcam.pneumonia > .5        of one method and class, in either order
any(cscore.pneumonia >= 0.5)         it is enough that one method keeps it
auc >= 0.9, insertion.gradcam >= 0.3, bl.gradcam <= 0.2    any metric of the run; the mean over its images
auc@epoch05 >= 0.8, auc@5 >= 0.8     at a checkpoint, by name or epoch; @last (when nothing is said), @all
no-alarms, no-alarms(1), no-alarms@last    see alarms.py; of any mechanism or of some, at any checkpoint
follows, follows gradcam             the verdict: every method's maps follow the network, or this one's
looks-there, looks-there pneumonia   the network looks where it should, on every class or on this one
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from heatproof.errors import InputError
from heatproof.registry import key_of
from heatproof.store.facts import MethodFacts, MetricFacts
from heatproof.verdict.alarms import NAMES

Registered = Callable[[str], MetricFacts | MethodFacts | None]

LAST, ALL = "last", "all"
FOLLOWS, LOOKS_THERE = "follows", "looks-there"
QUESTIONS = (FOLLOWS, LOOKS_THERE, "no-alarms")  # rules without a comparison
MIN_USABLE = 0.95  # of the images that were planned
MIN_N = 30  # images behind a number, unless the gate is told otherwise; the verdict needs as many
EXAMPLES = "cscore.pneumonia >= 0.5, any(cscore >= 0.4), auc@last >= 0.9 or no-alarms(1)"


@dataclass(frozen=True)
class Rule:
    """A rule that was read: a comparison, no alarms of these mechanisms, or a question of the verdict."""

    text: str
    metric: str = ""
    parts: tuple[str, ...] = ()  # methods and classes
    operator: str = ">="
    limit: float = 0.0
    checkpoint: str = LAST
    any: bool = False
    mechanisms: frozenset[int] = frozenset()
    question: str = ""  # of the verdict: follows or looks-there


_NAME = r"""(?:"([^"]+)"|'([^']+)'|([^\s.()<>=@"']+(?:\([^()]*\))?))"""
_PLACE = r"""(?:"([^"]+)"|'([^']+)'|([^\s<>=()"']+))"""
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"


def read_rule(text: str) -> Rule:
    """A rule from its text, or one sentence that says where it cannot be read.

    >>> read_rule("cscore.gradcam.'no finding' >= .5").parts
    ('gradcam', 'no finding')
    """
    reader = _Reader(text)
    if reader.take(r"no-alarms?(?![\w.])"):
        numbers = reader.take(r"\(\s*([1-3](?:\s*,\s*[1-3])*)\s*\)")
        chosen = frozenset(map(int, re.findall(r"\d", numbers[1]))) if numbers else frozenset(NAMES)
        at = reader.place() or ALL
        reader.end("the end, or mechanisms such as (1) or (2, 3)")
        return Rule(text, checkpoint=at, mechanisms=chosen)
    if question := reader.take(rf"({FOLLOWS}|{LOOKS_THERE})(?![\w.-])"):
        named = reader.take(_NAME)
        at = reader.place() or LAST
        reader.end("the end")
        parts = tuple(filter(None, named.groups())) if named else ()
        return Rule(text, parts=parts, checkpoint=at, question=question[1])
    one_is_enough = reader.take(r"any\s*\(") is not None
    metric = reader.name("a metric")
    of = []
    while reader.take(r"\."):
        of.append(reader.name("a method or a class"))
    place = reader.place()
    sign = reader.need(r"(>=|<=|==|>|<)", "one of >= <= > < ==")[1]
    limit = float(reader.need(_NUMBER, "a number")[0])
    place = place or reader.place() or LAST
    if one_is_enough:
        reader.need(r"\)", "a closing bracket")
    reader.end("the end")
    return Rule(text, metric, tuple(of), sign, limit, place, one_is_enough)


def matching(given: str, stored: Sequence[str], registered: Registered) -> list[str]:
    """Stored names that are meant: the very same, or any variant where no option is given.

    registered: returns the facts of a name, Facts.metric or Facts.method.
    """
    exact = [name for name in stored if key_of(name) == key_of(given)]
    if exact or "(" in given:
        return exact
    meant = _registered(given, registered)
    return [s for s in stored if " ~ " not in s and _registered(s.partition("(")[0], registered) == meant]


def _registered(name: str, registered: Registered) -> str:
    facts = registered(name)
    return key_of(facts.name if facts else name)


class _Reader:
    """Takes a text apart from left to right."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def take(self, pattern: str) -> re.Match[str] | None:
        found = re.compile(r"\s*" + pattern).match(self.text, self.at)
        if found:
            self.at = found.end()
            return re.match(pattern, found[0].lstrip())
        return None

    def need(self, pattern: str, what: str) -> re.Match[str]:
        found = self.take(pattern)
        if found is None:
            rest = self.text[self.at :].strip()
            there = f"{rest!r} stands there" if rest else "the rule ends there"
            word = re.match(r"\s*([\w-]+)(?=[\s@]|$)", self.text)
            near = difflib.get_close_matches(word[1].lower(), QUESTIONS, n=1) if word else []
            near = [question for question in near if word and question != word[1].lower()]
            hint = f"did you mean {near[0]!r}?" if near else f"write it like {EXAMPLES}"
            raise InputError(f"cannot read the rule {self.text!r}: expected {what}, but {there}; {hint}")
        return found

    def name(self, what: str) -> str:
        return next(part for part in self.need(_NAME, what).groups() if part)

    def place(self) -> str | None:
        if not self.take("@"):
            return None
        return next(part for part in self.need(_PLACE, "a checkpoint").groups() if part)

    def end(self, what: str) -> None:
        self.need(r"$", what)
