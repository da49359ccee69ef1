"""What a method or a metric costs on this machine: measured on a picture or two, with short repetitions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from heatproof.errors import HeatproofError
from heatproof.explain.floors import is_floor
from heatproof.registry import metrics
from heatproof.run.estimate import CHEAP, Trials
from heatproof.run.plan import PER_MAP, Task
from heatproof.run.study import ResolvedStudy
from heatproof.run.worker import Worker
from heatproof.store import Manifest, RunFolder
from heatproof.studies.audit.settings import BATCH
from heatproof.types import Unit
from heatproof.verdict.follow import follow_metric

SHARE = 0.004  # of the audit, that one trial may be expected to take: there are many
PICTURES = BATCH  # a unit: what it costs once is spread over its pictures
OF_A_FLOOR = 0.4  # of a vote: its shadows under random weights are itself, which costs no pass
MetricGroup = tuple[str, ...]  # metrics that share their passes


class CostModel:
    """Seconds per picture at the last checkpoint, each part measured once, when it is asked for.

    A picture costs its decoding; each method its own passes, once and under every draw of random weights;
    each lot of metrics its passes for every method.
    """

    def __init__(
        self,
        opened: ResolvedStudy,
        wanted: Sequence[str],
        vote: MetricGroup,
        seconds: float = math.inf,
        trying: Callable[[str], object] = lambda what: None,
    ) -> None:
        """wanted: of these, the first that the network takes is the one that metrics are timed with.

        seconds: of the whole audit, of which trials take a small share. trying: told what is timed next.
        """
        self.opened, self.vote, self.patience = opened, vote, min(CHEAP, SHARE * seconds)
        self.trying = trying
        self.worker = Worker(opened, RunFolder(Path(), Manifest(opened.config)))
        self._methods: dict[str, float] = {}
        self._lots: dict[MetricGroup, float] = {}
        self.first = self._taken(wanted)

    def _taken(self, wanted: Sequence[str]) -> str:
        for method in wanted[:-1]:
            with suppress(HeatproofError):
                self.method(method)
                return method
        self.method(wanted[-1])
        return wanted[-1]

    def picture(self, methods: Sequence[str], lots: Sequence[MetricGroup]) -> float:
        """With all of these, and the vote."""
        own = sum(self.method(method) for method in methods)
        votes = sum(OF_A_FLOOR if is_floor(method) else 1.0 for method in methods)
        others = len(methods) * sum(self.lot(lot) for lot in lots)
        return self.decoding + own + votes * self.lot(self.vote) + others

    def method(self, method: str) -> float:
        """Its own passes, those under random weights too; what the network refuses raises here."""
        if method not in self._methods:
            self._methods[method] = max(0.0, self._timed(method) - self.decoding)
        draws = 0 if is_floor(method) else int(metrics.get(follow_metric().name).options["draws"])
        return (1 + draws) * self._methods[method]

    def lot(self, lot: MetricGroup) -> float:
        """For one method."""
        if lot not in self._lots:
            own = self.method(self.first)
            with_maps = own if lot == self.vote else self._methods[self.first]
            self._lots[lot] = max(0.0, self._timed(self.first, lot) - self.decoding - with_maps)
        return self._lots[lot]

    @cached_property
    def decoding(self) -> float:
        return self._trials("random", ()).decoding

    def _timed(self, method: str, lot: MetricGroup = ()) -> float:
        return self._trials(method, lot).per_image(warm=lot == self.vote).seconds

    def _trials(self, method: str, lot: MetricGroup) -> Trials:
        self.trying(", ".join(lot) or method)
        checkpoint, count = self.opened.checkpoints[-1].name, min(PICTURES, len(self.opened.source))
        unit = Unit(checkpoint, (0, count), (method,), (*PER_MAP, *lot), self.opened.study.run.seed)
        return Trials(self.worker, Task(unit, "explain"), lambda text: None, self.patience)
