"""Which head a network has: told by name, or found in its first pass where that is safe.

    k numbers                      softmax, or probabilities where they sum to 1 and no linear layer made them
    one number                     one logit, or one probability where a sigmoid made it
    k numbers made by sigmoids     multilabel; also where Hugging Face's problem_type or a Keras graph says so
    problem_type "regression"      regression
    "b k h w", "b k d h w"         segmentation
    boxes, scores and labels       detection

A table of numbers cannot be told from an embedding, nor logits from values: those heads are named.

Numbers alone cannot tell sigmoids from logits that happen to lie in [0, 1]; the function that made them can.
"""

from __future__ import annotations

from dataclasses import fields, replace
from os import PathLike
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from heatproof.errors import InputError, ModelError, did_you_mean
from heatproof.models.function import is_function
from heatproof.models.heads.base import Head, inside
from heatproof.models.heads.classes import (
    LINEAR,
    Multilabel,
    OneLogit,
    OneOfMany,
    OneProbability,
    Probabilities,
    Softmax,
    Undetermined,
    in_unit_interval,
)
from heatproof.models.heads.dense import Detection, Segmentation, is_boxes
from heatproof.models.heads.values import VECTORS, Embedding, Regression

NORMS = ("layer_norm", "batch_norm", "group_norm", "instance_norm", "rms_norm")
HIDDEN = ("last_hidden_state", *VECTORS)  # of a Hugging Face encoder's record, which has no logits
HEAD_NAMES = ("fc", "classifier", "head", "heads", "last_linear")
FEWEST_FEATURES = 64  # that a normalisation layer may return; fewer may be classes
ADD_A_HEAD = (
    "add a classification head (timm: num_classes, Hugging Face: AutoModelForImageClassification, "
    "torchvision: a Linear as fc), or explain similarities: head='embedding' with references"
)
SIGMOIDS = ("sigmoid", "sigmoid_", "special_expit")
HEADS: dict[str, type[Head]] = {
    head.name: head
    for head in (
        Softmax, OneLogit, Probabilities, OneProbability, Multilabel, Regression, Segmentation, Detection,
        Embedding,
    )
}  # fmt: skip
IMPLIED = {"thresholds": "multilabel", "references": "embedding"}  # what a setting is enough to name
ALIASES = {"logit": "one logit", "multi-label": "multilabel"}


class LastStep(TorchFunctionMode):
    """Sees each torch function that runs and remembers which one filled which memory."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, str] = {}
        self.weighted = ""  # the last function that had weights

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "").strip("_") in (*LINEAR, *NORMS):
            self.weighted = func.__name__.strip("_")
        if isinstance(result, Tensor) and (place := _memory(result)) is not None:
            name = getattr(func, "__name__", "")
            is_view = any(isinstance(a, Tensor) and _memory(a) == place for a in args)
            if name in SIGMOIDS or not is_view:
                self.made[place] = name
        return result

    def of(self, tensor: Tensor) -> str:
        """The name of the function whose result this is, or is a view of."""
        return self.made.get(_memory(tensor) or 0, "")

    def is_sigmoid(self, tensor: Tensor) -> bool:
        return self.of(tensor) in SIGMOIDS


def _memory(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # sparse and other tensors without a storage
        return None


def named_head(name: str) -> Head:
    """The head of that name, as TOML and the command line give it."""
    known = ALIASES.get(name, name)
    if known not in HEADS:
        names = ["softmax", "logit", *(n for n in HEADS if n not in ("softmax", "one logit"))]
        raise InputError(f"unknown head {name!r}; {did_you_mean(name, names)}")
    return HEADS[known]()


def chosen_head(head: str | Head | None, thresholds: Any = None, **settings: Any) -> Head | None:
    """The head that a person names, with settings beside the name: thresholds, tolerance, references."""
    chosen = named_head(head) if isinstance(head, str) else head
    given = {n: value for n, value in {"thresholds": thresholds, **settings}.items() if value is not None}
    if not given:
        return chosen
    chosen = chosen or next((HEADS[kind]() for name, kind in IMPLIED.items() if name in given), None)
    known = {one.name for one in fields(chosen)} if chosen is not None else set()
    if chosen is None or (extra := ", ".join(given.keys() - known)):
        told = f"the head {chosen.name!r} has no {extra}" if chosen else f"{', '.join(given)} is of a head"
        raise InputError(f"{told}; leave it out or name the head it is for")
    if "references" in given:
        given["references"] = read_references(given["references"])
    return replace(chosen, **given)


def read_references(given: Any) -> Tensor:
    """Vectors "t d": as they are, or in a file that numpy.save wrote."""
    if isinstance(given, (str, PathLike)):
        try:
            given = np.load(given, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read the references in {given}: give a .npy file, 't d'") from error
    return torch.as_tensor(given)


def read_first(head: Head, module: nn.Module, output: Any, count: int, last: LastStep) -> tuple[Head, Tensor]:
    """The head, and the table "b k" of a first pass in which `last` has watched the network."""
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
    """Raise InputError for a network that takes images and texts together, as CLIP does."""
    if callable(getattr(module, "get_image_features", None)):
        raise InputError(
            f"{type(module).__name__} takes images and texts together; wrap it so that it returns "
            f"get_image_features(images), which are features and not class scores: {ADD_A_HEAD}"
        )


def _refuse_record(module: nn.Module, output: Any) -> None:
    """Raise InputError for the record of an encoder."""
    if inside(output) is not output:
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
    picture = inside(output)
    if isinstance(picture, Tensor) and picture.ndim in (4, 5) and picture[0, 0].numel() > 1:
        return Segmentation(by_itself=True)
    return OneOfMany(by_itself=True)


def _classifier(module: nn.Module, table: Tensor, last: LastStep) -> Head:
    """Hugging Face's configuration says it, or the last activation of a Keras graph, left out of the pass."""
    kind = getattr(getattr(module, "config", None), "problem_type", None)
    if table.shape[1] > 1 and (
        kind == "multi_label_classification"
        or getattr(module, "final_activation", "") in ("sigmoid", "log_sigmoid")
        or (in_unit_interval(table) and last.is_sigmoid(table))
    ):
        return Multilabel(by_itself=True)
    return Regression(by_itself=True) if kind == "regression" else OneOfMany(by_itself=True)
