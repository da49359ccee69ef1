"""COSE: maps should stay if the prediction stays, and change if the prediction changes.

    consistency = mean SSIM over pairs with the same prediction          (eq. 4)
    sensitivity = mean 1 - SSIM over pairs with another prediction       (eq. 7)
    COSE        = 100 * 2 c s / (c + s)                                  (eq. 8)

A pair is an image and its transformed self under one model, or an image under two models of one training run.

Cite: daroya2023cose.

Deviations: SSIM may be negative, so c may be too; c + s <= 0 gives 0. Either set empty: NaN. Intervals (95 %,
1,000 resamples) draw whole images where their names are given, since an image's pairs are not independent;
the paper gives none. The paper's "Overall" row is not the plain mean of its rows but weights each by the
number of model variants behind it (see `overall`).

Maps are compared at the image's size in [0, 1]. Attributions with signs (gradient, SmoothGrad, IG, ...) go
through COSE's own scaling (`cose_map`: the sum of |.| over channels, clipped at its 99th percentile); all
others are normalised as everywhere, so LIME's negative weights are clipped, as its card says. Maps of signs
alone, -1, 0 and 1 (lime(top=10)), are compared unchanged, as the authors do.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import pearsonr
from torch import Tensor

from heatproof.errors import InputError
from heatproof.metrics.agreement import REACH, REASONS, Correlation, average_ranks, correlate, ssim
from heatproof.metrics.kit import as_tensor, raw_maps
from heatproof.metrics.results import NAN, PerClass, as_numbers, percentile_interval, same_length
from heatproof.models.running import at_least_float
from heatproof.registry import metric
from heatproof.types import ArrayLike, Maps, normalise, per_map, upsample

AT_ONCE = 64  # maps at the image's size in memory

# Maps that ignore the network are perfectly similar, so control maps are no reference.
_metric = partial(
    metric, needs=("ssim",), level="checkpoint", higher_is_better=True, cite="daroya2023cose",
    family="Consistency and sensitivity", floors=(),
)  # fmt: skip


@_metric(  # SSIM in [-1, 1] puts the halves in [-1, 1] and [0, 2]; in [0, 100] while no SSIM is negative
    "cose", bounds=(float("-inf"), 400 / 3), title="COSE", compares_checkpoints=True
)
def cose(
    same: ArrayLike, changed: ArrayLike, same_images: Sequence[Hashable] | None = None,
    changed_images: Sequence[Hashable] | None = None, *, resamples: int = 1000, seed: int = 0,
) -> PerClass:  # fmt: skip
    """Harmonic mean of consistency and sensitivity, in per cent.

    Args:
        same, changed: SSIMs of the pairs whose prediction stays, and of those whose prediction changes; NaNs
            are left out and counted.
        same_images, changed_images: names of their images, so that the interval draws whole images.
        resamples, seed: of the bootstrap behind the intervals.

    Returns:
        COSE with its interval, and consistency, sensitivity, their intervals (`consistency_interval`) and the
        numbers of pairs (n_same, n_changed, n_undefined) as attributes.

    Example:
        >>> scores = cose(same=[0.9, 0.7], changed=[0.2, 0.4])
        >>> round(scores.consistency, 3), round(scores.sensitivity, 3), round(scores.value, 2)
        (0.8, 0.7, 74.67)
    """
    alike, distance = _ssims(same, "same"), 1 - _ssims(changed, "changed")
    defined = ~np.isnan(alike), ~np.isnan(distance)
    counts = int(defined[0].sum()), int(defined[1].sum())
    halves = [float(v[d].mean()) if d.any() else NAN for v, d in zip((alike, distance), defined, strict=True)]
    sums, sizes = by_image(alike, distance, same_images, changed_images)
    rng = np.random.default_rng(seed)
    means = np.stack([_resampled(sums, sizes, rng, joint=same_images is not None) for _ in range(resamples)])
    undefined = len(alike) + len(distance) - sum(counts)
    interval = percentile_interval(harmonic(means[:, 0], means[:, 1]))
    parts = {
        "consistency": halves[0], "sensitivity": halves[1], "same": float(counts[0]),
        "changed": float(counts[1]), "low": interval[0], "high": interval[1],
        "n_same": counts[0], "n_changed": counts[1], "n_undefined": undefined,
        "consistency_interval": percentile_interval(means[:, 0]),
        "sensitivity_interval": percentile_interval(means[:, 1]),
    }  # fmt: skip
    reason = _reason(*counts, undefined)
    return PerClass(float(harmonic(*halves)), sum(counts), interval=interval, reason=reason, parts=parts)


@_metric("consistency", bounds=(-1.0, 1.0), title="similarity for the same prediction")
def consistency(
    same: ArrayLike, images: Sequence[Hashable] | None = None, *, resamples: int = 1000, seed: int = 0
) -> PerClass:
    """Similarity (SSIM) of maps over pairs with the same prediction.

    Args:
        same: SSIMs of the pairs whose prediction stays.
        images, resamples, seed: as for cose.

    Returns:
        The mean SSIM with its interval.

    Example:
        >>> consistency([1.0, 0.5]).value
        0.75
    """
    both = cose(same, [], images, None if images is None else [], resamples=resamples, seed=seed)
    reason = _reason(both.n_same, 1, both.n_undefined)
    return PerClass(both.consistency, both.n_same, interval=both.consistency_interval, reason=reason)


@_metric("sensitivity", bounds=(0.0, 2.0), title="change for different predictions")
def sensitivity(
    changed: ArrayLike, images: Sequence[Hashable] | None = None, *, resamples: int = 1000, seed: int = 0
) -> PerClass:
    """Dissimilarity (1 - SSIM) of maps over pairs with different predictions.

    Args:
        changed: SSIMs of the pairs whose prediction changes.
        images, resamples, seed: as for cose.

    Returns:
        The mean of 1 - SSIM with its interval.

    Example:
        >>> sensitivity([1.0, 0.5]).value
        0.25
    """
    both = cose([], changed, None if images is None else [], images, resamples=resamples, seed=seed)
    reason = _reason(1, both.n_changed, both.n_undefined)
    return PerClass(both.sensitivity, both.n_changed, interval=both.sensitivity_interval, reason=reason)


def cose_split(
    ssims: ArrayLike, same: ArrayLike, groups: Sequence[Hashable], images: Sequence[Hashable] | None = None,
    *, resamples: int = 1000, seed: int = 0,
) -> dict[Hashable, PerClass]:  # fmt: skip
    """COSE of each group of pairs, such as geometric and photometric, or one group per magnitude.

    Args:
        ssims: one per pair.
        same: whether the prediction stayed.
        groups: the group of each pair.
        images: names of the pairs' images, as for cose.
        resamples, seed: as for cose.

    Returns:
        Results of cose by group, in order of first appearance.

    Example:
        >>> scores = cose_split([0.9, 0.2, 0.7, 0.4], [1, 0, 1, 0], ["flip", "flip", "blur", "blur"])
        >>> {group: round(score.value, 1) for group, score in scores.items()}
        {'flip': 84.7, 'blur': 64.6}
    """
    values, stayed = _ssims(ssims, "ssims"), as_numbers(same).astype(bool)
    same_length(ssims=values, same=stayed, groups=groups, images=images)
    names = None if images is None else np.array(images, dtype=object)
    result = {}
    for group in dict.fromkeys(groups):
        member = np.array([g == group for g in groups])
        sides = [member & stayed, member & ~stayed]
        named = [None, None] if names is None else [names[side] for side in sides]
        result[group] = cose(*(values[side] for side in sides), *named, resamples=resamples, seed=seed)
    return result


def overall(values: ArrayLike, variants: ArrayLike) -> float:
    """Mean of scores per (dataset, model), weighted by the number of model variants; NaN is left out.

    Args:
        values, variants: one of each for every data set and model.

    Example:
        >>> round(overall([0.5, 0.8, float("nan")], [1, 2, 5]), 2)
        0.7
    """
    scores, weights = as_numbers(values), as_numbers(variants)
    same_length(values=scores, variants=weights)
    defined = ~np.isnan(scores)
    return float(np.average(scores[defined], weights=weights[defined])) if weights[defined].sum() else NAN


def ssim_to_final(ssims: ArrayLike, accuracies: ArrayLike) -> Correlation:
    """Pearson correlation of the SSIM to the final model's maps with accuracy, over checkpoints.

    Args:
        ssims, accuracies: one of each per checkpoint.

    Example:
        >>> round(ssim_to_final([0.2, 0.5, 0.8], [0.6, 0.7, 0.8]).r, 2)
        1.0
    """
    x, y = as_numbers(ssims), as_numbers(accuracies)
    same_length(ssims=x, accuracies=y)
    # scipy warns of values that differ by rounding alone; their correlation would be noise.
    return correlate(
        pearsonr, x, y, ("SSIM", "accuracy"), where="at every checkpoint",
        points="checkpoints have both values", tolerance=1e-12,
    )  # fmt: skip


def cose_map(signed: ArrayLike) -> Tensor:
    """Prepare signed maps for COSE: "b h w" in [0, 1].

    Sum of |.| over channels, minus its minimum, clipped at its 99th percentile, which becomes 1.

    Args:
        signed: maps "b h w", or gradients "b c h w".

    Example:
        >>> cose_map([[[-4.0, 0.0], [1.0, 0.0]]]).shape
        torch.Size([1, 2, 2])
    """
    values = as_tensor(signed).detach()
    if values.ndim not in (3, 4) or 0 in values.shape[1:]:
        raise InputError(f"cose_map takes 'b h w' or 'b c h w'; got shape {tuple(values.shape)}")
    if not torch.isfinite(values).all():
        raise InputError("maps contain NaN or infinite values")
    strength = at_least_float(values).abs()
    strength = strength.sum(1) if strength.ndim == 4 else strength
    pixels = strength.flatten(1)
    pixels = pixels - pixels.amin(1, keepdim=True)
    n = pixels.shape[1]
    below, part = divmod(99 * (n - 1), 100)  # the percentile lies between two neighbours in order
    top = pixels.topk(n - below, dim=1).values
    ceiling = torch.lerp(top[:, -1], top[:, -2], part / 100) if part else top[:, -1]
    # An infinite divisor sends a map without contrast to zero, as everywhere else.
    ceiling = torch.where(ceiling > 0, ceiling, torch.inf)[:, None]
    return (pixels / ceiling).clamp(max=1).reshape(strength.shape).float()


def _ssims(values: ArrayLike, name: str) -> np.ndarray:
    array = as_numbers(values)
    outside = array[np.abs(array) > 1 + 1e-6]
    if len(outside):
        raise InputError(f"{name} must hold SSIM values in [-1, 1]; got {outside[0]:g}")
    return array


def harmonic(c: Any, s: Any) -> np.ndarray:
    """COSE in % from both halves; 0 if they cancel, NaN if one is NaN."""
    c, s = np.asarray(c, np.float64), np.asarray(s, np.float64)
    positive = c + s > 0
    mean = 200 * c * s / np.where(positive, c + s, 1)
    return np.where(positive | np.isnan(c + s), mean, 0)


def _reason(n_same: int, n_changed: int, undefined: int) -> str:
    if n_same and n_changed:
        return ""
    kinds = [kind for kind, n in (("the same", n_same), ("another", n_changed)) if not n]
    tail = f" ({undefined} pairs have no SSIM)" if undefined else ""
    return f"no pair with {' and none with '.join(kinds)} prediction{tail}"


def by_image(
    alike: np.ndarray, distance: np.ndarray, same_images: Any, changed_images: Any, images: Any = ()
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Sum and number of each image's defined values, for both sides; without names a pair is an image.

    images: the order of the images, if not that of their first appearance.
    """
    if (same_images is None) != (changed_images is None):
        raise InputError("name the images of both sets or of neither: same_images and changed_images")
    if same_images is None:
        sums = [side[~np.isnan(side)] for side in (alike, distance)]
        return sums, [np.ones(len(side)) for side in sums]
    same_length(same=alike, same_images=same_images)
    same_length(changed=distance, changed_images=changed_images)
    index = {name: i for i, name in enumerate(dict.fromkeys([*images, *same_images, *changed_images]))}
    sums, sizes = [], []
    for side, names in ((alike, same_images), (distance, changed_images)):
        defined = ~np.isnan(side)
        where = np.array([index[name] for name in names], dtype=int)[defined]
        sums.append(np.bincount(where, weights=side[defined], minlength=len(index)))
        sizes.append(np.bincount(where, minlength=len(index)).astype(np.float64))
    return sums, sizes


