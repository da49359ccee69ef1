"""How many inputs a pass takes: as many as a network likes best, on its device, at this image size.

Past a point a larger batch is no faster, and on a CPU it is slower: what a layer returns then takes tens of
megabytes, which the C library asks the system for at every layer, page by page, and gives back (a third of
the time of SqueezeNet or MobileNetV2 with 32 inputs, hardly any with 8). Where a job is so
long that a trial costs no more than a fiftieth of it, a few batches of each size are timed, in turns, once
for a Model and an image size; a shorter job takes the usual size. Rows hardly notice: each image is computed
by itself, and only its last bits may depend on how many are computed together. A Model may also be told its
number (`inputs_per_pass`), as a run does, which keeps what it began with.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from heatproof.models.model import Model, frozen_eval
from heatproof.types import size_of

PIXELS = 224 * 224
CPU_USUAL, CUDA_USUAL = 8, 256  # at 224x224; half and twice as many are tried beside it
CPU_MOST, CUDA_MOST = 128, 1024  # of small images
SHARE = 0.02  # of a job, that a trial may cost
ROUNDS = 2
FASTER = 0.95  # of the usual size's time, for another to be taken


def batch_for(model: Model, images: Tensor, count: int) -> int:
    """Inputs per pass of a job of `count` inputs like these images; the caller holds `frozen_eval(...)`."""
    size = size_of(images)
    told = told_batch(model, size)
    if told is not None:
        return told
    if not _worth_it(model, size, count):
        return usual_batch(model.device, size)
    known = model.facts.batches
    key = (model.device, model.precision, tuple(images.shape[1:]))
    if key not in known:
        known[key] = fastest(model, images, trial_sizes(model.device, size))
    return known[key]


def measured_batch(model: Model, count: int) -> int:
    """Inputs per pass for a run of `count` inputs of the model's own size; the usual number for a few."""
    size, channels = model.preprocess.size, model.preprocess.channels
    if not _worth_it(model, size, count):
        return usual_batch(model.device, size)
    noise = torch.randn(8, channels, *size, generator=torch.Generator().manual_seed(0))
    with frozen_eval(model.module):
        return batch_for(model, noise.to(model.device), count)


def told_batch(model: Model, image_size: tuple[int, ...]) -> int | None:
    """What the Model was told for images of its own size, by area for others."""
    if model.inputs_per_pass is None:
        return None
    return max(1, round(model.inputs_per_pass * math.prod(model.preprocess.size) / math.prod(image_size)))


def usual_batch(device: torch.device, image_size: tuple[int, ...]) -> int:
    """A batch that suits most networks at this image size; the queue shrinks it where memory is short."""
    usual, most = (CUDA_USUAL, CUDA_MOST) if device.type == "cuda" else (CPU_USUAL, CPU_MOST)
    return max(1, min(most, usual * PIXELS // math.prod(image_size)))


def trial_sizes(device: torch.device, image_size: tuple[int, ...]) -> tuple[int, ...]:
    usual = usual_batch(device, image_size)
    return tuple(sorted({max(1, usual // 2), usual, 2 * usual}))


def _worth_it(model: Model, image_size: tuple[int, ...], count: int) -> bool:
    return count * SHARE >= (ROUNDS + 1) * sum(trial_sizes(model.device, image_size))


@torch.no_grad()
def fastest(model: Model, images: Tensor, sizes: Sequence[int]) -> int:
    """The size with the least time per input; the usual one unless another is clearly better."""
    usual = usual_batch(model.device, size_of(images))
    # Real pictures, again and again: a network may take its time with what it never saw.
    batches = {n: images[torch.arange(n, device=images.device) % len(images)] for n in sizes}
    times: dict[int, list[float]] = {n: [] for n in sizes}
    for turn in range(ROUNDS + 1):
        for n, batch in list(batches.items()):
            try:
                seconds = _seconds(model, model.ready(batch))
            except (RuntimeError, MemoryError):  # too large for the memory: not the fastest
                del batches[n], times[n]
                continue
            if turn:  # the first is to warm up
                times[n].append(seconds / n)
    found = {n: statistics.median(of) for n, of in times.items() if of}
    if usual not in found:
        return min(found, key=lambda n: found[n], default=usual)
    best = min(found, key=lambda n: found[n])
    return best if found[best] < FASTER * found[usual] else usual


def _seconds(model: Model, batch: Tensor) -> float:
    cuda = model.device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(model.device)
    begin = time.perf_counter()
    model.forward(batch)
    if cuda:
        torch.cuda.synchronize(model.device)
    return time.perf_counter() - begin
