"""Maps that are estimated from samples, in rounds until their strongest part is precise enough.

RISE and LIME estimate every value with a standard error. With a fixed number of samples there is one round.
With "auto" samples come in rounds, and an image is done when

    sqrt(mean over T of error^2) <= bound * (mean over T of the map - mean of the whole map)

where T is the strongest fifth of the map. Finished images cost nothing more, the others continue up to a
limit. The last round of an image depends on its own samples alone, so its batch does not change the map.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from heatproof.errors import InputError

REGION = 0.2  # share of all pixels: the strongest, which budgets select
BOUND = 0.2
ROUNDING = 1e-7
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
