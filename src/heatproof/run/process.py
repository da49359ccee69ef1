"""What a run asks of the process it lives in: a number of threads, and an answer to Ctrl-C at any moment."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from heatproof.images.loader import available_cpus

STOPPING = (signal.SIGINT, signal.SIGTERM)
ANSWER = "stopping after the unit in hand; Ctrl-C again stops at once and loses only that unit"


def usual_threads() -> int:
    """Threads of torch where nobody says how many: OMP_NUM_THREADS, else one per CPU."""
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # one number for each nested level
    return int(asked) if asked.isdecimal() and int(asked) else available_cpus()


@contextmanager
def fixed_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def asking_to_stop(say: Callable[[str], object]) -> Iterator[threading.Event]:
    """Ctrl-C (or a cluster's SIGTERM) asks to stop after the unit in hand; a second one stops at once.

    Python runs a handler between two of its own instructions, so a long call into torch puts it off, and two
    signals meanwhile become one. The signal itself also writes a byte, which a thread reads and answers.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    called = heard = 0

    def asked(_number: int, _frame: FrameType | None) -> None:
        nonlocal called
        called += 1
        stop.set()
        if max(called, heard) > 1:
            raise KeyboardInterrupt

    def listen() -> None:
        nonlocal heard
        while byte := reader.recv(1):
            if byte[0] in STOPPING:
                heard += 1
                if heard == 1:
                    stop.set()
                    say(ANSWER)

    reader, writer = socket.socketpair()
    writer.setblocking(False)
    listener = threading.Thread(target=listen, name="heatproof-ctrl-c", daemon=True)
    listener.start()
    before = {number: signal.signal(number, asked) for number in STOPPING}
    woken = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(woken)
        for number, handler in before.items():
            signal.signal(number, handler)
        writer.close()  # which ends the listener
        listener.join()
        reader.close()
