"""Results of the C-Score; without torch, for all who read a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from heatproof.metrics.stats import Interval
from heatproof.show import plain_table

NAN = float("nan")


@dataclass(frozen=True)
class CScore:
    """The C-Score of one class, or of all of them together."""

    value: float
    n: int  # images in the gold list
    degenerate: float  # share of them whose map is all zeros
    interval: Interval = (NAN, NAN)
    reason: str = ""
    sampled: bool = False

    def _repr_html_(self) -> str:
        return _html({"C-Score": self})


@dataclass(frozen=True)
class CScores:
    """Per class, and the support-weighted global."""

    classes: Mapping[int, CScore]
    overall: CScore
    thresholds: Mapping[int, float]  # what the gold lists were made with; NaN where anchored

    def _repr_html_(self) -> str:
        return _html({f"class {c}": score for c, score in self.classes.items()} | {"all": self.overall})


def _html(scores: Mapping[str, CScore]) -> str:
    head = ("", "C-Score", "95 % from", "to", "images", "blank maps", "why not")
    return plain_table(
        head, ((k, s.value, *s.interval, s.n, s.degenerate, s.reason) for k, s in scores.items())
    )
