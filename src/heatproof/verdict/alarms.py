"""Alarms: explanations that fail while AUC still holds (elangovan2026cscore); docs/alarms.md has the reasons.

Judged at every checkpoint t from what was known up to t, in a run of at least two checkpoints:

    1 gold-list collapse     a class's gold list is nearly empty: |G_c| < max(2, N_c / 10), and |G_c| / N_c is
                             surely below 1/2; and it was not so before, or the model is sure of most other
                             images, here and at the checkpoint before (if there is one)
    2 attribution collapse   a method's C, or that of a class, is surely below a tenth of its own best so far;
                             or a class's maps (every class's: the method's) are, surely, all zeros in more
                             than half of the cases
    3 class masking          a class's C is surely below half of the C over all classes

each only while AUC holds: it is at least 0.75 and not below its best so far by more than sampling error
(auc_falls). "Surely": the nearer end of the 95 % interval is beyond the threshold, exact binomial
(clopper1934binomial) for counts, bootstrap for C; numbers from a published page have no interval and count as
they are. "Before" and "so far" mean checkpoints at which AUC held and, for a class, at which it had a list.

A class without a gold list is not judged by 2 and 3; a class with an alarm of 2, or of a method with one, not
by 3. If AUC is not known, 1 is not judged. If an image may have several labels, each is judged by its own
AUC, and "the other images" are those without it; the method as a whole is judged by the mean AUC.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from scipy.special import bdtrc

from heatproof.errors import InputError
from heatproof.metrics.results import PerClass
from heatproof.verdict.trajectory import CheckpointState, Trajectory, auc_falls

NAMES = {1: "gold-list collapse", 2: "attribution collapse", 3: "class masking"}
Severity = Literal["warning", "critical"]


@dataclass(frozen=True)
class Thresholds:
    """Thresholds of the alarms; docs/alarms.md gives the reason for each.

    Args:
        near_zero: share of a class, or of the best C-Score, below which lists and scores count as collapsed.
        far_below: share of the overall C-Score below which a class is masked.
        most: share of blank maps, or of images outside the gold list, that counts as most.
        high_auc, fewest, confidence: least AUC, least maps of a score, and level of the intervals.

    Example:
        >>> Thresholds(high_auc=0.9).high_auc
        0.9
    """

    near_zero: float = 0.1
    far_below: float = 0.5
    most: float = 0.5
    high_auc: float = 0.75
    fewest: int = 5
    confidence: float = 0.95


@dataclass(frozen=True)
class Alarm:
    """An alarm at one checkpoint: mechanism, severity, numbers, and a sentence with the remedy.

    Args:
        mechanism, severity: number of the mechanism, and "warning" or "critical".
        checkpoint, epoch, method, label, class_name: where the alarm is raised; None: everywhere.
        evidence, sentence: the numbers, and what is wrong and what to do.
        auc_tells_at: the first later checkpoint at which AUC has fallen.

    Example:
        >>> alarm = Alarm(1, "epoch05", 5, "gradcam", 0, "cat", "warning", {}, "the C-Score fell", None)
        >>> alarm.where
        'gradcam / cat'
    """

    mechanism: int
    checkpoint: str
    epoch: int | None
    method: str | None
    label: int | None
    class_name: str | None
    severity: Severity
    evidence: Mapping[str, float]
    sentence: str
    auc_tells_at: str | None

    @property
    def name(self) -> str:
        return NAMES[self.mechanism]

    def __str__(self) -> str:
        return f"{self.name} ({self.severity}): {self.sentence}"

    @property
    def where(self) -> str:
        """Method and class, as far as the alarm is about one."""
        return " / ".join(part for part in (self.method, self.class_name) if part) or "all"


def read_mechanisms(stop_on: str | int | Sequence[str | int]) -> frozenset[int]:
    """Mechanisms by number or name.

    >>> sorted(read_mechanisms("any")), sorted(read_mechanisms(["class masking", 1]))
    ([1, 2, 3], [1, 3])
    """
    if stop_on == "any":
        return frozenset(NAMES)
    numbers: dict[str | int, int] = {name: number for number, name in NAMES.items()}
    numbers |= {number: number for number in NAMES}
    mechanisms = [stop_on] if isinstance(stop_on, (str, int)) else list(stop_on)
    for mechanism in mechanisms:
        if mechanism not in numbers:
            names = ", ".join(NAMES.values())
            raise InputError(f"stop_on: there is no mechanism {mechanism!r}; name 'any', {names}")
    return frozenset(numbers[mechanism] for mechanism in mechanisms)


def find_alarms(trajectory: Trajectory, thresholds: Thresholds = Thresholds()) -> list[Alarm]:
    """All alarms of a training run, in the order of its checkpoints; none for fewer than two checkpoints.

    Args:
        trajectory: the checkpoints.
        thresholds: of the alarms.

    Example:
        >>> find_alarms(Trajectory(()))
        []
    """
    if len(trajectory) < 2:
        return []
    labels = {c for checkpoint in trajectory for c in checkpoint.labels}
    fallen = {c: auc_falls(trajectory, thresholds.confidence, c) for c in (None, *labels)}
    judges = (_CheckpointJudge(trajectory, k, thresholds, fallen) for k in range(len(trajectory)))
    return [alarm for judge in judges for alarm in judge.alarms()]


def surely_above(hits: int, n: int, share: float, confidence: float = 0.95) -> bool:
    """Whether the exact binomial interval of hits / n lies above a share.

    >>> surely_above(60, 100, 0.5), surely_above(61, 100, 0.5)
    (False, True)
    """
    if hits <= share * n or share <= 0:
        return hits > 0 and share <= 0
    return bool(bdtrc(hits - 1, n, share) < (1 - confidence) / 2)


@dataclass(frozen=True)
class _CheckpointJudge:
    """Finds the alarms of checkpoint k from the checkpoints up to k."""

    run: Trajectory
    k: int
    thresholds: Thresholds
    fallen: Mapping[int | None, list[bool]]  # by label; None: AUC over all of them

    @property
    def now(self) -> CheckpointState:
        return self.run.checkpoints[self.k]

    def alarms(self) -> Iterator[Alarm]:
        hold = {c for c in self.now.classes if self._holds(self.k, c)}
        empty = {c for c in self.now.classes if self._nearly_empty(self.k, c)}
        for c in sorted(empty & hold):
            if not math.isnan(self._at(self.k, c).auc) and (self._had_list(c) or self._stays_empty(c)):
                yield self._gold_list(c)
        for method, state in self.now.methods.items():
            listed = {
                c: score
                for c, score in state.classes.items()
                if c in hold - empty and score.n >= self.thresholds.fewest and not math.isnan(score.value)
            }
            yield from self._method(method, state, listed)

    def _method(self, method: str, state: PerClass, listed: Mapping[int, PerClass]) -> Iterator[Alarm]:
        """Collapse of the method first, then of single classes, then masking."""
        # One alarm per cause: a collapse of the method explains those of its classes, so they are not
        # repeated.
        blank = {c for c, score in listed.items() if self._mostly_blank(score)}
        before = self._fallen_from(method, None, state.overall)
        if before and listed and self._holds(self.k):
            yield self._attribution(method, state.overall, None, before)
        elif blank and len(blank) == len(listed):
            yield self._attribution(method, state.overall, None, None)
        else:
            limit = self.thresholds.far_below * state.overall.value
            for c, score in sorted(listed.items()):
                past = None if c in blank else self._fallen_from(method, c, score)
                if c in blank or past:
                    yield self._attribution(method, score, c, past)
                elif len(listed) > 1 and _high(score) < limit:
                    yield self._masking(method, state.overall, c, score)

    def _at(self, k: int, c: int | None) -> CheckpointState:
        """A checkpoint, reduced to one label if it has its own AUC."""
        state = self.run.checkpoints[k]
        return state.of(c) if c is not None and c in state.labels else state

    def _holds(self, k: int, c: int | None = None) -> bool:
        """Whether AUC, that of the label if it has its own, is high and has not fallen, or is unknown."""
        fallen = self.fallen[c if c in self.run.checkpoints[k].labels else None]
        return not fallen[k] and not self._at(k, c).auc < self.thresholds.high_auc

    def _nearly_empty(self, k: int, c: int) -> bool:
        state, t = self.run.checkpoints[k].classes[c], self.thresholds
        # At least 2, since a C-Score needs a pair of maps; the binomial test guards against small classes.
        short = state.total > 0 and state.gold < max(2, t.near_zero * state.total)
        return short and surely_above(state.total - state.gold, state.total, 1 - t.most, t.confidence)

    def _had_list(self, c: int) -> bool:
        """Whether the class had a gold list before."""
        past = (k for k in range(self.k) if c in self.run.checkpoints[k].classes and self._holds(k, c))
        return any(not self._nearly_empty(k, c) for k in past)

    def _stays_empty(self, c: int) -> bool:
        """Whether the model is confident about most other images, here and one checkpoint before."""
        for k in range(max(self.k - 1, 0), self.k + 1):
            classes = self._at(k, c).classes
            gold = sum(state.gold for other, state in classes.items() if other != c)
            total = sum(state.total for other, state in classes.items() if other != c)
            sure = surely_above(gold, total, self.thresholds.most, self.thresholds.confidence)
            if not (sure and c in classes and self._holds(k, c) and self._nearly_empty(k, c)):
                return False
        return True

    def _mostly_blank(self, score: PerClass) -> bool:
        if math.isnan(score.degenerate):
            return False
        hits = round(score.degenerate * score.n)
        return surely_above(hits, score.n, self.thresholds.most, self.thresholds.confidence)

    def _fallen_from(self, method: str, c: int | None, now: PerClass) -> tuple[str, float] | None:
        """Checkpoint and value of the best C so far (of a class or overall), if C has collapsed since."""
        best: tuple[str, float] = "", -1
        for k, checkpoint in enumerate(self.run.checkpoints[: self.k]):
            state = checkpoint.methods.get(method)
            score = None if state is None else state.overall if c is None else state.classes.get(c)
            if score is not None and score.n >= self.thresholds.fewest and self._holds(k, c):
                best = (checkpoint.name, score.value) if score.value > best[1] else best
        near_zero = self.thresholds.near_zero
        return best if best[1] >= near_zero and _high(now) < near_zero * best[1] else None

    def _gold_list(self, c: int) -> Alarm:
        state, name = self.now.classes[c], self.run.class_name(c)
        sentence = (
            f"At {self.now.name} the network classifies only {state.gold} of {state.total} images of {name} "
            f"correctly and confidently, while {self._auc(c)}: the ranking is intact but the threshold no "
            f"longer fits, so maps of this class cannot be judged. Recalibrate the output (or move the "
            f"threshold), or use another checkpoint."
        )
        share = state.gold / state.total
        evidence = {"gold": float(state.gold), "images": float(state.total), "share": share}
        return self._alarm(1, None, c, "critical" if state.gold < 2 else "warning", evidence, sentence)

    def _attribution(
        self, method: str, score: PerClass, c: int | None, before: tuple[str, float] | None
    ) -> Alarm:
        whose = f"the {method} maps" + ("" if c is None else f" of {self.run.class_name(c)}")
        evidence = {"cscore": score.value, "n": float(score.n), "degenerate": score.degenerate}
        if before:
            what = f"no longer agree: C-Score {score.value:.3f}, after {before[1]:.3f} at {before[0]}"
            evidence["best_before"] = before[1]
        else:
            what = f"are blank: {score.degenerate:.0%} of {score.n}"
        sentence = (
            f"At {self.now.name} {whose} {what}, while {self._auc(c)}. Do not show these maps; use an "
            f"earlier checkpoint, and check the activations of the explained layer: AUC may fall next."
        )
        return self._alarm(2, method, c, "critical", evidence, sentence)

    def _masking(self, method: str, overall: PerClass, c: int, score: PerClass) -> Alarm:
        name = self.run.class_name(c)
        sentence = (
            f"At {self.now.name} the {method} C-Score over all classes, {overall.value:.3f}, hides {name}: "
            f"{score.value:.3f} over {score.n} images, while {self._auc(c)}. Report the score by class. It "
            f"is also low if the evidence of {name} is at a different position in every image: check its "
            f"maps before you use or reject them."
        )
        evidence = {"cscore": score.value, "n": float(score.n), "overall": overall.value}
        evidence["share"] = score.value / overall.value
        nothing = score.value < self.thresholds.near_zero * overall.value
        return self._alarm(3, method, c, "critical" if nothing else "warning", evidence, sentence)

    def _auc(self, c: int | None) -> str:
        auc = self._at(self.k, c).auc
        return "AUC is not known" if math.isnan(auc) else f"AUC holds at {auc:.3f}"

    def _alarm(
        self, mechanism: int, method: str | None, c: int | None, severity: Severity,
        evidence: Mapping[str, float], sentence: str,
    ) -> Alarm:  # fmt: skip
        now, name = self.now, None if c is None else self.run.class_name(c)
        fallen = self.fallen[c if c in now.labels else None]
        later = range(self.k + 1, len(self.run))
        tells = next((self.run.checkpoints[k].name for k in later if fallen[k]), None)
        evidence = {**evidence, "auc": self._at(self.k, c).auc, "accuracy": now.accuracy}
        return Alarm(mechanism, now.name, now.epoch, method, c, name, severity, evidence, sentence, tells)


def _high(score: PerClass) -> float:
    """The upper end of the score's interval; the score itself if there is none."""
    return score.value if math.isnan(score.interval[1]) else score.interval[1]
