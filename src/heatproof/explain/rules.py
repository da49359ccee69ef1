"""Methods that change the backward pass: guided backpropagation, DeepLIFT, FullGrad; the rules LRP uses too.

A rule replaces a torch function (relu, conv2d, scaled_dot_product_attention, ...) while a context is open.
Modules, activations in place, modules that run twice and plain functions all come down to torch's functions,
so nothing is hooked and the network is not changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from heatproof.errors import InputError, ModelError
from heatproof.explain.baselines import STARTS, baseline_images
from heatproof.explain.gradients import GRADIENT_CARD, gradient_method, over_channels, working_images
from heatproof.models.running import at_least_float
from heatproof.registry import explainer
from heatproof.types import Signed, Trace, extremes, spatial_dims, upsample

Rule = Callable[..., Any]  # called with the function and its arguments
OWN_PASS = "a pass of its own"
RECTIFIERS = ("relu", "relu6", "hardtanh")
ACTIVATIONS = (
    "relu", "relu6", "hardtanh", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish", "softplus",
    "hardswish", "sigmoid", "hardsigmoid", "tanh",
)  # fmt: skip
NEAR = 1e-10  # the difference to the reference below which DeepLIFT takes the gradient as the slope
POOLS = {getattr(F, name): name for name in ("max_pool1d", "max_pool2d", "max_pool3d", "adaptive_max_pool2d")}


class Rules(TorchFunctionMode):
    """Replaces functions by rules: by name, without the underscore of their in-place form."""

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        super().__init__()
        self.rules = rules

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = POOLS.get(func) or getattr(func, "__name__", "").rstrip("_")
        if name == "multi_head_attention_forward" and "scaled_dot_product_attention" in self.rules:
            with self:  # its inner functions then run under the rules too
                return _self_attention(*args, **(kwargs or {}))
        rule = self.rules.get(name)
        return func(*args, **(kwargs or {})) if rule is None else rule(func, *args, **(kwargs or {}))


def own_gradient(
    trace: Trace, rules: Mapping[str, Rule], inputs_of: Callable[[int, int], Tensor] | None = None
) -> Tensor:
    """Tensor "b c H W": the gradient at the images, in a pass with these rules.

    inputs_of: the inputs for a range of images, if not just these: they come first in it.
    """
    images = working_images(trace)
    parts: list[Tensor] = []

    def work(start: int, stop: int) -> Tensor:
        count = stop - start
        with torch.inference_mode(False), torch.enable_grad():
            inputs = trace.model.ready(images[start:stop] if inputs_of is None else inputs_of(start, stop))
            inputs = inputs.detach().clone().requires_grad_()
            with Rules(rules):
                logits = trace.model.forward(inputs)
            score = trace.model.scores(logits[:count], trace.targets[start:stop]).sum()
            (gradient,) = torch.autograd.grad(score, inputs)
        return at_least_float(gradient[:count])

    trace.queue.each(len(images), work, parts.append)
    return torch.cat(parts)


def without_attention(method: str, trace: Trace, instead: str) -> dict[str, Rule]:
    """Rules that raise ModelError for a transformer."""

    def of_attention(scores: Tensor, dim: int = -1, *_: Any, **__: Any) -> bool:  # not over classes
        return scores.ndim >= 3 and dim in (-1, scores.ndim - 1)

    def refuse(function: Any, *args: Any, **kwargs: Any) -> Any:
        if function.__name__ == "softmax" and not of_attention(*args, **kwargs):
            return function(*args, **kwargs)
        raise ModelError(
            f"{method} is for convolutional networks, and {trace.model.name} attends; use {instead} instead"
        )

    return dict.fromkeys(("scaled_dot_product_attention", "multi_head_attention_forward", "softmax"), refuse)


def rectifies(function: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether a call of relu, relu6 or hardtanh is a ReLU, cut off above or not."""
    if function.__name__.rstrip("_") != "hardtanh":
        return True
    given = inspect.signature(F.hardtanh).bind(*args, **kwargs)
    return float(given.arguments.get("min_val", -1.0)) == 0


