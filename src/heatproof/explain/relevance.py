"""Layer-wise relevance propagation: the logit is distributed back, layer by layer, to the input.

Each layer shares its output's relevance R among its inputs by what they contributed. For a linear step
z_j = sum_i x_i w_ij + b_j:

    epsilon   R_i = sum_j x_i w_ij R_j / (z_j +- epsilon)                             (bach2015lrp)
    gamma     the same with w + gamma w+ where z_j > 0 and w + gamma w- where z_j < 0; both the other way
              round for negative x_i                                                  (montavon2019lrp)
    z+        only what is positive: x+ w+ and x- w-                                  (montavon2019lrp)

Bias and stabiliser (1e-6) absorb their share. Activations pass relevance on unchanged, sums and averages
share it by value, max pooling gives it to the largest. A batch normalisation is merged into the convolution
before it, in the pass only; elsewhere it is a linear step. The deviation of a normalisation over channels is
held fixed, gates (a sigmoid that multiplies) count as weights, and other products, those of attention among
them, give half to each factor (achtibat2024attnlrp).

All of this is written as gradients: with R = x g in every place, a rule is a change of g.

Deviations: relevance starts with the logit itself, so that the map sums to the logit less what was absorbed.
The first layer has no special rule.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from heatproof.errors import InputError, ModelError
from heatproof.explain import method
from heatproof.explain.gradients import working_images
from heatproof.explain.rules import Rule, attend, carrying, own_gradient, without_attention
from heatproof.types import Trace

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # inputs, weight, bias
Share = Callable[[Tensor, Tensor, Tensor, Tensor | None, Linear], Tensor]
ACTIVATIONS = (
    "relu6", "hardtanh", "gelu", "silu", "mish", "hardswish", "elu", "selu", "celu", "softplus", "tanh",
)  # fmt: skip
TINY = 1e-9  # where an activation's input is 0, so that its relevance is


@method("lrp")
def lrp(trace: Trace, *, rule: str = "z+", gamma: float = 0.25) -> Tensor:
    """The logit distributed back layer by layer, by what each input contributed.

    sum_c R_c at the input. Dense layers follow the epsilon rule.
    rule: of convolutions: "z+" (zennit's EpsilonPlus), "gamma" or "epsilon".
    """
    if not gamma > 0:
        raise InputError(f"lrp gamma must be above 0, got {gamma}")
    shares: dict[str, Share] = {
        "z+": positive_rule,
        "gamma": partial(gamma_rule, gamma),
        "epsilon": epsilon_rule,
    }
    rules = _rules(shares[rule], epsilon_rule) | without_attention("lrp", trace, "attnlrp")
    return (working_images(trace) * own_gradient(trace, rules)).sum(1)


@method("attnlrp")
def attnlrp(trace: Trace, *, gamma: float = 0.05, conv_gamma: float = 0.25) -> Tensor:
    """The logit distributed back layer by layer, also through attention.

    sum_c R_c at the input. A product of matrices gives half to each factor, a softmax its first-order share.
    gamma, conv_gamma: of the gamma rule, in dense layers and in the convolution that makes tokens; 0 is the
    epsilon rule.
    """
    if gamma < 0 or conv_gamma < 0:
        raise InputError(f"attnlrp gamma and conv_gamma must not be negative; got {gamma} and {conv_gamma}")
    shares = [partial(gamma_rule, value) if value else epsilon_rule for value in (conv_gamma, gamma)]
    seen = 0

    def attention(_function: Any, *args: Any, **kwargs: Any) -> Tensor:
        nonlocal seen
        seen += 1
        return attend(*args, **kwargs, product=_matrices)

    def softmax(function: Any, *args: Any, **kwargs: Any) -> Tensor:
        nonlocal seen
        output: Tensor = function(*args, **kwargs)
        seen += output.ndim > 2
        return output

    rules = _rules(*shares) | {"scaled_dot_product_attention": attention, "softmax": softmax}
    gradient = own_gradient(trace, rules)
    if not seen:
        raise ModelError(
            f"attnlrp is for transformers, and {trace.model.name} does not attend; use lrp instead"
        )
    return (working_images(trace) * gradient).sum(1)


def epsilon_rule(
    value: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None, linear: Linear
) -> Tensor:
    """The epsilon rule."""
    return carrying(value, (linear(inputs, weight, bias), None))


def positive_rule(
    value: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None, linear: Linear
) -> Tensor:
    """The z+ rule."""
    up, down = _signs(inputs)
    total = linear(up, weight.clamp(min=0), None if bias is None else bias.clamp(min=0))
    if down is not None:
        total = total + linear(down, weight.clamp(max=0), None)
    return carrying(value, (total, None))


def gamma_rule(
    gamma: float, value: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None, linear: Linear
) -> Tensor:
    """The gamma rule, also for inputs below 0."""
    up, down = _signs(inputs)
    more, less = (weight + gamma * part for part in (weight.clamp(min=0), weight.clamp(max=0)))
    higher = None if bias is None else bias + gamma * bias.clamp(min=0)
    lower = None if bias is None else bias + gamma * bias.clamp(max=0)
    above, below = linear(up, more, higher), linear(up, less, lower)
    if down is not None:
        above, below = above + linear(down, less, None), below + linear(down, more, None)
    return carrying(value, (above, value > 0), (below, value < 0))


def _signs(inputs: Tensor) -> tuple[Tensor, Tensor | None]:
    """Inputs above 0 and those below, or None where there are none, as behind a ReLU."""
    return inputs.clamp(min=0), inputs.clamp(max=0) if float(inputs.detach().amin()) < 0 else None


def _rules(convolved: Share, dense: Share) -> dict[str, Rule]:
    convolutions: Any = WeakIdKeyDictionary()  # by output: the arguments
    gates: Any = WeakIdKeyDictionary()

    def convolution(
        function: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        def linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
            output: Tensor = function(x, w, b, *args, **kwargs)
            return output

        with torch.no_grad():
            value = linear(inputs, weight, bias)
        output = convolved(value, inputs, weight, bias, linear) if inputs.requires_grad else value
        convolutions[output] = inputs, weight, bias, linear
        return output

    def affine(function: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        value: Tensor = function(inputs, weight, bias)
        return dense(value, inputs, weight, bias, function) if value.requires_grad else value

    def batch_norm(
        function: Any, inputs: Tensor, mean: Tensor | None, variance: Tensor | None,
        weight: Tensor | None = None, bias: Tensor | None = None, training: bool = False,
        momentum: float = 0.1, eps: float = 1e-5,
    ) -> Tensor:  # fmt: skip
        value: Tensor = function(inputs, mean, variance, weight, bias, training, momentum, eps)
        if training or inputs not in convolutions or mean is None or variance is None:
            return carrying(value, (value, None)) if value.requires_grad else value
        source, kernel, shift, linear = convolutions[inputs]
        scale = (variance + eps).rsqrt() * (1 if weight is None else weight)
        shift = ((0 if shift is None else shift) - mean) * scale + (0 if bias is None else bias)
        merged = kernel * scale.view(-1, *[1] * (kernel.ndim - 1))
        return convolved(value, source, merged, shift, linear) if source.requires_grad else value

    def activation(function: Any, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        value: Tensor = function(inputs.clone(), *args, **kwargs)
        return carrying(value, (inputs, None), epsilon=TINY) if inputs.requires_grad else value

    def gate(function: Any, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = function(*args, **kwargs)
        gates[output] = True
        return output

    def product(function: Any, first: Any, second: Any, *args: Any, **kwargs: Any) -> Any:
        if not all(isinstance(t, Tensor) and t.requires_grad for t in (first, second)):
            return function(first, second, *args, **kwargs)
        if first in gates or second in gates:
            return first.detach() * second if first in gates else first * second.detach()
        return _halved(function(first, second, *args, **kwargs))

    return {
        **dict.fromkeys(("conv1d", "conv2d", "conv3d"), convolution),
        **dict.fromkeys(ACTIVATIONS, activation),
        **dict.fromkeys(("mul", "matmul", "bmm"), product),
        **dict.fromkeys(("sigmoid", "hardsigmoid"), gate),
        "linear": affine,
        "batch_norm": batch_norm,
        "layer_norm": _layer_norm,
        "group_norm": _group_norm,
    }


def _layer_norm(
    _function: Any, inputs: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    dims = tuple(range(-len(shape), 0))
    centred = inputs - inputs.mean(dims, keepdim=True)
    deviation = (centred.detach().square().mean(dims, keepdim=True) + eps).sqrt()
    scaled = centred / deviation
    scaled = scaled if weight is None else scaled * weight
    return scaled if bias is None else scaled + bias


def _group_norm(
    _function: Any, inputs: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    grouped = inputs.unflatten(1, (groups, -1))
    scaled = _layer_norm(None, grouped, grouped.shape[2:], eps=eps).view_as(inputs)
    column = (-1, *[1] * (inputs.ndim - 2))
    scaled = scaled if weight is None else scaled * weight.view(column)
    return scaled if bias is None else scaled + bias.view(column)


def _halved(output: Tensor) -> Tensor:
    """Half of the relevance to each of the two factors behind it."""
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient / 2)
    return output


def _matrices(first: Tensor, second: Tensor) -> Tensor:
    return _halved(torch.matmul(first, second))
