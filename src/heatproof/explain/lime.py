"""LIME: a linear model of what switching segments on and off does to the class's probability.

The image is cut into segments. A sample z in {0, 1}^s keeps the segments that are on and fills the others
with their mean colour. Ridge regression of p(c | z) on z, weighted by how close z is to the whole image:
w(z) = sqrt(exp(-d^2 / .25^2)), d the cosine distance to the row with everything on. A segment's coefficient
is its importance, sign included. Citation key: ribeiro2016lime.

Sample 0 has everything on. What the others are is the `form`:

    published   each segment with probability 1/2, as the lime package draws them
    paired      the same two by two, the second one the complement of the first: what two segments do only
                together falls out of the difference, so it does not disturb the coefficients
    designed    pairs as well, and each block of them rows of a Hadamard matrix, its columns dealt out to the
                segments, its rows put in order and its signs turned by chance: any two segments are then on
                together exactly as often as one of them without the other, so none is mistaken for another

All have the same limit. docs/results/passes.md has what each is worth. The standard errors of the
coefficients are those of the regression, with pairs as the units that are drawn (a sandwich, widened by the
degrees of freedom that the fit used up); see sampling.py.

Deviations: the paper picks a few segments and leaves the sampling open; here, as in the lime package run with
all segments, nothing is selected. The fill is the exact mean, which the package truncates to whole 8-bit
steps. Segments: segments.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from heatproof.errors import InputError
from heatproof.explain.baselines import mixed
from heatproof.explain.sampling import BOUND, Estimate, designed_rows, in_rounds, rounds_of
from heatproof.explain.segments import paint, segment_means, segments_of
from heatproof.registry import PERTURBING, explainer
from heatproof.types import Trace

KERNEL_WIDTH = 0.25
RIDGE = 1.0
FORMS = ("designed", "paired", "published")
FIRST, CEILING = 250, 1000  # of "auto"; the last are the samples of the lime package


@explainer(
    "lime",
    cite="ribeiro2016lime",
    forward_only=True,
    card=replace(
        PERTURBING,
        sign="signed weights; negatives are clipped when the map is normalised",
        resize="none: segments are painted at the image's size",
    ),
    sufficient_repeats={"samples": 375},
    volumes=True,
)
def lime(
    trace: Trace,
    *,
    samples: int | str = 1000,
    segments: str = "slic",
    segment_count: int = 100,
    compactness: float = 10.0,
    form: str = "designed",
    bound: float = BOUND,
) -> Estimate:
    """Segments weighted by a linear model of the class's probability.

    argmin_b sum_z w(z) (p(c | z) - b_0 - b z)^2 + |b|^2, painted on the segments.
    samples: how many, or "auto": until the strongest fifth of the map is known to `bound` of its height,
    1,000 at most. They follow the seed.
    segments: "slic", or "quickshift" (4, 200, .2) as the lime package and COSE use.
    form: how samples are drawn: "designed", "paired" or "published".
    """
    rounds = rounds_of("lime", "samples", samples, FIRST, CEILING)
    if form not in FORMS:
        raise InputError(f"lime form must be 'designed', 'paired' or 'published', got {form!r}")
    images = trace.images.float()
    cut = segments_of(trace.model, images, segments, segment_count, compactness, trace.seed)
    rows = _rows_for(cut, rounds[-1], trace.seed, form)
    spots = cut.flatten(1)[:, None].expand(-1, images.shape[1], -1)
    fill = segment_means(images, cut).gather(2, spots).view_as(images)

    def ask(left: Tensor, start: int, stop: int) -> Tensor:
        left, count = left.to(images.device, non_blocking=True), stop - start

        def switched(first: int, last: int) -> Tensor:
            jobs = torch.arange(first, last, device=images.device)
            which = left[jobs // count]
            return mixed(rows[which, start + jobs % count], images, fill, which, cut)

        def score(logits: Tensor, first: int, last: int) -> Tensor:
            jobs = torch.arange(first, last, device=logits.device)
            return trace.model.measured(logits, trace.targets[left[jobs // count]])

        return trace.queue.predict(len(left) * count, switched, score).view(-1, count)

    def fit(left: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        left = left.to(images.device, non_blocking=True)
        drawn = rows[left, : scores.shape[1]]
        found = ridge(drawn, scores, proximity(drawn), paired=form != "published")
        coefficients, errors = (paint(one, cut[left]).float() for one in found)
        return coefficients, errors

    return in_rounds(len(images), rounds, ask, fit, bound)


_last_rows: tuple[Tensor, tuple[int, int, str], Tensor] | None = None


def _rows_for(cut: Tensor, samples: int, seed: int, form: str) -> Tensor:
    """Rows for these segments, on their device; on a GPU the last ones are kept, as the segments are."""
    global _last_rows
    asked = samples, seed, form
    if _last_rows is not None and _last_rows[0] is cut and _last_rows[1] == asked:
        return _last_rows[2]
    rows = sample_rows(cut.flatten(1).amax(1).tolist(), samples, seed, form)
    rows = rows.to(cut.device, non_blocking=True)
    if cut.is_cuda:
        _last_rows = cut, asked, rows
    return rows


def sample_rows(last_segments: Sequence[int], samples: int, seed: int, form: str = "published") -> Tensor:
    """ "b n s" on and off, padded with off; an image's rows follow from the seed and its segment count.

    Fewer rows are the first ones of more.
    """
    rows = np.zeros((len(last_segments), samples, max(last_segments) + 1), dtype=bool)
    for row, last in zip(rows, last_segments, strict=True):
        row[:, : last + 1] = _drawn(last + 1, samples, seed, form)
        row[0, : last + 1] = True
    return torch.from_numpy(rows)


@lru_cache(128)  # pictures of a study have about as many segments, again and again
def _drawn(segments: int, samples: int, seed: int, form: str) -> np.ndarray:
    """ "n s"; the first row is replaced, and pairs start behind it."""
    random = np.random.default_rng(seed)
    if form == "published":
        return random.integers(0, 2, (samples, segments)).astype(bool)
    pairs = samples // 2
    if form == "paired":
        first = random.integers(0, 2, (pairs, segments)).astype(bool)
    else:
        first = np.zeros((0, segments), bool)
        while len(first) < pairs:
            first = np.concatenate([first, designed_rows(segments, random)])
        first = first[:pairs]
    both = np.stack([first, ~first], 1).reshape(-1, segments)
    return np.concatenate([np.ones((1, segments), bool), both])[:samples]


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


def ridge(rows: Tensor, scores: Tensor, weights: Tensor, paired: bool = False) -> tuple[Tensor, Tensor]:
    """ "b s" coefficients of the weighted ridge regression with an intercept, which is not penalised; errors.

    paired: rows behind the first were drawn two by two, so their errors are those of the pairs. Where there
    are no more samples than coefficients, nothing is left to tell the errors from, and they are infinite.
    """
    design, target = rows.double(), scores.double()[..., None]
    share = (weights / weights.sum(1, keepdim=True))[..., None]
    design = design - (share * design).sum(1, keepdim=True)
    target = target - (share * target).sum(1, keepdim=True)
    weighted = (weights[..., None] * design).transpose(1, 2)
    penalty = RIDGE * torch.eye(design.shape[2], dtype=design.dtype, device=design.device)
    normal, response = weighted @ design, weighted @ target
    solved: Tensor = torch.linalg.solve(normal + penalty, response)
    # What is left beside the plain fit is chance; beside the ridge it is also what the penalty held back.
    plain = torch.linalg.pinv(normal, hermitian=True) @ response
    pulls = weighted.transpose(1, 2) * (target - design @ plain)
    if paired:
        pulls = torch.nn.functional.pad(pulls, (0, 0, 1, 1 - rows.shape[1] % 2)).unflatten(1, (-1, 2)).sum(2)
    spread = torch.linalg.solve(normal + penalty, pulls.transpose(1, 2)).square().sum(2)
    free = rows.shape[1] - rows.any(1).sum(1) - 1
    wider = torch.where(free > 0, rows.shape[1] / free, torch.inf)[:, None]
    return solved[..., 0], torch.where(rows.any(1), (wider * spread).sqrt(), 0.0)
