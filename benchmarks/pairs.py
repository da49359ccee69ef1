"""C-Score: the pair engine against the plain NumPy loop over pairs, and how the cost grows.

The loop takes np.minimum and np.maximum of two maps per pair, as one would first write it. It is timed on a
random sample of the pairs and scaled to all of them, since it is the same work for every pair.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from benchmarks.common import Part, Row, cam_like, cost, side_by_side
from benchmarks.sections import BenchOptions
from heatproof.metrics.cscores import cscore, cscore_by_class, soft_iou_matrix
from heatproof.types import Maps

SIZE = 224


def parts(options: BenchOptions) -> Iterator[Part]:
    """Under a minute; under ten seconds where `quick`, with fewer maps in the growth rows."""
    ways = {"beside a loop": _against_loop, "growth": _growth, "sampled": _sampled}
    for name, rows in ways.items():
        yield Part(f"C-Score, {name}", partial(rows, options.quick, options.device), options.device)


def _against_loop(quick: bool, device: str) -> list[Row]:
    n, sample = 855, 2000 if quick else 20_000
    maps, confidence = _maps(n, device), _confidence(n)
    pixels = maps.upsample().flatten(1).pow_(2)
    on_the_cpu = pixels.cpu().numpy()
    scale = n * (n - 1) / 2 / sample
    times = side_by_side(
        {
            "engine": lambda: soft_iou_matrix(pixels),
            "cscore": lambda: cscore(maps, confidence),
            "loop": lambda: _pair_loop(on_the_cpu, sample),
        },
        repeat=1 if quick else 3,
        device=device,
        warmup=0 if quick and device == "cpu" else None,
    )
    loop = times["loop"] * scale
    note = f"loop scaled from {sample:,} random pairs of {n * (n - 1) // 2:,}"
    what = {"engine": "soft IoU of all pairs", "cscore": "cscore with upsampling and interval"}
    return [
        cost(f"{label}, {n} maps of {SIZE}x{SIZE}", times[name], "NumPy pair loop", loop, "<= 0.125", note)
        for name, label in what.items()
    ]


def _growth(quick: bool, device: str) -> list[Row]:
    n = 200 if quick else 400
    maps, confidence = _maps(2 * n, device), _confidence(2 * n)
    half = maps.take(slice(n))
    times = side_by_side(
        {
            "n": lambda: cscore(half, confidence[:n]),
            "2n": lambda: cscore(maps, confidence),
            "2 methods": lambda: [cscore(half, confidence[:n]) for _ in range(2)],
            "4 classes": lambda: _by_class(maps, 4),
            "8 classes": lambda: _by_class(maps, 8),
        },
        repeat=1 if quick else 3,
        device=device,
    )

    grown = (
        (f"cscore, maps doubled to {2 * n}", "2n", "n", "pairs grow fourfold"),
        (f"cscore of {n} maps, methods doubled", "2 methods", "n", "methods share nothing"),
        (f"cscore of {2 * n} maps, classes doubled", "8 classes", "4 classes", "pairs halve: same images"),
    )
    return [cost(what, times[ours], other, times[other], note=note) for what, ours, other, note in grown]


def _sampled(quick: bool, device: str) -> list[Row]:
    what, sizes = "cscore of 10,000 maps, sampled", (10_000,) if quick else (5_000, 10_000)
    times: dict[int, float] = {}
    for n in sizes:
        maps, confidence = _maps(n, device), _confidence(n)
        begin = time.perf_counter()
        score = cscore(maps, confidence)
        times[n] = (time.perf_counter() - begin) * 1e3
    half_width = (score.interval[1] - score.interval[0]) / 2
    ms, note = times[10_000], f"the ratio is the half-width; sampled: {score.sampled}, C = {score.value:.4f}"
    table = [Row(f"{what}: half-width", ms, "itself", ms, half_width, "<= 0.005", note)]
    if not quick:
        table.append(cost(f"{what}: maps doubled", ms, "5,000 maps", times[5_000], note="at most linear"))
    return table


def _maps(n: int, device: str) -> Maps:
    return Maps("bench", cam_like(n), (SIZE, SIZE), torch.zeros(n, dtype=torch.long)).to(device)


def _confidence(n: int) -> torch.Tensor:
    return 0.5 + 0.5 * torch.rand(n, generator=torch.Generator().manual_seed(1))


def _by_class(maps: Maps, classes: int) -> object:
    labels = torch.arange(len(maps)) % classes
    return cscore_by_class(maps, labels, torch.nn.functional.one_hot(labels, classes).double())


def _pair_loop(pixels: np.ndarray, sample: int) -> list[float]:
    rng = np.random.default_rng(0)
    first = rng.integers(0, len(pixels), sample)
    second = (first + rng.integers(1, len(pixels), sample)) % len(pixels)
    return [
        float(np.minimum(pixels[i], pixels[j]).sum() / np.maximum(pixels[i], pixels[j]).sum())
        for i, j in zip(first, second, strict=True)
    ]
