"""GPU memory: a limit for the time of a run, and work that goes on in smaller parts when memory runs out."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import torch

from heatproof.errors import InputError
from heatproof.models.accel.graphs import drop_recordings, memory_fraction
from heatproof.models.running import is_out_of_memory

if TYPE_CHECKING:
    from heatproof.models.model import Model

VARIABLE = "HEATPROOF_GPU_MEMORY"  # share of the free memory of a GPU that a run takes
SHARE = 0.25
WAITS = (1.0, 4.0, 15.0)  # seconds before a single input is tried again, while other programs hold the memory
Result = TypeVar("Result")
log = logging.getLogger("heatproof")
_reported: set[str] = set()  # names of networks for which memory ran out


@contextmanager
def limited_memory(device: str | torch.device) -> Iterator[None]:
    """Let this process allocate at most a share of the GPU memory that is free, by default a quarter.

    Memory that tensors of this process occupy already is not counted. The limit is removed at the end, and
    unused memory is released for other programs.
    """
    try:
        share = float(os.environ.get(VARIABLE, SHARE))
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise InputError(
            f"{VARIABLE} is a share of the free memory, from 0 to 1; got {os.environ[VARIABLE]!r}"
        )
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
