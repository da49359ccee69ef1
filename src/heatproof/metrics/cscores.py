"""C-Score: similarity of the maps of correctly classified images of one class (elangovan2026cscore); DoM.

    sIoU(a, b) = sum min(a, b) / sum max(a, b)            both maps all zero: 0
    w_i = p_i / sum p                                     confidence weights over the gold list
    C   = sum_{i<j} (w_i + w_j) sIoU(H_i^alpha, H_j^alpha) / (n - 1),   alpha = 2
    global = sum_c |G_c| C_c / sum_c |G_c|

H is the map at the image's size, min-max normalised; n - 1 is the sum of (w_i + w_j) over all pairs, which
the paper leaves as "Z". Gold lists: see classifier.py, also for a contradiction in the paper.

Undefined cases the paper does not settle: an empty gold list scores 0 with weight 0 (the paper prints
0.000); a single image has no pair: NaN, left out of the global; every list empty: NaN. A list of blank maps
scores 0, with a reason.

Intervals (the paper has none) are 95 %. Exact mode: percentile bootstrap over the images of each class. A
resample holds image i m_i times; a pair of copies of one image would score 1 by construction, so only
pairs of different images count:
    C* = sum_{i<j} m_i m_j (p_i + p_j) s_ij / sum_{i<j} m_i m_j (p_i + p_j)
       = (m p)' S m / ((sum m p)(sum m) - sum m^2 p),   S = the score matrix with a zero diagonal,
which is one matrix product for all resamples. Beyond `exact_up_to` maps pairs are sampled, and the interval
measures how well the sample estimates the C of these maps; it does not cover the choice of images.

DoM, the difference of means: distance between the mean maps of two networks, per class.

For the maps H of networks A and B of the same images, at the image's size and min-max normalised,

    M_c(A)  = mean over the images of class c of H(A)
    DoM_c   = mean over pixels of |M_c(A) - M_c(B)|              0: the same mean map; at most 1
    DoM     = sum_c n_c DoM_c / sum_c n_c

The C-Score's closest predecessor (ozer2025dom): it compares the mean maps of networks, where the C-Score
compares the maps of single images under one network.

Deviations: the metric is known from the C-Score paper, which describes it as comparing mean maps over
architectures and prints no formula; this is the plain reading. Blank maps are zeros and count; where all maps
of a class are blank under one of the networks, there is no mean map, and the class is NaN and left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor
from torch.nn import functional as F

from heatproof.errors import InputError
from heatproof.metrics import classifier
from heatproof.metrics.classifier import Tau, Weights
from heatproof.metrics.kit import as_tensor, chunks, pixel_maps, same_length, sized_maps
from heatproof.metrics.results import NAN, Interval, PerClass, percentile_interval, resample
from heatproof.registry import metric
from heatproof.types import ArrayLike, Maps, constant, normalise, upsample

if TYPE_CHECKING:
    from heatproof.metrics.kit import CheckpointContext

BLANK = "every map of the gold list is constant, so that no two share anything"
EXACT_UP_TO = 2000  # maps; beyond, pairs are sampled. 2,000 maps of 224x224 are 2 million pairs
HALF_WIDTH = 0.005  # of the interval that the sampled mode aims at
PILOT_PAIRS = 1000
MAX_PAIRS = 200_000  # HALF_WIDTH can never need more than 50,000: a score in [0, 1] has a deviation <= 1/2
Z95 = 1.959964
# Pixels per call of pdist. Sums inside a call are float32, across calls float64. With 512 the worst error
# in a score is 5e-7 (a constant difference, whose roundings all lean one way; random maps: 3e-8) and no maps
# can exceed about 2e-6. A GPU sums as a tree and is faster with longer rows.
CPU_BLOCK, GPU_BLOCK = 512, 4096
PAIRS_AT_ONCE = 128  # bounds the memory of the sampled mode
TEMPERATURES = (0.05, 20.0)  # a model without errors would have temperature 0
BELOW_ONE = 1 - 2.0**-24  # the largest single below 1: a probability of 1 is one that was rounded
NO_LABEL = "no image has a label"
NO_MEAN = "class {} left out: all its maps are constant under one of the networks, so there is no mean map"


@dataclass(frozen=True)
class _EmphasisedRows:
    """H^alpha as rows of pixels, computed block by block: maps stay at their own size until needed."""

    values: Tensor
    size: tuple[int, ...]
    alpha: float

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Tensor) -> Tensor:
        picked = self.values[index.to(self.values.device)]
        return normalise(upsample(picked, self.size)).flatten(1).pow_(self.alpha)

    def dense(self) -> Tensor:
        """Tensor "n p": all rows, with no second copy of them on the way."""
        pixels = torch.empty(len(self), math.prod(self.size), device=self.values.device)
        for index in torch.arange(len(self)).split(64):
            pixels[index[0] : index[-1] + 1] = self[index]
        return pixels


def soft_iou(a: Maps | ArrayLike, b: Maps | ArrayLike) -> Tensor:
    """Soft IoU of maps "h w" -> scalar, or of pairs "b h w" or "b d h w" -> "b".

    Args:
        a, b: Maps, which are normalised at image size first, or tensors, used unchanged, which must not
            be negative.

    Example:
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
    scores = soft_iou_rows(*(m.double().reshape(1 if single else len(m), -1) for m in (x, y)))
    return scores[0] if single else scores


