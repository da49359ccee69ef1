"""Which layer a CAM reads; layouts.py says how that layer's output becomes a picture "b c h w".

Known families are recognised by the names of their parts, other networks by their shape: the last
convolution with the normalisation and activation behind it, or the first normalisation of the last block
of a transformer (behind it, a class token alone carries the gradient). Where an activation may follow the
guess, one pass over one image steps behind it (default_layers.py); where the guess is not a picture, one pass
finds the last layer that is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from heatproof.errors import LayerError, UnknownNameError
from heatproof.models.layouts import Layout, first_tensor, layout_of
from heatproof.models.model import CONVOLUTIONS, Model
from heatproof.models.running import frozen_eval, watched
from heatproof.types import size_of

# The last stage of a family, and the three depths of its multi-scale CAM. Matched against the end of a
# module's name, so that prefixes such as "resnet.encoder." do not matter.
FAMILIES: tuple[tuple[str, ...], ...] = (
    ("features.denseblock2", "features.transition3", "features.denseblock4"),  # DenseNet
    ("Mixed_5d", "Mixed_6e", "Mixed_7c"),  # Inception v3
    ("inception3b", "inception4e", "inception5b"),  # GoogLeNet
    ("conv3_block12_concat", "pool4_pool", "conv5_block32_concat"),  # Keras DenseNet201
    ("mixed2", "mixed7", "mixed10"),  # Keras InceptionV3
    ("conv3_block4_out", "conv4_block6_out", "conv5_block3_out"),  # Keras ResNet50 and ResNet50V2
    ("layer2", "layer3", "layer4"),  # ResNet, ResNeXt
    ("trunk_output.block2", "trunk_output.block3", "trunk_output.block4"),  # RegNet, torchvision
    ("s2", "s3", "s4"),  # RegNet, timm
)
# Families whose last stage ends with its activation: nothing has to be looked for behind it.
ENDS_ACTIVATED = ("Mixed_7c", "inception5b", "mixed10", "layer4", "trunk_output.block4", "s4")


def find_module(module: nn.Module, name: str) -> nn.Module:
    """The part of that name, or the only one whose name ends so; last_conv: the last convolution.

    A name may end with "+relu": the part's output behind the function that rectifies it (default_layers.py).
    """
    name = name.partition("+")[0]
    try:
        found = module.get_submodule(name)
    except AttributeError:
        found = module
    if found is not module:
        return found
    ends_so = [n for n, _ in module.named_modules() if n.endswith("." + name)]
    if name == "last_conv":  # as papers say it
        ends_so = [n for n, part in module.named_modules() if isinstance(part, CONVOLUTIONS)][-1:]
    if len(ends_so) != 1:
        raise UnknownNameError("layer", name, ends_so or [n for n, _ in module.named_modules() if n])
    return module.get_submodule(ends_so[0])


def guessed_layer(model: Model) -> str | None:
    """The layer CAMs would read by names and shapes alone, or None where only a pass can tell."""
    if model.layer:
        return model.layer
    scales = known_scales(model)
    if scales:
        return scales[-1]
    seeing = encoder_of(model.module)
    return _last_convolution(model.module.get_submodule(seeing), f"{seeing}." if seeing else "")


def encoder_of(module: nn.Module) -> str:
    """Of a network that answers place by place, the part that sees: its backbone, before what answers."""
    parts = [name for name, part in module.named_children() if _convolves(part)]
    if "backbone" not in parts[:-1]:
        return ""
    inner = [n for n in ("body", "features") if hasattr(module.get_submodule("backbone"), n)]
    return ".".join(["backbone", *inner[:1]])


def _convolves(part: nn.Module) -> bool:
    return any(isinstance(one, CONVOLUTIONS) for one in part.modules())


def may_be_activated_later(model: Model, guess: str) -> bool:
    """Whether an activation may follow the guessed layer: not behind one, nor in a transformer."""
    part = find_module(model.module, guess)
    ends = any(guess == end or guess.endswith("." + end) for end in ENDS_ACTIVATED)
    in_transformer = known_scales(model) is not None and _normalises(guess.rpartition(".")[2], part)
    only_classifies = type(model.module).__name__ == "SqueezeNet"  # behind it is a picture for each class
    return not (ends or in_transformer or only_classifies or isinstance(part, ACTIVATIONS))


def known_scales(model: Model) -> tuple[str, ...] | None:
    """Three depths of a known family or of a transformer."""
    if model.scales:
        return model.scales
    if model.facts.scales is None:
        model.facts.scales = _scales_by_name(model.module) or ()
    return model.facts.scales or None


def _scales_by_name(module: nn.Module) -> tuple[str, ...] | None:
    names = [name for name, _ in module.named_modules()]
    for family in FAMILIES:
        last = next((n for n in names if n == family[-1] or n.endswith("." + family[-1])), None)
        if last:
            prefix = last.removesuffix(family[-1])
            found = tuple(prefix + n for n in family if prefix + n in names)
            return found or (last,)
    if stages := _stages(names):
        return stages
    if type(module).__name__ == "ConvNeXt" and "features.7" in names:  # torchvision's stages
        return ("features.3", "features.5", "features.7")
    if type(module).__name__ == "SqueezeNet":  # its last convolution is the classifier
        return ("features",)
    if "Swin" in type(module).__name__:
        parts = [n for n in names if re.search(r"(^|\.)(layers\.\d+|features\.[1357])$", n)]
        norm = next((n for n in reversed(names) if re.search(r"^(\w+\.)?(norm|layernorm)$", n)), None)
        # Behind the last normalisation: in front of it, gradient times activation is 0 at every token,
        # since a LayerNorm does not see the length of its input.
        return (*parts[-3:-1], norm) if norm else tuple(parts[-3:]) or None
    return _transformer_norms(module)


def _stages(names: Sequence[str]) -> tuple[str, ...] | None:
    """The last three of four or more numbered stages: ConvNeXt, ResNetV2, Hugging Face's ResNet, others."""
    found = [n for n in names if re.search(r"(^|\.)stages\.\d+$", n)]
    outer = min((n.count(".") for n in found), default=0)
    stages = [n for n in found if n.count(".") == outer]
    return tuple(stages[-3:]) if len(stages) > 3 else None


