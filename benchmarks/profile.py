"""Profile of a run: a table of its stages and a timeline, from a recording (heatproof/timeline.py).

    python -m benchmarks.profile STUDY.toml --out RUN

For the main thread, stage by stage: total seconds, of these in passes (`device`), waiting for another thread
or the device, and the rest (`host`). On a GPU `device` is by its own timers while the host continues, so
`host` is everything except waiting; `idle` is the time in which no kernel ran. Work of other threads overlaps
with that; it is listed as `beside`.
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
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from rich.table import Table

from heatproof.cli import HandledErrors
from heatproof.cli._console import PATH, console, new_table, say
from heatproof.disk import write_whole
from heatproof.run.engine import prepare, run_study
from heatproof.store.scores import csv_cell
from heatproof.timeline import FRAME, PASSES, WAITING, Recording, Span, recording

FOLDER = "profile"
BETWEEN = "between the stages"
NS = 1e-9
STAGES_SHOWN = 25


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


_COUNTED = [field.name for field in fields(StageTime)][3:]


@dataclass(frozen=True)
class Profile:
    """Times of a recording, in all and by stage."""

    device: str
    wall: float
    stages: tuple[StageTime, ...]  # of the main thread, longest first, then those of the others
    total: StageTime  # the main thread's stages together
    busy: float | None  # share of the time after the first unit in which a GPU computed; None on a CPU


@contextmanager
def profiling() -> Iterator[Profiler]:
    """Record while the context is open; afterwards the profiler can summarise and write."""
    # Torch's profiler takes seconds to stop, which do not belong to the run.
    with ExitStack() as until_the_end, recording() as recorded:
        yield Profiler(recorded, until_the_end)


class Profiler:
    """A recording, and the intervals (from, to, in ns since it began) in which the GPU computed."""

    def __init__(self, recorded: Recording, until_the_end: ExitStack) -> None:
        self.recorded, self._until_the_end = recorded, until_the_end
        self.kernels: list[tuple[int, int]] = []

    def on(self, device: str) -> None:
        """Set the device of the passes, before the first pass."""
        self.recorded.device = device
        self._until_the_end.enter_context(_kernels(device, self.kernels, self.recorded.began))

    def summary(self) -> Profile:
        recorded, wall = self.recorded, self.recorded.ended * NS
        worked = covered(self.kernels) if self.kernels else None
        parts: list[list[Span]] = [[], []]  # of the main thread, and of others
        for span in recorded.spans:
            parts[span.thread != recorded.main].append(span)
        own, others = (_stages(spans, recorded.device, k > 0, worked) for k, spans in enumerate(parts))
        rest = max(0.0, wall - sum(stage.seconds for stage in own))
        own.append(StageTime(BETWEEN, "", False, 0, 0, 0, rest, 0.0, rest, 0.0))
        total = StageTime("all", "", False, *(sum(getattr(s, name) for s in own) for name in _COUNTED))
        ordered = [sorted(stages, key=lambda stage: -stage.seconds) for stages in (own, others)]
        units, busy = [span.end for span in recorded.spans if span.name == FRAME], None
        if worked and units:
            begin, end = min(units), max(stop for _, stop in self.kernels)
            busy = (worked(end) - worked(begin)) / (end - begin) if end > begin else None
        return Profile(recorded.device, wall, (*ordered[0], *ordered[1]), total, busy)

    def write(self, folder: Path, name: str = "profile") -> Path:
        """NAME.json and NAME.csv, the table, and NAME.trace.json for trace viewers; the path of the last."""
        place, profile = folder / FOLDER, self.summary()
        totals = {"device": profile.device, "wall": profile.wall, "busy": profile.busy}
        stages = [asdict(stage) for stage in profile.stages]
        table = io.StringIO()
        writer = csv.DictWriter(table, [field.name for field in fields(StageTime)], lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: csv_cell(v) for k, v in stage.items()} for stage in stages)
        whole = {"all": totals | asdict(profile.total), "stages": stages}
        timeline = {"traceEvents": list(self._events()), "displayTimeUnit": "ms"}
        texts = {".json": json.dumps(whole, indent=1) + "\n", ".trace.json": json.dumps(timeline)}
        texts[".csv"] = table.getvalue()
        write_whole({place / f"{name}{suffix}": text for suffix, text in texts.items()})
        return place / f"{name}.trace.json"

    def _events(self) -> Iterator[dict[str, Any]]:
        """Complete events of Chrome's trace format, in microseconds, by thread."""
        process = os.getpid()
        for thread, name in self.recorded.names.items():
            label = "main" if thread == self.recorded.main else name
            yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": label}}
        for span in self.recorded.spans:
            event = {
                "ph": "X", "name": f"{span.name} {span.what}".strip(), "cat": span.stage[0], "pid": process,
                "tid": span.thread, "ts": span.start / 1e3, "dur": span.ns / 1e3,
            }  # fmt: skip
            yield event | ({"args": {"inputs": span.inputs}} if span.inputs else {})


