"""Blur Integrated Gradients: from a blurred image to the sharp one, each step adding finer detail.

Integrated Gradients fades the image in from a baseline; Blur IG sharpens it instead, so no foreign colour is
brought in: -integral over s in [0, sigma] of dy/dx (L(x, s)) * d L(x, s) / d s, L the Gaussian blur.
Citation key: xu2020blurig.

As in the authors' package: a left sum over equal steps of s, dL/ds as a difference quotient of step 0.01,
and zeros beyond the border. Different from it: the quotient is taken of the small blur matrices in float64,
not of two blurred pictures, so float32 images lose no digits. With D = (K' - K) / 0.01 for the two blurs K
and K', (K' X K'^T - K X K^T) / 0.01 = D X K'^T + K X D^T.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from heatproof.errors import InputError
from heatproof.explain.blur import blur_matrices
from heatproof.explain.gradients import (
    GRADIENT_CARD,
    check_counts,
    over_channels,
    sum_of_gradients,
    working_images,
)
from heatproof.registry import explainer
from heatproof.types import Signed, Trace

QUOTIENT_STEP = 0.01


@explainer("blur-ig", cite="xu2020blurig", card=GRADIENT_CARD)
def blur_ig(trace: Trace, *, steps: int = 100, sigma: float = 50.0) -> Signed:
    """The gradient summed while the image is sharpened from a blur of `sigma` pixels.

    -sum_i dy/dx (L(x, s_i)) * dL/ds (x, s_i) * sigma / steps, s_i = i sigma / steps.
    """
    check_counts("blur-ig", steps=steps)
    if not 0 < sigma < math.inf:
        raise InputError(f"blur-ig sigma must be a positive number of pixels, got {sigma}")
    # Rows outermost and columns innermost: both products are then plain batched ones, with no copy.
    images = working_images(trace).permute(0, 2, 1, 3).contiguous()

    def visit(touched: range, which: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        blurred, change = _blur_and_change(images[rows], [i * sigma / steps for i in touched], which)
        return blurred.permute(0, 2, 1, 3), change.permute(0, 2, 1, 3) * (-sigma / steps)

    return over_channels(sum_of_gradients(trace, steps, visit))


def _blur_and_change(images: Tensor, sigmas: list[float], which: Tensor) -> tuple[Tensor, Tensor]:
    """Blurred "j h c w" and its change with sigma; image j is blurred by sigmas[which[j]]."""
    height, _, width = images.shape[1:]
    left, left_change = _matrices(height, sigmas, images)
    right, right_change = (left, left_change) if width == height else _matrices(width, sigmas, images)
    in_rows = _along_rows(images, right[which])
    change_in_rows = _along_rows(images, right_change[which])
    blurred = _along_columns(in_rows, left[which])
    change = _along_columns(in_rows + QUOTIENT_STEP * change_in_rows, left_change[which])
    return blurred, change + _along_columns(change_in_rows, left[which])


def _matrices(size: int, sigmas: list[float], like: Tensor) -> tuple[Tensor, Tensor]:
    """ "k size size" twice: the blurs K and their change D."""
    wider = [s + QUOTIENT_STEP for s in sigmas]
    both = blur_matrices(size, sigmas + wider, "constant", like.device)
    blur, wider_blur = both.chunk(2)
    return blur.to(like.dtype), ((wider_blur - blur) / QUOTIENT_STEP).to(like.dtype)


def _along_rows(images: Tensor, matrices: Tensor) -> Tensor:
    """X M^T of every row of "j h c w"."""
    return torch.bmm(images.flatten(1, 2), matrices.transpose(1, 2)).view_as(images)


def _along_columns(images: Tensor, matrices: Tensor) -> Tensor:
    """M X of every column of "j h c w"."""
    return torch.bmm(matrices, images.flatten(2)).view_as(images)
