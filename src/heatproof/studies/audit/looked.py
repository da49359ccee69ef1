"""What is seen of network and pictures before anything is chosen, and what it warns of."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from heatproof.errors import CheckpointError, HeatproofError, InputError
from heatproof.models.heads import Multilabel
from heatproof.models.libraries import check_name
from heatproof.models.model import Model
from heatproof.run.engine import settle
from heatproof.run.inputs import check_accuracy, first_answers, order_warning
from heatproof.run.study import ResolvedStudy, check_classes, check_study, open_study
from heatproof.run.weights import LIBRARIES_WITHOUT_WEIGHTS
from heatproof.studies.audit.settings import AuditSettings
from heatproof.verdict.follow import follow_metric

FEW = 32  # pictures that the network is tried on
KEYS = ("images: ", "model: ", "model.checkpoints: ", "model.layer: ")  # of a study that nobody wrote


@dataclass(frozen=True)
class Inspection:
    """A study with nothing chosen yet, which passed every check."""

    opened: ResolvedStudy
    classes: int  # of the network
    head: str | None  # that it had to be told
    notes: tuple[str, ...]
    labels: bool = True  # whether the pictures' classes are the network's


def look(settings: AuditSettings, tables: Mapping[str, Any], network: Model | None) -> Inspection:
    """Open everything; where the network has other classes than the pictures, do without labels."""
    library, _, name = settings.model.partition(":")
    if library in LIBRARIES_WITHOUT_WEIGHTS and name and not settings.checkpoint and not settings.pretrained:
        check_name(settings.model)
        raise CheckpointError(
            f"{settings.model} has random weights, whose maps say nothing: name yours with --checkpoint "
            "FILE, or take --pretrained to download the library's"
        )
    tries = [(None, settings.head), (None, Multilabel.name), ("predicted", settings.head)]
    if settings.head or not tables["images"].get("options"):
        del tries[1]  # one label each: the head is what it seems to be
    why: HeatproofError | None = None
    for targets, head in tries:
        try:
            opened = _checked(tables, targets, head, network)
        except HeatproofError as error:
            why = why or error
            continue
        check_accuracy(opened, settings.expect_accuracy)
        if targets is None:
            return Inspection(opened, _classes(opened), head, tuple(_warnings(opened)))
        note = f"labels are not used, predictions are explained: {_for_people(why).partition(';')[0]}"
        return Inspection(opened, _classes(opened), head, (note,), labels=False)
    raise InputError(_for_people(why)) from why


def _checked(
    tables: Mapping[str, Any], targets: str | None, head: str | None, network: Model | None
) -> ResolvedStudy:
    """With nothing but the test that the verdict rests on."""
    run, model = {**tables["run"], "targets": targets}, {**tables["model"], "head": head}
    wanted = {"methods": ["random"], "metrics": [follow_metric().name]}
    opened = open_study({**wanted, **tables, "run": run, "model": model}, network)
    settle(opened, None)
    check_study(opened)
    return opened


def _classes(opened: ResolvedStudy) -> int:
    return check_classes(opened, opened.model(opened.checkpoints[-1].name))


def _for_people(error: HeatproofError | None) -> str:
    text = str(error)
    for key in KEYS:
        text = text.removeprefix(key)
    return text


def _warnings(opened: ResolvedStudy) -> list[str]:
    """What these labels cannot tell, or already tell."""
    source = opened.source
    used = {label for sample in source.samples for label in sample.stated}
    if not source.labelled:
        return ["the pictures have no labels: predictions are explained, and nobody knows which are right"]
    if len(used) == 1:
        name = source.classes[used.pop()]
        return [
            f"all pictures are of the class {name}: nobody knows whether the network tells it from others"
        ]
    answers = first_answers(opened, FEW)
    warnings = order_warning(opened, answers)
    if answers is None or not answers.single or len(answers.truth) < FEW:
        return warnings
    chance = 1 / len(source.classes)
    if answers.right / FEW <= chance + 2 * math.sqrt(chance * (1 - chance) / FEW):
        warnings.append(
            f"of {FEW} pictures the network is right on {answers.right}, hardly more than by guessing"
        )
    return warnings
