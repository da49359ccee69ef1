"""Mosaics: images of several classes laid out in n x n cells, and how much of a map lies in each cell.

Mass is counted on the map's own grid, each value evenly over its square: enlarged bilinearly, a correct
map would spill over the border of its cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Mosaics:
    """Images of which a network is sure, and where they lie in mosaics.

    Args:
        pictures, classes: "p c h w" and "p".
        places: "m n n", the image in each cell.
        rows, columns: where cells begin, and the last ends: n + 1 pixels each.
    """

    pictures: Tensor
    classes: Tensor
    places: Tensor
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    @property
    def cell_classes(self) -> Tensor:
        """ "m n n"."""
        return self.classes[self.places]

    @property
    def areas(self) -> Tensor:
        """ "n n", each cell's share of the mosaic."""
        heights, widths = (torch.tensor(edges).double().diff() for edges in (self.rows, self.columns))
        return torch.outer(heights, widths) / (self.rows[-1] * self.columns[-1])

    def images(self, which: slice | Tensor = slice(None)) -> Tensor:
        """ "m c H W", model-ready, with each image in its cell."""
        lines = []
        for line, height in zip(self.places[which].unbind(1), np.diff(self.rows).tolist(), strict=True):
            cells = zip(line.unbind(1), np.diff(self.columns).tolist(), strict=True)
            lines.append(torch.cat([shrunk(self.pictures[p], (height, width)) for p, width in cells], -1))
        return torch.cat(lines, -2)

    def mass(self, values: Tensor) -> Tensor:
        """ "m n n", float64: the positive mass of maps "m h w" in each cell."""
        rows, columns = (
            overlap(int(count), edges).to(values.device)
            for count, edges in zip(values.shape[1:], (self.rows, self.columns), strict=True)
        )
        return torch.einsum("rh,mhw,cw->mrc", rows, values.clamp(min=0).double(), columns)


def overlap(count: int, edges: Sequence[int]) -> Tensor:
    """ "n count": how much of each of `count` equal steps lies in each cell."""
    # In whole numbers, so that a step outside a cell counts 0 there, not a rounding error.
    start, whole = torch.arange(count) * edges[-1], edges[-1]
    inside = [
        (start + whole).clamp(max=last * count) - start.clamp(min=first * count)
        for first, last in pairwise(edges)
    ]
    return torch.stack(inside).clamp(min=0).double() / whole


def shrunk(pictures: Tensor, size: tuple[int, int]) -> Tensor:
    """Images "p c h w" at another size."""
    if tuple(pictures.shape[-2:]) == size:
        return pictures
    return F.interpolate(pictures.float(), size=size, mode="bilinear", antialias=True).to(pictures.dtype)
