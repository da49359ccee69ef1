"""Baseline images that replace an image or its hidden part, and Gaussian blur.

Blurring a row of n pixels is a product with an n x n matrix K, K_ij = g(i - j), plus what the border folds
back. g(d) = exp(-d^2 / (2 sigma^2)) for |d| <= floor(4 sigma + 1/2), scaled to sum to 1: the kernel of
scipy.ndimage.gaussian_filter with its default truncation. The matrices are made in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from heatproof.errors import InputError, did_you_mean
from heatproof.models.model import Model
from heatproof.models.running import at_least_float, memory_format
from heatproof.types import Trace, spatial_dims

BLUR_SIGMA = 10.0
BASELINES = ("blur", "black", "mean", "noise")  # for pixels that are hidden
STARTS = ("zero", "black", "blur", "noise")  # for paths to the image
TRUNCATE = 4.0  # kernel radius in standard deviations


def baseline_images(
    model: Model, images: Tensor, kind: str = "blur", seed: int = 0, known: Sequence[str] = BASELINES
) -> Tensor:
    """Baseline images "b c H W" of one of the `known` kinds.

    These are zero (in normalised space), black (0 before normalisation), blur (Gaussian, sigma 10), mean (the
    image's own, per channel) or noise (standard normal in normalised space, by the seed, the same for every
    image).
    """
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
        other = "zero" if "zero" in known else "mean"
        raise InputError(
            f"'black' needs the model's preprocessing, but that has {channels} channels and the images "
            f"have {images.shape[1]}; give the model its own Preprocess or use {other!r}"
        )
    return model.preprocess.normalise(torch.zeros_like(images))


def mixed(
    visible: Tensor, images: Tensor, others: Tensor, rows: Tensor, segments: Tensor | None = None
) -> Tensor:
    """Inputs "n c H W": input j is image rows[j] where visible[j], "H W" bool, is true, its other elsewhere.

    segments: "b H W" numbers of segments; visible[j] is then "s" bool, by segment.
    """
    if not images.is_cpu:
        if segments is not None:
            visible = visible.gather(1, segments.flatten(1)[rows]).view(-1, *segments.shape[1:])
        return torch.where(visible[:, None], images[rows], others[rows])
    # On a CPU, indexing both images for every input takes more than twice as long; lerp is exact at 0 and 1,
    # and faster than where.
    inputs = torch.empty(
        (len(rows), *images.shape[1:]), dtype=images.dtype, memory_format=memory_format(images)
    )
    share = visible.contiguous().view(torch.uint8).to(images.dtype)  # from bool it takes ten times as long
    for target, row, part in zip(inputs, rows.tolist(), share, strict=True):
        if segments is not None:
            part = part.index_select(0, segments[row].flatten()).view(segments.shape[1:])
        target.copy_(torch.lerp(others[row], images[row], part))
    return inputs


def variant_scores(
    trace: Trace,
    rows: Tensor,
    count: int,
    make: Callable[[Tensor, Tensor], Tensor],
    read: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Tensor "r n": the class's probability for `count` variants of each of the images `rows`.

    make(images, variants): builds a batch, from the numbers of images and of variants.
    read: from logits and targets to scores, if not probabilities.
    """
    read, rows = read or trace.model.measured, rows.to(trace.images.device, non_blocking=True)

    def inputs(start: int, stop: int) -> Tensor:
        jobs = torch.arange(start, stop, device=rows.device)
        return make(rows[jobs // count], jobs % count)

    def score(logits: Tensor, start: int, stop: int) -> Tensor:
        jobs = torch.arange(start, stop, device=logits.device)
        return read(logits, trace.targets[rows[jobs // count]])

    return trace.queue.predict(len(rows) * count, inputs, score).view(-1, count)


def gaussian_blur(images: Tensor, sigma: float, axes: int = 2) -> Tensor:
    """Blur "... H W" by a Gaussian of `sigma` pixels, reflected at the border; with 3 axes "... D H W".

    >>> dot = torch.tensor([[0.0, 0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    >>> gaussian_blur(dot, 0.5).round(decimals=2).tolist()
    [[0.0, 0.11, 0.79, 0.11, 0.0]]
    """
    *slices, rows, columns = (
        blur_matrices(n, [sigma], images.device, reflect=True)[0].to(images.dtype)
        for n in images.shape[-axes:]
    )
    blurred: Tensor = rows @ images @ columns.T
    return torch.einsum("ed,...dhw->...ehw", *slices, blurred) if slices else blurred


def blur_matrices(
    size: int, sigmas: Sequence[float], device: torch.device | str | None = None, reflect: bool = False
) -> Tensor:
    """Tensor "k size size": the matrix that blurs an axis of `size` pixels, for each of k sigmas.

    reflect: repeat the image beyond its border, mirrored, as scipy's "reflect"; else it is 0 there.
    """
    if min(sigmas) < 0:
        raise InputError(f"a blur's sigma must be 0 or more, got {min(sigmas)}")
    sigma = torch.tensor(list(sigmas), dtype=torch.float64, device=device)[:, None]
    radius = (TRUNCATE * sigma + 0.5).floor()
    margin = int(radius.max()) if reflect else 0
    longest = max(int(radius.max()), size - 1 + margin)
    offsets = torch.arange(-longest, longest + 1, device=device)
    kernels = torch.exp(-0.5 * (offsets / sigma.clamp(min=1e-9)) ** 2) * (offsets.abs() <= radius)
    kernels = kernels / kernels.sum(1, keepdim=True)
    sources = torch.arange(-margin, size + margin, device=device)
    matrices = kernels[:, sources - torch.arange(size, device=device)[:, None] + longest]
    if not reflect:
        return matrices
    mirrored = torch.minimum(sources % (2 * size), (-1 - sources) % (2 * size))  # the border pixel twice
    folded = torch.zeros(len(sigma), size, size, dtype=torch.float64, device=device)
    return folded.index_add_(2, mirrored, matrices)
