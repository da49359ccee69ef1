"""The queue through which all perturbed inputs pass, and targets as columns of the network's logits.

A job is one (image, variant) pair. Jobs of all images are numbered through and run in full batches; the
variants of a batch are built on the device when their turn comes, so memory does not grow with their number.
The Model's accelerator (accel/) chooses the batch size and how passes run.

A target that is a class number needs nothing. A function becomes the head of the network. For segmentation
and detection one pass over the unchanged images finds the region of the class, or the box, and a copy of the
Model stores it, so that perturbed images are scored by the same region or box.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from heatproof.errors import InputError, TargetError
from heatproof.models.accel import Accelerator, in_parts
from heatproof.models.dense_heads import Dense, as_place
from heatproof.models.heads import Columns, Function, Head, Undetermined
from heatproof.models.model import CONVOLUTIONS, Model
from heatproof.models.running import frozen_eval
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
        """Call done(work(start, stop)) for all jobs; smaller batches are made when memory runs out."""

        def shrunk(size: int) -> None:
            self.fits[kind, self.image_size] = size

        parts = in_parts(self.model, count, work, lambda left: self._next(left, kind), shrunk)
        for result, inputs in parts:
            done(result)
            if self.progress:
                self.progress(inputs)

    def _next(self, left: int, kind: str) -> int:
        """Size of the next batch. The last two share the remaining inputs: small batches are slow."""
        full = min(self.batch_size, self.fits.get((kind, self.image_size), self.batch_size))
        splits = full < left < 2 * full and self.model.device.type != "cuda"
        return (left + 1) // 2 if splits else min(left, full)

    def predict(
        self, count: int, make: Callable[[int, int], Tensor], read: Callable[[Tensor, int, int], Tensor]
    ) -> Tensor:
        """Forward passes, inside `frozen_eval(...)`. make(start, stop) builds images, read reads logits."""
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
        """Gradients of the target's logit with respect to the input, inside `frozen_eval(...)`.

        make(start, stop) returns images and targets; done(gradients, logits, start, stop) gets the results.
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


def bind_targets(model: Model, images: Tensor, targets: Any) -> tuple[Model, Any]:
    """The Model whose columns are the targets, and the targets in a form that its check_targets accepts.

    images: checked, "b c H W", not perturbed; in the order of the targets. A Model that is already bound to
    as many images is returned unchanged.
    """
    if isinstance(targets, Columns):
        return model, targets
    if callable(targets) and not isinstance(targets, Tensor):
        return with_head(model, Function(function=targets)), None
    classes, where = as_place(targets)
    if isinstance(model.head, Undetermined) and (where is not None or _needs_a_pass(model.module)):
        model.logits(images[:1])
    head = model.head
    if not isinstance(head, Dense):
        if where is not None:
            raise TargetError(
                f"(class, region) is for segmentation and detection; {model.name} has the head {head.name!r}"
            )
        return model, targets
    if where is not None or head.bound != len(images):
        model = unbind_targets(model)
        seen: list[Any] = []

        @torch.no_grad()
        def work(start: int, stop: int) -> list[Any]:
            inputs = model.ready(images[start:stop])
            if not model.was_seen:
                model.forward(inputs[:1])
            assert isinstance(model.head, Dense)
            return model.head.look(model.output(inputs.clone()), stop - start)

        with frozen_eval(model.module):
            Queue(model, size_of(images)).each(len(images), work, seen.extend, "forward")
        assert isinstance(model.head, Dense)
        head = model.head.bind(seen, targets)
        model = with_head(model, head)
    return model, head.columns(classes, model.device)


def unbind_targets(model: Model) -> Model:
    """The Model before it was bound to images."""
    head = model.head
    return with_head(model, head.free()) if isinstance(head, Dense) and head.bound else model


def with_head(model: Model, head: Head) -> Model:
    """The same network with another head."""
    other, known = replace(model, head=head), model.facts
    acceleration = replace(known.acceleration, graphs=None)
    other.facts = replace(known, acceleration=acceleration, columns=None, twin=None, keeps_twin=False)
    return other


def _needs_a_pass(module: nn.Module) -> bool:
    """Whether a pass must determine the head first: it may be dense, or a regression by its configuration."""
    parts = list(module.modules())
    regresses = getattr(getattr(module, "config", None), "problem_type", None) == "regression"
    if regresses or any("anchor" in type(part).__name__.lower() for part in parts):
        return True
    if not any(isinstance(part, CONVOLUTIONS) for part in parts):
        return False
    owners = [part for part in parts if next(part.parameters(recurse=False), None) is not None]
    return isinstance(owners[-1], CONVOLUTIONS) or not any(isinstance(part, nn.Linear) for part in parts)
