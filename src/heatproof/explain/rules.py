"""Passes in which some functions of a network follow other rules: what modified backward passes share.

A rule takes the place of a torch function (relu, conv2d, scaled_dot_product_attention, ...) while the context
is open. Whatever a network is made of, modules, activations in place, one module used twice, plain functions,
it comes down to torch's functions, so nothing is hooked and the network is not touched.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from heatproof.errors import ModelError
from heatproof.explain.gradients import working_images
from heatproof.models.running import at_least_float
from heatproof.types import Trace

Rule = Callable[..., Any]  # called with the function and its arguments
OWN_PASS = "a pass of its own"
POOLS = {getattr(F, name): name for name in ("max_pool1d", "max_pool2d", "max_pool3d", "adaptive_max_pool2d")}


class Rules(TorchFunctionMode):
    """Functions by name, without the underscore of their in-place form, and what runs instead."""

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        super().__init__()
        self.rules = rules

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = POOLS.get(func) or getattr(func, "__name__", "").rstrip("_")
        if name == "multi_head_attention_forward" and "scaled_dot_product_attention" in self.rules:
            with self:  # so that the functions it is made of are seen
                return _self_attention(*args, **(kwargs or {}))
        rule = self.rules.get(name)
        return func(*args, **(kwargs or {})) if rule is None else rule(func, *args, **(kwargs or {}))


def own_gradient(
    trace: Trace, rules: Mapping[str, Rule], shown: Callable[[int, int], Tensor] | None = None
) -> Tensor:
    """ "b c H W": the gradient at the images, in a pass of its own in which these rules hold.

    shown: what the network sees of a range of images, where it is not just these: they come first in it.
    """
    images = working_images(trace)
    found: list[Tensor] = []

    def work(start: int, stop: int) -> Tensor:
        count = stop - start
        with torch.inference_mode(False), torch.enable_grad():
            inputs = trace.model.ready(images[start:stop] if shown is None else shown(start, stop))
            inputs = inputs.detach().clone().requires_grad_()
            with Rules(rules):
                logits = trace.model.forward(inputs)
            score = trace.model.scores(logits[:count], trace.targets[start:stop]).sum()
            (gradient,) = torch.autograd.grad(score, inputs)
        return at_least_float(gradient[:count])

    trace.queue.each(len(images), work, found.append)
    return torch.cat(found)


def without_attention(method: str, trace: Trace, instead: str) -> dict[str, Rule]:
    """Rules that refuse a transformer."""

    def refuse(function: Any, *args: Any, **kwargs: Any) -> Any:
        if function.__name__ == "softmax" and not attends(*args, **kwargs):
            return function(*args, **kwargs)
        raise ModelError(
            f"{method} is for convolutional networks, and {trace.model.name} attends; use {instead} instead"
        )

    return dict.fromkeys(("scaled_dot_product_attention", "multi_head_attention_forward", "softmax"), refuse)


def attends(scores: Tensor, dim: int = -1, *_: Any, **__: Any) -> bool:
    """Whether a softmax is attention's, over the last axis, not a classifier's, over classes."""
    return scores.ndim >= 3 and dim in (-1, scores.ndim - 1)


def rectifies(function: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether a call of relu, relu6 or hardtanh is a ReLU, cut off above or not."""
    if function.__name__.rstrip("_") != "hardtanh":
        return True
    given = inspect.signature(F.hardtanh).bind(*args, **kwargs)
    return float(given.arguments.get("min_val", -1.0)) == 0


RECTIFIERS = ("relu", "relu6", "hardtanh")


def carrying(value: Tensor, *carriers: tuple[Tensor, Tensor | None], epsilon: float = 1e-6) -> Tensor:
    """`value`, whose gradient goes through other tensors instead: through c as if it were c * (value / c).

    carriers: tensors, each with the places (bool) where it counts; None is everywhere.
    """
    value, bent = value.detach(), torch.zeros((), device=value.device, dtype=value.dtype)
    for carrier, where in carriers:
        share = value / stabilised(carrier.detach(), epsilon)
        bent = bent + carrier * (share if where is None else share * where)
    return value + (bent - bent.detach())


def stabilised(values: Tensor, epsilon: float) -> Tensor:
    """A denominator that is not 0: moved away from it by epsilon."""
    return values + epsilon * torch.where(values < 0, -1.0, 1.0).to(values)


def attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    *, seen: Callable[[Tensor], Tensor] = lambda weights: weights,
    product: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
) -> Tensor:  # fmt: skip
    """scaled_dot_product_attention in evaluation mode, step by step.

    seen: gets the weights "... n n" and gives back those that go on; product: how matrices are multiplied.
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
    """What torch's multi-head attention computes for one sequence "n b c", from functions that have rules."""
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
