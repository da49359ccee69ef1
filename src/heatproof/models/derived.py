"""Networks derived from a network: with random or edited weights, or with outputs of one cell of a mosaic.

Every cell of an n x n mosaic goes through the network by itself, and the logits are those of one cell. At the
layers that CAMs read, the cells' activations are joined to a grid of the whole mosaic, and are cut again.
Cite: rao2022towards, whose DiFull has a classifier for each cell, of convolutions with a linear head; cutting
the mosaic in front of the whole network works with every head and is equivalent.
"""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from heatproof.errors import ModelError, first_line
from heatproof.models.capture import at_layers, capture, replace_first
from heatproof.models.heads import Multilabel, Undetermined
from heatproof.models.layers import first_tensor, layout_of
from heatproof.models.model import Model
from heatproof.models.running import frozen_eval, is_out_of_memory, watched

MOST_BYTES = 2**30  # of random weights that a twin caches


def copy_of(model: Model) -> Model:
    """Deep copy of a Model, whose weights are independent of the original's."""
    try:
        copied = copy.deepcopy(model)
    except (RuntimeError, TypeError) as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(
            f"{model.name} cannot be copied ({first_line(error)}), and a copy is needed"
        ) from error
    copied.facts.twin, copied.facts.keeps_twin, copied.facts.versions = None, False, None
    if model.call is not None and copied.call is model.call:
        raise ModelError(
            f"the call of {model.name} is a function that leads to the original weights, not to a copy's; "
            "make it a method of the module"
        )
    return copied


def from_the_head(model: Model, images: Tensor) -> list[str]:
    """Names of modules with parameters of their own, in reverse order of execution."""
    started = {"": 0}  # also if `call` enters the network by another method than its own __call__
    clock = itertools.count(1)

    def note(name: str, *_: Any) -> None:
        started[name] = next(clock)

    with watched(model.module, started=note):
        model.logits(images)

    def turn(name: str) -> int:
        while name not in started:  # its parent may use its weights directly
            name = name.rpartition(".")[0]
        return started[name]

    # Execution order, not the order of definition: the sanity check randomises from the output down.
    parts = model.module.named_modules()
    owners = [name for name, part in parts if next(part.parameters(recurse=False), None) is not None]
    return sorted(owners, key=turn, reverse=True)


def reinitialise(module: nn.Module, names: Sequence[str], seed: int) -> None:
    """Draw new weights for the named modules of a network on the CPU; the random state is restored."""
    # Always on the CPU: a GPU would draw other numbers for the same seed.
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.random.default_generator.manual_seed(seed)
        for name in names:
            part = module.get_submodule(name)
            reset = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
            if reset is not None:
                reset()
                continue
            # Parameters without a reset method (class tokens, embeddings): normal with their own mean and
            # deviation, so that activations behind them keep a plausible scale.
            for weight in part.parameters(recurse=False):
                spread = weight.std() if weight.numel() > 1 else weight.new_zeros(())
                weight.copy_(weight.mean() + spread * torch.randn(weight.shape))


class RandomTwin:
    """A copy of a network whose modules can be set to its weights or to random weights, in place."""

    def __init__(self, model: Model, images: Tensor) -> None:
        self.own, self.copy = model.module, copy_of(model)  # not the Model, which may cache this twin
        self.names = from_the_head(self.copy, images[:1])
        if not self.names:
            raise ModelError(f"{model.name} has no parameters, so there is nothing to randomise")
        self.drawn: OrderedDict[int, nn.Module] = OrderedDict()  # networks with random weights, by seed

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copied network makes its own twin."""
        return None

    def random(self, seed: int) -> nn.Module:
        """A copy with random weights in every module; the last few copies are cached."""
        if seed not in self.drawn:
            module = copy.deepcopy(self.own).cpu()
            reinitialise(module, self.names, seed)
            self.drawn[seed] = module.to(self.copy.device)
            size = sum(weight.nbytes for weight in module.parameters())
            while len(self.drawn) > 1 and len(self.drawn) * size > MOST_BYTES:
                self.drawn.popitem(last=False)
        return self.drawn[seed]

    @torch.no_grad()
    def takes(self, source: nn.Module, names: Sequence[str] | None = None) -> None:
        """Copy parameters and buffers of the named modules, not of their children; by default of all."""
        own, theirs = (
            [
                tensor
                for part in map(module.get_submodule, self.names if names is None else names)
                for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False))
            ]
            for module in (self.copy.module, source)
        )
        torch._foreach_copy_(own, theirs)


def twin_of(model: Model, images: Tensor) -> RandomTwin:
    """A twin with the network's own weights, cached if facts.keeps_twin says that they do not change."""
    twin: RandomTwin = model.facts.twin or RandomTwin(model, images)
    twin.takes(model.module)
    model.facts.twin = twin if model.facts.keeps_twin else None
    return twin


