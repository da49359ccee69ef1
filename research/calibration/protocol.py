"""Members one by one, each in a file of its own: a calibration can be stopped, resumed and shared out.

Whoever measures a member holds a lock beside its file. The system frees the lock when the process ends,
however it ends, so that nothing a killed process had in hand is lost to the others.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

import torch

from heatproof.disk import clear_failure, write_whole
from heatproof.errors import HeatproofError, InputError
from heatproof.models.running import is_out_of_memory
from research.calibration.collect import METHODS, collect, prepare
from research.calibration.population import GENERATED, Member, by_cost, members

ELSEWHERE = "another process measures it"


@dataclass(frozen=True)
class Measuring:
    """What is measured, where it goes, and on which device."""

    out: Path
    data: Path | None = None
    device: str = "cpu"
    methods: tuple[str, ...] = METHODS
    only_voting: bool = False
    quick: bool = False
    repeats: int = 1
    skipped: int = 0  # repeats
    at_most: int | None = None  # more pairs in one go
    networks: tuple[str, ...] = ()  # all by default

    def file(self, member: Member) -> Path:
        return self.out / "members" / f"{member.name}.json"

    def missing(self) -> list[Member]:
        """What is not measured yet: cheap ones first on a CPU, slow ones first on a GPU, which has several
        processes that end together."""
        every = members(self.quick, self.repeats, self.skipped, self.networks)
        planned = [m for m in every if self.data is not None or m.data in GENERATED]
        left = [m for m in planned if not self.file(m).exists()]
        return sorted(left, key=by_cost, reverse=self.device != "cpu")[: self.at_most]


def measure_members(
    wanted: Measuring,
    workers: int = 1,
    done: Callable[[str], object] = lambda text: None,
    now: Callable[[str], object] = lambda text: None,
) -> None:
    """Measure every member that is missing.

    workers: processes that share them. done: told what came of each; now: where the only process is.
    """
    if workers < 1:
        raise InputError(f"workers is how many processes measure, at least 1; got {workers}")
    missing = wanted.missing()
    if workers == 1:
        for member in missing:
            done(measure(member, wanted, now))
        return
    now(f"{workers} processes measure")
    threads = max(1, (os.cpu_count() or 1) // workers)
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _begin, (threads,))
    try:
        for ready in as_completed([pool.submit(measure, member, wanted) for member in missing]):
            done(ready.result())
    except BrokenProcessPool:
        raise HeatproofError(
            "a process that measured was killed, mostly for want of memory; start the same command again, "
            "with fewer --workers"
        ) from None
    except KeyboardInterrupt:
        for child in active_children():
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(threads: int) -> None:
    """A process that measures leaves Ctrl-C to the one that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)


def measure(member: Member, wanted: Measuring, now: Callable[[str], object] = lambda text: None) -> str:
    """Measure one member, unless somebody else does; what came of it, in a sentence."""
    path, start = wanted.file(member), time.perf_counter()
    with sole(path.with_suffix(".lock")) as mine:
        if not mine or path.exists():
            return f"{member.name}: {ELSEWHERE}"
        try:
            pair, objects = prepare(
                member, wanted.data, wanted.device, progress=lambda text: now(f"{member.name}, {text}")
            )
            trained = time.perf_counter() - start
            now(f"{member.name}, {pair.planting.sentence}")
            content: dict[str, Any] = {
                "member": asdict(member),
                "flips": (pair.planting.a.share, pair.planting.b.share),
            }
            if pair.holds:
                content = collect(member, pair, objects, wanted.methods, not wanted.only_voting).as_json()
        except HeatproofError as error:
            return f"{member.name}: left out: {error}"
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return f"{member.name}: memory ran out; the same command measures it again, with fewer --workers"
        tested = time.perf_counter() - start - trained
        seconds = {"training": round(trained, 1), "tests": round(tested, 1)}
        content |= {"holds": pair.holds, "epochs": pair.epochs, "device": wanted.device, "seconds": seconds}
        write_whole({path: json.dumps(content, separators=(",", ":"))})
    times = f"{trained:.0f} s training, {tested:.0f} s tests"
    return f"{member.name}: {pair.planting.sentence}; {times}"


@contextmanager
def sole(path: Path) -> Iterator[bool]:
    """Whether this process is the only one inside; the file is gone behind it."""
    import fcntl  # absent on Windows

    with clear_failure(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        try:
            yield True
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def left_out(wanted: Measuring) -> Sequence[str]:
    """Kinds of pictures that need a folder of data and have none."""
    return (
        sorted({m.data for m in members(wanted.quick, networks=wanted.networks) if m.data not in GENERATED})
        if wanted.data is None
        else ()
    )