def _resampled(
    sums: list[np.ndarray], sizes: list[np.ndarray], rng: np.random.Generator, joint: bool
) -> np.ndarray:
    """Both means over one bootstrap sample; the same images on both sides where `joint`."""
    first, second = (rng.integers(0, max(1, len(side)), len(side)) for side in sums)
    picks = first, first if joint else second
    totals = [(v[p].sum(), n[p].sum()) for v, n, p in zip(sums, sizes, picks, strict=True)]
    return np.array([total / n if n else NAN for total, n in totals])


class Pairs(NamedTuple):
    """One entry per pair."""

    ssim: Tensor  # "n"; NaN where it is not defined
    why: Tensor  # "n": which of `agreement.REASONS`, 0 where it is defined
    same: Tensor  # "n" bool: the prediction stayed

    def reasons(self) -> list[str]:
        return [REASONS[code] for code in self.why.tolist()]


def comparable(maps: Maps) -> Tensor:
    """Tensor "b H W" in [0, 1], or of signs, as COSE compares maps."""
    if maps.signed_values is not None:
        return cose_map(upsample(raw_maps(maps), maps.image_size))
    values = upsample(maps.values, maps.image_size)
    signs = (values == values.sign()).flatten(1).all(1) & (values < 0).flatten(1).any(1)
    return torch.where(per_map(signs, values), values, normalise(values))


