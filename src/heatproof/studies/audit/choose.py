"""What an audit computes, chosen by what network and pictures allow and by the time there is.

The ladder, taken rung by rung; a rung that does not fit is left out, and later ones are still tried. So what
goes first when time is short is what stands last here:

    the first method, `random`, and the test that the verdict rests on, on 32 pictures; a second method
    40 pictures; two more methods of one pass; floors; insertion and deletion
    up to 100 pictures
    further methods of one pass; randomisation, fragility; methods of many passes
    up to 1,000 pictures

Each line is a step of the run, and the run adds to what it has: after each step, what is left is chosen anew
by what the step really took. Methods that the network refuses, and metrics that the pictures cannot feed, are
left out with their reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from heatproof.errors import HeatproofError, InputError
from heatproof.explain.api import with_sufficient_repeats
from heatproof.explain.floors import is_floor
from heatproof.run.metrics import read_metrics
from heatproof.run.possible import Possible
from heatproof.run.progress import spell
from heatproof.run.study import ResolvedStudy
from heatproof.run.values import refuse_for_head
from heatproof.studies.audit.prices import CostModel, MetricGroup
from heatproof.studies.audit.settings import BATCH
from heatproof.verdict.follow import ENOUGH, follow_metric

FIRST = ("gradcam", "legrad", "gradient", "occlusion")  # the first of these that the network takes
CORE = ("layercam", "hirescam", "legrad", "attnlrp", "gradient")
MORE = ("gradcam++", "eigencam", "rollout", "lrp", "guided-backprop", "gradient-x-input")
DEAR = ("integrated-gradients", "occlusion", "lime", "rise(masks=1000)")
FLOORS = ("edges", "centre")  # beside `random`, which the verdict cannot do without
VOTE = (follow_metric().name, "untrained")  # which share the maps under random weights
CURVES = ("insertion(steps=20)", "deletion(steps=20)")
FURTHER = (("randomisation(depths=3)",), ("fragility",))
PASSLESS = ("cscore", "auc", "accuracy", "recall", "localise", "structure", "method_agreement")
LEAST, AT_EASE, SOME, MANY = 32, 40, 104, 1000  # pictures: some decide nothing, so a few more than enough
PICTURES = "pictures"  # the choice of how many
MARGIN = 0.8  # of the time that is left: what is measured on two pictures is not exact
ALMOST = 0.9
MOST_OFF = 20.0  # times that a step may be dearer or cheaper than it was expected to be
REPORT = 5.0  # seconds
FULL, TOO_LONG = "no time is left for it", "about "  # how reasons begin that more minutes help against


class Choice(NamedTuple):
    """One line of what was decided."""

    what: str
    taken: bool
    why: str


@dataclass(frozen=True)
class Selection:
    """What a study gets, in the order in which it came, and every decision behind it."""

    methods: tuple[str, ...]
    metrics: tuple[str, ...]
    pictures: int
    choices: tuple[Choice, ...] = ()

    @property
    def lots(self) -> list[MetricGroup]:
        """Metrics with passes of their own, beside the vote."""
        return [lot for lot in (CURVES, *FURTHER) if {*lot} <= {*self.metrics}]

    @property
    def asks(self) -> tuple[tuple[str, ...], tuple[str, ...], int]:
        """What it has a run do."""
        return self.methods, self.metrics, self.pictures

    @property
    def unhurried(self) -> list[str]:
        """What was left out for want of time alone."""
        return [one.what for one in self.choices if not one.taken and one.why.startswith((FULL, TOO_LONG))]

    def noting(self, what: str, taken: bool, why: str) -> Selection:
        """What was said of it before is forgotten."""
        before = (choice for choice in self.choices if choice.what != what)
        return replace(self, choices=(*before, Choice(what, taken, why)))


def in_minutes(count: float) -> str:
    """
    >>> in_minutes(1), in_minutes(2.5)
    ('1 minute', '2.5 minutes')
    """
    return f"{count:g} minute{'s' * (count != 1)}"


@dataclass
class BudgetPlanner:
    """Takes rungs while there is time. left: seconds at hand, asked again at every rung."""

    opened: ResolvedStudy
    prices: CostModel
    classes: int  # of the network
    left: Callable[[], float]
    minutes: float
    most: int = MANY  # pictures
    labels: bool = True  # whether the network has the classes of the pictures
    scale: float = 1.0  # seconds that a run took for each that was expected
    held: Selection | None = None  # what the run has already

    @property
    def checkpoints(self) -> int:
        return len(self.opened.checkpoints)

    def seconds(self, one: Selection) -> float:
        """That it takes from here."""
        return self.scale * (self._whole(one) - (self._whole(self.held) if self.held else 0.0))

    def _whole(self, one: Selection) -> float:
        return one.pictures * self.checkpoints * self.prices.picture(one.methods, one.lots)

    def took(self, step: Selection, seconds: float) -> None:
        """The run has done a step: what the next ones take is expected to be off by as much."""
        if (expected := self.seconds(step) / self.scale) > 0:
            self.scale = min(max(seconds / expected, 1 / MOST_OFF), MOST_OFF)
        self.held = step

    @property
    def affordable(self) -> float:
        return MARGIN * (self.left() - REPORT * max(1.0, self.scale))

    def full(self, one: Selection) -> bool:
        """Whether there is not even time to try what a further rung costs."""
        return self.seconds(one) > ALMOST * self.affordable

    def climb(self, wanted: Sequence[str]) -> list[Selection]:
        """What to have after each step from here; the last is all that fits, and says what was left out.

        wanted: methods that a person asked for, which are then the only ones.
        """
        start = self.held or self._must(wanted)
        if wanted:
            start = self._methods(start, wanted[1:], "asked for", must=True)
        else:
            start = self._methods(start, CORE, "one pass per picture", 2)
        small = self._pictures(start, AT_EASE)
        small = small if wanted else self._methods(small, CORE, "one pass per picture", 4)
        small = self._methods(small, FLOORS, "a floor: it never looks at the network")
        small = self._lot(small, CURVES)
        some = self._pictures(small, SOME)
        rich = some if wanted else self._methods(some, MORE, "one pass per picture")
        for lot in FURTHER:
            rich = self._lot(rich, lot)
        if not wanted:
            rich = self._methods(
                rich, list(with_sufficient_repeats(DEAR).values()), "many passes per picture"
            )
        last = self._told(self._pictures(rich, self.most))
        steps = [replace(step, choices=last.choices) for step in (start, small, some, rich, last)]
        before = [self.held, *steps[:-1]]
        new = [one for one, old in zip(steps, before, strict=True) if old is None or one.asks != old.asks]
        return new or [steps[-1]]

    def _must(self, wanted: Sequence[str]) -> Selection:
        """What the verdict cannot do without; refused where there is no time for it."""
        count = len(self.opened.source)
        free = list(self._passless())
        metrics = (*VOTE, *(one.what for one in free if one.taken))
        least = min(count, LEAST, self.most)
        start = Selection((self.prices.first, "random"), metrics, least, tuple(free))
        needed = self.seconds(start)
        if needed > self.affordable:
            enough = math.ceil((needed / MARGIN + REPORT + 60 * self.minutes - self.left()) / 60)
            raise InputError(
                f"{in_minutes(self.minutes)} is too short: {start.methods[0]} on {least} pictures"
                f"{f' at {self.checkpoints} checkpoints' * (self.checkpoints > 1)} takes about "
                f"{spell(needed)} here; allow {enough}, or take a smaller network or a faster device"
            )
        start = start.noting(start.methods[0], True, "asked for" if wanted else "the usual first map")
        start = start.noting("random", True, "the floor that the verdict holds maps against")
        return start.noting(", ".join(VOTE), True, "the verdict rests on it: maps against their own shadows")

    def _passless(self) -> Iterator[Choice]:
        """Metrics that run no network, each with what stands against it."""
        able = Possible(self.opened, self.classes, self.labels)
        for text in PASSLESS:
            why = able.why_not(text) or self._head_refuses(text)
            yield Choice(text, not why, why or "costs no pass")

    def _head_refuses(self, text: str) -> str:
        """Why this kind of output cannot feed a metric, or ''."""
        network = self.opened.model(self.opened.checkpoints[-1].name)
        try:
            refuse_for_head(read_metrics([text]), network.read)
        except HeatproofError as error:
            return str(error)
        return ""

    def _methods(
        self, chosen: Selection, names: Sequence[str], why: str, most: int = 99, must: bool = False
    ) -> Selection:
        for method in names:
            real = [m for m in chosen.methods if not is_floor(m)]
            if method in chosen.methods or len(real) >= most:
                continue
            if not must and self.full(chosen):
                chosen = chosen.noting(method, False, FULL)
                continue
            more = replace(chosen, methods=(*chosen.methods, method))
            try:
                cost = self.seconds(more)
            except HeatproofError as error:
                if must:
                    raise
                chosen = chosen.noting(method, False, str(error))
                continue
            if must or cost <= self.affordable:
                chosen = more.noting(method, True, why)
            else:
                chosen = chosen.noting(method, False, self._short(cost - self.seconds(chosen)))
        return chosen

    def _lot(self, chosen: Selection, lot: MetricGroup) -> Selection:
        more, named = replace(chosen, metrics=(*chosen.metrics, *lot)), ", ".join(lot)
        if lot in chosen.lots:
            return chosen
        if self.full(chosen):
            return chosen.noting(named, False, FULL)
        try:
            cost = self.seconds(more)
        except HeatproofError as error:
            return chosen.noting(named, False, str(error))
        if cost <= self.affordable:
            return more.noting(named, True, "beside the verdict, as information")
        return chosen.noting(named, False, self._short(cost - self.seconds(chosen)))

    def _pictures(self, chosen: Selection, most: int) -> Selection:
        """As many as there is time for, in whole units, to which more can be added later."""
        most = min(most, self.most, len(self.opened.source))
        each = self._whole(replace(chosen, pictures=1)) * self.scale
        more = (self.affordable - self.seconds(chosen)) / each if each else math.inf
        fits = most if chosen.pictures + more >= most else int(chosen.pictures + more) // BATCH * BATCH
        return replace(chosen, pictures=max(chosen.pictures, fits))

    def _short(self, more: float) -> str:
        return f"{TOO_LONG}{spell(more)} more, beyond {in_minutes(self.minutes)}"

    def _told(self, chosen: Selection) -> Selection:
        """How many pictures, and what so few of them cannot decide."""
        total, n = len(self.opened.source), chosen.pictures
        told = f"{n} of {total}"
        if n < ENOUGH:
            why = f"{told}: the verdict needs {ENOUGH}, so it will say undecided; add pictures"
        elif n < total:
            why = f"{told}, drawn from all, classes in proportion; more minutes take more of them"
        else:
            why = f"all {total} of them"
        return chosen.noting(PICTURES, True, why)
