"""Faster passes with the results of the plain network, up to rounding. Entry point: `Accelerator`.

    batches.py   the number of inputs per pass at which a network is fastest
    folding.py   batch norms folded into convolutions; on a GPU fused with shortcut and ReLU
    graphs.py    passes recorded as CUDA graphs

`accelerate=False` of a Model, or HEATPROOF_ACCELERATE=0 in the environment, switches all of it off: passes
then take the number of inputs that is given, or the usual one, and the network's modules run one by one.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from heatproof.models.accel.batches import fastest, is_worth_a_trial, trial_sizes, usual_batch
from heatproof.models.accel.folding import Folding, is_watched
from heatproof.models.accel.graphs import Graphs, drop_recordings, recordable
from heatproof.models.running import frozen_eval
from heatproof.timeline import span
from heatproof.types import size_of

if TYPE_CHECKING:
    from heatproof.models.model import Model

SWITCH = "HEATPROOF_ACCELERATE"
WORTH_IT = 256  # inputs of a job from which folding saves more time than computing its weights takes


@dataclass
class AccelerationState:
    """What was determined for one model; stored in its facts."""

    batches: dict[tuple[Any, ...], int] = field(default_factory=dict)  # fastest inputs per pass
    folding: tuple[Hashable, Folding] | None = None  # with the network that it was determined for
    graphs: Graphs | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> AccelerationState:
        """A copied network determines its own state."""
        return AccelerationState(dict(self.batches))


class Accelerator:
    """Runs the passes of a model. Created for every call: the state is in the model's facts."""

    def __init__(self, model: Model) -> None:
        self.model, self.state = model, model.facts.acceleration
        self.enabled = model.accelerate and os.environ.get(SWITCH, "1") != "0"

    def batch_size(self, image_size: tuple[int, ...]) -> int:
        """Inputs per pass: as given, scaled by the area of the images, or the usual number."""
        model = self.model
        if model.inputs_per_pass is None:
            return usual_batch(model.device, image_size)
        own = math.prod(model.preprocess.size)
        return max(1, round(model.inputs_per_pass * own / math.prod(image_size)))

    def fastest_batch_size(self, images: Tensor, count: int) -> int:
        """Inputs per pass for a job of `count` inputs like these images, inside `frozen_eval(...)`."""
        model, size = self.model, size_of(images)
        if not self.enabled or model.inputs_per_pass is not None or not is_worth_a_trial(model, size, count):
            return self.batch_size(size)
        known, key = self.state.batches, (model.device, model.precision, tuple(images.shape[1:]))
        if key not in known:
            known[key] = fastest(model, images, trial_sizes(model.device, size))
        return known[key]

    def measured_batch_size(self, count: int) -> int:
        """Inputs per pass for a run of `count` inputs of the model's own size."""
        model, size = self.model, self.model.preprocess.size
        if not is_worth_a_trial(model, size, count):
            return usual_batch(model.device, size)
        noise = torch.randn(8, model.preprocess.channels, *size, generator=torch.Generator().manual_seed(0))
        with frozen_eval(model.module):
            return self.fastest_batch_size(noise.to(model.device), count)

    def job(self, images: Tensor, count: int) -> Job:
        """Passes of a job of `count` inputs like these images. Call inside `frozen_eval(...)`."""
        return Job(self, images, count)

    def fused(self, images: Tensor) -> Callable[[], AbstractContextManager[None]] | None:
        """A context in which convolutions run fused with norm and ReLU on a GPU; None if they cannot."""
        folding = self.folding(images[:1]) if self.model.device.type == "cuda" else None
        return None if folding is None else folding.refreshed

    def recorded(
        self,
        request: Hashable,
        function: Callable[..., Any],
        images: Tensor,
        targets: Any,
        rows: int | None = None,
        lasting: bool = False,
    ) -> Any:
        """function(images), or function(images, columns), as a CUDA graph; None if nothing is recorded.

        Args:
            request: what the function computes, besides the images and the network.
            function: returns a tree of tensors; it is recorded the third time.
            rows: number of images that the targets are of; all by default.
            lasting: whether results may be read while other passes run, and are not copied. Otherwise they
                are copies, and `replayed` finds the recording by the same request.
        """
        graphs, module = self.graphs, self.model.module
        if graphs is None or not self.records:
            return None
        inputs, key = self._inputs(images, targets, rows), self._key(graphs, request)
        if lasting:
            return graphs.run(key, function, inputs, lasting=True)
        reads = [tensor.detach() for tensor in (*module.parameters(), *module.buffers())]
        return _copied(graphs.run(key, function, inputs, request=request, reads=reads))

    def replayed(self, request: Hashable, images: Tensor, targets: Any) -> Any:
        """Results of an earlier request from its recording; None if there is none or the network changed."""
        graphs = self.state.graphs if self.enabled else None
        if graphs is None or graphs.reason or request not in graphs.requests:
            return None
        try:
            results = graphs.replay(
                request, self._inputs(images, targets), lambda: self._key(graphs, request)
            )
        except torch.OutOfMemoryError:
            return None  # out of memory: the queue repeats the pass with half the inputs
        return None if results is None else _copied(results)

    def describe(self) -> list[str]:
        """Sentences for a run's log: how the passes of this network run."""
        sentences = [
            f"{batch} inputs of {'x'.join(map(str, key[2]))} per pass were fastest"
            for key, batch in self.state.batches.items()
        ]
        _, folding = self.state.folding or (None, Folding())
        if folding.steps:
            sentences.append(
                f"{len(folding.steps)} batch norms are folded into the convolutions in front of them"
                if folding.differentiable
                else f"{len(folding.steps)} convolutions run as one kernel with what follows up to their ReLU"
            )
        if self.state.graphs is not None and self.state.graphs.reason:
            sentences.append(f"passes run kernel by kernel: {self.state.graphs.reason}")
        return sentences

    def release(self) -> None:
        """Free the memory of recordings, of all networks."""
        self.state.graphs = None
        drop_recordings()

    @property
    def records(self) -> bool:
        """Whether passes are recorded."""
        graphs = self.graphs
        return graphs is not None and not graphs.reason and self.model.facts.columns is not None

    @cached_property
    def graphs(self) -> Graphs | None:
        """The recordings of a network on a GPU, after its first pass; None where passes are not recorded."""
        model = self.model
        on_gpu = self.enabled and model.device.type == "cuda"
        if not on_gpu or not model.was_seen or not recordable(model.module):
            return None
        self.state.graphs = self.state.graphs or Graphs()
        return self.state.graphs

    def folding(self, image: Tensor) -> Folding | None:
        """The folding of the network, determined once; None if nothing is folded, or modules have hooks."""
        model, fuse = self.model, self.model.device.type == "cuda"
        # A custom `call` may run anything: nothing is known about its modules.
        if not self.enabled or model.call is not None or (fuse and not recordable(model.module)):
            return None
        key = model.device, model.dtype, model.precision, *map(id, model.module.modules())
        known, folding = self.state.folding or (None, Folding())
        if known != key:
            folding = Folding.of(model, model.ready(image), fuse)
            self.state.folding = key, folding
        parts = model.module.modules() if fuse else folding.parts
        changed = any(part.training or (not fuse and is_watched(part)) for part in parts)
        return folding if folding.steps and not changed else None

    def _inputs(self, images: Tensor, targets: Any, rows: int | None = None) -> list[Tensor]:
        if targets is None:
            return [images]
        model = self.model
        table = torch.empty(rows or len(images), model.facts.columns or 0, device=model.device)
        return [images, model.check_targets(targets, table)]

    def _key(self, graphs: Graphs, request: Hashable) -> Hashable:
        model = self.model
        return request, graphs.state(model.module), model.device, model.precision, self.state.folding


