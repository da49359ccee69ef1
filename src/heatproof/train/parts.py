"""Which parameters a depth of training means: the head, the last stage, the last two, or all.

One pass over one picture notes when each module starts and ends. A stage is trained from the end of the one
before it, so that all which runs behind that point belongs to it, whatever it is called:

    head    the last module that has parameters: the linear (or 1x1 convolution) layer that makes the logits
    L4      what starts after the last stage but one has ended: the last stage, a final norm, the head
    L3-L4   likewise, one stage earlier
    all     everything

Stages of known families come from models/layers.py; a plain transformer is cut at a half and at three
quarters of its blocks. Any other network is cut where the size of its pictures halves, between blocks that
hold parameters. Or name modules by hand: ("layer3", "layer4", "fc") trains what lies under these names.

A parameter that no running module owns (attention keeps some of its projections so) goes with the nearest
module around it that runs. What is not trained does not adapt either: its BatchNorm and dropout stay in
evaluation mode. Depths: chakraborty2025cambench, Table 5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from heatproof.errors import InputError, LayerError, did_you_mean
from heatproof.models.layers import find_module, first_tensor, known_scales, layout_of
from heatproof.models.model import Model
from heatproof.models.running import frozen_eval, watched

DEPTHS = ("head", "L4", "L3-L4", "all")
Depth = str | tuple[str, ...]


@dataclass
class ModuleRun:
    """When a module ran first, on a clock that ticks at every start and end, and at which sizes."""

    start: int
    end: int = -1
    octave_in: int | None = None  # log2 of the picture's size over the feature map's; None: not a picture
    octave_out: int | None = None


@dataclass
class Parts:
    """What is trained: names of parameters, and the modules that are in training mode."""

    parameters: frozenset[str]
    modules: frozenset[str] = field(repr=False)

    def apply(self, module: nn.Module) -> list[nn.Parameter]:
        """Set every flag and mode of the network; the parameters to optimise."""
        for name, part in module.named_modules():
            part.training = name in self.modules
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in self.parameters)
        return [parameter for parameter in module.parameters() if parameter.requires_grad]


def trained_parts(model: Model, image: Tensor, depth: Depth) -> Parts:
    """What a depth means for this network. `image` is one model-ready picture, "1 c h w"."""
    parts = _parts(model, image, depth)
    # Keras lists the means of BatchNorm among its parameters.
    fixed: frozenset[str] = getattr(model.module, "statistics", frozenset())
    return Parts(parts.parameters - fixed, parts.modules)


def _parts(model: Model, image: Tensor, depth: Depth) -> Parts:
    module = model.module
    everywhere = frozenset(name for name, _ in module.named_modules())
    if depth == "all":
        return Parts(frozenset(name for name, _ in module.named_parameters()), everywhere)
    if not isinstance(depth, str):
        return _named_parts(module, depth)
    if depth not in DEPTHS:
        raise InputError(
            f"unknown depth {depth!r}; {did_you_mean(depth, DEPTHS)}; or name modules: ('layer4', 'fc')"
        )
    runs = watch(model, image)
    head = head_name(model, runs)
    if depth == "head":
        ends = [runs[owner].end for owner in _owners(module, runs).values() if owner != head]
        before = max((end for end in ends if end < runs[head].start), default=0)
    else:
        before = _boundary(model, runs, 1 if depth == "L4" else 2)
    return _parts_behind(module, runs, before)


def _parts_behind(module: nn.Module, runs: dict[str, ModuleRun], moment: int) -> Parts:
    behind = {name for name, run in runs.items() if run.start > moment}
    parameters = frozenset(p for p, owner in _owners(module, runs).items() if owner in behind)
    inside = {name for name, _ in module.named_modules() if _nearest(name, runs) in behind}
    return Parts(parameters, _with_surroundings(behind | inside))


def _named_parts(module: nn.Module, names: Sequence[str]) -> Parts:
    if not names:
        raise InputError("no module is named; write those to be trained, such as ('layer4', 'fc')")
    chosen = {part for name in names for part in find_module(module, name).modules()}
    inside = {name for name, part in module.named_modules() if part in chosen}
    parameters = {name for name, _ in module.named_parameters() if name.rpartition(".")[0] in inside}
    if not parameters:
        raise InputError(f"nothing under {', '.join(names)} has parameters that could be trained")
    return Parts(frozenset(parameters), _with_surroundings(inside))


def _with_surroundings(names: set[str]) -> frozenset[str]:
    """Also what only surrounds trained parts: some networks drop out in their own forward."""
    around = {name.rsplit(".", i)[0] for name in names for i in range(1, name.count(".") + 1)}
    return frozenset(names | around | {""})


@torch.no_grad()
def watch(model: Model, image: Tensor) -> dict[str, ModuleRun]:
    """When every module that runs did so for the first time, in the order in which they started."""
    runs: dict[str, ModuleRun] = {}
    inputs = model.ready(image[:1])
    clock = 0

    def octave(values: Any) -> int | None:
        tensor = first_tensor(values)
        layout = None if tensor is None else layout_of(tensor, inputs, model.module)
        return None if layout is None else round(math.log2(inputs.shape[-2] / layout.grid[-2]))

    def started(name: str, _part: nn.Module, args: Any, _kwargs: Any) -> None:
        nonlocal clock
        clock += 1
        runs.setdefault(name, ModuleRun(clock, octave_in=octave(args)))

    def ended(name: str, _part: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        nonlocal clock
        clock += 1
        if runs[name].end < 0:
            runs[name].end, runs[name].octave_out = clock, octave(output)

    with frozen_eval(model.module), watched(model.module, ended, started):
        model.forward(inputs)
    return runs


def head_name(model: Model, runs: dict[str, ModuleRun]) -> str:
    """The module that makes the logits: the last to start of those with parameters of their own."""
    owners = set(_owners(model.module, runs).values())
    if not owners:
        raise LayerError(f"{model.name} has no parameters, so there is nothing to train")
    name = max(owners, key=lambda owner: runs[owner].start)
    head = model.module.get_submodule(name)
    if not isinstance(head, (nn.Linear, nn.Conv2d)) and type(head).__name__ != "Dense":  # as Keras calls it
        raise LayerError(
            f"the last part of {model.name} with parameters is {name or 'the network itself'!r}, "
            "not a linear layer; name the modules to be trained, such as ('layer4', 'fc')"
        )
    return name


def _owners(module: nn.Module, runs: dict[str, ModuleRun]) -> dict[str, str]:
    """For each parameter the module that runs with it."""
    return {name: _nearest(name.rpartition(".")[0], runs) for name, _ in module.named_parameters()}


def _nearest(name: str, runs: dict[str, ModuleRun]) -> str:
    """The module itself where it runs, else the nearest around it that does."""
    while name and name not in runs:
        name = name.rpartition(".")[0]
    return name


def _boundary(model: Model, runs: dict[str, ModuleRun], stages: int) -> int:
    """The moment at which the stage before the last `stages` has ended."""
    ends = _known_ends(model, runs) or _searched_ends(model, runs)
    if len(ends) <= stages:
        wanted = "last stage" if stages == 1 else "last two stages"
        raise LayerError(
            f"{model.name} shows {len(ends)} stages, so its {wanted} cannot be told from the whole; "
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


def _searched_ends(model: Model, runs: dict[str, ModuleRun]) -> list[int]:
    """The end of each run of blocks at one size, of those blocks that hold parameters."""
    ends: dict[int, int] = {}
    for name in _blocks(model.module, runs):
        run = runs[name]
        if run.octave_out is not None and any(True for _ in model.module.get_submodule(name).parameters()):
            ends[run.octave_out] = run.end
    return sorted(ends.values())


def _blocks(module: nn.Module, runs: dict[str, ModuleRun], name: str = "") -> list[str]:
    """The modules a network is a chain of: containers are opened, and so is what halves more than once."""
    part = module.get_submodule(name)
    children = [f"{name}.{child}".lstrip(".") for child, _ in part.named_children()]
    run = runs.get(name)
    if run is not None and name and not isinstance(part, nn.Sequential):
        whole = run.octave_in is not None and run.octave_out is not None
        if not children or (whole and run.octave_out - run.octave_in <= 1):  # type: ignore[operator]
            return [name]
    return [block for child in children for block in _blocks(module, runs, child)]
