"""Metrics of maps against each other and against masks: SSIM beside scikit-image, and how the cost grows.

Times are of whole calls, checks and upsampling included. Methods share the masks' distance transforms, so the
first call pays for those and the warm-up keeps that out of the growth rows; `structure, first call` shows it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from skimage.metrics import structural_similarity

from heatproof.bench.common import Row, side_by_side
from heatproof.metrics.distance import _transform
from heatproof.metrics.localisation import localise, localise_curve
from heatproof.metrics.on_parts import structure
from heatproof.metrics.similarity import ssim
from heatproof.types import Maps, upsample

SIZE = 224
GROWTH = "<= 2.5"


def rows(quick: bool = False) -> list[Row]:
    """Seconds on free cores; `quick` takes a quarter of the maps."""
    return [*_ssim_rows(32 if quick else 128), *_growth_rows(16 if quick else 64, repeat=3 if quick else 5)]


def _ssim_rows(n: int) -> list[Row]:
    first, second = (upsample(_values(n, seed), (SIZE, SIZE)) for seed in (0, 1))
    pairs = list(zip(first.numpy(), second.numpy(), strict=True))
    reach = [max(np.ptp(a), np.ptp(b)) for a, b in pairs]
    times = side_by_side(
        {
            "ours": lambda: ssim(first, second),
            "loop": lambda: [
                structural_similarity(a, b, win_size=5, data_range=r)
                for (a, b), r in zip(pairs, reach, strict=True)
            ],
        }
    )
    exact = [
        structural_similarity(a.astype(np.float64), b.astype(np.float64), win_size=5, data_range=float(r))
        for (a, b), r in zip(pairs, reach, strict=True)
    ]
    error = np.abs(ssim(first, second).numpy() - exact).max()
    what = f"SSIM local5 of {n} pairs of {SIZE}x{SIZE}, times as fast as the other"
    return [
        Row(
            what,
            times["ours"],
            "scikit-image loop",
            times["loop"],
            times["loop"] / times["ours"],
            ">= 2",
            f"largest difference to its float64 result {error:.0e}",
        )
    ]


def _growth_rows(n: int, repeat: int) -> list[Row]:
    maps = Maps("bench", _values(2 * n, 0), (SIZE, SIZE), torch.zeros(2 * n, dtype=torch.long))
    half = maps.take(slice(n))
    boxes = [(20 + i % 40, 30, 150, 120 + i % 60) for i in range(2 * n)]
    finder, timing, box = (torch.from_numpy(mask) for mask in _code_masks(2 * n))

    def structured(which: Maps) -> object:
        k = len(which)
        return structure(which, finder[:k], timing[:k], box[:k])

    _transform.cache_clear()
    begin = time.perf_counter()
    structured(half)
    first = (time.perf_counter() - begin) * 1e3
    structured(maps)
    calls: dict[str, Callable[[Maps], object]] = {
        "structure": structured,
        "localise": lambda which: localise(which, boxes[: len(which)]),
    }
    found = []
    for name, call in calls.items():
        times = side_by_side(
            {
                "n": partial(call, half),
                "2n": partial(call, maps),
                "2 methods": partial(_twice, call, half),
            },
            repeat=repeat,
        )
        if name == "structure":
            found.append(_row(f"structure, first call, {n} maps", first, "second call", times["n"], ""))
        found.append(_row(f"{name}, maps doubled to {2 * n}", times["2n"], f"{n} maps", times["n"], GROWTH))
        found.append(
            _row(f"{name} of {n} maps, methods doubled", times["2 methods"], "1 method", times["n"], GROWTH)
        )
    times = side_by_side(
        {"1": lambda: localise(half, boxes[:n]), "10": lambda: localise_curve(half, boxes[:n])}, repeat=repeat
    )
    found.append(_row(f"localise of {n} maps at 10 budgets", times["10"], "1 budget", times["1"], "<= 10"))
    return found


def _twice(call: Callable[[Maps], object], maps: Maps) -> list[object]:
    return [call(maps) for _ in range(2)]


def _row(what: str, ours: float, other: str, other_ms: float, limit: str) -> Row:
    return Row(what, ours, other, other_ms, ours / other_ms, limit)


def _values(n: int, seed: int) -> torch.Tensor:
    """Maps as a CAM gives them: 7x7, mostly one place, with noise of their own."""
    centre = torch.linspace(-1, 1, 7)
    blob = torch.exp(-2 * (centre[:, None] ** 2 + centre**2))
    noise = torch.randn(n, 7, 7, generator=torch.Generator().manual_seed(seed))
    return (blob + 0.3 * noise).clamp(min=0)


def _code_masks(n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Finder, timing and box masks of version-1 codes, 6 pixels a module, each somewhere else."""
    finder = np.zeros((21, 21), bool)
    finder[:7, :7] = finder[:7, 14:] = finder[14:, :7] = True
    timing = np.zeros((21, 21), bool)
    timing[6, 7:14] = timing[7:14, 6] = True
    found = []
    for part in (finder, timing, np.ones((21, 21), bool)):
        canvas = np.zeros((n, SIZE, SIZE), bool)
        for i in range(n):
            top, left = i % 90, (7 * i) % 90
            canvas[i, top : top + 126, left : left + 126] = part.repeat(6, 0).repeat(6, 1)
        found.append(canvas)
    return found[0], found[1], found[2]
