"""Runs over pictures that may have several findings: what is explained, and the rows of the answers.

    probability   image PICTURE, one for each finding: `explained` names it, and so does `label` where the
                  picture really has it
    predicted     image PICTURE, one for each finding that reaches its threshold, as its number; where none
                  does, -1 and a sentence

Rows about maps have the image PICTURE#FINDING: every finding of a picture is a row of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from heatproof.errors import InputError, UnknownNameError
from heatproof.images.findings import THRESHOLD
from heatproof.models.heads import Multilabel
from heatproof.types import Batch, Score

if TYPE_CHECKING:
    from heatproof.images import Source
    from heatproof.models import Model
    from heatproof.run.metrics import MetricRequest
    from heatproof.run.score import RowMaker

NONE_ABOVE = "no finding reaches its threshold"
NONE_PREDICTED = -1.0
Thresholds = float | Sequence[float] | Mapping[str, float] | None


def named_thresholds(given: Thresholds, names: Sequence[str]) -> float | list[float] | None:
    """Thresholds that a study gives by name, in the order of the names; those not named are the usual one."""
    if not isinstance(given, Mapping):
        return given if given is None or isinstance(given, int | float) else list(given)
    for name in given:
        if name not in names:
            raise UnknownNameError("finding in model.thresholds:", name, names)
    return [float(given.get(name, THRESHOLD)) for name in names]


def said(model: Model, logits: Tensor) -> Tensor:
    """ "b k" bool: the findings that are predicted; none where the output is NaN."""
    head = model.head if isinstance(model.head, Multilabel) else Multilabel()
    return head.positive(logits)


def answer_rows(rows: RowMaker, batch: Batch, logits: Tensor, predicted: Tensor) -> Iterator[Score]:
    """What the network said about every finding of every picture."""
    from heatproof.run.score import NO_ANSWER

    chances = logits.sigmoid().double().tolist()
    truth = torch.zeros_like(predicted) if batch.findings is None else batch.findings
    for i, name in enumerate(batch.ids):
        own: list[int | None] = [c if there else None for c, there in enumerate(truth[i].tolist())]
        own += [None] * (len(chances[i]) - len(own))  # the pictures' list may name fewer than the network has
        for c, chance in enumerate(chances[i]):
            reason = NO_ANSWER if math.isnan(chance) else ""
            yield rows.row(name, own[c], c, "", "probability", chance, reason)
        if any(map(math.isnan, chances[i])):
            yield rows.row(name, None, None, "", "predicted", math.nan, NO_ANSWER)
            continue
        for c in predicted[i].nonzero().flatten().tolist():
            yield rows.row(name, own[c], c, "", "predicted", float(c))
        if not predicted[i].any():
            yield rows.row(name, None, None, "", "predicted", NONE_PREDICTED, NONE_ABOVE)


def check_findings(source: Source, is_multilabel: bool, meaning: str) -> None:
    """Pictures and network must agree on whether there may be several findings."""
    if source.is_multilabel and not is_multilabel:
        raise InputError(
            f"pictures may have several findings, but the network's output is read as {meaning}; set "
            "model.head = 'multilabel' if it has a sigmoid for each finding, else give each picture one label"
        )
    if is_multilabel and source.labelled and not source.is_multilabel:
        raise InputError(
            f"the network answers several findings at once ({meaning}), but each picture has one label; list "
            "what a picture has: label_columns or multilabel = true for a CSV file, a table of 0 and 1 in "
            "memory or npz; or set model.head = 'softmax' if one class is right"
        )


def check_metrics(requests: Sequence[MetricRequest], targets: str | None) -> None:
    """Refuse what is not defined where a picture may have several findings."""
    for request in requests:
        options: dict[str, Any] = dict(request.options)
        why = ""
        if request.entry.compares_checkpoints and "labels" not in request.entry.needs:
            why = "explains the one class that is predicted, and a finding that is not has none; leave it out"
        elif options.get("anchor") and options.get("tau") == "adaptive":
            why = "cannot have both an anchor and an adaptive tau; leave one out"
        elif request.entry.name == "cscore" and targets == "predicted" and "tau" in options:
            why = "needs maps of true findings for its tau; set run.targets = 'label', or leave tau out"
        if why:
            raise InputError(f"metrics: where pictures may have several findings, {request.text} {why}")
