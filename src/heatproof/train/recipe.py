"""How a network is trained: a recipe is a list of phases, and every number in it is a setting.

    loss      cross-entropy with label smoothing and class weights, plus a penalty where one is given
    schedule  "cosine": lr (1 + cos(pi e / E)) / 2 for the epochs e = 0 .. E-1 of a phase; "constant": lr
    clip      the norm of all trained gradients together is scaled down to this where it is larger

A one-logit model is trained as the two-class model with logits (0, z), whose softmax is (1 - sigmoid,
sigmoid) of z, so that smoothing and weights mean the same for both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from heatproof.errors import InputError, did_you_mean
from heatproof.train.history import CHECKPOINTS as CHECKPOINTS
from heatproof.train.history import SCHEDULES as SCHEDULES
from heatproof.train.history import Epoch as Epoch
from heatproof.train.history import GradientNorm as GradientNorm
from heatproof.train.history import History as History

if TYPE_CHECKING:
    from torch import Tensor, nn

    from heatproof.models.model import Model
    from heatproof.train.data import Data
    from heatproof.train.parts import Depth

OPTIMISERS = ("adam", "adamw", "sgd")
BALANCED = "balanced"


class TrainedBatch(NamedTuple):
    """One training batch behind its forward pass, as a penalty sees it."""

    model: Model
    images: Tensor  # "b c h w", model-ready
    labels: Tensor  # "b"
    masks: Mapping[str, Tensor]  # each "b h w"
    logits: Tensor  # "b k"
    outputs: Mapping[str, Tensor]  # of the layers that were asked for, with their graph


class Penalty(Protocol):
    """What a phase adds to the cross-entropy. A dataclass, so that its settings are part of the recipe."""

    def prepare(self, model: Model, image: Tensor, data: Data) -> tuple[str, ...]:
        """Refuse what cannot work, and name the layers whose outputs are needed."""

    def __call__(self, step: TrainedBatch) -> Tensor:
        """A number with a graph."""


@dataclass(frozen=True)
class Phase:
    """Some epochs with one optimiser over the same parameters."""

    epochs: int
    lr: float
    trainable: Depth = "all"  # head, L4, L3-L4, all, or names of modules
    name: str = "train"
    optimiser: str = "adam"
    schedule: str = "cosine"
    weight_decay: float = 0.0
    momentum: float = 0.9  # sgd only
    label_smoothing: float = 0.0
    clip: float | None = None
    class_weights: tuple[float, ...] | str | None = None  # one per class, or "balanced"
    penalty: Penalty | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.trainable, str):
            object.__setattr__(self, "trainable", tuple(self.trainable))
        for what, value, known in (
            ("optimiser", self.optimiser, OPTIMISERS),
            ("schedule", self.schedule, SCHEDULES),
        ):
            if value not in known:
                raise InputError(f"unknown {what} {value!r}; {did_you_mean(value, known)}")
        if self.epochs < 1:
            raise InputError(f"phase {self.name!r} needs at least one epoch; got {self.epochs}")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise InputError(f"the learning rate of phase {self.name!r} must be above 0; got {self.lr}")
        if not 0 <= self.label_smoothing < 1:
            raise InputError(f"label smoothing lies in [0, 1); got {self.label_smoothing}")
        if self.clip is not None and not self.clip > 0:
            raise InputError(f"clip must be above 0, or None for no clipping; got {self.clip}")
        if isinstance(self.class_weights, str) and self.class_weights != BALANCED:
            raise InputError(
                f"class weights are one number per class or {BALANCED!r}; got {self.class_weights!r}"
            )

    def rate(self, epoch: int) -> float:
        """The learning rate of the phase's own epoch, counted from 0.

        >>> [round(Phase(epochs=4, lr=1.0).rate(e), 3) for e in range(4)]
        [1.0, 0.854, 0.5, 0.146]
        """
        if self.schedule == "constant":
            return self.lr
        return self.lr * (1 + math.cos(math.pi * epoch / self.epochs)) / 2

    def make_optimiser(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        options: dict[str, Any] = {"lr": self.lr, "weight_decay": self.weight_decay}
        if self.optimiser == "sgd":
            return torch.optim.SGD(parameters, momentum=self.momentum, **options)
        kind = torch.optim.Adam if self.optimiser == "adam" else torch.optim.AdamW
        return kind(parameters, **options)

    def weights(self, labels: Tensor, classes: int) -> Tensor | None:
        """ "k" class weights. Balanced: n / (k n_c), so that every class weighs the same in total."""
        if self.class_weights is None:
            return None
        if self.class_weights == BALANCED:
            counts = torch.bincount(labels, minlength=classes)
            return len(labels) / (classes * counts.clamp(min=1).float())
        given = torch.tensor([float(weight) for weight in self.class_weights], device=labels.device)
        if len(given) != classes or not (given >= 0).all() or not given.sum() > 0:
            raise InputError(
                f"class weights are {classes} numbers from 0 on, not all 0; got {given.tolist()}"
            )
        return given

    def cross_entropy(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """Mean over the batch (weighted, where there are weights)."""
        if logits.shape[1] == 1:
            logits = torch.cat([torch.zeros_like(logits), logits], dim=1)
        loss = torch.nn.functional.cross_entropy
        return loss(logits, labels, weights, label_smoothing=self.label_smoothing)


@dataclass(frozen=True)
class Recipe:
    """Phases one after the other, and how batches are made."""

    phases: tuple[Phase, ...]
    batch_size: int = 32
    flip: bool = False  # half of the training pictures mirrored left to right, with their masks
    amp: bool = False  # bfloat16 where torch's autocast allows it
    transforms: bool = False  # each picture, each time, under one of COSE's transforms or none

    def __post_init__(self) -> None:
        if not self.phases:
            raise InputError("a recipe needs at least one phase")
        if self.batch_size < 2:
            raise InputError(f"training needs batches of 2 or more pictures; got {self.batch_size}")

    @property
    def epochs(self) -> int:
        return sum(phase.epochs for phase in self.phases)

    def at(self, epoch: int) -> tuple[int, int]:
        """The phase of an epoch (counted from 1), and which of the phase's own epochs it is; both from 0."""
        own = epoch - 1
        for number, phase in enumerate(self.phases):
            if own < phase.epochs:
                return number, own
            own -= phase.epochs
        raise InputError(f"there is no epoch {epoch}; the recipe has epochs 1 to {self.epochs}")

    def described(self) -> str:
        """Every setting as text, so that a resumed training can tell whether it is the same."""
        said = asdict(self)
        if not self.transforms:  # recipes of trainings that began before there was a choice read the same
            del said["transforms"]
        return json.dumps(said, sort_keys=True, default=repr)
