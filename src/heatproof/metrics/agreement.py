"""Do methods agree on an image, and do metrics agree on the methods? (The "disagreement problem".)

Between methods, for every image and pair of maps at image size:

    spearman  rank correlation of the pixels, ties with their mean rank
    ssim      structural similarity (local5)
    overlap   |P_a & P_b| / max(|P_a|, |P_b|), P the floor(K H W) largest pixels, as localise keeps them

Between metrics: Spearman and Kendall (tau-b) of the order in which two metrics put the methods, after turning
those for which less is better around, so that 1 always means the same order of merit.

Cite: krishna2022disagreement, of whose measures rank correlation and feature agreement (overlap) are taken,
with pixels for features; SSIM is added. A constant map has no order and counts as undefined.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from heatproof.errors import InputError, UnknownNameError
from heatproof.metrics.kit import (
    NOT_FINITE,
    Cause,
    PerImage,
    as_numbers,
    blanked,
    chunks,
    finite,
    in_threads,
    same_length,
    sized_maps,
)
from heatproof.metrics.localisation import budget_masks
from heatproof.metrics.similarity import ssim
from heatproof.registry import metric, metrics
from heatproof.types import ArrayLike, Maps, constant, normalise, upsample

NAN = float("nan")
KINDS = ("spearman", "ssim", "overlap")
CONSTANT_MAP = "a map is constant, so that it has no order to compare"
CONSTANT_EVERYWHERE = "no image has two maps that are not constant"
NO_SSIM = "SSIM compares pictures, and these are volumes"
ONE_MAP = "fewer than two methods have a map that is not constant"


class Correlation(NamedTuple):
    """A rank correlation with its two-sided p over n points; NaN has its cause in `reason`."""

    rho: float
    p: float
    n: int
    reason: str = ""


@dataclass(frozen=True)
class Matrix:
    """Every pair of labels: the value, the n behind it (0 on the diagonal of ones), why where it is NaN."""

    labels: tuple[str, ...]
    values: Tensor  # "m m"
    n: Tensor  # "m m"
    reasons: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def __getitem__(self, pair: tuple[str, str]) -> float:
        return float(self.values[self.labels.index(pair[0]), self.labels.index(pair[1])])


@dataclass(frozen=True)
class MethodAgreement:
    """Means over images for every pair of methods, and means over pairs for every image."""

    spearman: Matrix
    ssim: Matrix
    overlap: Matrix
    images: PerImage  # spearman, ssim, overlap: "b"


@dataclass(frozen=True)
class MetricAgreement:
    """How alike metrics order the methods; n counts methods."""

    spearman: Matrix
    kendall: Matrix


def average_ranks(values: Tensor) -> Tensor:
    """Ranks from 1 along the last axis of "r p", ties with their mean, float64.

    >>> average_ranks(torch.tensor([[3.0, 1.0, 3.0]])).tolist()
    [[2.5, 1.0, 2.5]]
    """
    if values.is_cpu:
        return _ranks_with_numpy(values.detach().numpy())
    ordered, order = values.sort(-1)
    fresh = torch.ones(*values.shape[:-1], values.shape[-1] + 1, dtype=torch.bool, device=values.device)
    fresh[..., 1:-1] = ordered[..., 1:] != ordered[..., :-1]  # where a run of equal values begins
    place = torch.arange(values.shape[-1], device=values.device)
    first = torch.where(fresh[..., :-1], place, 0).cummax(-1).values
    last = torch.where(fresh[..., 1:], place, len(place)).flip(-1).cummin(-1).values.flip(-1)
    return torch.zeros_like(values, dtype=torch.float64).scatter_(-1, order, (first + last).double() / 2 + 1)


def _ranks_with_numpy(values: np.ndarray) -> Tensor:
    """The same on a CPU, where this takes a third of the time."""
    ranks = np.empty(values.shape)

    def work(rows: range) -> None:
        for row in rows:
            order = values[row].argsort()  # in any order among ties, since they share a rank
            ordered = values[row][order]
            begins = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
            ends = np.append(begins[1:], len(order))
            ranks[row][order] = np.repeat((begins + ends - 1) / 2 + 1, ends - begins)

    in_threads(len(values), work)
    return torch.from_numpy(ranks)


def _standard_ranks(values: Tensor) -> Tensor:
    """Ranks with mean 0 and length 1 in every row, so that a product of two rows is their correlation."""
    ranks = average_ranks(values)
    ranks -= ranks.mean(-1, keepdim=True)
    length: Tensor = ranks.norm(dim=-1, keepdim=True)
    return ranks / length  # 0 / 0 = NaN for a constant row


def map_similarity(before: Maps | ArrayLike, after: Maps | ArrayLike) -> PerImage:
    """How alike two lots of maps of the same images are, at image size.

    Args:
        before, after: Maps of any size of the same images, or tensors "b h w" of one size.

    Returns:
        ssim and spearman, each "b"; NaN with the reason where one of the Maps is not finite.
    """
    lost = [~finite(one) for one in (before, after) if isinstance(one, Maps)]
    before, after = (blanked(one) if isinstance(one, Maps) else one for one in (before, after))
    values, size, _ = _checked({"before": before, "after": after})
    table = torch.cat([_compare(part, size, [(0, 1)], None) for part in _parts(values, size)], 1)
    undefined = torch.stack([constant(one) for one in values]).any(0)
    scores = {"ssim": table[1, :, 0].float(), "spearman": table[0, :, 0].float()}
    causes = [Cause(NOT_FINITE, where.to(undefined.device)) for where in lost]
    return PerImage(scores, [*causes, *_without_ssim(size, undefined), Cause(CONSTANT_MAP, undefined)])


def method_agreement(maps: Mapping[str, Maps | ArrayLike], *, budget: float = 0.2) -> MethodAgreement:
    """Rank correlation, SSIM and top-K overlap of every pair of methods on the same images.

    Args:
        maps: By method; Maps of any size of the same images, or tensors "b h w" of one size.
        budget: share of the pixels that overlap compares, the largest of each map.
    """
    if len(maps) < 2:
        raise InputError("agreement needs the maps of at least two methods")
    values, size, labels = _checked(maps)
    pairs = list(combinations(range(len(labels)), 2))
    first, second = torch.tensor(pairs).T
    table = torch.cat([_compare(part, size, pairs, budget) for part in _parts(values, size)], 1)
    flat = torch.stack([constant(one) for one in values], 1)
    undefined = flat[:, first] | flat[:, second]
    table = table.masked_fill(undefined, torch.nan)
    missing = _without_ssim(size, undefined.all(1))
    counts = (~undefined).sum(0)
    why = dict.fromkeys(KINDS, CONSTANT_EVERYWHERE) | ({"ssim": NO_SSIM} if missing else {})
    matrices = {
        kind: _matrix(labels, pairs, scores.nanmean(0), counts, [why[kind]] * len(pairs))
        for kind, scores in zip(KINDS, table, strict=True)
    }
    images = dict(zip(KINDS, table.nanmean(2).float(), strict=True))
    return MethodAgreement(**matrices, images=PerImage(images, [*missing, Cause(ONE_MAP, undefined.all(1))]))


def _without_ssim(size: tuple[int, ...], like: Tensor) -> list[Cause]:
    """Why volumes have no SSIM; nothing for pictures."""
    return [Cause(NO_SSIM, torch.ones_like(like), ("ssim",))] if len(size) > 2 else []


def _by(size: tuple[int, ...]) -> str:
    return "x".join(map(str, size))


def _checked(
    maps: Mapping[str, Maps | ArrayLike],
) -> tuple[list[Tensor], tuple[int, ...], tuple[str, ...]]:
    """Raw maps beside each other, the size of the images and the names."""
    found = {name: sized_maps(one) for name, one in maps.items()}
    name, (first, size) = next(iter(found.items()))
    values = [one.detach().to(first.device) for one, _ in found.values()]
    same_length(**dict(zip(maps, values, strict=True)))
    if not len(first):
        raise InputError("there are no maps to compare")
    for other, (_, theirs) in found.items():
        if tuple(theirs) != tuple(size):
            raise InputError(
                f"{other} is for images of {_by(theirs)} but {name} for {_by(size)}; "
                "compare maps of the same images (Maps know their images' size, tensors must share one)"
            )
    return values, size, tuple(maps)


def _parts(values: Sequence[Tensor], size: tuple[int, ...]) -> Iterator[list[Tensor]]:
    """All methods for a few images at a time."""
    for part in chunks(values[0], (len(values), *size)):
        yield [one[part] for one in values]


def _compare(
    values: Sequence[Tensor], size: tuple[int, ...], pairs: list[tuple[int, int]], budget: float | None
) -> Tensor:
    """ "kind b pair" float64, in the order of KINDS; constant maps are the caller's business.

    budget: None leaves out the last kind, overlap.
    """
    pixels = torch.stack([upsample(one, size).clamp(min=0) for one in values], 1)  # "b m H W"
    lot, (first, second) = pixels.shape[:2], torch.tensor(pairs).T
    ranks = _standard_ranks(pixels.flatten(0, 1).flatten(1)).unflatten(0, lot)
    scaled = normalise(pixels.flatten(0, 1)).unflatten(0, lot)
    if len(size) > 2:
        alike = pixels.new_full((len(pixels), len(pairs)), torch.nan)
    else:
        alike = ssim(scaled[:, first].flatten(0, 1), scaled[:, second].flatten(0, 1)).view(len(pixels), -1)
    found = [(ranks @ ranks.mT)[:, first, second].clamp(-1, 1), alike.double()]
    if budget is not None:
        kept = budget_masks(pixels.flatten(0, 1), budget).flatten(1).unflatten(0, lot).double()
        marked = kept.sum(-1)
        larger = torch.maximum(marked[:, first], marked[:, second])
        found.append((kept @ kept.mT)[:, first, second] / larger)
    return torch.stack(found)


def metric_agreement(
    scores: Mapping[str, Mapping[str, ArrayLike]], higher_is_better: Mapping[str, bool] | None = None
) -> MetricAgreement:
    """Rank correlations between metrics over the methods they score.

    Args:
        scores: {metric: {method: value}}; values per image are averaged, NaN left out. A method counts for a
            pair of metrics where both score it.
        higher_is_better: for metrics that are not registered; the others' direction is known.

    >>> table = {"insertion": {"a": 0.9, "b": 0.5, "c": 0.4}, "deletion": {"a": 0.1, "b": 0.2, "c": 0.3}}
    >>> metric_agreement(table).spearman["insertion", "deletion"]
    1.0
    """
    from scipy.stats import kendalltau, spearmanr

    if len(scores) < 2:
        raise InputError("agreement needs the scores of at least two metrics")
    labels = tuple(scores)
    methods = list(dict.fromkeys(method for column in scores.values() for method in column))
    merit = np.array([[_mean(column.get(method, NAN)) for method in methods] for column in scores.values()])
    merit *= np.array([[1.0 if _more_is_better(name, higher_is_better) else -1.0] for name in labels])
    pairs = list(combinations(range(len(labels)), 2))
    matrices = {}
    for kind, function in (("spearman", spearmanr), ("kendall", kendalltau)):
        found = [_correlate(function, merit[i], merit[j], (labels[i], labels[j])) for i, j in pairs]
        values, n = torch.tensor([c.rho for c in found]), torch.tensor([c.n for c in found])
        matrices[kind] = _matrix(labels, pairs, values, n, [c.reason for c in found])
    return MetricAgreement(**matrices)


def _mean(values: ArrayLike) -> float:
    numbers = as_numbers(values)
    numbers = numbers[~np.isnan(numbers)]
    return float(numbers.mean()) if len(numbers) else NAN


def _more_is_better(name: str, given: Mapping[str, bool] | None) -> bool:
    if given and name in given:
        return given[name]
    try:
        direction = metrics.get(name).higher_is_better
    except UnknownNameError:
        direction = None
    if direction is None:
        raise InputError(f"whether more of {name!r} is better is not known; say so in higher_is_better")
    return direction


def _correlate(
    function: Callable[..., Any], x: np.ndarray, y: np.ndarray, names: Sequence[str]
) -> Correlation:
    """scipy's correlation of the points both sides have; NaN with a reason where it would only warn."""
    defined = np.isfinite(x) & np.isfinite(y)
    x, y = x[defined], y[defined]
    if len(x) < 3:
        return Correlation(NAN, NAN, len(x), f"fewer than three points have both {names[0]} and {names[1]}")
    for name, side in zip(names, (x, y), strict=True):
        if np.ptp(side) == 0:
            return Correlation(NAN, NAN, len(x), f"{name} is the same everywhere")
    found = function(x, y)
    return Correlation(float(found.statistic), float(found.pvalue), len(x))


