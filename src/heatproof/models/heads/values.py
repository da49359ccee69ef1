"""Heads without classes: values, a user's function of the output, similarities of embeddings.

    regression   d values v       column i: v_i, column d + i: -v_i, to explain what lowers a value
    callable     targets=f        f(output) -> "b", one value for each image, read as a regression's
    embedding    "b d" vectors    column t: the cosine between the image's vector and reference t

They have no probability. Methods and metrics that hide pixels measure the value itself; curves are shares of
the way from the value of the hidden image to that of the image. Accuracy, AUC, gold lists and all that needs
a probability are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from heatproof.errors import InputError, ModelError
from heatproof.models.heads.base import Head, LastStep, rows_of

TOLERANCE = 0.1
VECTORS = ("image_embeds", "pooler_output", "embeddings")  # of a Hugging Face encoder's record


@dataclass(frozen=True)
class Regression(Head):
    """One value, or several, for each image.

    Args:
        tolerance: how far a value may move and still count as the same prediction.
    """

    name: ClassVar[str] = "regression"
    same_if: ClassVar[str] = "the value moves by no more than the tolerance"

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
    """A user's function of the network's output: any scalar."""

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
    """Similarity to references: other images, prototypes of classes, texts.

    Args:
        references: "t d", vectors from the same space as the network's own.
        tolerance: of one reference: how far the similarity may move and be the same prediction.
    """

    name: ClassVar[str] = "embedding"
    same_if: ClassVar[str] = (
        "the same reference is the nearest; of one, the similarity stays in the tolerance"
    )

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
        return nn.functional.normalize(vectors, dim=1) @ nn.functional.normalize(references, dim=1).T

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
