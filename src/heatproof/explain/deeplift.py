"""DeepLIFT: how the difference to a reference image arises, layer by layer (shrikumar2017deeplift).

The network sees the image and a reference. A linear step passes the gradient on; a nonlinear one y = f(x)
passes g_in = g_out (y - y') / (x - x') on, its slope between the two (the rescale rule), so that saturated
units still count. Then sum_i (x_i - x'_i) g_i = logit(x) - logit(x'): nothing is lost.

    max pooling   the difference goes to the place that was largest in the image, or in the reference where
                  that one is larger
    products      of two parts of the network (gates): each factor counts with the mean of the other's two
                  values, which shares the difference as Shapley values would

Where |x - x'| < 1e-10 the slope is the gradient. Deviations: the reveal-cancel rule is not built. Networks
that normalise over channels or attend have steps without a rule here, and are refused. Of a network that ends
in a softmax log p is explained, through whose softmax the plain gradient goes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from heatproof.errors import ModelError
from heatproof.explain.baselines import STARTS, baseline_images
from heatproof.explain.gradients import GRADIENT_CARD, over_channels, working_images
from heatproof.explain.rules import POOLS, Rule, own_gradient, without_attention
from heatproof.registry import explainer
from heatproof.types import Signed, Trace

NEAR = 1e-10
ACTIVATIONS = (
    "relu", "relu6", "hardtanh", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus",
    "hardswish", "sigmoid", "hardsigmoid", "tanh",
)  # fmt: skip


@explainer(
    "deeplift",
    cite="shrikumar2017deeplift",
    card=GRADIENT_CARD,
    cost="a pass of its own, with 2 inputs",
    architecture="cnn",
    volumes=True,
)
def deeplift(trace: Trace, *, baseline: str = "zero") -> Signed:
    """Each pixel's share in the difference between the image's logit and a reference's (rescale rule).

    sum_c |(x_c - x'_c) m_c| with the multipliers m that the rule passes back.
    baseline: the reference: "zero" (in normalised space), "black", "blur" or "noise".
    """
    images = working_images(trace)
    references = baseline_images(trace.model, images, baseline, trace.seed, STARTS)

    def both(start: int, stop: int) -> Tensor:
        return torch.cat([images[start:stop], references[start:stop]])

    return over_channels((images - references) * own_gradient(trace, _rules(trace), both))


def _rules(trace: Trace) -> dict[str, Rule]:
    def refuse(function: Any, *_args: Any, **_kwargs: Any) -> Any:
        raise ModelError(
            f"deeplift has no rule for {function.__name__}, which {trace.model.name} uses; "
            "use integrated-gradients instead, whose values also sum to the logit's difference"
        )

    norms = dict.fromkeys(("layer_norm", "group_norm", "instance_norm", "rms_norm"), refuse)
    pools = dict.fromkeys(POOLS.values(), _pool)
    attention = without_attention("deeplift", trace, "integrated-gradients")
    return dict.fromkeys(ACTIVATIONS, _slope) | pools | {"mul": _product} | norms | attention


def _halves(values: Tensor) -> tuple[Tensor, Tensor]:
    """Of the images, and of their references."""
    first, second = values.chunk(2)
    return first, second


def _slope(function: Any, inputs: Tensor, *args: Any, **kwargs: Any) -> Any:
    # Of a copy: what works in place would overwrite the value it is compared with.
    outputs = function(inputs.clone(), *args, **kwargs)
    if not outputs.requires_grad:
        return outputs
    (x, x0), (y, y0) = _halves(inputs.detach()), _halves(outputs.detach())
    near = (x - x0).abs() < NEAR
    slopes = ((y - y0) / torch.where(near, 1.0, x - x0)).repeat(2, *[1] * (x.ndim - 1))
    bent = inputs * slopes
    return torch.where(torch.cat([near, near]), outputs, outputs.detach() + (bent - bent.detach()))


def _pool(function: Any, inputs: Tensor, *args: Any, **kwargs: Any) -> Any:
    indexed = kwargs.pop("return_indices", False)
    outputs, places = function(inputs, *args, **kwargs, return_indices=True)
    if outputs.requires_grad:
        grid = outputs.ndim - 2
        (out, out0), (at, at0) = _halves(outputs.detach()), _halves(places)
        at = torch.where(out >= out0, at, at0).flatten(-grid)
        x, x0 = (half.flatten(-grid).gather(-1, at).view_as(out) for half in _halves(inputs))
        gap = (x - x0).detach()
        share = torch.where(gap.abs() < NEAR, 1.0, (out - out0) / torch.where(gap.abs() < NEAR, 1.0, gap))
        bent = torch.cat([x * share, x0 * share])
        outputs = outputs.detach() + (bent - bent.detach())
    return (outputs, places) if indexed else outputs


def _product(function: Any, first: Any, second: Any, *args: Any, **kwargs: Any) -> Any:
    if not all(isinstance(factor, Tensor) and factor.requires_grad for factor in (first, second)):
        return function(first, second, *args, **kwargs)
    bent = first * _mean(second) + second * _mean(first)
    return (first * second).detach() + (bent - bent.detach())


def _mean(values: Tensor) -> Tensor:
    """Half-way between image and reference, for both."""
    first, second = _halves(values.detach())
    return ((first + second) / 2).repeat(2, *[1] * (values.ndim - 1))
