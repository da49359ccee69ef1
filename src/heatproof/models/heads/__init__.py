"""Heads: what a network's output is (see docs/heads.md).

A head is named, or the first pass determines it:

    k numbers                      softmax, or probabilities if they sum to 1 and no linear layer made them
    one number                     one logit, or one probability if a sigmoid made it
    k numbers made by sigmoids     multilabel; also by Hugging Face's problem_type or a Keras graph
    problem_type "regression"      regression
    "b k h w", "b k d h w"         segmentation
    boxes, scores and labels       detection

Embeddings and values cannot be distinguished from logits: those heads must be named. Nor can sigmoids be
distinguished from logits in [0, 1] by their numbers; the function that computed them decides.
"""

from __future__ import annotations

from dataclasses import fields, replace
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from heatproof.errors import InputError, ModelError, did_you_mean
from heatproof.models.heads.base import NORMS, Columns, Head, LastStep, logits_of
from heatproof.models.heads.classes import (
    Multilabel,
    OneLogit,
    OneOfMany,
    OneProbability,
    Probabilities,
    Softmax,
    Undetermined,
    class_scores,
    in_unit_interval,
    predicted,
    probabilities,
)
from heatproof.models.heads.dense import Dense, Detection, Segmentation, is_boxes
from heatproof.models.heads.values import VECTORS, Embedding, Function, Regression, vectors_of
from heatproof.models.wrapped import is_function

__all__ = [
    "HEADS", "Columns", "Dense", "Detection", "Embedding", "Function", "Head", "LastStep", "Multilabel",
    "OneOfMany", "Regression", "Segmentation", "Undetermined", "check_inputs", "chosen_head", "class_scores",
    "named_head", "predicted", "probabilities", "read_first", "vectors_of",
]  # fmt: skip

HIDDEN = ("last_hidden_state", *VECTORS)  # of a Hugging Face encoder's record, which has no logits
HEAD_NAMES = ("fc", "classifier", "head", "heads", "last_linear")
FEWEST_FEATURES = 64  # that a normalisation layer may return; fewer may be classes
ADD_A_HEAD = (
    "add a classification head (timm: num_classes, Hugging Face: AutoModelForImageClassification, "
    "torchvision: a Linear as fc), or explain similarities: head='embedding' with references"
)
HEADS: dict[str, type[Head]] = {
    head.name: head
    for head in (
        Softmax, OneLogit, Probabilities, OneProbability, Multilabel, Regression, Segmentation, Detection,
        Embedding,
    )
}  # fmt: skip
IMPLIED = {"thresholds": "multilabel", "references": "embedding"}  # settings that imply a head
ALIASES = {"logit": "one logit", "multi-label": "multilabel"}


def named_head(name: str) -> Head:
    """The head of this name, as written in TOML and on the command line."""
    known = ALIASES.get(name, name)
    if known not in HEADS:
        names = ["softmax", "logit", *(n for n in HEADS if n not in ("softmax", "one logit"))]
        raise InputError(f"unknown head {name!r}; {did_you_mean(name, names)}")
    return HEADS[known]()


def chosen_head(head: str | Head | None, thresholds: Any = None, **settings: Any) -> Head | None:
    """The head that a user names, with its settings: thresholds, tolerance, references."""
    chosen = named_head(head) if isinstance(head, str) else head
    given = {n: value for n, value in {"thresholds": thresholds, **settings}.items() if value is not None}
    if not given:
        return chosen
    chosen = chosen or next((HEADS[kind]() for name, kind in IMPLIED.items() if name in given), None)
    known = {option.name for option in fields(chosen)} if chosen is not None else set()
    if chosen is None or (extra := ", ".join(given.keys() - known)):
        cause = f"the head {chosen.name!r} has no {extra}" if chosen else f"{', '.join(given)} is of a head"
        raise InputError(f"{cause}; leave it out or name the head it is for")
    if "references" in given:
        given["references"] = _read_references(given["references"])
    return replace(chosen, **given)


def _read_references(given: Any) -> Tensor:
    """Vectors "t d", given directly or as a .npy file."""
    if isinstance(given, (str, PathLike)):
        try:
            given = np.load(given, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read the references in {given}: give a .npy file, 't d'") from error
    return torch.as_tensor(given)


def read_first(head: Head, module: nn.Module, output: Any, count: int, last: LastStep) -> tuple[Head, Tensor]:
    """Determine the head and the logits "b k" from a first pass, in which `last` recorded functions."""
    if undetermined := isinstance(head, Undetermined):
        _refuse_record(module, output)
        head = _kind(output)
    table = head.table(output, count)
    if undetermined and isinstance(head, OneOfMany):
        _refuse_features(module, table, last)
        if is_function(module) and table.shape[1] == 1 and in_unit_interval(table):
            raise ModelError(
                "the function returns one number between 0 and 1 for an image, a probability or a "
                "logit; say head='one probability' or head='logit'"
            )
        head = _classifier(module, table, last)
    settled = head.settled(module, output, table, last)
    return settled, settled.table(output, count) if settled.asks else table


def check_inputs(module: nn.Module) -> None:
    """Raise InputError for a network that takes images and texts together, such as CLIP."""
    if callable(getattr(module, "get_image_features", None)):
        raise InputError(
            f"{type(module).__name__} takes images and texts together; wrap it so that it returns "
            f"get_image_features(images), which are features and not class scores: {ADD_A_HEAD}"
        )


def _refuse_record(module: nn.Module, output: Any) -> None:
    """Raise InputError for the output record of an encoder without logits."""
    if logits_of(output) is not output:
        return
    names = [n for n in HIDDEN if (n in output if isinstance(output, dict) else hasattr(output, n))]
    if names:
        raise InputError(
            f"{type(module).__name__} returns {', '.join(names)} and no logits: it has no classification "
            f"head; {ADD_A_HEAD}"
        )


def _refuse_features(module: nn.Module, table: Tensor, last: LastStep) -> None:
    """Raise InputError for a backbone without a head, whose features would be explained as classes."""
    headless = any(isinstance(getattr(module, name, None), nn.Identity) for name in HEAD_NAMES)
    normed = last.weighted in NORMS and table.shape[1] >= FEWEST_FEATURES
    if getattr(module, "num_classes", None) == 0 or normed or (headless and last.weighted != "linear"):
        raise InputError(
            f"{type(module).__name__} returns {table.shape[1]} features, not class scores: it has no "
            f"classification head; {ADD_A_HEAD}; if they are class scores: head='softmax'"
        )


def _kind(output: Any) -> Head:
    if is_boxes(output):
        return Detection(by_itself=True)
    logits = logits_of(output)
    if isinstance(logits, Tensor) and logits.ndim in (4, 5) and logits[0, 0].numel() > 1:
        return Segmentation(by_itself=True)
    return OneOfMany(by_itself=True)


def _classifier(module: nn.Module, table: Tensor, last: LastStep) -> Head:
    """The head by Hugging Face's configuration, or by the last activation of a Keras graph or of the pass."""
    kind = getattr(getattr(module, "config", None), "problem_type", None)
    if table.shape[1] > 1 and (
        kind == "multi_label_classification"
        or getattr(module, "final_activation", "") in ("sigmoid", "log_sigmoid")
        or (in_unit_interval(table) and last.is_sigmoid(table))
    ):
        return Multilabel(by_itself=True)
    return Regression(by_itself=True) if kind == "regression" else OneOfMany(by_itself=True)
