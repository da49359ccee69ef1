"""Gaussian blur as two small matrix products, one per axis, on the device the images are on.

Blurring a row of n pixels with a kernel g is the product with an n x n matrix K, K_ij = g(i - j), plus what
the border folds back. g(d) = exp(-d^2 / (2 sigma^2)) for |d| <= floor(4 sigma + 1/2), scaled to sum to 1:
the kernel of scipy.ndimage.gaussian_filter with its default truncation. A picture X becomes K_h X K_w^T.
The matrices are made in float64; sigma 0 gives the identity.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from heatproof.errors import InputError

TRUNCATE = 4.0  # kernel radius in standard deviations
MODES = ("constant", "reflect", "mirror", "nearest", "wrap")  # scipy's names; "constant" pads with zeros


def gaussian_blur(images: Tensor, sigma: float, mode: str = "reflect", axes: int = 2) -> Tensor:
    """Blur "... H W" by a Gaussian of `sigma` pixels; with three axes, "... D H W".

    >>> dot = torch.tensor([[0.0, 0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    >>> gaussian_blur(dot, 0.5).round(decimals=2).tolist()
    [[0.0, 0.11, 0.79, 0.11, 0.0]]
    """
    rows, columns = (
        blur_matrices(n, [sigma], mode, images.device)[0].to(images.dtype) for n in images.shape[-2:]
    )
    blurred: Tensor = rows @ images @ columns.T
    if axes == 2:
        return blurred
    slices = blur_matrices(images.shape[-3], [sigma], mode, images.device)[0].to(images.dtype)
    return torch.einsum("ed,...dhw->...ehw", slices, blurred)


def blur_matrices(
    size: int, sigmas: Sequence[float], mode: str = "constant", device: torch.device | str | None = None
) -> Tensor:
    """ "k size size": the matrix that blurs an axis of `size` pixels, for each of k sigmas."""
    if mode not in MODES:
        raise InputError(f"blur mode must be one of {', '.join(MODES)}; got {mode!r}")
    if min(sigmas) < 0:
        raise InputError(f"a blur's sigma must be 0 or more, got {min(sigmas)}")
    sigma = torch.tensor(list(sigmas), dtype=torch.float64, device=device)[:, None]
    radius = (TRUNCATE * sigma + 0.5).floor()
    margin = 0 if mode == "constant" else int(radius.max())
    longest = max(int(radius.max()), size - 1 + margin)
    offsets = torch.arange(-longest, longest + 1, device=device)
    kernels = torch.exp(-0.5 * (offsets / sigma.clamp(min=1e-9)) ** 2) * (offsets.abs() <= radius)
    kernels = kernels / kernels.sum(1, keepdim=True)
    sources = torch.arange(-margin, size + margin, device=device)
    matrices = kernels[:, sources - torch.arange(size, device=device)[:, None] + longest]
    if mode == "constant":
        return matrices
    folded = torch.zeros(len(sigma), size, size, dtype=torch.float64, device=device)
    return folded.index_add_(2, _fold(sources, size, mode), matrices)


def _fold(positions: Tensor, size: int, mode: str) -> Tensor:
    """Which pixel stands in for each position on or off the axis."""
    if mode == "nearest":
        return positions.clamp(0, size - 1)
    if mode == "wrap":
        return positions % size
    if mode == "mirror":  # the border pixel once
        period = max(1, 2 * size - 2)
        return torch.minimum(positions % period, -positions % period)
    return torch.minimum(positions % (2 * size), (-1 - positions) % (2 * size))  # the border pixel twice
