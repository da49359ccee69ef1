"""From maps to the pairs that COSE counts: how alike two maps are, and whether the prediction stayed.

Maps are compared at the image's size in [0, 1]. Attributions with signs (gradient, SmoothGrad, IG, ...) go
through COSE's own scaling (`cose_map`: the sum of |.| over channels, clipped at its 99th percentile); all
others are normalised as everywhere, so LIME's negative weights are clipped, as its card says.

Cite: daroya2023cose.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from heatproof.errors import InputError
from heatproof.metrics.kit import raw_maps
from heatproof.metrics.similarity import REACH, REASONS, ssim
from heatproof.metrics.stability import cose_map
from heatproof.types import Maps, upsample

AT_ONCE = 64  # maps at the image's size in memory


class Pairs(NamedTuple):
    """One entry per pair."""

    ssim: Tensor  # "n"; NaN where it is not defined
    why: Tensor  # "n": which of `similarity.REASONS`, 0 where it is defined
    same: Tensor  # "n" bool: the prediction stayed

    def reasons(self) -> list[str]:
        return [REASONS[code] for code in self.why.tolist()]


def comparable(maps: Maps) -> Tensor:
    """ "b H W" in [0, 1], as COSE compares maps."""
    if maps.signed_values is None:
        return maps.upsample()
    return cose_map(upsample(raw_maps(maps), maps.image_size))


def alike(
    first: Tensor, second: Tensor, mask: Tensor | None = None, similarity: str = "local5"
) -> tuple[Tensor, Tensor]:
    """SSIM of maps "n H W" and, where it is NaN, which of `similarity.REASONS`; all stays on the device.

    similarity: "local5" or "eq2" of SSIM, or "pearson". The authors' code has windows, the paper prints
    eq. 2, its supplement has Pearson's r.
    """
    if similarity == "pearson":
        value, constant = _pearson(first, second, mask), 3
    else:
        value, constant = ssim(first, second, mode=similarity, mask=mask), 1
    unseen = torch.zeros_like(value, dtype=torch.bool)
    if mask is not None:
        counted = mask[:, REACH:-REACH, REACH:-REACH] if similarity == "local5" else mask
        unseen = ~counted.flatten(1).any(1)
    return value, torch.where(value.isnan(), torch.where(unseen, 2, constant), 0)


def _pearson(first: Tensor, second: Tensor, mask: Tensor | None) -> Tensor:
    """Over the pixels of each pair that count, in float64; NaN where one of the maps is constant there."""
    shape = torch.broadcast_shapes(first.shape, second.shape)
    counted = torch.ones(shape, dtype=torch.bool, device=first.device) if mask is None else mask
    n = counted.flatten(1).sum(1).double()
    deviations = []
    for maps in (first, second):
        pixels = maps.double().expand(shape).masked_fill(~counted, 0).flatten(1)
        apart = (pixels - (pixels.sum(1) / n)[:, None]).masked_fill(~counted.flatten(1), 0)
        flat = maps.expand(shape).masked_fill(~counted, -torch.inf).flatten(1).amax(1) == (
            maps.expand(shape).masked_fill(~counted, torch.inf).flatten(1).amin(1)
        )
        deviations.append(apart.masked_fill(flat[:, None], torch.nan))
    x, y = deviations
    return ((x * y).sum(1) / ((x * x).sum(1) * (y * y).sum(1)).sqrt()).clamp(-1, 1).float()


def checkpoint_pairs(earlier: Maps, final: Maps, similarity: str = "local5") -> Pairs:
    """A method's maps at an earlier checkpoint against the final ones, image by image (eq. 7, the models).

    Both explain what their own checkpoint predicts, so the prediction stayed where they explain one class.
    """
    if earlier.ids != final.ids or len(earlier) != len(final) or earlier.image_size != final.image_size:
        raise InputError("the maps of the two checkpoints are not of the same images in the same order")
    device = final.values.device
    parts = [
        alike(comparable(final.take(part)), comparable(earlier.take(part)).to(device), None, similarity)
        for part in (slice(start, start + AT_ONCE) for start in range(0, len(final), AT_ONCE))
    ]
    values, why = (torch.cat(column) for column in zip(*parts, strict=True))
    return Pairs(values, why, earlier.explained.to(device) == final.explained)
