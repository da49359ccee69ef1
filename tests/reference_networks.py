"""The two networks of the reference study: a plain CNN and a small ViT, 48 x 48 pixels in, two classes out.

Weights come from numpy's uniform numbers, which are the same bits on every machine; torch's own initial
weights are not.
"""

from __future__ import annotations

import numpy as np
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from heatproof.images import Preprocess
from heatproof.models import Model

SIDE = 48


def cnn(seed: int = 0) -> Model:
    """12 x 12 places and 16 channels at its default layer: more places than channels."""
    return _model(
        nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
            nn.Conv2d(8, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(12, 16, 3, padding=1), nn.ReLU(),
            nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 2),
        ),
        seed,
    )  # fmt: skip


def vit(seed: int = 0) -> Model:
    """6 x 6 places and 48 channels: fewer places than channels."""
    net = VisionTransformer(
        img_size=SIDE, patch_size=8, embed_dim=48, depth=2, num_heads=3, mlp_ratio=2.0, num_classes=2
    )
    return _model(net, seed)


def _model(net: nn.Module, seed: int) -> Model:
    draw = np.random.default_rng(seed).random
    with torch.no_grad():
        for tensor in (*net.parameters(), *net.buffers()):
            if tensor.is_floating_point():
                number = torch.from_numpy(draw(tuple(tensor.shape), dtype=np.float32))
                fan_in = tensor[0].numel() if tensor.ndim > 1 else 0
                # Weights of variance 2 / fan-in; scales, shifts and running statistics between 0.5 and 1.5.
                tensor.copy_((number - 0.5) * (24 / fan_in) ** 0.5 if fan_in else number + 0.5)
    return Model(net.eval(), preprocess=Preprocess(size=(SIDE, SIDE), resize=SIDE))
