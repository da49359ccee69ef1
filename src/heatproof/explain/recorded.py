"""CUDA graphs of the shared pass together with the methods that read nothing else.

Seven CAMs are about a hundred small kernels, which take Python longer to launch than the GPU to run. A
repeated request is replayed at once; while the GPU works, the network is compared with the recorded one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from heatproof.models.accel import Accelerator
from heatproof.models.capture import NotAPicture, SharedPass
from heatproof.models.model import Model
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
    if not _recordable(calls):
        return None
    request = _request(model, images, calls, targets, layer)
    results: Recorded | None = Accelerator(model).replayed(request, images, targets)
    return results


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
    accelerator = Accelerator(model)
    if not _recordable(calls) or not accelerator.records:
        return None
    needs = frozenset().union(*(call.entry.needs for call in calls))
    shared = SharedPass(model, images, needs, layer)

    def whole(images: Tensor, chosen: Tensor | None = None) -> Recorded:
        with torch.inference_mode(False):
            inputs = model.ready(images)
            passed = shared(inputs, model.predicted if chosen is None else lambda _: chosen)
        trace = shared.trace(passed, images, inputs)
        with torch.no_grad():
            values = [
                call.entry.function(trace, **call.options).detach().float().contiguous() for call in calls
            ]
            return Recorded(trace.logits, passed.chosen, values, dead_of(trace))

    try:
        request = _request(model, images, calls, targets, layer)
        results: Recorded | None = accelerator.recorded(request, whole, images, targets)
    except NotAPicture:  # the layer was a guess, or is named wrongly: capture() handles both
        return None
    return results


def _recordable(calls: Sequence[MethodCall]) -> bool:
    return all(call.entry.trace_only for call in calls)


def _request(model: Model, images: Tensor, calls: Sequence[MethodCall], targets: Any, layer: Any) -> Hashable:
    """A key of the request, without the state of the network."""
    texts = tuple(call.text for call in calls), layer if isinstance(layer, str | None) else tuple(layer)
    form = images.shape, images.dtype, images.stride(), targets is None
    return texts, form, model.device, model.precision, model.layer, model.scales
