"""What the network says instead of the label: maps of that class, kept beside the others, for people."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from heatproof.explain.api import is_stored
from heatproof.explain.floors import is_floor
from heatproof.models import Model
from heatproof.types import Batch, Unit


def explain_wrong_predictions(
    model: Model, batch: Batch, unit: Unit, targets: Tensor, logits: Tensor
) -> tuple[Batch, Unit, Tensor] | None:
    """The pictures the network is wrong about, the methods that can explain its answer, and that answer."""
    answers, lost = model.read.predicted(logits).cpu(), model.read.unanswered(logits).cpu()
    wrong = ((answers != targets.cpu()) & ~lost).nonzero()[:, 0].tolist()
    methods = tuple(method for method in unit.methods if not (is_floor(method) or is_stored(method)))
    if not wrong or not methods:
        return None
    own = Batch(tuple(batch.ids[i] for i in wrong), batch.images[wrong])
    return own, replace(unit, methods=methods), answers[wrong]