def cscore(
    maps: Maps | ArrayLike, confidence: ArrayLike, alpha: float = 2.0, *, exact_up_to: int = EXACT_UP_TO,
    half_width: float = HALF_WIDTH, resamples: int = 1000, seed: int = 0,
) -> PerClass:  # fmt: skip
    """C-Score of the maps of one gold list, weighted by the confidence in each image.

    Args:
        maps: of images of one class; Maps, or "b h w".
        confidence: "b" probabilities of that class.
        alpha: the power that emphasises high values.
        exact_up_to: number of maps beyond which pairs are sampled.
        half_width: of the 95 % interval that the sample aims at.
        resamples, seed: of the bootstrap behind the interval, and of the sample.

    Returns:
        The score with its interval, n and the share of constant maps.

    Example:
        >>> same = torch.tensor([[0.0, 1.0], [0.5, 0.0]]).expand(3, 2, 2)
        >>> cscore(same, [0.9, 0.6, 0.75]).value
        1.0
    """
    rows = _rows(maps, alpha)
    return _score(rows, _confidence(confidence, rows), exact_up_to, half_width, resamples, (seed,))[0]


def _in_a_run(
    function: Callable[..., PerClass], context: CheckpointContext, options: Mapping[str, Any]
) -> PerClass:
    """Make the gold list of the anchor checkpoint, if an option names one, from its probabilities."""
    given = dict(options)
    if context.every is not None:  # images without a label decide its adaptive threshold too
        given["tau"] = classifier.thresholds(*context.every, given.get("tau", context.limits or 0.5)).tolist()
        if given.get("weights") == "calibrated":
            table = confidence_weights(*context.every, "calibrated", given.pop("temperature", None))
            given["weights"] = table[context.rows, context.labels]
    if name := given.get("anchor"):
        given["anchor"] = gold_list(context.labels, context.at(name), given.get("tau", 0.5))
    return function(context.maps, context.labels, context.probabilities, seed=context.seed, **given)


