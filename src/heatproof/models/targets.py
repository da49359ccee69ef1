"""Convert targets as users give them to columns of the network's logits; see heads.py.

A class number needs nothing. A function becomes the head of the network. For segmentation and detection one
pass over the unchanged images finds the region of the class, or the box, and a copy of the Model stores it,
so that perturbed images are scored by the same region or box. A Model that is already bound to as many images
is returned unchanged.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from heatproof.errors import TargetError
from heatproof.models.dense_heads import Dense, as_place
from heatproof.models.heads import Columns, Function, Head, Undetermined
from heatproof.models.model import CONVOLUTIONS, Model
from heatproof.models.queue import Queue
from heatproof.models.running import frozen_eval
from heatproof.types import size_of


def bind_targets(model: Model, images: Tensor, targets: Any) -> tuple[Model, Any]:
    """The Model whose columns are the targets, and the targets in a form that its check_targets accepts.

    images: checked, "b c H W", not perturbed; in the order of the targets.
    """
    if isinstance(targets, Columns):
        return model, targets
    if callable(targets) and not isinstance(targets, Tensor):
        return with_head(model, Function(function=targets)), None
    place = as_place(targets)
    if isinstance(model.head, Undetermined) and (place is not None or _needs_a_pass(model.module)):
        model.logits(images[:1])
    head = model.head
    if not isinstance(head, Dense):
        if place is not None:
            raise TargetError(
                f"(class, region) is for segmentation and detection; {model.name} has the head {head.name!r}"
            )
        return model, targets
    if place is not None or head.bound != len(images):
        model, head = _bound(unbind_targets(model), images, targets)
        targets = place.classes if place else targets
    return model, head.columns(targets, model.device)


def unbind_targets(model: Model) -> Model:
    """The Model before it was bound to images."""
    head = model.head
    return with_head(model, head.free()) if isinstance(head, Dense) and head.bound else model


def with_head(model: Model, head: Head) -> Model:
    """The same network with another head."""
    other = replace(model, head=head)
    other.facts = model.facts.with_other_head()
    return other


def _bound(model: Model, images: Tensor, targets: Any) -> tuple[Model, Dense]:
    seen: list[Any] = []

    def dense_head() -> Dense:
        assert isinstance(model.head, Dense)
        return model.head

    @torch.no_grad()
    def work(start: int, stop: int) -> list[Any]:
        inputs = model.ready(images[start:stop])
        if not model.was_seen:
            model.forward(inputs[:1])
        return dense_head().look(model.output(inputs.clone()), stop - start)

    with frozen_eval(model.module):
        Queue(model, size_of(images)).each(len(images), work, seen.extend, "forward")
    head = dense_head().bind(seen, targets)
    return with_head(model, head), head


def _needs_a_pass(module: nn.Module) -> bool:
    """Whether a pass must determine the head first: it may be dense, or a regression by its configuration."""
    parts = list(module.modules())
    if getattr(getattr(module, "config", None), "problem_type", None) == "regression":
        return True
    if any("anchor" in type(part).__name__.lower() for part in parts):
        return True
    if not any(isinstance(part, CONVOLUTIONS) for part in parts):
        return False
    owners = [part for part in parts if next(part.parameters(recurse=False), None) is not None]
    return isinstance(owners[-1], CONVOLUTIONS) or not any(isinstance(part, nn.Linear) for part in parts)
