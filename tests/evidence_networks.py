"""Networks whose evidence is known by construction: matched filters for an object, a token, or a colour."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from heatproof.images.preprocess import Preprocess
from heatproof.models.model import Model

SIDE, OBJECT, TOKEN = 32, 8, 6
MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)


def _pattern(seed: int, side: int) -> np.ndarray:
    """Random black and white cells, so that patterns do not resemble each other."""
    return np.random.default_rng(seed).integers(0, 2, (3, side, side)).astype(np.float32)


OBJECTS, MARK = (_pattern(1, OBJECT), _pattern(2, OBJECT)), _pattern(3, TOKEN)


class Images(NamedTuple):
    """Model-ready images with their classes, and the boxes of their objects as masks."""

    images: Tensor
    labels: Tensor
    regions: Tensor


def make_images(count: int = 48, token: str = "label", tint: bool = False, seed: int = 0) -> Images:
    """Images of two objects. token: in images of class 1 ("label"), in random ones ("random") or "none"."""
    rng = np.random.default_rng(seed)
    images = rng.uniform(0.35, 0.65, (count, 3, SIDE, SIDE)).astype(np.float32)
    labels, regions = np.arange(count) % 2, np.zeros((count, SIDE, SIDE), bool)
    for image, label, region in zip(images, labels, regions, strict=True):
        top, left = rng.integers(0, SIDE - OBJECT + 1, 2)
        spot = np.s_[top : top + OBJECT, left : left + OBJECT]
        if token != "none" and (label == 1 if token == "label" else rng.random() < 0.5):
            while True:  # beside the object
                y, x = rng.integers(0, SIDE - TOKEN + 1, 2)
                if abs(y - top) > OBJECT or abs(x - left) > OBJECT:
                    break
            image[:, y : y + TOKEN, x : x + TOKEN] = MARK
        image[:, *spot] = OBJECTS[label]
        region[spot] = True
        if tint and label == 1:
            image[0] = 0.7 * image[0] + 0.3
    normalised = (torch.from_numpy(images) - 0.5) / 0.25
    return Images(normalised, torch.from_numpy(labels), torch.from_numpy(regions))


class Detector(nn.Module):
    """Logits of two classes from the best match of a filter each; a class without a filter has logit 0."""

    def __init__(self, first: np.ndarray | None, second: np.ndarray) -> None:
        super().__init__()
        filters = [np.zeros_like(second) if first is None else first, second]
        weight = torch.stack([torch.from_numpy(f - f.mean()) for f in filters])
        # The response of a filter to its own pattern is 1, in normalised images too.
        weight = weight / (weight**2).sum((1, 2, 3), keepdim=True).clamp(min=1e-6) * 0.25
        self.match = nn.Conv2d(3, 2, second.shape[-1], bias=False)
        self.match.weight.data.copy_(weight)
        self.relu = nn.ReLU()
        self.scale = 20.0
        self.bias = nn.Parameter(torch.tensor([0.0 if first is not None else 10.0, 0.0]))

    def forward(self, images: Tensor) -> Tensor:
        return self.scale * self.relu(self.match(images)).amax((2, 3)) + self.bias


class Tinted(nn.Module):
    """Answers by the mean of the red channel relative to the green one."""

    def __init__(self) -> None:
        super().__init__()
        self.colour = nn.Conv2d(3, 2, 1, bias=False)
        self.colour.weight.data.copy_(torch.tensor([[-1.0, 1, 0], [1, -1, 0]])[..., None, None])
        self.relu = nn.ReLU()

    def forward(self, images: Tensor) -> Tensor:
        means = self.relu(self.colour(images)).mean((2, 3))
        return 20 * (means - means.new_tensor([0.0, 0.3]))


def as_network(module: nn.Module, name: str) -> Model:
    return Model(module.eval(), name, Preprocess((SIDE, SIDE), SIDE, MEAN, STD))


def honest() -> Model:
    return as_network(Detector(*OBJECTS), "honest")


def cheating() -> Model:
    return as_network(Detector(None, MARK), "cheating")


def tinted() -> Model:
    return as_network(Tinted(), "tinted")
