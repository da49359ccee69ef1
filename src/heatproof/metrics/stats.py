"""Intervals of means over images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np

BLOCK = 2**19  # draws that are looked up at once
REMEMBERED = 2**24  # draws that are kept for the next interval: 64 MB


def mean_interval(
    values: Any, resamples: int = 1000, seed: int = 0, level: float = 0.95
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean over images; NaNs are left out, NaN where none is left."""
    values = np.asarray(values, dtype=np.float64)
    values = values[np.isfinite(values)]
    if len(values) == 0:
        return float("nan"), float("nan")
    means = np.concatenate([values[draws].mean(1) for draws in _resamples(len(values), resamples, seed)])
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _resamples(n: int, resamples: int, seed: int) -> Iterable[np.ndarray]:
    """Blocks "resamples n" of places; equal for every metric on the same images, so worth keeping."""
    return (_kept if n * resamples <= REMEMBERED else _drawn)(n, resamples, seed)


@lru_cache(maxsize=1)
def _kept(n: int, resamples: int, seed: int) -> tuple[np.ndarray, ...]:
    return tuple(_drawn(n, resamples, seed))


def _drawn(n: int, resamples: int, seed: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(seed)
    rows = max(1, BLOCK // n)
    for start in range(0, resamples, rows):
        yield rng.integers(0, n, (min(rows, resamples - start), n)).astype(np.int32)
