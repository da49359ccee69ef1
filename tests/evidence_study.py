"""A study on images with boxes and a network whose evidence is known (evidence_networks.py)."""

from __future__ import annotations

import csv
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image

import evidence_networks
from evidence_networks import cheating, honest, make_images
from heatproof.models.model import Model
from heatproof.run.config import toml
from heatproof.show import pixels

NETWORKS = {"cheating": cheating, "honest": honest}
CLASSES = ("plain", "code")
METRICS = ("specificity(draws=2, steps=4)", "accuracy", "evidence")


def make_evidence_study(
    folder: Path, network: str, images: int = 80, boxes: bool = True, labels: bool = True,
    metrics: Sequence[str] = METRICS,
) -> Path:  # fmt: skip
    """Write the study and everything it names; the path of its TOML file."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(evidence_networks.__file__, folder / "net.py")
    model: Model = NETWORKS[network]()
    torch.save(model.module.state_dict(), folder / "final.pt")
    made = make_images(images)
    with (folder / "list.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["path", *["label"] * labels, *["x0", "y0", "x1", "y1"] * boxes])
        drawn = pixels(made.images, model.preprocess)
        for i, (picture, label, region) in enumerate(zip(drawn, made.labels, made.regions, strict=True)):
            Image.fromarray(picture).save(folder / f"{i:02d}.png")
            (top, left), (bottom, right) = (end(region.nonzero(), 0) for end in (torch.amin, torch.amax))
            box = [int(left), int(top), int(right), int(bottom)]
            rows.writerow([f"{i:02d}.png", *[CLASSES[int(label)]] * labels, *box * boxes])
    study = {
        "methods": ["gradcam", "random"],
        "metrics": list(metrics),
        "run": {"batch_size": 40, "threads": 1, "workers": 1, "device": "cpu"},
        "model": {"spec": f"net.py:{network}", "checkpoints": ["final.pt"]},
        "images": {"kind": "csv", "path": "list.csv", "options": {"class_names": list(CLASSES)}},
    }
    (folder / "study.toml").write_text(toml(study))
    return folder / "study.toml"
