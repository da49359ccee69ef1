"""The bootstrap: which images a resample holds, and the interval of what was made of the resamples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

Interval = tuple[float, float]
BLOCK = 2**19  # draws that are looked up at once
REMEMBERED = 2**24  # draws that are kept for the next interval: 64 MB


def percentile_interval(draws: np.ndarray, tails: Interval = (0.025, 0.975)) -> Interval:
    """Between which numbers the middle 95 % of the resamples lie; what is not finite is left out.

    >>> percentile_interval(np.arange(1001.0))
    (25.0, 975.0)
    """
    draws = draws[np.isfinite(draws)]
    if not len(draws):
        return float("nan"), float("nan")
    low, high = np.quantile(draws, tails)
    return float(low), float(high)


def wins(these: ArrayLike, those: ArrayLike) -> np.ndarray:
    """ "n m": 1 where one of these is above one of those, 1/2 where they are equal.

    Its mean is how often one of these is above one of those: the area under the ROC curve between them.

    >>> float(wins([0.2, 0.9], [0.1, 0.9]).mean())
    0.625
    """
    above = np.subtract.outer(np.asarray(these, float), np.asarray(those, float))
    return np.asarray((np.sign(above) + 1) / 2)


def resample(n: int, resamples: int = 1000, seed: int | tuple[int, ...] = 0) -> np.ndarray:
    """ "resamples n": places of the images that each resample holds."""
    return np.random.default_rng(seed).integers(0, n, (resamples, n))


def mean_interval(values: ArrayLike, resamples: int = 1000, seed: int = 0, level: float = 0.95) -> Interval:
    """Percentile bootstrap interval of the mean over images; NaNs are left out, NaN where none is left."""
    given = np.asarray(values, dtype=np.float64)
    known = given[np.isfinite(given)]
    if not len(known):
        return float("nan"), float("nan")
    means = [known[places].mean(1) for places in _blocks(len(known), resamples, seed)]
    return percentile_interval(np.concatenate(means), ((1 - level) / 2, (1 + level) / 2))


def _blocks(n: int, resamples: int, seed: int) -> Iterable[np.ndarray]:
    """The rows of `resample`, in blocks; equal for every metric on the same images, so worth keeping."""
    return (_kept if n * resamples <= REMEMBERED else _drawn)(n, resamples, seed)


@lru_cache(maxsize=1)
def _kept(n: int, resamples: int, seed: int) -> tuple[np.ndarray, ...]:
    return tuple(_drawn(n, resamples, seed))


def _drawn(n: int, resamples: int, seed: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(seed)
    rows = max(1, BLOCK // n)
    for start in range(0, resamples, rows):
        yield rng.integers(0, n, (min(rows, resamples - start), n)).astype(np.int32)