@metric(
    "cscore", needs=("maps", "labels", "probabilities"), level="class", higher_is_better=True, bounds=(0, 1),
    cite="elangovan2026cscore", title="C-Score: consistency by class", family="Consistency", own_class=True,
    volumes=True, call=_in_a_run, floors=(),  # control maps are no reference: they never change
)  # fmt: skip
def cscore_by_class(
    maps: Maps | ArrayLike, labels: ArrayLike, probs: ArrayLike, tau: Tau = 0.5, alpha: float = 2.0, *,
    anchor: ArrayLike | None = None, weights: Weights | Tensor = "confidence",
    temperature: float | None = None, exact_up_to: int = EXACT_UP_TO, half_width: float = HALF_WIDTH,
    resamples: int = 1000, seed: int = 0,
) -> PerClass:  # fmt: skip
    """C-Score per class and overall: similarity of the maps of correctly classified images of a class.

    Args:
        maps: of all images; map i explains the own label of image i. A multi-label image occurs
            once per label.
        labels, probs, tau: what gold lists are made of, see gold_list.
        anchor: a mask "b" or indices instead of the gold lists, such as the gold_list of another checkpoint.
        weights: the confidence in an image: its probability, calibrated or not, 1, or these "b".
        temperature: of the calibration, fitted on other images; default: on the other half of these.
        alpha, exact_up_to, half_width, resamples, seed: as for cscore.

    Returns:
        The mean over classes, weighted by the size of their lists, and a result like that of cscore by class.

    Example:
        >>> maps = torch.eye(4).view(4, 2, 2)[[0, 0, 1, 2]]
        >>> scores = cscore_by_class(maps, labels=[0, 0, 1, 1], probs=[0.1, 0.2, 0.9, 0.9])
        >>> scores.value, scores.classes[0].value, scores.classes[1].value
        (0.5, 1.0, 0.0)
    """
    rows = _rows(maps, alpha)
    p = classifier.class_probabilities(probs)
    same_length(maps=rows, labels=labels, probs=p)
    y = classifier.class_labels(labels, p.shape[1])
    listed = classifier.gold_mask(y, p, tau) if anchor is None else classifier.anchored(anchor, len(y))
    given = confidence_weights(y, p, weights, temperature) if isinstance(weights, str) else weights
    confidence = _confidence(given, rows).to(rows.values.device)
    classes: dict[int, PerClass] = {}
    replicates: dict[int, np.ndarray] = {}
    for c in range(p.shape[1]):
        chosen = torch.from_numpy(np.flatnonzero(listed & (y == c))).to(rows.values.device)
        part = replace(rows, values=rows.values[chosen])
        classes[c], replicates[c] = _score(
            part, confidence[chosen], exact_up_to, half_width, resamples, (seed, c)
        )
    whole = _overall(classes, replicates)
    used = classifier.thresholds(y, p, tau) if anchor is None else np.full(p.shape[1], NAN)
    limits = {"thresholds": dict(enumerate(used.tolist()))}
    return replace(whole, classes=classes, parts={**whole.parts, **limits})


