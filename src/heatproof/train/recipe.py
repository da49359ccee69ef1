"""Recipes and histories of trainings; without torch, for settings and verdicts.

    loss      cross-entropy with label smoothing and class weights, plus an optional penalty
    schedule  "cosine": lr (1 + cos(pi e / E)) / 2 for the epochs e = 0 .. E-1 of a phase; "constant": lr
    clip      upper limit of the norm of all trained gradients together

A one-logit model is trained as the two-class model with logits (0, z), whose softmax is (1 - sigmoid,
sigmoid) of z, so that smoothing and weights mean the same for both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, NamedTuple, Protocol

from heatproof.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor

    from heatproof.models.model import Model
    from heatproof.train.loop import Data

CHECKPOINTS = (1, 5, 10, 15, 20, 25, 30)  # epochs of elangovan2026cscore whose weights are stored
SCHEDULES = ("cosine", "constant")
OPTIMISERS = ("adam", "adamw", "sgd")
BALANCED = "balanced"
Depth = str | tuple[str, ...]  # head, L4, L3-L4, all, or names of modules


class GradientNorm(NamedTuple):
    """Norm of a layer's gradients over the steps of an epoch."""

    mean: float
    highest: float
    deviation: float = 0.0  # over the steps; 0 in logs of heatproof 0.2


@dataclass(frozen=True)
class Epoch:
    """Results of one epoch: mean loss per training image, accuracy and AUC of the validation set."""

    epoch: int  # from 1 on, over all phases
    phase: str
    loss: float
    accuracy: float
    auc: float
    lr: float
    seconds: float
    gradients: Mapping[str, GradientNorm] = field(default_factory=dict, repr=False)  # by layer, where logged
    loss_deviation: float = 0.0  # standard deviation of the loss over the batches; 0 in logs of heatproof 0.2


@dataclass(frozen=True)
class History:
    """The epochs of a training, in order."""

    epochs: tuple[Epoch, ...] = ()

    def __len__(self) -> int:
        return len(self.epochs)

    def to_json(self) -> str:
        return json.dumps([asdict(epoch) for epoch in self.epochs], indent=1)

    @staticmethod
    def from_json(text: str) -> History:
        names = {f.name for f in fields(Epoch)}
        rows = [{k: v for k, v in row.items() if k in names} for row in json.loads(text)]
        for row in rows:
            row["gradients"] = {k: GradientNorm(*norm) for k, norm in row.get("gradients", {}).items()}
        return History(tuple(Epoch(**row) for row in rows))


class TrainedBatch(NamedTuple):
    """A training batch after its forward pass, as a penalty receives it."""

    model: Model
    images: Tensor  # "b c h w", model-ready
    labels: Tensor  # "b"
    masks: Mapping[str, Tensor]  # each "b h w"
    logits: Tensor  # "b k"
    outputs: Mapping[str, Tensor]  # of the requested layers, with their graph


class Penalty(Protocol):
    """A term that a phase adds to the cross-entropy; a dataclass, so that its settings are in the recipe."""

    def prepare(self, model: Model, image: Tensor, data: Data) -> tuple[str, ...]:
        """Validate model and data, and return the layers whose outputs are needed."""

    def __call__(self, step: TrainedBatch) -> Tensor:
        """Return a scalar with a graph."""


@dataclass(frozen=True)
class Phase:
    """Epochs with one optimiser over the same parameters."""

    epochs: int
    lr: float
    trainable: Depth = "all"
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
        for key, known in (("optimiser", OPTIMISERS), ("schedule", SCHEDULES)):
            if (value := getattr(self, key)) not in known:
                raise InputError(f"unknown {key} {value!r}; {did_you_mean(value, known)}")
        if self.epochs < 1:
            raise InputError(f"phase {self.name!r} needs at least one epoch; got {self.epochs}")
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise InputError(f"the learning rate of phase {self.name!r} must be above 0; got {self.lr}")
        if not 0 <= self.label_smoothing < 1:
            raise InputError(f"label smoothing lies in [0, 1); got {self.label_smoothing}")
        if self.clip is not None and not self.clip > 0:
            raise InputError(f"clip must be above 0, or None for no clipping; got {self.clip}")
        weights = self.class_weights
        if isinstance(weights, str) and weights != BALANCED:
            raise InputError(f"class weights are one number per class or {BALANCED!r}; got {weights!r}")

    def rate(self, epoch: int) -> float:
        """Learning rate in an epoch of the phase, counted from 0.

        >>> [round(Phase(epochs=4, lr=1.0).rate(e), 3) for e in range(4)]
        [1.0, 0.854, 0.5, 0.146]
        """
        if self.schedule == "constant":
            return self.lr
        return self.lr * (1 + math.cos(math.pi * epoch / self.epochs)) / 2


@dataclass(frozen=True)
class Recipe:
    """Phases one after the other, and how batches are made."""

    phases: tuple[Phase, ...]
    batch_size: int = 32
    flip: bool = False  # mirror half of the training images left to right, with their masks
    amp: bool = False  # bfloat16 where torch's autocast allows it
    transforms: bool = False  # apply one of COSE's transforms, or none, to each image in each epoch

    def __post_init__(self) -> None:
        if not self.phases:
            raise InputError("a recipe needs at least one phase")
        if self.batch_size < 2:
            raise InputError(f"training needs batches of 2 or more images; got {self.batch_size}")

    @property
    def epochs(self) -> int:
        return sum(phase.epochs for phase in self.phases)

    def at(self, epoch: int) -> tuple[int, int]:
        """Number of the phase of an epoch (counted from 1), and the epoch's number in it; both from 0."""
        own = epoch - 1
        for number, phase in enumerate(self.phases):
            if own < phase.epochs:
                return number, own
            own -= phase.epochs
        raise InputError(f"there is no epoch {epoch}; the recipe has epochs 1 to {self.epochs}")

    def described(self) -> str:
        """Every setting as JSON, by which a resumed training checks that it is the same."""
        settings = asdict(self)
        if not self.transforms:  # as in recipes stored before this setting existed
            del settings["transforms"]
        return json.dumps(settings, sort_keys=True, default=repr)
