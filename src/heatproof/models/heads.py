"""Heads of classes, values and embeddings: how an output becomes a table "b k", and what columns mean.

A target is a column (docs/heads.md). Everything behind the network works on the table and on one column
number per image, whatever the network returns. The logits in front of a final softmax differ from log p by
one number per image: probabilities and predictions are the same, a gradient is that of log p.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from heatproof.errors import InputError, ModelError
from heatproof.images.findings import THRESHOLD, finding_limits
from heatproof.models.running import FunctionsWatched, is_function

LINEAR = ("linear", "conv2d", "matmul", "addmm", "mm", "bmm", "einsum")
NORMS = ("layer_norm", "batch_norm", "group_norm", "instance_norm", "rms_norm")
SIGMOIDS = ("sigmoid", "sigmoid_", "special_expit")
ROUNDING = 1e-4
TOLERANCE = 0.1
VECTORS = ("image_embeds", "pooler_output", "embeddings")  # of a Hugging Face encoder's record


class Columns(NamedTuple):
    """Resolved targets: column numbers, not classes."""

    numbers: Tensor  # "b"


class LastStep(FunctionsWatched):
    """Record which torch function wrote which memory, in the first pass of a network."""

    def __init__(self) -> None:
        super().__init__(self._note)
        self.made: dict[int, str] = {}
        self.weighted = ""  # the last function that had weights

    def _note(self, func: Any, args: Any, _kwargs: Any, result: Any) -> None:
        name = getattr(func, "__name__", "")
        if name.strip("_") in (*LINEAR, *NORMS):
            self.weighted = name.strip("_")
        if isinstance(result, Tensor) and (memory := _memory(result)) is not None:
            is_view = any(isinstance(a, Tensor) and _memory(a) == memory for a in args)
            if name in SIGMOIDS or not is_view:
                self.made[memory] = name

    def of(self, tensor: Tensor) -> str:
        """Name of the function that computed this tensor, or the tensor it is a view of."""
        return self.made.get(_memory(tensor) or 0, "")

    def is_sigmoid(self, tensor: Tensor) -> bool:
        return self.of(tensor) in SIGMOIDS


def _memory(tensor: Tensor) -> int | None:
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # sparse and other tensors without a storage
        return None


@dataclass(frozen=True)
class Head:
    """Interface of heads. by_itself: determined by the first pass, not given by the user."""

    name: ClassVar[str] = ""
    output: ClassVar[str] = ""  # what it is, in words
    chance: ClassVar[bool] = False  # whether it has probabilities
    names_classes: ClassVar[bool] = False  # whether its prediction is a class, or a set of them
    one_class: ClassVar[bool] = False  # whether it is one class

    by_itself: bool = False

    @property
    def meaning(self) -> str:
        """The output in words, to report what was assumed."""
        return self.output

    def table(self, output: Any, count: int) -> Tensor:
        """Columns "b k" of the network's output for this number of images."""
        return rows_of(output, count)

    def settled(self, module: nn.Module, output: Any, table: Tensor, last: LastStep) -> Head:
        """This head, once the first pass has determined the network's last function."""
        return self

    def logits(self, table: Tensor) -> Tensor:
        """The table, where a final softmax or sigmoid is undone."""
        return table

    def targets(self, columns: int) -> int:
        """Number of targets for this number of columns."""
        return max(2, columns) if self.one_class else columns

    def scores(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Tensor "b": the column of each image's target, whose gradient is taken."""
        return logits.gather(1, targets[:, None])[:, 0]

    def measured(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Tensor "b": probability of each image's target, or its value where there is no probability."""
        if not self.chance:
            return self.scores(logits, targets)
        return self.probabilities(logits).gather(1, targets[:, None])[:, 0]

    def probabilities(self, logits: Tensor) -> Tensor:
        """Probabilities "b k"."""
        raise self.refused("probabilities")

    def predicted(self, logits: Tensor) -> Tensor:
        """Tensor "b": the column explained by default."""
        return logits.argmax(1)

    def labels(self, columns: Tensor) -> Tensor:
        """Tensor "b": the classes that columns belong to."""
        return columns

    def same(self, before: Tensor, after: Tensor, targets: Tensor) -> Tensor:
        """Bools "b": whether two tables of logits are the same prediction, where targets are explained."""
        return self.predicted(before) == self.predicted(after)

    def called(self, label: int) -> str:
        """A text for a class that has no name."""
        return f"class {label}"

    def unanswered(self, logits: Tensor) -> Tensor:
        """Bool tensor "b": rows that are NaN or infinite; a class may be -inf if others are finite."""
        values = self.probabilities(logits) if self.chance else logits
        return (~values.isfinite() | logits.isposinf()).any(1)

    def need_classes(self, who: str) -> None:
        """Raise InputError if the head has no classes to compare with labels."""
        if not self.names_classes:
            raise self.refused(f"classes, which {who} needs")

    def need_one_class(self, who: str) -> None:
        """Raise InputError if an image may have other than exactly one class."""
        if not self.one_class:
            raise InputError(
                f"{who} needs a network that names one class for each image, and the head here is "
                f"{self.name!r}; name another head, or use heatproof audit or run, which support all heads"
            )

    def refused(self, what: str) -> InputError:
        return InputError(
            f"the network's head is {self.name!r}, which has no {what}; take a metric that needs none, "
            "or name another head"
        )


def rows_of(output: Any, count: int) -> Tensor:
    """Tensor "b k", one row per image, from what a classifier returns: a tensor, tuple or record."""
    output = logits_of(output)
    if isinstance(output, (tuple, list)) and output:
        rows = [t for t in output if isinstance(t, Tensor) and t.ndim == 2 and t.is_floating_point()]
        if others := [t for t in rows if t is not output[0]]:
            shapes = " and ".join(str(tuple(t.shape)) for t in (output[0], *others) if isinstance(t, Tensor))
            raise ModelError(
                f"the model returns several tables {shapes}, each with a row per image, and only one can be "
                "explained; wrap it to return the logits you mean"
            )
        output = output[0]
    if not isinstance(output, Tensor):
        raise ModelError(
            f"the model returned {type(output).__name__}, not logits; wrap it to return a tensor"
        )
    shape = tuple(output.shape)
    if output.ndim == 1:
        output = output[:, None]
    if output.ndim != 2:
        raise ModelError(f"the model returned shape {shape}; a classifier returns 'b k' logits")
    if len(output) != count:
        raise ModelError(
            f"the model returned shape {shape} for {count} image{'s' * (count != 1)}; "
            "wrap it to return one row of logits per image"
        )
    if output.shape[1] == 0:
        raise ModelError("the model returned no logits: it has 0 classes; build it with its num_classes")
    return cast(Tensor, output)


def logits_of(output: Any) -> Any:
    """The logits of a record: Hugging Face's, or torchvision's {"out": ...}."""
    if isinstance(output, dict):
        output = output.get("logits", output.get("out", output))
    return getattr(output, "logits", output)


@dataclass(frozen=True)
class OneOfMany(Head):
    """One class is right: softmax over k, or one logit for two classes."""

    name: ClassVar[str] = "softmax"
    names_classes: ClassVar[bool] = True
    one_class: ClassVar[bool] = True
    chance: ClassVar[bool] = True
    output: ClassVar[str] = "logits, made probabilities by a softmax"

    def settled(self, module: nn.Module, output: Any, table: Tensor, last: LastStep) -> Head:
        columns, squashed = table.shape[1], in_unit_interval(table)
        if isinstance(self, OneLogit) and columns != 1:
            raise ModelError(f"the head is set to one logit, but the network has {columns} outputs")
        if isinstance(self, OneProbability):
            return self
        if columns == 1:
            return (OneProbability if squashed and last.is_sigmoid(table) else OneLogit)(self.by_itself)
        rounding = max(ROUNDING, 2 * torch.finfo(table.dtype).eps)
        sums = table.detach().sum(1, dtype=torch.float64)
        sum_to_1 = squashed and bool((sums - 1).abs().max() <= rounding)
        return (Probabilities if sum_to_1 and last.of(table) not in LINEAR else Softmax)(self.by_itself)

    def scores(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Logit "b" of each image's target; class 0 of a one-logit model is -z."""
        if logits.shape[1] == 1:
            return torch.where(targets == 1, logits[:, 0], -logits[:, 0])
        return super().scores(logits, targets)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Tensor "b k": softmax, or (1 - sigmoid, sigmoid) for a one-logit model."""
        if logits.shape[1] == 1:
            return torch.cat([(-logits).sigmoid(), logits.sigmoid()], dim=1)
        return logits.softmax(1)

    def predicted(self, logits: Tensor) -> Tensor:
        """Predicted class "b"; a one-logit model predicts class 1 where its logit is positive."""
        return (logits[:, 0] > 0).long() if logits.shape[1] == 1 else logits.argmax(1)


class Softmax(OneOfMany):
    """k logits."""


class Undetermined(OneOfMany):
    """The head of a network before its first pass, read as that of a plain classifier."""


class OneLogit(OneOfMany):
    """One logit, of class 1."""

    name = "one logit"
    output = "one logit, of class 1, made a probability by a sigmoid"


class Probabilities(OneOfMany):
    """k numbers that sum to 1, read as log p, whose softmax is p again."""

    name = "probabilities"
    output = "probabilities, explained through their logarithms"

    def logits(self, table: Tensor) -> Tensor:
        return table.clamp(min=torch.finfo(table.dtype).tiny).log()


class OneProbability(OneLogit):
    """One number p between 0 and 1, of class 1, read as log p / (1 - p), whose sigmoid is p again."""

    name = "one probability"
    output = "one probability, of class 1, explained through its logit"

    def logits(self, table: Tensor) -> Tensor:
        return undone_sigmoid(table)


class_scores, predicted, probabilities = Softmax().scores, Softmax().predicted, Softmax().probabilities


@dataclass(frozen=True)
class Multilabel(Head):
    """k labels, any number of which may be present.

    The prediction is a set: the labels whose probability is at least their threshold. By default the
    explained label is that which lies highest above its threshold, in log-odds.

    Args:
        thresholds: the least probability at which a label is predicted: one for all, or one each.
        sigmoids: whether the network ends in them; determined by its first pass.
    """

    name: ClassVar[str] = "multilabel"
    names_classes: ClassVar[bool] = True
    chance: ClassVar[bool] = True

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
        finding_limits(self.thresholds, table.shape[1])
        squashed = last.is_sigmoid(table) or is_function(module)  # whose last step is unknown
        return replace(self, sigmoids=in_unit_interval(table) and squashed)

    def logits(self, table: Tensor) -> Tensor:
        return undone_sigmoid(table) if self.sigmoids else table

    def probabilities(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    def positive(self, logits: Tensor) -> Tensor:
        """Bool tensor "b k": the prediction, labels whose probability is at least their threshold."""
        limits = finding_limits(self.thresholds, logits.shape[1])
        return self.probabilities(logits) >= logits.new_tensor(limits)

    def predicted(self, logits: Tensor) -> Tensor:
        if isinstance(self.thresholds, float | int):
            return logits.argmax(1)
        odds = [math.log(t / (1 - t)) for t in finding_limits(self.thresholds, logits.shape[1])]
        return (logits - logits.new_tensor(odds)).argmax(1)

    def same(self, before: Tensor, after: Tensor, targets: Tensor) -> Tensor:
        return (self.positive(before) == self.positive(after)).all(1)


def in_unit_interval(table: Tensor) -> bool:
    return bool(((table >= 0) & (table <= 1)).all())


def undone_sigmoid(table: Tensor) -> Tensor:
    limits = torch.finfo(table.dtype)
    return table.clamp(limits.tiny, 1 - limits.eps / 2).logit()


@dataclass(frozen=True)
class Regression(Head):
    """One value, or several, for each image; column i: v_i, column d + i: -v_i, what lowers a value.

    Args:
        tolerance: how far a value may move and still count as the same prediction.
    """

    name: ClassVar[str] = "regression"

    tolerance: float = TOLERANCE

    def __post_init__(self) -> None:
        if not self.tolerance >= 0:
            raise InputError(f"a tolerance is a number from 0 on, in the value's units; got {self.tolerance}")

    @property
    def meaning(self) -> str:
        return f"values, explained as they are; within {self.tolerance:g} they count as the same prediction"

    def logits(self, table: Tensor) -> Tensor:
        return torch.cat([table, -table], 1)

    def predicted(self, logits: Tensor) -> Tensor:
        return torch.zeros(len(logits), dtype=torch.long, device=logits.device)

    def called(self, label: int) -> str:
        return f"value {label}"

    def same(self, before: Tensor, after: Tensor, targets: Tensor) -> Tensor:
        moved = self.scores(after, targets) - self.scores(before, targets)
        return moved.abs() <= self.tolerance


@dataclass(frozen=True, eq=False)
class Function(Regression):
    """A user's function of the network's output, one value for each image: any scalar."""

    name: ClassVar[str] = "callable"

    function: Callable[[Any], Tensor] = field(kw_only=True)

    @property
    def meaning(self) -> str:
        named = getattr(self.function, "__name__", "")
        what = f"a function of the output, {named}" if named.isidentifier() else "a function of the output"
        return f"{what}; within {self.tolerance:g} its values count as the same prediction"

    def table(self, output: Any, count: int) -> Tensor:
        values = self.function(output)
        if not isinstance(values, Tensor) or tuple(values.shape) != (count,):
            shape = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise InputError(
                f"a target that is a function returns one number per image, shape ({count},); got {shape}"
            )
        return values[:, None]


@dataclass(frozen=True, eq=False)
class Embedding(Head):
    """Similarity to references (other images, prototypes of classes, texts); column t: the cosine with t.

    Args:
        references: "t d", vectors from the same space as the network's own.
        tolerance: of one reference: how far the similarity may move and be the same prediction.
    """

    name: ClassVar[str] = "embedding"

    references: Tensor | None = None
    tolerance: float = TOLERANCE

    def __post_init__(self) -> None:
        if self.references is not None:
            vectors = torch.as_tensor(self.references).detach()
            if vectors.ndim != 2 or 0 in vectors.shape or not torch.isfinite(vectors.float()).all():
                raise InputError(f"references are vectors 't d' of numbers; got shape {tuple(vectors.shape)}")
            object.__setattr__(self, "references", vectors)

    @property
    def meaning(self) -> str:
        count = 0 if self.references is None else len(self.references)
        return f"an embedding, explained by its cosine with {count} reference{'s' * (count != 1)}"

    def settled(self, module: nn.Module, output: Any, table: Tensor, last: LastStep) -> Head:
        assert self.references is not None  # checked by table()
        return replace(self, references=self.references.to(table.device))

    def table(self, output: Any, count: int) -> Tensor:
        if self.references is None:
            raise InputError(
                "an embedding is explained by its similarity to something; give load_model references='t d' "
                "vectors, or head=Embedding(references)"
            )
        vectors = vectors_of(output, count)
        references = self.references.to(vectors)
        if vectors.shape[1] != references.shape[1]:
            raise InputError(
                f"references have {references.shape[1]} numbers, the network's vectors {vectors.shape[1]}; "
                "make them with the same network"
            )
        return normalize(vectors, dim=1) @ normalize(references, dim=1).T

    def called(self, label: int) -> str:
        return f"reference {label}"

    def same(self, before: Tensor, after: Tensor, targets: Tensor) -> Tensor:
        if before.shape[1] > 1:
            return self.predicted(before) == self.predicted(after)
        return (after - before)[:, 0].abs() <= self.tolerance


def vectors_of(output: Any, count: int) -> Tensor:
    """Tensor "b d" in what an encoder returns: a tensor, or a record of Hugging Face's."""
    for name in VECTORS:
        vectors = output.get(name) if isinstance(output, dict) else getattr(output, name, None)
        if isinstance(vectors, Tensor) and vectors.ndim == 2:
            return rows_of(vectors, count)
    if isinstance(output, Tensor) and output.ndim != 2:
        raise ModelError(
            f"the encoder returned shape {tuple(output.shape)}, not one vector per image 'b d'; pool it, or "
            "wrap it to return its class token"
        )
    return rows_of(output, count)
