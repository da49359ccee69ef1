"""Passes recorded as CUDA graphs: all kernels of a pass are launched at once.

At small batches a GPU waits for Python. A pass of one shape is recorded the third time it occurs and replayed
from then on; a smaller batch is padded with what the last one left there. A recording reads weights where
they lie, so it sees weights that were changed in place; everything else that it cannot see is part of its
key: where the weights lie, the modules, their attributes and modes, torch's settings. (A list that a network
keeps and other code changes in place is not seen.) Networks with hooks run Python code of their own and are
never recorded. A pass that cannot be recorded (it reads a number from the GPU on the way) runs as before, and
`reason` is the cause. A Model keeps its last few recordings. All share one memory pool, with a limit.
"""

from __future__ import annotations

import logging
import threading
import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from heatproof.errors import first_line
from heatproof.models.running import ModuleState, interrupts, is_out_of_memory, is_watched
from heatproof.timeline import span

MOST = 6  # recordings of a Model
SEEN = 2  # passes of a shape before it is recorded
LATER = 30  # further passes before it is tried again, where memory ran out
LARGER = 8  # largest ratio of padded to real inputs; at small batches launches cost more than inputs
log = logging.getLogger("heatproof")

Function = Callable[..., Any]  # tensors "b ..." in, a tree of tensors "b ..." out


class Recording:
    """One function at one batch size, on the device of its inputs.

    reads: tensors that must not be freed before the recording is, though the network may drop them.
    """

    def __init__(self, function: Function, inputs: Sequence[Tensor], reads: Sequence[Tensor] = ()) -> None:
        self.device, self.reads = inputs[0].device, reads
        drop_recordings(_most_bytes(self.device))
        self.pool = _shared_pool()
        before = torch.cuda.memory_reserved(self.device)
        with torch.cuda.device(self.device), _normal_tensors():
            self.inputs = [tensor.detach().clone() for tensor in inputs]
            current, side = torch.cuda.current_stream(), _side_stream(self.device)
            side.wait_stream(current)
            with torch.cuda.stream(side):
                function(*self.inputs)  # libraries set up their work space outside the recording
                with _refusing_to_wait():
                    function(*self.inputs)
            current.wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, self.pool, side, capture_error_mode="thread_local"):
                self.outputs = function(*self.inputs)
        self.bytes = max(0, torch.cuda.memory_reserved(self.device) - before)

    def __call__(self, inputs: Sequence[Tensor]) -> Any:
        with torch.cuda.device(self.device), _normal_tensors():
            for own, tensor in zip(self.inputs, inputs, strict=True):
                own[: len(tensor)].copy_(tensor, non_blocking=True)
            self.graph.replay()
        return self.outputs


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all recordings: cuBLAS allocates a work space for every stream it sees."""
    return torch.cuda.Stream(device)


@contextmanager
def _normal_tensors() -> Iterator[None]:
    """Create tensors outside inference mode, so that they may be changed later."""
    grad = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        yield


@contextmanager
def _refusing_to_wait() -> Iterator[None]:
    """Raise an error if the host waits for the GPU, which would break more than the recording itself."""

    def set_mode(mode: int | str) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature")
            torch.cuda.set_sync_debug_mode(mode)

    before = torch.cuda.get_sync_debug_mode()
    set_mode("error")
    try:
        yield
    finally:
        set_mode(before)


_every: weakref.WeakSet[Graphs] = weakref.WeakSet()
_memory = threading.RLock()  # of the shared pool: threads record, and replay and copy, one at a time


def drop_recordings(most: float | None = None) -> None:
    """Drop all recordings of all networks, or the largest until the rest takes at most `most` bytes."""
    with _memory:
        items = [(graphs, *item) for graphs in list(_every) for item in list(graphs.recordings.items())]
        by_size = sorted((getattr(item[2], "bytes", 0), i) for i, item in enumerate(items))
        while by_size and (most is None or sum(size for size, _ in by_size) > most):
            graphs, key, _ = items[by_size.pop()[1]]
            graphs.recordings.pop(key, None)


def _most_bytes(device: torch.device) -> float:
    """Memory for recordings: half of what this process may allocate, at most an eighth of the GPU."""
    return min(memory_fraction(device) / 2, 1 / 8) * torch.cuda.mem_get_info(device)[1]


def memory_fraction(device: torch.device) -> float:
    """Share of a GPU's memory that this process may allocate; 1 with torch 2.5, which does not return it."""
    return float(getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device))


def _shared_pool() -> Any:
    """The memory pool of all recordings: results of one are copied before the next one runs (`_memory`)."""
    # A handle may be used again only while a recording uses it.
    known = (recording for graphs in list(_every) for recording in graphs.recordings.values())
    pools = (getattr(recording, "pool", None) for recording in known)
    return next(filter(None, pools), None) or torch.cuda.graph_pool_handle()


