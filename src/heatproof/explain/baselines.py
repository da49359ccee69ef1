"""What stands in for an image, or for the part of it that is taken away."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from heatproof.errors import InputError, did_you_mean
from heatproof.grids import spatial_dims

if TYPE_CHECKING:
    from heatproof.models.model import Model

BLUR_SIGMA = 10.0
BASELINES = ("blur", "black", "mean", "noise")  # for pixels that are taken away
STARTS = ("zero", "black", "blur", "noise")  # for paths to the image


def baseline_images(
    model: Model, images: Tensor, kind: str = "blur", seed: int = 0, known: Sequence[str] = BASELINES
) -> Tensor:
    """ "b c H W" of one of the kinds that are `known` to its reader.

    zero (in normalised space), black (0 before normalisation), blur (Gaussian, sigma 10), mean (the image's
    own, per channel) or noise (standard normal in normalised space, by the seed, the same for every image).
    """
    from heatproof.explain.blur import gaussian_blur
    from heatproof.models.running import at_least_float

    if kind not in known:
        raise InputError(f"unknown baseline {kind!r}; {did_you_mean(kind, known)}")
    images = at_least_float(images)
    if kind == "zero":
        return torch.zeros_like(images)
    if kind == "blur":
        return gaussian_blur(images, BLUR_SIGMA, axes=images.ndim - 2)
    if kind == "mean":
        return images.mean(spatial_dims(images, 2), keepdim=True).expand_as(images)
    if kind == "noise":
        drawn = np.random.default_rng(seed).standard_normal(images.shape[1:], dtype=np.float32)
        return torch.from_numpy(drawn).to(images).expand_as(images)
    channels = model.preprocess.channels
    if channels != images.shape[1]:
        other = next(one for one in known if one in ("zero", "mean"))
        raise InputError(
            f"'black' needs the model's preprocessing, but that has {channels} channels and the images "
            f"have {images.shape[1]}; give the model its own Preprocess or use {other!r}"
        )
    return model.preprocess.normalise(torch.zeros_like(images))


def mixed(
    shown: Tensor, images: Tensor, others: Tensor, rows: Tensor, segments: Tensor | None = None
) -> Tensor:
    """ "n c H W": input j is image rows[j] where shown[j], "H W" bool, and what stands in for it elsewhere.

    segments: "b H W" numbers of segments, where shown[j] says which of them are shown, "s" bool.

    On a CPU each goes straight to where a network reads it. To pick both pictures for every input first and
    to choose between them takes more than twice as long; lerp is exact at 0 and 1, and faster than where.
    """
    if not images.is_cpu:
        if segments is not None:
            shown = shown.gather(1, segments.flatten(1)[rows]).view(-1, *segments.shape[1:])
        return torch.where(shown[:, None], images[rows], others[rows])
    from heatproof.models.running import memory_format

    made = torch.empty(
        (len(rows), *images.shape[1:]), dtype=images.dtype, memory_format=memory_format(images)
    )
    share = shown.contiguous().view(torch.uint8).to(images.dtype)  # from bool it takes ten times as long
    for one, row, part in zip(made, rows.tolist(), share, strict=True):
        if segments is not None:
            part = part.index_select(0, segments[row].flatten()).view(segments.shape[1:])
        one.copy_(torch.lerp(others[row], images[row], part))
    return made
