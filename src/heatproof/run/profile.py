"""Where the time of a run went: a table of its stages and a timeline, from what the timeline recorded.

For the main thread, stage by stage: seconds in all, of these in passes (`device`), waiting for somebody else,
and the rest (`host`). On a GPU `device` is by its own timers while the host goes on, so `host` is all that is
not waiting. Work of other threads overlaps with that; it is listed as `beside`.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

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
    with recording() as recorded, ExitStack() as until_the_end:
        yield Profiler(recorded, until_the_end)


class Profiler:
    """A recording, and the stretches of time (from, to, in ns) in which the GPU computed."""

    def __init__(self, recorded: Recording, until_the_end: ExitStack) -> None:
        self.recorded, self._until_the_end = recorded, until_the_end
        self.kernels: list[tuple[int, int]] = []

    def on(self, device: str) -> None:
        """Say where the passes will run, before the first one."""
        self.recorded.device = device
        self._until_the_end.enter_context(_kernels(device, self.kernels))

    def summary(self) -> Profile:
        spans, main = self.recorded.spans, self.recorded.main
        own = _stages([span for span in spans if span.thread == main], self.recorded.device, beside=False)
        others = _stages([span for span in spans if span.thread != main], self.recorded.device, beside=True)
        wall = self.recorded.ended * NS
        rest = max(0.0, wall - sum(one.seconds for one in own))
        own.append(StageTime(BETWEEN, "", False, 0, 0, 0, rest, 0.0, rest, 0.0))
        return Profile(self.recorded.device, wall, (*_longest(own), *_longest(others)), self._busy())

    def _busy(self) -> float | None:
        units = [span for span in self.recorded.spans if span.name == FRAME]
        if not self.kernels or not units:
            return None
        first = min(units, key=lambda span: span.start)
        begin = min(start for start, _ in self.kernels) + first.ns
        end = max(stop for _, stop in self.kernels)
        return covered(self.kernels, begin, end) / (end - begin) if end > begin else None

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


def covered(stretches: Sequence[tuple[int, int]], begin: int, end: int) -> int:
    """How much of the time from begin to end lies in at least one stretch.

    >>> covered([(0, 4), (2, 6), (8, 20)], 1, 10)
    7
    """
    total, last = 0, begin
    for start, stop in sorted(stretches):
        start, stop = max(start, last), min(stop, end)
        if stop > start:
            total, last = total + stop - start, stop
    return total


@contextmanager
def _kernels(device: str, found: list[tuple[int, int]]) -> Iterator[None]:
    """Fill `found` with what a GPU did; on a CPU there is nothing to fill."""
    if not device.startswith("cuda"):
        yield
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        yield
        torch.cuda.synchronize()
    results = profiler.profiler.kineto_results if profiler.profiler else None
    for event in results.events() if results else ():
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            found.append((event.start_ns(), event.start_ns() + event.duration_ns()))