def alike(
    first: Tensor, second: Tensor, mask: Tensor | None = None, similarity: str = "local5"
) -> tuple[Tensor, Tensor]:
    """SSIM of maps "n H W" and, if NaN, the index of its reason in REASONS; on the maps' device.

    similarity: "local5" (the authors' code), "eq2" (the paper), "pearson" (its supplement) or "spearman".
    """
    if similarity in ("pearson", "spearman"):
        value, constant = _pearson(first, second, mask, similarity == "spearman"), 3
    else:
        value, constant = ssim(first, second, mode=similarity, mask=mask), 1
    unseen = torch.zeros_like(value, dtype=torch.bool)
    if mask is not None:
        counted = mask[:, REACH:-REACH, REACH:-REACH] if similarity == "local5" else mask
        unseen = ~counted.flatten(1).any(1)
    return value, torch.where(value.isnan(), torch.where(unseen, 2, constant), 0)


def _pearson(first: Tensor, second: Tensor, mask: Tensor | None, rank: bool = False) -> Tensor:
    """Over the pixels of each pair that count, in float64; NaN where one of the maps is constant there.

    rank: of the ranks of the values, ties with their mean, which is Spearman's rho.
    """
    shape = torch.broadcast_shapes(first.shape, second.shape)
    counted = torch.ones(shape, dtype=torch.bool, device=first.device) if mask is None else mask
    n = counted.flatten(1).sum(1).double()
    deviations = []
    for maps in (first, second):
        if rank:  # pixels that do not count rank last, so that the ranks of the others do not change
            last = maps.expand(shape).masked_fill(~counted, inf).flatten(1)
            maps = average_ranks(last).view(shape)
        pixels = maps.double().expand(shape).masked_fill(~counted, 0).flatten(1)
        apart = (pixels - (pixels.sum(1) / n)[:, None]).masked_fill(~counted.flatten(1), 0)
        high, low = (maps.expand(shape).masked_fill(~counted, end).flatten(1) for end in (-inf, inf))
        deviations.append(apart.masked_fill((high.amax(1) == low.amin(1))[:, None], torch.nan))
    x, y = deviations
    return ((x * y).sum(1) / ((x * x).sum(1) * (y * y).sum(1)).sqrt()).clamp(-1, 1).float()


def checkpoint_pairs(earlier: Maps, final: Maps, similarity: str = "local5") -> Pairs:
    """A method's maps at an earlier checkpoint against the final ones, image by image (eq. 7, the models)."""
    if earlier.ids != final.ids or len(earlier) != len(final) or earlier.image_size != final.image_size:
        raise InputError("the maps of the two checkpoints are not of the same images in the same order")
    device = final.values.device
    parts = [
        alike(comparable(final.take(part)), comparable(earlier.take(part)).to(device), None, similarity)
        for part in (slice(start, start + AT_ONCE) for start in range(0, len(final), AT_ONCE))
    ]
    values, why = (torch.cat(column) for column in zip(*parts, strict=True))
    # Both explain what their own checkpoint predicts, so the prediction stayed where they explain one class.
    return Pairs(values, why, earlier.explained.to(device) == final.explained)
