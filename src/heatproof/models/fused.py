"""Convolution, batch norm, shortcut and ReLU as one kernel of cuDNN, for passes on a GPU.

    relu(bn(conv(x)) + z) = cudnn_convolution_add_relu(x, s W, z, s (b - mean) + beta),   z may be absent

A GPU spends as long on reading and writing between these as on the convolutions themselves, and folding the
norm alone (folding.py) saves nothing there: the bias it leaves is a kernel of its own. So a convolution is
deferred (`DeferredConv`) until it is known what is done with its output. Where that is a ReLU, all of it runs
at once; anything else gets the convolution's and the norm's own answer, as if nothing had happened. One pass
over one image tells which convolutions end so, and whether the answer is the network's own; if not, nothing
is fused. These kernels know no gradient: what leads to one is never put off.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from heatproof.models.folding import BatchNorm, agree, foldable, is_watched, scales_and_shifts
from heatproof.models.model import Model, max_precision

RELU = (functional.relu, torch.relu, torch.relu_, functional.relu_, Tensor.relu, Tensor.relu_)
RELU6 = (functional.relu6, functional.hardtanh)
IN_PLACE = (torch.relu_, functional.relu_, Tensor.relu_, Tensor.__iadd__, Tensor.add_)
ADD = (torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__)


@dataclass(eq=False)
class FusedStep:
    """A convolution that may end in a ReLU, the norm behind it, and its weights as the kernel takes them."""

    conv: nn.Conv2d
    norm: BatchNorm | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    fused: bool = False  # whether it ever did

    def starts(self, images: Tensor) -> Tensor:
        """The convolution's forward."""
        images = _now(images)
        if torch.is_grad_enabled() and images.requires_grad:
            return self.alone(images, normed=False)
        return DeferredConv(self, images)

    def passes_norm(self, images: Tensor) -> Tensor:
        """The norm's forward."""
        if isinstance(images, DeferredConv) and images.step is self and not images.normed:
            images.normed = True
            return images
        assert self.norm is not None
        return type(self.norm).forward(self.norm, _now(images))

    def alone(self, images: Tensor, normed: bool) -> Tensor:
        """What the network's own parts answer."""
        made: Tensor = self.conv._conv_forward(images, self.conv.weight, self.conv.bias)
        return type(self.norm).forward(self.norm, made) if normed and self.norm else made

    def with_relu(self, images: Tensor, shortcut: Tensor | None) -> Tensor:
        conv, weight = self.conv, cast(Tensor, self.weight)
        images, (stride, padding, dilation) = images.to(weight.dtype), _sides(conv)
        self.fused = True
        if shortcut is None:
            return torch.cudnn_convolution_relu(
                images, weight, self.bias, stride, padding, dilation, conv.groups
            )
        return torch.cudnn_convolution_add_relu(
            images, weight, shortcut, 1.0, self.bias, stride, padding, dilation, conv.groups
        )


