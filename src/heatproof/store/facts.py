"""Facts of the metrics and methods of a run, stored in run.json so that reading a run needs no registry.

Run folders of heatproof 0.2 hold none; for those, and for configs that name no registered metric or method,
the registry is read instead, which imports torch.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from heatproof.errors import HeatproofError
from heatproof.registry import (
    FLOOR_CARD,
    REQUIRED,
    Card,
    Explainer,
    Metric,
    explainers,
    key_of,
    metrics,
    parse_call,
)


@dataclass(frozen=True)
class MetricFacts:
    """Facts of a metric that tables, reports and the verdict read; see registry.Metric."""

    name: str
    aliases: tuple[str, ...] = ()
    summary: str = ""
    title: str = ""
    family: str = "Other"
    level: str = "image"
    higher_is_better: bool | None = None
    bounds: tuple[float | None, float | None] = (None, None)  # None: unbounded
    parts: Mapping[str, str] = field(default_factory=dict)
    floors: tuple[str, ...] = ("random", "edges")
    judges: str = ""
    test: bool = False
    headline: bool = False
    cite: str = ""
    module: str = ""  # "" for a metric that is not registered

    @staticmethod
    def of(entry: Metric) -> MetricFacts:
        low, high = (bound if math.isfinite(bound) else None for bound in entry.bounds)
        return MetricFacts(
            entry.name, entry.aliases, entry.summary, entry.title, entry.family, entry.level,
            entry.higher_is_better, (low, high), dict(entry.parts), entry.floors, entry.question, entry.votes,
            entry.headline, entry.cite, entry.function.__module__,
        )  # fmt: skip

    @property
    def titles(self) -> dict[str, str]:
        """Titles by the names that rows have."""
        own = {self.name: self.title} if self.title else {}
        return own | {f"{self.name}_{part}": title for part, title in self.parts.items()}

    @property
    def limits(self) -> tuple[float, float]:
        low, high = self.bounds
        return -math.inf if low is None else low, math.inf if high is None else high


@dataclass(frozen=True)
class MethodFacts:
    """Facts of a method that tables, reports and the verdict read; see registry.Explainer."""

    name: str
    aliases: tuple[str, ...] = ()
    summary: str = ""
    options: str = ""  # with their defaults
    card: Card = field(default_factory=Card)
    cite: str = ""
    floor: bool = False  # whether it ignores the network

    @staticmethod
    def of(entry: Explainer, name: str = "") -> MethodFacts:
        """name: as in the config, if the entry of another package has a different one."""
        known = {key_of(text) for text in ("", entry.name, *entry.aliases)}
        aliases = (*entry.aliases, *([name] if key_of(name) not in known else []))
        options = ", ".join(f"{k}={v!r}" for k, v in entry.options.items() if v is not REQUIRED)
        floor = entry.card == FLOOR_CARD
        return MethodFacts(entry.name, aliases, entry.summary, options, entry.card, entry.cite, floor)


@dataclass(frozen=True)
class Facts:
    """Facts by metric and method; missing ones come from the registry."""

    metrics: tuple[MetricFacts, ...] = ()  # in the order of their files
    methods: tuple[MethodFacts, ...] = ()
    definitions: Mapping[str, str] = field(default_factory=dict)  # docstrings of the metrics' modules

    @staticmethod
    def of_config(config: Mapping[str, Any]) -> Facts:
        """Facts of the metrics and methods that a config names, and of all metrics that vote."""
        named = {key_of(name) for name in _names(config.get("metrics"))}
        registered = metrics.as_registered() if named else []
        held = [
            entry
            for entry in registered
            if named & {key_of(name) for name in (entry.name, entry.bundle, *entry.aliases) if name}
        ]
        described = [entry for entry in registered if entry in held or entry.votes] if held else []
        methods = (MethodFacts.of(entry, name) for name, entry in _methods(config.get("methods")))
        modules = dict.fromkeys(entry.function.__module__ for entry in held)
        return Facts(tuple(map(MetricFacts.of, described)), tuple(methods), _docstrings(modules))

    def metric(self, name: str) -> MetricFacts | None:
        if self.metrics:
            return self._metrics.get(key_of(name))
        entry = metrics.find(name)
        return None if entry is None else MetricFacts.of(entry)

    def metric_of(self, name: str) -> MetricFacts | None:
        """Facts of the metric of this name, or of the metric that it is a part of."""
        words = name.split("_")
        prefixes = ("_".join(words[:end]) for end in range(len(words), 0, -1))
        return next(filter(None, map(self.metric, prefixes)), None)

    @property
    def every_metric(self) -> Sequence[MetricFacts]:
        return self.metrics or [MetricFacts.of(entry) for entry in metrics.as_registered()]

    def method(self, text: str) -> MethodFacts | None:
        """Facts of a method, by its name with or without options."""
        try:
            name, _ = parse_call(text)
            if self.methods:
                return self._methods.get(key_of(name))
            return MethodFacts.of(explainers.get(name))
        except HeatproofError:
            return None

    def floor_name(self, method: str) -> str:
        """Name of the floor that a method is; "" for a method that reads the network."""
        facts = self.method(method)
        return facts.name if facts and facts.floor else ""

    def is_floor(self, method: str) -> bool:
        """Whether a method ignores the network."""
        return bool(self.floor_name(method))

    def definition(self, module: str) -> str:
        """The docstring of a module of metrics."""
        return self.definitions.get(module, "") if self.metrics else _docstrings([module]).get(module, "")

    @cached_property
    def _metrics(self) -> dict[str, MetricFacts]:
        return {key_of(name): facts for facts in self.metrics for name in (*facts.aliases, facts.name)}

    @cached_property
    def _methods(self) -> dict[str, MethodFacts]:
        return {key_of(name): facts for facts in self.methods for name in (*facts.aliases, facts.name)}


def _names(calls: Any) -> list[str]:
    """Names in a list of calls; empty for a list of anything else."""
    names = []
    for text in calls if isinstance(calls, list | tuple) else []:
        try:
            names.append(parse_call(text)[0])
        except (HeatproofError, AttributeError):
            continue
    return names


def _methods(calls: Any) -> Iterable[tuple[str, Explainer]]:
    for name in dict.fromkeys(_names(calls)):
        try:
            entry = explainers.find(name)
        except HeatproofError:
            continue
        if entry is not None:
            yield name, entry


def _docstrings(modules: Iterable[str]) -> dict[str, str]:
    """Docstrings of imported modules."""
    return {name: inspect.getdoc(sys.modules[name]) or "" for name in modules if name in sys.modules}
