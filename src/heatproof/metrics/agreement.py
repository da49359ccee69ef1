"""Agreement of methods on images, and of metrics on methods (the "disagreement problem").

Between methods, for every image and pair of maps at image size:

    spearman  rank correlation of the pixels, ties with their mean rank
    ssim      structural similarity (local5)
    overlap   |P_a & P_b| / max(|P_a|, |P_b|), P the floor(K H W) largest pixels, as in localise

Between metrics: Spearman and Kendall (tau-b) of the rankings of methods by two metrics. Metrics for which
lower is better are negated, so that 1 always means the same ranking.

Cite: krishna2022disagreement, of whose measures rank correlation and feature agreement (overlap) are taken,
with pixels for features; SSIM is added. A constant map has no order and counts as undefined.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import kendalltau, rankdata, spearmanr
from torch import Tensor

from heatproof.errors import InputError
from heatproof.metrics.kit import NOT_FINITE, blanked, chunks, finite, in_threads, sized_maps
from heatproof.metrics.localisation import budget_masks
from heatproof.metrics.results import NAN, Cause, PerClass, PerImage
from heatproof.metrics.similarity import ssim
from heatproof.metrics.stats import as_numbers, same_length
from heatproof.registry import metric, metrics
from heatproof.types import ArrayLike, Maps, constant, normalise, upsample

KINDS = ("spearman", "ssim", "overlap")
CONSTANT_MAP = "a map is constant, so that it has no order to compare"
CONSTANT_EVERYWHERE = "no image has two maps that are not constant"
NO_SSIM = "SSIM compares images, and these are volumes"
ONE_MAP = "fewer than two methods have a map that is not constant"


class Correlation(NamedTuple):
    """A correlation with its two-sided p over n points; `reason` explains a NaN."""

    rho: float
    p: float
    n: int
    reason: str = ""

    @property
    def r(self) -> float:
        """The coefficient, under the name of Pearson's correlation."""
        return self.rho


def correlate(
    function: Callable[..., Any], x: np.ndarray, y: np.ndarray, names: Sequence[str], *,
    where: str = "everywhere", points: str = "", tolerance: float = 0.0,
) -> Correlation:  # fmt: skip
    """A correlation of scipy over the pairs without NaN; NaN with a reason where scipy would only warn."""
    defined = np.isfinite(x) & np.isfinite(y)
    x, y = x[defined], y[defined]
    if len(x) < 3:
        few = points or f"points have both {names[0]} and {names[1]}"
        return Correlation(NAN, NAN, len(x), f"fewer than three {few}")
    for name, side in zip(names, (x, y), strict=True):
        if np.ptp(side) <= tolerance * np.abs(side).max():
            return Correlation(NAN, NAN, len(x), f"{name} is the same {where}")
    result = function(x, y)
    return Correlation(float(result.statistic), float(result.pvalue), len(x))


def rank_correlation(x: ArrayLike, y: ArrayLike, names: tuple[str, str] = ("x", "y")) -> Correlation:
    """Spearman's rho of two lists of numbers, with its p.

    Args:
        x, y: numbers in pairs; pairs with a NaN are left out of n.
        names: of x and y in reasons and errors.

    Example:
        >>> round(rank_correlation([1, 2, 3, 4], [1, 4, 9, 16]).rho, 2)
        1.0
    """
    first, second = as_numbers(x), as_numbers(y)
    same_length(**dict(zip(names, (first, second), strict=True)))
    return correlate(spearmanr, first, second, names)


def average_ranks(values: Tensor) -> Tensor:
    """Ranks from 1 along the last axis of "r p", ties with their mean, float64.

    >>> average_ranks(torch.tensor([[3.0, 1.0, 3.0]])).tolist()
    [[2.5, 1.0, 2.5]]
    """
    if values.is_cpu:
        rows, ranks = values.detach().numpy(), np.empty(values.shape)

        def rank(share: range) -> None:
            for row in share:
                ranks[row] = rankdata(rows[row])

        in_threads(len(rows), rank)
        return torch.from_numpy(ranks)
    ordered, order = values.sort(-1)
    fresh = torch.ones(*values.shape[:-1], values.shape[-1] + 1, dtype=torch.bool, device=values.device)
    fresh[..., 1:-1] = ordered[..., 1:] != ordered[..., :-1]  # where a run of equal values begins
    place = torch.arange(values.shape[-1], device=values.device)
    first = torch.where(fresh[..., :-1], place, 0).cummax(-1).values
    last = torch.where(fresh[..., 1:], place, len(place)).flip(-1).cummin(-1).values.flip(-1)
    return torch.zeros_like(values, dtype=torch.float64).scatter_(-1, order, (first + last).double() / 2 + 1)


