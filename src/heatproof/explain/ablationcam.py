"""AblationCAM: a channel weighs what the class's logit loses without it."""

from __future__ import annotations

import torch
from torch import Tensor

from heatproof.errors import InputError
from heatproof.explain.cams import safe_ratio, weighted_sum
from heatproof.models.tap import Tail
from heatproof.registry import Card, explainer
from heatproof.types import Trace


@explainer(
    "ablationcam",
    needs=("activations",),
    cite="desai2020ablationcam",
    card=Card(sign="weights keep the sign of the logit they are divided by"),
    cost="part of a pass per channel",
    volumes=True,
)
def ablationcam(trace: Trace, *, fill: str = "zero") -> Tensor:
    """Channels weighted by the share of the logit lost when the channel is set to 0.

    ReLU(sum_k w_k A_k), w_k = (y - y_k) / y. Only the part of the network behind the layer is rerun. In a
    transformer the channel is removed from every token, the class token included.
    fill: "zero", or "floor" to fill far below the smallest activation where that is not 0, as the grad-cam
    package does.
    """
    if fill not in ("zero", "floor"):
        raise InputError(f"ablationcam fill must be 'zero' or 'floor', got {fill!r}")
    assert trace.layer is not None
    weights = [
        _drops(trace, Tail(trace.model, image, trace.layer), target, fill)
        for image, target in zip(trace.images, trace.targets, strict=True)
    ]
    return weighted_sum(torch.stack(weights), trace.activation)


def _drops(trace: Trace, tail: Tail, target: Tensor, fill: str) -> Tensor:
    """ "c" share of the logit each channel of one image carries."""
    original = tail.activation
    axis = tail.layout.channel_axis
    lowest = float(original.min())
    value = lowest - 1e7 if fill == "floor" and lowest != 0 else 0.0
    results: list[Tensor] = []

    def without(start: int, stop: int) -> Tensor:
        changed = original.repeat(stop - start, *[1] * (original.ndim - 1))
        for row in range(stop - start):
            changed[row].select(axis - 1 if axis > 0 else axis, start + row).fill_(value)
        return trace.model.scores(tail(changed), target.expand(stop - start))

    trace.queue.each(original.shape[axis], without, results.append)
    full = trace.model.scores(tail.logits, target[None])
    return safe_ratio(full - torch.cat(results), full)
