"""Similarity of maps (SSIM, ranks), and agreement of methods and metrics (the "disagreement problem").

Structural similarity (SSIM) of maps:

    SSIM = (2 mu_x mu_y + C1) (2 sigma_xy + C2) / ((mu_x^2 + mu_y^2 + C1) (sigma_x^2 + sigma_y^2 + C2))

"local5" (default): in every 5x5 window, sample covariance, C = (K R)^2 with K = 0.01 and 0.03 and R the
larger range of the two maps, averaged over the windows that lie inside the map; what scikit-image computes
with win_size=5, data_range=R. "eq2": once over the whole map, population covariance, C1 = 0.01 and C2 = 0.03
as they stand in COSE's eq. 2. A mask restricts the average (or eq. 2's moments) to its pixels; one that
covers everything changes nothing.

Cite: wang2004ssim, daroya2023cose.

Deviations: COSE prints eq. 2 as a value in [0, 1]; the windowed form is the default, and either may
be negative. Two constant maps have R = 0: NaN in "local5".

How: with s = x + y and d = x - y, four window sums (of s, d, s^2, d^2) give all five moments, in float64,
since float32 loses the variance of flat windows next to C2. On the CPU NumPy works in threads, a map at a
time: torch would start and join its threads some forty times per map.

Agreement between methods, for every image and pair of maps at image size:

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

from heatproof.errors import InputError, did_you_mean
from heatproof.metrics.kit import (
    NOT_FINITE,
    align,
    as_tensor,
    blanked,
    chunks,
    finite,
    in_threads,
    pixel_maps,
    refuse_volumes,
    sized_maps,
)
from heatproof.metrics.localisation import budget_masks
from heatproof.metrics.results import NAN, Cause, PerClass, PerImage, as_numbers, same_length
from heatproof.registry import metric, metrics
from heatproof.types import ArrayLike, Maps, constant, normalise, upsample

KINDS = ("spearman", "ssim", "overlap")
CONSTANT_MAP = "a map is constant, so that it has no order to compare"
CONSTANT_EVERYWHERE = "no image has two maps that are not constant"
NO_SSIM = "SSIM compares images, and these are volumes"
ONE_MAP = "fewer than two methods have a map that is not constant"
K1, K2 = 0.01, 0.03
C1, C2 = 0.01, 0.03
SIDE, REACH = 5, 2
WINDOW = SIDE * SIDE
REASONS = (
    "",
    "both maps are constant, so they have no range",
    "the mask leaves no pixel to compare",
    "one of the maps is constant, so their correlation is not defined",
)


@metric(
    "ssim", needs=("maps",), bounds=(-1.0, 1.0), cite="wang2004ssim",
    not_in_a_run="it compares two sets of maps; method_agreement does that for the methods of a run",
)  # fmt: skip
def ssim(
    a: Maps | ArrayLike, b: Maps | ArrayLike, mode: str = "local5", mask: ArrayLike | None = None, *,
    data_range: float | None = None,
) -> Tensor:  # fmt: skip
    """Structural similarity of two sets of maps, pair by pair.

    Args:
        a, b: Maps, which are normalised at image size first, or tensors as they are. One "h w" map may stand
            against many.
        mode: "local5", in windows, or "eq2", over the whole map.
        mask: "b H W" or "H W": the pixels that count.
        data_range: R, where it is not the larger range of the two maps.

    Returns:
        "b", or a single number for "h w" maps; NaN where it is not defined, see `ssim_reasons`.

    Example:
        >>> ramp = torch.arange(64.0).view(8, 8)
        >>> round(float(ssim(ramp, ramp)), 3)
        1.0
    """
    pair = _pair(a, b, mode, mask, data_range)
    score = _local5(pair) if mode == "local5" else _eq2(pair)
    score = score.masked_fill(pair.constant | pair.unseen, torch.nan).float()
    return score[0] if pair.single else score


def ssim_reasons(
    a: Maps | ArrayLike, b: Maps | ArrayLike, mode: str = "local5", mask: ArrayLike | None = None, *,
    data_range: float | None = None,
) -> list[str]:  # fmt: skip
    """Reasons why `ssim` of the same arguments is NaN, pair by pair; "" where it is defined.

    Args:
        a, b, mode, mask, data_range: as for ssim.

    Example:
        >>> ramp = torch.arange(64.0).view(8, 8)
        >>> ssim_reasons(ramp, ramp)
        ['']
    """
    pair = _pair(a, b, mode, mask, data_range)
    return [REASONS[kind] for kind in torch.where(pair.unseen, 2, pair.constant.int()).tolist()]


class _Pair(NamedTuple):
    x: Tensor  # "b h w"
    y: Tensor  # "b h w"
    reach: Tensor  # "b", float64, positive
    weight: Tensor | None  # "b h w" bool: the pixels that count
    constant: Tensor  # "b": R = 0
    unseen: Tensor  # "b": no pixel counts
    single: bool


def _pair(
    a: Maps | ArrayLike, b: Maps | ArrayLike, mode: str, mask: ArrayLike | None, data_range: float | None
) -> _Pair:
    modes = ("local5", "eq2")
    if mode not in modes:
        raise InputError(f"unknown mode {mode!r} of ssim; {did_you_mean(mode, modes)}")
    x, y = _values(a), _values(b)
    if x.shape[-2:] != y.shape[-2:] or (x.ndim == y.ndim and x.shape != y.shape):
        raise InputError(f"ssim compares maps of one shape; got {tuple(x.shape)} and {tuple(y.shape)}")
    single = x.ndim == y.ndim == 2
    y = y.to(x.device)
    reach = torch.maximum(_range(x), _range(y))
    if not torch.isfinite(reach).all():
        raise InputError("maps contain NaN or infinite values")
    x, y = torch.broadcast_tensors(x[None] if single else x, y)
    height, width = x.shape[-2:]
    if mode == "local5" and min(height, width) < SIDE:
        raise InputError(f"mode 'local5' needs maps of at least 5x5; got {height}x{width}, so use mode='eq2'")
    weight = None
    unseen = torch.zeros(len(x), dtype=torch.bool, device=x.device)
    if mask is not None:
        weight = align(mask, (height, width), x, "mask").expand_as(x)
        counted = weight[:, REACH:-REACH, REACH:-REACH] if mode == "local5" else weight
        unseen = ~counted.flatten(1).any(1)
    if data_range is not None:
        if not data_range > 0:
            raise InputError(f"data_range must be positive; got {data_range}")
        reach = torch.full_like(reach, data_range)
    reach = reach.expand(len(x))
    constant = (reach == 0) & (mode == "local5")
    return _Pair(x, y, torch.where(reach > 0, reach, 1.0), weight, constant, unseen, single)


def _values(maps: Maps | ArrayLike) -> Tensor:
    if isinstance(maps, Maps):
        refuse_volumes("ssim", maps.image_size)
    values = (pixel_maps(maps) if isinstance(maps, Maps) else as_tensor(maps)).detach()
    if values.ndim not in (2, 3) or 0 in values.shape[-2:]:
        raise InputError(f"ssim takes maps 'h w' or 'b h w'; got shape {tuple(values.shape)}")
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def _range(values: Tensor) -> Tensor:
    """Largest minus smallest value of each map, float64; not finite where a value is not."""
    if values.device.type != "cpu":
        return values.amax((-2, -1)).double() - values.amin((-2, -1)).double()
    array = values.numpy()
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        return torch.as_tensor(array.max((-2, -1)).astype(np.float64) - array.min((-2, -1)))


def _local5(pair: _Pair) -> Tensor:
    x, y, reach, weight = pair[:4]
    inner = None if weight is None else weight[:, REACH:-REACH, REACH:-REACH]
    if x.is_cpu:
        scores, reaches = np.empty(len(x)), reach.tolist()

        def work(rows: range) -> None:
            for i in rows:
                first, second = x[i].numpy().astype(np.float64), y[i].numpy()
                similar = _similarity(first, second, reaches[i])
                own = similar if inner is None else similar[inner[i].numpy()]
                scores[i] = own.mean() if own.size else 0.0

        in_threads(len(x), work)
        return torch.from_numpy(scores)
    parts = []
    for part in chunks(x, (x.shape[1], x.shape[2])):
        similar = _similarity(x[part].double(), y[part].double(), reach[part, None, None])
        # An empty mask would divide 0 by 0; the caller has marked it as undefined.
        own = torch.ones_like(similar) if inner is None else inner[part]
        parts.append((similar * own).sum((-2, -1)) / own.sum((-2, -1)).clip(1))
    return torch.cat(parts) if parts else reach


def _similarity(first: Any, second: Any, reach: Any) -> Any:
    """SSIM of each window of "... h w" float64, arrays or tensors.

    Terms are scaled by 2 * 25^2 (means) or 2 * 25 * 24 (sample covariances).
    """
    total, gap = first + second, first - second
    a, b, p, q = (_window_sums(field) for field in (total, gap, total * total, gap * gap))
    for mean, square in ((a, p), (b, q)):
        mean *= mean
        square *= WINDOW
        square -= mean
    p += 2 * WINDOW * (WINDOW - 1) * (K2 * reach) ** 2
    a += 2 * WINDOW**2 * (K1 * reach) ** 2
    return (a - b) * (p - q) / ((p + q) * (a + b))


def _window_sums(x: Any) -> Any:
    """Sums over the 5x5 windows that lie inside, "... h w" -> "... h-4 w-4": two pairs and the fifth."""
    pairs = x[..., :-1, :] + x[..., 1:, :]
    rows = pairs[..., :-3, :] + pairs[..., 2:-1, :]
    rows += x[..., 4:, :]
    pairs = rows[..., :-1] + rows[..., 1:]
    sums = pairs[..., :-3] + pairs[..., 2:-1]
    sums += rows[..., 4:]
    return sums


def _eq2(pair: _Pair) -> Tensor:
    parts = []
    for part in chunks(pair.x, (pair.x.shape[1], pair.x.shape[2])):
        x, y = pair.x[part].double().flatten(1), pair.y[part].double().flatten(1)
        weight = torch.ones_like(x) if pair.weight is None else pair.weight[part].double().flatten(1)
        weight = weight / weight.sum(1, keepdim=True).clip(1)
        mean_x, mean_y = ((m * weight).sum(1, keepdim=True) for m in (x, y))
        x, y = x - mean_x, y - mean_y
        spread_x, spread_y, shared = ((u * v * weight).sum(1) for u, v in ((x, x), (y, y), (x, y)))
        mean_x, mean_y = mean_x[:, 0], mean_y[:, 0]
        top = (2 * mean_x * mean_y + C1) * (2 * shared + C2)
        parts.append(top / ((mean_x**2 + mean_y**2 + C1) * (spread_x + spread_y + C2)))
    return torch.cat(parts) if parts else pair.reach


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
    few = list(chunks(values[0], (max(len(values), len(pairs)), *size)))  # all pairs for a few images
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
