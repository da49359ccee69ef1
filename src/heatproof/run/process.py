"""Threads and signals of the process of a run."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from types import FrameType
from typing import Any, TypeVar

import torch

from heatproof.images.loader import available_cpus
from heatproof.timeline import span

Item = TypeVar("Item")
STOPPING = (signal.SIGINT, signal.SIGTERM)
ANSWER = "stopping after the current unit; Ctrl-C again stops at once and loses only that unit"
REPEATED, SIMILAR = 3, 1.1  # timed calls for each number of threads, and the ratio of similar times
WAITING_UNITS = 2  # that may be in memory until they are written


def usual_threads() -> int:
    """Threads of torch by default: OMP_NUM_THREADS, else one per CPU."""
    setting = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # one number per nested level
    return int(setting) if setting.isdecimal() and int(setting) else available_cpus()


def fastest_threads(
    work: Callable[[], object], most: int, clock: Callable[[], float] = time.perf_counter
) -> int:
    """Number of threads, `most` halved repeatedly, with which `work` is fastest; the fewest of similar ones.

    On a busy machine a thread without a CPU of its own delays the others. OMP_NUM_THREADS is not overruled.
    """
    if os.environ.get("OMP_NUM_THREADS", ""):
        return most
    seconds: dict[int, float] = {}
    for count in (most >> i for i in range(most.bit_length())):
        with fixed_threads(count):
            work()
            began = clock()
            for _ in range(REPEATED):
                work()
            seconds[count] = clock() - began
    return min(count for count, took in seconds.items() if took <= SIMILAR * min(seconds.values()))


@contextmanager
def fixed_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class WriteQueue(ThreadPoolExecutor):
    """Call functions in order in one thread; an error is raised in the caller at the next call.

    Leaving the context waits for all of them, also after an error, so that computed units are written.
    """

    def __init__(self) -> None:
        super().__init__(1, thread_name_prefix="heatproof-write")
        self._pending: deque[Future[None]] = deque()

    def do(self, function: Callable[[], None]) -> None:
        # A bounded queue: if the disk is slower than the network, computed units must not fill the memory.
        self.finish(WAITING_UNITS - 1)
        self._pending.append(self.submit(function))

    def finish(self, left: int = 0) -> None:
        """Wait until at most this many calls are left in the queue."""
        with span("waiting", "writing"):
            while len(self._pending) > left:
                self._pending.popleft().result()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if error is None:
                self.finish()
        finally:
            self.shutdown(wait=True)


def prefetched(
    items: Generator[Item, None, None], prepare: Callable[[Item], object]
) -> Generator[Item, None, None]:
    """Yield items; the next one is fetched and prepared in a thread while the caller works on this one."""

    def fetch() -> Item | None:
        item = next(items, None)
        if item is not None:
            prepare(item)
        return item

    with closing(items), ThreadPoolExecutor(1, thread_name_prefix="heatproof-ahead") as pool:
        coming = pool.submit(fetch)
        while True:
            with span("waiting", "pictures"):
                item = coming.result()
            if item is None:
                return
            coming = pool.submit(fetch)
            yield item


@contextmanager
def stop_on_signal(say: Callable[[str], object]) -> Iterator[threading.Event]:
    """An event that Ctrl-C (or a cluster's SIGTERM) sets; a second one raises KeyboardInterrupt.

    Python runs a handler between two of its own instructions, so a long call into torch delays it, and two
    signals become one. Therefore the signal also writes a byte, which a thread reads and handles.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    handled = received = 0

    def handle(_number: int, _frame: FrameType | None) -> None:
        nonlocal handled
        handled += 1
        stop.set()
        if max(handled, received) > 1:
            raise KeyboardInterrupt

    def listen() -> None:
        nonlocal received
        while byte := reader.recv(1):
            if byte[0] in STOPPING:
                received += 1
                if received == 1:
                    stop.set()
                    say(ANSWER)

    reader, writer = socket.socketpair()
    writer.setblocking(False)
    listener = threading.Thread(target=listen, name="heatproof-ctrl-c", daemon=True)
    listener.start()
    before = {number: signal.signal(number, handle) for number in STOPPING}
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        writer.close()  # which ends the listener
        listener.join()
        reader.close()
