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
import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from heatproof.models.checkpoints import first_line
from heatproof.models.folding import HOOKS, is_watched
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

    def __init__(
        self, function: Function, given: Sequence[Tensor], reads: Sequence[Tensor] = (), pool: Any = None
    ) -> None:
        self.size, self.device, self.reads = len(given[0]), given[0].device, reads
        with torch.cuda.device(self.device):
            self._record(function, given, pool)

    def _record(self, function: Function, given: Sequence[Tensor], pool: Any) -> None:
        with _normal_tensors():
            self.room = [one.detach().clone() for one in given]
            current, side = torch.cuda.current_stream(), _side_stream(self.device)
            side.wait_stream(current)
            with torch.cuda.stream(side):
                function(*self.room)  # libraries set up their work space outside the recording
                with _refusing_to_wait():
                    function(*self.room)
            current.wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, pool, side, capture_error_mode="thread_local"):
                self.made = function(*self.room)

    def __call__(self, given: Sequence[Tensor]) -> Any:
        with torch.cuda.device(self.device), _normal_tensors():
            for room, one in zip(self.room, given, strict=True):
                room[: len(one)].copy_(one, non_blocking=True)
            self.graph.replay()
        return self.made


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings: cuBLAS keeps a work space for every stream that it ever saw."""
    return torch.cuda.Stream(device)


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
    _set_sync_debug_mode("error")
    try:
        yield
    finally:
        _set_sync_debug_mode(before)


def _set_sync_debug_mode(mode: int | str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature")
        torch.cuda.set_sync_debug_mode(mode)


_every: weakref.WeakSet[Graphs] = weakref.WeakSet()


def drop_recordings() -> None:
    """Drop the recordings of all networks, whose memory nothing else can use."""
    for graphs in list(_every):
        graphs.kept.clear()


class Graphs:
    """The recordings of one network."""

    def __init__(self, record: Callable[..., Any] = Replay) -> None:
        self.record = record
        self.kept: OrderedDict[tuple[Hashable, int], Any] = OrderedDict()
        self.seen: Counter[Hashable] = Counter()
        self.asked: OrderedDict[Hashable, tuple[Hashable, int]] = OrderedDict()  # recordings by request
        self.reason = ""  # why nothing is recorded any more
        self._seen_as: LookedAt | None = None
        self._memory: Any = None
        _every.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Graphs:
        """A copied network records its own passes."""
        return Graphs(self.record)

    def state(self, module: nn.Module) -> Hashable:
        """What a recording cannot see change, of a network that is recordable; None of another."""
        if self._seen_as is None or not self._seen_as.holds(module):
            self._seen_as = LookedAt(module)
        return self._seen_as.mark

    def guess(self, request: Hashable, given: Sequence[Tensor], key: Callable[[], Hashable]) -> Any:
        """What this request was answered with last time, on what is given now; None where that has changed.

        Whether it has takes as long to find out as a small pass, so the GPU computes meanwhile. Where that
        was in vain nothing is lost: a recording changes its own memory alone, and keeps the weights it reads.
        """
        known = self.asked.get(request)
        if known is None or known not in self.kept or self.reason:
            return None
        deferring.answer()
        with span("forward", inputs=len(given[0])):
            made = self.kept[known](given)
        return made if (_shape(key(), given), len(given[0])) == known else None

    def run(
        self,
        key: Hashable,
        function: Function,
        given: Sequence[Tensor],
        pad: bool = False,
        request: Hashable = None,
        reads: Sequence[Tensor] = (),
        lasting: bool = False,
    ) -> Any:
        """function(*given), from a recording where there is one; pad: of a larger batch, where this is not.

        What is returned is overwritten by the next pass. request: by which `guess` may find it. reads: what
        must not be freed before the recording is, though the network may drop it. lasting: what is returned
        is read while other passes run, so it gets memory of its own.
        """
        count = len(given[0])
        deferring.answer()
        if self.reason:
            return function(*given)
        shape = _shape(key, given)
        if request is not None:
            self.asked[request] = shape, count
            while len(self.asked) > MOST:
                self.asked.popitem(last=False)
        for size in (count, self._larger(shape, count)) if pad else (count,):
            if (shape, size) in self.kept:
                self.kept.move_to_end((shape, size))
                with span("forward", inputs=count):
                    return _first_rows(self.kept[shape, size](given), size, count)
        self.seen[shape, count] += 1
        if self.seen[shape, count] <= SEEN:
            return function(*given)
        try:
            recording = self.record(function, given, reads, None if lasting else self._pool())
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

    def _pool(self) -> Any:
        """Memory that recordings share: one runs at a time, and what it made is copied before the next."""
        if self._memory is None and torch.cuda.is_available():
            self._memory = torch.cuda.graph_pool_handle()
        return self._memory

    def _larger(self, shape: Hashable, count: int) -> int:
        """The size of a recording that this batch is padded for: not one of which it would fill little."""
        sizes = (size for known, size in self.kept if known == shape and count < size <= LARGER * count)
        return min(sizes, default=0)


def _shape(key: Hashable, given: Sequence[Tensor]) -> Hashable:
    shapes = tuple((one.dtype, one.stride(), tuple(one.shape[1:])) for one in given)
    return key, shapes, torch.is_grad_enabled(), *_settings()


def _first_rows(made: Any, size: int, count: int) -> Any:
    """Without the rows that padded the batch."""
    if size == count:
        return made
    return tree_map_only(Tensor, lambda one: one[:count] if len(one) == size else one, made)


def recordable(module: nn.Module) -> bool:
    """Whether nothing but torch runs in the network's pass: no hook, no patched forward."""
    return not any(map(is_watched, module.modules()))


class LookedAt:
    """A network as it was looked at, kept so that it is quickly seen whether it still is.

    What it holds cannot be freed, so nothing else can have taken its place unseen.
    """

    def __init__(self, module: nn.Module) -> None:
        parts = list(module.modules())
        inner = [part.__dict__[name] for part in parts for name in ("_parameters", "_buffers", "_modules")]
        self.module, self.dicts = module, [part.__dict__ for part in parts] + inner
        self.hooks = [part.__dict__[hooks] for part in parts for hooks in HOOKS]
        self.values = self._values()
        self.tensors = [one for one in self.values if isinstance(one, Tensor)]
        self.places = list(map(Tensor.data_ptr, self.tensors))
        self.mark = state_of(module) if recordable(module) else None

    def _values(self) -> list[Any]:
        return [one for own in self.dicts for one in own.values()]

    def holds(self, module: nn.Module) -> bool:
        if module is not self.module or self.mark is None or any(self.hooks):
            return False
        now = self._values()
        same = len(now) == len(self.values) and all(map(is_, now, self.values))
        return same and list(map(Tensor.data_ptr, self.tensors)) == self.places


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