def _stages(
    spans: Sequence[Span], device: str, beside: bool, worked: Callable[[int], int] | None
) -> list[StageTime]:
    """One line per stage. worked: see `covered`, of the kernels of a GPU."""
    sums: dict[tuple[str, str], dict[str, Any]] = {}
    for span in spans:
        if span.name == FRAME:
            continue
        line = sums.setdefault(span.stage, dict.fromkeys((*_COUNTED, "inside"), 0))
        if (span.name, span.what) == span.stage:
            line["calls"] += 1
            line["seconds"] += span.ns * NS
            if worked and not beside:
                line["idle"] += (span.ns - worked(span.end) + worked(span.start)) * NS
        if span.name == PASSES[0]:
            line["passes"] += 1
            line["inputs"] += span.inputs
        if span.name in PASSES:
            line["inside"] += span.ns * NS
            line["device"] += (span.ns if span.device_ns is None else span.device_ns) * NS
        if span.name == WAITING:
            line["waiting"] += span.ns * NS
    for line in sums.values():
        inside = line.pop("inside")  # on a GPU the host continues in the meantime
        line["host"] = line["seconds"] - line["waiting"] - (0.0 if device.startswith("cuda") else inside)
    return [StageTime(stage, what, beside, **line) for (stage, what), line in sums.items()]


def covered(stretches: Sequence[tuple[int, int]]) -> Callable[[int], int]:
    """A function: length of the union of the intervals before a moment.

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
def _kernels(device: str, kernels: list[tuple[int, int]], began: int) -> Iterator[None]:
    """Append the times of a GPU's kernels to `kernels`; does nothing on a CPU."""
    if not device.startswith("cuda"):
        yield
        return
    zero = time.time_ns() - time.perf_counter_ns() + began  # torch's profiler has the time of day
    with warnings.catch_warnings(action="ignore"):  # of torch's profiler, about its own settings
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        profiler.start()
    try:
        yield
        torch.cuda.synchronize()
    finally:
        with warnings.catch_warnings(action="ignore"):
            profiler.stop()
    results = profiler.profiler.kineto_results if profiler.profiler else None
    for event in results.events() if results else ():
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            start = event.start_ns() - zero
            kernels.append((start, start + event.duration_ns()))


def profile_table(profile: Profile) -> Table:
    """Stages of the main thread, longest first, their sum, then what other threads did meanwhile."""
    busy = profile.busy
    share = "" if busy is None else f"; the GPU was busy for {busy:.0%} of it after the first unit"
    clocks = ["seconds", "device", "host", "waiting"] + ["idle"] * (busy is not None)
    numbers = ("calls", "passes", "inputs", *clocks)
    title = f"where {profile.wall:.1f} s went, on {profile.device}{share}"
    table = new_table(title, ("stage", *numbers), right=numbers)

    def add(stage: StageTime, name: str) -> None:
        counts = (f"{count:,}" if count else "" for count in (stage.calls, stage.passes, stage.inputs))
        times = (f"{time:,.2f}" if (time := getattr(stage, clock)) else "" for clock in clocks)
        table.add_row(name, *counts, *times)

    own = [stage for stage in profile.stages if not stage.beside]
    for stage in own[:STAGES_SHOWN]:
        add(stage, f"{stage.stage} {stage.what}".strip())
    if len(own) > STAGES_SHOWN:
        table.add_row(f"{len(own) - STAGES_SHOWN} more are in the file")
    table.add_section()
    add(profile.total, "all")
    table.add_section()
    for stage in profile.stages[len(own) :]:
        add(stage, f"beside: {stage.stage} {stage.what}".strip())
    return table


@click.command(cls=HandledErrors)
@click.argument("study", type=PATH)
@click.option("--out", type=PATH, required=True, help="The run folder; the profile is in its folder profile.")
def main(study: Path, out: Path) -> None:
    """Run STUDY.toml and measure time by stage: a table, and a timeline for ui.perfetto.dev.

    Profiling changes no row. On a GPU keep the study short, because every kernel is recorded.
    """
    with profiling() as profiler:
        opened = prepare(study, out).opened
        profiler.on(opened.device)
        result = run_study(opened, out)
    trace = profiler.write(result.folder.path)
    console.print(profile_table(profiler.summary()))
    say(f"the table as profile.csv and .json, and a timeline for ui.perfetto.dev: {trace}")


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.profile")
