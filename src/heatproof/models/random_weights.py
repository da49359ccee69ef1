"""Fresh random weights for a network, module by module: in a copy of it, from the head down."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from heatproof.errors import ModelError
from heatproof.models.model import Model, watched


def copy_of(model: Model) -> Model:
    """A deep copy whose weights are its own."""
    try:
        copied = copy.deepcopy(model)
    except (RuntimeError, TypeError) as error:
        raise ModelError(
            f"{model.name} cannot be copied ({str(error).splitlines()[0]}), and a copy is needed"
        ) from error
    if model.call is not None and copied.call is model.call:
        raise ModelError(
            f"the call of {model.name} is a function that leads to the original weights, not to a copy's; "
            "make it a method of the module"
        )
    return copied


def from_the_head(model: Model, images: Tensor) -> list[str]:
    """Modules with parameters of their own, in the reverse order in which they start to run.

    One that never runs by itself (its parent may use its weights directly) goes with the parent that does.
    """
    started = {"": 0}  # also where the network is entered by another way than its own call
    clock = itertools.count(1)
    parts = dict(model.module.named_modules())

    def note(name: str, *_: Any) -> None:
        started[name] = next(clock)

    with watched(model.module, started=note):
        model.logits(images)

    def turn(name: str) -> int:
        while name not in started:
            name = name.rpartition(".")[0]
        return started[name]

    owners = [name for name, part in parts.items() if next(part.parameters(recurse=False), None) is not None]
    return sorted(owners, key=turn, reverse=True)


def reinitialise(module: nn.Module, names: Sequence[str], seed: int) -> None:
    """Fresh weights for the named modules of a network on the CPU; the random state comes back."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.random.default_generator.manual_seed(seed)
        for name in names:
            part = module.get_submodule(name)
            reset = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
            if reset is not None:
                reset()
                continue
            for weight in part.parameters(recurse=False):
                spread = weight.std() if weight.numel() > 1 else weight.new_zeros(())
                weight.copy_(weight.mean() + spread * torch.randn(weight.shape))


@torch.no_grad()
def take_over(part: nn.Module, source: nn.Module) -> None:
    """The parameters and buffers of one module, not of its children."""
    for mine, theirs in (
        (part.named_parameters(recurse=False), dict(source.named_parameters(recurse=False))),
        (part.named_buffers(recurse=False), dict(source.named_buffers(recurse=False))),
    ):
        for name, tensor in mine:
            tensor.copy_(theirs[name])


def untrained_copy(model: Model, images: Tensor, seed: int) -> Model:
    """The network as it was before any training: a copy whose every module has random weights."""
    copied = copy_of(model)
    names = from_the_head(copied, images[:1])
    if not names:
        raise ModelError(f"{model.name} has no parameters, so there is nothing to randomise")
    reinitialise(copied.module.cpu(), names, seed)
    copied.module.to(model.device)
    return copied