def rank_correlation(x: ArrayLike, y: ArrayLike, names: tuple[str, str] = ("x", "y")) -> Correlation:
    """Spearman's rho of two lists of numbers, scipy's, with its p.

    Args:
        x, y: numbers in pairs; pairs with a NaN are left out of n.
        names: what reasons and errors call them.
    """
    from scipy.stats import spearmanr

    first, second = as_numbers(x), as_numbers(y)
    same_length(**dict(zip(names, (first, second), strict=True)))
    return _correlate(spearmanr, first, second, names)


def _matrix(
    labels: tuple[str, ...],
    pairs: list[tuple[int, int]],
    values: Tensor,
    n: Tensor,
    reasons: Sequence[str],
) -> Matrix:
    """A symmetric matrix with ones on its diagonal, from its upper triangle."""
    full, counts = torch.eye(len(labels), dtype=torch.float64), torch.zeros(len(labels), len(labels)).long()
    first, second = torch.tensor(pairs).T
    full[first, second] = full[second, first] = values.double().cpu()
    counts[first, second] = counts[second, first] = n.cpu()
    why = {
        (labels[i], labels[j]): reason
        for (i, j), reason, value in zip(pairs, reasons, values.tolist(), strict=True)
        if np.isnan(value)
    }
    return Matrix(labels, full, counts, why)


metric(
    "method_agreement", needs=("maps",), level="checkpoint", higher_is_better=True, bounds=(-1.0, 1.0),
    cite="krishna2022disagreement", aliases=("agreement",), family="Agreement",
    parts={kind: f"method agreement {kind}" for kind in ("spearman", "ssim", "overlap")}, pairs=True,
    volumes=True,
)(method_agreement)  # fmt: skip
metric(
    "metric_agreement", needs=("scores",), level="checkpoint", higher_is_better=True, bounds=(-1.0, 1.0),
    cite="krishna2022disagreement", family="Agreement",
)(metric_agreement)  # fmt: skip
