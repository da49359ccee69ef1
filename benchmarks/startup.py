"""How long commands take that compute nothing, or little: each in a process of its own, the best of several.

As a user starts them, not for the first time: Python has kept the compiled files. The run is of SqueezeNet
and 100 images with one pass each, so that nearly all of its time is import, checks, reading and writing.
"""

from __future__ import annotations

import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from benchmarks.common import Part, Row, write_study
from benchmarks.sections import BenchOptions
from benchmarks.steady import SMALL
from heatproof.run.engine import run_study

LIMIT = "<= 0.4"  # seconds
COMMANDS = (
    "--help", "run --help", "study qr --help", "sql RUN 'from scores limit 1'",
    "export RUN --csv OUT", "gate RUN --rule 'insertion.gradcam >= 0'", "gate RUN --rule no-alarms",
    "run nothing.toml", "sql nothing 'from scores'",
)  # fmt: skip
SQUEEZENET = {"spec": "torchvision:squeezenet1_1", "num_classes": 2}
BESIDE = ("verdict RUN", "list methods", "list metrics")  # without a limit; list imports torch
WHOLE_RUN, WHOLE_LIMIT, FRESH = "a run of SqueezeNet, 100 images, Grad-CAM", "<= 6", "fresh"


def parts(options: BenchOptions) -> Iterator[Part]:
    """On a GPU the run alone: the other commands do not use it."""
    turns = 2 if options.quick else 7
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_study(folder / "whole", SQUEEZENET, 100, ["gradcam"], ["accuracy"], device=options.device)
        command = ["-m", "heatproof", "run", "whole/study.toml", "--out", FRESH]
        made = partial(best, WHOLE_RUN, command, min(turns, 3), folder, WHOLE_LIMIT)
        yield Part(WHOLE_RUN, made, options.device)
        if options.gpu:
            return
        write_study(folder, SMALL, 8, ["gradcam", "random"], ["insertion(steps=4)", "cscore", "auc"])
        if run_study(folder / "study.toml", folder / "RUN").stopped:
            raise KeyboardInterrupt
        for words in (*COMMANDS, *BESIDE):
            command = ["-m", "heatproof", *shlex.split(words)]
            limit = LIMIT if words in COMMANDS else ""
            what = f"heatproof {words}"
            yield Part(what, partial(best, what, command, turns, folder, limit))
        for what in ("import heatproof", "import torch"):
            yield Part(what, partial(best, what, ["-c", what], turns, folder))


def best(what: str, command: Sequence[str], turns: int, folder: Path, limit: str = "") -> list[Row]:
    """The shortest of some turns by the wall's clock, and by the CPU's."""
    times = [once(command, folder) for _ in range(1 + turns)][1:]  # the first one reads the files
    wall, cpu = (min(column) for column in zip(*times, strict=True))
    process = started(["-X", "importtime", *command], folder)
    torch = re.search(r"\| +torch$", process.stderr, re.MULTILINE)
    note = "seconds of wall time; torch is imported" if torch else "seconds of wall time; without torch"
    return [Row(what, wall * 1e3, "CPU time", cpu * 1e3, wall, limit, note)]


def once(command: Sequence[str], folder: Path) -> tuple[float, float]:
    shutil.rmtree(folder / FRESH, ignore_errors=True)
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    started(command, folder)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def started(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    variables = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(folder / "compiled")}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, **variables},
    )