def global_cscore(values: ArrayLike, sizes: ArrayLike) -> float:
    """Mean of class scores weighted by gold-list size; NaN if no class has a score.

    Args:
        values: a score per class; NaNs are left out.
        sizes: of the gold lists.

    Example:
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


def _result(
    value: float, n: int, degenerate: float, interval: Interval = (NAN, NAN), reason: str = "",
    sampled: bool = False,
) -> PerClass:  # fmt: skip
    """A C-Score, with the numbers that a run stores beside it."""
    low, high = np.clip(interval, 0, 1).tolist()
    stored = {"n": float(n), "low": low, "high": high, "degenerate": degenerate}
    return PerClass(value, n, degenerate, (low, high), reason, parts={**stored, "sampled": sampled})


def _score(
    rows: _EmphasisedRows, p: Tensor, exact_up_to: int, half_width: float, resamples: int,
    seed: tuple[int, ...],
) -> tuple[PerClass, np.ndarray]:  # fmt: skip
    """The score, and its bootstrap draws, from which the overall interval is computed."""
    n = len(rows)
    none = np.full(resamples, NAN)
    if n == 0:
        return _result(0.0, 0, NAN, reason="the gold list is empty"), none
    degenerate = float(constant(rows.values).double().mean())
    blank = BLANK if degenerate == 1 else ""
    if n == 1 or not p.sum() > 0:
        why = "a single image has no pair" if n == 1 else "every confidence is zero"
        return _result(NAN, n, degenerate, reason=why), none
    if n > exact_up_to:
        mean, reach, _ = sampled_mean(rows, (p / p.sum()).cpu().numpy(), half_width, seed)
        draws = mean + reach / Z95 * np.random.default_rng((*seed, 1)).standard_normal(resamples)
        return _result(mean, n, degenerate, (mean - reach, mean + reach), blank, sampled=True), draws

    matrix = soft_iou_matrix(rows.dense()).fill_diagonal_(0)
    p = p.to(matrix.device)
    value = float(p @ matrix.sum(1) / p.sum() / (n - 1))
    draws = _bootstrap(matrix, p, resamples, seed)
    return _result(min(value, 1.0), n, degenerate, percentile_interval(draws), blank), draws


def _bootstrap(matrix: Tensor, p: Tensor, resamples: int, seed: tuple[int, ...]) -> np.ndarray:
    """C* of every resample; NaN for a resample of one image only."""
    n = len(p)
    drawn = resample(n, resamples, seed) + n * np.arange(resamples)[:, None]
    counts = np.bincount(drawn.ravel(), minlength=resamples * n).reshape(resamples, n)
    m = torch.from_numpy(counts).to(matrix)
    weighted = m * p
    top = ((weighted @ matrix) * m).sum(1)
    bottom = weighted.sum(1) * n - (weighted * m).sum(1)
    return torch.where(bottom > 1e-12, top / bottom, NAN).cpu().numpy()


def _overall(classes: Mapping[int, PerClass], replicates: Mapping[int, np.ndarray]) -> PerClass:
    left_out = [c for c, score in classes.items() if math.isnan(score.value)]
    counted = {c: s for c, s in classes.items() if s.n > 0 and c not in left_out}
    n = sum(s.n for s in counted.values())
    notes = {c: f"left out: {classes[c].reason}" for c in left_out}
    notes |= {c: f"counts as 0: {s.reason}" for c, s in counted.items() if s.reason}
    by_note = {note: [str(c) for c in notes if notes[c] == note] for note in notes.values()}
    reason = "; ".join(f"class {', '.join(own)} {note}" for note, own in by_note.items())
    if n == 0:
        return _result(NAN, 0, NAN, reason=reason or "every gold list is empty")
    # Classes are resampled apart, with their sizes as they are: a stratified bootstrap.
    draws = np.sum([s.n / n * replicates[c] for c, s in counted.items()], axis=0)
    return _result(
        value=global_cscore([s.value for s in counted.values()], [s.n for s in counted.values()]),
        n=n,
        degenerate=sum(s.n * s.degenerate for s in counted.values()) / n,
        interval=percentile_interval(draws),
        reason=reason,
        sampled=any(s.sampled for s in counted.values()),
    )


def soft_iou_matrix(pixels: Tensor, block: int | None = None) -> Tensor:
    """Soft IoU of every pair of maps, "n p" float32 without negatives -> "n n" float64.

    min(x, y) = (x + y - |x - y|) / 2 and max(x, y) = (x + y + |x - y|) / 2, so that
    sIoU(a, b) = (A + B - L1(a, b)) / (A + B + L1(a, b)),  A = sum a, B = sum b.
    Memory: the maps, one block of them, and n * n scores.
    """
    pixels, n = pixels.detach(), len(pixels)
    mass = pixels.sum(1, dtype=torch.float64)
    i, j = torch.triu_indices(n, n, 1, device=pixels.device)
    matrix = torch.diag((mass > 0).double())
    matrix[i, j] = matrix[j, i] = iou_from_distance(mass[i] + mass[j], _l1_pairs(pixels, block))
    return matrix


def _l1_pairs(pixels: Tensor, block: int | None) -> Tensor:
    """L1 distance of every pair i < j, in the order of triu_indices, float64."""
    # torch.pdist is the fastest exact kernel of those tried (855 maps of 224x224, 2 cores: 1.1 s);
    # torch.cdist, NumPy in threads and scipy's cityblock take several times as long.
    total = torch.zeros(len(pixels) * (len(pixels) - 1) // 2, dtype=torch.float64, device=pixels.device)
    for part in pixels.split(block or (CPU_BLOCK if pixels.is_cpu else GPU_BLOCK), dim=1):
        if pixels.is_cpu:
            # Copy and sum in NumPy: torch would gather all its threads for each, and where cores are shared
            # with other work it is this gathering, not the arithmetic, that takes the time.
            total.numpy()[:] += F.pdist(torch.from_numpy(np.ascontiguousarray(part.numpy())), p=1).numpy()
        else:
            total += F.pdist(part, p=1)
    return total


def iou_from_distance(mass: Tensor, distance: Tensor) -> Tensor:
    """Soft IoU from the sum of both masses and the L1 distance; 0 for two empty maps."""
    return torch.where(mass > 0, (mass - distance) / (mass + distance), 0.0).clamp(0, 1)


def soft_iou_rows(a: Tensor, b: Tensor) -> Tensor:
    """Turn "m p", "m p" into "m" float64: row by row."""
    mass = a.sum(1, dtype=torch.float64) + b.sum(1, dtype=torch.float64)
    return iou_from_distance(mass, (a - b).abs().sum(1, dtype=torch.float64))


def sampled_mean(
    rows: _EmphasisedRows | Tensor, weights: np.ndarray, half_width: float = HALF_WIDTH,
    seed: int | tuple[int, ...] = 0, max_pairs: int = MAX_PAIRS,
) -> tuple[float, float, int]:  # fmt: skip
    """Estimate C = sum_{i<j} (w_i + w_j) s_ij / (n - 1), with weights that sum to 1, from random pairs.

    Returns the mean, the half-width of its 95 % interval and the number of pairs. Draw i with probability
    w_i and j evenly from the n - 1 others. Then, since s is symmetric,
        E[s_ij] = sum_i w_i sum_{j != i} s_ij / (n - 1) = sum_{i<j} (w_i + w_j) s_ij / (n - 1) = C.
    A pilot fixes the number of pairs and is then discarded: were its draws used, the number would depend on
    the scores being averaged and the mean would be biased.
    """
    rng = np.random.default_rng(seed)
    deviation = _draw(rows, weights, PILOT_PAIRS, rng).std(ddof=1)
    wanted = 1.2 * (Z95 * deviation / half_width) ** 2  # 1.2: the pilot's deviation is itself uncertain
    pairs = min(max(math.ceil(wanted), PILOT_PAIRS), max_pairs)
    scores = _draw(rows, weights, pairs, rng)
    error = Z95 * scores.std(ddof=1) / math.sqrt(pairs)
    # Events in under 3 / pairs of the draws are missed with a probability of 5 % or more,
    # so that no sample bounds a mean of numbers in [0, 1] more tightly.
    return float(scores.mean()), float(max(error, 3 / pairs)), pairs


def _draw(
    rows: _EmphasisedRows | Tensor, weights: np.ndarray, pairs: int, rng: np.random.Generator
) -> np.ndarray:
    first = rng.choice(len(rows), size=pairs, p=weights)
    second = rng.integers(0, len(rows) - 1, size=pairs)
    second += second >= first
    parts = torch.from_numpy(np.stack([first, second])).split(PAIRS_AT_ONCE, dim=1)
    return torch.cat([soft_iou_rows(*rows[part.flatten()].detach().chunk(2)) for part in parts]).cpu().numpy()


def gold_list(labels: ArrayLike, probs: ArrayLike, tau: Tau = 0.5) -> Tensor:
    """Select the gold list, "b" bool: images whose own class has a probability of at least tau.

    Args:
        labels: "b", the true classes; "b k" of 0 and 1 for multi-label images: the result is then "b k", a
            list per label.
        probs: "b k", or "b" of class 1.
        tau: a probability, one for each class, or "adaptive": each class is predicted as often as it occurs.

    Example:
        >>> gold_list([0, 0, 1, 1], [0.2, 0.7, 0.5, 0.4]).tolist()
        [True, False, True, False]
    """
    listed = torch.from_numpy(classifier.gold_mask(labels, probs, tau))
    return listed.to(probs.device) if isinstance(probs, torch.Tensor) else listed


def temperature(labels: ArrayLike, probs: ArrayLike) -> float:
    """Temperature with the least negative log-likelihood; above 1 for overconfident probabilities."""
    p, y = map(torch.from_numpy, classifier.checked(labels, probs))
    if len(y) == 0:
        return 1.0
    log_p = p.clamp(min=torch.finfo(torch.float32).tiny).log()

    def loss(log_t: float) -> float:
        scaled = (log_p / math.exp(log_t)).log_softmax(1)
        return -float(scaled.gather(1, y[:, None]).mean())

    low, high = (math.log(t) for t in TEMPERATURES)
    return float(math.exp(minimize_scalar(loss, bounds=(low, high), method="bounded").x))


def calibrate(probs: ArrayLike, t: float) -> Tensor:
    """Tensor "b k": probabilities at temperature t."""
    p = torch.from_numpy(classifier.class_probabilities(probs)).clamp(min=torch.finfo(torch.float32).tiny)
    return (p.log() / t).softmax(1)


def confidence_weights(
    labels: ArrayLike, probs: ArrayLike, kind: Weights = "confidence", t: float | None = None
) -> Tensor:
    """Tensor "b": the weight of each image; "b k" for multi-label images, per label.

    t: a temperature fitted on other images; None: each half of these gets that of the other.
    """
    if classifier.is_table(labels):
        chances, truth = classifier.checked(labels, probs)
        sure = np.minimum(chances, BELOW_ONE) if kind == "calibrated" else chances
        columns = zip(truth.T, sure.T, strict=True)
        return torch.stack([confidence_weights(has, chance, kind, t) for has, chance in columns], 1)
    p, y = map(torch.from_numpy, classifier.checked(labels, probs))
    classifier.ListRule(weights=kind)  # refuses other words
    if t is not None and not 0 < t < math.inf:
        raise InputError(f"a temperature is a positive number; got {t}")
    if kind == "uniform":
        return torch.ones(len(y), dtype=p.dtype)
    p = calibrate(p, t) if kind == "calibrated" and t is not None else p
    own = p.gather(1, y[:, None])[:, 0]
    if kind == "confidence" or t is not None:
        return own
    weights, second = own.clone(), torch.zeros(len(y), dtype=torch.bool)
    for c in y.unique():  # every other image of each class, in the order of its confidence, not of the list
        members = torch.nonzero(y == c)[:, 0]
        second[members[own[members].argsort(stable=True)][1::2]] = True
    for fold in (second, ~second):
        fitted = calibrate(p[fold], temperature(y[~fold], p[~fold]))
        weights[fold] = fitted.gather(1, y[fold][:, None])[:, 0]
    return weights


@metric(  # maps that ignore the network never change, so control maps are no reference
    "dom", needs=("maps", "labels"), level="checkpoint", higher_is_better=False, bounds=(0.0, 1.0),
    cite="ozer2025dom", title="DoM: distance to the last checkpoint's mean maps", family="Consistency",
    compares_checkpoints=True, floors=(), volumes=True,
)  # fmt: skip
def dom(first: Maps | ArrayLike, second: Maps | ArrayLike, labels: ArrayLike) -> PerClass:
    """Distance of the mean maps of two networks, by class and over all; 0 for the same mean map.

    Args:
        first, second: maps of the same images by two networks, or checkpoints, or methods; of any size each,
            where they are Maps.
        labels: "b" classes; images with -1 have none and are left out.

    Returns:
        The mean over classes, weighted by their images, and the distance of each class.

    Example:
        >>> a, b = torch.zeros(2, 2, 2), torch.zeros(2, 2, 2)
        >>> a[:, 0, 0], b[0, 0, 0], b[1, 1, 1] = 1.0, 1.0, 1.0
        >>> dom(a, b, [0, 0]).value
        0.25
    """
    (own, size), (other, size_of_other) = sized_maps(first), sized_maps(second)
    classes = as_tensor(labels).to(own.device)
    same_length(first=own, second=other, labels=classes)
    if size != size_of_other:
        raise InputError(f"dom compares maps of the same images; got sizes {size} and {size_of_other}")
    if classes.ndim != 1 or classes.is_floating_point():
        raise InputError("labels must be 'b' class numbers, one per map")
    gaps, counts = {}, {}
    for label in sorted(map(int, set(classes[classes >= 0].tolist()))):
        rows = (classes == label).nonzero()[:, 0]
        pair = own[rows], other.to(own.device)[rows]
        if any(constant(maps).all() for maps in pair):
            gaps[label] = NAN
            continue
        gap = mean_map(pair[0], size) - mean_map(pair[1], size)
        gaps[label], counts[label] = float(gap.abs().mean()), len(rows)
    blank = [str(label) for label in gaps if label not in counts]
    reason = NO_MEAN.format(", ".join(blank)) if blank else "" if gaps else NO_LABEL
    n = sum(counts.values())
    value = sum(gaps[label] * count for label, count in counts.items()) / n if n else NAN
    return PerClass(value, n, classes=gaps, reason=reason)


def mean_map(maps: Tensor, size: tuple[int, ...]) -> Tensor:
    """Tensor "H W" in float64: the mean of maps "b h w", each enlarged and normalised first."""
    total = torch.zeros(size, dtype=torch.float64, device=maps.device)
    for part in chunks(maps, size):
        total += normalise(upsample(maps[part], size)).sum(0, dtype=torch.float64)
    return total / len(maps)
