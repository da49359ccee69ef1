"""Passes recorded as CUDA graphs: what was launched kernel by kernel is launched at once.

At small batches a GPU waits for Python. A pass of one shape that comes again is recorded the third time and
replayed from then on; a smaller batch is padded with what the last one left there. A recording reads weights
where they lie, so it sees weights that were changed in place; all else that it cannot see is part of its key:
where the weights lie, the parts of the network, their attributes and modes, torch's settings. (A list that a
network keeps and somebody changes in place is not seen.) Networks with hooks run Python of somebody's own and
are never recorded. What cannot be recorded (a network that asks the GPU for a
number in the middle of its pass) runs as before, and `reason` says why.

A Model keeps its last few recordings, and the memory of their passes, as long as it lives.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from heatproof.models.checkpoints import first_line
from heatproof.models.folding import is_watched
from heatproof.models.interrupts import deferring
from heatproof.timeline import span

MOST = 6  # recordings a Model keeps
SEEN = 2  # passes of a shape before it is recorded
LARGER = 8  # times as many inputs: what a padded batch may waste, where launches are what takes time
PLAIN = (int, float, bool, str, type(None))
OF_EVERY_MODULE = frozenset(nn.Module().__dict__)  # weights, modes, hooks: looked at by themselves
log = logging.getLogger("heatproof")

Function = Callable[..., Any]  # tensors "b ..." in, a tree of tensors "b ..." out


class Replay:
    """One function at one batch size, on the device of what it is given."""

    def __init__(self, function: Function, given: Sequence[Tensor]) -> None:
        self.size, self.device = len(given[0]), given[0].device
        with torch.cuda.device(self.device):
            self._record(function, given)

    def _record(self, function: Function, given: Sequence[Tensor]) -> None:
        with _normal_tensors():
            self.room = [one.detach().clone() for one in given]
            current, side = torch.cuda.current_stream(), torch.cuda.Stream()
            side.wait_stream(current)
            with torch.cuda.stream(side):
                function(*self.room)  # libraries set up their work space outside the recording
                with _refusing_to_wait():
                    function(*self.room)
            current.wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.made = function(*self.room)

    def __call__(self, given: Sequence[Tensor]) -> Any:
        with torch.cuda.device(self.device), _normal_tensors():
            for room, one in zip(self.room, given, strict=True):
                room[: len(one)].copy_(one, non_blocking=True)
            self.graph.replay()
        return self.made


@contextmanager
def _normal_tensors() -> Iterator[None]:
    """Tensors that may be changed later, also where the caller is in inference mode."""
    grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        yield


@contextmanager
def _refusing_to_wait() -> Iterator[None]:
    """An error where the host waits for the GPU, which in a recording would upset more than that."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class Graphs:
    """The recordings of one network."""

    def __init__(self, record: Callable[[Function, Sequence[Tensor]], Any] = Replay) -> None:
        self.record = record
        self.kept: OrderedDict[tuple[Hashable, int], Any] = OrderedDict()
        self.seen: Counter[Hashable] = Counter()
        self.reason = ""  # why nothing is recorded any more

    def __deepcopy__(self, memo: dict[int, Any]) -> Graphs:
        """A copied network records its own passes."""
        return Graphs(self.record)

    def run(self, key: Hashable, function: Function, given: Sequence[Tensor], pad: bool = False) -> Any:
        """function(*given), from a recording where there is one; pad: of a larger batch, where this is not.

        What is returned is overwritten by the next pass.
        """
        count = len(given[0])
        deferring.answer()
        if self.reason:
            return function(*given)
        shapes = tuple((one.dtype, one.stride(), tuple(one.shape[1:])) for one in given)
        shape = key, shapes, torch.is_grad_enabled(), *_settings()
        for size in (count, self._larger(shape, count)) if pad else (count,):
            if (shape, size) in self.kept:
                self.kept.move_to_end((shape, size))
                with span("forward", inputs=count):
                    return _first_rows(self.kept[shape, size](given), size, count)
        self.seen[shape, count] += 1
        if self.seen[shape, count] <= SEEN:
            return function(*given)
        try:
            recording = self.record(function, given)
        except Exception as error:  # whatever it is: without a recording it is raised again, or not
            self.reason = f"its pass cannot be recorded as a CUDA graph ({first_line(error)[:120]})"
            log.info("passes run kernel by kernel: %s", self.reason)
            self.kept.clear()
            return function(*given)
        self.kept[shape, count] = recording
        while len(self.kept) > MOST:
            self.kept.popitem(last=False)
        if len(self.seen) > 64 * MOST:
            self.seen.clear()
        return recording(given)

    def _larger(self, shape: Hashable, count: int) -> int:
        """The size of a recording that this batch is padded for: not one of which it would fill little."""
        sizes = (size for known, size in self.kept if known == shape and count < size <= LARGER * count)
        return min(sizes, default=0)


def _first_rows(made: Any, size: int, count: int) -> Any:
    """Without the rows that padded the batch."""
    if size == count:
        return made
    return tree_map_only(Tensor, lambda one: one[:count] if len(one) == size else one, made)


def recordable(module: nn.Module) -> bool:
    """Whether nothing but torch runs in the network's pass: no hook, no patched forward."""
    return not any(map(is_watched, module.modules()))


def state_of(module: nn.Module) -> int:
    """A hash of what a recording cannot see change: where weights lie, parts, modes, attributes."""
    marks: list[Any] = []
    for part in module.modules():
        own = part.__dict__
        marks += (id(part), own["training"])
        for tensors in (own["_parameters"], own["_buffers"]):
            marks += [one.data_ptr() for one in tensors.values() if one is not None]
        for name in own.keys() - OF_EVERY_MODULE:
            value = own[name]
            marks.append((name, value if type(value) in PLAIN else _mark(value)))
    return hash(tuple(marks))


def _mark(value: object) -> object:
    """What tells whether an attribute was exchanged."""
    if isinstance(value, tuple):
        return repr(value)
    return value.data_ptr() if isinstance(value, Tensor) else id(value)


def _settings() -> tuple[object, ...]:
    """What torch is told, and bakes into a recording."""
    convolutions, products = torch.backends.cudnn, torch.backends.cuda.matmul
    return (
        convolutions.allow_tf32, convolutions.benchmark, convolutions.deterministic, products.allow_tf32,
        torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"),
    )  # fmt: skip
