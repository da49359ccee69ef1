"""RISE: the mean of random soft masks, each weighted by the probability the class keeps behind it.

S = 1 / (N p) sum_i p(c | x * M_i) M_i. A mask starts as a coarse grid of cells that are 1 with probability p;
it is enlarged bilinearly to one cell more than the image on each axis and cropped at a random place, so that
cell borders fall anywhere. Citation key: petsiuk2018rise.

That sum is the mean probability f times how often each pixel happened to be shown, and what is sought beside
it. For a network that is sure the first part, which is noise, is the larger one. So, unless form="published":

    S = f + 1 / (N p) sum_i (p(c | x * M_i) - f) M_i          f the mean of all p(c | x * M_i)

which has the same expectation (form="centred"). form="paired" also draws masks two by two: where a cell of
the first is on for u < p, one of the second is on for 1 - u < p. With p = 1/2 the two are complements, every
pixel is shown exactly half of the time, and what both masks share falls out. Grids then come in blocks, each
the rows of a Hadamard matrix with their complements, its columns dealt out to the cells, its signs turned by
chance: within a block any two cells are on together exactly as often as apart, so none is mistaken for
another. A block is cropped at one place, and the places are spread evenly. Each mask by itself is distributed
as in the paper, so the expectation is still the same. docs/results/passes.md has what that saves. The
standard error of every value comes from the spread between blocks; see sampling.py.

Deviations: cells are ceil(H / grid) pixels, as in the authors' code (the paper's floor leaves too little to
crop from where the size does not divide). x * M is taken in normalised space, so hidden places become the
mean colour. Masks are the same for every image; they are kept as grids and enlarged for a batch at a time.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from heatproof.errors import InputError
from heatproof.explain.gradients import check_counts
from heatproof.explain.sampling import BOUND, Estimate, designed_rows, in_rounds, rounds_of
from heatproof.registry import PERTURBING, explainer
from heatproof.types import Trace

FORMS = ("paired", "centred", "published")
FIRST, CEILING = 512, 4096  # of "auto": four blocks, and about as many masks as in the paper
CHUNK = 128  # masks summed at a time where they come one by one: no sum depends on the size of a batch


@explainer(
    "rise",
    cite="petsiuk2018rise",
    forward_only=True,
    card=replace(PERTURBING, sign="never negative", resize="none: masks are bilinear at the image's size"),
)
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

    1 / (N p) sum_i p(c | x * M_i) M_i, centred and in complementary pairs.
    masks: how many, or "auto": until the strongest fifth of the map is known to `bound` of its height, 4,096
    at most. Whole blocks of 128 are best, for a grid of 7.
    form: "paired", "centred" without pairs, or "published", the plain sum with 4,000 masks in the paper.
    """
    rounds = rounds_of("rise", "masks", masks, FIRST, CEILING)
    check_counts("rise", grid=grid)
    if not 0 < p <= 1:
        raise InputError(f"rise p must be in (0, 1], got {p}")
    if form not in FORMS:
        raise InputError(f"rise form must be 'paired', 'centred' or 'published', got {form!r}")
    images = trace.images.float()
    enlarged = Masks(trace.image_size, rounds[-1], grid, p, trace.seed, images.device, form == "paired")

    def ask(rows: Tensor, start: int, stop: int) -> Tensor:
        count, rows = len(rows), rows.to(images.device)

        def masked(first: int, last: int) -> Tensor:
            low, high = start + first // count, start + (last - 1) // count + 1
            jobs = torch.arange(first, last, device=images.device)
            shown = enlarged(low, high)[jobs // count + start - low]
            return images[rows[jobs % count]] * shown[:, None]

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
        self.windows = [_windows(length, grid, device) for length in size]
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
    # Blocks are what is drawn: their sums, each divided by the root of its size, spread alike.
    spread = (squares - total.square() / count).clamp(min=0) / max(1, len(sizes) - 1)
    error = (spread / count).sqrt() / p if len(sizes) > 1 else torch.full_like(zero, torch.inf)
    values = level + total / (count * p)
    return values.view(-1, *masks.size), error.view(-1, *masks.size)


def _order(grid: int) -> int:
    """Of the Hadamard matrix whose columns, without the constant one, suffice for all cells."""
    return 1 << (grid * grid).bit_length()


def _block(grid: int, p: float, random: np.random.Generator) -> np.ndarray:
    """ "block cells": grids and after each its partner."""
    cells = grid * grid
    if p == 0.5:
        first = designed_rows(cells, random)
        second = ~first
    else:
        drawn = random.random((_order(grid), cells))
        first, second = drawn < p, 1 - drawn < p
    return np.stack([first, second], 1).reshape(-1, cells)


def _spread(count: int, highest: list[int], seed: int) -> np.ndarray:
    """ "axes n" places below `highest`, evenly spread, from a random one on: multiples of two irrationals.

    The steps are powers of 1 / g, g^3 = g + 1, whose multiples leave the smallest gaps in a square.
    """
    steps = np.array([[0.7548776662466927], [0.5698402909980532]])
    begin = np.random.default_rng((seed, 1)).random((2, 1))
    places: np.ndarray = (begin + steps * np.arange(count)) % 1
    return np.asarray(places * np.array(highest)[:, None], np.int64)


def _windows(length: int, grid: int, device: torch.device) -> Tensor:
    """ "shifts length grid": the bilinear enlargement of one axis, cropped at each shift up to one cell."""
    cell = -(-length // grid)
    wide = (grid + 1) * cell
    # Enlarging the unit vectors gives the matrix that enlarges anything.
    units = torch.eye(grid, device=device)[None]
    matrix = torch.nn.functional.interpolate(units, size=wide, mode="linear", align_corners=False)[0].T
    return matrix.unfold(0, length, 1)[: cell + 1].transpose(1, 2)
