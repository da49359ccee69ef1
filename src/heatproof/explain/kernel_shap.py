"""Kernel SHAP: Shapley values of segments, from a linear model with the one right weighting of the samples.

A sample switches some segments off. phi minimises

    sum over samples S of w(S) (p(S) - p(none) - sum_{i in S} phi_i)^2   with   sum phi = p(all) - p(none),

w(S) = (n - 1) / (C(n, |S|) |S| (n - |S|)) for n segments, which makes phi the Shapley values as samples grow
(lundberg2017shap). Samples are drawn by their leverage, which is the same for every size of S: sizes evenly,
then a set of that size, and each with its complement, so that what is symmetric cancels (musco2025leverage).
Drawn so, a sample weighs 1 / (|S| (n - |S|)). Where all sets fit into the number of samples, all of them are
taken, and phi is exact.

Deviations: sets are drawn with replacement, sizes evenly spread instead of at random. A ridge of 1e-9 keeps
the regression solvable with fewer samples than segments. Segments: segments.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from heatproof.errors import InputError
from heatproof.explain.baselines import STARTS, baseline_images, mixed
from heatproof.explain.gradients import working_images
from heatproof.explain.segments import paint, segments_of
from heatproof.registry import PERTURBING, explainer
from heatproof.types import Trace

RIDGE = 1e-9


@explainer(
    "kernel-shap",
    cite="lundberg2017shap",
    forward_only=True,
    aliases=("kernelshap",),
    card=replace(
        PERTURBING,
        sign="signed values; negatives are clipped when the map is normalised",
        resize="none: segments are painted at the image's size",
    ),
    volumes=True,
)
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

    They sum to p(c | image) - p(c | baseline). Exact where samples >= 2^segments - 1.
    baseline: what a segment shows that is off: "zero" (in normalised space), "black", "blur" or "noise".
    segments: "slic", or "quickshift" (4, 200, .2). Samples follow the seed.
    """
    if not isinstance(samples, int) or samples < 3:
        raise InputError(f"kernel-shap samples must be a whole number of at least 3, got {samples!r}")
    images = working_images(trace)
    off = baseline_images(trace.model, images, baseline, trace.seed, STARTS)
    cut = segments_of(trace.model, images, segments, segment_count, compactness, trace.seed)
    sizes = (cut.flatten(1).amax(1) + 1).tolist()
    drawn = [draw_sets(size, samples, trace.seed) for size in sizes]
    rows, weights = _padded([one for one, _ in drawn]), _padded([weight[:, None] for _, weight in drawn])
    rows, weights = rows.to(images.device).bool(), weights[..., 0].to(images.device)
    count = rows.shape[1]

    def switched(start: int, stop: int) -> Tensor:
        jobs = torch.arange(start, stop, device=images.device)
        which = jobs // count
        return mixed(rows[which, jobs % count], images, off, which, cut)

    def score(logits: Tensor, start: int, stop: int) -> Tensor:
        return trace.model.measured(
            logits, trace.targets[torch.arange(start, stop, device=logits.device) // count]
        )

    scores = trace.queue.predict(len(images) * count, switched, score).view(-1, count).double()
    whole = trace.model.measured(trace.logits, trace.targets).double()
    used = (
        torch.arange(rows.shape[2], device=images.device) < torch.tensor(sizes, device=images.device)[:, None]
    )
    values = shapley(rows, scores - scores[:, :1], weights.double(), whole - scores[:, 0], used)
    return paint(values, cut).to(images)


def draw_sets(size: int, samples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """ "m n" sets, the empty one first, and the weight of each, "m", 0 for the empty one.

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
    """ "b n": regression of the gains "b m" on the sets "b m n", with coefficients that sum to `total`.

    used: "b n" bool, the segments that an image has; the others get 0.
    """
    design = rows.double()
    weighted = (weights[..., None] * design).transpose(1, 2)
    matrix = weighted @ design
    scale = matrix.diagonal(dim1=1, dim2=2).amax(1)
    scale = torch.where(scale > 0, scale, 1.0)  # of an image with one segment there is nothing to regress
    ridge = torch.where(used, RIDGE * scale[:, None], scale[:, None])
    matrix = matrix + torch.diag_embed(ridge)
    ones = used.double()[..., None]
    free = torch.linalg.solve(matrix, weighted @ gains[..., None])
    along = torch.linalg.solve(matrix, ones)
    # Lagrange: of all solutions that miss the sum, the nearest in the regression's own metric.
    missing = total[:, None, None] - (free * ones).sum(1, keepdim=True)
    found: Tensor = free + along * missing / (along * ones).sum(1, keepdim=True)
    return found[..., 0] * used


def _padded(parts: list[np.ndarray]) -> Tensor:
    """Tables "m n" of several images as one, with zeros where an image has fewer rows or columns."""
    height, width = (max(part.shape[axis] for part in parts) for axis in (0, 1))
    table = np.zeros((len(parts), height, width), dtype=parts[0].dtype)
    for row, part in zip(table, parts, strict=True):
        row[: part.shape[0], : part.shape[1]] = part
    return torch.from_numpy(table)
