"""One queue for everything that perturbs inputs.

A job is one (image, variant) pair. Jobs of all images are numbered through and run in full batches; the
variants of a batch are built on the device when their turn comes, so memory does not grow with their number.
How many make a batch is the queue's own affair (batches.py), as is how its passes run: where there are enough
of them with batch norms folded (folding.py), on a GPU with all up to the ReLU in one kernel (fused.py), and
recorded as CUDA graphs (graphs.py) where they come again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from heatproof.errors import InputError
from heatproof.models.batches import batch_for, told_batch, usual_batch
from heatproof.models.folding import WORTH_IT, Folding, folding_of
from heatproof.models.fused import Fusion, fusion_of
from heatproof.models.graphs import Graphs, recordable
from heatproof.models.model import Model, at_least_float, frozen_eval, is_out_of_memory
from heatproof.timeline import span
from heatproof.types import size_of

Result = TypeVar("Result")
SAMPLE = 8  # pictures that a trial of batch sizes is made of


class Queue:
    """Runs numbered jobs through a model in batches of a size that fits.

    batch_size: of every pass; where None it is the Model's own, or chosen by throughput.
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
        # Where memory ran out before, for passes of this kind: a later queue need not find out again.
        self.fits = model.facts.fits
        self.image_size = image_size
        told = batch_size or told_batch(model, image_size)
        self.batch_size = told or usual_batch(model.device, image_size)
        self.progress = progress

    def each(
        self, count: int, work: Callable[[int, int], Result], done: Callable[[Result], Any], kind: str = ""
    ) -> None:
        """Call work(start, stop) over all jobs and hand results on; halve the batch when memory runs out."""
        start = 0
        while start < count:
            stop = start + self._next(count - start, kind)
            results: list[Result] = []
            try:
                results.append(work(start, stop))
            except (RuntimeError, MemoryError) as error:
                if stop - start == 1 or not is_out_of_memory(error):
                    raise
            if not results:  # behind the handler: the error holds on to tensors
                self.fits[kind, self.image_size] = (stop - start + 1) // 2
                self.model.free_memory(stop - start)
                continue
            done(results.pop())
            if self.progress:
                self.progress(stop - start)
            start = stop

    def _next(self, left: int, kind: str) -> int:
        """Inputs of the next batch. The last two share what is left: few inputs alone would be slow."""
        full = min(self.batch_size, self.fits.get((kind, self.image_size), self.batch_size))
        splits = full < left < 2 * full and self.model.device.type != "cuda"
        return (left + 1) // 2 if splits else min(left, full)

    def predict(
        self, count: int, make: Callable[[int, int], Tensor], read: Callable[[Tensor, int, int], Tensor]
    ) -> Tensor:
        """Forward passes only. make(start, stop) builds images, read(logits, start, stop) reads them.

        The caller holds `frozen_eval(...)`.
        """
        results: list[Tensor] = []
        runner: Runner | None = None
        if self.chooses and count > self.batch_size:
            self.batch_size = batch_for(self.model, make(0, min(count, SAMPLE)), count)

        # no_grad, not inference_mode: networks that cache tensors in evaluation mode could not train with
        # a cached inference tensor afterwards, and the speed is the same.
        @torch.no_grad()
        def work(start: int, stop: int) -> Tensor:
            nonlocal runner
            images = self.model.ready(make(start, stop))
            runner = runner or Runner(self.model, images, count)
            return read(runner.logits(images), start, stop)

        self.each(count, work, results.append, "forward")
        return torch.cat(results)

    def input_gradients(
        self,
        count: int,
        make: Callable[[int, int], tuple[Tensor, Tensor]],
        done: Callable[[Tensor, Tensor, int, int], Any],
    ) -> None:
        """Gradients of the target's logit with respect to the input.

        make(start, stop) returns images and targets; done(gradients, logits, start, stop) takes them on. The
        caller holds `frozen_eval(...)`.
        """
        runner: Runner | None = None

        def work(start: int, stop: int) -> tuple[Tensor, Tensor, int, int]:
            nonlocal runner
            images, targets = make(start, stop)
            images = self.model.ready(images)
            runner = runner or Runner(self.model, images, count)
            return *runner.input_gradients(images, targets), start, stop

        self.each(count, work, lambda result: done(*result), "gradients")