def map_similarity(before: Maps | ArrayLike, after: Maps | ArrayLike) -> PerImage:
    """Similarity of two sets of maps of the same images, at image size.

    Args:
        before, after: Maps of any size of the same images, or tensors "b h w" of one size.

    Returns:
        ssim and spearman, each "b"; NaN with the reason where one of the Maps is not finite.

    Example:
        >>> ramp = torch.arange(64.0).view(1, 8, 8)
        >>> map_similarity(ramp, ramp**2)["spearman"]
        tensor([1.])
    """
    lost = [~finite(maps) for maps in (before, after) if isinstance(maps, Maps)]
    before, after = (blanked(maps) if isinstance(maps, Maps) else maps for maps in (before, after))
    values, size = _checked({"before": before, "after": after})
    table = _compare(values, size, [(0, 1)])
    undefined = torch.stack([constant(maps) for maps in values]).any(0)
    scores = {"ssim": table[1, :, 0].float(), "spearman": table[0, :, 0].float()}
    causes = [Cause(NOT_FINITE, where.to(undefined.device)) for where in lost]
    return PerImage(scores, [*causes, *_without_ssim(size, undefined), Cause(CONSTANT_MAP, undefined)])


@metric(
    "method_agreement", needs=("maps",), level="checkpoint", higher_is_better=True, bounds=(-1.0, 1.0),
    cite="krishna2022disagreement", aliases=("agreement",), family="Agreement",
    parts={kind: f"method agreement {kind}" for kind in KINDS}, pairs=True, volumes=True,
)  # fmt: skip
def method_agreement(maps: Mapping[str, Maps | ArrayLike], *, budget: float = 0.2) -> PerClass:
    """Rank correlation, SSIM and top-K overlap of every pair of methods on the same images.

    Args:
        maps: By method; Maps of any size of the same images, or tensors "b h w" of one size.
        budget: share of the pixels that overlap compares, the largest of each map.

    Returns:
        spearman, ssim and overlap: each a matrix of the means over images, read as
        result.spearman["a", "b"], with `labels`, `values` and `n` (images) "m m" and `reasons` by pair; and
        `images`, the means over pairs of each image.

    Example:
        >>> ramp = torch.arange(64.0).view(1, 8, 8)
        >>> scores = method_agreement({"up": ramp, "same": 2 * ramp, "down": 64 - ramp})
        >>> round(scores.spearman["up", "same"], 3), round(scores.spearman["up", "down"], 3)
        (1.0, -1.0)
    """
    if len(maps) < 2:
        raise InputError("agreement needs the maps of at least two methods")
    values, size = _checked(maps)
    pairs = list(combinations(range(len(maps)), 2))
    first, second = torch.tensor(pairs).T
    table = _compare(values, size, pairs, budget)
    flat = torch.stack([constant(own) for own in values], 1)
    undefined = flat[:, first] | flat[:, second]
    table = table.masked_fill(undefined, torch.nan)
    missing = _without_ssim(size, undefined.all(1))
    why = dict.fromkeys(KINDS, CONSTANT_EVERYWHERE) | ({"ssim": NO_SSIM} if missing else {})
    matrices: dict[str, Any] = {
        kind: _matrix(tuple(maps), pairs, scores.nanmean(0), (~undefined).sum(0), [why[kind]] * len(pairs))
        for kind, scores in zip(KINDS, table, strict=True)
    }
    images = dict(zip(KINDS, table.nanmean(2).float(), strict=True))
    causes = [*missing, Cause(ONE_MAP, undefined.all(1))]
    return PerClass(n=len(values[0]), parts={**matrices, "images": PerImage(images, causes)})


def _without_ssim(size: tuple[int, ...], like: Tensor) -> list[Cause]:
    """Why volumes have no SSIM; empty for 2D images."""
    return [Cause(NO_SSIM, torch.ones_like(like), ("ssim",))] if len(size) > 2 else []


def _checked(maps: Mapping[str, Maps | ArrayLike]) -> tuple[list[Tensor], tuple[int, ...]]:
    """Raw maps on one device, and the size of the images."""
    sized = {name: sized_maps(own) for name, own in maps.items()}
    name, (first, size) = next(iter(sized.items()))
    values = [own.detach().to(first.device) for own, _ in sized.values()]
    same_length(**dict(zip(maps, values, strict=True)))
    if not len(first):
        raise InputError("there are no maps to compare")
    for other, (_, theirs) in sized.items():
        if tuple(theirs) != tuple(size):
            by = ["x".join(map(str, sides)) for sides in (theirs, size)]
            raise InputError(
                f"{other} is for images of {by[0]} but {name} for {by[1]}; "
                "compare maps of the same images (Maps know their images' size, tensors must share one)"
            )
    return values, size


