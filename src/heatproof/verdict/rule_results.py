"""What came of a rule of the gate: whether it holds, and every number or alarm that decided it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from heatproof.verdict.alarms import Alarm


class RuleLine(NamedTuple):
    """One thing that decided a rule, as texts; "" where there is nothing to say."""

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
    n: int  # images behind it
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
    reasons: tuple[str, ...] = ()  # why it fails where no number says so
    n: int = 0  # the fewest images that it was decided by

    @property
    def lines(self) -> list[RuleLine]:
        """All that breaks the rule, or what came nearest to it."""
        n = str(self.n)
        lines = [
            RuleLine("", n, f"{a.where} / {a.checkpoint}", f"{a.name}: {a.sentence}") for a in self.alarms
        ]
        lines += [RuleLine("", n, "", reason) for reason in self.reasons]
        values = [v for v in self.values if v.holds == self.holds]
        shown = values[:1] if self.holds else values
        lines += [RuleLine(_number(v.value), str(v.n), v.where, v.reason) for v in shown]
        return lines or [RuleLine("", n, "", "")]

    @property
    def sentence(self) -> str:
        """The rule, whether it holds, and what decided it."""
        return f"{self.rule}: {'holds' if self.holds else 'does not hold'}, {'; '.join(map(str, self.lines))}"


def _number(value: float) -> str:
    return "not defined" if math.isnan(value) else f"{value:.4g}"