def carrying(value: Tensor, *carriers: tuple[Tensor, Tensor | None], epsilon: float = 1e-6) -> Tensor:
    """`value`, with a gradient that flows through other tensors: through c as if it were c * (value / c).

    carriers: tensors, each with a bool mask of the places where it counts, or None.
    """
    value, bent = value.detach(), torch.zeros((), device=value.device, dtype=value.dtype)
    for carrier, where in carriers:
        fixed = carrier.detach()
        share = value / (fixed + epsilon * torch.where(fixed < 0, -1.0, 1.0).to(fixed))  # never 0
        bent = bent + carrier * (share if where is None else share * where)
    return value + (bent - bent.detach())


def attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    *, seen: Callable[[Tensor], Tensor] = lambda weights: weights,
    product: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
) -> Tensor:  # fmt: skip
    """scaled_dot_product_attention in evaluation mode, step by step.

    seen: called with the weights "... n n", returns those to continue with; product: of two matrices.
    """
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    scores = product(query, key.transpose(-2, -1)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        hidden = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, float("-inf")) if hidden else scores + attn_mask
    return product(seen(scores.softmax(-1)), value)


def _self_attention(
    query: Tensor, key: Tensor, value: Tensor, width: int, heads: int, in_weight: Tensor,
    in_bias: Tensor | None, bias_k: Any, bias_v: Any, add_zero: bool, dropout: float, out_weight: Tensor,
    out_bias: Tensor | None, **options: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Multi-head attention of one sequence "n b c", computed by functions that have rules."""
    unusual = bias_k is not None or bias_v is not None or add_zero or options.get("use_separate_proj_weight")
    masks = (options.get(name) for name in ("attn_mask", "key_padding_mask"))
    if unusual or any(mask is not None for mask in masks) or not query.shape == key.shape == value.shape:
        raise ModelError(
            "attention with masks, or between two sequences, cannot be followed; use a CAM instead"
        )
    weights = in_weight.chunk(3)
    biases = (None,) * 3 if in_bias is None else in_bias.chunk(3)
    rows = zip((query, key, value), weights, biases, strict=True)
    q, k, v = (F.linear(t, w, b).unflatten(-1, (heads, -1)).permute(1, 2, 0, 3) for t, w, b in rows)
    mixed = F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).flatten(2)
    return F.linear(mixed, out_weight, out_bias), None


@gradient_method(
    "guided-backprop", cite="springenberg2015guided", aliases=("guided-backpropagation", "gbp"),
    cost=OWN_PASS, architecture="cnn",
)  # fmt: skip
def guided_backprop(trace: Trace) -> Signed:
    """The gradient, of which every ReLU lets only the positive part through.

    sum_c |g_c| with g_in = [x > 0] [g_out > 0] g_out at every ReLU, whether module, function or in place. The
    map is sharp, but barely depends on what the network learned (adebayo2018sanity).
    """
    gated = False

    def gate(function: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal gated
        output = function(*args, **kwargs)
        if output.requires_grad and rectifies(function, *args, **kwargs):
            gated = True
            output.register_hook(lambda gradient: gradient.clamp(min=0))
        return output

    gradients = own_gradient(trace, dict.fromkeys(RECTIFIERS, gate))
    if not gated:
        raise ModelError(
            f"guided-backprop changes what ReLUs pass back, and {trace.model.name} has none; "
            "use smoothgrad instead"
        )
    return over_channels(gradients)


@gradient_method(
    "deeplift", cite="shrikumar2017deeplift", cost="a pass of its own, with 2 inputs", architecture="cnn"
)
def deeplift(trace: Trace, *, baseline: str = "zero") -> Signed:
    """Each pixel's share in the difference between the image's logit and a reference's (rescale rule).

    sum_c |(x_c - x'_c) m_c| with the multipliers m that the rules pass back; without the absolute values they
    sum to logit(x) - logit(x').

        y = f(x)      g_in = g_out (y - y') / (x - x'), and the gradient where |x - x'| < 1e-10
        max pooling   the difference goes to the place that was largest in the image, or in the reference
                      where that one is larger
        products      each factor counts with the mean of the other's two values, as Shapley values would

    baseline: the reference: "zero" (in normalised space), "black", "blur" or "noise".

    The reveal-cancel rule is not built. Networks that normalise over channels or attend are refused. Of a
    network that ends in a softmax, log p is explained, with the plain gradient of the softmax.
    """
    images = working_images(trace)
    references = baseline_images(trace.model, images, baseline, trace.seed, STARTS)

    def both(start: int, stop: int) -> Tensor:
        return torch.cat([images[start:stop], references[start:stop]])

    return over_channels((images - references) * own_gradient(trace, _deeplift_rules(trace), both))


def _deeplift_rules(trace: Trace) -> dict[str, Rule]:
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
    """The values of the images, and of their references."""
    first, second = values.chunk(2)
    return first, second


def _slope(function: Any, inputs: Tensor, *args: Any, **kwargs: Any) -> Any:
    # Of a copy: a function in place would overwrite the value it is compared with.
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

    def mean(values: Tensor) -> Tensor:  # of image and reference, for both
        image, reference = _halves(values.detach())
        return ((image + reference) / 2).repeat(2, *[1] * (values.ndim - 1))

    bent = first * mean(second) + second * mean(first)
    return (first * second).detach() + (bent - bent.detach())


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
    """The gradient times the image, plus the gradients at all biases of layers with spatial outputs.

    psi(x * dy/dx) + sum over layers l, channels c of psi(b_lc dy/dz_lc), psi = upsample(rescale(|.|)), z the
    layer's output. Biases are those of convolutions, and beta - gamma mean / deviation of batch
    normalisation; those of dense layers have no place.
    rescale: "layer", as the authors' code has it, or "channel", as the grad-cam package has it.
    """
    if rescale not in ("layer", "channel"):
        raise InputError(f"fullgrad rescale must be 'layer' or 'channel', got {rescale!r}")

    def part(contribution: Tensor) -> Tensor:
        strength = contribution.abs()
        low, high = extremes(strength, spatial_dims(contribution, 1 if rescale == "layer" else 2))
        scaled = (strength - low) / torch.where(high > low, high - low, torch.inf)
        return upsample(scaled.sum(1), trace.image_size)  # linear, so the channels are summed first

    total = torch.zeros(len(trace.images), *trace.image_size).to(working_images(trace))

    def add(start: int, stop: int, contribution: Tensor | None) -> None:
        if contribution is None:  # before the first of these images, and again if memory ran out
            total[start:stop] = 0
        else:
            total[start:stop] += part(contribution.to(total))

    contributions(trace, add)
    return total


def contributions(trace: Trace, add: Callable[[int, int, Tensor | None], None]) -> None:
    """Call add with gradient times value at the input "b c H W" and at every spatial bias "b c h w".

    add(start, stop, contribution): for a range of images; called with None before its first contribution.
    """
    span = [0, 0]
    images = working_images(trace)

    def bias_at(output: Tensor, bias: Tensor | None) -> None:
        if bias is None or not output.requires_grad or output.ndim != images.ndim:
            return
        start, stop, column = *span, bias.detach().view(-1, *[1] * (output.ndim - 2))
        output.register_hook(lambda gradient: add(start, stop, gradient.detach() * column))

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

    def inputs_of(start: int, stop: int) -> Tensor:
        span[:] = start, stop
        add(start, stop, None)
        return images[start:stop]

    rules: dict[str, Rule] = {"conv2d": convolution, "conv3d": convolution, "batch_norm": normalisation}
    gradient = own_gradient(trace, rules | without_attention("fullgrad", trace, "attnlrp"), inputs_of)
    add(0, len(images), images * gradient)
