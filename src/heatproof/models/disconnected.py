"""A mosaic seen cell by cell, by a network in which one cell alone reaches the answer.

Every cell of an n x n mosaic goes through the network by itself, and the logits are those of one cell:
nothing outside it has any influence on them. At the layers that CAMs read, the cells' activations are put
together as a picture of the whole mosaic, which any method reads as it reads other networks, and are taken
apart again.

Cite: rao2022towards, whose DiFull has a classifier for each cell. Theirs is built from convolutions with a
linear head; cutting the mosaic up in front of the whole network works with every head, and says the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from heatproof.models.capture import capture
from heatproof.models.heads import Undetermined
from heatproof.models.layers import first_tensor, layout_of
from heatproof.models.model import Model
from heatproof.models.running import frozen_eval
from heatproof.models.tap import at_layers, replace_first


class Disconnected(nn.Module):
    """Mosaics in, the logits of one of their cells out; `pictures` are the layers that CAMs read."""

    channels_last = False  # in `pictures`; otherwise layers.py would have to guess

    def __init__(self, model: Model, layers: Sequence[str], cells: int, cell: int) -> None:
        super().__init__()
        self.network = model.module
        self.pictures = nn.ModuleList(nn.Identity() for _ in layers)
        self.model, self.layers, self.cells, self.cell = model, tuple(layers), cells, cell

    def forward(self, mosaics: Tensor) -> Tensor:
        apart = cut(mosaics, self.cells).contiguous(memory_format=torch.channels_last)

        def show_whole(name: str, output: Any) -> Any:
            tensor = first_tensor(output)
            layout = None if tensor is None else layout_of(tensor, apart, self.network)
            if tensor is None or layout is None:  # an earlier run of a layer that runs twice
                return None
            whole = self.pictures[self.layers.index(name)](join(layout.picture(tensor), self.cells))
            return replace_first(output, layout.put_back(cut(whole, self.cells), tensor))

        with at_layers(self.network, self.layers, show_whole):
            logits = self.model.forward(apart)
        return logits.view(-1, self.cells**2, logits.shape[1])[:, self.cell]


def disconnected(
    model: Model, pictures: Tensor, needs: frozenset[str], layer: str | Sequence[str] | None, cells: int
) -> list[Model]:
    """For each cell a network that answers by it alone; needs: what the methods ask of the shared pass."""
    with frozen_eval(model.module):
        wanted = needs & {"activations", "gradients", "scales"}
        trace = capture(model, pictures[:1].to(model.device), None, wanted, layer)
    place = {name: f"pictures.{i}" for i, name in enumerate(trace.layers)}
    height, width = trace.image_size
    return [
        Model(
            Disconnected(model, trace.layers, cells, cell),
            name=model.name,
            preprocess=replace(model.preprocess, size=(cells * height, cells * width)),
            classes=model.classes,
            layer=place.get(trace.layer or ""),
            scales=tuple(place[name] for name in trace.scales) or None,
            head=model.head.of_logits or Undetermined(),
        )
        for cell in range(cells**2)
    ]


def cut(mosaics: Tensor, cells: int) -> Tensor:
    """ "b c (n h) (n w)" -> "(b n n) c h w"."""
    parts: Tensor = mosaics.unflatten(3, (cells, -1)).unflatten(2, (cells, -1))
    return parts.permute(0, 2, 4, 1, 3, 5).flatten(0, 2)


def join(parts: Tensor, cells: int) -> Tensor:
    """ "(b n n) c h w" -> "b c (n h) (n w)"."""
    rows: Tensor = parts.unflatten(0, (-1, cells, cells)).permute(0, 3, 1, 4, 2, 5)
    return rows.flatten(4, 5).flatten(2, 3)
