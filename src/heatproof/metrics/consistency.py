"""C-Score: do the maps of one class look at the same place? (elangovan2026cscore)

    sIoU(a, b) = sum min(a, b) / sum max(a, b)            both maps all zero: 0
    w_i = p_i / sum p                                     confidence weights over the gold list
    C   = sum_{i<j} (w_i + w_j) sIoU(H_i^alpha, H_j^alpha) / (n - 1),   alpha = 2
    global = sum_c |G_c| C_c / sum_c |G_c|

H is the map at the image's size, min-max normalised; n - 1 is the sum of (w_i + w_j) over all pairs, which
the paper leaves as "Z". Gold lists: see gold.py, which also says where the paper contradicts itself.

Undefined cases the paper does not settle: an empty gold list scores 0 with weight 0 (the paper prints
0.000); a single image has no pair: NaN, left out of the global; every list empty: NaN. A list of blank maps
scores 0, with a reason.

Intervals (the paper has none) are 95 %. Exact mode: percentile bootstrap over the images of each class. A
resample holds image i m_i times; a pair of copies of one image would score 1 by construction, so only
pairs of different images count:
    C* = sum_{i<j} m_i m_j (p_i + p_j) s_ij / sum_{i<j} m_i m_j (p_i + p_j)
       = (m p)' S m / ((sum m p)(sum m) - sum m^2 p),   S = the score matrix with a zero diagonal,
which is one matrix product for all resamples. Beyond `exact_up_to` maps pairs are sampled, and the interval
says how well the sample knows the C of these very maps; it does not cover the choice of images.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from heatproof.errors import InputError
from heatproof.metrics.cscores import CScore as CScore
from heatproof.metrics.cscores import CScores as CScores
from heatproof.metrics.gold import (
    Tau,
    Weights,
    anchored,
    class_labels,
    class_probabilities,
    confidence_weights,
    gold_list,
    gold_mask,
    thresholds,
)
from heatproof.metrics.kit import as_tensor, pixel_maps, same_length, sized_maps
from heatproof.metrics.map_pairs import (
    EXACT_UP_TO,
    HALF_WIDTH,
    Z95,
    sampled_mean,
    soft_iou_matrix,
    soft_iou_rows,
)
from heatproof.metrics.stats import Interval, percentile_interval, resample
from heatproof.registry import metric
from heatproof.types import ArrayLike, Maps, constant, normalise, upsample

if TYPE_CHECKING:
    from heatproof.metrics.scene import CheckpointContext

NAN = float("nan")
BLANK = "every map of the gold list is constant, so that no two share anything"


@dataclass(frozen=True)
class _EmphasisedRows:
    """H^alpha as rows of pixels, made block by block: maps stay at their own size until needed."""

    values: Tensor
    size: tuple[int, ...]
    alpha: float

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Tensor) -> Tensor:
        picked = self.values[index.to(self.values.device)]
        return normalise(upsample(picked, self.size)).flatten(1).pow_(self.alpha)

    def dense(self) -> Tensor:
        """ "n p": all rows, with no second copy of them on the way."""
        pixels = torch.empty(len(self), math.prod(self.size), device=self.values.device)
        for index in torch.arange(len(self)).split(64):
            pixels[index[0] : index[-1] + 1] = self[index]
        return pixels

    def degenerate(self) -> float:
        """Share of maps in which nothing stands out."""
        return float(constant(self.values).double().mean())


def soft_iou(a: Maps | ArrayLike, b: Maps | ArrayLike) -> Tensor:
    """Soft IoU of maps "h w" -> scalar, or of pairs "b h w" or "b d h w" -> "b".

    Args:
        a, b: Maps, which are normalised at image size first, or tensors, which are taken as they are and must
            not be negative.

    >>> soft_iou([[1.0, 0.5], [0.0, 0.0]], [[1.0, 0.0], [0.5, 0.0]]).item()
    0.5
    """
    x, y = (pixel_maps(m) if isinstance(m, Maps) else as_tensor(m) for m in (a, b))
    if x.shape != y.shape or x.ndim not in (2, 3, 4):
        shapes = f"{tuple(x.shape)} and {tuple(y.shape)}"
        raise InputError(f"soft_iou needs two maps 'h w' or 'b h w' of one shape; got {shapes}")
    if not all(((m >= 0) & (m < math.inf)).all() for m in (x, y)):
        raise InputError("soft_iou needs finite maps without negative values; clip or normalise them first")
    single = x.ndim == 2
    rows = [m.double().reshape(1 if single else len(m), -1) for m in (x, y)]
    scores = soft_iou_rows(*rows)
    return scores[0] if single else scores


def cscore(
    maps: Maps | ArrayLike,
    confidence: ArrayLike,
    alpha: float = 2.0,
    *,
    exact_up_to: int = EXACT_UP_TO,
    half_width: float = HALF_WIDTH,
    resamples: int = 1000,
    seed: int = 0,
) -> CScore:
    """The C-Score of the maps of one gold list, weighted by the confidence in each image.

    Args:
        maps: of images of one class; Maps, or "b h w".
        confidence: "b" probabilities of that class.
        alpha: the power that emphasises what stands out.
        exact_up_to: beyond so many maps pairs are sampled.
        half_width: of the 95 % interval that the sample aims at.
        resamples, seed: of the bootstrap behind the interval, and of the sample.

    >>> same = torch.tensor([[0.0, 1.0], [0.5, 0.0]]).expand(3, 2, 2)
    >>> cscore(same, [0.9, 0.6, 0.75]).value
    1.0
    """
    rows = _rows(maps, alpha)
    p = _confidence(confidence, rows)
    return _score(rows, p, exact_up_to, half_width, resamples, (seed,))[0]


def _in_a_run(
    function: Callable[..., CScores], group: CheckpointContext, options: Mapping[str, Any]
) -> CScores:
    """An anchor is named there: its list is made of what the network said at that checkpoint."""
    given = dict(options)
    if group.every is not None:  # also images without a finding decide from which probability on it is there
        given["tau"] = thresholds(*group.every, given.get("tau", group.limits or 0.5)).tolist()
        if given.get("weights") == "calibrated":
            table = confidence_weights(*group.every, "calibrated", given.pop("temperature", None))
            given["weights"] = table[group.rows, group.labels]
    if name := given.get("anchor"):
        given["anchor"] = gold_list(group.labels, group.at(name), given.get("tau", 0.5))
    return function(group.maps, group.labels, group.probabilities, seed=group.seed, **given)


@metric(
    "cscore",
    needs=("maps", "labels", "probabilities"),
    level="class",
    higher_is_better=True,
    bounds=(0, 1),
    cite="elangovan2026cscore",
    title="C-Score: alike within a class",
    family="Consistency",
    own_class=True,
    volumes=True,
    call=_in_a_run,
    floors=(),  # a map that ignores the network is perfectly alike
)
def cscore_by_class(
    maps: Maps | ArrayLike,
    labels: ArrayLike,
    probs: ArrayLike,
    tau: Tau = 0.5,
    alpha: float = 2.0,
    *,
    anchor: ArrayLike | None = None,
    weights: Weights | Tensor = "confidence",
    temperature: float | None = None,
    exact_up_to: int = EXACT_UP_TO,
    half_width: float = HALF_WIDTH,
    resamples: int = 1000,
    seed: int = 0,
) -> CScores:
    """C-Score per class and overall: how alike the maps of correctly classified images of a class are.

    Args:
        maps: of all images; map i explains the own label of image i. An image with several findings is there
            once for each of them.
        labels, probs, tau: what gold lists are made of, see gold_list.
        anchor: a mask "b" or indices instead of the gold lists, such as the gold_list of another checkpoint.
        weights: what the confidence in an image is: its probability, that after calibration, 1, or these "b".
        temperature: of the calibration, fitted on other images; else on the other half of these, see gold.py.
        alpha, exact_up_to, half_width, resamples, seed: as for cscore.
    """
    rows = _rows(maps, alpha)
    p = class_probabilities(probs)
    same_length(maps=rows, labels=labels, probs=p)
    y = class_labels(labels, p.shape[1])
    gold = gold_mask(y, p, tau) if anchor is None else anchored(anchor, len(y))
    given = confidence_weights(y, p, weights, temperature) if isinstance(weights, str) else weights
    confidence = _confidence(given, rows).to(rows.values.device)
    used = thresholds(y, p, tau) if anchor is None else np.full(p.shape[1], NAN)

    classes: dict[int, CScore] = {}
    replicates: dict[int, np.ndarray] = {}
    for c in range(p.shape[1]):
        chosen = torch.from_numpy(np.flatnonzero(gold & (y == c))).to(rows.values.device)
        part = replace(rows, values=rows.values[chosen])
        classes[c], replicates[c] = _score(
            part, confidence[chosen], exact_up_to, half_width, resamples, (seed, c)
        )
    return CScores(classes, _overall(classes, replicates), dict(enumerate(used.tolist())))


def global_cscore(values: ArrayLike, sizes: ArrayLike) -> float:
    """The mean of class scores weighted by gold-list size; NaN where nothing is left.

    Args:
        values: a score per class; NaNs are left out.
        sizes: of the gold lists.

    >>> round(global_cscore([0.664, 0.014], [313, 798]), 3)
    0.197
    """
    same_length(values=values, sizes=sizes)
    scores, weights = (np.asarray(v, dtype=np.float64) for v in (values, sizes))
    if (weights < 0).any():
        raise InputError("gold-list sizes must not be negative")
    weights = np.where(np.isnan(scores), 0, weights)
    return float(np.nansum(scores * weights) / weights.sum()) if weights.sum() > 0 else NAN


def _rows(maps: Maps | ArrayLike, alpha: float) -> _EmphasisedRows:
    if not (alpha > 0 and math.isfinite(alpha)):
        raise InputError(f"alpha must be a positive number; got {alpha}")
    return _EmphasisedRows(*sized_maps(maps), alpha)


def _confidence(given: ArrayLike, rows: _EmphasisedRows) -> Tensor:
    p = as_tensor(given).double()
    same_length(maps=rows, confidence=p)
    if p.ndim != 1 or not ((p >= 0) & (p <= 1)).all():
        raise InputError("confidence must be 'b' probabilities in [0, 1], one per map")
    return p


def _score(
    rows: _EmphasisedRows,
    p: Tensor,
    exact_up_to: int,
    half_width: float,
    resamples: int,
    seed: tuple[int, ...],
) -> tuple[CScore, np.ndarray]:
    """The score, and the draws behind its interval (the overall interval is made of them)."""
    n = len(rows)
    none = np.full(resamples, NAN)
    if n == 0:
        return CScore(0.0, 0, NAN, reason="the gold list is empty"), none
    degenerate = rows.degenerate()
    blank = BLANK if degenerate == 1 else ""
    if n == 1 or not p.sum() > 0:
        why = "a single image has no pair" if n == 1 else "every confidence is zero"
        return CScore(NAN, n, degenerate, reason=why), none
    if n > exact_up_to:
        found = sampled_mean(rows, (p / p.sum()).cpu().numpy(), half_width, seed)
        low, high = max(found.value - found.half_width, 0.0), min(found.value + found.half_width, 1.0)
        noise = np.random.default_rng((*seed, 1)).standard_normal(resamples)
        draws = found.value + found.half_width / Z95 * noise
        return CScore(found.value, n, degenerate, (low, high), blank, sampled=True), draws

    matrix = soft_iou_matrix(rows.dense()).fill_diagonal_(0)
    p = p.to(matrix.device)
    value = float(p @ matrix.sum(1) / p.sum() / (n - 1))
    draws = _bootstrap(matrix, p, resamples, seed)
    return CScore(min(value, 1.0), n, degenerate, _interval(draws), blank), draws


def _bootstrap(matrix: Tensor, p: Tensor, resamples: int, seed: tuple[int, ...]) -> np.ndarray:
    """C* of every resample; NaN where a resample holds one image only."""
    n = len(p)
    drawn = resample(n, resamples, seed) + n * np.arange(resamples)[:, None]
    counts = np.bincount(drawn.ravel(), minlength=resamples * n).reshape(resamples, n)
    m = torch.from_numpy(counts).to(matrix)
    weighted = m * p
    top = ((weighted @ matrix) * m).sum(1)
    bottom = weighted.sum(1) * n - (weighted * m).sum(1)
    return torch.where(bottom > 1e-12, top / bottom, NAN).cpu().numpy()


def _interval(draws: np.ndarray) -> Interval:
    low, high = np.clip(percentile_interval(draws), 0, 1).tolist()
    return low, high


def _overall(classes: Mapping[int, CScore], replicates: Mapping[int, np.ndarray]) -> CScore:
    left_out = [c for c, score in classes.items() if math.isnan(score.value)]
    counted = {c: s for c, s in classes.items() if s.n > 0 and c not in left_out}
    n = sum(s.n for s in counted.values())
    reason = "; ".join(
        [f"class {c} left out: {classes[c].reason}" for c in left_out]
        + [f"class {c} counts as 0: {s.reason}" for c, s in counted.items() if s.reason]
    )
    if n == 0:
        return CScore(NAN, 0, NAN, reason=reason or "every gold list is empty")
    # Classes are resampled apart, with their sizes as they are: a stratified bootstrap.
    draws = np.sum([s.n / n * replicates[c] for c, s in counted.items()], axis=0)
    return CScore(
        value=global_cscore([s.value for s in counted.values()], [s.n for s in counted.values()]),
        n=n,
        degenerate=sum(s.n * s.degenerate for s in counted.values()) / n,
        interval=_interval(draws),
        reason=reason,
        sampled=any(s.sampled for s in counted.values()),
    )
