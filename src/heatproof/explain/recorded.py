"""Methods that read nothing but the shared pass, recorded with it on a GPU: from image to maps in one launch.

Seven CAMs are a hundred small kernels, which take Python longer to launch than the GPU to run. A request that
came before is replayed at once, and only then, while the GPU works, is the network looked at: whether it is
still what it was when it was recorded (graphs.py).
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
    """What a pass and its methods gave."""

    logits: Tensor
    targets: Tensor
    values: list[Tensor]  # by method
    dead: list[Tensor | None]  # by method


def replayed(
    model: Model, images: Tensor, calls: Sequence[MethodCall], targets: Any, layer: Any
) -> Recorded | None:
    """The answer to a request that came before; None where it did not, or the network has changed."""
    graphs: Graphs | None = model.facts.graphs
    if graphs is None or graphs.reason or not _alone(calls):
        return None
    request = _request(model, images, calls, targets, layer)
    if request not in graphs.asked:
        return None
    try:
        made = graphs.guess(request, _given(model, images, targets), lambda: _key(model, request))
        return None if made is None else _copied(made)
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
    """The pass with its methods, recorded the third time; the caller holds `frozen_eval(...)`.

    None before the first pass, and where nothing is recorded.
    """
    graphs = graphs_of(model)
    if graphs is None or graphs.reason or not _alone(calls) or model.facts.columns is None:
        return None
    needs = frozenset().union(*(call.entry.needs for call in calls))
    layers = choose_layers(model, images, needs, layer)
    one = pass_for(model, images, needs, layers)

    def whole(images: Tensor, chosen: Tensor | None = None) -> Recorded:
        with torch.inference_mode(False):
            inputs = model.ready(images)
            passed = one(inputs, model.predicted if chosen is None else lambda _: chosen)
        trace = traced(one, passed, images, inputs, layers, needs, None, 0)
        with torch.no_grad():
            values = [
                call.entry.function(trace, **call.options).detach().float().contiguous() for call in calls
            ]
            return Recorded(trace.logits, passed.chosen, values, dead_of(trace))

    request = _request(model, images, calls, targets, layer)
    reads = [*model.module.parameters(), *model.module.buffers()]
    given, kept = _given(model, images, targets), [one.detach() for one in reads]
    try:
        return _copied(graphs.run(_key(model, request), whole, given, request=request, reads=kept))
    except NotAPicture:  # the layer was a guess, or is named wrongly: capture() knows what to do
        return None


def _alone(calls: Sequence[MethodCall]) -> bool:
    return all(call.entry.trace_only for call in calls)


def _request(model: Model, images: Tensor, calls: Sequence[MethodCall], targets: Any, layer: Any) -> Hashable:
    """What is asked, as far as one sees it without looking at the network."""
    asked = tuple(call.text for call in calls), layer if isinstance(layer, str | None) else tuple(layer)
    seen = images.shape, images.dtype, images.stride(), targets is None
    return asked, seen, model.device, model.precision, model.layer, model.scales


def _key(model: Model, request: Hashable) -> Hashable:
    _, fusion = model.facts.fusion or (None, None)
    graphs: Graphs = model.facts.graphs
    return request, graphs.state(model.module), fusion


def _given(model: Model, images: Tensor, targets: Any) -> list[Tensor]:
    if targets is None:
        return [images]
    return [
        images,
        model.check_targets(targets, torch.empty(len(images), model.facts.columns or 0, device=model.device)),
    ]


def _copied(made: Recorded) -> Recorded:
    """Out of the memory that the next pass overwrites."""
    copied: Recorded = tree_map_only(Tensor, Tensor.clone, made)
    return copied