def _compare(
    values: Sequence[Tensor], size: tuple[int, ...], pairs: list[tuple[int, int]], budget: float | None = None
) -> Tensor:
    """Tensor "kind b pair" float64, as KINDS, without overlap where budget is None; also of constant maps."""
    few = list(chunks(values[0], (len(values), *size)))  # all methods for a few images at a time
    if len(few) > 1:
        return torch.cat([_compare([maps[part] for maps in values], size, pairs, budget) for part in few], 1)
    pixels = torch.stack([upsample(maps, size).clamp(min=0) for maps in values], 1)  # "b m H W"
    shape, (first, second) = pixels.shape[:2], torch.tensor(pairs).T
    ranks = average_ranks(pixels.flatten(0, 1).flatten(1))
    ranks -= ranks.mean(-1, keepdim=True)
    ranks = (ranks / ranks.norm(dim=-1, keepdim=True)).unflatten(0, shape)  # 0 / 0 = NaN for a constant map
    scaled = normalise(pixels.flatten(0, 1)).unflatten(0, shape)
    if len(size) > 2:
        alike = pixels.new_full((len(pixels), len(pairs)), torch.nan)
    else:
        alike = ssim(scaled[:, first].flatten(0, 1), scaled[:, second].flatten(0, 1)).view(len(pixels), -1)
    table = [(ranks @ ranks.mT)[:, first, second].clamp(-1, 1), alike.double()]
    if budget is not None:
        marks = budget_masks(pixels.flatten(0, 1), budget).flatten(1).unflatten(0, shape).double()
        larger = torch.maximum(marks.sum(-1)[:, first], marks.sum(-1)[:, second])
        table.append((marks @ marks.mT)[:, first, second] / larger)
    return torch.stack(table)


@metric(
    "metric_agreement", needs=("scores",), level="checkpoint", higher_is_better=True, bounds=(-1.0, 1.0),
    cite="krishna2022disagreement", family="Agreement",
)  # fmt: skip
def metric_agreement(
    scores: Mapping[str, Mapping[str, ArrayLike]], higher_is_better: Mapping[str, bool] | None = None
) -> PerClass:
    """Rank correlations between metrics over the methods they score.

    Args:
        scores: {metric: {method: value}}; values per image are averaged, NaN left out. A method counts for a
            pair of metrics where both score it.
        higher_is_better: for metrics that are not registered; the others' direction is known.

    Returns:
        spearman and kendall: matrices as of method_agreement, with n methods.

    Example:
        >>> table = {"insertion": {"a": 0.9, "b": 0.5, "c": 0.4}, "deletion": {"a": 0.1, "b": 0.2, "c": 0.3}}
        >>> metric_agreement(table).spearman["insertion", "deletion"]
        1.0
    """
    if len(scores) < 2:
        raise InputError("agreement needs the scores of at least two metrics")
    labels = tuple(scores)
    methods = list(dict.fromkeys(method for column in scores.values() for method in column))
    merit = np.array([[_mean(column.get(method, NAN)) for method in methods] for column in scores.values()])
    merit *= np.array([[1.0 if _more_is_better(name, higher_is_better) else -1.0] for name in labels])
    pairs = list(combinations(range(len(labels)), 2))
    matrices = {}
    for kind, function in (("spearman", spearmanr), ("kendall", kendalltau)):
        every = [correlate(function, merit[i], merit[j], (labels[i], labels[j])) for i, j in pairs]
        values, n = torch.tensor([c.rho for c in every]), torch.tensor([c.n for c in every])
        matrices[kind] = _matrix(labels, pairs, values, n, [c.reason for c in every])
    return PerClass(n=len(methods), parts=matrices)


def _mean(values: ArrayLike) -> float:
    numbers = as_numbers(values)
    numbers = numbers[~np.isnan(numbers)]
    return float(numbers.mean()) if len(numbers) else NAN


def _more_is_better(name: str, given: Mapping[str, bool] | None) -> bool:
    if given and name in given:
        return given[name]
    entry = metrics.find(name)
    if entry is None or entry.higher_is_better is None:
        raise InputError(f"whether more of {name!r} is better is not known; set higher_is_better")
    return entry.higher_is_better


def _matrix(
    labels: tuple[str, ...], pairs: list[tuple[int, int]], values: Tensor, n: Tensor, reasons: Sequence[str]
) -> PerClass:
    """A symmetric matrix with ones on its diagonal, from its upper triangle; n is 0 on the diagonal."""
    full, counts = torch.eye(len(labels), dtype=torch.float64), torch.zeros(len(labels), len(labels)).long()
    first, second = torch.tensor(pairs).T
    full[first, second] = full[second, first] = values.double().cpu()
    counts[first, second] = counts[second, first] = n.cpu()
    why = {
        (labels[i], labels[j]): reason
        for (i, j), reason, value in zip(pairs, reasons, values.tolist(), strict=True)
        if np.isnan(value)
    }
    cells = {(a, b): float(full[i, j]) for i, a in enumerate(labels) for j, b in enumerate(labels)}
    return PerClass(n=counts, classes=cells, parts={"labels": labels, "values": full, "reasons": why})
