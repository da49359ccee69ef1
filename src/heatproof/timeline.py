"""Spans of work, recorded while a recording is open.

    with span("decode"): ...                       a stage, or a step inside a stage
    with span("forward", inputs=32): ...           a pass of 32 inputs; see PASSES
    with span("waiting", "pictures"): ...          nothing was done

Without a recording, `span` reads a global and returns an empty context.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

PASSES = ("forward", "backward")
WAITING = "waiting"
FRAME = "unit"  # the span around the stages of a unit; not a stage itself

NOTHING: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of one thread's time, in nanoseconds since the recording began."""

    name: str
    what: str
    thread: int
    start: int
    end: int
    inputs: int  # number of inputs, if the span is a pass
    stage: tuple[str, str]  # name and what of the outermost span around it, or its own
    device_ns: float | None = None  # of a pass, by the timer of an asynchronous device

    @property
    def ns(self) -> int:
        return self.end - self.start


@dataclass
class Recording:
    """The recorded spans of all threads, in the order in which they ended."""

    device: str = "cpu"
    began: int = field(default_factory=time.perf_counter_ns)
    ended: int = 0
    spans: list[Span] = field(default_factory=list)
    main: int = field(default_factory=threading.get_ident)
    names: dict[int, str] = field(default_factory=dict)  # of threads
    _open: threading.local = field(default_factory=threading.local)
    _timers: dict[int, tuple[Any, Any]] = field(default_factory=dict)  # by index of the span

    @contextmanager
    def span(self, name: str, what: str, inputs: int) -> Iterator[None]:
        stack: list[tuple[str, str]] = self._open.__dict__.setdefault("stack", [])
        thread = threading.get_ident()
        self.names.setdefault(thread, threading.current_thread().name)
        timers = self._device_timers() if name in PASSES else None
        stack.append((name, what))
        start = time.perf_counter_ns()
        if timers:
            timers[0].record()
        try:
            yield
        finally:
            if timers:
                timers[1].record()
            end = time.perf_counter_ns()
            stage = next((outer for outer in stack if outer[0] != FRAME), stack[0])
            stack.pop()
            done = Span(name, what, thread, start - self.began, end - self.began, inputs, stage)
            if timers:
                self._timers[id(done)] = timers
            self.spans.append(done)

    def _device_timers(self) -> tuple[Any, Any] | None:
        if not self.device.startswith("cuda"):
            return None
        import torch  # only needed on a GPU

        if torch.cuda.is_current_stream_capturing():  # captured kernels run later
            return None
        return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def close(self) -> None:
        """Read the timers of the device, once, after all work is done."""
        if self._timers:
            import torch

            torch.cuda.synchronize()
            times = {key: start.elapsed_time(end) * 1e6 for key, (start, end) in self._timers.items()}
            self.spans = [replace(s, device_ns=times[id(s)]) if id(s) in times else s for s in self.spans]
            self._timers.clear()
        self.ended = time.perf_counter_ns() - self.began


_recording: Recording | None = None


def span(name: str, what: str = "", inputs: int = 0) -> AbstractContextManager[None]:
    """Record the work done while the context is open. Spans nest; the outermost is the stage."""
    return NOTHING if _recording is None else _recording.span(name, what, inputs)


@contextmanager
def recording(device: str = "cpu") -> Iterator[Recording]:
    """Record every span of this process while the context is open; one recording at a time."""
    global _recording
    recorded = Recording(device)
    before, _recording = _recording, recorded
    try:
        yield recorded
    finally:
        _recording = before
        recorded.close()
