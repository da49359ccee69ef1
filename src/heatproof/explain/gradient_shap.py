"""Gradient SHAP: expected gradients, integrated gradients from many baselines at once.

Each sample takes one baseline, one point on the straight line from it to the image, and the gradient there
times the way; their mean estimates the Shapley values of a network that is nearly linear between the two.
Citation key: erion2021expected (lundberg2017shap proposed it for their package).

Deviations: without a data set to draw from, baselines are noise images or one fixed image. The places on the
line are spread evenly, with one drawn at random in each of n equal parts, which keeps the mean and lowers its
error. Sample s draws from (seed, s) alone, the same for every image.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from heatproof.errors import InputError
from heatproof.explain.baselines import STARTS, baseline_images
from heatproof.explain.gradients import (
    GRADIENT_CARD,
    check_counts,
    normal_noise,
    over_channels,
    sum_of_gradients,
    working_images,
)
from heatproof.registry import explainer
from heatproof.types import Signed, Trace, per_map


@explainer(
    "gradient-shap",
    cite="erion2021expected",
    aliases=("gradientshap", "expected-gradients"),
    card=GRADIENT_CARD,
    volumes=True,
)
def gradient_shap(trace: Trace, *, samples: int = 50, baseline: str = "noise", noise: float = 0.0) -> Signed:
    """The gradient at random points between the image and random baselines, times the way.

    1/n sum_s (x_s - b_s) * dy/dx (b_s + a_s (x_s - b_s)), a_s uniform in [0, 1], x_s = x + noise.
    baseline: "noise" (standard normal in normalised space, another one for each sample), or one image for
    all: "zero" (in normalised space), "black", "blur".
    noise: standard deviation of what is added to the image, as a share of its range.
    """
    check_counts("gradient-shap", samples=samples)
    if noise < 0:
        raise InputError(f"gradient-shap noise must not be negative, got {noise}")
    images = working_images(trace)
    fixed = None
    if baseline != "noise":
        fixed = baseline_images(trace.model, images, baseline, trace.seed, STARTS)
    low, high = images.flatten(1).aminmax(dim=1)
    deviation = per_map(noise * (high - low), images)
    drawn = np.random.default_rng((trace.seed, samples)).random(samples)
    places = per_map(images.new_tensor((np.arange(samples) + drawn) / samples), images)

    def visit(touched: range, which: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        end, start = images[rows], None if fixed is None else fixed[rows]
        if noise > 0:
            added = torch.stack([normal_noise(trace, 2 * s + 1) for s in touched])
            end = end + deviation[rows] * added[which]
        if start is None:
            start = torch.stack([normal_noise(trace, 2 * s) for s in touched]).to(images)[which]
        way = end - start
        return start + places[which + touched.start] * way, way / samples

    return over_channels(sum_of_gradients(trace, samples, visit))
