"""The layer that CAMs read, and how its output is an image-like grid "b c h w" ("b c d h w" of a volume).

Known families are recognised by the names of their modules, other networks by their structure: the last
convolution with the normalisation and activation behind it, or the first normalisation of the last block of a
transformer (behind it, a class token alone carries the gradient). Otherwise one pass finds the last grid.

By default a CAM reads behind the activation: in front of EfficientNet-Lite0's last ReLU6 half of ScoreCAM's
maps are empty, behind it none. One pass over one image follows the guessed layer's output, tensor by tensor,
to the last layer on the same grid that ends with an activation. If the network rectifies by a function
(`F.relu(self.bn(x))`), no module has that output; "bn+relu" then means the output of `bn` behind the ReLU.
Pre-norm transformers are left as they are: their blocks end with a sum, not with an activation.
"""

from __future__ import annotations

import itertools
import math
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from heatproof.errors import LayerError, UnknownNameError
from heatproof.models.dense_heads import Segmentation
from heatproof.models.model import CONVOLUTIONS, Model, first_convolution
from heatproof.models.running import FunctionsWatched, at_least_float, frozen_eval, is_out_of_memory, watched
from heatproof.types import size_of

KNOWN: dict[str, Any] = tomllib.loads(Path(__file__).with_name("families.toml").read_text())
CONTAINERS = (nn.Sequential, nn.ModuleList)
BEHIND_CONVOLUTION = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm, nn.Dropout, nn.Identity)
# Paddings, and modules that weigh the path rather than lie on it: attention weights, gates.
BESIDE_THE_PATH = re.compile(r"Pad\w*>$|Sigmoid>$|(attn|attention)\.|(^|\.)crpe|\.gate|\.short_conv")
ACTIVATIONS = tuple(
    getattr(nn, n)
    for n in ("ReLU", "ReLU6", "SiLU", "GELU", "Hardswish", "LeakyReLU", "ELU", "Mish", "Softplus")
)
# Functions that may be applied twice without a change, so the part behind them can be rerun (capture.py).
RECTIFIERS: dict[Any, str] = {
    F.relu: "relu", torch.relu: "relu", Tensor.relu: "relu", torch.relu_: "relu", Tensor.relu_: "relu",
    F.relu6: "relu6",
}  # fmt: skip
BY_NAME = {"relu": F.relu, "relu6": F.relu6}
MODULES = {"ReLU": "relu", "ReLU6": "relu6"}
ACTIVATES = re.compile(r"relu|elu$|gelu|silu|swish|mish|softplus|hardtanh|activation", re.IGNORECASE)
MOST_PREFIX_TOKENS = 16


@dataclass(frozen=True)
class Layout:
    """How one layer's output lies in memory."""

    kind: str  # "nchw", "nhwc" or "tokens"; of volumes, with depth before the height
    grid: tuple[int, ...]  # its sides, in the order of the image's
    prefix: int = 0

    def picture(self, tensor: Tensor) -> Tensor:
        """Tensor "b c h w", in float32 or better."""
        if self.kind == "tokens":
            tensor = tensor[:, self.prefix :].unflatten(1, self.grid)
        if self.kind != "nchw":
            tensor = tensor.movedim(-1, 1)
        return at_least_float(tensor)

    def put_back(self, picture: Tensor, tensor: Tensor) -> Tensor:
        """The layer's output with this grid in place of its own."""
        values = picture if self.kind == "nchw" else picture.movedim(1, -1)
        if self.kind == "tokens":
            values = torch.cat([tensor[:, : self.prefix], values.flatten(1, -2)], dim=1)
        return values.to(tensor.dtype)

    @property
    def channel_axis(self) -> int:
        return 1 if self.kind == "nchw" else -1


def first_tensor(output: Any) -> Tensor | None:
    """The tensor in a layer's output; Hugging Face layers return tuples and records."""
    if isinstance(output, dict):
        output = tuple(output.values())
    if isinstance(output, (tuple, list)):
        output = next((item for item in output if isinstance(item, Tensor)), None)
    return output if isinstance(output, Tensor) else None


