"""RISE and occlusion: the probability of the class when parts of the image are masked."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from heatproof.errors import InputError
from heatproof.explain import method
from heatproof.explain.baselines import STARTS, baseline_images, mixed, variant_scores
from heatproof.explain.gradients import working_images
from heatproof.explain.sampling import BOUND, Estimate, designed_rows, in_rounds, rounds_of
from heatproof.types import Trace, per_map

FIRST, CEILING = 512, 4096  # of "auto": four blocks, and about as many masks as in the paper
CHUNK = 128  # masks summed at a time where they come one by one: no sum depends on the size of a batch


@method("rise")
def rise(
    trace: Trace,
    *,
    masks: int | str = 4000,
    grid: int = 7,
    p: float = 0.5,
    form: str = "paired",
    bound: float = BOUND,
) -> Estimate:
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

    The standard error comes from the spread between blocks; see sampling.py.

    Deviations: cells are ceil(H / grid) pixels, as in the authors' code. x * M is taken in normalised space,
    so hidden places become the mean colour. Masks are the same for every image.
    """
    rounds = rounds_of(masks, FIRST, CEILING)
    if not 0 < p <= 1:
        raise InputError(f"rise p must be in (0, 1], got {p}")
    images = trace.images.float()
    enlarged = Masks(trace.image_size, rounds[-1], grid, p, trace.seed, images.device, form == "paired")

    def ask(rows: Tensor, start: int, stop: int) -> Tensor:
        count, rows = len(rows), rows.to(images.device)

        def masked(first: int, last: int) -> Tensor:
            low, high = start + first // count, start + (last - 1) // count + 1
            jobs = torch.arange(first, last, device=images.device)
            masks = enlarged(low, high)[jobs // count + start - low]
            return images[rows[jobs % count]] * masks[:, None]

        def score(logits: Tensor, first: int, last: int) -> Tensor:
            jobs = torch.arange(first, last, device=logits.device)
            return trace.model.measured(logits, trace.targets[rows[jobs % count]])

        return trace.queue.predict(count * (stop - start), masked, score).view(-1, count).T

    def fit(_rows: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        return weighted_masks(scores.to(images.dtype), enlarged, p, form)

    return in_rounds(len(images), rounds, ask, fit, bound)


class Masks:
    """All masks as grids and shifts; calling it enlarges a range of them to "n H W"."""

    def __init__(
        self, size: tuple[int, ...], count: int, grid: int, p: float, seed: int, device: torch.device,
        paired: bool = False,
    ) -> None:  # fmt: skip
        self.size, self.block = size, 2 * _order(grid) if paired else CHUNK
        self.windows = [_crops(length, grid, device) for length in size]
        highest = [len(w) for w in self.windows]
        random = np.random.default_rng(seed)
        if paired:
            blocks = -(-count // self.block)
            halves = np.concatenate([_block(grid, p, random) for _ in range(blocks)])
            on = halves.reshape(-1, grid, grid)[:count]
            shifts = _spread(blocks, highest, seed).repeat(self.block, axis=1)[:, :count]
        else:
            on = random.random((count, grid, grid)) < p
            shifts = np.stack([random.integers(0, high, count) for high in highest])
        self.grids = torch.from_numpy(on.astype(np.float32)).to(device)
        self.shifts = torch.from_numpy(shifts).to(device)

    def __call__(self, start: int, stop: int) -> Tensor:
        rows, columns = (w[s[start:stop]] for w, s in zip(self.windows, self.shifts, strict=True))
        return rows @ self.grids[start:stop] @ columns.transpose(1, 2)


def weighted_masks(scores: Tensor, masks: Masks, p: float, form: str) -> tuple[Tensor, Tensor]:
    """Maps "b H W" of "b n" scores behind the first n masks, and their standard errors."""
    count, plain = scores.shape[1], form == "published"
    level = scores.mean(1, keepdim=True) * (not plain)
    weights = scores - level
    zero = scores.new_zeros(len(scores), masks.size[0] * masks.size[1])
    total, squares, sizes = zero, zero, []
    for start in range(0, count, masks.block):
        lit = masks(start, min(count, start + masks.block)).flatten(1) - p * (not plain)
        part = weights[:, start : start + masks.block] @ lit
        total, squares = total + part, squares + part.square() / len(lit)
        sizes.append(len(lit))
    # Blocks are the sampled units: their sums, each divided by the root of its size, have equal variance.
    spread = (squares - total.square() / count).clamp(min=0) / max(1, len(sizes) - 1)
    error = (spread / count).sqrt() / p if len(sizes) > 1 else torch.full_like(zero, torch.inf)
    values = level + total / (count * p)
    return values.view(-1, *masks.size), error.view(-1, *masks.size)


def _order(grid: int) -> int:
    """The order of the smallest Hadamard matrix with a column, besides the constant one, for every cell."""
    return 1 << (grid * grid).bit_length()


def _block(grid: int, p: float, random: np.random.Generator) -> np.ndarray:
    """Array "block cells": grids, each followed by its partner."""
    cells = grid * grid
    if p == 0.5:
        first = designed_rows(cells, random)
        second = ~first
    else:
        drawn = random.random((_order(grid), cells))
        first, second = drawn < p, 1 - drawn < p
    return np.stack([first, second], 1).reshape(-1, cells)


def _spread(count: int, highest: list[int], seed: int) -> np.ndarray:
    """Places "axes n" below `highest`, evenly spread from a random one on.

    The steps are powers of 1 / g, g^3 = g + 1, whose multiples leave the smallest gaps in a square.
    """
    steps = np.array([[0.7548776662466927], [0.5698402909980532]])
    begin = np.random.default_rng((seed, 1)).random((2, 1))
    places: np.ndarray = (begin + steps * np.arange(count)) % 1
    return np.asarray(places * np.array(highest)[:, None], np.int64)


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
    if len(painted) == 2:
        total = torch.einsum("brs,rh,sw->bhw", drops, *painted)
        return total / torch.outer(*(side.sum(0) for side in painted))
    total = torch.einsum("bqrs,qd,rh,sw->bdhw", drops, *painted)
    return total / torch.einsum("d,h,w->dhw", *(side.sum(0) for side in painted))


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
