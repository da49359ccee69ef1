"""Convolutions computed together with the batch norm behind them, on a GPU also with shortcut and ReLU.

    bn(conv(x)) = s (W x + b - mean) + beta = (s W) x + (s (b - mean) + beta),   s = gamma / sqrt(var + eps)
    relu(bn(conv(x)) + z) = cudnn_convolution_add_relu(x, s W, z, s (b - mean) + beta),   z is optional

One pass over one image finds the pairs: the norm's input is the convolution's output itself, nothing else
reads it, and both run once. On a CPU the convolution then uses the folded weights and the norm returns its
input. On a GPU folding the norm alone saves nothing, since the bias it leaves is a kernel of its own; there a
convolution is deferred (`DeferredConv`) until it is known what reads its output. If that is a ReLU, one
kernel of cuDNN, which has no gradient, computes all of it; anything else gets the network's own output.
Folded weights are computed anew for every job, so changed weights are seen. If the logits of that image
differ from the network's own by more than rounding, nothing is folded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

from heatproof.models import running
from heatproof.models.running import FunctionsWatched, forwards_replaced, frozen_eval, is_watched, watched

if TYPE_CHECKING:
    from heatproof.models.model import Model

RELATIVE = 1e-4  # largest difference of folded logits, relative to the largest logit
BatchNorm = nn.modules.batchnorm._BatchNorm
READ_ON_THE_HOST = ("item", "tolist", "__bool__", "__float__", "__int__", "equal", "allclose", "numpy")
RELU = (functional.relu, torch.relu, torch.relu_, functional.relu_, Tensor.relu, Tensor.relu_)
RELU6 = (functional.relu6, functional.hardtanh)
IN_PLACE = (torch.relu_, functional.relu_, Tensor.relu_, Tensor.__iadd__, Tensor.add_)
ADD = (torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__)


@dataclass(eq=False)
class FoldedConv:
    """A convolution and the norm behind it, with the folded weight and bias.

    fuses: whether it runs with the norm, shortcut and ReLU behind it as one cuDNN kernel.
    """

    conv: nn.Conv2d
    norm: BatchNorm | None
    fuses: bool = False
    ran_fused: bool = False
    weight: Tensor | None = None
    bias: Tensor | None = None

    @property
    def parts(self) -> list[nn.Module]:
        return [part for part in (self.conv, self.norm) if part is not None]

    def forwards(self) -> Sequence[Callable[[Tensor], Tensor]]:
        """The forwards of `parts` in a folded pass."""
        if self.fuses:
            return (self._start, self._pass_norm)[: len(self.parts)]
        weight = cast(Tensor, self.weight)
        return partial(self.conv._conv_forward, weight=weight, bias=self.bias), lambda images: images

    def fold(self, scale: Tensor | None, shift: Tensor | None, bf16: bool) -> None:
        """Fold the current weights, into the same memory each time, since a CUDA graph reads them there."""
        own, bias = self.conv.weight.detach(), self.conv.bias
        dtype = torch.bfloat16 if bf16 else own.dtype
        if scale is None and own.dtype == dtype:
            self.weight, self.bias = own, None if bias is None else bias.detach()
            return
        if self.weight is None or self.bias is None:
            self.weight = torch.empty_like(own, dtype=dtype, memory_format=torch.channels_last)
            self.bias = torch.empty(self.conv.out_channels, dtype=dtype, device=own.device)
        if scale is None or shift is None:
            self.weight.copy_(own)
            self.bias.copy_(torch.zeros_like(self.bias) if bias is None else bias)
        else:
            torch.mul(own, scale.to(running.max_precision(own))[:, None, None, None], out=self.weight)
            self.bias.copy_(shift)

    def _start(self, images: Tensor) -> Tensor:
        images = computed(images)
        if torch.is_grad_enabled() and images.requires_grad:
            return self.plain(images, normed=False)
        return DeferredConv(self, images)

    def _pass_norm(self, images: Tensor) -> Tensor:
        if isinstance(images, DeferredConv) and images.step is self and not images.normed:
            images.normed = True
            return images
        assert self.norm is not None
        return type(self.norm).forward(self.norm, computed(images))

    def plain(self, images: Tensor, normed: bool) -> Tensor:
        """The output of the network's own modules."""
        output: Tensor = self.conv._conv_forward(images, self.conv.weight, self.conv.bias)
        return type(self.norm).forward(self.norm, output) if normed and self.norm else output

    def with_relu(self, images: Tensor, shortcut: Tensor | None) -> Tensor:
        weight = cast(Tensor, self.weight)
        images, options = images.to(weight.dtype), (*_sides(self.conv), self.conv.groups)
        self.ran_fused = True
        if shortcut is None:
            return torch.cudnn_convolution_relu(images, weight, self.bias, *options)
        return torch.cudnn_convolution_add_relu(images, weight, shortcut, 1.0, self.bias, *options)


