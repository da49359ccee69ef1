"""ReciproCAM: a cell of the layer is worth the class's probability when little else of the layer is left.

For every cell (i, j) of the h x w activations A of the layer, with g the part of the network behind it,

    S(i, j) = p(c | g(A * M_ij))        M_ij: a small bump on the cell, 0 elsewhere

No gradient is needed, and only the part behind the layer is rerun, h w times for each image. The bump is
3 x 3 with weights 1/4 in the middle, 1/8 beside and 1/16 at the corners, cut off at the border; mask="cell"
is the single cell of weight 1. Citation key: byun2022reciprocam.

In a transformer the bump is laid over the grid of tokens, and the class token stays as it is, as in the
authors' version for transformers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from heatproof.errors import InputError
from heatproof.models.tap import Tail
from heatproof.registry import Card, explainer
from heatproof.types import Trace

BUMPS = {
    "gaussian": ((1 / 16, 1 / 8, 1 / 16), (1 / 8, 1 / 4, 1 / 8), (1 / 16, 1 / 8, 1 / 16)),
    "cell": ((1.0,),),
}


@explainer(
    "reciprocam",
    needs=("activations",),
    cite="byun2022reciprocam",
    card=Card(target="probability of the explained class", relu="none", sign="never negative"),
    cost="part of a pass per cell",
)
def reciprocam(trace: Trace, *, mask: str = "gaussian") -> Tensor:
    """The class's probability when one cell of the layer and a little around it is left.

    p(c | g(A * M_ij)) for each cell, g the part of the network behind the layer.
    mask: "gaussian", a bump of 3 x 3 cells, or "cell", the cell alone.
    """
    if mask not in BUMPS:
        raise InputError(f"reciprocam mask must be 'gaussian' or 'cell', got {mask!r}")
    assert trace.layer is not None
    maps = [
        _kept(trace, Tail(trace.model, image, trace.layer), target, mask)
        for image, target in zip(trace.images, trace.targets, strict=True)
    ]
    return torch.stack(maps)


def _kept(trace: Trace, tail: Tail, target: Tensor, mask: str) -> Tensor:
    """ "h w" probabilities of one image's class."""
    original = tail.activation
    picture = tail.layout.picture(original)
    height, width = picture.shape[2:]
    shown = bumps(height, width, mask).to(picture)
    results: list[Tensor] = []

    def alone(start: int, stop: int) -> Tensor:
        left = picture * shown[start:stop, None]
        whole = original.expand(stop - start, *original.shape[1:])
        logits = tail(tail.layout.put_back(left, whole))
        return trace.model.measured(logits, target.expand(stop - start))

    trace.queue.each(height * width, alone, results.append)
    return torch.cat(results).view(height, width)


def bumps(height: int, width: int, mask: str = "gaussian") -> Tensor:
    """ "n h w": the mask of every cell, row by row.

    >>> bumps(2, 2)[0].tolist()
    [[0.25, 0.125], [0.125, 0.0625]]
    """
    cells = torch.eye(height * width).view(-1, 1, height, width)
    weights = torch.tensor(BUMPS[mask])
    return F.conv2d(cells, weights[None, None], padding=len(weights) // 2)[:, 0]
