"""Where a CAM looks by default: behind the activation.

What an activation is about to clip is no evidence yet: in front of EfficientNet-Lite0's last ReLU6 half of
ScoreCAM's maps are empty, behind it none. So from the guessed layer one pass over one image follows its
output, tensor by tensor, through whatever takes it next, to the last layer that is still a picture on the
same grid and ends with an activation. Where the network rectifies by a function (`F.relu(self.bn(x))`), no
module can be named; "bn+relu" then means the output of `bn` behind that function. Pre-norm transformers are
left as they are: their blocks end with a sum, not with an activation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from heatproof.models.heads import Segmentation
from heatproof.models.layers import (
    encoder_of,
    find_module,
    first_tensor,
    guessed_layer,
    known_scales,
    layout_of,
    may_be_activated_later,
    picture_layers,
)
from heatproof.models.model import CONVOLUTIONS, Model
from heatproof.models.running import frozen_eval, watched

# Functions that may be applied twice without a change, so that the part behind them can be rerun (tail.py).
RECTIFIERS: dict[Any, str] = {
    F.relu: "relu", torch.relu: "relu", Tensor.relu: "relu", torch.relu_: "relu", Tensor.relu_: "relu",
    F.relu6: "relu6",
}  # fmt: skip
BY_NAME = {"relu": F.relu, "relu6": F.relu6}
MODULES = {"ReLU": "relu", "ReLU6": "relu6"}
ACTIVATES = re.compile(r"relu|elu$|gelu|silu|swish|mish|softplus|hardtanh|activation", re.IGNORECASE)


def default_layer(model: Model, images: Tensor | None = None) -> str | None:
    """The layer CAMs read where none is named, or None where only a search can tell."""
    guess = guessed_layer(model)
    pixels = isinstance(model.head, Segmentation) and images is not None
    if pixels and not model.layer and known_scales(model) is None and not encoder_of(model.module):
        return _coarsest(model, images)
    if guess is None or model.layer or not may_be_activated_later(model, guess):
        return guess
    if model.facts.activated_layer is None:
        if images is None:
            images = model.preprocess.blank
        try:
            model.facts.activated_layer = _step_behind(model, images[:1], guess)
        except (RuntimeError, ValueError, AssertionError):  # not the size it takes; the pass itself says so
            return guess
    return model.facts.activated_layer


def _coarsest(model: Model, images: Tensor | None) -> str | None:
    """The last layer on the coarsest grid in front of the last convolution, which makes the answer itself."""
    if model.facts.coarsest_layer is None and images is not None:
        pictures = picture_layers(model, images)
        parts = [find_module(model.module, name) for name, _, _ in pictures]
        answers = max((i for i, part in enumerate(parts) if isinstance(part, CONVOLUTIONS)), default=0)
        sizes = [math.prod(layout.grid) for _, layout, _ in pictures[:answers]]
        last = max((i for i, size in enumerate(sizes) if size == min(sizes)), default=-1)
        model.facts.coarsest_layer = pictures[last][0] if last >= 0 else ""
    return model.facts.coarsest_layer or None


def why(model: Model, layer: str) -> str:
    """Why CAMs read this layer by default, once they have."""
    guess = None if model.layer else guessed_layer(model)
    if layer == model.facts.coarsest_layer:
        return "the last layer on the coarsest grid of a segmentation"
    if guess is None:
        return "the last layer that is still a picture"
    if "+" in layer:
        return f"its output behind the function {layer.partition('+')[2]}, which has no module"
    if layer != guess:
        return f"behind its activation, which {guess} is not"
    if is_activation(find_module(model.module, layer)):
        return "the activation behind the last convolution"
    if known_scales(model) is None:
        return "the last convolution; no activation follows on the same grid"
    if not may_be_activated_later(model, guess) and "norm" in layer.rpartition(".")[2]:
        return "pre-norm transformer: a normalisation of the last block"
    return "end of the last stage"


@dataclass(frozen=True)
class Ran:
    """One thing that ran: a module by its name, or a rectifying function."""

    name: str
    before: Tensor | None
    after: Tensor | None
    activates: bool
    kind: str = ""  # the module's class
    is_function: bool = False


def _step_behind(model: Model, image: Tensor, guess: str) -> str:
    inputs = model.ready(image)
    steps = _follow(model, inputs)
    part = find_module(model.module, guess)
    full = next(name for name, other in model.module.named_modules() if other is part)
    runs = [i for i, step in enumerate(steps) if step.name == full]
    if not runs:
        return guess
    path, best, last = steps[runs[-1]].after, guess, full
    start = None if path is None else layout_of(path, inputs, model.module)
    if path is None or start is None:
        return guess
    for moment, step in enumerate(steps[runs[-1] + 1 :], runs[-1] + 1):
        if step.before is not path or step.after is None:
            continue
        layout = layout_of(step.after, inputs, model.module)
        if layout is None or layout.grid != start.grid:
            break
        path = step.after
        if step.activates:
            # A module that runs again (one ReLU for convolutions and head) cannot be named by its output.
            again = any(later.name == step.name for later in steps[moment + 1 :])
            function = step.name if step.is_function else MODULES.get(step.kind, "") if again else ""
            best = f"{last}+{function}" if function else best if again else step.name
        last = last if step.is_function else step.name
    model.facts.layer_runs = {best: sum(step.name == best for step in steps)}
    return best


@torch.no_grad()
def _follow(model: Model, inputs: Tensor) -> list[Ran]:
    """Everything that ran, in the order in which it ended, with the very tensors it took and gave."""
    steps: list[Ran] = []
    inside: list[bool] = []  # for each open module: is it an activation?

    def ended(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        inside.pop()
        before = first_tensor((*args, *kwargs.values()))
        steps.append(Ran(name, before, first_tensor(output), activates(module), type(module).__name__))

    def rectified(name: str, before: Tensor, after: Tensor) -> None:
        if not (inside and inside[-1]):
            steps.append(Ran(name, before, after, True, is_function=True))

    def started(_name: str, module: nn.Module, _args: Any, _kwargs: Any) -> None:
        inside.append(is_activation(module))

    with frozen_eval(model.module), watched(model.module, ended, started), Rectified(rectified):
        model.forward(inputs)
    return steps


def is_activation(module: nn.Module) -> bool:
    return bool(ACTIVATES.search(type(module).__name__))


def activates(module: nn.Module) -> bool:
    """Whether a module is an activation, or holds one: a convolution with its own, or a normalisation."""
    return any(map(is_activation, module.modules()))


class Rectified(TorchFunctionMode):
    """Tells of every rectifying function, and lets the one told answer in its place."""

    def __init__(self, told: Callable[[str, Tensor, Tensor], Tensor | None]) -> None:
        super().__init__()
        self.told = told

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in RECTIFIERS and isinstance(output, Tensor):
            answer = self.told(RECTIFIERS[func], args[0] if args else (kwargs or {})["input"], output)
            return output if answer is None else answer
        return output
