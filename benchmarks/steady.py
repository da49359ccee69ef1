"""What must not change: rows with inputs per pass and shards, memory with the number of images.

A small network for small pictures is enough to see either where there is little time; by default it is a
ResNet-18.
"""

from __future__ import annotations

import resource
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Part, Row, network, write_study
from benchmarks.sections import BenchOptions
from heatproof.explain.api import explain
from heatproof.metrics.faithfulness import insertion_deletion
from heatproof.models.model import Model
from heatproof.run.engine import run_study
from heatproof.train import networks

METHODS = ["gradcam", "gradient", "lime(samples=32)"]
METRICS = ["insertion(steps=10)", "randomisation(depths=2)"]
KEY = ("model", "checkpoint", "image", "label", "explained", "method", "metric")
LARGE = {"spec": "torchvision:resnet18", "num_classes": 2}
SMALL = {"spec": f"{networks.__file__}:small_net"}
Ways = Sequence[tuple[int, int]]  # inputs per pass, shards
WAYS: Ways = ((64, 1), (16, 1), (256, 1), (64, 2))
QUICK_WAYS: Ways = ((256, 1), (16, 2))


def parts(options: BenchOptions) -> Iterator[Part]:
    device = options.device
    spec, pictures = (SMALL, 2) if options.quick else (LARGE, 12)
    ways = QUICK_WAYS if options.quick else WAYS
    yield Part("rows", partial(same_rows, spec, pictures, device, ways), device)
    images, batch = (40, 2) if options.quick else (10_000, 250) if options.gpu else (1_000, 25)
    model = networks.small_net() if options.quick else network("resnet18", device)
    model.module.to(device)
    yield Part("memory", partial(flat_memory, model, images, batch, device), device)


def same_rows(spec: Mapping[str, Any], pictures: int, device: str, ways: Ways = WAYS) -> list[Row]:
    """One small study at several numbers of inputs per pass, and in two shards: how far rows are apart."""
    results = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for inputs, shards in ways:
            write_study(
                folder, spec, pictures, METHODS, METRICS,
                batch_size=max(1, pictures // 2), device=device, precision="fp32", inputs_per_pass=inputs,
            )  # fmt: skip
            for shard in range(shards):
                done = run_study(folder / "study.toml", folder / f"{inputs}-{shards}", shard=(shard, shards))
                if done.stopped:
                    raise KeyboardInterrupt
            rows = done.folder.scores().sql("from scores")
            results[inputs, shards] = {tuple(row[name] for name in KEY): row["value"] for row in rows}
    first, *_ = results.values()
    apart = max(
        abs(other[key] - value)
        for other in results.values()
        for key, value in first.items()
        if value == value  # not NaN
    )
    what = "rows between inputs per pass and shards, largest difference"
    name = str(spec["spec"]).rpartition(":")[2]
    note = f"{name}, {pictures} pictures, {len(first):,} rows"
    return [Row(what, 0.0, "itself", 0.0, apart, "<= 0.00001", note)]


def flat_memory(model: Model, images: int, batch: int, device: str) -> list[Row]:
    """The most that was in use up to a tenth of the images, and up to all of them."""
    peaks = []
    for count in (images // 10, images):
        if device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats()
        seen = []
        for _ in range(0, count, batch):
            noise = torch.randn(batch, 3, 64, 64, device=device)
            maps = explain(model, noise, ["gradcam", "gradient"])
            insertion_deletion(maps, 0, model=model, images=noise, steps=5)
            seen.append(in_use(device))
        peaks.append(max(seen))
    what = f"peak memory (MiB, not ms), {images:,} images"
    first = f"{images // 10:,} images"
    return [Row(what, peaks[1], first, peaks[0], peaks[1] / peaks[0], "<= 1.05", model.name)]


def in_use(device: str) -> float:
    """MiB: the peak of the GPU since it was last reset; of this process now, or its peak where none tells."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated() / 2**20
    if (pages := Path("/proc/self/statm")).exists():
        return int(pages.read_text().split()[1]) * resource.getpagesize() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