class Graphs:
    """The recordings of one network."""

    def __init__(self, record: Callable[..., Any] = Recording) -> None:
        self.record = record
        self.recordings: OrderedDict[tuple[Hashable, int], Any] = OrderedDict()
        self.seen: Counter[Hashable] = Counter()
        self.requests: OrderedDict[Hashable, tuple[Hashable, int]] = OrderedDict()  # keys of recordings
        self.reason = ""  # why recording was given up
        self._state: ModuleState | None = None
        self.versions: list[Any] | None = None  # of the weights, when `state` was called last
        _every.add(self)

    def state(self, module: nn.Module) -> Hashable:
        """A hash of everything a recording cannot see change; None if the network is not recordable."""
        self.versions = self._state.versions(module) if self._state else None
        if self._state is None or self.versions is None:
            state = ModuleState(module, self._state)
            if state.watched:
                return None
            self._state, self.versions = state, state.versions(module)
        return self._state.mark

    def replay(self, request: Hashable, inputs: Sequence[Tensor], key: Callable[[], Hashable]) -> Any:
        """The results of the recording that answered this request last; None if the network has changed."""
        known = self.requests.get(request)
        recording = self.recordings.get(known) if known else None  # other threads may drop it
        if known is None or recording is None or self.reason:
            return None
        interrupts.check()
        # Checking the network takes as long as a small pass, so it is done while the GPU computes. A replay
        # that is outdated does no harm: it changes its own memory alone, and keeps the weights it reads.
        with span("forward", inputs=len(inputs[0])):
            results = _copied_results(recording, inputs, known[1])
        return results if (_full_key(key(), inputs), len(inputs[0])) == known else None

    def run(
        self,
        key: Hashable,
        function: Function,
        inputs: Sequence[Tensor],
        pad: bool = False,
        request: Hashable = None,
        reads: Sequence[Tensor] = (),
    ) -> Any:
        """function(*inputs), from a recording where there is one.

        pad: whether a recording of a larger batch may be used. request: by which `replay` finds this one.
        """
        count = len(inputs[0])
        interrupts.check()
        if self.reason:
            return function(*inputs)
        key = _full_key(key, inputs)
        if request is not None:
            self.requests[request] = key, count
            while len(self.requests) > MOST:
                self.requests.popitem(last=False)
        most = LARGER * count if pad else count
        with _memory:
            sizes = [size for known, size in self.recordings if known == key and count <= size <= most]
            if sizes:
                size = min(sizes)
                self.recordings.move_to_end((key, size))
                with span("forward", inputs=count):
                    return _copied_results(self.recordings[key, size], inputs, size)
        self.seen[key, count] += 1
        # Recording costs several passes, so a shape must occur repeatedly before it pays.
        if self.seen[key, count] <= SEEN:
            return function(*inputs)
        recording, is_short = None, False
        try:
            with _memory:
                recording = self.record(function, inputs, reads)
        except Exception as error:  # of any kind; the plain pass below raises it again if it is a bug
            is_short = is_out_of_memory(error)
            if not is_short:
                self.reason = f"its pass cannot be recorded as a CUDA graph ({first_line(error)[:120]})"
                log.info("passes run kernel by kernel: %s", self.reason)
        if recording is None:  # outside the handler, since the traceback keeps tensors alive
            self.recordings.clear()
            if is_short:
                self.seen[key, count] = -LATER
                drop_recordings()
                torch.cuda.empty_cache()
            return function(*inputs)
        self.recordings[key, count] = recording
        while len(self.recordings) > MOST:
            self.recordings.popitem(last=False)
        if len(self.seen) > 64 * MOST:
            self.seen.clear()
        return _copied_results(recording, inputs, count)


def _copied_results(recording: Function, inputs: Sequence[Tensor], size: int) -> Any:
    """Copies of the results, without rows that pad a batch: the next pass of any network overwrites them."""
    count = len(inputs[0])
    with _memory:
        results = recording(inputs)
        if size > count:
            results = tree_map_only(Tensor, lambda t: t[:count] if len(t) == size else t, results)
        return tree_map_only(Tensor, Tensor.clone, results)


def _full_key(key: Hashable, inputs: Sequence[Tensor]) -> Hashable:
    """A key with the inputs' layouts and with torch's settings, which a recording fixes."""
    convolutions, products = torch.backends.cudnn, torch.backends.cuda.matmul
    return (
        key, tuple((tensor.dtype, tensor.stride(), tuple(tensor.shape[1:])) for tensor in inputs),
        torch.is_grad_enabled(), convolutions.allow_tf32, convolutions.benchmark, convolutions.deterministic,
        products.allow_tf32, torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"),
    )  # fmt: skip


def recordable(module: nn.Module) -> bool:
    """Whether nothing but torch runs in the network's pass: no hook, no patched forward."""
    return not any(map(is_watched, module.modules()))
