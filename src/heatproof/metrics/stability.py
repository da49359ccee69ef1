"""COSE: a map should stay when the prediction stays, and change when the prediction changes.

    consistency = mean SSIM over pairs with the same prediction          (eq. 4)
    sensitivity = mean 1 - SSIM over pairs with another prediction       (eq. 7)
    COSE        = 100 * 2 c s / (c + s)                                  (eq. 8)

A pair is an image and its transformed self under one model, or an image under two models of one training run.

Cite: daroya2023cose.

Deviations: SSIM may be negative, so c may be too; c + s <= 0 gives 0. Either set empty: NaN. Intervals (95 %,
1,000 resamples) draw whole images where their names are given, since an image's pairs are not independent;
the paper gives none. The paper's "Overall" row is not the plain mean of its rows but weights each by the
number of model variants behind it (see `overall`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from heatproof.errors import InputError
from heatproof.metrics.kit import as_numbers, as_tensor, same_length
from heatproof.metrics.stats import Interval, percentile_interval
from heatproof.registry import metric
from heatproof.types import ArrayLike

NAN = float("nan")


@dataclass(frozen=True)
class Cose:
    """COSE with its two halves; a value that is NaN has its cause in `reason`."""

    consistency: float
    sensitivity: float
    value: float
    n_same: int
    n_changed: int
    n_undefined: int = 0  # pairs left out because their SSIM is NaN
    consistency_interval: Interval = (NAN, NAN)
    sensitivity_interval: Interval = (NAN, NAN)
    interval: Interval = (NAN, NAN)
    reason: str = ""


def cose(
    same: ArrayLike,
    changed: ArrayLike,
    same_images: Sequence[Hashable] | None = None,
    changed_images: Sequence[Hashable] | None = None,
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> Cose:
    """Consistency, sensitivity and COSE from the SSIMs of pairs with the same and with another prediction.

    Args:
        same, changed: SSIMs of the pairs; NaNs are left out and counted.
        same_images, changed_images: names of their images, so that the interval draws whole images.
        resamples, seed: of the bootstrap behind the intervals.
    """
    kept, distance = _ssims(same, "same"), 1 - _ssims(changed, "changed")
    defined = ~np.isnan(kept), ~np.isnan(distance)
    counts = int(defined[0].sum()), int(defined[1].sum())
    consistency, sensitivity = (
        float(v[d].mean()) if d.any() else NAN for v, d in zip((kept, distance), defined, strict=True)
    )
    sums, sizes = _by_image(kept, distance, same_images, changed_images)
    rng = np.random.default_rng(seed)
    means = np.stack([_resampled(sums, sizes, rng, joint=same_images is not None) for _ in range(resamples)])
    undefined = len(kept) + len(distance) - sum(counts)
    return Cose(
        consistency,
        sensitivity,
        float(harmonic(consistency, sensitivity)),
        *counts,
        undefined,
        percentile_interval(means[:, 0]),
        percentile_interval(means[:, 1]),
        percentile_interval(harmonic(means[:, 0], means[:, 1])),
        _reason(*counts, undefined),
    )


def cose_split(
    ssims: ArrayLike,
    same: ArrayLike,
    groups: Sequence[Hashable],
    images: Sequence[Hashable] | None = None,
    *,
    resamples: int = 1000,
    seed: int = 0,
) -> dict[Hashable, Cose]:
    """COSE of each group of pairs, such as geometric and photometric, or one group per magnitude.

    Args:
        ssims: one per pair.
        same: whether the prediction stayed.
        groups: what group a pair is of.
        images: names of the pairs' images, as for cose.
        resamples, seed: as for cose.

    Returns:
        By group, in order of first appearance.
    """
    values, stayed = _ssims(ssims, "ssims"), as_numbers(same).astype(bool)
    same_length(ssims=values, same=stayed, groups=groups, images=images)
    names = None if images is None else np.array(images, dtype=object)
    result = {}
    for group in dict.fromkeys(groups):
        member = np.array([g == group for g in groups])
        sides = [member & stayed, member & ~stayed]
        result[group] = cose(
            *(values[side] for side in sides),
            *([] if names is None else [names[side] for side in sides]),
            resamples=resamples,
            seed=seed,
        )
    return result


def overall(values: ArrayLike, variants: ArrayLike) -> float:
    """Mean of scores per (data set, model), weighted by the number of model variants; NaN is left out.

    Args:
        values, variants: one of each for every data set and model.
    """
    scores, weights = as_numbers(values), as_numbers(variants)
    same_length(values=scores, variants=weights)
    defined = ~np.isnan(scores)
    return float(np.average(scores[defined], weights=weights[defined])) if weights[defined].sum() else NAN


class Pearson(NamedTuple):
    """Pearson's r with its two-sided p over n points; NaN has its cause in `reason`."""

    r: float
    p: float
    n: int
    reason: str = ""


