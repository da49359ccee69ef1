"""Norms of the gradients, layer by layer, while a network trains: one hook on each parameter, nothing else.

    norm of a layer at a step = sqrt(sum over its parameters of |dL/dw|^2)

A gradient is read when backward has left it in .grad: before clipping, summed where several batches make one
step, scaled where a loss is. Nothing is changed, and numbers stay on the device until they are asked for.
The C-Score paper names such a log as what its unexplained collapses lacked (elangovan2026cscore, section 6).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from heatproof.train.recipe import GradientNorm


@dataclass
class Tally:
    """What the hooks of one layer write to."""

    step: Tensor | None = None  # sum of squares so far
    seen: set[int] = field(default_factory=set)  # parameters that the step has had
    total: Tensor | None = None
    highest: Tensor | None = None
    steps: int = 0

    def add(self, number: int, parameter: Tensor) -> None:
        """One parameter's gradient; the second one of a parameter begins a new step."""
        gradient = parameter.grad
        if gradient is None:
            return
        if number in self.seen:
            self.close()
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        squares = torch.linalg.vector_norm(values.detach(), dtype=torch.float32).square()
        self.step = squares if self.step is None else self.step + squares
        self.seen.add(number)

    def close(self) -> None:
        """The step is whole."""
        if self.step is not None:
            norm = self.step.sqrt()
            self.total = norm if self.total is None else self.total + norm
            self.highest = norm if self.highest is None else torch.maximum(self.highest, norm)
            self.steps += 1
        self.step = None
        self.seen.clear()


class GradientLog:
    """Follows a network's gradients from now on until it is closed or forgotten."""

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self._tallies: dict[str, Tally] = {}
        handles: list[Any] = []
        for number, (name, parameter) in enumerate(module.named_parameters()):
            if not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            tally = self._tallies.setdefault(layer_of(name), Tally())
            frozen = not parameter.requires_grad
            parameter.requires_grad_(True)  # torch takes a hook on nothing else; it may be unfrozen later
            handles.append(parameter.register_post_accumulate_grad_hook(partial(tally.add, number)))
            parameter.requires_grad_(not frozen)
        self.close = weakref.finalize(self, _remove, handles)

    def take(self) -> dict[str, GradientNorm]:
        """Each layer that had gradients since the last call, in the order of the network."""
        found = {}
        for name, tally in self._tallies.items():
            tally.close()
            if tally.steps and tally.total is not None and tally.highest is not None:
                found[name] = GradientNorm(float(tally.total) / tally.steps, float(tally.highest))
            tally.total, tally.highest, tally.steps = None, None, 0
        return found


def layer_of(parameter: str) -> str:
    """The module that a parameter is named after; Keras keeps its own in a list of the layer.

    >>> layer_of("layer4.0.conv1.weight"), layer_of("stem._torch_params.stem/kernel")
    ('layer4.0.conv1', 'stem')
    """
    return parameter.rpartition(".")[0].removesuffix("._torch_params")


def _remove(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()
