"""How busy a GPU was, as its driver counts it: shares of time in which at least one kernel ran.

Measured by another process, since recording every kernel (`python -m benchmarks.profile`) slows a run down
by half.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

EVERY = 200  # milliseconds


@dataclass
class Busy:
    """Shares that the driver told, with the time of each."""

    samples: list[tuple[float, float]] = field(default_factory=list)

    def after(self, seconds: float) -> float | None:
        """The mean of those told later than that, by time.perf_counter(); None where there are none."""
        later = [share for moment, share in self.samples if moment > seconds]
        return statistics.mean(later) if later else None


@contextmanager
def watching(device: str) -> Iterator[Busy]:
    """Listen while the context is open; nothing is heard on a CPU, or without nvidia-smi."""
    busy, program = Busy(), shutil.which("nvidia-smi")
    if program is None or not device.startswith("cuda"):
        yield busy
        return
    query = ["--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", f"-lms={EVERY}"]
    which = f"--id={torch.device(device).index or 0}"
    with subprocess.Popen([program, *query, which], stdout=subprocess.PIPE, text=True) as teller:
        listener = threading.Thread(target=_listen, args=(teller, busy), daemon=True)
        listener.start()
        try:
            yield busy
        finally:
            teller.terminate()
            listener.join(5)


def _listen(teller: subprocess.Popen[str], busy: Busy) -> None:
    for line in teller.stdout or ():
        if line.strip().isdigit():
            busy.samples.append((time.perf_counter(), int(line) / 100))
