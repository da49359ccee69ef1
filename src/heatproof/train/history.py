"""What a training came to, epoch by epoch; without torch, for all who read one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import NamedTuple

CHECKPOINTS = (1, 5, 10, 15, 20, 25, 30)  # epochs of elangovan2026cscore whose weights are kept
SCHEDULES = ("cosine", "constant")


class GradientNorm(NamedTuple):
    """Of a layer's gradients, over the steps of an epoch."""

    mean: float
    highest: float


@dataclass(frozen=True)
class Epoch:
    """What one epoch came to: mean loss per training picture, accuracy and AUC of the validation set."""

    epoch: int  # from 1 on, over all phases
    phase: str
    loss: float
    accuracy: float
    auc: float
    lr: float
    seconds: float
    gradients: Mapping[str, GradientNorm] = field(default_factory=dict, repr=False)  # by layer, where logged


@dataclass(frozen=True)
class History:
    """The epochs of a training, in order."""

    epochs: tuple[Epoch, ...] = field(default_factory=tuple)

    def __len__(self) -> int:
        return len(self.epochs)

    def to_json(self) -> str:
        return json.dumps([asdict(epoch) for epoch in self.epochs], indent=1)

    @staticmethod
    def from_json(text: str) -> History:
        names = {f.name for f in fields(Epoch)}
        known = [{k: v for k, v in row.items() if k in names} for row in json.loads(text)]
        norms = [
            {layer: GradientNorm(*norm) for layer, norm in row.pop("gradients", {}).items()} for row in known
        ]
        return History(tuple(Epoch(**row, gradients=n) for row, n in zip(known, norms, strict=True)))
