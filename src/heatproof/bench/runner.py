"""What the runner adds: a run with its decoding, rows, maps and pictures, against the bare explain calls.

A quick run is not judged: it takes a second or two, of which opening a folder is a large share.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from heatproof.bench.common import Row, cost, side_by_side
from heatproof.explain import explain
from heatproof.images import batches, open_source
from heatproof.models import load_model
from heatproof.run.config import toml
from heatproof.run.engine import run_study

METHODS = ["gradcam", "gradcam++", "layercam"]
BATCH = 32


def rows(quick: bool = False, device: str = "cpu") -> list[Row]:
    """Three CAMs of ResNet-50 over 200 pictures, decoded from JPEG files; the loop has them in memory."""
    network, count = ("resnet18", 64) if quick else ("resnet50", 200)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        _write(folder, network, count, device)
        model = load_model(f"torchvision:{network}", folder / "weights.pt", num_classes=2, device=device)
        source = open_source("folder", folder / "pictures")
        ready = [loaded.batch for loaded in batches(source, model.preprocess, BATCH)]
        runs = iter(range(100))

        def loop() -> None:
            for batch in ready:
                explain(model, batch.images, METHODS, targets=batch.labels, batch_size=BATCH)

        def run() -> None:
            run_study(folder / "study.toml", folder / f"run{next(runs)}")

        ms = side_by_side({"loop": loop, "run": run}, 1 if quick else 3, device)
    what = f"a run of three CAMs, {network}, {count} pictures"
    limit, note = ("", "too short to be judged; leave out --quick") if quick else ("<= 1.15", "")
    return [cost(what, ms["run"], "explain in a loop, pictures in memory", ms["loop"], limit, note)]


def _write(folder: Path, network: str, count: int, device: str) -> None:
    random = np.random.default_rng(0)
    for i in range(count):
        file = folder / "pictures" / ("a", "b")[i % 2] / f"{i:03d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        small = random.integers(0, 256, (16, 20, 3), dtype=np.uint8)
        Image.fromarray(small).resize((400, 320), Image.Resampling.BICUBIC).save(file, quality=90)
    model = load_model(f"torchvision:{network}", num_classes=2)
    torch.save(model.module.state_dict(), folder / "weights.pt")
    config = {
        "methods": METHODS,
        "run": {"batch_size": BATCH, "device": device, "threads": torch.get_num_threads()},
        "model": {"spec": f"torchvision:{network}", "num_classes": 2, "checkpoints": "weights.pt"},
        "images": {"kind": "folder", "path": "pictures"},
    }
    (folder / "study.toml").write_text(toml(config), encoding="utf-8")
