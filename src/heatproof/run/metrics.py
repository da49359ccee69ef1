"""Metrics as a study names them: registered names with options, and families."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from heatproof.errors import InputError, UnknownNameError
from heatproof.registry import REPEATS, Metric, call_text, check_options, metrics, parse_call

OFFERED = frozenset({"maps", "labels", "probabilities", "boxes", "masks", "model", "images"})
STORED = frozenset({"maps", "labels", "probabilities"})  # of all images of a checkpoint
RESERVED = ("progress", "batch_size", "layer", "boxes", "masks", "targets", "seed", "logits",
            "same_images", "changed_images", "then", "known")  # fmt: skip


@dataclass(frozen=True)
class MetricRequest:
    """A metric with its options; `text` is its name in rows and units."""

    text: str
    entry: Metric
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def group(self) -> bool:
        """Whether it is about all images of a checkpoint, or of its classes."""
        return self.entry.level != "image"

    @property
    def runs_network(self) -> bool:
        """Whether it is a checkpoint metric that runs the network on images it selects (ImagePool)."""
        return self.group and "model" in self.entry.needs and self.entry.call is not None

    @property
    def every_class(self) -> bool:
        """Whether it reads the stored probabilities of all classes."""
        values = dict(self.options).values()
        reads = self.group and "probabilities" in self.entry.needs and not self.entry.own_class
        return reads or "adaptive" in values or "calibrated" in values

    @property
    def anchor(self) -> str:
        """The checkpoint whose predictions it also reads; "" if none."""
        return str(dict(self.options).get("anchor") or "")

    @property
    def per_method(self) -> bool:
        """Whether there is a value for each method rather than one for the classifier."""
        return not self.group or self.runs_network or "maps" in self.entry.needs

    def named(self, part: str) -> str:
        """The name of a further number of the same metric.

        >>> read_metrics(["randomisation(depths=3)"])[0].named("ssim")
        'randomisation_ssim(depths=3)'
        """
        return f"{self.entry.name}_{part}{self.text[len(self.entry.name) :]}"


def read_metrics(texts: Sequence[str]) -> list[MetricRequest]:
    """Requests in the order given, with families expanded and aliases replaced by registered names."""
    requests: dict[str, MetricRequest] = {}
    for text in texts:
        name, options = parse_call(text)
        bundles = _bundles()
        try:
            entries = bundles.get(name) or [metrics.get(name)]
        except UnknownNameError:
            raise UnknownNameError("metric", name, [*metrics.names(), *bundles]) from None
        for entry in entries:
            _refuse(entry, options)
            text = call_text(entry.name, options)
            if text in requests:
                raise InputError(f"metrics name {text} twice; leave one out")
            requests[text] = MetricRequest(text, entry, tuple(options.items()))
    return list(requests.values())


def in_a_run(name: str) -> bool:
    """Whether a study may name this metric without options."""
    try:
        return bool(read_metrics([name]))
    except InputError:
        return False


def _bundles() -> dict[str, list[Metric]]:
    """Metrics by the name of their bundle, in the order of their file."""
    bundles: dict[str, list[Metric]] = {}
    for entry in metrics.as_registered():
        if entry.bundle:
            bundles.setdefault(entry.bundle, []).append(entry)
    return bundles


def _refuse(entry: Metric, options: dict[str, Any]) -> None:
    for option in options:
        if option in RESERVED:
            raise InputError(f"{entry.name}: {option} is set by the run itself; leave it out")
    check_options(entry, options)
    if not isinstance(options.get("anchor", ""), str):
        raise InputError(
            f"{entry.name}: anchor is the name of a checkpoint, or 'first'; got {options['anchor']!r}"
        )
    refusal = f"a run cannot compute {entry.name}"
    if entry.not_in_a_run:
        raise InputError(f"{refusal}: {entry.not_in_a_run}")
    if entry.compares_checkpoints:  # the run makes its pairs
        return
    if missing := sorted(set(entry.needs) - OFFERED):
        raise InputError(f"{refusal}, which needs {', '.join(missing)}; call hp.metrics for it")
    if MetricRequest(entry.name, entry).runs_network:
        return
    if entry.level != "image" and (missing := sorted(set(entry.needs) - STORED)):
        raise InputError(
            f"{refusal}: at level {entry.level!r} it has maps, labels and "
            f"probabilities, but no {', '.join(missing)}; register the metric with level='image'"
        )


def repetitions(function: Callable[..., Any], options: dict[str, Any]) -> int:
    """Number of passes that a method or metric repeats, from its options."""
    defaults = {name: p.default for name, p in inspect.signature(function).parameters.items()}
    counts = [(defaults | options).get(name) for name in REPEATS]
    return max([n for n in counts if isinstance(n, int)], default=1)
