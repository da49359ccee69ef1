"""The results of metrics (per image, per class, curves), and their intervals and margins over floors.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from heatproof.errors import InputError
from heatproof.registry import metric
from heatproof.show import plain_table

if TYPE_CHECKING:
    from torch import Tensor

    from heatproof.types import ArrayLike

NAN = float("nan")
Interval = tuple[float, float]
BLOCK = 2**19  # draws per block
REMEMBERED = 2**24  # draws that are cached for the next interval: 64 MB


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


def as_array(values: ArrayLike) -> np.ndarray:
    """A tensor, array or nested list as an array."""
    if hasattr(values, "detach"):
        given = values.detach().cpu()
        values = (given.double() if given.is_floating_point() else given).numpy()
    return np.asarray(values)


def as_numbers(values: ArrayLike) -> np.ndarray:
    """Numbers of any shape as "n" float64."""
    return as_array(values).astype(np.float64).reshape(-1)


def same_length(**arrays: ArrayLike | Sized | None) -> int:
    """Return the common length of the named arguments; raise InputError where two of them differ."""
    lengths = {name: len(cast("Sized", values)) for name, values in arrays.items() if values is not None}
    first, n = next(iter(lengths.items()))
    for name, length in lengths.items():
        if length != n:
            raise InputError(f"{name} has {length} entries but {first} has {n}; they must match")
    return n


def percentile_interval(draws: np.ndarray, tails: Interval = (0.025, 0.975)) -> Interval:
    """The interval that holds the middle 95 % of the resamples; values that are not finite are left out.

    >>> percentile_interval(np.arange(1001.0))
    (25.0, 975.0)
    """
    draws = draws[np.isfinite(draws)]
    if not len(draws):
        return NAN, NAN
    low, high = np.quantile(draws, tails)
    return float(low), float(high)


def wins(these: ArrayLike, those: ArrayLike) -> np.ndarray:
    """Array "n m": 1 if the first is above the second, 1/2 if they are equal.

    The mean is the area under the ROC curve between them.

    >>> float(wins([0.2, 0.9], [0.1, 0.9]).mean())
    0.625
    """
    above = np.subtract.outer(np.asarray(these, float), np.asarray(those, float))
    return np.asarray((np.sign(above) + 1) / 2)


def resample(n: int, resamples: int = 1000, seed: int | tuple[int, ...] = 0) -> np.ndarray:
    """Array "resamples n": indices of the images of each bootstrap resample."""
    return np.random.default_rng(seed).integers(0, n, (resamples, n))


def mean_interval(values: ArrayLike, resamples: int = 1000, seed: int = 0, level: float = 0.95) -> Interval:
    """Percentile bootstrap interval of the mean over images; NaNs are left out."""
    given = np.asarray(values, dtype=np.float64)
    known = given[np.isfinite(given)]
    if not len(known):
        return NAN, NAN
    # Every metric on the same images draws the same indices, so they are cached.
    draw = _cached_indices if len(known) * resamples <= REMEMBERED else _indices
    means = [known[indices].mean(1) for indices in draw(len(known), resamples, seed)]
    return percentile_interval(np.concatenate(means), ((1 - level) / 2, (1 + level) / 2))


def _indices(n: int, resamples: int, seed: int) -> Iterator[np.ndarray]:
    """The rows of `resample`, in blocks."""
    rng = np.random.default_rng(seed)
    rows = max(1, BLOCK // n)
    for start in range(0, resamples, rows):
        yield rng.integers(0, n, (min(rows, resamples - start), n)).astype(np.int32)


@lru_cache(maxsize=1)
def _cached_indices(n: int, resamples: int, seed: int) -> tuple[np.ndarray, ...]:
    return tuple(_indices(n, resamples, seed))


@metric(
    "above_floors", needs=("scores",), level="checkpoint", higher_is_better=True, cite="adebayo2018sanity",
    family="Sanity", floors=(),
)  # fmt: skip
def above_floors(
    scores: Mapping[str, ArrayLike], higher_is_better: bool = True, *,
    floors: Sequence[str] = ("random", "edges"), resamples: int = 1000, seed: int = 0,
) -> dict[str, dict[str, PerClass]]:  # fmt: skip
    """Difference between each method and each control on the same images, with an interval.

    Args:
        scores: one metric's values per image "b" by method, the floors among them. Images on which either is
            NaN are left out of n.
        higher_is_better: the direction of the metric.
        floors: names of the floors.
        resamples, seed: of the bootstrap behind the interval.

    Returns:
        {method: {floor: result}}: value (also `mean`, the mean paired difference, positive where the method
        is better), its interval, n, `above` (whether the interval is) and `share`, of images on which the
        method is better.

    Example:
        >>> scores = above_floors({"gradcam": [0.8, 0.9], "random": [0.5, 0.4]})["gradcam"]["random"]
        >>> round(scores.mean, 2), scores.share, scores.above
        (0.4, 1.0, True)
    """
    values = {name: as_numbers(column) for name, column in scores.items()}
    same_length(**values)
    present = [floor for floor in floors if floor in values]
    if not present:
        raise InputError(f"no floor to compare with; score {' or '.join(floors)} on the same images too")
    sign = 1.0 if higher_is_better else -1.0
    return {
        method: {floor: _margin(sign * (column - values[floor]), resamples, seed) for floor in present}
        for method, column in values.items()
        if method not in present
    }


def _margin(differences: np.ndarray, resamples: int, seed: int) -> PerClass:
    defined = differences[np.isfinite(differences)]
    if not len(defined):
        return PerClass(reason="no image has both scores", parts={"mean": NAN, "share": NAN})
    mean, share = float(defined.mean()), float((defined > 0).mean())
    interval = mean_interval(defined, resamples, seed)
    return PerClass(mean, len(defined), interval=interval, parts={"mean": mean, "share": share})