class DeferredConv(Tensor):
    """What a convolution will answer, and is not asked for before it is known what follows."""

    step: FusedStep
    images: Tensor
    read: list[tuple[Tensor, int | None]]  # what it will read, as it was when that was settled
    normed: bool
    shortcut: Tensor | None
    made: Tensor | None

    @staticmethod
    def __new__(cls, step: FusedStep, images: Tensor) -> DeferredConv:
        spans = zip(images.shape[2:], step.conv.kernel_size, *_sides(step.conv), strict=True)
        sides = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in spans]
        shape = (len(images), step.conv.out_channels, *sides)
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=images.dtype, device=images.device)
        self.step, self.images, self.read = step, images, [(images, _version(images))]
        self.normed, self.shortcut, self.made = False, None, None
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, first = kwargs or {}, args[0] if args else None
        with torch._C.DisableTorchFunctionSubclass():
            if func in RELU and isinstance(first, DeferredConv):
                return first._rectified(func in IN_PLACE or _in_place(args, kwargs))
            if func in RELU6 and isinstance(first, DeferredConv) and kwargs.get("min_val", 0) == 0:
                return first._rectified(_in_place(args, kwargs), kwargs.get("max_val", 6.0))
            if func in ADD and len(args) == 2 and not kwargs:
                joined = _joined(func in IN_PLACE, *args)
                if joined is not None:
                    return joined
            args, kwargs = tree_map_only(DeferredConv, _now, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(DeferredConv, _now, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _rectified(self, in_place: bool, most: float | None = None) -> Tensor:
        norm, shortcut = self.step.norm, self.shortcut
        if self.made is None and (norm is None or self.normed) and self.step.weight is not None:
            self._check()
            result = self.step.with_relu(self.images, shortcut)
        else:
            result = functional.relu(_now(self))
        if most is not None:
            result = result.clamp_(max=most)
        if in_place:
            self.made = result
        return result

    def _check(self) -> None:
        if any(version != _version(one) for one, version in self.read):
            raise RuntimeError("what a convolution reads was changed before its answer was asked for")

    def with_shortcut(self, other: Tensor, in_place: bool) -> DeferredConv | None:
        """This plus another tensor, still put off; None where it cannot be."""
        step = self.step
        fits = step.weight is not None and other.dtype == step.weight.dtype and other.shape == self.shape
        if self.made is not None or self.shortcut is not None or not fits or other.requires_grad:
            return None
        if step.norm is not None and not self.normed:
            return None
        summed = self if in_place else DeferredConv(step, self.images)
        summed.normed, summed.shortcut = self.normed, other
        summed.read = [*self.read, (other, _version(other))]
        return summed


def _in_place(args: Any, kwargs: Any) -> bool:
    return kwargs.get("inplace") is True or True in args[1:]


def _joined(in_place: bool, left: Any, right: Any) -> DeferredConv | None:
    if isinstance(left, DeferredConv) and isinstance(right, Tensor):
        return left.with_shortcut(_now(right), in_place)
    if isinstance(right, DeferredConv) and isinstance(left, Tensor) and not in_place:
        return right.with_shortcut(_now(left), in_place)
    return None


def _now(images: Tensor) -> Tensor:
    """What was put off, by the network's own parts; other tensors as they are."""
    if not isinstance(images, DeferredConv):
        return images
    with torch._C.DisableTorchFunctionSubclass():
        if images.made is None:
            images._check()
            made = images.step.alone(images.images, images.normed)
            images.made = made if images.shortcut is None else made + images.shortcut
        return images.made


def _sides(conv: nn.Conv2d) -> tuple[list[int], list[int], list[int]]:
    return list(conv.stride), [int(one) for one in conv.padding], list(conv.dilation)


def _version(images: Tensor) -> int | None:
    return None if images.is_inference() else images._version


@dataclass(eq=False)
class Fusion:
    """The steps of one network that end in a ReLU. The caller holds `frozen_eval(...)`."""

    steps: list[FusedStep] = field(default_factory=list)
    differentiable = False

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied network finds its own steps."""
        return None

    @staticmethod
    def of(model: Model, image: Tensor) -> Fusion:
        pairs, plain = foldable(model, image)
        norms = dict(pairs)
        parts = [part for part in model.module.modules() if isinstance(part, nn.Conv2d)]
        # A convolution whose norm cannot be folded is followed by no ReLU, and is dropped below.
        tried = Fusion([FusedStep(conv, norms.get(conv)) for conv in parts if _fusible(conv)])
        try:
            answers = tried._answer(model, image), tried.only_fused()._answer(model, image)
        except RuntimeError:  # cuDNN has no such kernel, or the network changes what it still reads
            return Fusion()
        fine = all(agree(model, plain, answer) for answer in answers)
        return tried.only_fused() if fine else Fusion()

    def only_fused(self) -> Fusion:
        return Fusion([step for step in self.steps if step.fused])

    @torch.no_grad()
    def _answer(self, model: Model, image: Tensor) -> Tensor:
        self.refresh(model.precision)
        with self():
            return model.forward(image)

    @torch.inference_mode(False)
    @torch.no_grad()
    def refresh(self, precision: str | None = None) -> None:
        """Fold the weights as they are now; into the same memory each time, where a CUDA graph reads them."""
        folded = [(step.conv, step.norm) for step in self.steps if step.norm is not None]
        found = iter(scales_and_shifts(folded))
        for step in self.steps:
            own, bias = step.conv.weight.detach(), step.conv.bias
            dtype = torch.bfloat16 if precision == "bf16" else own.dtype
            if step.norm is None and own.dtype == dtype:
                step.weight, step.bias = own, None if bias is None else bias.detach()
                continue
            if step.weight is None:
                step.weight = torch.empty_like(own, dtype=dtype, memory_format=torch.channels_last)
                step.bias = torch.empty(step.conv.out_channels, dtype=dtype, device=own.device)
            scale, shift = next(found) if step.norm is not None else (None, 0.0 if bias is None else bias)
            if scale is None:
                step.weight.copy_(own)
            else:
                torch.mul(own, scale.to(max_precision(own))[:, None, None, None], out=step.weight)
            cast(Tensor, step.bias).copy_(torch.as_tensor(shift))

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Fused while the context is open."""
        parts = [part for step in self.steps for part in (step.conv, step.norm) if part is not None]
        if any("forward" in part.__dict__ for part in parts):  # someone else's patch: left alone
            yield
            return
        try:
            for step in self.steps:
                step.conv.__dict__["forward"] = step.starts
                if step.norm is not None:
                    step.norm.__dict__["forward"] = step.passes_norm
            yield
        finally:
            for part in parts:
                part.__dict__.pop("forward", None)


def _fusible(conv: nn.Conv2d) -> bool:
    """Whether cuDNN's fused kernel computes it, and does so well: not in groups."""
    plain = type(conv).forward is nn.Conv2d.forward and conv.groups == 1 and not is_watched(conv)
    return plain and conv.padding_mode == "zeros" and not isinstance(conv.padding, str)


def fusion_of(model: Model, image: Tensor) -> Fusion | None:
    """What can be fused, found once for a Model; None where nothing can, or what ran was another network."""
    if model.device.type != "cuda" or model.call is not None or any(map(is_watched, model.module.modules())):
        return None
    key = model.device, model.dtype, model.precision, *map(id, model.module.modules())
    known, fusion = cast("tuple[Any, Fusion | None]", model.facts.fusion or (None, None))
    if known != key or fusion is None:
        fusion = Fusion.of(model, model.ready(image))
        model.facts.fusion = key, fusion
    usable = bool(fusion.steps) and not any(part.training for part in model.module.modules())
    return fusion if usable else None