def untrained_copy(model: Model, images: Tensor, seed: int) -> Model:
    """The network before any training: its twin, with random weights in every module."""
    twin = twin_of(model, images)
    twin.takes(twin.random(seed))
    return twin.copy


@contextmanager
def without_channel(model: Model, image: Tensor, layer: str, channel: int) -> Iterator[None]:
    """Set a channel of a layer's output to 0 while the context is open; image: "1 c H W", of its passes."""

    def remove(_name: str, output: Any) -> Any:
        tensor = first_tensor(output)
        if tensor is None:
            return None
        layout = layout_of(tensor, image.expand(len(tensor), *image.shape[1:]), model.module)
        if layout is None:
            return None
        index = torch.tensor([channel], device=tensor.device)
        return replace_first(output, tensor.index_fill(layout.channel_axis, index, 0))

    with at_layers(model.module, [layer.partition("+")[0]], remove):  # what an activation makes of 0 is 0
        yield


@torch.no_grad()
def swap_classes(model: Model, head: str, first: int, second: int) -> None:
    """Exchange two classes' rows of the last layer's weights, if it has a row for each class.

    A single row for two classes changes its sign.
    """
    for weight in model.module.get_submodule(head).parameters(recurse=False):
        if len(weight) == 1:
            weight.neg_()
        elif max(first, second) < len(weight):
            weight[[first, second]] = weight[[second, first]]


class Disconnected(nn.Module):
    """A network on mosaics whose logits depend on one cell; `pictures` are the layers that CAMs read."""

    channels_last = False  # in `pictures`; layers.py reads it

    def __init__(self, model: Model, layers: Sequence[str], cells: int, cell: int) -> None:
        super().__init__()
        self.network = model.module
        self.pictures = nn.ModuleList(nn.Identity() for _ in layers)
        self.model, self.layers, self.cells, self.cell = model, tuple(layers), cells, cell

    def forward(self, mosaics: Tensor) -> Tensor:
        apart = cut(mosaics, self.cells).contiguous(memory_format=torch.channels_last)

        def pass_whole(name: str, output: Any) -> Any:
            tensor = first_tensor(output)
            layout = None if tensor is None else layout_of(tensor, apart, self.network)
            if tensor is None or layout is None:  # an earlier run of a layer that runs twice
                return None
            whole = self.pictures[self.layers.index(name)](join(layout.picture(tensor), self.cells))
            return replace_first(output, layout.put_back(cut(whole, self.cells), tensor))

        with at_layers(self.network, self.layers, pass_whole):
            logits = self.model.forward(apart)
        return logits.view(-1, self.cells**2, logits.shape[1])[:, self.cell]


def disconnected(
    model: Model, pictures: Tensor, needs: frozenset[str], layer: str | Sequence[str] | None, cells: int
) -> list[Model]:
    """Networks for each cell, whose output depends on it alone; needs: as for the shared pass."""
    with frozen_eval(model.module):
        wanted = needs & {"activations", "gradients", "scales"}
        trace = capture(model, pictures[:1].to(model.device), None, wanted, layer)
    place = {name: f"pictures.{i}" for i, name in enumerate(trace.activations)}
    height, width = trace.image_size
    own = model.head
    head = replace(own, by_itself=False, sigmoids=False) if isinstance(own, Multilabel) else Undetermined()
    return [
        Model(
            Disconnected(model, tuple(trace.activations), cells, cell),
            name=model.name,
            preprocess=replace(model.preprocess, size=(cells * height, cells * width)),
            classes=model.classes,
            layer=place.get(trace.layer or ""),
            scales=tuple(place[name] for name in trace.scales) or None,
            accelerate=model.accelerate,
            head=head,
        )
        for cell in range(cells**2)
    ]


def cut(mosaics: Tensor, cells: int) -> Tensor:
    """Turn "b c (n h) (n w)" into "(b n n) c h w"."""
    parts: Tensor = mosaics.unflatten(3, (cells, -1)).unflatten(2, (cells, -1))
    return parts.permute(0, 2, 4, 1, 3, 5).flatten(0, 2)


def join(parts: Tensor, cells: int) -> Tensor:
    """Turn "(b n n) c h w" into "b c (n h) (n w)"."""
    rows: Tensor = parts.unflatten(0, (-1, cells, cells)).permute(0, 3, 1, 4, 2, 5)
    return rows.flatten(4, 5).flatten(2, 3)
