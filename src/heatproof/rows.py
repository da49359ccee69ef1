"""Rows of results, and the units that they are written in. Imports no torch, so that readers start fast."""

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
MIN_USABLE = 0.95  # of the planned images of a run, for its verdict and the rules of the gate
MIN_N = 30  # images behind a number, for the same


@dataclass(frozen=True)
class Score:
    """One row of results. An undefined value is NaN, with the cause in `reason`.

    Args:
        model, checkpoint: their names.
        image: name of the image; "" for a row about a whole class or checkpoint.
        label, explained: the true class, and the explained class.
        method, metric: their names, with their options.
        value, reason: the number, and one sentence if it is NaN.

    Raises:
        InputError: if the value is NaN and there is no reason.

    Example:
        >>> Score("net", "epoch05", "cat.png", 0, 0, "gradcam", "insertion", 0.75).value
        0.75
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
    """The smallest piece of a run: a checkpoint and a range of images, complete or absent.

    Args:
        checkpoint, images: name of the checkpoint; index of the first image, and of the last + 1.
        methods, metrics: the methods and metrics that are computed for them.
        seed: of all random numbers.
        origin: hash of the weights, images, code and settings that it is computed from, if known.

    Example:
        >>> unit = Unit("epoch05", (0, 64), ("gradcam",), ("insertion",))
        >>> unit.image_count, len(unit.hash)
        (64, 16)
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
    """The name under which maps of the predicted class are stored if the label is another class."""
    return f"{method} of the prediction"


def epoch_of(name: str) -> int | None:
    """The last number in a checkpoint's name.

    >>> epoch_of("resnet50_epoch-07"), epoch_of("best")
    (7, None)
    """
    numbers = re.findall(r"\d+", name)
    return int(numbers[-1]) if numbers else None