class DeferredConv(Tensor):
    """The output of a convolution, computed only when its reader is known."""

    step: FoldedConv
    images: Tensor
    reads: list[tuple[Tensor, int | None]]  # tensors to be read, with versions to detect changes
    normed: bool
    shortcut: Tensor | None
    output: Tensor | None

    @staticmethod
    def __new__(cls, step: FoldedConv, images: Tensor) -> DeferredConv:
        spans = zip(images.shape[2:], step.conv.kernel_size, *_sides(step.conv), strict=True)
        sides = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in spans]
        shape = (len(images), step.conv.out_channels, *sides)
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=images.dtype, device=images.device)
        self.step, self.images, self.reads = step, images, [(images, _version(images))]
        self.normed, self.shortcut, self.output = False, None, None
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, first = kwargs or {}, args[0] if args else None
        with torch._C.DisableTorchFunctionSubclass():
            if func in (*RELU, *RELU6) and isinstance(first, DeferredConv) and kwargs.get("min_val", 0) == 0:
                in_place = func in IN_PLACE or kwargs.get("inplace") is True or True in args[1:]
                return first._rectified(in_place, kwargs.get("max_val", 6.0) if func in RELU6 else None)
            if func in ADD and len(args) == 2 and not kwargs:
                in_place = func in IN_PLACE
                deferred, other = args if in_place or isinstance(first, DeferredConv) else args[::-1]
                if isinstance(deferred, DeferredConv) and isinstance(other, Tensor):
                    summed = deferred.with_shortcut(computed(other), in_place)
                    if summed is not None:
                        return summed
            args, kwargs = tree_map_only(DeferredConv, computed, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = tree_map_only(DeferredConv, computed, (args, kwargs or {}))
        return func(*args, **kwargs)

    @property
    def fusible(self) -> bool:
        """Whether nothing is computed yet and its norm, if there is one, has run."""
        step = self.step
        return self.output is None and (step.norm is None or self.normed) and step.weight is not None

    def _rectified(self, in_place: bool, most: float | None) -> Tensor:
        if self.fusible:
            self.check()
            result = self.step.with_relu(self.images, self.shortcut)
        else:
            result = functional.relu(computed(self))
        if most is not None:
            result = result.clamp_(max=most)
        if in_place:
            self.output = result
        return result

    def check(self) -> None:
        if any(version != _version(tensor) for tensor, version in self.reads):
            raise RuntimeError("the input of a deferred convolution was changed before it was computed")

    def with_shortcut(self, other: Tensor, in_place: bool) -> DeferredConv | None:
        """This plus another tensor, still deferred; None if that is impossible."""
        if not self.fusible or self.shortcut is not None or other.requires_grad:
            return None
        if other.dtype != cast(Tensor, self.step.weight).dtype or other.shape != self.shape:
            return None
        summed = self if in_place else DeferredConv(self.step, self.images)
        summed.normed, summed.shortcut = self.normed, other
        summed.reads = [*self.reads, (other, _version(other))]
        return summed


def computed(images: Tensor) -> Tensor:
    """Compute a deferred tensor with the network's own modules; return other tensors unchanged."""
    if not isinstance(images, DeferredConv):
        return images
    with torch._C.DisableTorchFunctionSubclass():
        if images.output is None:
            images.check()
            output = images.step.plain(images.images, images.normed)
            images.output = output if images.shortcut is None else output + images.shortcut
        return images.output


def _sides(conv: nn.Conv2d) -> tuple[list[int], list[int], list[int]]:
    return list(conv.stride), [int(side) for side in conv.padding], list(conv.dilation)


def _version(images: Tensor) -> int | None:
    return None if images.is_inference() else images._version


@dataclass(eq=False)
class Folding:
    """The folded convolutions of one network. Use inside `frozen_eval(...)`."""

    steps: Sequence[FoldedConv] = ()
    precision: str | None = None

    @staticmethod
    def of(model: Model, image: Tensor, fuse: bool) -> Folding:
        """Find the convolutions to fold, or to fuse, by passes over one image."""
        pairs, plain = foldable(model, image)
        tried = Folding([FoldedConv(*pair) for pair in pairs], model.precision)
        if fuse:  # a convolution whose norm cannot be folded is followed by no ReLU, and dropped below
            norms = dict(pairs)
            convolutions = (part for part in model.module.modules() if isinstance(part, nn.Conv2d))
            tried.steps = [
                FoldedConv(conv, norms.get(conv), fuses=True) for conv in convolutions if _fusible(conv)
            ]
        try:
            # Structure alone cannot prove that folding is exact (shared modules, forwards with branches), so
            # the result is compared with the plain network before it is used.
            fine = not tried.steps or agree(model, plain, tried._logits(model, image))
            if fuse:
                tried.steps = [step for step in tried.steps if step.ran_fused]
                fine = fine and agree(model, plain, tried._logits(model, image))
        except RuntimeError as error:
            if running.is_out_of_memory(error):
                raise
            fine = False  # cuDNN has no such kernel, or the network modifies a tensor before it is read
        return tried if fine else Folding()

    @property
    def parts(self) -> list[nn.Module]:
        return [part for step in self.steps for part in step.parts]

    @property
    def differentiable(self) -> bool:
        return not any(step.fuses for step in self.steps)

    @torch.inference_mode(False)
    @torch.no_grad()
    def refresh(self) -> None:
        """Fold the weights as they are now."""
        pairs = [(step.conv, step.norm) for step in self.steps if step.norm is not None]
        folded = iter(scales_and_shifts(pairs))
        for step in self.steps:
            scale, shift = next(folded) if step.norm is not None else (None, None)
            step.fold(scale, shift, self.precision == "bf16")

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Run folded while the context is open, with the weights of the last refresh."""
        parts = self.parts
        patched = any("forward" in part.__dict__ for part in parts)  # by other code: left alone
        own = [] if patched else [forward for step in self.steps for forward in step.forwards()]
        with forwards_replaced(dict(zip(parts, own, strict=not patched))):
            yield

    @contextmanager
    def refreshed(self) -> Iterator[None]:
        """Run folded while the context is open, with the weights as they are now."""
        self.refresh()
        with self():
            yield

    @torch.no_grad()
    def _logits(self, model: Model, image: Tensor) -> Tensor:
        with self.refreshed():
            return model.forward(image)


def agree(model: Model, plain: Tensor, folded: Tensor) -> bool:
    """Whether logits agree up to rounding at the model's precision."""
    if model.precision == "bf16" or model.dtype in (torch.bfloat16, torch.float16):
        relative = 0.1
    else:
        rounds = (model.precision or running.usual_precision(model.device)) == "tf32"
        relative = 0.01 if rounds and model.dtype == torch.float32 else RELATIVE
    allowed = relative * plain.abs().amax().clamp(min=1e-6)
    return bool(torch.isfinite(plain).all() and ((folded - plain).abs() <= allowed).all())


def _fusible(conv: nn.Conv2d) -> bool:
    """Whether cuDNN's fused kernel supports the convolution and is fast for it: not grouped ones."""
    plain = type(conv).forward is nn.Conv2d.forward and conv.groups == 1 and not is_watched(conv)
    return plain and conv.padding_mode == "zeros" and not isinstance(conv.padding, str)


def foldable(model: Model, image: Tensor) -> tuple[list[tuple[nn.Conv2d, BatchNorm]], Tensor]:
    """Find pairs of a convolution and a norm that alone reads it, by one pass; also the logits "1 k"."""
    runs: Counter[nn.Module] = Counter()
    readers: Counter[int] = Counter()  # by a tensor's id, which `outputs` keeps from being reused
    from_conv: dict[int, nn.Conv2d] = {}  # by the output's id
    pairs: list[tuple[nn.Conv2d, BatchNorm, Tensor]] = []
    outputs: list[Any] = []

    def ended(_name: str, part: nn.Module, args: Any, _kwargs: Any, output: Any) -> None:
        runs[part] += 1
        outputs.append(output)
        if isinstance(part, nn.Conv2d) and type(part).forward is nn.Conv2d.forward:
            from_conv[id(output)] = part
        elif isinstance(part, BatchNorm) and type(part).forward is BatchNorm.forward and args:
            conv = from_conv.get(id(args[0]))
            if conv is not None and part.running_var is not None and part.running_mean is not None:
                pairs.append((conv, part, args[0]))

    def read(func: Any, args: Any, kwargs: Any, result: Any) -> None:
        makes = any(isinstance(leaf, Tensor) for leaf in tree_leaves(result))
        if makes or getattr(func, "__name__", "") in READ_ON_THE_HOST:
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            outputs.extend(given)
            readers.update(set(map(id, given)))

    functions = FunctionsWatched(read)
    with frozen_eval(model.module), torch.no_grad(), watched(model.module, ended), functions:
        logits = model.forward(image)
    chosen = [
        (conv, norm)
        for conv, norm, between in pairs
        if runs[conv] == runs[norm] == 1
        and readers[id(between)] == 1
        and conv.out_channels == norm.num_features
        and conv.weight.is_floating_point()
        and not (is_watched(conv) or is_watched(norm))
    ]
    return chosen, logits


def scales_and_shifts(pairs: Sequence[tuple[nn.Conv2d, BatchNorm]]) -> list[tuple[Tensor, Tensor]]:
    """The factor of each convolution's weights and its folded bias: float64, all computed at once."""
    if not pairs:
        return []
    norms = [norm for _, norm in pairs]
    variances = [cast(Tensor, norm.running_var) for norm in norms]

    def joined(values: Iterable[Tensor | float | None], default: float) -> Tensor | float:
        known = list(values)
        if all(value is None for value in known):
            return default
        full = (
            value.detach() if isinstance(value, Tensor) else v.new_full(v.shape, value or default)
            for value, v in zip(known, variances, strict=True)
        )
        return torch.cat(list(full)).double()

    same_eps = len({norm.eps for norm in norms}) == 1
    eps = norms[0].eps if same_eps else joined((norm.eps for norm in norms), 0.0)
    scale = (torch.cat(variances).double() + eps).rsqrt() * joined((norm.weight for norm in norms), 1.0)
    mean, bias = joined((norm.running_mean for norm in norms), 0.0), joined((c.bias for c, _ in pairs), 0.0)
    shift = scale * (bias - mean) + joined((norm.bias for norm in norms), 0.0)
    sizes = [norm.num_features for norm in norms]
    return list(zip(scale.split(sizes), shift.split(sizes), strict=True))
