"""A small network for runs on a laptop, and a new head for a network that has another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from heatproof.errors import InputError, LayerError
from heatproof.images.preprocess import Preprocess
from heatproof.models.model import Model, input_channels
from heatproof.train.parts import head_name, watch

HALF = (0.5,) * 3


class SmallNet(nn.Module):
    """Four stages of two 3x3 convolutions with BatchNorm, each half the size, a mean, and a linear layer.

    A 64-pixel picture has 8x8 places at the last stage. Stages have the names that ResNets made usual, so
    layers and stages are found without being told.
    """

    def __init__(self, classes: int = 2, width: int = 16, channels: int = 3) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width, 8 * width]
        self.layer1 = _stage(channels, widths[0], stride=1)
        self.layer2 = _stage(widths[0], widths[1])
        self.layer3 = _stage(widths[1], widths[2])
        self.layer4 = _stage(widths[2], widths[3])
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(widths[3], classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.layer4(self.layer3(self.layer2(self.layer1(images))))
        logits: Tensor = self.fc(self.pool(features).flatten(1))
        return logits


def _stage(inputs: int, outputs: int, stride: int = 2) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
    )  # fmt: skip


def small_net(classes: int = 2, size: int = 64, width: int = 16, seed: int = 0) -> Model:
    """A SmallNet with random weights that follow from the seed, for square pictures of this size."""
    with seeded(seed):
        module = SmallNet(classes, width)
    return Model(module.eval(), "small", Preprocess((size, size), size, HALF, HALF))


def new_head(model: Model, classes: int, names: tuple[str, ...] | None = None, seed: int = 0) -> Model:
    """Exchange the layer that makes the logits for a fresh one with this many; the network itself is changed.

    classes: 1 makes a one-logit model. names: of the classes. Weights of the new layer follow from the seed.
    """
    if classes < 1:
        raise InputError(f"a classifier needs at least one output; got {classes}")
    if names is not None and len(names) != max(2, classes):
        raise InputError(f"there are {len(names)} class names for {classes} outputs; they must match")
    module = model.module
    channels = input_channels(module) or model.preprocess.channels
    runs = watch(model, torch.zeros(1, channels, *model.preprocess.size))
    path = head_name(model, runs)
    old = module.get_submodule(path)
    fresh: nn.Module
    with seeded(seed):
        if isinstance(old, nn.Linear):
            fresh = nn.Linear(old.in_features, classes, old.bias is not None)
        elif isinstance(old, nn.Conv2d) and old.kernel_size == (1, 1):
            fresh = nn.Conv2d(old.in_channels, classes, 1, bias=old.bias is not None)
        else:
            raise LayerError(
                f"the last layer of {model.name}, {path!r}, is a {type(old).__name__}; "
                "only linear layers and 1x1 convolutions can be exchanged"
            )
    fresh.to(old.weight.device, old.weight.dtype).train(old.training)
    if not path:
        module = fresh
    else:
        parent, _, last = path.rpartition(".")
        setattr(module.get_submodule(parent), last, fresh)
    _tell(module, classes)
    return replace(model, module=module, classes=names)


def _tell(module: nn.Module, classes: int) -> None:
    """Networks that keep the number of classes beside their head are told the new one."""
    for holder, attribute in ((module, "num_classes"), (getattr(module, "config", None), "num_labels")):
        if isinstance(getattr(holder, attribute, None), int):
            setattr(holder, attribute, classes)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch's random numbers follow from the seed inside; the caller's come back behind it."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    with torch.random.fork_rng(devices=list(devices)):
        torch.manual_seed(seed)
        yield
