"""Networks that name no class in a run: values, similarities, regions and boxes (models/heads/).

Beside the metrics each image has these rows, about what is explained in it:
    value         the explained scalar: a value, a similarity, the sum of logits in a region, a box's score
    probability   where the head has one
    predicted     the class that is explained, or the number of the value or reference
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from heatproof.models.heads import Head, chosen_head
from heatproof.models.heads.dense import Dense
from heatproof.models.model import Model
from heatproof.run.config import ModelTable
from heatproof.run.metrics import MetricRequest
from heatproof.types import Batch, Score

if TYPE_CHECKING:
    from heatproof.run.score import RowMaker


class HeadOutput(NamedTuple):
    """What such a network says about what is explained, image by image."""

    values: Tensor  # "b"
    chances: Tensor | None  # "b", where there is a probability


def explains_labels(head: Head) -> bool:
    """Whether the pictures' labels are something that can be explained."""
    return head.names_classes or isinstance(head, Dense)


def told_head(table: ModelTable, thresholds: float | list[float] | None, folder: Path) -> Head | None:
    """The head that a study names, with its settings; None where it is found by itself."""
    vectors = None if table.references is None else folder / table.references
    return chosen_head(table.head, thresholds, tolerance=table.tolerance, references=vectors)


def told_by(model: Model, logits: Tensor, explained: Tensor) -> HeadOutput | None:
    """None of networks that name classes, whose rows are made of the logits; and where there are none."""
    head = model.head
    if head.names_classes or not len(logits):
        return None
    columns = explained.clamp(min=0).to(logits.device)
    if isinstance(head, Dense):
        columns = head.columns(columns, logits.device).numbers
    chances = head.measured(logits, columns).cpu() if head.chance else None
    return HeadOutput(head.scores(logits, columns).cpu(), chances)


def value_rows(rows: RowMaker, batch: Batch, told: HeadOutput, explained: Tensor) -> Iterator[Score]:
    from heatproof.run.score import NO_ANSWER, labels_of

    known = zip(batch.ids, labels_of(batch), explained.tolist(), strict=True)
    for i, (name, label, target) in enumerate(known):
        value, c = float(told.values[i]), target if target >= 0 else None
        reason = "" if math.isfinite(value) else NO_ANSWER
        yield rows.row(name, label, c, "", "value", value if not reason else math.nan, reason)
        if told.chances is not None:
            yield rows.row(name, label, c, "", "probability", float(told.chances[i]), reason)
        guess = math.nan if reason else float(target)
        yield rows.row(name, label, None if reason else c, "", "predicted", guess, reason)


def refuse_for_head(requests: Sequence[MetricRequest], head: Head) -> None:
    """Metrics of classes, their probabilities and whether they changed, where the head has none."""
    for request in requests:
        if "probabilities" in request.entry.needs or request.entry.compares_checkpoints:
            head.need_classes(request.text)
