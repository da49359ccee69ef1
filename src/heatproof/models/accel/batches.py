"""The number of inputs per forward pass at which a network is fastest, on its device, at an image size.

Past a point a larger batch is no faster, and on a CPU it is slower: layer outputs then take tens of
megabytes, which the C library requests from the system at every layer (a third of the time of SqueezeNet or
MobileNetV2 with 32 inputs, hardly any with 8). If a trial costs at most a fiftieth of a job, a few batches of
each size are timed in turns, once for a Model and an image size; a shorter job takes the usual size. Each
image is computed independently, so only the last bits of a result may depend on the batch size.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from heatproof.types import size_of

if TYPE_CHECKING:
    from heatproof.models.model import Model

PIXELS = 224 * 224
CPU_USUAL, CUDA_USUAL = 8, 256  # at 224x224; half and twice as many are tried too
CPU_MOST, CUDA_MOST = 128, 1024  # of small images
SHARE = 0.02  # largest cost of a trial, as a share of the job
ROUNDS = 2
FASTER = 0.95  # share of the usual size's time below which another size is chosen


def usual_batch(device: torch.device, image_size: tuple[int, ...]) -> int:
    """Batch size that suits most networks at this image size; the queue shrinks it if memory is short."""
    usual, most = (CUDA_USUAL, CUDA_MOST) if device.type == "cuda" else (CPU_USUAL, CPU_MOST)
    return max(1, min(most, usual * PIXELS // math.prod(image_size)))


def trial_sizes(device: torch.device, image_size: tuple[int, ...]) -> tuple[int, ...]:
    usual = usual_batch(device, image_size)
    return tuple(sorted({max(1, usual // 2), usual, 2 * usual}))


def is_worth_a_trial(model: Model, image_size: tuple[int, ...], count: int) -> bool:
    return count * SHARE >= (ROUNDS + 1) * sum(trial_sizes(model.device, image_size))


@torch.no_grad()
def fastest(model: Model, images: Tensor, sizes: Sequence[int]) -> int:
    """The size with the least time per input; the usual one unless another is clearly faster."""
    usual = usual_batch(model.device, size_of(images))
    # Real images, repeated: a network may take longer for inputs unlike those it was trained on.
    batches = {n: images[torch.arange(n, device=images.device) % len(images)] for n in sizes}
    times: dict[int, list[float]] = {n: [] for n in sizes}
    for turn in range(ROUNDS + 1):
        for n, batch in list(batches.items()):
            try:
                seconds = _seconds(model, model.ready(batch))
            except (RuntimeError, MemoryError):  # too large for the memory
                del batches[n], times[n]
                continue
            if turn:  # the first warms up
                times[n].append(seconds / n)
    medians = {n: statistics.median(of) for n, of in times.items() if of}
    best = min(medians, key=medians.__getitem__, default=usual)
    return best if usual not in medians or medians[best] < FASTER * medians[usual] else usual


def _seconds(model: Model, batch: Tensor) -> float:
    def now() -> float:
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        return time.perf_counter()

    begin = now()
    model.forward(batch)
    return now() - begin
