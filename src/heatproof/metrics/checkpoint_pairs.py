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


def alike(first: Tensor, second: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """SSIM of maps "n H W" and, where it is NaN, which of `similarity.REASONS`; all stays on the device."""
    value = ssim(first, second, mask=mask)
    unseen = torch.zeros_like(value, dtype=torch.bool)
    if mask is not None:
        unseen = ~mask[:, REACH:-REACH, REACH:-REACH].flatten(1).any(1)
    return value, torch.where(value.isnan(), torch.where(unseen, 2, 1), 0)


def checkpoint_pairs(earlier: Maps, final: Maps) -> Pairs:
    """A method's maps at an earlier checkpoint against the final ones, image by image (eq. 7, the models).

    Both explain what their own checkpoint predicts, so the prediction stayed where they explain one class.
    """
    if earlier.ids != final.ids or len(earlier) != len(final) or earlier.image_size != final.image_size:
        raise InputError("the maps of the two checkpoints are not of the same images in the same order")
    device = final.values.device
    parts = [
        alike(comparable(final.take(part)), comparable(earlier.take(part)).to(device))
        for part in (slice(start, start + AT_ONCE) for start in range(0, len(final), AT_ONCE))
    ]
    values, why = (torch.cat(column) for column in zip(*parts, strict=True))
    return Pairs(values, why, earlier.explained.to(device) == final.explained)
