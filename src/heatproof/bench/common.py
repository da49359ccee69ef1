"""How `heatproof bench` measures: contenders take turns in one process, medians are compared as ratios."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Row:
    """One line of the table: ours against something else, measured side by side."""

    what: str
    ours_ms: float
    other: str
    other_ms: float
    ratio: float  # what the limit speaks of; its meaning is in `what`
    limit: str = ""  # such as "<= 1.25"
    note: str = ""


def side_by_side(
    contenders: Mapping[str, Callable[[], object]], repeat: int = 5, device: str = "cpu", warmup: int = 1
) -> dict[str, float]:
    """Median milliseconds of each contender; they take turns, so that drift hits all alike."""
    for contender in contenders.values():
        for _ in range(warmup):
            contender()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeat):
        for name, contender in contenders.items():
            times[name].append(_once(contender, device))
    return {name: statistics.median(values) for name, values in times.items()}


def _once(function: Callable[[], object], device: str) -> float:
    if device.startswith("cuda"):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end))
    begin = time.perf_counter()
    function()
    return (time.perf_counter() - begin) * 1e3
