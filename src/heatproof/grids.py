"""Operations on maps "b h w" or, for volumes, "b d h w": normalise, upsample, detect constant maps."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def size_of(images: Tensor) -> tuple[int, ...]:
    """Height and width of "b c H W"; depth, height and width of "b c D H W"."""
    return tuple(int(side) for side in images.shape[2:])


def spatial_dims(maps: Tensor, first: int = 1) -> tuple[int, ...]:
    """The spatial axes of a tensor: those from `first` on."""
    return tuple(range(first, maps.ndim))


def per_map(numbers: Tensor, maps: Tensor) -> Tensor:
    """Reshape "b" numbers to "b 1 1" or "b 1 1 1", to broadcast over maps."""
    return numbers.reshape(-1, *[1] * (maps.ndim - 1))


def extremes(values: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Minimum and maximum over axes, with keepdim; aminmax takes several times as long on a CPU."""
    return values.amin(dims, keepdim=True), values.amax(dims, keepdim=True)


def normalise(values: Tensor) -> Tensor:
    """Clip negatives, then min-max each map to [0, 1]; a constant map becomes all zeros.

    >>> normalise(torch.tensor([[[-1.0, 0.0], [1.0, 2.0]]])).tolist()
    [[[0.0, 0.0], [0.5, 1.0]]]
    """
    positive = _wide(values).clamp(min=0)
    low, high = extremes(positive, spatial_dims(values))
    span = high - low
    # An infinite divisor sends a constant map to zero without a branch per map.
    return ((positive - low) / torch.where(span > 0, span, math.inf)).float()


def constant(values: Tensor) -> Tensor:
    """Bool tensor "b": maps that are constant once negatives are clipped."""
    low, high = extremes(values.flatten(1).clamp(min=0), (1,))
    return (high == low)[:, 0]


def upsample(values: Tensor, size: tuple[int, ...]) -> Tensor:
    """Turn "b h w" into "b H W", linear in each axis, align_corners=False; float32, or float64 as maps."""
    values = _wide(values)
    if tuple(values.shape[1:]) == tuple(size):
        return values
    mode = "bilinear" if len(size) == 2 else "trilinear"
    larger = torch.nn.functional.interpolate(values[:, None], size=size, mode=mode, align_corners=False)[:, 0]
    low, high = extremes(values, spatial_dims(values))
    return torch.where(low == high, low, larger)  # a constant stays one, also where its weights round


def _wide(values: Tensor) -> Tensor:
    """float32, or float64 if the maps are: a cast before normalising would lose their contrast."""
    return values.to(torch.promote_types(values.dtype, torch.float32))
