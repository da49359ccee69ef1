"""The standard audit, from pictures to rows, against the bare passes it needs.

Twelve methods and every metric that needs no annotation, over 200 pictures on a GPU and a few on a CPU, where
samples and steps are fewer too. (Without those that make inputs of their own: a search, and mosaics.) The
passes are those that the run itself counted. What they take bare was measured in the same process, right
before and after, at the batch that is fastest for them, in the memory format and precision of the run: so
many forward passes, and so many backward passes down to the image where a method needs those.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.busy import watching
from benchmarks.common import CAMS, Part, Row, cost, write_study
from benchmarks.profile import Profiler, profiling
from benchmarks.sections import BenchOptions
from heatproof.errors import HeatproofError, UnknownNameError, need
from heatproof.models import load_model
from heatproof.models.model import Model
from heatproof.registry import metrics
from heatproof.run.config import read_metrics
from heatproof.run.engine import run_study
from heatproof.timeline import FRAME

ANNOTATION = {"boxes", "masks"}
# Metrics with inputs of their own, and metrics of later versions: times are compared with those of 0.2.
OWN_INPUTS = {"adversarial_fragility", "grid_pointing", "disconnected_grid", "model_edit"}
FULL = [*CAMS, "gradient", "integrated-gradients", "lime", "random", "edges"]
SMALL = [*CAMS, "gradient", "integrated-gradients(steps=8)", "lime(samples=32)", "random", "edges"]
FEWER = {"insertion": "steps=10", "deletion": "steps=10", "randomisation": "depths=2", "fragility": "draws=1",
         "specificity": "draws=1, steps=5"}  # fmt: skip
LIMITS = {
    "resnet50": "<= 1.3",
    "squeezenet1_1": "<= 2",
    "mobilenet_v2": "<= 2",
}  # resnet18 is held to the first


class Extent(NamedTuple):
    """How much is run."""

    pictures: int
    batch: int
    small: bool


def parts(options: BenchOptions) -> Iterator[Part]:
    """A run for each network and precision: by default 200 pictures on a GPU, and a few on a CPU."""
    if options.gpu and not options.quick:
        count = options.pictures or 200
        size = Extent(count, max(1, min(50, count // 2)), False)
    else:
        size = Extent(options.pictures or (2 if options.quick else 4), 2, True)
    usual = ("resnet50", "squeezenet1_1", "mobilenet_v2") if options.gpu else ("squeezenet1_1", "resnet18")
    networks = options.network or usual[: 1 if options.quick else None]
    known = need("torchvision", "torchvision").models.list_models()
    for name in networks:
        if name not in known:
            raise UnknownNameError("network", name, known)
    for name in networks:
        both = options.gpu and name == "resnet50"
        for precision in options.precision or (("bf16", "fp32") if both else ("fp32",)):
            yield Part(
                f"{name}, {precision}", partial(audit, name, precision, size, options.device), options.device
            )


def audit(name: str, precision: str, size: Extent, device: str) -> list[Row]:
    """One run: its wall time, and what the device and the rest had of it."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        spec = {"spec": f"torchvision:{name}", "num_classes": 2}
        write_study(
            folder, spec, size.pictures, SMALL if size.small else FULL, standard_metrics(size.small),
            batch_size=size.batch, device=device, precision=precision,
        )  # fmt: skip
        model = load_model(
            spec["spec"], num_classes=2, checkpoint=folder / "weights.pt", device=device, precision=precision
        )
        before = _bare(model, device)
        began = time.perf_counter(), time.process_time()
        with profiling() as profiler, watching(device) as watched:
            result = run_study(folder / "study.toml", folder / "run")
        if result.stopped:
            raise KeyboardInterrupt
        wall, cpu = (time.perf_counter() - began[0]) * 1e3, (time.process_time() - began[1]) * 1e3
        after = _bare(model, device)
    passes, gradients = _counted(profiler)
    times = [[clock.of(passes, gradients) for clock in clocks] for clocks in (before, after)]
    bare, bare_cpu = (statistics.mean(column) for column in zip(*times, strict=True))
    what = f"standard audit, {name}, {precision}, {size.pictures} pictures"
    limit = LIMITS.get(name, LIMITS["resnet50"])
    other = f"{passes:,} bare forward and {gradients:,} backward passes"
    rows = [cost(what, wall, other, bare, limit)]
    if device == "cpu":  # which others may use meanwhile: then the wall tells about them too
        rows.append(cost(f"{what}: CPU time", cpu, other, bare_cpu, limit))
        total = profiler.summary().total
        shares = {"in passes": total.device, "outside of passes": total.host, "waiting": total.waiting}
        for label, seconds in shares.items():
            rows.append(cost(f"{what}: {label}", seconds * 1e3, "wall time", wall))
    units = sorted(span.end for span in profiler.recorded.spans if span.name == FRAME)
    after_first = (profiler.recorded.began + units[0]) * 1e-9
    if len(units) > 1 and (busy := watched.after(after_first)) is not None:
        rows.append(Row(f"{what}: GPU busy after the first unit", wall, "wall time", wall, busy, ">= 0.8"))
    return rows


