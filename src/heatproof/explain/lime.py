"""LIME: a linear model of what switching segments on and off does to the class's probability.

The image is cut into segments. A sample z in {0, 1}^s keeps the segments that are on and fills the others
with their mean colour. Ridge regression of p(c | z) on z, weighted by how close z is to the whole image:
w(z) = sqrt(exp(-d^2 / .25^2)), d the cosine distance to the row with everything on. A segment's coefficient
is its importance, sign included. Citation key: ribeiro2016lime.

Deviations: the paper picks a few segments and leaves the sampling open; here, as in the lime package run with
all segments, nothing is selected, sample 0 has everything on and the others each segment with probability
1/2. The fill is the exact mean, which the package truncates to whole 8-bit steps. Segments: segments.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from heatproof.explain.gradients import check_counts
from heatproof.explain.segments import paint, segment_means, segments_of
from heatproof.models.model import target_probabilities
from heatproof.registry import PERTURBING, explainer
from heatproof.types import Trace

KERNEL_WIDTH = 0.25
RIDGE = 1.0


@explainer(
    "lime",
    cite="ribeiro2016lime",
    card=replace(
        PERTURBING,
        sign="signed weights; negatives are clipped when the map is normalised",
        resize="none: segments are painted at the image's size",
    ),
)
def lime(
    trace: Trace,
    *,
    samples: int = 1000,
    segments: str = "slic",
    segment_count: int = 100,
    compactness: float = 10.0,
) -> Tensor:
    """Segments weighted by a linear model of the class's probability.

    argmin_b sum_z w(z) (p(c | z) - b_0 - b z)^2 + |b|^2, painted on the segments.
    segments: "slic", or "quickshift" (4, 200, .2) as the lime package and COSE use. Samples follow the seed.
    """
    check_counts("lime", samples=samples)
    images = trace.images.float()
    cut = segments_of(trace.model, images, segments, segment_count, compactness, trace.seed)
    rows = sample_rows(cut.flatten(1).amax(1).tolist(), samples, trace.seed).to(images.device)
    means = segment_means(images, cut)
    spots = cut.flatten(1)
    fill = means.gather(2, spots[:, None].expand(-1, images.shape[1], -1)).view_as(images)

    def switched(start: int, stop: int) -> Tensor:
        jobs = torch.arange(start, stop, device=images.device)
        which = jobs // samples
        on = rows[which, jobs % samples].gather(1, spots[which]).view(-1, 1, *trace.image_size)
        return torch.where(on, images[which], fill[which])

    def score(logits: Tensor, start: int, stop: int) -> Tensor:
        targets = trace.targets[torch.arange(start, stop, device=logits.device) // samples]
        return target_probabilities(logits, targets)

    scores = trace.queue.predict(len(images) * samples, switched, score).view(-1, samples)
    return paint(ridge(rows, scores, proximity(rows)), cut).float()


def sample_rows(last_segments: list[int], samples: int, seed: int) -> Tensor:
    """ "b n s" on and off, padded with off; an image's rows follow from the seed and its segment count."""
    rows = np.zeros((len(last_segments), samples, max(last_segments) + 1), dtype=bool)
    for row, last in zip(rows, last_segments, strict=True):
        row[:, : last + 1] = np.random.default_rng(seed).integers(0, 2, (samples, last + 1))
        row[0, : last + 1] = True
    return torch.from_numpy(rows)


def proximity(rows: Tensor) -> Tensor:
    """ "b n" sample weights. The cosine distance of k of s segments to all of them is 1 - sqrt(k / s).

    >>> rows = torch.zeros(1, 2, 100, dtype=torch.bool)
    >>> rows[0, 0], rows[0, 1, :25] = True, True
    >>> [round(w, 8) for w in proximity(rows)[0].tolist()]
    [1.0, 0.13533528]
    """
    on = rows.sum(2).double()
    distance = 1 - (on / on[:, :1]).sqrt()
    return torch.exp(-(distance**2) / KERNEL_WIDTH**2).sqrt()


def ridge(rows: Tensor, scores: Tensor, weights: Tensor) -> Tensor:
    """ "b s" coefficients of the weighted ridge regression with an intercept, which is not penalised."""
    design, target = rows.double(), scores.double()[..., None]
    share = (weights / weights.sum(1, keepdim=True))[..., None]
    design = design - (share * design).sum(1, keepdim=True)
    target = target - (share * target).sum(1, keepdim=True)
    weighted = (weights[..., None] * design).transpose(1, 2)
    penalty = RIDGE * torch.eye(design.shape[2], dtype=design.dtype, device=design.device)
    solved: Tensor = torch.linalg.solve(weighted @ design + penalty, weighted @ target)
    return solved[..., 0]
