"""CUDA graphs of the shared pass together with the methods that read nothing else.

Seven CAMs are about a hundred small kernels, which take Python longer to launch than the GPU to run. A
repeated request is replayed at once; while the GPU works, the network is compared with the recorded one
(graphs.py).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from heatproof.models.capture import NotAPicture, choose_layers, pass_for, traced
from heatproof.models.graphs import Graphs
from heatproof.models.model import Model
from heatproof.models.queue import graphs_of
from heatproof.types import Trace

if TYPE_CHECKING:
    from heatproof.explain.api import MethodCall


class Recorded(NamedTuple):
    """Outputs of a pass and of its methods."""

    logits: Tensor
    targets: Tensor
    values: list[Tensor]  # by method
    dead: list[Tensor | None]  # by method


def replayed(
    model: Model, images: Tensor, calls: Sequence[MethodCall], targets: Any, layer: Any
) -> Recorded | None:
    """The result of a repeated request; None if it is new, or the network has changed."""
    graphs: Graphs | None = model.facts.graphs
    if graphs is None or graphs.reason or not _recordable(calls):
        return None
    request = _request(model, images, calls, targets, layer)
    if request not in graphs.asked:
        return None
    try:
        replay = graphs.guess(request, _inputs(model, images, targets), lambda: _key(model, request))
        return None if replay is None else _copied(replay)
    except torch.OutOfMemoryError:
        return None  # the queue makes the pass, and halves it


def recorded(
    model: Model,
    images: Tensor,
    calls: Sequence[MethodCall],
    targets: Any,
    layer: Any,
    dead_of: Callable[[Trace], list[Tensor | None]],
) -> Recorded | None:
    """Run the pass with its methods, and record it the third time, inside `frozen_eval`.

    Returns None before the first pass, and if nothing is recorded.
    """
    graphs = graphs_of(model)
    if graphs is None or graphs.reason or not _recordable(calls) or model.facts.columns is None:
        return None
    needs = frozenset().union(*(call.entry.needs for call in calls))
    layers = choose_layers(model, images, needs, layer)
    shared = pass_for(model, images, needs, layers)

    def whole(images: Tensor, chosen: Tensor | None = None) -> Recorded:
        with torch.inference_mode(False):
            inputs = model.ready(images)
            passed = shared(inputs, model.predicted if chosen is None else lambda _: chosen)
        trace = traced(shared, passed, images, inputs, layers, needs, None, 0)
        with torch.no_grad():
            values = [
                call.entry.function(trace, **call.options).detach().float().contiguous() for call in calls
            ]
            return Recorded(trace.logits, passed.chosen, values, dead_of(trace))

    request = _request(model, images, calls, targets, layer)
    reads = [*model.module.parameters(), *model.module.buffers()]
    inputs, weights = _inputs(model, images, targets), [weight.detach() for weight in reads]
    try:
        return _copied(graphs.run(_key(model, request), whole, inputs, request=request, reads=weights))
    except NotAPicture:  # the layer was a guess, or is named wrongly: capture() knows what to do
        return None


def _recordable(calls: Sequence[MethodCall]) -> bool:
    return all(call.entry.trace_only for call in calls)


def _request(model: Model, images: Tensor, calls: Sequence[MethodCall], targets: Any, layer: Any) -> Hashable:
    """A key of the request, without the state of the network."""
    texts = tuple(call.text for call in calls), layer if isinstance(layer, str | None) else tuple(layer)
    form = images.shape, images.dtype, images.stride(), targets is None
    return texts, form, model.device, model.precision, model.layer, model.scales


def _key(model: Model, request: Hashable) -> Hashable:
    _, fusion = model.facts.fusion or (None, None)
    graphs: Graphs = model.facts.graphs
    return request, graphs.state(model.module), fusion


def _inputs(model: Model, images: Tensor, targets: Any) -> list[Tensor]:
    if targets is None:
        return [images]
    return [
        images,
        model.check_targets(targets, torch.empty(len(images), model.facts.columns or 0, device=model.device)),
    ]


def _copied(recording: Recorded) -> Recorded:
    """Clones: the next pass overwrites the memory of a graph."""
    copied: Recorded = tree_map_only(Tensor, Tensor.clone, recording)
    return copied
