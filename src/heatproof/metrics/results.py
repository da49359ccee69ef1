"""The results of metrics: per image, per class, and curves. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from heatproof.show import plain_table

if TYPE_CHECKING:
    from torch import Tensor

NAN = float("nan")
Interval = tuple[float, float]


class Cause(NamedTuple):
    """A reason why scores are undefined, with a "b" mask of the images; without names, for every score."""

    sentence: str
    where: Tensor
    names: tuple[str, ...] = ()


class PerImage(dict[str, "Tensor"]):
    """Scores by name, each "b" (or "b k"), NaN where undefined; `reasons(name)` explains the NaNs.

    Args:
        values: by name.
        causes: masks of images whose scores are undefined, each with a sentence and optional names of scores.

    Example:
        >>> import torch
        >>> scores = PerImage({"x": torch.ones(2)}, [Cause("no box", torch.tensor([False, True]))])
        >>> scores["x"].tolist(), scores.reasons("x")
        ([1.0, nan], ['', 'no box'])
    """

    def __init__(self, values: Mapping[str, Tensor], causes: Sequence[Cause] = ()) -> None:
        super().__init__(values)
        self.causes = tuple(causes)
        for name, value in values.items():
            for cause in self._causes_of(name):
                where = cause.where.reshape(cause.where.shape + (1,) * (value.ndim - cause.where.ndim))
                self[name] = self[name].masked_fill(where, NAN)

    def reasons(self, name: str) -> list[str]:
        """One sentence per image: "" where the score is defined, else the first cause that applies."""
        sentences = [""] * (self[name].shape[0] if self[name].ndim else 1)
        for cause in reversed(self._causes_of(name)):
            for i in cause.where.reshape(-1).nonzero().flatten().tolist():
                sentences[i] = cause.sentence
        return sentences

    def only(self, *names: str) -> PerImage:
        """Select some of the scores, with their causes."""
        return PerImage({name: self[name] for name in names}, self.causes)

    def _causes_of(self, name: str) -> list[Cause]:
        return [cause for cause in self.causes if not cause.names or name in cause.names]


@dataclass(frozen=True)
class _WithParts:
    """Makes entries of `parts` available as attributes."""

    def __getattr__(self, name: str) -> Any:
        parts = self.__dict__.get("parts", {})
        if name not in parts:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return parts[name]


@dataclass(frozen=True)
class PerClass(_WithParts):
    """A score over all images, and by class or another group (pair of methods, checkpoint).

    Args:
        value: over all images or classes; NaN where undefined.
        n: number of images behind it; by class or pair where these differ.
        degenerate: share of constant maps, for scores of maps.
        interval: 95 % interval of the value.
        reason: why the value is undefined, or what was left out.
        classes: by class: a number, or a PerClass.
        parts: further values by name, readable as attributes. A run stores those that are floats.

    Example:
        >>> score = PerClass(0.75, n=4, interval=(0.5, 0.9), classes={0: 0.5, 1: 1.0})
        >>> score[1], score.above
        (1.0, True)
    """

    value: float = NAN
    n: Any = 0
    degenerate: float = NAN
    interval: Interval = (NAN, NAN)
    reason: str = ""
    classes: Mapping[Any, Any] = field(default_factory=dict)
    parts: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __getitem__(self, group: Any) -> Any:
        return self.classes[group]

    @property
    def overall(self) -> PerClass:
        """The score over all classes, without those of each class."""
        return replace(self, classes={})

    @property
    def above(self) -> bool:
        """Whether the whole interval lies above 0."""
        return self.interval[0] > 0

    def _repr_html_(self) -> str:
        scores = {f"class {c}": score for c, score in self.classes.items()} | {"all": self}
        rows = (
            (name, s.value, *s.interval, s.n, s.degenerate, s.reason)
            if isinstance(s, PerClass)
            else (name, s)
            for name, s in scores.items()
        )
        return plain_table(("", "score", "95 % from", "to", "images", "blank maps", "why not"), rows)


@dataclass(frozen=True)
class Curve(_WithParts):
    """Values at several points, such as shares of changed pixels or numbers of random modules.

    Args:
        x: the points: shares, or names of modules.
        values: by name, each "b n", one column per point.
        summary: computes one number per image from the curve.
        parts: further values by name, readable as attributes, as are the values.

    Example:
        >>> import torch
        >>> mean = lambda curve: PerImage({"area": curve.values["insertion"].mean(1)})
        >>> curve = Curve([0.0, 0.5, 1.0], {"insertion": torch.tensor([[0.0, 0.5, 1.0]])}, mean)
        >>> curve.scores["area"]
        tensor([0.5000])
    """

    x: Sequence[Any]
    values: Mapping[str, Tensor]
    summary: Callable[[Curve], PerImage] = field(repr=False)
    parts: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def scores(self) -> PerImage:
        """Scores of each image."""
        return self.summary(self)
