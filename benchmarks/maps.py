"""Metrics of maps against each other and against masks: beside the usual loops, and how the cost grows.

Times are of whole calls, checks and upsampling included. Methods share the masks' distance transforms, so the
first call pays for those and the warm-up keeps that out of the growth rows; `structure, first call` shows it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from skimage.metrics import structural_similarity

from benchmarks import pairs
from benchmarks.common import Part, Row, cam_like, cost, side_by_side, speed
from benchmarks.sections import BenchOptions
from heatproof.images.symbols import part_masks
from heatproof.metrics.agreement import ssim
from heatproof.metrics.localisation import localise, localise_curve
from heatproof.metrics.on_parts import structure
from heatproof.types import Maps, upsample

SIZE = 224
GROWTH = "<= 2.5"


def parts(options: BenchOptions) -> Iterator[Part]:
    """C-Score on the device, the others on the CPU; `quick` takes a quarter of the maps."""
    yield from pairs.parts(options)
    quick = options.quick
    yield Part("SSIM", partial(_ssim_rows, 32 if quick else 128))
    yield Part("structure and localisation", partial(_growth_rows, 16 if quick else 64, 3 if quick else 5))


def _ssim_rows(n: int) -> list[Row]:
    first, second = (upsample(cam_like(n, seed), (SIZE, SIZE)) for seed in (0, 1))
    reach = [float(max(np.ptp(a), np.ptp(b))) for a, b in zip(first.numpy(), second.numpy(), strict=True)]

    def loop(first: np.ndarray, second: np.ndarray) -> list[float]:
        pairs = zip(first, second, reach, strict=True)
        return [structural_similarity(a, b, win_size=5, data_range=span) for a, b, span in pairs]

    ours, other = partial(ssim, first, second), partial(loop, first.numpy(), second.numpy())
    times = side_by_side({"ours": ours, "loop": other})
    error = np.abs(ours().numpy() - loop(first.double().numpy(), second.double().numpy())).max()
    what = f"SSIM local5 of {n} pairs of {SIZE}x{SIZE}, times as fast as the other"
    note = f"largest difference to its float64 result {error:.0e}"
    return [speed(what, times["ours"], "scikit-image loop", times["loop"], ">= 2", note)]


def _growth_rows(n: int, repeat: int) -> list[Row]:
    maps = Maps("bench", cam_like(2 * n), (SIZE, SIZE), torch.zeros(2 * n, dtype=torch.long))
    half = maps.take(slice(n))
    boxes = [(20 + i % 40, 30, 150, 120 + i % 60) for i in range(2 * n)]
    masks = _code_masks(2 * n)

    def structured(which: Maps) -> object:
        finder, timing, box = (mask[: len(which)] for mask in masks)
        return structure(which, finder, timing, box)

    begin = time.perf_counter()
    structured(half)
    first = (time.perf_counter() - begin) * 1e3
    structured(maps)
    calls: dict[str, Callable[[Maps], object]] = {
        "structure": structured,
        "localise": lambda which: localise(which, boxes[: len(which)]),
    }
    rows = []
    for name, call in calls.items():
        contenders: dict[str, Callable[[], object]] = {"n": partial(call, half), "2n": partial(call, maps)}
        contenders["2 methods"] = partial(lambda call: [call(half), call(half)], call)
        times = side_by_side(contenders, repeat=repeat)
        single = times["n"]
        if name == "structure":
            rows.append(cost(f"structure, first call, {n} maps", first, "second call", single))
        rows += [
            cost(f"{name}, maps doubled to {2 * n}", times["2n"], f"{n} maps", single, GROWTH),
            cost(f"{name} of {n} maps, methods doubled", times["2 methods"], "1 method", single, GROWTH),
        ]
    times = side_by_side(
        {"1": lambda: localise(half, boxes[:n]), "10": lambda: localise_curve(half, boxes[:n])}, repeat=repeat
    )
    return [*rows, cost(f"localise of {n} maps at 10 budgets", times["10"], "1 budget", times["1"], "<= 10")]


def _code_masks(n: int) -> list[torch.Tensor]:
    """Finder, timing and box masks of version-1 codes, 6 pixels a module, each somewhere else."""
    canvases = []
    for part in part_masks(21).values():
        canvas = np.zeros((n, SIZE, SIZE), bool)
        for i in range(n):
            top, left = i % 90, (7 * i) % 90
            canvas[i, top : top + 126, left : left + 126] = part.repeat(6, 0).repeat(6, 1)
        canvases.append(torch.from_numpy(canvas))
    return canvases
