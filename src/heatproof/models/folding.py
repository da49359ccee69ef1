"""Batch norms folded into the convolutions in front of them, for passes in which nobody looks inside.

    bn(conv(x)) = s (W x + b - mean) + beta = (s W) x + (s (b - mean) + beta),   s = gamma / sqrt(var + eps)

One pass over one image tells which pairs there are: the norm's input is the convolution's output itself,
nothing else reads it, and both run once. In a folded pass the convolution answers with the folded weights and
the norm hands its input on, each by an instance attribute that is gone when the pass ends, as in tail.py. The
folded weights are made anew for every job, in memory of their own, so weights that were changed meanwhile, in
whatever way, are seen. They take as much memory again as the folded convolutions' weights, and stay with the
Model. Where the folded network's answer to that image is not the network's own, nothing is folded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from heatproof.models.model import Model, frozen_eval, max_precision, watched
from heatproof.models.precision import usual_precision

WORTH_IT = 256  # inputs of a job from which folding saves more than making the weights costs
RELATIVE = 1e-4  # how far the folded answer may be, of the largest logit
BatchNorm = nn.modules.batchnorm._BatchNorm
READ_ON_THE_HOST = ("item", "tolist", "__bool__", "__float__", "__int__", "equal", "allclose", "numpy")
Found = tuple[tuple[object, ...], "Folding"] | tuple[None, None]
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Folding:
    """The pairs of one network, and room for their folded weights. The caller holds `frozen_eval(...)`."""

    differentiable = True

    def __init__(self, model: Model, image: Tensor) -> None:
        self.pairs, plain = foldable(model, image)
        self.parts = [part for pair in self.pairs for part in pair]
        self.weights: list[Tensor] = []
        self.biases: list[Tensor] = []
        if self.pairs and not self._agrees(model, image, plain):
            self.pairs, self.parts, self.weights, self.biases = [], [], [], []

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied network finds its own pairs."""
        return None

    @torch.inference_mode(False)
    @torch.no_grad()
    def refresh(self, precision: str | None = None) -> None:
        """Fold the weights as they are now; into the same memory each time, where a CUDA graph reads them."""
        for number, (scale, shift) in enumerate(scales_and_shifts(self.pairs)):
            conv, _ = self.pairs[number]
            dtype = torch.bfloat16 if precision == "bf16" else conv.weight.dtype
            if number == len(self.weights):
                room = torch.empty_like(conv.weight, dtype=dtype, memory_format=torch.channels_last)
                self.weights.append(room)
                self.biases.append(torch.empty_like(scale, dtype=dtype))
            scale = scale.to(max_precision(conv.weight))[:, None, None, None]
            torch.mul(conv.weight, scale, out=self.weights[number])
            self.biases[number].copy_(shift)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Folded while the context is open."""
        if any("forward" in part.__dict__ for part in self.parts):  # someone else's patch: left alone
            yield
            return
        try:
            for (conv, norm), weight, bias in zip(self.pairs, self.weights, self.biases, strict=True):
                conv.__dict__["forward"] = partial(conv._conv_forward, weight=weight, bias=bias)
                norm.__dict__["forward"] = _as_it_is
            yield
        finally:
            for part in self.parts:
                part.__dict__.pop("forward", None)

    @torch.no_grad()
    def _agrees(self, model: Model, image: Tensor, plain: Tensor) -> bool:
        self.refresh(model.precision)
        with self():
            folded = model.forward(image)
        return agree(model, plain, folded)


def agree(model: Model, plain: Tensor, folded: Tensor) -> bool:
    """Whether the logits are the network's own, but for rounding; fewer bits round at other places."""
    if model.precision == "bf16" or model.dtype in (torch.bfloat16, torch.float16):
        relative = 0.1
    else:
        rounds = (model.precision or usual_precision(model.device)) == "tf32"
        relative = 0.01 if rounds and model.dtype == torch.float32 else RELATIVE
    allowed = relative * plain.abs().amax().clamp(min=1e-6)
    return bool(torch.isfinite(plain).all() and ((folded - plain).abs() <= allowed).all())


