"""LIME and Kernel SHAP: linear models of the probability when segments of the image are switched off."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from heatproof.explain import method
from heatproof.explain.baselines import STARTS, baseline_images, mixed, variant_scores
from heatproof.explain.gradients import working_images
from heatproof.explain.sampling import BOUND, Estimate, designed_rows, in_rounds, rounds_of
from heatproof.explain.segments import LastBatch, paint, segment_means, segments_of
from heatproof.types import Trace

KERNEL_WIDTH = 0.25  # of LIME
RIDGE = 1.0  # of LIME
SHAP_RIDGE = 1e-9  # keeps the regression solvable with fewer samples than segments
FIRST, CEILING = 250, 1000  # of "auto"; the last are the samples of the lime package


@method("lime")
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

    argmin_b sum_z w(z) (p(c | z) - b_0 - b z)^2 + |b|^2, painted on the segments, sign included. A sample z
    keeps the segments that are on and fills the others with their mean colour; the first has all on.
    w(z) = sqrt(exp(-d^2 / .25^2)), d the cosine distance of z to the row with everything on.
    samples: how many, or "auto": until the strongest fifth of the map is known to `bound` of its height,
    1,000 at most. They follow the seed.
    segments: "slic", or "quickshift" (4, 200, .2) as the lime package and COSE use.
    form: how samples are drawn; all have the same limit, docs/results/passes.md compares them:

        published   each segment on with probability 1/2, as the lime package draws them
        paired      in pairs, the second the complement of the first: interactions of two segments cancel
        designed    in pairs, in blocks of rows of a Hadamard matrix in random order, with random signs and
                    its columns dealt out to the segments: any two segments are on together as often as apart

    The standard errors are those of the regression, with pairs as the sampled units (a sandwich estimate,
    widened by the degrees of freedom of the fit); see sampling.py.

    Deviations: as in the lime package run with all segments, nothing is selected. The fill is the exact mean,
    which the package truncates to whole 8-bit steps.
    """
    rounds = rounds_of(samples, FIRST, CEILING)
    images = trace.images.float()
    cut = segments_of(trace.model, images, segments, segment_count, compactness, trace.seed)
    options = rounds[-1], trace.seed, form
    if (rows := _last_rows.get(cut, options)) is None:
        rows = sample_rows(cut.flatten(1).amax(1).tolist(), *options).to(cut.device, non_blocking=True)
        _last_rows.put(cut, options, rows)
    spots = cut.flatten(1)[:, None].expand(-1, images.shape[1], -1)
    fill = segment_means(images, cut).gather(2, spots).view_as(images)

    def ask(left: Tensor, start: int, stop: int) -> Tensor:
        def switched(which: Tensor, sample: Tensor) -> Tensor:
            return mixed(rows[which, start + sample], images, fill, which, cut)

        return variant_scores(trace, left, stop - start, switched)

    def fit(left: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        left = left.to(images.device, non_blocking=True)
        drawn = rows[left, : scores.shape[1]]
        coefficients, errors = ridge(drawn, scores, proximity(drawn), paired=form != "published")
        return paint(coefficients, cut[left]).float(), paint(errors, cut[left]).float()

    return in_rounds(len(images), rounds, ask, fit, bound)


_last_rows = LastBatch()


def sample_rows(last_segments: Sequence[int], samples: int, seed: int, form: str = "published") -> Tensor:
    """Tensor "b n s" on and off, padded with off; they depend on the seed and the segment count of the image.

    The rows for fewer samples are the first of those for more.
    """
    rows = np.zeros((len(last_segments), samples, max(last_segments) + 1), dtype=bool)
    for row, last in zip(rows, last_segments, strict=True):
        row[:, : last + 1] = _drawn(last + 1, samples, seed, form)
        row[0, : last + 1] = True
    return torch.from_numpy(rows)


@lru_cache(128)  # images of a study have similar numbers of segments
def _drawn(segments: int, samples: int, seed: int, form: str) -> np.ndarray:
    """Array "n s"; the first row is replaced, and pairs start behind it."""
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
    """Sample weights "b n". The cosine distance of k of s segments to all of them is 1 - sqrt(k / s).

    >>> rows = torch.zeros(1, 2, 100, dtype=torch.bool)
    >>> rows[0, 0], rows[0, 1, :25] = True, True
    >>> [round(w, 8) for w in proximity(rows)[0].tolist()]
    [1.0, 0.13533528]
    """
    on = rows.sum(2).double()
    distance = 1 - (on / on[:, :1]).sqrt()
    return torch.exp(-(distance**2) / KERNEL_WIDTH**2).sqrt()


def ridge(rows: Tensor, scores: Tensor, weights: Tensor, paired: bool = False) -> tuple[Tensor, Tensor]:
    """Coefficients "b s" of the weighted ridge regression with an intercept, which is not penalised; errors.

    paired: the rows behind the first were drawn in pairs, so the errors are those of pairs. With no more
    samples than coefficients, errors cannot be estimated and are infinite.
    """
    design, target = rows.double(), scores.double()[..., None]
    share = (weights / weights.sum(1, keepdim=True))[..., None]
    design = design - (share * design).sum(1, keepdim=True)
    target = target - (share * target).sum(1, keepdim=True)
    weighted = (weights[..., None] * design).transpose(1, 2)
    penalty = RIDGE * torch.eye(design.shape[2], dtype=design.dtype, device=design.device)
    normal, response = weighted @ design, weighted @ target
    solved: Tensor = torch.linalg.solve(normal + penalty, response)
    # Residuals of the plain fit are chance; those of the ridge contain the shrinkage too.
    plain = torch.linalg.pinv(normal, hermitian=True) @ response
    pulls = weighted.transpose(1, 2) * (target - design @ plain)
    if paired:
        pulls = torch.nn.functional.pad(pulls, (0, 0, 1, 1 - rows.shape[1] % 2)).unflatten(1, (-1, 2)).sum(2)
    spread = torch.linalg.solve(normal + penalty, pulls.transpose(1, 2)).square().sum(2)
    free = rows.shape[1] - rows.any(1).sum(1) - 1
    wider = torch.where(free > 0, rows.shape[1] / free, torch.inf)[:, None]
    return solved[..., 0], torch.where(rows.any(1), (wider * spread).sqrt(), 0.0)


@method("kernel-shap")
def kernel_shap(
    trace: Trace,
    *,
    samples: int = 1000,
    segments: str = "slic",
    segment_count: int = 100,
    compactness: float = 10.0,
    baseline: str = "zero",
) -> Tensor:
    """Shapley values of segments: what each adds to the class's probability, on average over all orders.

    They sum to p(c | image) - p(c | baseline). Exact where samples >= 2^segments - 1. They minimise

        sum over samples S of w(S) (p(S) - p(none) - sum_{i in S} phi_i)^2, sum phi = p(all) - p(none),

    w(S) = (n - 1) / (C(n, |S|) |S| (n - |S|)) for n segments. Samples are drawn by their leverage
    (musco2025leverage): sizes evenly, then a set of that size with its complement; drawn so, a sample weighs
    1 / (|S| (n - |S|)). They follow the seed.
    baseline: what a segment shows that is off: "zero" (in normalised space), "black", "blur" or "noise".
    segments: "slic", or "quickshift" (4, 200, .2).

    Deviations: sets are drawn with replacement, sizes evenly spread instead of at random.
    """
    images = working_images(trace)
    off = baseline_images(trace.model, images, baseline, trace.seed, STARTS)
    cut = segments_of(trace.model, images, segments, segment_count, compactness, trace.seed)
    sizes = (cut.flatten(1).amax(1) + 1).tolist()
    drawn = [draw_sets(size, samples, trace.seed) for size in sizes]
    rows = _padded([sets for sets, _ in drawn]).to(images.device).bool()
    weights = _padded([weights[:, None] for _, weights in drawn])[..., 0].to(images.device)

    def switched(which: Tensor, sample: Tensor) -> Tensor:
        return mixed(rows[which, sample], images, off, which, cut)

    scores = variant_scores(trace, torch.arange(len(images)), rows.shape[1], switched).double()
    whole = trace.model.measured(trace.logits, trace.targets).double()
    used = (
        torch.arange(rows.shape[2], device=images.device) < torch.tensor(sizes, device=images.device)[:, None]
    )
    values = shapley(rows, scores - scores[:, :1], weights.double(), whole - scores[:, 0], used)
    return paint(values, cut).to(images)


def draw_sets(size: int, samples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Sets "m n", the empty one first, and the weight of each, "m", 0 for the empty one.

    >>> sets, weights = draw_sets(3, 100, seed=0)
    >>> len(sets), sets[0].tolist(), sorted(weights.round(3).tolist())
    (7, [0, 0, 0], [0.0, 0.333, 0.333, 0.333, 0.333, 0.333, 0.333])
    """
    nothing = np.zeros((1, size), dtype=np.int8)
    if size < 2:
        return nothing, np.zeros(1)
    if size < 31 and 2**size - 1 <= samples:
        sets = (np.arange(1, 2**size - 1)[:, None] >> np.arange(size)) & 1
        on = sets.sum(1)
        weights = np.array([(size - 1) / (math.comb(size, int(k)) * k * (size - k)) for k in on])
    else:
        random, pairs = np.random.default_rng(seed), (samples - 1) // 2
        sizes = 1 + ((np.arange(pairs) + random.random(pairs)) / pairs * (size - 1)).astype(int)
        ranks = random.random((pairs, size)).argsort(1).argsort(1)
        half = ranks < sizes[:, None]
        sets = np.stack([half, ~half], axis=1).reshape(-1, size).astype(int)
        on = sets.sum(1)
        weights = 1.0 / (on * (size - on))
    return np.concatenate([nothing, sets.astype(np.int8)]), np.concatenate([[0.0], weights])


def shapley(rows: Tensor, gains: Tensor, weights: Tensor, total: Tensor, used: Tensor) -> Tensor:
    """Tensor "b n": regression of the gains "b m" on the sets "b m n", with coefficients that sum to `total`.

    used: "b n" bool, the segments that an image has; the others get 0.
    """
    design = rows.double()
    weighted = (weights[..., None] * design).transpose(1, 2)
    matrix = weighted @ design
    scale = matrix.diagonal(dim1=1, dim2=2).amax(1)
    scale = torch.where(scale > 0, scale, 1.0)  # 0 for an image with one segment
    ridge = torch.where(used, SHAP_RIDGE * scale[:, None], scale[:, None])
    matrix = matrix + torch.diag_embed(ridge)
    ones = used.double()[..., None]
    free = torch.linalg.solve(matrix, weighted @ gains[..., None])
    along = torch.linalg.solve(matrix, ones)
    # Lagrange: of all solutions that miss the sum, the nearest in the regression's own metric.
    missing = total[:, None, None] - (free * ones).sum(1, keepdim=True)
    values: Tensor = free + along * missing / (along * ones).sum(1, keepdim=True)
    return values[..., 0] * used


def _padded(parts: list[np.ndarray]) -> Tensor:
    """Tables "m n" of several images as one, with zeros where an image has fewer rows or columns."""
    height, width = (max(part.shape[axis] for part in parts) for axis in (0, 1))
    table = np.zeros((len(parts), height, width), dtype=parts[0].dtype)
    for row, part in zip(table, parts, strict=True):
        row[: part.shape[0], : part.shape[1]] = part
    return torch.from_numpy(table)