def _transformer_norms(module: nn.Module) -> tuple[str, ...] | None:
    """First normalisation of the blocks at half, three quarters and the end of the last row of blocks."""
    scales = None
    mixes_tokens = all(m.kernel_size == m.stride for m in module.modules() if isinstance(m, CONVOLUTIONS))
    for name, part in module.named_modules():
        blocks = list(part.named_children())
        if not isinstance(part, (nn.Sequential, nn.ModuleList)) or len(blocks) < 2:
            continue
        if len({type(block) for _, block in blocks}) > 1 or not (mixes_tokens or _attends(blocks[-1][1])):
            continue
        depths = sorted({len(blocks) // 2, math.ceil(len(blocks) * 3 / 4), len(blocks)})
        rows = [blocks[depth - 1] for depth in depths]
        norms = [next((n for n, m in block.named_children() if _normalises(n, m)), "") for _, block in rows]
        if all(norms):
            scales = tuple(f"{name}.{row}.{norm}" for (row, _), norm in zip(rows, norms, strict=True))
    return scales


def _attends(block: nn.Module) -> bool:
    return any(
        re.search("attention|attn", type(m).__name__.lower()) or re.search(r"(^|\.)(attn|attention)$", name)
        for name, m in block.named_modules()
        if not isinstance(m, nn.Identity)
    )


def _normalises(name: str, part: nn.Module) -> bool:
    return "norm" in type(part).__name__.lower() or bool(re.fullmatch(r"norm\d*", name))


BEHIND_CONVOLUTION = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm, nn.Dropout, nn.Identity)
# Paddings, and what weighs the path rather than lies on it: attention weights, gates.
BESIDE_THE_PATH = re.compile(r"Pad\w*>$|Sigmoid>$|(attn|attention)\.|(^|\.)crpe|\.gate|\.short_conv")
ACTIVATIONS = tuple(
    getattr(nn, n)
    for n in ("ReLU", "ReLU6", "SiLU", "GELU", "Hardswish", "LeakyReLU", "ELU", "Mish", "Softplus")
)


def _last_convolution(module: nn.Module, prefix: str = "") -> str | None:
    """Descend to the last child that convolves, then step over what only normalises or activates it."""
    children = list(module.named_children())
    holds = [_convolves(child) for _, child in children]
    if not any(holds):
        return None
    last = len(holds) - 1 - holds[::-1].index(True)
    name, child = children[last]
    # A Hugging Face backbone answers with a record: features for us, but their pooled twin for its head.
    if isinstance(child, (nn.Sequential, nn.ModuleList)) or hasattr(child, "base_model_prefix"):
        return _last_convolution(child, f"{prefix}{name}.")
    # Children of a Sequential run in the order they are listed; of another module, nobody knows.
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
    """Every layer whose output is a picture, in order of execution, with layout and channels. One pass."""
    found: dict[str, tuple[str, Layout, int]] = {}
    inputs = model.ready(images[:1])

    def look(name: str, _part: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        found.pop(name, None)  # a layer that runs twice counts where it ran last, picture or not
        tensor = first_tensor(output)
        if isinstance(output, dict) and len(output) > 1:  # a record of a whole backbone, not a layer
            return
        layout = None if tensor is None else layout_of(tensor, inputs, model.module)
        if name and layout is not None and tensor is not None:
            found[name] = (name, layout, int(layout.picture(tensor).shape[1]))

    with frozen_eval(model.module), watched(model.module, look):
        model.forward(inputs)
    return list(found.values())


def searched_scales(model: Model, images: Tensor, main: str | None = None, count: int = 3) -> tuple[str, ...]:
    """The last layer at each of the `count` coarsest octaves up to the main layer, found by one pass.

    Not a layer inside a block that goes on to a coarser grid: there the block before it is what has ended.
    """
    by_octave: dict[int, str] = {}
    end = main.partition("+")[0] if main else None
    pictures = picture_layers(model, images)
    octaves = {name: round(math.log2(images.shape[-2] / layout.grid[-2])) for name, layout, _ in pictures}
    for name, _, channels in pictures:
        part = find_module(model.module, name)
        beside = BESIDE_THE_PATH.search(f"{name}<{type(part).__name__}>")
        goes_on = any(
            octaves.get(block, octaves[name]) != octaves[name] for block in _blocks_around(model, name)
        )
        if channels > 1 and not beside and not goes_on:
            by_octave[octaves[name]] = name
        if name == end:
            by_octave[octaves[name]] = main or name
            break
    if not by_octave:
        raise LayerError(
            f"no layer of {model.name} has an output that is a picture of the image; CAMs cannot read it, "
            "but gradient, lime and rise can"
        )
    return tuple(list(by_octave.values())[-count:])


def _blocks_around(model: Model, name: str) -> Iterator[str]:
    """The modules a layer lies in that are more than a row of others."""
    while name := name.rpartition(".")[0]:
        if not isinstance(model.module.get_submodule(name), (nn.Sequential, nn.ModuleList)):
            yield name


def not_a_picture(model: Model, name: str, output: Any, images: Tensor) -> LayerError:
    """The sentence for a layer that cannot be read, with the names of some that can."""
    tensor = first_tensor(output)
    shape = "no tensor" if tensor is None else f"shape {tuple(tensor.shape)}"
    some = ", ".join([n for n, _, _ in picture_layers(model, images)][-5:]) or "none"
    return LayerError(
        f"layer {name!r} of {model.name} returns {shape}, in which no grid of a "
        f"{'x'.join(map(str, size_of(images)))} image can be found; layers that would do: {some}"
    )
