"""From maps to the pairs that COSE counts: how alike two maps are, and whether the prediction stayed.

Maps are compared at the image's size in [0, 1]. Attributions with signs (gradient, SmoothGrad, IG, ...) go
through COSE's own scaling (`cose_map`: the sum of |.| over channels, clipped at its 99th percentile); all
others are normalised as everywhere, so LIME's negative weights are clipped, as its card says.

Cite: daroya2023cose.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heatproof.errors import InputError, UnknownNameError
from heatproof.metrics.kit import as_tensor, raw_maps
from heatproof.metrics.similarity import REACH, REASONS, ssim
from heatproof.metrics.stability import cose_map
from heatproof.types import Maps, upsample

AT_ONCE = 64  # maps at the image's size in memory


class Pairs(NamedTuple):
    """One entry per pair."""

    ssim: Tensor  # "n"; NaN where it is not defined
    why: Tensor  # "n": which of `_ssim.REASONS`, 0 where it is defined
    same: Tensor  # "n" bool: the prediction stayed

    def reasons(self) -> list[str]:
        return [REASONS[code] for code in self.why.tolist()]


def comparable(maps: Maps) -> Tensor:
    """ "b H W" in [0, 1], as COSE compares maps."""
    if maps.signed_values is None:
        return maps.upsample()
    return cose_map(upsample(raw_maps(maps), maps.image_size))


def alike(first: Tensor, second: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """SSIM of maps "n H W" and, where it is NaN, which of `_ssim.REASONS`; all stays on the device."""
    value = ssim(first, second, mask=mask)
    unseen = torch.zeros_like(value, dtype=torch.bool)
    if mask is not None:
        unseen = ~mask[:, REACH:-REACH, REACH:-REACH].flatten(1).any(1)
    return value, torch.where(value.isnan(), torch.where(unseen, 2, 1), 0)


def checkpoint_pairs(
    maps: Mapping[str, Maps], predictions: Mapping[str, Any], final: str
) -> dict[str, Pairs]:
    """Each checkpoint's maps against those of the final one, image by image (eq. 7, the model's side).

    maps: one method's maps by checkpoint, of the same images in the same order; each should explain what that
    checkpoint predicts. predictions: the class each checkpoint predicts for each image, "b".
    """
    if final not in maps:
        raise UnknownNameError("checkpoint", final, maps)
    end = maps[final]
    found = {}
    for name, other in maps.items():
        if name == final:
            continue
        if other.ids != end.ids or len(other) != len(end) or other.image_size != end.image_size:
            raise InputError(
                f"the maps at {name!r} and {final!r} are not of the same images in the same order"
            )
        now, then = (as_tensor(predictions[key]).flatten() for key in (name, final))
        if not len(now) == len(then) == len(end):
            raise InputError(f"{len(end)} maps at {name!r} need as many predictions; got {len(now)}")
        parts = [
            alike(comparable(end.take(part)), comparable(other.take(part)).to(end.values.device))
            for part in (slice(start, start + AT_ONCE) for start in range(0, len(end), AT_ONCE))
        ]
        values, why = (torch.cat(column) for column in zip(*parts, strict=True))
        found[name] = Pairs(values, why, now.to(then.device) == then)
    return found
