"""Fresh random weights for a network, module by module: in a copy of it, from the head down."""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from heatproof.errors import ModelError
from heatproof.models.model import Model
from heatproof.models.running import watched

BYTES_KEPT = 2**30  # of random weights


def copy_of(model: Model) -> Model:
    """A deep copy whose weights are its own."""
    try:
        copied = copy.deepcopy(model)
    except (RuntimeError, TypeError) as error:
        raise ModelError(
            f"{model.name} cannot be copied ({str(error).splitlines()[0]}), and a copy is needed"
        ) from error
    copied.facts.twin, copied.facts.keeps_twin = None, False
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


class RandomTwin:
    """A copy of a network that takes on its weights, or random ones, module by module and in place."""

    def __init__(self, model: Model, images: Tensor) -> None:
        self.own, self.copy = model.module, copy_of(model)  # not the Model, which may keep this twin
        self.names = from_the_head(self.copy, images[:1])
        if not self.names:
            raise ModelError(f"{model.name} has no parameters, so there is nothing to randomise")
        self.drawn: OrderedDict[int, nn.Module] = OrderedDict()  # networks with random weights, by seed

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied network gets a twin of its own."""
        return None

    def random(self, seed: int) -> nn.Module:
        """A network whose every module has fresh weights; the last few are kept."""
        if seed not in self.drawn:
            module = copy.deepcopy(self.own).cpu()
            reinitialise(module, self.names, seed)
            self.drawn[seed] = module.to(self.copy.device)
            size = sum(one.nbytes for one in module.parameters())
            while len(self.drawn) > 1 and len(self.drawn) * size > BYTES_KEPT:
                self.drawn.popitem(last=False)
        return self.drawn[seed]

    @torch.no_grad()
    def takes(self, source: nn.Module, names: Sequence[str] | None = None) -> None:
        """Parameters and buffers of the named modules, not of their children; of all where None."""
        wanted = self.names if names is None else names
        mine, theirs = (
            [tensor for name in wanted for tensor in _tensors(module.get_submodule(name))]
            for module in (self.copy.module, source)
        )
        torch._foreach_copy_(mine, theirs)


def _tensors(part: nn.Module) -> list[Tensor]:
    return [*part.parameters(recurse=False), *part.buffers(recurse=False)]


def keep_twin(model: Model) -> None:
    """Promise that the network's weights stay as they are, so that its twin is made and drawn only once."""
    model.facts.keeps_twin = True


def twin_of(model: Model, images: Tensor) -> RandomTwin:
    """A twin with the network's own weights; the same one each time where the network keeps it."""
    twin: RandomTwin | None = model.facts.twin
    if twin is None:
        twin = RandomTwin(model, images)
        if model.facts.keeps_twin:
            model.facts.twin = twin
    else:
        twin.takes(model.module)
    return twin


def untrained_copy(model: Model, images: Tensor, seed: int) -> Model:
    """The network as it was before any training: its twin, with random weights in every module."""
    twin = twin_of(model, images)
    twin.takes(twin.random(seed))
    return twin.copy
