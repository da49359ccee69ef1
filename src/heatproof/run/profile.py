"""Where the time of a run went: a table of its stages and a timeline, from what the timeline recorded.

For the main thread, stage by stage: seconds in all, of these in passes (`device`), waiting for somebody else,
and the rest (`host`). On a GPU `device` is by its own timers while the host goes on, so `host` is all that is
not waiting; `idle` is how long meanwhile no kernel ran. Work of other threads overlaps with that; it is
listed as `beside`.
"""

from __future__ import annotations

import csv
import io
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from heatproof.disk import write_whole
from heatproof.store.scores import csv_cell
from heatproof.timeline import FRAME, PASSES, WAITING, Recording, Span, recording

FOLDER = "profile"
BETWEEN = "between the stages"
NS = 1e-9


@dataclass(frozen=True)
class StageTime:
    """One line of the table; times are in seconds."""

    stage: str
    what: str
    beside: bool  # in other threads
    calls: int
    passes: int  # forward calls
    inputs: int  # that went through the network in them
    seconds: float
    device: float
    host: float
    waiting: float
    idle: float = 0.0  # of a GPU while the main thread was here


@dataclass(frozen=True)
class Profile:
    """What a recording says, in all and by stage."""

    device: str
    wall: float
    stages: tuple[StageTime, ...]  # of the main thread, longest first, then those of the others
    busy: float | None  # share of the time after the first unit in which a GPU computed; None on a CPU

    @property
    def total(self) -> StageTime:
        """The main thread's stages together."""
        own = [one for one in self.stages if not one.beside]
        sums = {name: sum(getattr(one, name) for one in own) for name in _COUNTED}
        return StageTime("all", "", False, **sums)


_COUNTED = [field.name for field in fields(StageTime) if field.name not in ("stage", "what", "beside")]


@contextmanager
def profiling() -> Iterator[Profiler]:
    """Record while the context is open; afterwards it can be summed up and written."""
    # Torch's profiler takes seconds to end, which are none of the run's.
    with ExitStack() as until_the_end, recording() as recorded:
        yield Profiler(recorded, until_the_end)


class Profiler:
    """A recording, and the stretches of time (from, to, in ns since it began) in which the GPU computed."""

    def __init__(self, recorded: Recording, until_the_end: ExitStack) -> None:
        self.recorded, self._until_the_end = recorded, until_the_end
        self.kernels: list[tuple[int, int]] = []

    def on(self, device: str) -> None:
        """Say where the passes will run, before the first one."""
        self.recorded.device = device
        self._until_the_end.enter_context(_kernels(device, self.kernels, self.recorded.began))

    def summary(self) -> Profile:
        spans, main = self.recorded.spans, self.recorded.main
        own = _stages([span for span in spans if span.thread == main], self.recorded.device, beside=False)
        if self.kernels:
            own = [replace(one, idle=idle) for one, idle in zip(own, self._idle(own), strict=True)]
        others = _stages([span for span in spans if span.thread != main], self.recorded.device, beside=True)
        wall = self.recorded.ended * NS
        rest = max(0.0, wall - sum(one.seconds for one in own))
        own.append(StageTime(BETWEEN, "", False, 0, 0, 0, rest, 0.0, rest, 0.0))
        return Profile(self.recorded.device, wall, (*_longest(own), *_longest(others)), self._busy())

    def _busy(self) -> float | None:
        units = [span.end for span in self.recorded.spans if span.name == FRAME]
        if not self.kernels or not units:
            return None
        begin, end = min(units), max(stop for _, stop in self.kernels)
        worked = covered(self.kernels)
        return (worked(end) - worked(begin)) / (end - begin) if end > begin else None

    def _idle(self, stages: Sequence[StageTime]) -> list[float]:
        """Seconds of each stage of the main thread in which the GPU had nothing to do."""
        worked, found = covered(self.kernels), dict.fromkeys(((one.stage, one.what) for one in stages), 0.0)
        for one in self.recorded.spans:
            if one.thread == self.recorded.main and (one.name, one.what) == one.stage and one.stage in found:
                found[one.stage] += (one.ns - worked(one.end) + worked(one.start)) * NS
        return list(found.values())

    def write(self, folder: Path, name: str = "profile") -> Path:
        """NAME.json and NAME.csv, the table, and NAME.trace.json for trace viewers; the path of the last."""
        place, found = folder / FOLDER, self.summary()
        totals = {"device": found.device, "wall": found.wall, "busy": found.busy, **asdict(found.total)}
        table = io.StringIO()
        writer = csv.DictWriter(table, [field.name for field in fields(StageTime)], lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: csv_cell(v) for k, v in asdict(one).items()} for one in found.stages)
        whole = {"all": totals, "stages": [asdict(one) for one in found.stages]}
        trace = place / f"{name}.trace.json"
        write_whole(
            {
                place / f"{name}.csv": table.getvalue(),
                place / f"{name}.json": json.dumps(whole, indent=1) + "\n",
                trace: json.dumps({"traceEvents": list(self._events()), "displayTimeUnit": "ms"}),
            }
        )
        return trace

    def _events(self) -> Iterator[dict[str, Any]]:
        """As Chrome's trace format has them: complete events, in microseconds, by thread."""
        process = os.getpid()
        for thread, name in self.recorded.names.items():
            label = "main" if thread == self.recorded.main else name
            yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": label}}
        for one in self.recorded.spans:
            event = {
                "ph": "X", "name": f"{one.name} {one.what}".strip(), "cat": one.stage[0], "pid": process,
                "tid": one.thread, "ts": one.start / 1e3, "dur": one.ns / 1e3,
            }  # fmt: skip
            yield event | ({"args": {"inputs": one.inputs}} if one.inputs else {})


