"""RISE: the mean of random soft masks, each weighted by the probability the class keeps behind it.

S = 1 / (N p) sum_i p(c | x * M_i) M_i. A mask starts as a coarse grid of cells that are 1 with probability p;
it is enlarged bilinearly to one cell more than the image on each axis and cropped at a random place, so that
cell borders fall anywhere. Citation key: petsiuk2018rise.

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
from heatproof.models.model import target_probabilities
from heatproof.registry import PERTURBING, explainer
from heatproof.types import Trace


@explainer(
    "rise",
    cite="petsiuk2018rise",
    card=replace(PERTURBING, sign="never negative", resize="none: masks are bilinear at the image's size"),
)
def rise(trace: Trace, *, masks: int = 4000, grid: int = 7, p: float = 0.5) -> Tensor:
    """Random masks weighted by the class's probability behind them.

    1 / (N p) sum_i p(c | x * M_i) M_i.
    """
    check_counts("rise", masks=masks, grid=grid)
    if not 0 < p <= 1:
        raise InputError(f"rise p must be in (0, 1], got {p}")
    images = trace.images.float()
    count = len(images)
    enlarged = Masks(trace.image_size, masks, grid, p, trace.seed, images.device)

    def masked(start: int, stop: int) -> Tensor:
        first = start // count
        jobs = torch.arange(start, stop, device=images.device)
        return images[jobs % count] * enlarged(first, (stop - 1) // count + 1)[jobs // count - first][:, None]

    def score(logits: Tensor, start: int, stop: int) -> Tensor:
        targets = trace.targets[torch.arange(start, stop, device=logits.device) % count]
        return target_probabilities(logits, targets)

    scores = trace.queue.predict(count * masks, masked, score).view(masks, count).to(images.dtype)
    total = images.new_zeros(count, trace.image_size[0] * trace.image_size[1])
    chunk = trace.queue.batch_size
    for start in range(0, masks, chunk):
        total += scores[start : start + chunk].T @ enlarged(start, min(masks, start + chunk)).flatten(1)
    return total.view(count, *trace.image_size) / (masks * p)


class Masks:
    """All masks as grids and shifts; calling it enlarges a range of them to "n H W"."""

    def __init__(
        self, size: tuple[int, int], count: int, grid: int, p: float, seed: int, device: torch.device
    ) -> None:
        random = np.random.default_rng(seed)
        self.grids = torch.from_numpy((random.random((count, grid, grid)) < p).astype(np.float32)).to(device)
        self.windows = [_windows(length, grid, device) for length in size]
        self.shifts = [torch.from_numpy(random.integers(0, len(w), count)).to(device) for w in self.windows]

    def __call__(self, start: int, stop: int) -> Tensor:
        rows, columns = (w[s[start:stop]] for w, s in zip(self.windows, self.shifts, strict=True))
        return rows @ self.grids[start:stop] @ columns.transpose(1, 2)


def _windows(length: int, grid: int, device: torch.device) -> Tensor:
    """ "shifts length grid": the bilinear enlargement of one axis, cropped at each shift up to one cell."""
    cell = -(-length // grid)
    wide = (grid + 1) * cell
    # Enlarging the unit vectors gives the matrix that enlarges anything.
    units = torch.eye(grid, device=device)[None]
    matrix = torch.nn.functional.interpolate(units, size=wide, mode="linear", align_corners=False)[0].T
    return matrix.unfold(0, length, 1)[: cell + 1].transpose(1, 2)
