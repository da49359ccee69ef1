"""What every metric does with what it is given: maps to pixels, values to intervals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heatproof.errors import InputError
from heatproof.types import Maps, normalise, upsample

BLOCK = 2**19  # draws that are looked up at once
REMEMBERED = 2**24  # draws that are kept for the next interval: 64 MB


def as_tensor(values: Any) -> Tensor:
    """A tensor, array or nested list as a tensor, where it already is."""
    return values if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values))


def raw_maps(maps: Maps | Any) -> Tensor:
    """ "b h w" as given: Maps, tensor or array, checked but not normalised."""
    values = maps.values if isinstance(maps, Maps) else as_tensor(maps)
    if values.ndim != 3 or 0 in values.shape[1:]:
        raise InputError(f"maps must be 'b h w' with h, w > 0; got shape {tuple(values.shape)}")
    if not torch.isfinite(values).all():
        raise InputError("maps contain NaN or infinite values")
    return values


def pixel_maps(maps: Maps | Any, size: tuple[int, int] | None = None) -> Tensor:
    """ "b H W" in [0, 1], normalised at image size (the Maps' own, or `size` where given)."""
    values = raw_maps(maps)
    if size is None:
        size = maps.image_size if isinstance(maps, Maps) else (int(values.shape[1]), int(values.shape[2]))
    return normalise(upsample(values, size))


def same_length(**arrays: Any) -> int:
    """The common length of the named arguments, or a sentence that names the two that differ."""
    lengths = {name: len(values) for name, values in arrays.items() if values is not None}
    first, n = next(iter(lengths.items()))
    for name, length in lengths.items():
        if length != n:
            raise InputError(f"{name} has {length} entries but {first} has {n}; they must match")
    return n


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
