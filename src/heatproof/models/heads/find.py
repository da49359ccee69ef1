"""Which head a network has: told by name, or found in its first pass where that is safe.

    k numbers                      softmax, or probabilities where they sum to 1 and no linear layer made them
    one number                     one logit, or one probability where a sigmoid made it
    k numbers made by sigmoids     multilabel; also where Hugging Face's problem_type or a Keras graph says so
    problem_type "regression"      regression

Numbers alone cannot tell sigmoids from logits that happen to lie in [0, 1]; the function that made them can.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from heatproof.errors import InputError, did_you_mean
from heatproof.models.heads.base import Head
from heatproof.models.heads.classes import (
    Multilabel,
    OneLogit,
    OneOfMany,
    OneProbability,
    Probabilities,
    Softmax,
    in_unit_interval,
    multilabel,
)

SIGMOIDS = ("sigmoid", "sigmoid_", "special_expit")
HEADS: dict[str, type[Head]] = {
    head.name: head for head in (Softmax, OneLogit, Probabilities, OneProbability, Multilabel)
}
ALIASES = {"logit": "one logit", "multi-label": "multilabel"}


class LastStep(TorchFunctionMode):
    """Sees each torch function that runs and remembers which one filled which memory."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, str] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
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
    except (RuntimeError, NotImplementedError):  # sparse and other tensors without a storage
        return None


def named_head(name: str) -> Head:
    """The head of that name, as TOML and the command line give it."""
    known = ALIASES.get(name, name)
    if known not in HEADS:
        names = ["softmax", "logit", *(n for n in HEADS if n not in ("softmax", "one logit"))]
        raise InputError(f"unknown head {name!r}; {did_you_mean(name, names)}")
    return HEADS[known]()


def chosen_head(head: str | Head | None, thresholds: float | Sequence[float] | None = None) -> Head | None:
    """The head that a person names, with the settings that are given beside the name."""
    chosen = named_head(head) if isinstance(head, str) else head
    if thresholds is None:
        return chosen
    if chosen is not None and not isinstance(chosen, Multilabel):
        raise InputError(f"thresholds are for a multilabel head, not for {chosen.name!r}; leave them out")
    return multilabel(thresholds)


def read_first(
    told: Head | None, module: nn.Module, output: Any, count: int, last: LastStep
) -> tuple[Head, Tensor]:
    """The head, and the table "b k" of a first pass in which `last` has watched the network."""
    head = told or OneOfMany(by_itself=True)
    table = head.table(output, count)
    if told is None:
        head = _classifier(module, table, last)
    return head.settled(module, output, table, last), table


def _classifier(module: nn.Module, table: Tensor, last: LastStep) -> Head:
    """Hugging Face's configuration says it, or the last activation of a Keras graph, left out of the pass."""
    kind = getattr(getattr(module, "config", None), "problem_type", None)
    if table.shape[1] > 1 and (
        kind == "multi_label_classification"
        or getattr(module, "final_activation", "") in ("sigmoid", "log_sigmoid")
        or (in_unit_interval(table) and last.is_sigmoid(table))
    ):
        return Multilabel(by_itself=True)
    return OneOfMany(by_itself=True)
