"""Methods that change or record functions in a pass: guided backpropagation to LRP, maps from attention.

A rule replaces a torch function (relu, conv2d, scaled_dot_product_attention, ...) while a context is open.
Modules, activations in place, modules that run twice and plain functions all come down to torch's functions,
so nothing is hooked and the network is not changed.

Layer-wise relevance propagation distributes the logit back, layer by layer: each layer shares its output's
relevance R among its inputs by what they contributed. For a linear step z_j = sum_i x_i w_ij + b_j:

    epsilon   R_i = sum_j x_i w_ij R_j / (z_j +- epsilon)                             (bach2015lrp)
    gamma     the same with w + gamma w+ where z_j > 0 and w + gamma w- where z_j < 0; both the other way
              round for negative x_i                                                  (montavon2019lrp)
    z+        only what is positive: x+ w+ and x- w-                                  (montavon2019lrp)

Bias and stabiliser (1e-6) absorb their share. Activations pass relevance on unchanged, sums and averages
share it by value, max pooling gives it to the largest. A batch normalisation is merged into the convolution
before it, in the pass only; elsewhere it is a linear step. The deviation of a normalisation over channels is
held fixed, gates (a sigmoid that multiplies) count as weights, and other products, those of attention among
them, give half to each factor (achtibat2024attnlrp). All of this is written as gradients: with R = x g in
every place, a rule is a change of g.

Deviations: relevance starts with the logit itself, so that the map sums to the logit less what was absorbed.
The first layer has no special rule.

Rollout, Chefer's relevance and LeGrad read the attention A of each block, "b heads n n": a row for each query
token, a column for each key token, recorded where the network computes it, also inside fused attention. The
tokens of a map are those of the image; a class token and registers are left out.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from heatproof.errors import InputError, ModelError
from heatproof.explain import method
from heatproof.explain.baselines import STARTS, baseline_images
from heatproof.explain.gradients import over_channels, working_images
from heatproof.models.capture import replace_first
from heatproof.models.layers import Layout, first_tensor, layout_of
from heatproof.models.model import Model
from heatproof.models.running import at_least_float
from heatproof.types import Signed, Trace, extremes, spatial_dims, upsample

Rule = Callable[..., Any]  # called with the function and its arguments
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]  # inputs, weight, bias
RECTIFIERS = ("relu", "relu6", "hardtanh")
CURVED = (  # activations f with x f'(x) != f(x)
    "relu6", "hardtanh", "gelu", "silu", "mish", "hardswish", "elu", "selu", "celu", "softplus", "tanh",
)  # fmt: skip
NORMALISATIONS = ("layer_norm", "group_norm", "instance_norm", "rms_norm")  # over channels or positions
GATES = ("sigmoid", "hardsigmoid")
NEAR = 1e-10  # the difference to the reference below which DeepLIFT takes the gradient as the slope
TINY = 1e-9  # where an activation's input is 0, so that its relevance is
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

    return trace.queue.joined(len(images), work, "gradients")


def without_attention(name: str, trace: Trace, instead: str, *functions: str) -> dict[str, Rule]:
    """Rules that raise ModelError for a transformer, and for functions that a method has no rule for."""

    def of_attention(scores: Tensor, dim: int = -1, *_: Any, **__: Any) -> bool:  # not over classes
        return scores.ndim >= 3 and dim in (-1, scores.ndim - 1)

    def refuse(function: Any, *args: Any, **kwargs: Any) -> Any:
        called, model = function.__name__, trace.model.name
        if called == "softmax" and not of_attention(*args, **kwargs):
            return function(*args, **kwargs)
        why = f"is for convolutional networks, and {model} has attention"
        if called in functions:
            why = f"has no rule for {called}, which {model} uses"
        raise ModelError(f"{name} {why}; use {instead} instead")

    attention = ("scaled_dot_product_attention", "multi_head_attention_forward", "softmax")
    return dict.fromkeys((*functions, *attention), refuse)


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
    bent = torch.zeros((), device=value.device, dtype=value.dtype)
    for carrier, where in carriers:
        fixed = carrier.detach()
        share = value.detach() / (fixed + epsilon * torch.where(fixed < 0, -1.0, 1.0).to(fixed))  # never 0
        bent = bent + carrier * (share if where is None else share * where)
    return _bent(value, bent)


def _bent(value: Tensor, carrier: Tensor) -> Tensor:
    """The value, with the gradient of another tensor."""
    return value.detach() + (carrier - carrier.detach())


def _both_vary(first: Any, second: Any) -> bool:
    """Whether both factors of a product carry gradients."""
    return all(isinstance(factor, Tensor) and factor.requires_grad for factor in (first, second))


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
            "attention with masks, or between two sequences, is not supported; use a CAM instead"
        )
    weights = in_weight.chunk(3)
    biases = (None,) * 3 if in_bias is None else in_bias.chunk(3)
    rows = zip((query, key, value), weights, biases, strict=True)
    q, k, v = (F.linear(t, w, b).unflatten(-1, (heads, -1)).permute(1, 2, 0, 3) for t, w, b in rows)
    mixed = F.scaled_dot_product_attention(q, k, v).permute(2, 0, 1, 3).flatten(2)
    return F.linear(mixed, out_weight, out_bias), None


@method("guided-backprop")
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


@method("deeplift")
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

    rules: dict[str, Rule] = {
        **dict.fromkeys(("relu", "leaky_relu", *CURVED, *GATES), _slope),
        **dict.fromkeys(POOLS.values(), _pool),
        **without_attention("deeplift", trace, "integrated-gradients", *NORMALISATIONS),
        "mul": _product,
    }
    return over_channels((images - references) * own_gradient(trace, rules, both))


def _slope(function: Any, inputs: Tensor, *args: Any, **kwargs: Any) -> Any:
    # Of a copy: a function in place would overwrite the value it is compared with.
    outputs = function(inputs.clone(), *args, **kwargs)
    if not outputs.requires_grad:
        return outputs
    (x, x0), (y, y0) = inputs.detach().chunk(2), outputs.detach().chunk(2)  # of images and references
    near = (x - x0).abs() < NEAR
    slopes = ((y - y0) / torch.where(near, 1.0, x - x0)).repeat(2, *[1] * (x.ndim - 1))
    return torch.where(torch.cat([near, near]), outputs, _bent(outputs, inputs * slopes))


def _pool(function: Any, inputs: Tensor, *args: Any, **kwargs: Any) -> Any:
    indexed = kwargs.pop("return_indices", False)
    outputs, places = function(inputs, *args, **kwargs, return_indices=True)
    if outputs.requires_grad:
        grid = outputs.ndim - 2
        (out, out0), (at, at0) = outputs.detach().chunk(2), places.chunk(2)
        at = torch.where(out >= out0, at, at0).flatten(-grid)
        x, x0 = (half.flatten(-grid).gather(-1, at).view_as(out) for half in inputs.chunk(2))
        gap = (x - x0).detach()
        share = torch.where(gap.abs() < NEAR, 1.0, (out - out0) / torch.where(gap.abs() < NEAR, 1.0, gap))
        outputs = _bent(outputs, torch.cat([x * share, x0 * share]))
    return (outputs, places) if indexed else outputs


def _product(function: Any, first: Any, second: Any, *args: Any, **kwargs: Any) -> Any:
    if not _both_vary(first, second):
        return function(first, second, *args, **kwargs)

    def mean(values: Tensor) -> Tensor:  # of image and reference, for both
        image, reference = values.detach().chunk(2)
        return ((image + reference) / 2).repeat(2, *[1] * (values.ndim - 1))

    return _bent(first * second, first * mean(second) + second * mean(first))


@method("fullgrad")
def fullgrad(trace: Trace, *, rescale: str = "layer") -> Tensor:
    """The gradient times the image, plus the gradients at all biases of layers with spatial outputs.

    psi(x * dy/dx) + sum over layers l, channels c of psi(b_lc dy/dz_lc), psi = upsample(rescale(|.|)), z the
    layer's output. Biases are those of convolutions, and beta - gamma mean / deviation of batch
    normalisation; those of dense layers have no place.
    rescale: "layer", as the authors' code has it, or "channel", as the grad-cam package has it.
    """

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


@method("lrp")
def lrp(trace: Trace, *, rule: str = "z+", gamma: float = 0.25) -> Tensor:
    """The logit distributed back layer by layer, by what each input contributed.

    sum_c R_c at the input. Dense layers follow the epsilon rule.
    rule: of convolutions: "z+" (zennit's EpsilonPlus), "gamma" or "epsilon".
    """
    if not gamma > 0:
        raise InputError(f"lrp gamma must be above 0, got {gamma}")
    convolved = {"z+": math.inf, "gamma": gamma, "epsilon": 0.0}[rule]
    rules = _rules(convolved, 0.0) | without_attention("lrp", trace, "attnlrp")
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
    seen = 0

    def attention(_function: Any, *args: Any, **kwargs: Any) -> Tensor:
        nonlocal seen
        seen += 1
        return attend(*args, **kwargs, product=lambda a, b: _halved(a @ b))

    def softmax(function: Any, *args: Any, **kwargs: Any) -> Tensor:
        nonlocal seen
        output: Tensor = function(*args, **kwargs)
        seen += output.ndim > 2
        return output

    rules = _rules(conv_gamma, gamma) | {"scaled_dot_product_attention": attention, "softmax": softmax}
    gradient = own_gradient(trace, rules)
    if not seen:
        raise ModelError(
            f"attnlrp is for transformers, and {trace.model.name} has no attention; use lrp instead"
        )
    return (working_images(trace) * gradient).sum(1)


def linear_rule(
    gamma: float, value: Tensor, inputs: Tensor, weight: Tensor, bias: Tensor | None, linear: Linear
) -> Tensor:
    """The gamma rule of a linear step with this output; the epsilon rule for 0, the z+ rule for infinity."""
    if gamma == 0:
        return carrying(value, (linear(inputs, weight, bias), None))
    up = inputs.clamp(min=0)
    down = inputs.clamp(max=0) if float(inputs.detach().amin()) < 0 else None  # none behind a ReLU
    if gamma == math.inf:
        total = linear(up, weight.clamp(min=0), None if bias is None else bias.clamp(min=0))
        return carrying(
            value, (total if down is None else total + linear(down, weight.clamp(max=0), None), None)
        )
    more, less = (weight + gamma * part for part in (weight.clamp(min=0), weight.clamp(max=0)))
    higher = None if bias is None else bias + gamma * bias.clamp(min=0)
    lower = None if bias is None else bias + gamma * bias.clamp(max=0)
    above, below = linear(up, more, higher), linear(up, less, lower)
    if down is not None:
        above, below = above + linear(down, less, None), below + linear(down, more, None)
    return carrying(value, (above, value > 0), (below, value < 0))


def _rules(convolved: float, dense: float) -> dict[str, Rule]:
    """Rules of LRP, with gamma in convolutions and in dense layers."""
    convolutions: Any = WeakIdKeyDictionary()  # by output: the arguments
    gates: Any = WeakIdKeyDictionary()

    def step(
        gamma: float, function: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None = None, *args: Any,
        **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        def linear(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
            output: Tensor = function(x, w, b, *args, **kwargs)
            return output

        with torch.no_grad():
            value = linear(inputs, weight, bias)
        output = linear_rule(gamma, value, inputs, weight, bias, linear) if inputs.requires_grad else value
        if function is not F.linear:
            convolutions[output] = inputs, weight, bias, linear
        return output

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
        return linear_rule(convolved, value, source, merged, shift, linear) if source.requires_grad else value

    def activation(function: Any, inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        value: Tensor = function(inputs.clone(), *args, **kwargs)
        return carrying(value, (inputs, None), epsilon=TINY) if inputs.requires_grad else value

    def gate(function: Any, *args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = function(*args, **kwargs)
        gates[output] = True
        return output

    def product(function: Any, first: Any, second: Any, *args: Any, **kwargs: Any) -> Any:
        if not _both_vary(first, second):
            return function(first, second, *args, **kwargs)
        if first in gates or second in gates:
            return first.detach() * second if first in gates else first * second.detach()
        return _halved(function(first, second, *args, **kwargs))

    return {
        **dict.fromkeys(("conv1d", "conv2d", "conv3d"), partial(step, convolved)),
        **dict.fromkeys(CURVED, activation),
        **dict.fromkeys(("mul", "matmul", "bmm"), product),
        **dict.fromkeys(GATES, gate),
        "linear": partial(step, dense),
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
    scaled = centred / (centred.detach().square().mean(dims, keepdim=True) + eps).sqrt()
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


@method("rollout")
def rollout(trace: Trace) -> Tensor:
    """Attention multiplied through all blocks, from the image's tokens to the class token.

    The class token's row of prod_l (A_l + I) / 2, A_l the mean over heads; the mean row without such a token.
    With several prefix tokens, the first is read.
    """

    @torch.no_grad()
    def work(start: int, stop: int) -> Tensor:
        inputs = trace.model.ready(trace.images[start:stop])
        recorder = AttentionRecorder("rollout", trace.model)
        with recorder:
            trace.model.forward(inputs)
        means = (at_least_float(weights).mean(1) for weights in recorder.of(inputs))
        return recorder.flow((mean / 2 for mean in means), 0.5, inputs)

    return trace.queue.joined(len(trace.images), work)


@method("chefer")
def chefer(trace: Trace) -> Tensor:
    """Attention times its gradient, multiplied through all blocks to the class token.

    The class token's row of prod_l (I + mean over heads of ReLU(A_l * d y / d A_l)), the rule for
    self-attention of the authors' generic method (equations 5 and 6); the mean row without such a token.
    """

    def work(start: int, stop: int) -> Tensor:
        with torch.inference_mode(False), torch.enable_grad():
            inputs = trace.model.ready(trace.images[start:stop]).detach().clone().requires_grad_()
            recorder = AttentionRecorder("chefer", trace.model)
            with recorder:
                logits = trace.model.forward(inputs)
            maps = recorder.of(inputs)
            score = trace.model.scores(logits, trace.targets[start:stop]).sum()
            gradients = torch.autograd.grad(score, maps)
        products = (
            (at_least_float(a) * at_least_float(g)).detach() for a, g in zip(maps, gradients, strict=True)
        )
        steps = (product.clamp(min=0).mean(1) for product in products)
        return recorder.flow(steps, 1.0, inputs)

    return trace.queue.joined(len(trace.images), work, "gradients")


@method("legrad")
def legrad(trace: Trace) -> Tensor:
    """The gradient at the attention of every block, with the classifier applied to each block's output.

    mean over blocks l, heads and query tokens of ReLU(d s_l / d A_l), s_l the logit of the explained class
    when the rest of the network, from the last normalisation on, reads the tokens behind block l.
    """
    blocks = blocks_of(trace.model.module)

    def work(start: int, stop: int) -> Tensor:
        inputs = trace.model.ready(trace.images[start:stop])
        recorder = AttentionRecorder("legrad", trace.model, leaves=True)
        with torch.inference_mode(False), torch.enable_grad():
            with recorder, _separate_blocks(blocks) as ran:
                output = (trace.model.call or trace.model.module)(inputs.detach().clone())
            maps = recorder.of(inputs)
            if len(maps) != len(ran) or len({output.shape for output in ran}) > 1:
                raise ModelError(
                    f"legrad needs one attention in each block, and {trace.model.name} has {len(maps)} in "
                    f"{len(ran)}; use attnlrp instead"
                )
            head = trace.model.head
            logits = head.logits(at_least_float(head.table(output, len(maps) * len(inputs))))
            score = head.scores(logits, trace.targets[start:stop].repeat(len(maps))).sum()
            gradients = torch.autograd.grad(score, maps)
        mean = torch.stack([at_least_float(g).clamp(min=0).mean((1, 2)) for g in gradients]).mean(0)
        return recorder.layout(gradients[0].mean(1), inputs).picture(mean[..., None])[:, 0]

    return trace.queue.joined(len(trace.images), work, "gradients")


class AttentionRecorder(Rules):
    """Records the attention of every block, "b heads n n"; as leaves, to take gradients at them."""

    def __init__(self, method: str, model: Model, leaves: bool = False) -> None:
        super().__init__({"scaled_dot_product_attention": self._fused, "softmax": self._softmax})
        self.method, self.model, self.leaves = method, model, leaves
        self.maps: list[Tensor] = []

    def of(self, inputs: Tensor) -> list[Tensor]:
        """The recorded attention; raises ModelError unless it is between all tokens of these images."""
        if not self.maps:
            raise ModelError(
                f"{self.method} is for transformers, and {self.model.name} has no attention; "
                "use gradcam instead"
            )
        shapes = {tuple(weights.shape[-2:]) for weights in self.maps}
        if len(shapes) > 1 or any(len(weights) != len(inputs) for weights in self.maps):
            raise ModelError(
                f"{self.method} needs attention between all tokens, and {self.model.name} has it within "
                "windows or stages only; use attnlrp instead"
            )
        return self.maps

    def layout(self, tokens: Tensor, inputs: Tensor) -> Layout:
        """Layout of "b n ..." tokens on the image."""
        layout = layout_of(tokens, inputs, self.model.module)
        if layout is None:
            raise ModelError(
                f"{self.method} cannot map the {tokens.shape[1]} tokens of {self.model.name} to "
                "positions of the image; use attnlrp instead"
            )
        return layout

    def flow(self, steps: Iterable[Tensor], residual: float, inputs: Tensor) -> Tensor:
        """Maps "b h w": the class token's row (else the mean row) of prod_l (step_l + residual I)."""
        whole = (step + residual * torch.eye(step.shape[-1]).to(step) for step in steps)
        product = reduce(lambda below, above: above @ below, whole)
        layout = self.layout(product, inputs)
        row = product[:, 0] if layout.prefix else product.mean(1)
        return layout.picture(row[..., None])[:, 0]

    def _record(self, weights: Tensor) -> Tensor:
        if weights.ndim != 4 or weights.shape[-1] != weights.shape[-2]:
            return weights
        self.maps.append(weights.detach().requires_grad_() if self.leaves else weights)
        return self.maps[-1]

    def _fused(self, _function: Any, *args: Any, **kwargs: Any) -> Tensor:
        return attend(*args, **kwargs, seen=self._record)

    def _softmax(self, function: Any, *args: Any, **kwargs: Any) -> Tensor:
        return self._record(function(*args, **kwargs))


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """A transformer's blocks: the list of modules of one type that has the most weights."""
    lists: list[list[nn.Module]] = [[]]
    for part in module.modules():
        children = list(part.children())
        if isinstance(part, (nn.Sequential, nn.ModuleList)) and len({type(child) for child in children}) == 1:
            lists.append(children)
    return max(lists, key=lambda blocks: sum(w.numel() for block in blocks for w in block.parameters()))


@contextmanager
def _separate_blocks(blocks: list[nn.Module]) -> Iterator[list[Tensor]]:
    """Collect the output of each block, detached from the graph of the others.

    The outputs of all blocks, as one longer batch, replace that of the last one. The hooks are removed when
    the context ends.
    """
    outputs: list[Tensor] = []

    def detach(_block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(value.detach() if isinstance(value, Tensor) else value for value in args)

    def ended(block: nn.Module, _args: Any, output: Any) -> Any:
        tensor = first_tensor(output)
        if tensor is not None:
            outputs.append(tensor)
        alike = len({o.shape for o in outputs}) == 1  # or they are no blocks of a transformer
        return replace_first(output, torch.cat(outputs)) if block is blocks[-1] and alike else None

    with ExitStack() as hooks:
        for block in blocks:
            hooks.enter_context(block.register_forward_pre_hook(detach))
            hooks.enter_context(block.register_forward_hook(ended))
        yield outputs
