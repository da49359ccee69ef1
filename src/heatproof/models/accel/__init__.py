"""Faster passes with the results of the plain network, up to rounding. Entry point: `Accelerator`.

Batch norms are folded into convolutions, on a GPU fused with shortcut and ReLU (folding.py), and passes are
recorded as CUDA graphs (graphs.py). `accelerate=False` of a Model, or HEATPROOF_ACCELERATE=0 in the
environment, switches all of it off: passes then take the number of inputs that is given, or the usual one,
and the network's modules run one by one. Work is divided into parts that fit in memory, and a run takes a
quarter of a GPU's free memory, or the share that HEATPROOF_GPU_MEMORY names.

The number of inputs per pass is measured, once for a Model and an image size, if that costs at most a
fiftieth of a job: on a CPU a large batch is slower, since layer outputs then take tens of megabytes, which
the C library requests from the system at every layer. Only the last bits of a result may depend on it.
"""

from __future__ import annotations

import logging
import math
import os
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from heatproof.errors import InputError
from heatproof.models.accel.folding import Folding
from heatproof.models.accel.graphs import Graphs, drop_recordings, memory_fraction, recordable
from heatproof.models.running import exclusive, frozen_eval, is_out_of_memory, is_watched
from heatproof.timeline import span
from heatproof.types import size_of

if TYPE_CHECKING:
    from heatproof.models.model import Model

SWITCH = "HEATPROOF_ACCELERATE"
WORTH_IT = 256  # inputs of a job from which folding saves more time than computing its weights takes
PIXELS = 224 * 224
CPU_USUAL, CUDA_USUAL = 8, 256  # at 224x224; half and twice as many are tried too
CPU_MOST, CUDA_MOST = 128, 1024  # of small images
TRIAL_SHARE = 0.02  # largest cost of a trial, as a share of the job
ROUNDS = 2
FASTER = 0.95  # share of the usual size's time below which another size is chosen
MEMORY = "HEATPROOF_GPU_MEMORY"  # share of the free memory of a GPU that a run takes
MEMORY_SHARE = 0.25
WAITS = (1.0, 4.0, 15.0)  # seconds before a single input is tried again, while other programs hold the memory
Result = TypeVar("Result")
log = logging.getLogger("heatproof")
_reported: set[str] = set()  # names of networks for which memory ran out


