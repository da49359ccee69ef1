"""A study small enough to run many times: a tiny network, noise pictures of two classes, two checkpoints."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from forked import Forked

NETWORK = """
import torch
from torch import nn
from heatproof.images import Preprocess
from heatproof.models import Model

def tiny():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 6, 3, 2), nn.ReLU(), nn.Conv2d(6, 8, 3, 2), nn.ReLU(),
                        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2))
    return Model(net, preprocess=Preprocess(size=(32, 32), resize=32))
"""
STUDY = """
methods = {methods}
metrics = {metrics}
[run]
batch_size = 4
threads = 1
device = "cpu"
workers = 1
{run}
[model]
spec = "net.py:tiny"
checkpoints = {checkpoints}
[images]
kind = "folder"
path = "pictures"
"""
METHODS = ["gradcam", "layercam", "gradient"]
METRICS = ["cscore", "accuracy", "auc", "insertion(steps=4)", "deletion(steps=4)", "method_agreement"]


def make_study(
    folder: Path,
    images: int = 18,
    methods: list[str] = METHODS,
    metrics: list[str] = METRICS,
    checkpoints: str | list[str] = "epochs/*.pt",
    extra: str = "",
    run: str = "",
) -> Path:
    """Write the study and everything it names; the path of its TOML file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "net.py").write_text(NETWORK)
    (folder / "epochs").mkdir(exist_ok=True)
    for epoch in (1, 2):
        torch.manual_seed(epoch)
        net = nn.Sequential(
            nn.Conv2d(3, 6, 3, 2), nn.ReLU(), nn.Conv2d(6, 8, 3, 2), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2),
        )  # fmt: skip
        torch.save(net.state_dict(), folder / "epochs" / f"epoch{epoch:02d}.pt")
    for i in range(images):
        picture = folder / "pictures" / ("cat", "dog")[i % 2] / f"{i:03d}.png"
        picture.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(i).integers(0, 256, (36, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(picture)
    return write_study(folder, methods, metrics, checkpoints, extra, run)


def write_study(
    folder: Path,
    methods: list[str] = METHODS,
    metrics: list[str] = METRICS,
    checkpoints: str | list[str] = "epochs/*.pt",
    extra: str = "",
    run: str = "",
) -> Path:
    text = STUDY.format(
        methods=json.dumps(methods), metrics=json.dumps(metrics), checkpoints=json.dumps(checkpoints), run=run
    )
    (folder / "study.toml").write_text(text + extra)
    return folder / "study.toml"


def start(study: Path, out: Path, *options: str, script: str = "") -> Forked:
    """heatproof run in a process of its own; `script` runs in it first."""
    code = f"{script}\nfrom heatproof.cli import main\nmain()"
    return Forked(code, "run", study, "--out", out, *options)


def fingerprint(out: Path) -> tuple[str, dict[str, str]]:
    """Everything a run computed: the digest of its rows, and a hash of each file of maps."""
    from heatproof.store import RunFolder

    files = sorted((out / "maps").rglob("*.*"))
    hashes = {str(f.relative_to(out)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}
    return RunFolder.open(out).scores().digest(), hashes
