"""FullGrad: the gradient at the image, and the gradients at every bias, which together are the whole logit.

For a network of linear steps, ReLUs and max pooling, y = <x, dy/dx> + sum over biases b of <b, dy/db>. The
map is the part of the input and the part of every bias that has a place (srinivas2019fullgrad):

    psi(x * dy/dx) + sum over layers l, channels c of psi(b_lc dy/dz_lc),   psi = upsample(rescale(|.|))

z is the layer's output, so that dy/db is kept place by place. Biases are those of convolutions, and of batch
normalisation beta - gamma mean / deviation; those of dense layers have no place.

Deviations: none. The authors' code scales each layer's block to [0, 1] as one; the grad-cam package scales
each channel by itself (rescale="channel").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from heatproof.errors import InputError
from heatproof.explain.gradients import GRADIENT_CARD, working_images
from heatproof.explain.rules import OWN_PASS, Rule, own_gradient, without_attention
from heatproof.registry import explainer
from heatproof.types import Trace, spatial_dims, upsample


@explainer(
    "fullgrad",
    cite="srinivas2019fullgrad",
    card=replace(
        GRADIENT_CARD,
        sign="absolute values summed over channels; never negative",
        resize="each layer bilinear to the image's size",
        normalisation="min-max per layer before the sum, then per map",
    ),
    cost=OWN_PASS,
    architecture="cnn",
    volumes=True,
)
def fullgrad(trace: Trace, *, rescale: str = "layer") -> Tensor:
    """The gradient times the image, plus the gradients at all biases that have a place.

    rescale: "layer", as the authors' code has it, or "channel", as the grad-cam package has it.
    """
    if rescale not in ("layer", "channel"):
        raise InputError(f"fullgrad rescale must be 'layer' or 'channel', got {rescale!r}")

    def part(contribution: Tensor) -> Tensor:
        strength, dims = contribution.abs(), spatial_dims(contribution, 1 if rescale == "layer" else 2)
        low, high = (extreme(strength, dim=dims, keepdim=True) for extreme in (torch.amin, torch.amax))
        # Enlarging is linear, so the channels are summed first.
        return upsample(
            ((strength - low) / torch.where(high > low, high - low, torch.inf)).sum(1), trace.image_size
        )

    total = torch.zeros(len(trace.images), *trace.image_size).to(working_images(trace))

    def add(start: int, stop: int, contribution: Tensor | None) -> None:
        if contribution is None:  # these images begin, or begin anew where memory ran out
            total[start:stop] = 0
        else:
            total[start:stop] += part(contribution.to(total))

    contributions(trace, add)
    return total


def contributions(trace: Trace, told: Callable[[int, int, Tensor | None], None]) -> None:
    """Tells of gradient times value at the input "b c H W" and at every bias with a place "b c h w".

    told(start, stop, contribution): of which images; before the first one of a range comes a None.
    """
    span = [0, 0]
    images = working_images(trace)

    def bias_at(output: Tensor, bias: Tensor | None) -> None:
        if bias is None or not output.requires_grad or output.ndim != images.ndim:
            return
        start, stop, column = *span, bias.detach().view(-1, *[1] * (output.ndim - 2))
        output.register_hook(lambda gradient: told(start, stop, gradient.detach() * column))

    def convolution(
        function: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        output: Tensor = function(inputs, weight, bias, *args, **kwargs)
        bias_at(output, bias)
        return output

    def normalisation(
        function: Any, inputs: Tensor, mean: Tensor | None, variance: Tensor | None,
        weight: Tensor | None = None, bias: Tensor | None = None, training: bool = False,
        momentum: float = 0.1, eps: float = 1e-5,
    ) -> Tensor:  # fmt: skip
        output: Tensor = function(inputs, mean, variance, weight, bias, training, momentum, eps)
        if mean is not None and variance is not None:
            shift = mean * (variance + eps).rsqrt()
            shift = -(shift if weight is None else shift * weight)
            bias_at(output, shift if bias is None else shift + bias)
        return output

    def shown(start: int, stop: int) -> Tensor:
        span[:] = start, stop
        told(start, stop, None)
        return images[start:stop]

    rules: dict[str, Rule] = {"conv2d": convolution, "conv3d": convolution, "batch_norm": normalisation}
    gradient = own_gradient(trace, rules | without_attention("fullgrad", trace, "attnlrp"), shown)
    told(0, len(images), images * gradient)
