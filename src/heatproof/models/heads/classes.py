"""Heads of classifiers: one class of k, or any number of labels.

    softmax           k logits                     probability: softmax
    one logit         one logit z, of class 1      probability: sigmoid; class 0 is explained through -z
    probabilities     k numbers that sum to 1      read as log p, whose softmax is p again
    one probability   one number p, of class 1     read as log p / (1 - p), whose sigmoid is p again
    multilabel        k logits, or k sigmoids of them, which are undone; probability: sigmoid of each

The logits in front of a final softmax differ from log p by one number per image: probabilities, predictions
and everything made of them are the same. A gradient is then that of log p.

The prediction of a multilabel head is a set: the labels whose probability is at least their threshold, one
for all labels or one each. By default the explained label is that which lies highest above its threshold, in
log-odds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from heatproof.errors import InputError, ModelError
from heatproof.images.findings import THRESHOLD, finding_limits
from heatproof.models.heads.base import LINEAR, Head, LastStep
from heatproof.models.wrapped import is_function

ROUNDING = 1e-4


@dataclass(frozen=True)
class OneOfMany(Head):
    """One class is right: softmax over k, or one logit for two classes."""

    name: ClassVar[str] = "softmax"
    names_classes: ClassVar[bool] = True
    one_class: ClassVar[bool] = True
    chance: ClassVar[str] = "softmax over the classes"
    output: ClassVar[str] = "logits, made probabilities by a softmax"

    def settled(self, module: nn.Module, output: Any, table: Tensor, last: LastStep) -> Head:
        squashed, step = in_unit_interval(table), last.of(table)
        if table.shape[1] == 1:
            kind = OneProbability if squashed and last.is_sigmoid(table) else OneLogit
            return kind(self.by_itself)
        rounding = max(ROUNDING, 2 * torch.finfo(table.dtype).eps)
        sums = table.detach().sum(1, dtype=torch.float64)
        sum_to_1 = squashed and bool((sums - 1).abs().max() <= rounding)
        return (Probabilities if sum_to_1 and step not in LINEAR else Softmax)(self.by_itself)

    def targets(self, columns: int) -> int:
        return max(2, columns)

    def scores(self, logits: Tensor, targets: Tensor) -> Tensor:
        return class_scores(logits, targets)

    def probabilities(self, logits: Tensor) -> Tensor:
        return probabilities(logits)

    def predicted(self, logits: Tensor) -> Tensor:
        return predicted(logits)


class Softmax(OneOfMany):
    """k logits."""


class Undetermined(OneOfMany):
    """The head of a network before its first pass, read as that of a plain classifier."""


class OneLogit(OneOfMany):
    """One logit, of class 1."""

    name = "one logit"
    chance = "sigmoid of the logit, and 1 less that"
    output = "one logit, of class 1, made a probability by a sigmoid"

    def settled(self, module: nn.Module, output: Any, table: Tensor, last: LastStep) -> Head:
        if (columns := table.shape[1]) != 1:
            raise ModelError(f"the head is set to one logit, but the network has {columns} outputs")
        return super().settled(module, output, table, last)


class Probabilities(OneOfMany):
    """k numbers that sum to 1."""

    name = "probabilities"
    chance = "the output itself"
    output = "probabilities, explained through their logarithms"

    def logits(self, table: Tensor) -> Tensor:
        return table.clamp(min=torch.finfo(table.dtype).tiny).log()


class OneProbability(OneLogit):
    """One number between 0 and 1, of class 1."""

    name = "one probability"
    chance = "the output itself, and 1 less that"
    output = "one probability, of class 1, explained through its logit"

    def settled(self, module: nn.Module, output: Any, table: Tensor, last: LastStep) -> Head:
        super().settled(module, output, table, last)
        return self

    def logits(self, table: Tensor) -> Tensor:
        return undone_sigmoid(table)


@dataclass(frozen=True)
class Multilabel(Head):
    """k labels, any number of which may be present.

    Args:
        thresholds: the least probability at which a label is predicted: one for all, or one each.
        sigmoids: whether the network ends in them; determined by its first pass.
    """

    name: ClassVar[str] = "multilabel"
    names_classes: ClassVar[bool] = True
    chance: ClassVar[str] = "sigmoid of each label's logit"
    same_if: ClassVar[str] = "the same labels are at or above their thresholds"

    thresholds: float | tuple[float, ...] = THRESHOLD
    sigmoids: bool = False

    def __post_init__(self) -> None:
        limits: Any = self.thresholds
        given = (limits,) if isinstance(limits, int | float) else tuple(map(float, limits))
        if not given or not all(0 < t < 1 for t in given):
            raise InputError(
                f"thresholds are probabilities between 0 and 1, one or one per label; got {self.thresholds}"
            )
        object.__setattr__(self, "thresholds", given[0] if len(given) == 1 else given)

    @property
    def meaning(self) -> str:
        ends = "sigmoids, explained through their logits" if self.sigmoids else "logits, each with a sigmoid"
        given = self.thresholds if isinstance(self.thresholds, tuple) else (self.thresholds,)
        limits = ", ".join(f"{t:g}" for t in given)
        return f"several labels at once: {ends}; a label is predicted from a probability of {limits} on"

    def settled(self, module: nn.Module, output: Any, table: Tensor, last: LastStep) -> Head:
        self.limits(table.shape[1])
        squashed = last.is_sigmoid(table) or is_function(module)  # whose last step is unknown
        return replace(self, sigmoids=in_unit_interval(table) and squashed)

    def logits(self, table: Tensor) -> Tensor:
        return undone_sigmoid(table) if self.sigmoids else table

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    def limits(self, labels: int) -> tuple[float, ...]:
        """Thresholds as probabilities, one for each label."""
        return finding_limits(self.thresholds, labels)

    def positive(self, logits: Tensor) -> Tensor:
        """Bool tensor "b k": the prediction, labels whose probability is at least their threshold."""
        return self.probabilities(logits) >= logits.new_tensor(self.limits(logits.shape[1]))

    def predicted(self, logits: Tensor) -> Tensor:
        if isinstance(self.thresholds, float | int):
            return logits.argmax(1)
        odds = [math.log(t / (1 - t)) for t in self.limits(logits.shape[1])]
        return (logits - logits.new_tensor(odds)).argmax(1)

    def same(self, before: Tensor, after: Tensor, targets: Tensor) -> Tensor:
        return (self.positive(before) == self.positive(after)).all(1)

    @property
    def of_logits(self) -> Head:
        return replace(self, by_itself=False, sigmoids=False)


def in_unit_interval(table: Tensor) -> bool:
    return bool(((table >= 0) & (table <= 1)).all())


def undone_sigmoid(table: Tensor) -> Tensor:
    limits = torch.finfo(table.dtype)
    return table.clamp(limits.tiny, 1 - limits.eps / 2).logit()


def predicted(logits: Tensor) -> Tensor:
    """Predicted class "b"; a one-logit model predicts class 1 where its logit is positive."""
    return (logits[:, 0] > 0).long() if logits.shape[1] == 1 else logits.argmax(1)


def probabilities(logits: Tensor) -> Tensor:
    """Tensor "b k": softmax, or (1 - sigmoid, sigmoid) for a one-logit model."""
    if logits.shape[1] == 1:
        return torch.cat([(-logits).sigmoid(), logits.sigmoid()], dim=1)
    return logits.softmax(1)


def class_scores(logits: Tensor, targets: Tensor) -> Tensor:
    """Logit "b" of each image's target; class 0 of a one-logit model is -z."""
    if logits.shape[1] == 1:
        return torch.where(targets == 1, logits[:, 0], -logits[:, 0])
    return logits.gather(1, targets[:, None])[:, 0]
