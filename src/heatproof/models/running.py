"""Run a network without changing it: frozen and in evaluation mode, at a precision, interruptible, hooked.

Precisions:

    fp32   every product in float32, also where torch would let a GPU's convolutions use TF32
    tf32   products of a GPU rounded to 10 bits of mantissa, sums in float32; a CPU computes as in fp32
    bf16   convolutions and matrix products in bfloat16 (torch.autocast), sums in float32
    None   as the network and torch are set

If a precision is named, as in every run, a GPU uses the convolutions that return the same bits each time. A
network whose weights are bfloat16 or float64 keeps them. Maps are float32 in any case.
"""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from heatproof.errors import InputError, did_you_mean
from heatproof.models.names import PRECISIONS
from heatproof.models.wrapped import eagerly


def check_precision(precision: str | None) -> None:
    if precision is not None and precision not in PRECISIONS:
        raise InputError(f"precision cannot be {precision!r}; {did_you_mean(str(precision), PRECISIONS)}")


def usual_precision(device: str | torch.device) -> str:
    """The precision that torch uses on a device by default."""
    rounds = torch.device(device).type == "cuda" and torch.backends.cudnn.allow_tf32
    return "tf32" if rounds else "fp32"


@contextmanager
def computing(precision: str | None, device: torch.device) -> Iterator[None]:
    """Compute at a precision while the context is open; torch's settings are restored."""
    if precision is None:
        yield
        return
    # PyTorch requires cache_enabled=False for passes that are recorded as CUDA graphs.
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False):
        if device.type != "cuda":
            yield
            return
        products, convolutions = torch.backends.cuda.matmul, torch.backends.cudnn
        before = products.allow_tf32, convolutions.allow_tf32, convolutions.deterministic
        try:
            products.allow_tf32 = convolutions.allow_tf32 = precision != "fp32"
            # A run promises the same bits on the same GPU; cuDNN's fastest kernels add in varying order.
            convolutions.deterministic = True
            yield
        finally:
            products.allow_tf32, convolutions.allow_tf32, convolutions.deterministic = before


def max_precision(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def at_least_float(tensor: Tensor) -> Tensor:
    """float32, or float64 where the model computes in it."""
    return tensor.to(max_precision(tensor))


def memory_format(images: Tensor) -> torch.memory_format:
    """The memory format in which convolutions are fastest; volumes stay contiguous."""
    return torch.channels_last if images.ndim == 4 else torch.contiguous_format


def is_out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    known = ("can't allocate memory", "status_alloc_failed", "cuda error: out of memory")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(part in text for part in known)


@contextmanager
def frozen_eval(module: nn.Module) -> Iterator[None]:
    """Evaluation mode with frozen parameters; every flag and the random state are restored at the end.

    Ctrl-C is deferred until then: an exception between a change and its `finally` would leave the change.
    """
    parts, weights = _parts_and_weights(module)
    cuda = sorted({w.device.index for w in weights if w.device.type == "cuda"})
    # Networks with random layers draw numbers in their forward; fork_rng keeps training reproducible.
    with interrupts, torch.random.fork_rng(devices=cuda), restore_flags(module), eagerly(parts):
        for part in parts:
            # Not module.eval(): users override it, and some overrides do more than set the flag. Written
            # to __dict__: nn.Module's __setattr__ takes longer than a small network's pass on a GPU.
            part.__dict__["training"] = False
        # Frozen parameters keep autograd from building a graph before the first tapped layer.
        for weight in weights:
            if weight.requires_grad:
                weight.requires_grad_(False)
        yield


@contextmanager
def restore_flags(module: nn.Module) -> Iterator[None]:
    """Restore modes and requires_grad flags when the context ends."""
    parts, weights = _parts_and_weights(module)
    modes = [part.training for part in parts]
    flags = [weight.requires_grad for weight in weights]
    try:
        yield
    finally:
        for part, training in zip(parts, modes, strict=True):
            part.__dict__["training"] = training
        for weight, flag in zip(weights, flags, strict=True):
            if weight.requires_grad != flag:
                weight.requires_grad_(flag)


def _parts_and_weights(module: nn.Module) -> tuple[list[nn.Module], list[nn.Parameter]]:
    """All modules and parameters, each once; several times faster than module.parameters()."""
    parts = list(module.modules())
    owned = (weight for part in parts for weight in part._parameters.values() if weight is not None)
    return parts, list({id(weight): weight for weight in owned}.values())


@contextmanager
def watched(
    module: nn.Module, ended: Callable[..., None] | None = None, started: Callable[..., None] | None = None
) -> Iterator[None]:
    """Call functions when each module of a network starts and ends, by hooks that are removed afterwards.

    ended(name, module, args, kwargs, output) and started(name, module, args, kwargs); the network itself has
    the name "".
    """
    with ExitStack() as hooks:
        for name, part in module.named_modules():
            if started is not None:
                hooks.enter_context(part.register_forward_pre_hook(partial(started, name), with_kwargs=True))
            if ended is not None:
                hooks.enter_context(part.register_forward_hook(partial(ended, name), with_kwargs=True))
        yield


class _Interrupts:
    """Defers Ctrl-C while the scope is open; scopes nest, and the outermost one counts.

    Only the main thread receives signals; other threads defer nothing. The handler that was installed (of a
    run, of an event loop) is called at once, only what it raises is deferred. A second Ctrl-C is not.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.pending: BaseException | None = None
        self.handler: Any = None

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if self.depth == 0:
            self.pending, self.handler = None, signal.getsignal(signal.SIGINT)
            if callable(self.handler):
                signal.signal(signal.SIGINT, self._defer)
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self.depth -= 1
        if self.depth == 0:
            if signal.getsignal(signal.SIGINT) == self._defer:
                signal.signal(signal.SIGINT, self.handler)
            self.check()

    def _defer(self, number: int, frame: FrameType | None) -> None:
        try:
            self.handler(number, frame)
        except BaseException as error:
            if self.pending is not None:
                raise
            self.pending = error

    def check(self) -> None:
        """Raise a deferred interrupt; called where no change is half done."""
        if self.pending is not None and threading.current_thread() is threading.main_thread():
            error, self.pending = self.pending, None
            raise error


interrupts = _Interrupts()


@contextmanager
def same_randomness() -> Iterator[None]:
    """Restore the random states of Python, NumPy and torch (CPU; frozen_eval() restores those of GPUs)."""
    python, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002  # the state that others use
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)  # noqa: NPY002
