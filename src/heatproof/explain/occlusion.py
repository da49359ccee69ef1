"""Occlusion: what the class loses when a window slides over the image and hides what is under it.

A pixel's value is the mean drop in probability over all windows that hide it: positive where the window hid
evidence for the class. Windows start every `stride` pixels; the last one of a row or column is cut off at the
image's edge, so that every pixel is hidden at least once. Citation key: zeiler2014occlusion.

Deviations: the paper shows the probability at the window's centre; the mean over windows is captum's.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from heatproof.errors import InputError
from heatproof.explain.baselines import STARTS, baseline_images, mixed
from heatproof.explain.gradients import working_images
from heatproof.registry import PERTURBING, explainer
from heatproof.types import Trace, per_map


@explainer(
    "occlusion",
    cite="zeiler2014occlusion",
    forward_only=True,
    card=replace(
        PERTURBING,
        sign="signed drops; negatives are clipped when the map is normalised",
        resize="none: windows are painted at the image's size",
    ),
    cost="169 inputs at 224 x 224",
    volumes=True,
)
def occlusion(trace: Trace, *, window: float = 0.15, stride: float = 0.075, baseline: str = "zero") -> Tensor:
    """The mean drop of the class's probability over the sliding windows that hide a pixel.

    mean over windows w that hold the pixel of p(c | x) - p(c | x with w hidden).
    window, stride: in pixels where 1 or more, else as a share of the image's sides.
    baseline: what the window shows: "zero" (in normalised space), "black", "blur" or "noise".
    """
    images = working_images(trace)
    hidden = baseline_images(trace.model, images, baseline, trace.seed, STARTS)
    sides = [_windows(n, window, stride).to(images.device) for n in trace.image_size]
    grid = [len(side) for side in sides]
    count = math.prod(grid)

    def covered(start: int, stop: int) -> Tensor:
        jobs = torch.arange(start, stop, device=images.device)
        place, which = jobs % count, jobs // count
        steps = torch.unravel_index(place, grid)
        under = steps[0].new_ones(1, dtype=torch.bool)
        for side, step in zip(sides, steps, strict=True):
            under = under[..., None] & side[step].view(len(jobs), *[1] * (under.ndim - 1), -1)
        return mixed(under, hidden, images, which)

    def score(logits: Tensor, start: int, stop: int) -> Tensor:
        return trace.model.measured(
            logits, trace.targets[torch.arange(start, stop, device=logits.device) // count]
        )

    left = trace.queue.predict(len(images) * count, covered, score).view(-1, *grid)
    drops = (per_map(trace.model.measured(trace.logits, trace.targets), left) - left).to(images)
    painted = [side.to(images) for side in sides]
    if len(painted) == 2:
        total = torch.einsum("brs,rh,sw->bhw", drops, *painted)
        return total / torch.outer(*(side.sum(0) for side in painted))
    total = torch.einsum("bqrs,qd,rh,sw->bdhw", drops, *painted)
    return total / torch.einsum("d,h,w->dhw", *(side.sum(0) for side in painted))


def _windows(length: int, window: float, stride: float) -> Tensor:
    """ "n length" bool: which pixels of an axis each window hides."""
    side, step = (max(1, round(v * length)) if 0 < v < 1 else v for v in (window, stride))
    if side != int(side) or step != int(step) or not 1 <= step <= side <= length:
        raise InputError(
            f"occlusion needs 0 < stride <= window, in pixels or as shares, and no window above the image's "
            f"{length} pixels; got window {window:g} and stride {stride:g}"
        )
    starts = torch.arange(math.ceil((length - side) / step) + 1) * int(step)
    places = torch.arange(length)
    return (places >= starts[:, None]) & (places < starts[:, None] + int(side))
