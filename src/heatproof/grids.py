"""Values on a grid, of pictures or of volumes: normalised, enlarged, compared with what is constant.

Maps are "b h w" or, of volumes, "b d h w"; what is done to them is the same along each axis.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def size_of(images: Tensor) -> tuple[int, ...]:
    """Height and width of "b c H W"; depth, height and width of "b c D H W"."""
    return tuple(int(side) for side in images.shape[2:])


def spatial_dims(maps: Tensor, first: int = 1) -> tuple[int, ...]:
    """The axes from `first` on: those that place a value in a picture, or in a volume."""
    return tuple(range(first, maps.ndim))


def per_map(numbers: Tensor, maps: Tensor) -> Tensor:
    """ "b" numbers beside maps, "b 1 1" or "b 1 1 1", so that each acts on its own."""
    return numbers.reshape(-1, *[1] * (maps.ndim - 1))


def normalise(values: Tensor) -> Tensor:
    """Clip negatives, then min-max each map to [0, 1]; a constant map becomes all zeros.

    >>> normalise(torch.tensor([[[-1.0, 0.0], [1.0, 2.0]]])).tolist()
    [[[0.0, 0.0], [0.5, 1.0]]]
    """
    positive = _wide(values).clamp(min=0)
    # amin and amax, not aminmax: several times faster along one axis on a CPU.
    low, high = (
        extreme(positive, dim=spatial_dims(values), keepdim=True) for extreme in (torch.amin, torch.amax)
    )
    span = high - low
    # An infinite divisor sends a constant map to zero without a branch per map.
    return ((positive - low) / torch.where(span > 0, span, math.inf)).float()


def constant(values: Tensor) -> Tensor:
    """ "b" bool: maps in which nothing stands out once negatives are clipped."""
    positive = values.flatten(1).clamp(min=0)
    return positive.amax(1) == positive.amin(1)


def upsample(values: Tensor, size: tuple[int, ...]) -> Tensor:
    """ "b h w" -> "b H W", linear in each axis, align_corners=False; float32, or float64 where maps are."""
    values = _wide(values)
    if tuple(values.shape[1:]) == tuple(size):
        return values
    grow, mode = torch.nn.functional.interpolate, "bilinear" if len(size) == 2 else "trilinear"
    grown = grow(values[:, None], size=size, mode=mode, align_corners=False)[:, 0]
    low, high = (
        extreme(values, dim=spatial_dims(values), keepdim=True) for extreme in (torch.amin, torch.amax)
    )
    return torch.where(low == high, low, grown)  # a constant stays one, also where its weights round


def _wide(values: Tensor) -> Tensor:
    """float32, or float64 where the maps are: a cast before normalising would lose their contrast."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