def folding_of(model: Model, image: Tensor) -> Folding | None:
    """What can be folded, found once for a Model; None where nothing can, or what ran was another network."""
    if model.call is not None:  # who knows where it leads
        return None
    key = model.device, model.dtype, model.precision, *map(id, model.module.modules())
    known, folding = cast(Found, model.facts.folding or (None, None))
    if known != key or folding is None:
        folding = Folding(model, image)
        model.facts.folding = key, folding
    usable = bool(folding.pairs) and not any(part.training or is_watched(part) for part in folding.parts)
    return folding if usable else None


def foldable(model: Model, image: Tensor) -> tuple[list[tuple[nn.Conv2d, BatchNorm]], Tensor]:
    """Pairs of a convolution and the norm that alone reads it, as they run; and the logits "1 k"."""
    runs: Counter[nn.Module] = Counter()
    from_conv: dict[int, nn.Conv2d] = {}  # by the output, which `kept` keeps from being reused
    pairs: list[tuple[nn.Conv2d, BatchNorm, Tensor]] = []
    kept: list[Any] = []

    def ended(_name: str, part: nn.Module, args: Any, _kwargs: Any, output: Any) -> None:
        runs[part] += 1
        kept.append(output)
        if isinstance(part, nn.Conv2d) and type(part).forward is nn.Conv2d.forward:
            from_conv[id(output)] = part
        elif isinstance(part, BatchNorm) and type(part).forward is BatchNorm.forward and args:
            conv = from_conv.get(id(args[0]))
            if conv is not None and part.running_var is not None and part.running_mean is not None:
                pairs.append((conv, part, args[0]))

    with frozen_eval(model.module), torch.no_grad(), watched(model.module, ended), Readers() as readers:
        logits = model.forward(image)
    found = [
        (conv, norm)
        for conv, norm, between in pairs
        if runs[conv] == runs[norm] == 1
        and readers.of(between) == 1
        and conv.out_channels == norm.num_features
        and conv.weight.is_floating_point()
        and not (is_watched(conv) or is_watched(norm))
    ]
    return found, logits


class Readers(TorchFunctionMode):
    """Counts the functions that read each tensor's values."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[int] = Counter()
        self.kept: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        reads = any(isinstance(leaf, Tensor) for leaf in tree_leaves(result))
        if reads or getattr(func, "__name__", "") in READ_ON_THE_HOST:
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self.kept += given
            self.counts.update({id(one) for one in given})
        return result

    def of(self, tensor: Tensor) -> int:
        return self.counts[id(tensor)]


def scales_and_shifts(pairs: Sequence[tuple[nn.Conv2d, BatchNorm]]) -> list[tuple[Tensor, Tensor]]:
    """What each convolution's weights are multiplied by, and its folded bias: float64, all at once."""
    if not pairs:
        return []
    norms = [norm for _, norm in pairs]
    sizes = [norm.num_features for norm in norms]
    variances = [cast(Tensor, norm.running_var) for norm in norms]

    def joined(parts: Iterable[Tensor | None], otherwise: float) -> Tensor | float:
        known = list(parts)
        if all(one is None for one in known):
            return otherwise
        full = (
            v.new_full(v.shape, otherwise) if o is None else o for o, v in zip(known, variances, strict=True)
        )
        return torch.cat([one.detach() for one in full]).double()

    same_eps = len({norm.eps for norm in norms}) == 1
    each_eps = (v.new_full(v.shape, norm.eps) for norm, v in zip(norms, variances, strict=True))
    eps = norms[0].eps if same_eps else joined(each_eps, 0.0)
    scale = (torch.cat(variances).double() + eps).rsqrt() * joined((norm.weight for norm in norms), 1.0)
    mean, bias = joined((norm.running_mean for norm in norms), 0.0), joined((c.bias for c, _ in pairs), 0.0)
    shift = scale * (bias - mean) + joined((norm.bias for norm in norms), 0.0)
    return list(zip(scale.split(sizes), shift.split(sizes), strict=True))


def _as_it_is(images: Tensor) -> Tensor:
    return images


def is_watched(part: nn.Module) -> bool:
    """Whether somebody's own Python runs in its pass: a hook, or a patched forward."""
    own = part.__dict__
    return any(map(own.__getitem__, HOOKS)) or "forward" in own
