"""What methods work out of the pictures alone: in threads, and once for a batch that lies on a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

One = TypeVar("One")
Made = TypeVar("Made")


@cache
def threads(name: str) -> ThreadPoolExecutor:
    """For work that lets go of Python's lock; what is short does not queue behind what is long."""
    from heatproof.images.loader import available_cpus

    return ThreadPoolExecutor(available_cpus(), thread_name_prefix=f"heatproof-{name}")


if hasattr(os, "register_at_fork"):  # the threads of a pool are not copied into a child process
    os.register_at_fork(after_in_child=threads.cache_clear)


def in_threads(function: Callable[[One], Made], items: Iterable[One]) -> list[Made]:
    """Something short, side by side and in order."""
    return list(threads("short").map(function, items))


class LastBatch:
    """What was found for the last batch: a GPU is not asked twice for the same pixels.

    The batch itself is kept, so that its memory holds nothing else meanwhile. (On a CPU anybody may write to
    it unseen, as NumPy does.)
    """

    def __init__(self) -> None:
        self.kept: tuple[Tensor, int, tuple[Any, ...], Tensor] | None = None

    def of(self, images: Tensor, asked: tuple[Any, ...]) -> Tensor | None:
        if self.kept is None or not images.is_cuda or images.is_inference():
            return None
        batch, version, before, found = self.kept
        same = batch.data_ptr() == images.data_ptr() and batch.shape == images.shape
        same = same and batch.stride() == images.stride() and batch.device == images.device
        return found if same and version == images._version and before == asked else None

    def keep(self, images: Tensor, asked: tuple[Any, ...], found: Tensor) -> Tensor:
        if images.is_cuda and not images.is_inference():
            self.kept = images.detach(), images._version, asked, found
        return found
