"""What must not change: rows with inputs per pass and shards, memory with the number of images."""

from __future__ import annotations

import resource
import tempfile
from pathlib import Path

import torch

from heatproof.bench.common import Row, network, write_pictures
from heatproof.explain import explain
from heatproof.metrics.faithfulness import insertion_deletion
from heatproof.models import load_model
from heatproof.run.config import toml
from heatproof.run.engine import run_study

METHODS = ["gradcam", "gradient", "lime(samples=32)"]
METRICS = ["insertion(steps=10)", "randomisation(depths=2)"]
KEY = ("model", "checkpoint", "image", "label", "explained", "method", "metric")


def rows(quick: bool = False, device: str = "cpu") -> list[Row]:
    """Seconds on a GPU, minutes on a CPU."""
    return [_same_rows(device, 4 if quick else 12), _flat_memory(device, 100 if quick else 10_000)]


def _same_rows(device: str, pictures: int) -> Row:
    """One small study at three numbers of inputs per pass, and in two shards: how far rows are apart."""
    found = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_pictures(folder / "pictures", pictures)
        torch.manual_seed(0)
        weights = load_model("torchvision:resnet18", num_classes=2).module.state_dict()
        torch.save(weights, folder / "weights.pt")
        for inputs, shards in ((16, 1), (64, 1), (64, 2), (256, 1)):
            config = {
                "methods": METHODS,
                "metrics": METRICS,
                "run": {"batch_size": max(1, pictures // 2), "device": device, "precision": "fp32",
                        "inputs_per_pass": inputs},
                "model": {"spec": "torchvision:resnet18", "num_classes": 2, "checkpoints": "weights.pt"},
                "images": {"kind": "folder", "path": "pictures"},
            }  # fmt: skip
            (folder / "study.toml").write_text(toml(config), encoding="utf-8")
            for shard in range(shards):
                done = run_study(folder / "study.toml", folder / f"{inputs}-{shards}", shard=(shard, shards))
            kept = done.folder.scores().sql("from scores")
            found[inputs, shards] = {tuple(row[name] for name in KEY): row["value"] for row in kept}
    first = found[64, 1]
    apart = max(
        abs(other[key] - value)
        for other in found.values()
        for key, value in first.items()
        if value == value  # not NaN
    )
    what = "rows between inputs per pass and shards, largest difference"
    return Row(what, 0.0, "itself", 0.0, apart, "<= 0.00001")


def _flat_memory(device: str, images: int) -> Row:
    """Peak memory after a tenth of the images, and after all of them."""
    model, side = network("resnet18", device), 64
    peaks = []
    for count in (images // 10, images):
        if device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats()
        for _ in range(0, count, 250):
            batch = torch.randn(min(250, count), 3, side, side, device=device)
            maps = explain(model, batch, ["gradcam", "gradient"])
            insertion_deletion(maps, 0, model=model, images=batch, steps=5)
        peaks.append(_peak(device))
    what = f"peak memory (MiB, not ms), {images:,} images"
    return Row(what, peaks[1], f"{images // 10:,} images", peaks[0], peaks[1] / peaks[0], "<= 1.05")


def _peak(device: str) -> float:
    """MiB: of the GPU since it was last reset, else of the process since it began."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
