"""Faster passes with the results of the plain network, up to rounding. Entry point: `Accelerator`.

Batch norms are folded into convolutions, on a GPU fused with shortcut and ReLU (folding.py), and passes are
recorded as CUDA graphs (`Graphs`). `accelerate=False` of a Model, or HEATPROOF_ACCELERATE=0 in the
environment, switches all of it off: passes then take the number of inputs that is given, or the usual one,
and the network's modules run one by one. Work is divided into parts that fit in memory, and a run takes a
quarter of a GPU's free memory, or the share that HEATPROOF_GPU_MEMORY names.

Rows must not depend on the load of the machine, and the same image has other last bits in a pass of another
size. So the number of inputs per pass is not timed; on a GPU it is halved until a pass takes a fraction of
the run's memory, a pass that runs out of memory is first repeated at the same size, and passes are padded to
the same sizes with and without recordings. On a CPU layer outputs take megabytes, which glibc requests from
the system at every layer: in long jobs it reuses up to 1 GiB of freed memory instead.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import threading
import time
import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from heatproof.errors import InputError, first_line
from heatproof.models.accel.folding import Folding
from heatproof.models.running import (
    ModuleState,
    exclusive,
    forwards_replaced,
    frozen_eval,
    interrupts,
    is_out_of_memory,
    is_watched,
)
from heatproof.timeline import span
from heatproof.types import size_of

if TYPE_CHECKING:
    from heatproof.models.model import Model

SWITCH = "HEATPROOF_ACCELERATE"
WORTH_IT = 256  # inputs of a job from which folding saves more time than computing its weights takes
PIXELS = 224 * 224
CPU_USUAL, CUDA_USUAL = 8, 256  # at 224x224
CPU_MOST, CUDA_MOST = 128, 1024  # of small images
KEPT_BYTES = 2**30  # of freed memory, in the process
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt
MEMORY = "HEATPROOF_GPU_MEMORY"  # share of the free memory of a GPU that a run takes
MEMORY_SHARE = 0.25
KEEPING = 4  # on a GPU, inputs of a forward pass for each input of a pass that keeps its activations
FITTING = 0.25  # share of the available memory for the activations of a pass; recordings and caches take more
WAITS = (1.0, 4.0, 15.0)  # seconds before a single input is tried again, while other programs hold the memory
MOST = 6  # recordings of a Model
SEEN = 2  # passes of a shape before it is recorded
LATER = 30  # further passes before it is tried again, where memory ran out
Function = Callable[..., Any]  # tensors "b ..." in, a tree of tensors "b ..." out
Result = TypeVar("Result")
log = logging.getLogger("heatproof")
_reported: set[str] = set()  # names of networks for which memory ran out


@dataclass
class AccelerationState:
    """What was determined for one model; stored in its facts."""

    folding: tuple[Hashable, Folding] | None = None  # with the network that it was determined for
    graphs: Graphs | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> AccelerationState:
        """A copied network determines its own state."""
        return AccelerationState()


class Accelerator:
    """Runs the passes of a model. Created for every call: the state is in the model's facts."""

    def __init__(self, model: Model) -> None:
        self.model, self.state = model, model.facts.acceleration
        self.enabled = model.accelerate and os.environ.get(SWITCH, "1") != "0"
        self.used: Folding | None = None  # in the passes of a job
        self.key: Hashable = None  # of the recordings of a job

    def batch_size(self, image_size: tuple[int, ...]) -> int:
        """Inputs per pass: as given, scaled by the area of the images, or the usual number."""
        model = self.model
        if model.inputs_per_pass is None:
            return usual_batch(model.device, image_size)
        own = math.prod(model.preprocess.size)
        return max(1, round(model.inputs_per_pass * own / math.prod(image_size)))

    def run_batch_size(self) -> int:
        """Inputs per pass for a run with images of the model's own size."""
        model, seen = self.model, self.model.preprocess
        if model.device.type != "cuda":
            return self.batch_size(seen.size)
        noise = torch.randn(8, seen.channels, *seen.size, generator=torch.Generator().manual_seed(0))
        with frozen_eval(model.module):
            return self.fitting_batch_size(noise.to(model.device))

    def fitting_batch_size(self, images: Tensor) -> int:
        """The usual inputs per pass, halved until passes that keep their activations fit in GPU memory."""
        device, size = self.model.device, self.batch_size(size_of(images))
        before, images = torch.cuda.memory_allocated(device), images[:size]
        available = memory_fraction(device) * torch.cuda.mem_get_info(device)[1] - before
        torch.cuda.reset_peak_memory_stats(device)
        try:
            with torch.enable_grad():
                self.model.forward(self.model.ready(images).requires_grad_())
        except torch.OutOfMemoryError:
            return 1
        each = (torch.cuda.max_memory_allocated(device) - before) / len(images)
        while size > 1 and size / KEEPING * each > FITTING * available:
            size = (size + 1) // 2
        return size

    def job(self, images: Tensor, count: int) -> Accelerator:
        """Prepare a job of `count` inputs like these images, without our hooks, inside `frozen_eval(...)`."""
        if self.enabled and count >= WORTH_IT and not images.is_cuda:
            keep_freed_memory()
        self.used = self.folding(images[:1]) if count >= WORTH_IT else None
        if self.used is not None:
            self.used.refresh()
        # A recording reads the folded weights, so they must live as long as it does.
        self.key = self.graphs and (self.graphs.state(self.model.module), self.model.precision, self.used)
        return self

    def logits(self, images: Tensor, most: int) -> Tensor:
        """Tensor "b k" for images that are `ready`, in a job with at most `most` inputs per pass."""
        if self.graphs is None:
            return self._logits(images)
        size = padded_size(len(images), most)
        logits: Tensor = self.graphs.run(("logits", self.key), self._logits, (images,), size)
        return logits

    def input_gradients(self, images: Tensor, targets: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """Gradient "b c h w" of each target's logit and the "b k" logits, in a job; most: as for logits."""
        with span("backward", inputs=len(images)):
            pass  # counted here: a replayed recording runs no Python and opens no spans
        if self.graphs is None:
            return self._gradients(images, targets)
        inputs, size = (images, targets.to(images.device)), padded_size(len(images), most)
        gradient, logits = self.graphs.run(("gradients", self.key), self._gradients, inputs, size)
        return gradient, logits

    def _logits(self, images: Tensor) -> Tensor:
        with self.used() if self.used else nullcontext():
            return self.model.forward(images)

    def _gradients(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with self.used() if self.used and self.used.differentiable else nullcontext():
            return self.model.input_gradient(images, targets)

    def faster_pass(self, images: Tensor) -> Callable[[], AbstractContextManager[None]] | None:
        """A context in which a pass of these images without input gradients is faster; None if there is none.

        On a GPU convolutions run fused with norm and ReLU. On a CPU, a pass in contiguous format pools in
        channels-last format, which is several times as fast and returns the same values.
        """
        if self.model.device.type == "cuda":
            folding = self.folding(images[:1])
            return None if folding is None else folding.refreshed
        if not self.enabled or not self.model.prefers_planes(images):
            return None

        def pool(part: nn.MaxPool2d, images: Tensor) -> Tensor:
            images = images.contiguous(memory_format=torch.channels_last)
            return cast(Tensor, nn.MaxPool2d.forward(part, images)).contiguous()

        parts = [part for part in self.model.module.modules() if type(part) is nn.MaxPool2d]
        return partial(forwards_replaced, {p: partial(pool, p) for p in parts if not p.return_indices})

    def recorded(self, request: Hashable, function: Callable[..., Any], images: Tensor, targets: Any) -> Any:
        """function(images), or function(images, columns), as a CUDA graph; None if nothing is recorded.

        request: what the function computes, besides the images and the network, by which `replayed` finds it.
        """
        graphs, module = self.graphs, self.model.module
        if graphs is None or not self.records:
            return None
        reads = [tensor.detach() for tensor in (*module.parameters(), *module.buffers())]
        inputs, key = self._inputs(images, targets), self._key(graphs, request)
        return graphs.run(key, function, inputs, request=request, reads=reads)

    def replayed(self, request: Hashable, images: Tensor, targets: Any) -> Any:
        """Results of an earlier request from its recording; None if there is none or the network changed."""
        graphs = self.state.graphs if self.enabled else None
        if graphs is None or graphs.reason or request not in graphs.requests:
            return None
        expected = self.model.facts.versions
        with exclusive(self.model.module):
            try:
                inputs = self._inputs(images, targets)
                results = graphs.replay(request, inputs, lambda: self._key(graphs, request))
            except torch.OutOfMemoryError:
                return None  # out of memory: the queue repeats the pass with half the inputs
            if expected is not None and graphs.versions != expected:
                return None
            return results

    def describe(self) -> list[str]:
        """Sentences for a run's log: how the passes of this network run."""
        sentences = []
        _, folding = self.state.folding or (None, Folding())
        if folding.steps:
            sentences.append(
                f"{len(folding.steps)} batch norms are folded into the convolutions in front of them"
                if folding.differentiable
                else f"{len(folding.steps)} convolutions run as one kernel with what follows up to their ReLU"
            )
        if self.state.graphs is not None and self.state.graphs.reason:
            sentences.append(f"passes run kernel by kernel: {self.state.graphs.reason}")
        return sentences

    @property
    def records(self) -> bool:
        """Whether passes are recorded."""
        graphs = self.graphs
        return graphs is not None and not graphs.reason and self.model.facts.columns is not None

    @cached_property
    def graphs(self) -> Graphs | None:
        """The recordings of a network on a GPU, after its first pass; None where passes are not recorded."""
        model = self.model
        on_gpu = self.enabled and model.device.type == "cuda"
        if not on_gpu or not model.was_seen or not recordable(model.module):
            return None
        self.state.graphs = self.state.graphs or Graphs()
        return self.state.graphs

    def folding(self, image: Tensor) -> Folding | None:
        """The folding of the network, determined once; None if nothing is folded, or modules have hooks."""
        model, fuse = self.model, self.model.device.type == "cuda"
        # A custom `call` may run anything: nothing is known about its modules.
        if not self.enabled or model.call is not None or (fuse and not recordable(model.module)):
            return None
        key = model.device, model.dtype, model.precision, *map(id, model.module.modules())
        known, folding = self.state.folding or (None, Folding())
        if known != key:
            folding = Folding.of(model, model.ready(image), fuse)
            self.state.folding = key, folding
        parts = model.module.modules() if fuse else folding.parts
        changed = any(part.training or (not fuse and is_watched(part)) for part in parts)
        return folding if folding.steps and not changed else None

    def _inputs(self, images: Tensor, targets: Any) -> list[Tensor]:
        if targets is None:
            return [images]
        table = torch.empty(len(images), self.model.facts.columns or 0, device=self.model.device)
        return [images, self.model.check_targets(targets, table)]

    def _key(self, graphs: Graphs, request: Hashable) -> Hashable:
        model = self.model
        return request, graphs.state(model.module), model.device, model.precision, self.state.folding


def usual_batch(device: torch.device, image_size: tuple[int, ...]) -> int:
    """Batch size that suits most networks at this image size; the queue shrinks it if memory is short."""
    usual, most = (CUDA_USUAL, CUDA_MOST) if device.type == "cuda" else (CPU_USUAL, CPU_MOST)
    return max(1, min(most, usual * PIXELS // math.prod(image_size)))


def padded_size(count: int, most: int) -> int:
    """Inputs of the pass that computes `count` of them: the next power of two, at most `most`.

    >>> [padded_size(count, 60) for count in (60, 33, 32, 5, 1, 0)]
    [60, 60, 32, 8, 1, 0]
    """
    return max(count, min(most, 1 << (count - 1).bit_length() if count else 0))


@cache
def keep_freed_memory() -> None:
    """Let glibc reuse freed memory instead of returning it to the system; does nothing elsewhere."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL("libc.so.6")
        for parameter in (TRIM_THRESHOLD, MMAP_THRESHOLD):
            library.mallopt(parameter, KEPT_BYTES)


@contextmanager
def limited_memory(device: str | torch.device) -> Iterator[None]:
    """Let this process allocate at most a share of the GPU memory that is free, by default a quarter.

    Memory that tensors of this process occupy already is not counted. The limit is removed at the end, and
    unused memory is released for other programs.
    """
    try:
        share = float(os.environ.get(MEMORY, MEMORY_SHARE))
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise InputError(f"{MEMORY} is a share of the free memory, from 0 to 1; got {os.environ[MEMORY]!r}")
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():  # the study's checks refuse a missing device
        yield
        return
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_allocated(device)
    available = free + torch.cuda.memory_reserved(device) - own
    before = memory_fraction(device)
    torch.cuda.set_per_process_memory_fraction(min(before, (own + share * available) / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)
        torch.cuda.empty_cache()


def in_parts(
    device: torch.device,
    name: str,
    count: int,
    work: Callable[[int, int], Result],
    size: Callable[[int], int] | None = None,
    shrunk: Callable[[int], object] | None = None,
) -> Iterator[tuple[Result, int]]:
    """Yield work(start, stop) for all inputs, and the number of inputs; parts are halved if memory runs out.

    On a GPU, a part is first tried again at the same size, without recordings and cached memory.
    Without inputs, work(0, 0) is called once: a batch may consist of images that cannot be read.
    name: of the network, for the log. size: largest part for the number of inputs left; default: all.
    shrunk: called with each smaller size.
    """
    start, most, waits = 0, count, list(WAITS if device.type == "cuda" else ())
    failed = -1  # where the part began that is tried again
    while start < count or count == 0:
        stop = start + min(most, size(count - start) if size else count - start)
        results: list[Result] = []
        try:
            results.append(work(start, stop))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error) or (stop - start == 1 and not waits):
                raise
        if results:
            yield results.pop(), stop - start
            if count == 0:
                return
            start = stop
            continue
        release_memory(device)  # outside the handler, since the traceback keeps tensors alive
        if device.type == "cuda" and start != failed:
            failed = start
        elif stop - start == 1:
            time.sleep(waits.pop(0))
        else:
            most = (stop - start + 1) // 2
            report_short_memory(name, stop - start)
            if shrunk:
                shrunk(most)


def release_memory(device: torch.device) -> None:
    """Release what can be released after a pass that ran out of memory."""
    drop_recordings()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def report_short_memory(name: str, inputs: int) -> None:
    """Log once for each network that passes are made smaller."""
    if name not in _reported:
        _reported.add(name)
        text = "a pass of %d images does not fit into memory; smaller passes are run, whose results agree"
        log.warning(f"%s: {text} up to rounding", name, inputs)


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
    """Passes of one network that are recorded as CUDA graphs: all kernels of a pass are launched at once.

    At small batches a GPU waits for Python. A pass of one shape is recorded the third time it occurs and
    replayed from then on. A recording reads weights where they lie, so it sees weights that were changed in
    place; everything else that it cannot see is part of its key: where the weights lie, the modules, their
    attributes and modes, torch's settings. (A list that a network keeps and other code changes in place is
    not seen.) Networks with hooks run Python code of their own and are never recorded. A pass that cannot be
    recorded (it reads a number from the GPU on the way) runs kernel by kernel at the same size, and `reason`
    is the cause. A Model stores its last few recordings; all share one memory pool, with a limit.
    """

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
        size: int | None = None,
        request: Hashable = None,
        reads: Sequence[Tensor] = (),
    ) -> Any:
        """function(*inputs), from a recording where there is one.

        size: of the pass; smaller batches are padded. request: by which `replay` finds this one.
        """
        count = len(inputs[0])
        interrupts.check()
        key, size = _full_key(key, inputs), size or count
        if request is not None:
            self.requests[request] = key, size
            while len(self.requests) > MOST:
                self.requests.popitem(last=False)
        with _memory:
            if (key, size) in self.recordings:
                self.recordings.move_to_end((key, size))
                with span("forward", inputs=count):
                    return _copied_results(self.recordings[key, size], inputs, size)
        padded = [torch.cat([each, each[: size - count]]) if size > count else each for each in inputs]
        if len(self.seen) > 64 * MOST:
            self.seen.clear()
        self.seen[key, size] += 1
        # Recording costs several passes, so a shape must occur repeatedly before it pays.
        if self.reason or self.seen[key, size] <= SEEN:
            return _first_rows(function(*padded), count, size)
        recording, is_short = None, False
        try:
            with _memory:
                recording = self.record(function, padded, reads)
        except Exception as error:  # of any kind; the plain pass below raises it again if it is a bug
            is_short = is_out_of_memory(error)
            if not is_short:
                self.reason = f"its pass cannot be recorded as a CUDA graph ({first_line(error)[:120]})"
                log.info("passes run kernel by kernel: %s", self.reason)
        if recording is None:  # outside the handler, since the traceback keeps tensors alive
            self.recordings.clear()
            if is_short:
                self.seen[key, size] = -LATER
                release_memory(inputs[0].device)
            return _first_rows(function(*padded), count, size)
        self.recordings[key, size] = recording
        while len(self.recordings) > MOST:
            self.recordings.popitem(last=False)
        return _copied_results(recording, inputs, size)


def _copied_results(recording: Function, inputs: Sequence[Tensor], size: int) -> Any:
    """Copies of the results, without rows that pad a batch: the next pass of any network overwrites them."""
    with _memory:
        return tree_map_only(Tensor, Tensor.clone, _first_rows(recording(inputs), len(inputs[0]), size))


def _first_rows(results: Any, count: int, size: int) -> Any:
    """The results without rows that pad a pass of `count` inputs to `size`."""
    if size == count:
        return results
    return tree_map_only(Tensor, lambda tensor: tensor[:count] if len(tensor) == size else tensor, results)


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
