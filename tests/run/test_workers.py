"""Workers of one run in their own processes, and the threads that read and write for a worker."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Generator
from contextlib import closing
from pathlib import Path

import pytest

from heatproof.run.engine import run_study
from heatproof.run.worker import WAITING_UNITS, WriteQueue, prefetched
from heatproof.store import RunFolder
from tiny_study import fingerprint, make_study, start

# Stands still for good in its first unit.
STANDS_STILL = """
import time
from heatproof.run import worker
worker.Worker.compute = lambda *_: time.sleep(600)
"""


def test_units_do_not_wait_for_those_of_another_worker(tmp_path: Path) -> None:
    study, out = make_study(tmp_path, images=16), tmp_path / "out"
    slow = start(study, out, "--shard", "0/2", script=STANDS_STILL)
    try:
        while not (out / "locks").exists():
            assert slow.poll() is None, slow.communicate()[0]
            time.sleep(0.02)
        run_study(study, out, shard=(1, 2))
        assert slow.poll() is None, "it did not stand still"
        status = RunFolder.open(out).status()
        assert status.done == 4  # its half of the blocks: 2 checkpoints x 2 of 4
    finally:
        slow.send_signal(signal.SIGKILL)
        slow.communicate()
    run_study(study, out)
    run_study(study, tmp_path / "alone")
    assert fingerprint(out) == fingerprint(tmp_path / "alone")


def test_what_is_done_behind_keeps_its_order_and_its_errors() -> None:
    done, gate = [], threading.Event()

    def slow() -> None:
        gate.wait(5)
        done.append("slow")

    def fails() -> None:
        raise OSError("the disk is full")

    with WriteQueue() as behind:
        behind.do(slow)
        assert done == [] and WAITING_UNITS > 1  # the caller went on
        gate.set()
        behind.do(lambda: done.append("next"))
    assert done == ["slow", "next"]
    with pytest.raises(OSError, match="full"), WriteQueue() as behind:
        behind.do(fails)
    with pytest.raises(KeyError), WriteQueue() as behind:
        behind.do(lambda: done.append("kept"))
        raise KeyError
    assert done[-1] == "kept"


def test_the_next_batch_is_prepared_in_the_background() -> None:
    prepared, closed = [], threading.Event()

    def things() -> Generator[str, None, None]:
        try:
            yield from "abc"
        finally:
            closed.set()

    with closing(prefetched(things(), prepared.append)) as each:
        assert next(each) == "a"
        until = time.monotonic() + 5
        while "b" not in prepared and time.monotonic() < until:
            time.sleep(0.001)
        assert prepared == ["a", "b"]
    assert closed.is_set()  # though it was left early
    with closing(prefetched(things(), prepared.append)) as each:
        assert list(each) == ["a", "b", "c"]


def broken() -> Generator[str, None, None]:
    yield "a"
    raise OSError("gone")


def test_what_goes_wrong_ahead_is_raised_to_the_caller() -> None:
    with pytest.raises(OSError, match="gone"), closing(prefetched(broken(), str)) as each:
        list(each)