def _stages(spans: Sequence[Span], device: str, beside: bool) -> list[StageTime]:
    sums: dict[tuple[str, str], dict[str, Any]] = {}
    apart = device.startswith("cuda")  # the device works while the host goes on
    for one in spans:
        if one.name == FRAME:
            continue
        line = sums.setdefault(one.stage, dict.fromkeys((*_COUNTED, "inside"), 0))
        if (one.name, one.what) == one.stage:
            line["calls"] += 1
            line["seconds"] += one.ns * NS
        if one.name == PASSES[0]:
            line["passes"] += 1
            line["inputs"] += one.inputs
        if one.name in PASSES:
            line["inside"] += one.ns * NS
            line["device"] += (one.ns if one.device_ns is None else one.device_ns) * NS
        if one.name == WAITING:
            line["waiting"] += one.ns * NS
    found = []
    for (stage, what), line in sums.items():
        inside = line.pop("inside")
        line["host"] = line["seconds"] - line["waiting"] - (0.0 if apart else inside)
        found.append(StageTime(stage, what, beside, **line))
    return found


def _longest(stages: Sequence[StageTime]) -> list[StageTime]:
    return sorted(stages, key=lambda one: -one.seconds)


def covered(stretches: Sequence[tuple[int, int]]) -> Callable[[int], int]:
    """How much of the time before a moment lies in at least one stretch.

    >>> before = covered([(0, 4), (2, 6), (8, 20)])
    >>> before(1), before(6), before(10)
    (1, 6, 8)
    """
    starts, stops = np.array(sorted(stretches)).T
    ends = np.maximum.accumulate(stops)
    begins = np.maximum(starts, np.concatenate([starts[:1], ends[:-1]]))  # what is new in each
    lengths = np.maximum(ends - begins, 0)
    sums = np.concatenate([[0], lengths.cumsum()])

    def before(moment: int) -> int:
        count = int(np.searchsorted(begins, moment, side="right"))
        return int(sums[count] - max(0, begins[count - 1] + lengths[count - 1] - moment if count else 0))

    return before


@contextmanager
def _without_warnings() -> Iterator[None]:
    """For torch's profiler, which warns about its own settings at its start and end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _kernels(device: str, found: list[tuple[int, int]], began: int) -> Iterator[None]:
    """Fill `found` with what a GPU did; on a CPU there is nothing to fill."""
    if not device.startswith("cuda"):
        yield
        return
    zero = time.time_ns() - time.perf_counter_ns() + began  # torch's profiler tells the time of day
    with _without_warnings():
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        profiler.start()
    try:
        yield
        torch.cuda.synchronize()
    finally:
        with _without_warnings():
            profiler.stop()
    results = profiler.profiler.kineto_results if profiler.profiler else None
    for event in results.events() if results else ():
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            start = event.start_ns() - zero
            found.append((start, start + event.duration_ns()))