class Job:
    """Passes of one job, without our hooks: folded and recorded if that saves time."""

    def __init__(self, accelerator: Accelerator, images: Tensor, count: int) -> None:
        self.model, self.graphs = accelerator.model, accelerator.graphs
        self.folding = accelerator.folding(images[:1]) if count >= WORTH_IT else None
        if self.folding is not None:
            self.folding.refresh()
        # A recording reads the folded weights, so they must live as long as it does.
        self.key = self.graphs and (self.graphs.state(self.model.module), self.model.precision, self.folding)

    def logits(self, images: Tensor) -> Tensor:
        """Tensor "b k" for images that are `ready`."""
        if self.graphs is None:
            return self._logits(images)
        logits: Tensor = self.graphs.run(("logits", self.key), self._logits, (images,), pad=True)
        return logits.clone()

    def input_gradients(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient "b c h w" of each target's logit and the "b k" logits."""
        with span("backward", inputs=len(images)):
            pass  # counted here: a replayed recording runs no Python and opens no spans
        if self.graphs is None:
            return self._gradients(images, targets)
        inputs = images, targets.to(images.device)
        gradient, logits = self.graphs.run(("gradients", self.key), self._gradients, inputs, pad=True)
        return gradient.clone(), logits.clone()

    def _logits(self, images: Tensor) -> Tensor:
        with self.folding() if self.folding else nullcontext():
            return self.model.forward(images)

    def _gradients(self, images: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        with self.folding() if self.folding and self.folding.differentiable else nullcontext():
            return self.model.input_gradient(images, targets)


def _copied(results: Any) -> Any:
    """Copy results out of the memory that the next pass overwrites."""
    return tree_map_only(Tensor, Tensor.clone, results)
