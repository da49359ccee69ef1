"""One queue for everything that perturbs inputs.

A job is one (image, variant) pair. Jobs of all images are numbered through and run in full batches; the
variants of a batch are built on the device when their turn comes, so memory does not grow with their number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from heatproof.errors import InputError
from heatproof.models.model import Model, at_least_float, class_scores, untouched
from heatproof.timeline import span

Result = TypeVar("Result")

PIXELS = 224 * 224
CPU_BATCH, CUDA_BATCH = 32, 256  # at 224x224: past these, throughput of the usual networks is flat


class Queue:
    """Runs numbered jobs through a model in batches of a size that fits."""

    def __init__(
        self,
        model: Model,
        image_size: tuple[int, int],
        batch_size: int | None = None,
        progress: Callable[[int], Any] | None = None,
    ) -> None:
        if batch_size is not None and batch_size < 1:
            raise InputError(f"batch_size must be at least 1, got {batch_size}")
        self.model = model
        self.batch_size = batch_size or automatic_batch(model.device, image_size)
        self.progress = progress

    def each(self, count: int, work: Callable[[int, int], Result], done: Callable[[Result], Any]) -> None:
        """Call work(start, stop) over all jobs and hand results on; halve the batch when memory runs out."""
        start = 0
        while start < count:
            stop = min(count, start + self.batch_size)
            try:
                result = work(start, stop)
            except (RuntimeError, MemoryError) as error:
                if stop - start == 1 or not is_out_of_memory(error):
                    raise
                self.batch_size = (stop - start + 1) // 2
                if self.model.device.type == "cuda":
                    torch.cuda.empty_cache()
                continue
            done(result)
            if self.progress:
                self.progress(stop - start)
            start = stop

    def predict(
        self, count: int, make: Callable[[int, int], Tensor], read: Callable[[Tensor, int, int], Tensor]
    ) -> Tensor:
        """Forward passes only. make(start, stop) builds images, read(logits, start, stop) reads them."""
        results: list[Tensor] = []

        # no_grad, not inference_mode: networks that cache tensors in evaluation mode could not train with
        # a cached inference tensor afterwards, and the speed is the same.
        @torch.no_grad()
        def work(start: int, stop: int) -> Tensor:
            logits = self.model.forward(self.model.ready(make(start, stop)))
            return read(logits, start, stop)

        self.each(count, work, results.append)
        return torch.cat(results)

    def input_gradients(
        self,
        count: int,
        make: Callable[[int, int], tuple[Tensor, Tensor]],
        done: Callable[[Tensor, Tensor, int, int], Any],
    ) -> None:
        """Gradients of the target's logit with respect to the input.

        make(start, stop) returns images and targets; done(gradients, logits, start, stop) takes them on.
        """

        def work(start: int, stop: int) -> tuple[Tensor, Tensor, int, int]:
            images, targets = make(start, stop)
            gradients, logits = input_gradient(self.model, images, targets)
            return gradients, logits, start, stop

        self.each(count, work, lambda result: done(*result))


def all_logits(
    model: Model, images: Tensor, batch_size: int | None = None, progress: Callable[[int], Any] | None = None
) -> Tensor:
    """ "b k" logits in evaluation mode, in batches; the module is left as it was."""
    queue = Queue(model, (int(images.shape[-2]), int(images.shape[-1])), batch_size, progress)
    with untouched(model.module):
        return queue.predict(len(images), lambda start, stop: images[start:stop], lambda logits, *_: logits)


def input_gradient(model: Model, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """ "b c h w" gradient of each target's logit and the "b k" logits; one forward, one backward."""
    with torch.inference_mode(False), torch.enable_grad():
        inputs = model.ready(images).detach().clone().requires_grad_()
        logits = model.forward(inputs)
        with span("backward"):
            (gradient,) = torch.autograd.grad(class_scores(logits, targets).sum(), inputs)
    return at_least_float(gradient), logits.detach()


def automatic_batch(device: torch.device, image_size: tuple[int, int]) -> int:
    """A batch that fills the device for images of this size; the queue shrinks it where memory is short."""
    full = CUDA_BATCH if device.type == "cuda" else CPU_BATCH
    return max(1, min(4 * full, full * PIXELS // (image_size[0] * image_size[1])))


def is_out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)) or "can't allocate memory" in text
