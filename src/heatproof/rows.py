"""Rows of results, and the units of work that they are written in; without torch, for all who read a run."""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from heatproof.errors import InputError

RANDOM, PRETRAINED = "random", "pretrained"  # names of checkpoints without a file


@dataclass(frozen=True)
class Score:
    """One row of results. A value that is not defined is NaN and says why in `reason`.

    Args:
        model, checkpoint: their names.
        image: its name; "" for a row about a whole class or checkpoint.
        label, explained: the true class, and the one that was explained.
        method, metric: their names, with their options.
        value, reason: the number, and one sentence where it is NaN.
    """

    model: str
    checkpoint: str
    image: str
    label: int | None
    explained: int | None
    method: str
    metric: str
    value: float
    reason: str = ""

    def __post_init__(self) -> None:
        if math.isnan(self.value) and not self.reason:
            raise InputError(f"{self.metric} of {self.method} is NaN without a reason")


@dataclass(frozen=True)
class Unit:
    """The smallest piece of a run: it is done when the seal named after its hash stands.

    Args:
        checkpoint, images: its name; the first image, and the last + 1.
        methods, metrics: what is made of them.
        seed: of everything that is drawn.
        origin: hash of the weights, pictures, code and settings behind it, where they are known.
    """

    checkpoint: str
    images: tuple[int, int]
    methods: tuple[str, ...]
    metrics: tuple[str, ...]
    seed: int = 0
    origin: str = ""

    @property
    def image_count(self) -> int:
        return self.images[1] - self.images[0]

    @property
    def record(self) -> dict[str, Any]:
        """Its own fields, without those of a subclass, for its seal and its hash."""
        return {name: getattr(self, name) for name in Unit.__dataclass_fields__}

    @cached_property
    def hash(self) -> str:
        content = {key: value for key, value in self.record.items() if key != "origin" or value}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def of_prediction(method: str) -> str:
    """The name under which maps of the predicted class are stored, where the label is another class."""
    return f"{method} of the prediction"


def epoch_of(name: str) -> int | None:
    """The last number in a checkpoint's name.

    >>> epoch_of("resnet50_epoch-07"), epoch_of("best")
    (7, None)
    """
    numbers = re.findall(r"\d+", name)
    return int(numbers[-1]) if numbers else None
