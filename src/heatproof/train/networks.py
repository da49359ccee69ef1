"""Networks to train: a small one, new heads for others, and which of their parameters a depth trains.

One pass over one image records when each module starts and ends. A stage is trained from the end of the one
before it, so that everything that runs after that point belongs to it, whatever its name:

    head    the last module that has parameters: the linear (or 1x1 convolution) layer that makes the logits
    L4      what starts after the last stage but one has ended: the last stage, a final norm, the head
    L3-L4   likewise, one stage earlier
    all     everything

Stages of known families come from models/layers.py; a plain transformer is cut at a half and at three
quarters of its blocks. Any other network is cut where the size of its feature maps halves, between blocks
that hold parameters. Or name modules: ("layer3", "layer4", "fc") trains what lies under these names.

A parameter that no running module owns (attention keeps some of its projections so) goes with the nearest
module around it that runs. What is not trained does not adapt either: its BatchNorm and dropout stay in
evaluation mode. Depths: chakraborty2025cambench, Table 5.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from heatproof.errors import InputError, LayerError, did_you_mean
from heatproof.images.preprocess import Preprocess
from heatproof.models.layers import find_module, known_scales, searched_scales
from heatproof.models.model import Model, first_convolution
from heatproof.models.running import frozen_eval, watched
from heatproof.train.recipe import Depth

DEPTHS = ("head", "L4", "L3-L4", "all")
HALF = (0.5,) * 3


class SmallNet(nn.Module):
    """Four stages of two 3x3 convolutions with BatchNorm, each half the size, a mean, and a linear layer.

    A 64-pixel image has 8x8 positions at the last stage. Stages are named as in ResNets, so that layers and
    stages are recognised.
    """

    def __init__(self, classes: int = 2, width: int = 16, channels: int = 3) -> None:
        super().__init__()
        self.layer1 = _stage(channels, width, stride=1)
        self.layer2 = _stage(width, 2 * width)
        self.layer3 = _stage(2 * width, 4 * width)
        self.layer4 = _stage(4 * width, 8 * width)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * width, classes)

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
    """A SmallNet with random weights drawn from the seed, for square images of this size."""
    with seeded(seed):
        module = SmallNet(classes, width)
    return Model(module.eval(), "small", Preprocess((size, size), size, HALF, HALF))


def new_head(model: Model, classes: int, names: tuple[str, ...] | None = None, seed: int = 0) -> Model:
    """Replace the layer that makes the logits, in place, by a new one with this many outputs.

    classes: 1 makes a one-logit model. names: of the classes. seed: of the weights of the new layer.
    """
    if classes < 1:
        raise InputError(f"a classifier needs at least one output; got {classes}")
    if names is not None and len(names) != max(2, classes):
        raise InputError(f"there are {len(names)} class names for {classes} outputs; they must match")
    module = model.module
    first = first_convolution(module)
    channels = first.in_channels if first else model.preprocess.channels
    path = head_name(model, watch(model, torch.zeros(1, channels, *model.preprocess.size)))
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
    if path:
        module.set_submodule(path, fresh)
    else:
        module = fresh
    for holder, attribute in ((module, "num_classes"), (getattr(module, "config", None), "num_labels")):
        if isinstance(getattr(holder, attribute, None), int):
            setattr(holder, attribute, classes)
    return replace(model, module=module, classes=names)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's random numbers inside the context, and restore the caller's after it."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    with torch.random.fork_rng(devices=list(devices)):
        torch.manual_seed(seed)
        yield


@dataclass
class ModuleRun:
    """When a module ran first, on a clock that ticks at every start and end."""

    start: int
    end: int = -1


@dataclass
class Parts:
    """What is trained: names of parameters, and modules in training mode."""

    parameters: frozenset[str]
    modules: frozenset[str] = field(repr=False)

    def apply(self, module: nn.Module) -> list[nn.Parameter]:
        """Set every flag and mode of the network, and return the parameters to optimise."""
        for name, part in module.named_modules():
            part.training = name in self.modules
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in self.parameters)
        return [parameter for parameter in module.parameters() if parameter.requires_grad]


def trained_parts(model: Model, image: Tensor, depth: Depth) -> Parts:
    """Parameters and modules that a depth trains. image: one model-ready image, "1 c h w"."""
    module = model.module
    if depth == "all":
        inside = {name for name, _ in module.named_modules()}
        parameters = {name for name, _ in module.named_parameters()}
    elif not isinstance(depth, str):
        if not depth:
            raise InputError("no module is named; write those to be trained, such as ('layer4', 'fc')")
        chosen = {part for name in depth for part in find_module(module, name).modules()}
        inside = {name for name, part in module.named_modules() if part in chosen}
        parameters = {name for name, _ in module.named_parameters() if name.rpartition(".")[0] in inside}
        if not parameters:
            raise InputError(f"nothing under {', '.join(depth)} has parameters that could be trained")
    elif depth not in DEPTHS:
        known = f"{did_you_mean(depth, DEPTHS)}; or name modules: ('layer4', 'fc')"
        raise InputError(f"unknown depth {depth!r}; {known}")
    else:
        runs = watch(model, image)
        owners, head = _owners(module, runs), head_name(model, runs)
        if depth == "head":
            ends = [runs[owner].end for owner in owners.values() if owner != head]
            moment = max((end for end in ends if end < runs[head].start), default=0)
        else:
            moment = _boundary(model, runs, image, 1 if depth == "L4" else 2)
        later = {name for name, run in runs.items() if run.start > moment}
        inside = later | {name for name, _ in module.named_modules() if _nearest(name, runs) in later}
        parameters = {parameter for parameter, owner in owners.items() if owner in later}
    # Also all that contain these modules: some networks apply dropout in their own forward.
    parents = {name.rsplit(".", i)[0] for name in inside for i in range(1, name.count(".") + 1)}
    # Keras lists the means of BatchNorm among its parameters.
    fixed: frozenset[str] = getattr(module, "statistics", frozenset())
    return Parts(frozenset(parameters) - fixed, frozenset(inside | parents | {""}))


@torch.no_grad()
def watch(model: Model, image: Tensor) -> dict[str, ModuleRun]:
    """The first run of every module that runs, in the order in which they started."""
    runs: dict[str, ModuleRun] = {}
    inputs = model.ready(image[:1])
    clock = 0

    def started(name: str, _part: nn.Module, args: Any, _kwargs: Any) -> None:
        nonlocal clock
        clock += 1
        runs.setdefault(name, ModuleRun(clock))

    def ended(name: str, _part: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        nonlocal clock
        clock += 1
        if runs[name].end < 0:
            runs[name].end = clock

    with frozen_eval(model.module), watched(model.module, ended, started):
        model.forward(inputs)
    return runs


def head_name(model: Model, runs: dict[str, ModuleRun]) -> str:
    """Name of the module that makes the logits: the last to start of those with parameters of their own."""
    owners = set(_owners(model.module, runs).values())
    if not owners:
        raise LayerError(f"{model.name} has no parameters, so there is nothing to train")
    name = max(owners, key=lambda owner: runs[owner].start)
    head = model.module.get_submodule(name)
    if not isinstance(head, (nn.Linear, nn.Conv2d)) and type(head).__name__ != "Dense":  # Dense: of Keras
        raise LayerError(
            f"the last part of {model.name} with parameters is {name or 'the network itself'!r}, "
            "not a linear layer; name the modules to be trained, such as ('layer4', 'fc')"
        )
    return name


def _owners(module: nn.Module, runs: dict[str, ModuleRun]) -> dict[str, str]:
    """By parameter, the module that runs with it."""
    return {name: _nearest(name.rpartition(".")[0], runs) for name, _ in module.named_parameters()}


def _nearest(name: str, runs: dict[str, ModuleRun]) -> str:
    """The module itself if it runs, else the nearest around it that does."""
    while name and name not in runs:
        name = name.rpartition(".")[0]
    return name


def _boundary(model: Model, runs: dict[str, ModuleRun], image: Tensor, stages: int) -> int:
    """The moment at which the stage before the last `stages` has ended."""
    ends = _known_ends(model, runs)
    if not ends:  # of the sizes of feature maps at which parameters, but not the head's, are used
        *earlier, _ = searched_scales(Model(model.module), image, count=len(runs))
        times = [0, *(runs[name].end for name in earlier), max(run.end for run in runs.values())]
        body = set(_owners(model.module, runs).values()) - {head_name(model, runs)}
        ends = [
            end for before, end in pairwise(times) if any(before < runs[name].end <= end for name in body)
        ]
    if len(ends) <= stages:
        wanted = "last stage" if stages == 1 else "last two stages"
        raise LayerError(
            f"{model.name} has {len(ends)} stages, so its {wanted} cannot be trained alone; "
            "use depth 'all' or name the modules to be trained, such as ('layer4', 'fc')"
        )
    return ends[-1 - stages]


def _known_ends(model: Model, runs: dict[str, ModuleRun]) -> list[int]:
    """The ends of the last three stages of a known family or a transformer."""
    # A fresh Model: what an earlier search for layers left on this one is not about stages.
    scales = known_scales(Model(model.module))
    if scales is None or len(scales) < 3:
        return []
    ends = []
    for name in scales[:-1]:
        is_norm = "norm" in type(find_module(model.module, name)).__name__.lower()
        block = name.rpartition(".")[0] if is_norm else name
        # The multi-scale CAM of DenseNet reads the transition; the stage before it ends with the dense block.
        block = block.replace("transition", "denseblock")
        if block not in runs:
            return []
        ends.append(runs[block].end)
    return [*ends, max(run.end for run in runs.values())]