class Runner:
    """Passes of one job, in which nobody looks inside the network: folded and recorded where that pays."""

    def __init__(self, model: Model, images: Tensor, count: int) -> None:
        self.model = model
        self.folding: Folding | Fusion | None = None
        self.graphs = graphs_of(model)
        if count >= WORTH_IT:
            find = fusion_of if model.device.type == "cuda" else folding_of
            self.folding = find(model, images[:1])
        if self.folding is not None:
            self.folding.refresh(model.precision)
        # With the folded weights themselves, which a recording reads: they live as long as it does.
        self.key = self.graphs and (self.graphs.state(model.module), model.precision, self.folding)

    def logits(self, images: Tensor) -> Tensor:
        """ "b k" for images that are `ready`."""
        if self.graphs is None:
            return self._logits(images)
        made: Tensor = self.graphs.run(("logits", self.key), self._logits, (images,), pad=True)
        return made.clone()

    def input_gradients(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """ "b c h w" gradient of each target's logit and the "b k" logits."""
        with span("backward", inputs=len(images)):
            pass  # counted here, since a recording runs unseen
        if self.graphs is None:
            return self._gradients(images, targets)
        given = images, targets.to(images.device)
        gradient, logits = self.graphs.run(("gradients", self.key), self._gradients, given, pad=True)
        return gradient.clone(), logits.clone()

    def _logits(self, images: Tensor) -> Tensor:
        with self.folding() if self.folding else nullcontext():
            return self.model.forward(images)

    def _gradients(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with self.folding() if self.folding and self.folding.differentiable else nullcontext():
            return input_gradient(self.model, images, targets)


def graphs_of(model: Model) -> Graphs | None:
    """The recordings of a network on a GPU, after its first pass; None where passes are not recorded."""
    if model.device.type != "cuda" or not model.was_seen or not recordable(model.module):
        return None
    if model.facts.graphs is None:
        model.facts.graphs = Graphs()
    graphs: Graphs = model.facts.graphs
    return graphs


def how_it_runs(model: Model) -> list[str]:
    """Sentences for a run's log: what was found out about running this network."""
    said = [
        f"{batch} inputs of {'x'.join(map(str, shape))} per pass were fastest"
        for (_, _, shape), batch in model.facts.batches.items()
    ]
    _, folding = model.facts.folding or (None, None)
    if folding is not None and folding.pairs:
        said.append(f"{len(folding.pairs)} batch norms are folded into the convolutions in front of them")
    _, fusion = model.facts.fusion or (None, None)
    if fusion is not None and fusion.steps:
        said.append(f"{len(fusion.steps)} convolutions run as one kernel with what follows up to their ReLU")
    graphs = model.facts.graphs
    if graphs is not None and graphs.reason:
        said.append(f"passes run kernel by kernel: {graphs.reason}")
    return said


def all_logits(
    model: Model, images: Tensor, batch_size: int | None = None, progress: Callable[[int], Any] | None = None
) -> Tensor:
    """ "b k" logits in evaluation mode, in batches; the module is left as it was."""
    queue = Queue(model, size_of(images), batch_size, progress)
    with frozen_eval(model.module):
        return queue.predict(len(images), lambda start, stop: images[start:stop], lambda logits, *_: logits)


def input_gradient(model: Model, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """ "b c h w" gradient of each target's logit and the "b k" logits; one forward, one backward."""
    with torch.inference_mode(False), torch.enable_grad():
        inputs = model.ready(images).detach().clone().requires_grad_()
        logits = model.forward(inputs)
        with model.computing(), span("backward"):
            (gradient,) = torch.autograd.grad(model.scores(logits, targets).sum(), inputs)
    return at_least_float(gradient), logits.detach()
