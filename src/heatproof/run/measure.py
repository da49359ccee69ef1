"""What the metrics say about the maps of a unit: computed where the maps are, fetched in one transfer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from heatproof.errors import InputError
from heatproof.explain.sampling import uncertainty
from heatproof.metrics.kit import Cause, PerImage, blanked, finite
from heatproof.metrics.scene import BatchContext
from heatproof.registry import Metric
from heatproof.run.external_methods import in_order, runnable
from heatproof.run.metrics import MetricRequest, read_metrics
from heatproof.run.plan import ANSWERS, PER_MAP
from heatproof.timeline import span
from heatproof.types import Maps, spatial_dims

BESIDE = ("dead", "error", "passes")


@dataclass(frozen=True)
class MetricResults:
    """By method, on the device until they are fetched."""

    bad: dict[str, Tensor]  # "b" bool: maps that are not finite
    blank: dict[str, Maps]  # of each map, if asked for: its extremes, "b 1 2", and what stands BESIDE it, "b"
    found: list[tuple[MetricRequest, str, PerImage]]  # request, method, scores

    def tensors(self) -> Iterator[Tensor]:
        yield from self.bad.values()
        for maps in self.blank.values():
            yield from (maps.values, *_beside(maps).values())
        for _, _, scores in self.found:
            yield from (*scores.values(), *(cause.where for cause in scores.causes))

    def fetched(self, tensors: Iterator[Tensor]) -> MetricResults:
        """The same made of other tensors, in the order in which `tensors` gives them."""
        bad = {method: next(tensors) for method in self.bad}
        blank = {
            method: replace(maps, values=next(tensors), **_beside(maps, tensors))
            for method, maps in self.blank.items()
        }
        found = []
        for request, method, scores in self.found:
            values = {name: next(tensors) for name in scores}
            causes = [Cause(cause.sentence, next(tensors), cause.names) for cause in scores.causes]
            found.append((request, method, PerImage(values, causes)))
        return MetricResults(bad, blank, found)


def measure(metrics: Sequence[str], scene: BatchContext) -> MetricResults:
    """Every metric of the scene's maps; maps that are not finite are measured as zeros and named in `bad`."""
    bad = {method: ~finite(maps) for method, maps in scene.maps.items()}
    scene = replace(scene, maps={method: blanked(maps) for method, maps in scene.maps.items()})
    blank = {}
    if PER_MAP[0] in metrics:
        with span("metric", PER_MAP[0]):
            blank = {method: _extremes(maps) for method, maps in scene.maps.items()}
    requests = read_metrics([text for text in metrics if text not in (*ANSWERS, *PER_MAP)])
    # Metrics of annotated pictures have those on the host; the others run the network anyway.
    if any("model" not in request.entry.needs for request in requests):
        at_hand = replace(scene, maps={method: maps.to("cpu") for method, maps in scene.maps.items()})
    computed: dict[tuple[Any, ...], Mapping[str, PerImage]] = {}
    for request in requests:
        key = request.entry.function, request.options  # one call serves a whole family
        if key not in computed:
            with span("metric", request.entry.bundle or request.text):
                computed[key] = compute(request, scene if "model" in request.entry.needs else at_hand)
    found = [
        (request, method, scores)
        for request in requests
        for method, scores in computed[request.entry.function, request.options].items()
    ]
    return MetricResults(bad, blank, found)


def _extremes(maps: Maps) -> Maps:
    """The smallest and largest value of each map, as a map of two pixels: all that blankness asks for.

    Of its error, the part that says how far the strongest pixels may be off.
    """
    low, high = maps.values.amin(spatial_dims(maps.values)), maps.values.amax(spatial_dims(maps.values))
    error = None if maps.error is None else uncertainty(maps.values, maps.error.to(maps.values))
    return replace(maps, values=torch.stack([low, high], 1)[:, None], signed_values=None, error=error)


def _beside(maps: Maps, instead: Iterator[Tensor] | None = None) -> dict[str, Any]:
    there = {name: one for name in BESIDE if (one := getattr(maps, name)) is not None}
    return there if instead is None else {name: next(instead) for name in there}


def only_finite(maps: Maps) -> Maps:
    """The maps without those that cannot be stored."""
    good = finite(maps)
    return maps if good.all() else maps.take(good)


def compute(request: MetricRequest, scene: BatchContext) -> Mapping[str, PerImage]:
    """By method: what a metric's function says about every map."""
    entry, options = request.entry, dict(request.options)
    methods = runnable(request, list(scene.maps))
    whole = len(methods) == len(scene.maps)
    shown = scene if whole else replace(scene, maps={method: scene.maps[method] for method in methods})
    found: Mapping[str, PerImage] = {}
    if methods and entry.call:
        found = entry.call(entry.function, shown, options)
    elif methods:
        found = _by_name(entry, shown, options)
    return found if whole else in_order(found, request, scene.maps)


def _by_name(entry: Metric, scene: BatchContext, options: dict[str, Any]) -> dict[str, PerImage]:
    """Called once per method with what it needs, by name; returns "b" or a PerImage."""
    truth = scene.batch.truth
    offered = {
        "model": scene.model, "images": scene.batch.images, "labels": scene.batch.labels,
        "boxes": truth and truth.boxes, "masks": truth and truth.masks,
        "probabilities": scene.probabilities if "probabilities" in entry.needs else None,
    }  # fmt: skip
    found: dict[str, PerImage] = {}
    for method, maps in scene.maps.items():
        given = {name: maps if name == "maps" else offered[name] for name in entry.needs}
        found[method] = result = entry.function(**given, **options)
        if not isinstance(result, PerImage):
            found[method] = PerImage({entry.name: torch.as_tensor(result)})
        if any(len(values) != len(maps) for values in found[method].values()):
            raise InputError(f"{entry.name} must return one number per image, {len(maps)} here")
    return found


def on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors on the CPU: those that are elsewhere come in one transfer, whatever their types."""
    away = [tensor.detach() for tensor in tensors if not tensor.is_cpu]
    if not away:
        return list(tensors)
    with span("waiting", "device"):
        arrived = iter(taken_apart(joined(away).cpu(), away))
    return [tensor if tensor.is_cpu else next(arrived) for tensor in tensors]


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of all tensors in a row, those of the widest types first, so that each lies where it may."""
    parts = [tensors[i].contiguous().flatten().view(torch.uint8) for i in _widest_first(tensors)]
    return torch.cat(parts)


def taken_apart(together: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Undo `joined` for tensors of these shapes and types."""
    found: dict[int, Tensor] = {}
    start = 0
    for i in _widest_first(like):
        stop = start + like[i].numel() * like[i].element_size()
        found[i] = together[start:stop].view(like[i].dtype).view(like[i].shape)
        start = stop
    return [found[i] for i in range(len(like))]


def _widest_first(tensors: Sequence[Tensor]) -> list[int]:
    return sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())
