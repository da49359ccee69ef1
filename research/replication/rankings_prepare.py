"""Pack what the pairs of networks of rankings.py need into a small folder."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from research.evidence import prepare as packing
from research.evidence.plan import PLAN

CIFAR = {"train": 300, "test": 100}  # images of each class; each seed draws 4,000 at most
XRAYS, SIDE = 700, 128  # of each class, of which each seed draws 500; networks see 112 pixels at most


def prepare(data: Path, out: Path, wheels: Sequence[Path] = ()) -> int:
    """Fill a new folder; returns its bytes. Photographs, weights and packages are packed as for evidence."""
    own = [m for m in PLAN if m.source == "photographs" and m.network in ("squeezenet", "lite0")]
    packing.prepare(data, out, own, wheels)
    (out / "cifar10").mkdir()
    for name in ("resnet20", "resnet56"):
        shutil.copyfile(*(folder / "cifar10" / f"{name}.safetensors" for folder in (data, out)))
    stored = np.load(data / "cifar10" / "cifar10.npz")
    arrays: dict[str, np.ndarray] = {}
    for split, count in CIFAR.items():
        labels = stored[f"{split}_labels"]
        chosen = np.concatenate([np.flatnonzero(labels == number)[:count] for number in range(10)])
        arrays |= {f"{split}_{part}": stored[f"{split}_{part}"][chosen] for part in ("images", "labels")}
    np.savez_compressed(out / "cifar10" / "cifar10.npz", **arrays)  # type: ignore[arg-type]
    for name in ("NORMAL", "PNEUMONIA"):
        files = sorted((data / "chestxray" / "train" / name).glob("*.jp*g"))
        target = out / "chestxray" / "train" / name
        target.mkdir(parents=True)
        for path in files[:: len(files) // XRAYS][:XRAYS]:
            small = Image.open(path).convert("L").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
            small.save(target / path.name, "JPEG", quality=92)
    return sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
