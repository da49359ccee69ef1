"""A head: how the output of a network becomes a table "b k" of scalars, and what its columns mean.

A target is a column. Everything behind the network (the shared pass, the queue, methods, metrics) works on
the table and on one column number per image, whatever the network returns; a head defines the rest:

    table         the columns, out of a tensor, a tuple, a record or a list of boxes
    logits        the same where a final softmax or sigmoid is undone
    scores        "b": the explained scalar, whose gradient is taken
    measured      "b": what methods and metrics measure that hide pixels: a probability where there is one
    probabilities "b k", for gold lists, accuracy, AUC and all that needs one; an error where there is none
    predicted     "b": the column that is explained by default
    same          "b": whether two outputs are the same prediction
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from heatproof.errors import InputError, ModelError

LINEAR = ("linear", "conv2d", "matmul", "addmm", "mm", "bmm", "einsum")
NORMS = ("layer_norm", "batch_norm", "group_norm", "instance_norm", "rms_norm")
SIGMOIDS = ("sigmoid", "sigmoid_", "special_expit")


class Columns(NamedTuple):
    """Resolved targets: column numbers, not classes."""

    numbers: Tensor  # "b"


class LastStep(TorchFunctionMode):
    """Record which torch function wrote which memory, in the first pass of a network."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, str] = {}
        self.weighted = ""  # the last function that had weights

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name.strip("_") in (*LINEAR, *NORMS):
            self.weighted = name.strip("_")
        if isinstance(result, Tensor) and (memory := _memory(result)) is not None:
            is_view = any(isinstance(a, Tensor) and _memory(a) == memory for a in args)
            if name in SIGMOIDS or not is_view:
                self.made[memory] = name
        return result

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
    chance: ClassVar[str] = ""  # the function that gives probabilities; "" if there are none
    same_if: ClassVar[str] = "the same class is the most likely one"
    names_classes: ClassVar[bool] = False  # whether its prediction is a class, or a set of them
    one_class: ClassVar[bool] = False  # whether it is one class
    asks: ClassVar[bool] = False  # whether targets are regions or boxes in the clean images (see dense.py)

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
        return table

    def targets(self, columns: int) -> int:
        """Number of targets for this number of columns."""
        return columns

    def scores(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Tensor "b": the column of each image's target."""
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

    @property
    def of_logits(self) -> Head | None:
        """The head of a network that returns these logits; None where its first pass determines it."""
        return None

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