def layout_of(output: Tensor, images: Tensor, module: nn.Module) -> Layout | None:
    """Layout of a layer's output as a grid of the images; None if it has none."""
    if len(output) != len(images) or not output.is_floating_point():
        return None
    size, shape = size_of(images), tuple(output.shape[1:])
    if output.ndim != images.ndim:
        return _token_layout(shape[0], size, module) if output.ndim == 3 else None
    last = getattr(module, "channels_last", None)  # attribute of our Keras wrapper
    if last is None:
        channels_first, channels_last = _aspect_error(shape[1:], size), _aspect_error(shape[:-1], size)
        is_swin = "Swin" in type(module).__name__
        last = channels_last < channels_first or (channels_last == channels_first and is_swin)
    grid = shape[:-1] if last else shape[1:]
    return Layout("nhwc" if last else "nchw", grid) if math.prod(grid) > 1 else None


def _aspect_error(grid: tuple[int, ...], size: tuple[int, ...]) -> float:
    """Distance of a grid from the image's aspect; infinite for a grid finer than the image."""
    if any(cells > side for cells, side in zip(grid, size, strict=True)):
        return math.inf
    if len(size) > 2:  # networks shrink depth at another rate, so the aspect carries no information
        return 0.0
    slack = 0 if size[0] == size[1] else max(size)  # a side may have been rounded by one cell
    if abs(grid[0] * size[1] - grid[1] * size[0]) <= slack:
        return 0.0
    return abs(math.log((grid[0] / grid[1]) / (size[0] / size[1])))


def _token_layout(length: int, size: tuple[int, ...], module: nn.Module) -> Layout | None:
    grid = _patch_grid(module, size)
    if grid is not None:
        for halvings in range(6):  # Swin merges 2x2 tokens between stages
            merged = tuple(math.ceil(side / 2**halvings) for side in grid)
            if math.prod(merged) == length > 1:
                return Layout("tokens", merged)
        prefix = length - math.prod(grid)
        return Layout("tokens", grid, prefix) if 0 < prefix <= MOST_PREFIX_TOKENS else None
    if len(size) > 2:
        return None
    for prefix in range(min(MOST_PREFIX_TOKENS, length - 1)):
        height = round(math.sqrt((length - prefix) * size[0] / size[1]))
        width = (length - prefix) // max(1, height)
        if height * width == length - prefix > 1 and height * size[1] == width * size[0]:
            return Layout("tokens", (height, width), prefix)
    return None