def standard_metrics(small: bool) -> list[str]:
    """Every metric of a run that needs neither annotation nor several checkpoints."""
    requests = []
    for entry in metrics.as_registered():
        try:
            (request,) = read_metrics([entry.name])
        except HeatproofError:  # not in a run
            continue
        if entry.compares_checkpoints or entry.name in OWN_INPUTS or set(entry.needs) & ANNOTATION:
            continue
        fewer = FEWER.get(entry.name) if small else None
        requests.append(f"{request.text}({fewer})" if fewer else request.text)
    return requests


def _counted(profiler: Profiler) -> tuple[int, int]:
    """Inputs that went through the whole network, and those whose gradient came back to the image."""
    sums = {"forward": 0, "backward": 0}
    for span in profiler.recorded.spans:
        if span.name in sums:
            sums[span.name] += span.inputs
    return sums["forward"], sums["backward"]


class Bare(NamedTuple):
    """Milliseconds of one input."""

    forward: float
    backward: float

    def of(self, passes: int, gradients: int) -> float:
        return passes * self.forward + gradients * self.backward


def _bare(model: Model, device: str) -> tuple[Bare, Bare]:
    """By the wall's clock and by that of the CPU, at the batch that is fastest."""
    sizes: Sequence[int] = (64, 128, 256, 512) if device.startswith("cuda") else (8, 16, 32)
    times = {}
    for batch in sizes:
        images = torch.randn(batch, 3, 224, 224, device=device).contiguous(memory_format=torch.channels_last)

        def forward(images: torch.Tensor = images) -> object:
            with torch.inference_mode(), model.computing():
                return model.module(images)

        times[batch] = _by_both_clocks(forward, 5, device, batch)
    batch = min(times, key=lambda size: times[size][0])
    images = torch.randn(batch, 3, 224, 224, device=device)
    targets = torch.zeros(batch, dtype=torch.long, device=device)
    both = _by_both_clocks(lambda: model.input_gradient(images, targets), 3, device, batch)
    wall, cpu = (Bare(f, max(0.0, b - f)) for f, b in zip(times[batch], both, strict=True))
    return wall, cpu


def _by_both_clocks(call: Callable[[], object], repeat: int, device: str, batch: int) -> tuple[float, float]:
    """Median milliseconds of an input by wall and by CPU; a GPU is waited for."""
    times: list[tuple[float, float]] = []
    for _ in range(1 + repeat):
        began = time.perf_counter(), time.process_time()
        call()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        times.append((time.perf_counter() - began[0], time.process_time() - began[1]))
    wall, cpu = (statistics.median(column) * 1e3 / batch for column in zip(*times[1:], strict=True))
    return wall, cpu
