"""The queue through which all perturbed inputs pass.

A job is one (image, variant) pair. Jobs of all images are numbered through and run in full batches; the
variants of a batch are built on the device when their turn comes, so memory does not grow with their number.
The Model's accelerator (accel/) chooses the batch size and how passes run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from heatproof.errors import InputError
from heatproof.models.accel import Accelerator
from heatproof.models.model import Model
from heatproof.models.running import frozen_eval, is_out_of_memory
from heatproof.types import size_of

Result = TypeVar("Result")
SAMPLE = 8  # images used to time batch sizes


class Queue:
    """Run numbered jobs through a model in batches that fit in memory.

    batch_size: of every pass; default: the Model's own, or chosen by throughput.
    """

    def __init__(
        self,
        model: Model,
        image_size: tuple[int, ...],
        batch_size: int | None = None,
        progress: Callable[[int], Any] | None = None,
    ) -> None:
        if batch_size is not None and batch_size < 1:
            raise InputError(f"batch_size must be at least 1, got {batch_size}")
        self.model = model
        self.chooses = batch_size is None
        # Batch sizes at which memory ran out, shared by all queues of the model, so that none fails again.
        self.fits = model.facts.fits
        self.image_size = image_size
        self.batch_size = batch_size or Accelerator(model).batch_size(image_size)
        self.progress = progress

    def each(
        self, count: int, work: Callable[[int, int], Result], done: Callable[[Result], Any], kind: str = ""
    ) -> None:
        """Call done(work(start, stop)) for all jobs; halve the batch when memory runs out."""
        start = 0
        while start < count:
            stop = start + self._next(count - start, kind)
            results: list[Result] = []
            try:
                results.append(work(start, stop))
            except (RuntimeError, MemoryError) as error:
                if stop - start == 1 or not is_out_of_memory(error):
                    raise
            if not results:  # outside the handler, since the traceback keeps tensors alive
                self.fits[kind, self.image_size] = (stop - start + 1) // 2
                self.model.free_memory(stop - start)
                continue
            done(results.pop())
            if self.progress:
                self.progress(stop - start)
            start = stop

    def _next(self, left: int, kind: str) -> int:
        """Size of the next batch. The last two share the remaining inputs: small batches are slow."""
        full = min(self.batch_size, self.fits.get((kind, self.image_size), self.batch_size))
        splits = full < left < 2 * full and self.model.device.type != "cuda"
        return (left + 1) // 2 if splits else min(left, full)

    def predict(
        self, count: int, make: Callable[[int, int], Tensor], read: Callable[[Tensor, int, int], Tensor]
    ) -> Tensor:
        """Forward passes only. make(start, stop) builds images, read(logits, start, stop) reads them.

        Call inside `frozen_eval(...)`.
        """
        results: list[Tensor] = []
        job: Accelerator | None = None
        if self.chooses and count > self.batch_size:
            sample = make(0, min(count, SAMPLE))
            self.batch_size = Accelerator(self.model).fastest_batch_size(sample, count)

        # no_grad, not inference_mode: networks that cache tensors in evaluation mode could not train with
        # a cached inference tensor afterwards, and the speed is the same.
        @torch.no_grad()
        def work(start: int, stop: int) -> Tensor:
            nonlocal job
            images = self.model.ready(make(start, stop))
            job = job or Accelerator(self.model).job(images, count)
            return read(job.logits(images), start, stop)

        self.each(count, work, results.append, "forward")
        return torch.cat(results)

    def input_gradients(
        self,
        count: int,
        make: Callable[[int, int], tuple[Tensor, Tensor]],
        done: Callable[[Tensor, Tensor, int, int], Any],
    ) -> None:
        """Gradients of the target's logit with respect to the input.

        make(start, stop) returns images and targets; done(gradients, logits, start, stop) gets the results.
        Call inside `frozen_eval(...)`.
        """
        job: Accelerator | None = None

        def work(start: int, stop: int) -> tuple[Tensor, Tensor, int, int]:
            nonlocal job
            images, targets = make(start, stop)
            images = self.model.ready(images)
            job = job or Accelerator(self.model).job(images, count)
            return *job.input_gradients(images, targets), start, stop

        self.each(count, work, lambda result: done(*result), "gradients")


def all_logits(
    model: Model, images: Tensor, batch_size: int | None = None, progress: Callable[[int], Any] | None = None
) -> Tensor:
    """Logits "b k" in evaluation mode, in batches; modes and flags of the module are restored."""
    queue = Queue(model, size_of(images), batch_size, progress)
    with frozen_eval(model.module):
        return queue.predict(len(images), lambda start, stop: images[start:stop], lambda logits, *_: logits)
