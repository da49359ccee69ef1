"""Green and blue discs on noise, and a small network that learns them: pictures for contrast tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from heatproof.contrast import Token
from heatproof.images import Preprocess
from heatproof.models import Model

SIDE = 32
TAG = Token("tag", 0.4)
COLOURS = ((60, 160, 70), (60, 80, 190))


def pictures(each: int = 30, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """ "n H W 3" uint8 and labels, classes in turn."""
    rng = np.random.default_rng(seed)
    down, across = np.mgrid[:SIDE, :SIDE]
    drawn = rng.integers(90, 160, (2 * each, SIDE, SIDE, 3), dtype=np.uint8)
    labels = np.arange(2 * each) % 2
    for picture, label in zip(drawn, labels, strict=True):
        y, x, radius = *rng.integers(8, SIDE - 8, 2), rng.integers(5, 8)
        picture[(down - y) ** 2 + (across - x) ** 2 <= radius**2] = COLOURS[label]
    return drawn, labels


def network(outputs: int = 2, seed: int = 0) -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = nn.Sequential(
            nn.Conv2d(3, 8, 5, 2, 2), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU(),
            nn.Conv2d(16, 16, 3, 1, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(16, outputs),
        )  # fmt: skip
    return Model(net.eval(), "discs", Preprocess((SIDE, SIDE), SIDE, (0.5,) * 3, (0.5,) * 3))


def model_ready(model: Model, each: int = 30, seed: int = 0) -> tuple[Tensor, Tensor]:
    drawn, labels = pictures(each, seed)
    images = torch.from_numpy(drawn).permute(0, 3, 1, 2).float() / 255
    return model.preprocess.normalise(images), torch.from_numpy(labels)


def folder(path: Path, each: int = 30) -> Path:
    for i, (picture, label) in enumerate(zip(*pictures(each), strict=True)):
        place = path / ("green", "blue")[label] / f"{i:03d}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(place)
    return path
