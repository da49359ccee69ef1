"""RISE, occlusion, LIME and Kernel SHAP: the probability of the class when parts of the image are hidden.

RISE and LIME estimate every value with a standard error. With a fixed number of samples there is one round.
With "auto" samples come in rounds, and an image is done when

    sqrt(mean over T of error^2) <= bound * (mean over T of the map - mean of the whole map)

where T is the strongest fifth of the map. Finished images cost nothing more, the others continue up to a
limit. The last round of an image depends on its own samples alone, so its batch does not change the map.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from heatproof.errors import InputError
from heatproof.explain import method
from heatproof.explain.baselines import (
    STARTS,
    LastBatch,
    baseline_images,
    mixed,
    paint,
    segment_means,
    segments_of,
    top_segments,
    variant_scores,
)
from heatproof.explain.gradients import working_images
from heatproof.types import Trace, per_map

REGION = 0.2  # share of all pixels: the strongest, which budgets select
BOUND = 0.2
ROUNDING = 1e-7
RISE_ROUNDS = 512, 4096  # of "auto": four blocks, and about as many masks as in the paper
LIME_ROUNDS = 250, 1000  # of "auto"; the last are the samples of the lime package
SPREAD = 0.7548776662466927, 0.5698402909980532
CHUNK = 128  # masks summed at a time where they come one by one: no sum depends on the size of a batch
KERNEL_WIDTH = 0.25  # of LIME
RIDGE = 1.0  # of LIME
SHAP_RIDGE = 1e-9  # keeps the regression solvable with fewer samples than segments
Ask = Callable[[Tensor, int, int], Tensor]  # (images, first draw, last + 1) -> "r n" scores
Fit = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # (images, "r n" scores) -> "r h w" maps, errors


class Estimate(NamedTuple):
    """The maps of a method that samples, with their standard errors and costs."""

    values: Tensor  # "b h w"
    error: Tensor  # "b h w", the standard error of each value
    passes: Tensor  # "b", inputs sent through the network for each map


def rounds_of(samples: int | str, first: int, ceiling: int) -> list[int]:
    """Numbers of samples after each round; one round for a fixed number.

    With "auto" they double every second round, so that no image takes many more than it needs.

    >>> rounds_of(40, 250, 1000), rounds_of("auto", 250, 1000)
    ([40], [250, 375, 500, 750, 1000])
    """
    if isinstance(samples, int):
        return [samples]
    steps = [step for i in range(64) for step in (first << i, 3 * first << i >> 1)]
    return [*(step for step in steps if step < ceiling), ceiling]


def in_rounds(count: int, rounds: Sequence[int], ask: Ask, fit: Fit, bound: float = BOUND) -> Estimate:
    """Estimate the maps of `count` images; each takes part in rounds until it is settled."""
    if not bound > 0:
        raise InputError(f"bound must be above 0, got {bound}")
    left, scores = torch.arange(count), None
    results: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for start, stop in pairwise([0, *rounds]):
        new = ask(left, start, stop)
        scores = new if scores is None else torch.cat([scores, new], 1)
        values, error = fit(left, scores)
        last = stop == rounds[-1]
        done = torch.ones_like(left).bool() if last else (uncertainty(values, error) <= bound).cpu()
        here = done.to(values.device)
        results.append((left[done], values[here], error[here], torch.full_like(left[done], stop)))
        left, scores = left[~done], scores[~here.to(scores.device)]
        if not len(left):
            break
    which, values, error, passes = (torch.cat(parts) for parts in zip(*results, strict=True))
    order = which.argsort().to(values.device)
    return Estimate(values[order], error[order], passes.to(values.device)[order])


def designed_rows(count: int, random: np.random.Generator) -> np.ndarray:
    """Bools "rows count": a block in which any two of `count` switches are on together as often as apart.

    Rows of a Hadamard matrix in random order, its non-constant columns assigned at random, with random signs.
    """
    from scipy.linalg import hadamard

    order = 1 << count.bit_length()
    columns = random.permutation(order - 1)[:count] + 1
    signs = random.integers(0, 2, count) * 2 - 1
    return np.asarray((hadamard(order, dtype=np.int8)[:, columns] * signs)[random.permutation(order)] > 0)


def uncertainty(values: Tensor, error: Tensor) -> Tensor:
    """Tensor "b": the error of a map's strongest fifth, relative to its height above the map's mean.

    >>> values = torch.tensor([[[1.0, 0.0, 0.0, 0.0, 0.0]]])
    >>> round(uncertainty(values, torch.full((1, 1, 5), 0.2)).item(), 6)
    0.25
    """
    pixels, errors = values.flatten(1).double(), error.flatten(1).double()
    top = pixels.topk(max(1, round(REGION * pixels.shape[1])), dim=1)
    height = top.values.mean(1) - pixels.mean(1)
    doubt = errors.gather(1, top.indices).square().mean(1).sqrt()
    # Where samples differ by rounding only, the map is constant and certain.
    return torch.where(doubt > ROUNDING * pixels.abs().amax(1), doubt / height, 0.0)


@method("rise")
def rise(
    trace: Trace, *, masks: int | str = 4000, grid: int = 7, p: float = 0.5, form: str = "paired",
    bound: float = BOUND,
) -> Estimate:  # fmt: skip
    """Random masks weighted by the class's probability behind them.

    1 / (N p) sum_i p(c | x * M_i) M_i, centred and in complementary pairs. A mask is a coarse grid of cells
    that are on with probability p, enlarged bilinearly to one cell more than the image on each axis and
    cropped at a random place.
    masks: how many, or "auto": until the strongest fifth of the map is known to `bound` of its height, 4,096
    at most. Whole blocks of 128 are best, for a grid of 7.
    form: all have the same expectation, docs/results/passes.md compares them:

        published   the plain sum, with 4,000 masks in the paper
        centred     f + 1 / (N p) sum_i (p(c | x * M_i) - f) M_i, f the mean probability: without the noise of
                    f times how often each pixel was shown
        paired      the same with masks in pairs: a cell is on for u < p in the first and for 1 - u < p in the
                    second. With p = 1/2 grids come in blocks of rows of a Hadamard matrix with their
                    complements, in which any two cells are on together as often as apart. A block is cropped
                    at one place, and the places are spread evenly

    The standard error comes from the spread between blocks.

    Deviations: cells are ceil(H / grid) pixels, as in the authors' code. x * M is taken in normalised space,
    so hidden places become the mean colour. Masks are the same for every image.
    """
    rounds = rounds_of(masks, *RISE_ROUNDS)
    if not 0 < p <= 1:
        raise InputError(f"rise p must be in (0, 1], got {p}")
    images = trace.images.float()
    enlarged = Masks(trace.image_size, rounds[-1], grid, p, trace.seed, images.device, form == "paired")

    def ask(rows: Tensor, start: int, stop: int) -> Tensor:
        def jobs(first: int, last: int) -> tuple[Tensor, Tensor]:
            numbers = torch.arange(first, last, device=images.device)
            return numbers // len(rows) + start, rows.to(images.device)[numbers % len(rows)]

        def masked(first: int, last: int) -> Tensor:
            masks, which = jobs(first, last)
            return images[which] * enlarged[masks][:, None]

        def score(logits: Tensor, first: int, last: int) -> Tensor:
            return trace.model.measured(logits, trace.targets[jobs(first, last)[1]])

        return trace.queue.predict(len(rows) * (stop - start), masked, score).view(-1, len(rows)).T

    def fit(_rows: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        return weighted_masks(scores.to(images.dtype), enlarged, p, form)

    return in_rounds(len(images), rounds, ask, fit, bound)


class Masks:
    """All masks as grids and shifts; those that are indexed are enlarged to "n H W"."""

    def __init__(
        self, size: tuple[int, ...], count: int, grid: int, p: float, seed: int, device: torch.device,
        paired: bool = False,
    ) -> None:  # fmt: skip
        self.size, self.block = size, 2 << (grid * grid).bit_length() if paired else CHUNK
        self.windows = [_crops(length, grid, device) for length in size]
        highest = [len(w) for w in self.windows]
        random = np.random.default_rng(seed)
        if paired:
            blocks = -(-count // self.block)
            halves = np.concatenate([_block(grid, p, random) for _ in range(blocks)])
            on = halves.reshape(-1, grid, grid)[:count]
            # Evenly spread places: multiples of powers of 1 / g, g^3 = g + 1, leave the smallest gaps.
            begin, steps = np.random.default_rng((seed, 1)).random((2, 1)), np.array(SPREAD)[:, None]
            places = (begin + steps * np.arange(blocks)) % 1 * np.array(highest)[:, None]
            shifts = places.astype(np.int64).repeat(self.block, axis=1)[:, :count]
        else:
            on = random.random((count, grid, grid)) < p
            shifts = np.stack([random.integers(0, high, count) for high in highest])
        self.grids = torch.from_numpy(on.astype(np.float32)).to(device)
        self.shifts = torch.from_numpy(shifts).to(device)

    def __getitem__(self, which: slice | Tensor) -> Tensor:
        rows, columns = (w[s[which]] for w, s in zip(self.windows, self.shifts, strict=True))
        return rows @ self.grids[which] @ columns.transpose(1, 2)


def weighted_masks(scores: Tensor, masks: Masks, p: float, form: str) -> tuple[Tensor, Tensor]:
    """Maps "b H W" of "b n" scores behind the first n masks, and their standard errors."""
    count, plain = scores.shape[1], form == "published"
    level = scores.mean(1, keepdim=True) * (not plain)
    weights = scores - level
    zero = scores.new_zeros(len(scores), masks.size[0] * masks.size[1])
    total, squares, sizes = zero, zero, []
    for start in range(0, count, masks.block):
        lit = masks[start : min(count, start + masks.block)].flatten(1) - p * (not plain)
        part = weights[:, start : start + masks.block] @ lit
        total, squares = total + part, squares + part.square() / len(lit)
        sizes.append(len(lit))
    # Blocks are the sampled units: their sums, each divided by the root of its size, have equal variance.
    spread = (squares - total.square() / count).clamp(min=0) / max(1, len(sizes) - 1)
    error = (spread / count).sqrt() / p if len(sizes) > 1 else torch.full_like(zero, torch.inf)
    values = level + total / (count * p)
    return values.view(-1, *masks.size), error.view(-1, *masks.size)


def _block(grid: int, p: float, random: np.random.Generator) -> np.ndarray:
    """Array "block cells": grids, each followed by its partner."""
    cells = grid * grid
    if p == 0.5:
        first = designed_rows(cells, random)
        second = ~first
    else:
        drawn = random.random((1 << cells.bit_length(), cells))  # as many as rows of the designed block
        first, second = drawn < p, 1 - drawn < p
    return np.stack([first, second], 1).reshape(-1, cells)


def _crops(length: int, grid: int, device: torch.device) -> Tensor:
    """Tensor "shifts length grid": bilinear enlargement of one axis, cropped at each shift up to a cell."""
    cell = -(-length // grid)
    wide = (grid + 1) * cell
    # Enlarging the unit vectors gives the matrix that enlarges anything.
    units = torch.eye(grid, device=device)[None]
    matrix = torch.nn.functional.interpolate(units, size=wide, mode="linear", align_corners=False)[0].T
    return matrix.unfold(0, length, 1)[: cell + 1].transpose(1, 2)


@method("occlusion")
def occlusion(trace: Trace, *, window: float = 0.15, stride: float = 0.075, baseline: str = "zero") -> Tensor:
    """The mean drop of the class's probability over the sliding windows that hide a pixel.

    mean over windows w that hold the pixel of p(c | x) - p(c | x with w hidden). The last window of a row or
    column is cut off at the edge of the image. The paper shows the probability at the window's centre; the
    mean over windows is captum's.
    window, stride: in pixels where 1 or more, else as a share of the image's sides.
    baseline: what the window shows: "zero" (in normalised space), "black", "blur" or "noise".
    """
    images = working_images(trace)
    hidden = baseline_images(trace.model, images, baseline, trace.seed, STARTS)
    sides = [_windows(n, window, stride).to(images.device) for n in trace.image_size]
    grid = [len(side) for side in sides]

    def covered(which: Tensor, window: Tensor) -> Tensor:
        steps = torch.unravel_index(window, grid)
        under = steps[0].new_ones(1, dtype=torch.bool)
        for side, step in zip(sides, steps, strict=True):
            under = under[..., None] & side[step].view(len(which), *[1] * (under.ndim - 1), -1)
        return mixed(under, hidden, images, which)

    left = variant_scores(trace, torch.arange(len(images)), math.prod(grid), covered).view(-1, *grid)
    drops = (per_map(trace.model.measured(trace.logits, trace.targets), left) - left).to(images)
    painted = [side.to(images) for side in sides]
    spread, area = ("brs,rh,sw->bhw", "h,w->hw") if len(grid) == 2 else ("bqrs,qd,rh,sw->bdhw", "d,h,w->dhw")
    return torch.einsum(spread, drops, *painted) / torch.einsum(area, *(side.sum(0) for side in painted))


def _windows(length: int, window: float, stride: float) -> Tensor:
    """Bool tensor "n length": which pixels of an axis each window hides."""
    side, step = (max(1, round(v * length)) if 0 < v < 1 else v for v in (window, stride))
    if side != int(side) or step != int(step) or not 1 <= step <= side <= length:
        raise InputError(
            f"occlusion needs 0 < stride <= window, in pixels or as shares, and no window above the image's "
            f"{length} pixels; got window {window:g} and stride {stride:g}"
        )
    starts = torch.arange(math.ceil((length - side) / step) + 1) * int(step)
    places = torch.arange(length)
    return (places >= starts[:, None]) & (places < starts[:, None] + int(side))


@method("lime")
def lime(
    trace: Trace, *, samples: int | str = 1000, segments: str = "slic", segment_count: int = 100,
    compactness: float = 10.0, form: str = "designed", bound: float = BOUND, fill: str = "mean", top: int = 0,
) -> Estimate | Tensor:  # fmt: skip
    """Segments weighted by a linear model of the class's probability.

    argmin_b sum_z w(z) (p(c | z) - b_0 - b z)^2 + |b|^2, painted on the segments, sign included. A sample z
    keeps the segments that are on and fills the others; the first has all on.
    w(z) = sqrt(exp(-d^2 / .25^2)), d the cosine distance of z to the row with everything on.
    samples: how many, or "auto": until the strongest fifth of the map is known to `bound` of its height,
    1,000 at most. They follow the seed.
    segments: "slic", "quickshift" (4, 200, .2) as in the lime package and COSE, "felzenszwalb" (100, .5, 50).
    fill: "mean", the mean colour of each segment; "zero" (in normalised space), "black", "blur" or "noise".
    top: return the signs, 1 and -1, of this many segments with the largest |weight| and 0 elsewhere, as the
    mask of the lime package, without standard errors; 0 returns all weights.
    form: how samples are drawn; all have the same limit, docs/results/passes.md compares them:

        published   each segment on with probability 1/2, as the lime package draws them
        paired      in pairs, the second the complement of the first: interactions of two segments cancel
        designed    in pairs, in blocks of rows of a Hadamard matrix in random order, with random signs and
                    its columns dealt out to the segments: any two segments are on together as often as apart

    The standard errors are those of the regression, with pairs as the sampled units (a sandwich estimate,
    widened by the degrees of freedom of the fit).

    Deviations: as in the lime package run with all segments, nothing is selected. The fill is the exact mean,
    which the package truncates to whole 8-bit steps.
    """
    rounds = rounds_of(samples, *LIME_ROUNDS)
    images = trace.images.float()
    cut = segments_of(trace.model, images, segments, segment_count, compactness, trace.seed)
    options = rounds[-1], trace.seed, form

    def draw() -> Tensor:
        return sample_rows(cut.flatten(1).amax(1).tolist(), *options).to(cut.device, non_blocking=True)

    rows = _last_rows(cut, options, draw)
    if fill == "mean":
        spots = cut.flatten(1)[:, None].expand(-1, images.shape[1], -1)
        off = segment_means(images, cut).gather(2, spots).view_as(images)
    else:
        off = baseline_images(trace.model, images, fill, trace.seed, STARTS)

    def ask(left: Tensor, start: int, stop: int) -> Tensor:
        def switched(which: Tensor, sample: Tensor) -> Tensor:
            return mixed(rows[which, start + sample], images, off, which, cut)

        return variant_scores(trace, left, stop - start, switched)

    def fit(left: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        left = left.to(images.device, non_blocking=True)
        drawn = rows[left, : scores.shape[1]]
        coefficients, errors = ridge(drawn, scores, proximity(drawn), paired=form != "published")
        return paint(coefficients, cut[left]).float(), paint(errors, cut[left]).float()

    estimate = in_rounds(len(images), rounds, ask, fit, bound)
    return top_segments(estimate.values, cut, top, signed=True).float() if top else estimate


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
    trace: Trace, *, samples: int = 1000, segments: str = "slic", segment_count: int = 100,
    compactness: float = 10.0, baseline: str = "zero",
) -> Tensor:  # fmt: skip
    """Shapley values of segments: what each adds to the class's probability, on average over all orders.

    They sum to p(c | image) - p(c | baseline). Exact where samples >= 2^segments - 1. They minimise

        sum over samples S of w(S) (p(S) - p(none) - sum_{i in S} phi_i)^2, sum phi = p(all) - p(none),

    w(S) = (n - 1) / (C(n, |S|) |S| (n - |S|)) for n segments. Samples are drawn by their leverage
    (musco2025leverage): sizes evenly, then a set of that size with its complement; drawn so, a sample weighs
    1 / (|S| (n - |S|)). They follow the seed.
    baseline: what a segment shows that is off: "zero" (in normalised space), "black", "blur" or "noise".
    segments: "slic", "quickshift" (4, 200, .2) or "felzenszwalb" (100, .5, 50).

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
    used = (torch.arange(rows.shape[2]) < torch.tensor(sizes)[:, None]).to(images.device)
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