def _patch_grid(module: nn.Module, size: tuple[int, ...]) -> tuple[int, ...] | None:
    """The token grid that a patch embedding (a convolution with stride = kernel) makes of an image."""
    part = first_convolution(module)
    if part is None or isinstance(part.padding, str) or part.kernel_size != part.stride:
        return None
    if part.kernel_size[0] < 2 or len(part.kernel_size) != len(size):
        return None
    sides = zip(size, part.padding, part.kernel_size, strict=True)
    return tuple((side + 2 * pad - kernel) // kernel + 1 for side, pad, kernel in sides)


def find_module(module: nn.Module, name: str) -> nn.Module:
    """The module of that name, or the only one whose name ends so; last_conv: the last convolution.

    A name may end with "+relu": the module's output behind the function that rectifies it.
    """
    name = name.partition("+")[0]
    if name:
        try:
            return module.get_submodule(name)
        except AttributeError:
            pass
    matches = [n for n, _ in module.named_modules() if n.endswith("." + name)]
    if name == "last_conv":  # the name used in papers
        matches = [n for n, part in module.named_modules() if isinstance(part, CONVOLUTIONS)][-1:]
    if len(matches) != 1:
        raise UnknownNameError("layer", name, matches or [n for n, _ in module.named_modules() if n])
    return module.get_submodule(matches[0])


def default_layer(model: Model, images: Tensor | None = None) -> str | None:
    """The layer CAMs read by default; None if only a pass can determine it."""
    guess = guessed_layer(model)
    if guess is not None and model.layer:
        return guess
    dense = isinstance(model.head, Segmentation) and known_scales(model) is None
    if dense and images is not None and not encoder_of(model.module):
        if model.facts.coarsest_layer is None:
            # The last layer on the coarsest grid before the final convolution, which makes the output itself.
            pictures = picture_layers(model, images)
            parts = [find_module(model.module, name) for name, _, _ in pictures]
            output = max((i for i, part in enumerate(parts) if isinstance(part, CONVOLUTIONS)), default=0)
            sizes = [math.prod(layout.grid) for _, layout, _ in pictures[:output]]
            last = max((i for i, size in enumerate(sizes) if size == min(sizes)), default=-1)
            model.facts.coarsest_layer = pictures[last][0] if last >= 0 else ""
        return model.facts.coarsest_layer or None
    # A pass is only worth its time if an activation may follow; its result is cached in the facts.
    if guess is None or not may_be_activated_later(model, guess):
        return guess
    if model.facts.activated_layer is None:
        image = (model.preprocess.blank if images is None else images)[:1]
        try:
            model.facts.activated_layer = _step_behind(model, image, guess)
        except (RuntimeError, ValueError, AssertionError) as error:
            if is_out_of_memory(error):
                raise
            return guess  # wrong image size: the pass itself raises
    return model.facts.activated_layer


def guessed_layer(model: Model) -> str | None:
    """The layer CAMs read by names and structure alone; None if only a pass can determine it."""
    if model.layer:
        return model.layer
    if scales := known_scales(model):
        return scales[-1]
    encoder = encoder_of(model.module)
    return _last_convolution(model.module.get_submodule(encoder), f"{encoder}." if encoder else "")


def encoder_of(module: nn.Module) -> str:
    """The backbone of a network with an output per pixel; "" if there is none."""
    parts = [name for name, part in module.named_children() if first_convolution(part)]
    if "backbone" not in parts[:-1]:
        return ""
    inner = [n for n in ("body", "features") if hasattr(module.get_submodule("backbone"), n)]
    return ".".join(["backbone", *inner[:1]])


def may_be_activated_later(model: Model, guess: str) -> bool:
    """Whether an activation may follow the guessed layer: not after an activation, nor in a transformer."""
    part = find_module(model.module, guess)
    ends = any(guess == end or guess.endswith("." + end) for end in KNOWN["ends_activated"])
    in_transformer = known_scales(model) is not None and _normalises(guess.rpartition(".")[2], part)
    only_classifies = type(model.module).__name__ == "SqueezeNet"  # behind it is a grid for each class
    return not (ends or in_transformer or only_classifies or isinstance(part, ACTIVATIONS))


def why(model: Model, layer: str) -> str:
    """The reason why CAMs read this layer by default, after a pass."""
    guess = None if model.layer else guessed_layer(model)
    if layer == model.facts.coarsest_layer:
        return "the last layer on the coarsest grid of a segmentation"
    if guess is None:
        return "the last layer whose output has positions"
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


class _Step(NamedTuple):
    """An executed step: a module by name, or a rectifying function."""

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
    path = steps[runs[-1]].after if runs else None
    start = None if path is None else layout_of(path, inputs, model.module)
    if start is None:
        return guess
    best, last = guess, full
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
def _follow(model: Model, inputs: Tensor) -> list[_Step]:
    """All executed steps in the order in which they ended, with the tensors they took and returned."""
    steps: list[_Step] = []
    in_activation: list[bool] = []  # for each open module: whether it is an activation

    def ended(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        in_activation.pop()
        before = first_tensor((*args, *kwargs.values()))
        activates = any(map(is_activation, module.modules()))  # is a module or contains one
        steps.append(_Step(name, before, first_tensor(output), activates, type(module).__name__))

    def rectified(name: str, before: Tensor, after: Tensor) -> None:
        if not (in_activation and in_activation[-1]):
            steps.append(_Step(name, before, after, True, is_function=True))

    def started(_name: str, module: nn.Module, _args: Any, _kwargs: Any) -> None:
        in_activation.append(is_activation(module))

    with frozen_eval(model.module), watched(model.module, ended, started), rectifiers_watched(rectified):
        model.forward(inputs)
    return steps


def is_activation(module: nn.Module) -> bool:
    return bool(ACTIVATES.search(type(module).__name__))


def rectifiers_watched(call: Callable[[str, Tensor, Tensor], Tensor | None]) -> FunctionsWatched:
    """Call call(name, input, output) for every rectifying function; what it returns replaces the output."""

    def watch(func: Any, args: Any, kwargs: Any, output: Any) -> Tensor | None:
        if func not in RECTIFIERS or not isinstance(output, Tensor):
            return None
        return call(RECTIFIERS[func], args[0] if args else kwargs["input"], output)

    return FunctionsWatched(watch)


def known_scales(model: Model) -> tuple[str, ...] | None:
    """Three depths of a known family or of a transformer."""
    if model.scales:
        return model.scales
    if model.facts.scales is None:
        model.facts.scales = _scales_by_name(model.module) or ()
    return model.facts.scales or None


def _scales_by_name(module: nn.Module) -> tuple[str, ...] | None:
    names, kind = [name for name, _ in module.named_modules()], type(module).__name__
    for family in KNOWN["families"]:
        last = next((n for n in names if n == family[-1] or n.endswith("." + family[-1])), None)
        if last:
            prefix = last.removesuffix(family[-1])
            return tuple(prefix + n for n in family if prefix + n in names)
    # The last three of four or more numbered stages: ConvNeXt, ResNetV2, Hugging Face's ResNet, others.
    stages = [n for n in names if re.search(r"(^|\.)stages\.\d+$", n)]
    outer = min((n.count(".") for n in stages), default=0)
    if len(stages := [n for n in stages if n.count(".") == outer]) > 3:
        return tuple(stages[-3:])
    if kind == "ConvNeXt" and "features.7" in names:  # torchvision's stages
        return ("features.3", "features.5", "features.7")
    if kind == "SqueezeNet":  # its last convolution is the classifier; stages end in front of a pooling
        pools = [
            i
            for i, part in enumerate(module.get_submodule("features").children())
            if isinstance(part, nn.MaxPool2d)
        ]
        return (*(f"features.{i - 1}" for i in pools[-2:]), "features")
    if "Swin" in kind:
        parts = [n for n in names if re.search(r"(^|\.)(layers\.\d+|features\.[1357])$", n)]
        norm = next((n for n in reversed(names) if re.search(r"^(\w+\.)?(norm|layernorm)$", n)), None)
        # Behind the last normalisation: in front of it, gradient times activation is 0 at every token,
        # since a LayerNorm does not see the length of its input.
        return (*parts[-3:-1], norm) if norm else tuple(parts[-3:]) or None
    return _transformer_norms(module)


def _transformer_norms(module: nn.Module) -> tuple[str, ...] | None:
    """First normalisation of the blocks at half, three quarters and the end of the last row of blocks."""
    scales = None
    mixes_tokens = all(m.kernel_size == m.stride for m in module.modules() if isinstance(m, CONVOLUTIONS))
    for name, part in module.named_modules():
        blocks = list(part.named_children())
        if (
            not isinstance(part, CONTAINERS)
            or len(blocks) < 2
            or len({type(block) for _, block in blocks}) > 1
        ):
            continue
        attends = any(
            re.search("attention|attn", type(m).__name__.lower()) or re.search(r"(^|\.)(attn|attention)$", n)
            for n, m in blocks[-1][1].named_modules()
            if not isinstance(m, nn.Identity)
        )
        if not mixes_tokens and not attends:
            continue
        depths = sorted({len(blocks) // 2, math.ceil(len(blocks) * 3 / 4), len(blocks)})
        rows = [blocks[depth - 1] for depth in depths]
        norms = [next((n for n, m in block.named_children() if _normalises(n, m)), "") for _, block in rows]
        if all(norms):
            scales = tuple(f"{name}.{row}.{norm}" for (row, _), norm in zip(rows, norms, strict=True))
    return scales


def _normalises(name: str, part: nn.Module) -> bool:
    return "norm" in type(part).__name__.lower() or bool(re.fullmatch(r"norm\d*", name))


def _last_convolution(module: nn.Module, prefix: str = "") -> str | None:
    """Descend to the last child that convolves, then step over what only normalises or activates it."""
    children = list(module.named_children())
    last = max((i for i, (_, child) in enumerate(children) if first_convolution(child)), default=None)
    if last is None:
        return None
    name, child = children[last]
    # A Hugging Face backbone returns a record: features for us, but their pooled twin for its head.
    if isinstance(child, CONTAINERS) or hasattr(child, "base_model_prefix"):
        return _last_convolution(child, f"{prefix}{name}.")
    # Children of a Sequential run in the order they are listed; of another module the order is unknown.
    if isinstance(module, nn.Sequential):
        for name_behind, behind in children[last + 1 :]:
            if not isinstance(behind, BEHIND_CONVOLUTION + ACTIVATIONS):
                break
            name = name_behind
    elif isinstance(child, CONVOLUTIONS) and children[last + 1 :]:
        name_behind, behind = children[last + 1]  # but a BatchNorm of the same width is its own
        if getattr(behind, "num_features", None) == child.out_channels:
            name = name_behind
    return prefix + name


@torch.no_grad()
def picture_layers(model: Model, images: Tensor) -> list[tuple[str, Layout, int]]:
    """Every layer whose output is a grid, in order of execution, with layout and channels. One pass."""
    layers: dict[str, tuple[str, Layout, int]] = {}
    inputs = model.ready(images[:1])

    def look(name: str, _part: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        layers.pop(name, None)  # a layer that runs twice counts where it ran last, grid or not
        tensor = first_tensor(output)
        if not name or tensor is None or (isinstance(output, dict) and len(output) > 1):
            return  # the network itself, or the record of a whole backbone
        if layout := layout_of(tensor, inputs, model.module):
            layers[name] = (name, layout, int(layout.picture(tensor).shape[1]))

    with frozen_eval(model.module), watched(model.module, look):
        model.forward(inputs)
    return list(layers.values())


def searched_scales(model: Model, images: Tensor, main: str | None = None, count: int = 3) -> tuple[str, ...]:
    """The last layer at each of the `count` coarsest octaves up to the main layer, found by one pass.

    Layers inside a block that continues to a coarser grid are skipped in favour of the block before.
    """
    by_octave: dict[int, str] = {}
    end = main.partition("+")[0] if main else None
    pictures = picture_layers(model, images)
    octaves = {name: round(math.log2(images.shape[-2] / layout.grid[-2])) for name, layout, _ in pictures}
    for name, _, channels in pictures:
        octave, kind = octaves[name], type(find_module(model.module, name)).__name__
        around = itertools.accumulate(name.split(".")[:-1], "{}.{}".format)
        blocks = (n for n in around if not isinstance(model.module.get_submodule(n), CONTAINERS))
        goes_on = any(octaves.get(block, octave) != octave for block in blocks)
        if channels > 1 and not goes_on and not BESIDE_THE_PATH.search(f"{name}<{kind}>"):
            by_octave[octave] = name
        if name == end:
            by_octave[octave] = main or name
            break
    if not by_octave:
        raise LayerError(
            f"no layer of {model.name} has an output with positions of the image; CAMs need one, "
            "but gradient, lime and rise can"
        )
    return tuple(list(by_octave.values())[-count:])