@dataclass
class AccelerationState:
    """What was determined for one model; stored in its facts."""

    batches: dict[tuple[Any, ...], int] = field(default_factory=dict)  # fastest inputs per pass
    folding: tuple[Hashable, Folding] | None = None  # with the network that it was determined for
    graphs: Graphs | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> AccelerationState:
        """A copied network determines its own state."""
        return AccelerationState(dict(self.batches))


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

    def fastest_batch_size(self, images: Tensor, count: int) -> int:
        """Inputs per pass for a job of `count` inputs like these images, inside `frozen_eval(...)`."""
        model, size = self.model, size_of(images)
        sizes = trial_sizes(model.device, size)
        is_worth_a_trial = count * TRIAL_SHARE >= (ROUNDS + 1) * sum(sizes)
        if not self.enabled or model.inputs_per_pass is not None or not is_worth_a_trial:
            return self.batch_size(size)
        known, key = self.state.batches, (model.device, model.precision, tuple(images.shape[1:]))
        if key not in known:
            known[key] = fastest(model, images, sizes)
        return known[key]

    def measured_batch_size(self, count: int) -> int:
        """Inputs per pass for a run of `count` inputs of the model's own size."""
        model, seen = self.model, self.model.preprocess
        noise = torch.randn(8, seen.channels, *seen.size, generator=torch.Generator().manual_seed(0))
        with frozen_eval(model.module):
            return self.fastest_batch_size(noise.to(model.device), count)

    def job(self, images: Tensor, count: int) -> Accelerator:
        """Prepare a job of `count` inputs like these images, without our hooks, inside `frozen_eval(...)`."""
        self.used = self.folding(images[:1]) if count >= WORTH_IT else None
        if self.used is not None:
            self.used.refresh()
        # A recording reads the folded weights, so they must live as long as it does.
        self.key = self.graphs and (self.graphs.state(self.model.module), self.model.precision, self.used)
        return self

    def logits(self, images: Tensor) -> Tensor:
        """Tensor "b k" for images that are `ready`, in a job."""
        if self.graphs is None:
            return self._logits(images)
        logits: Tensor = self.graphs.run(("logits", self.key), self._logits, (images,), pad=True)
        return logits

    def input_gradients(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient "b c h w" of each target's logit and the "b k" logits, in a job."""
        with span("backward", inputs=len(images)):
            pass  # counted here: a replayed recording runs no Python and opens no spans
        if self.graphs is None:
            return self._gradients(images, targets)
        inputs = images, targets.to(images.device)
        gradient, logits = self.graphs.run(("gradients", self.key), self._gradients, inputs, pad=True)
        return gradient, logits

    def _logits(self, images: Tensor) -> Tensor:
        with self.used() if self.used else nullcontext():
            return self.model.forward(images)

    def _gradients(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with self.used() if self.used and self.used.differentiable else nullcontext():
            return self.model.input_gradient(images, targets)

    def fused(self, images: Tensor) -> Callable[[], AbstractContextManager[None]] | None:
        """A context in which convolutions run fused with norm and ReLU on a GPU; None if they cannot."""
        folding = self.folding(images[:1]) if self.model.device.type == "cuda" else None
        return None if folding is None else folding.refreshed

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
        sentences = [
            f"{batch} inputs of {'x'.join(map(str, key[2]))} per pass were fastest"
            for key, batch in self.state.batches.items()
        ]
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


def trial_sizes(device: torch.device, image_size: tuple[int, ...]) -> tuple[int, ...]:
    usual = usual_batch(device, image_size)
    return tuple(sorted({max(1, usual // 2), usual, 2 * usual}))


@torch.no_grad()
def fastest(model: Model, images: Tensor, sizes: Sequence[int]) -> int:
    """The size with the least time per input; the usual one unless another is clearly faster."""
    usual = usual_batch(model.device, size_of(images))
    # Real images, repeated: a network may take longer for inputs unlike those it was trained on.
    batches = {n: images[torch.arange(n, device=images.device) % len(images)] for n in sizes}
    times: dict[int, list[float]] = {n: [] for n in sizes}
    for turn in range(ROUNDS + 1):
        for n, batch in list(batches.items()):
            try:
                seconds = _seconds(model, model.ready(batch))
            except (RuntimeError, MemoryError):  # too large for the memory
                del batches[n], times[n]
                continue
            if turn:  # the first warms up
                times[n].append(seconds / n)
    medians = {n: statistics.median(of) for n, of in times.items() if of}
    best = min(medians, key=medians.__getitem__, default=usual)
    return best if usual not in medians or medians[best] < FASTER * medians[usual] else usual


def _seconds(model: Model, batch: Tensor) -> float:
    def now() -> float:
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        return time.perf_counter()

    begin = now()
    model.forward(batch)
    return now() - begin


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
    model: Model,
    count: int,
    work: Callable[[int, int], Result],
    size: Callable[[int], int] | None = None,
    shrunk: Callable[[int], object] | None = None,
) -> Iterator[tuple[Result, int]]:
    """Yield work(start, stop) for all inputs, and the number of inputs; parts are halved if memory runs out.

    Without inputs, work(0, 0) is called once: a batch may consist of images that cannot be read.
    size: largest part for the number of inputs left; default: all. shrunk: called with each smaller size.
    """
    start, most, waits = 0, count, list(WAITS if model.device.type == "cuda" else ())
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
        release_memory(model, stop - start)  # outside the handler, since the traceback keeps tensors alive
        if stop - start == 1:
            time.sleep(waits.pop(0))
        else:
            most = (stop - start + 1) // 2
            if shrunk:
                shrunk(most)


def release_memory(model: Model, inputs: int) -> None:
    """Release what can be released after a pass that ran out of memory, and report that once."""
    drop_recordings()
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    if model.name not in _reported:
        _reported.add(model.name)
        text = "memory does not hold a pass of %d images; smaller passes are made, whose results agree"
        log.warning(f"%s: {text} up to rounding", model.name, inputs)