def ssim_to_final(ssims: ArrayLike, accuracies: ArrayLike) -> Pearson:
    """Do maps near those of the final model as accuracy grows?

    Args:
        ssims, accuracies: one of each per checkpoint.
    """
    x, y = as_numbers(ssims), as_numbers(accuracies)
    same_length(ssims=x, accuracies=y)
    defined = np.isfinite(x) & np.isfinite(y)
    x, y = x[defined], y[defined]
    if len(x) < 3:
        return Pearson(NAN, NAN, len(x), "fewer than three checkpoints have both values")
    for name, side in (("SSIM", x), ("accuracy", y)):
        # scipy warns of values that differ by rounding alone; their correlation would be noise.
        if np.ptp(side) <= 1e-12 * np.abs(side).max():
            return Pearson(NAN, NAN, len(x), f"{name} is the same at every checkpoint")
    from scipy.stats import pearsonr

    found = pearsonr(x, y)
    return Pearson(float(found.statistic), float(found.pvalue), len(x))


def cose_map(signed: ArrayLike) -> Tensor:
    """Signed maps -> "b h w" in [0, 1], as COSE compares them.

    Sum of |.| over channels, minus its minimum, clipped at its 99th percentile, which becomes 1.

    Args:
        signed: maps "b h w", or gradients "b c h w".
    """
    from heatproof.models.running import at_least_float

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
    """COSE in % of both halves; 0 where they cancel, NaN where one is."""
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


def _by_image(
    kept: np.ndarray, distance: np.ndarray, same_images: Any, changed_images: Any
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Sum and number of each image's defined values, for both sides; without names a pair is an image."""
    if (same_images is None) != (changed_images is None):
        raise InputError("name the images of both sets or of neither: same_images and changed_images")
    if same_images is None:
        sums = [side[~np.isnan(side)] for side in (kept, distance)]
        return sums, [np.ones(len(side)) for side in sums]
    same_length(same=kept, same_images=same_images)
    same_length(changed=distance, changed_images=changed_images)
    index = {name: i for i, name in enumerate(dict.fromkeys([*same_images, *changed_images]))}
    sums, sizes = [], []
    for side, names in ((kept, same_images), (distance, changed_images)):
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


# SSIM in [-1, 1] puts the halves in [-1, 1] and [0, 2]; COSE is in [0, 100] while no SSIM is negative.
# A map that ignores the network is perfectly alike, so floors say nothing here.
for _name, _bounds, _title, _about in (
    ("cose", (float("-inf"), 400 / 3), "COSE: both together",
     "Harmonic mean of consistency and sensitivity, in per cent."),
    ("consistency", (-1.0, 1.0), "alike where the answer stays",
     "How alike (SSIM) maps stay where the prediction stays."),
    ("sensitivity", (0.0, 2.0), "different where the answer changes",
     "How far (1 - SSIM) maps change where the prediction changes."),
):  # fmt: skip
    metric(
        _name, needs=("ssim",), level="checkpoint", higher_is_better=True, bounds=_bounds,
        cite="daroya2023cose", about=_about, title=_title, family="Consistency and sensitivity", floors=(),
        compares_checkpoints=_name == "cose",
    )(cose)  # fmt: skip
