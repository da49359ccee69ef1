"""Mass of maps on the parts of a concept, such as the patterns of a QR code, and effects of occluding them.

With C~ the map in [0, 1], S = sum C~, masks M_p of the parts, M_B of the region that holds them (eq. 3-9):

    mass_p     = <C~, M_p> / S                      FMR, TMR for a QR code's finder and timing patterns
    leakage    = <C~, 1 - M_B> / S                  BL
    coverage_p = mean over tau of |{C~ >= tau} & M_p| / |{C~ >= tau}|,  tau at 31 quantiles of C~    AUC
    distance   = <C~, D> / (S sqrt(H^2 + W^2)),  D the distance to the nearest pixel of any part     DtS
    score      = AUC_F + AUC_T - 3 AUC_BG - DtS   ("auc", eq. 10)
                 FMR + TMR - 3 BL - DtS           ("mass", what the paper's Fig. 5 plots)

Cite: chakraborty2025cambench.

Choices where the paper is open or wrong:
- Quantile levels are linspace(0, 0.99, 31); the AUC is their plain mean. The paper says a map that stays
  inside the finders has AUC_F 1; with quantile thresholds the zeros around it count too, and a version-1
  code's own finder mask gets 0.548387.
- {C~ >= the q-quantile} is {C~ >= the value of rank ceil(q (n-1))}, ties included; nothing is interpolated.
- Epsilon (1e-6) is added to the range of the map as the method returns it (eq. 3), at the image's size and
  without negatives. Shares of a rescaled map stay the same as long as its range is well above 1e-12.
- A constant map, or one whose C~ sums to 1e-6 or less, has no mass to share out: every value is NaN, although
  the formulas would return numbers.
- Masks of another size are resized to the nearest pixel centre, then binarised at 0.5.

occlusion_drop: whether the model needs the part that the map marks. Its pixels are replaced by a baseline of
insertion and deletion (by default a Gaussian blur of sigma 10; the paper does not say with what it occludes):
    drop = z(x) - z(x with the part's pixels replaced)
A map is right about the part where its mass on it (FMR, TMR) goes with that drop: Spearman's rho over images.
Class 0 of a one-logit model is read as -z. A mask without a pixel occludes nothing: NaN, with a reason.

bl_slope, aurc: changes of scores under distortion. For a metric m at severities s of a distortion:
    slope = least-squares slope of m on s,   aurc = trapezoid of m(s) / m(0) over s (1: it does not move)
Both are means over the distortions, plain readings of a paper without formulas. A curve with an undefined
point is left out and `n` counts the rest; m(0) = 0 is undefined.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial, reduce
from pathlib import Path
from typing import Any, TypeVar, Unpack

import numpy as np
import torch
from scipy.ndimage import distance_transform_edt
from torch import Tensor, nn

from heatproof.errors import InputError, did_you_mean
from heatproof.explain.baselines import baseline_images, mixed
from heatproof.metrics import kit
from heatproof.metrics.agreement import Correlation, rank_correlation
from heatproof.metrics.kit import CONSTANT, BatchContext, Passes, align, as_tensor, bound, chunks
from heatproof.metrics.results import Cause, PerImage
from heatproof.models.model import Model, Queue
from heatproof.models.running import at_least_float, frozen_eval
from heatproof.registry import metric
from heatproof.types import (
    ArrayLike,
    Images,
    Maps,
    extremes,
    normalise,
    per_map,
    size_of,
    spatial_dims,
    upsample,
)

EPSILON = 1e-6
THRESHOLDS = 31
NAMES = ("fmr", "tmr", "bl", "auc_f", "auc_t", "auc_bg", "dts")
TERMS = {"auc": ("auc_f", "auc_t", "auc_bg"), "mass": ("fmr", "tmr", "bl")}  # of the structure score
NO_CODE = "the image has no code, so there is no structure to score"
NO_PART = "no pixel belongs to a part, so there is no distance to one"
NO_PIXEL = "the mask has no pixel, so nothing is occluded"
GAP = "every distortion has a severity at which the metric is not defined"
NO_START = "the metric is 0 or not defined at severity 0 (or later) under every distortion"
CITE = "chakraborty2025cambench"
Number = TypeVar("Number", float, Tensor)


@metric(
    "occlusion_drop", needs=("model", "images", "masks"), cite=CITE, family="Causes", volumes=True,
    not_in_a_run="it occludes one named part; call hp.metrics for it",
)  # fmt: skip
def part_occlusion(
    masks: ArrayLike | Mapping[str, ArrayLike], targets: ArrayLike | None = None, *,
    model: Model | nn.Module, images: Images, fill: str = "blur", seed: int = 0, **passes: Unpack[Passes],
) -> PerImage:  # fmt: skip
    """Fall of the target's logit when a part of the images is occluded.

    Args:
        masks: "b H W" or one "H W" (any size; resized to the nearest pixel), or a dict of them by part. Each
            image is run once whole and once per part, all in one queue.
        targets: the class, one or one per image; default: the prediction.
        model, images, passes: as for hp.explain; passes are batch_size and progress.
        fill, seed: "blur", "black", "mean" or "noise", as baseline of insertion_deletion; the seed of noise.

    Returns:
        drop, or drop_<part> of each part.

    Example:
        >>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 2))
        >>> masks = {"left": torch.eye(4), "right": torch.eye(4).flip(1)}
        >>> list(part_occlusion(masks, 0, model=network, images=torch.rand(1, 3, 4, 4)))
        ['drop_left', 'drop_right']
    """
    model, inputs, targets = bound(model, images, targets)
    whole = at_least_float(inputs)
    parts = {f"drop_{k}": m for k, m in masks.items()} if isinstance(masks, Mapping) else {"drop": masks}
    if not parts:
        raise InputError("masks is an empty dict; give at least one part, such as {'finder': mask}")
    size, count = size_of(whole), len(whole)
    aligned = (align(mask, size, whole, name) for name, mask in parts.items())
    hidden = torch.stack([mask.expand(count, *size) for mask in aligned])
    filled = baseline_images(model, whole, fill, seed)

    def make(start: int, stop: int) -> Tensor:
        jobs = torch.arange(start, stop, device=whole.device)
        rows, part = jobs % count, jobs // count - 1  # -1: the whole image
        covered = hidden[part.clamp(min=0), rows]
        covered = covered & per_map(part >= 0, covered)
        return mixed(covered, filled, whole, rows)

    with frozen_eval(model.module):
        queue = Queue(model, size, **passes)
        logits = queue.predict(count * (1 + len(parts)), make, lambda logits, start, stop: logits)
    chosen = model.check_targets(targets, logits[:count])
    scores = model.scores(logits, chosen.repeat(1 + len(parts))).view(-1, count)
    drops = dict(zip(parts, scores[0] - scores[1:], strict=True))
    empty = ~hidden.flatten(2).any(2)
    return PerImage(drops, [Cause(NO_PIXEL, gone, (name,)) for name, gone in zip(parts, empty, strict=True)])


occlusion_drop = part_occlusion


@metric(
    "occlusion_correlation", needs=("scores",), level="checkpoint", higher_is_better=True, bounds=(-1.0, 1.0),
    cite=CITE, family="Causes",
)  # fmt: skip
def occlusion_correlation(mass: ArrayLike, drop: ArrayLike) -> Correlation:
    """Spearman's rho, p and n of a part's mass (FMR, TMR) with the drop of the logit, over images.

    Args:
        mass, drop: one per image; images for which either is NaN are left out of n.

    Returns:
        rho, p, n and a reason where rho is NaN.

    Example:
        >>> occlusion_correlation([0.1, 0.4, 0.2], [1.0, 3.0, 2.0])[::2]
        (1.0, 3)
    """
    return rank_correlation(mass, drop, ("mass", "drop"))


def _in_a_run(_: Callable[..., Any], context: BatchContext, options: dict[str, Any]) -> dict[str, PerImage]:
    """All scores, of which each metric reads its own."""
    assert context.batch.truth is not None
    masks = context.batch.truth.masks
    parts = masks["finder"], masks["timing"], masks["box"]
    nothing = Cause(NO_CODE, ~masks["box"].flatten(1).any(1))
    scores = {method: structure(maps, *parts, **options) for method, maps in context.maps.items()}
    # The shares of an empty mask are 0 and 1 for every map, so means leave them out.
    return {method: PerImage(own, [nothing, *own.causes]) for method, own in scores.items()}


_metric = partial(
    metric, needs=("maps", "masks"), higher_is_better=True, bounds=(0.0, 1.0), cite=CITE, family="Structure",
    bundle="structure", call=_in_a_run, question="network", volumes=True,
)  # fmt: skip


def structure(
    maps: Maps | ArrayLike, finder: ArrayLike, timing: ArrayLike, box: ArrayLike, variant: str = "auc"
) -> PerImage:
    """Mass, coverage, leakage and distance of maps on the parts of a QR code, and their sum.

    Args:
        maps: Maps, or "b h w".
        finder, timing, box: masks of both patterns and of the code, "b H W" or one "H W" for all.
        variant: what the score sums up: coverages, "auc", or masses, "mass".

    Returns:
        fmr, tmr, bl, auc_f, auc_t, auc_bg, dts and score, each "b".

    Example:
        >>> scores = structure([[[3.0, 1.0], [0, 0]]], [[1, 0], [0, 0]], [[0, 1], [0, 0]], [[1, 1], [0, 0]])
        >>> scores["fmr"], scores["tmr"], scores["bl"]
        (tensor([0.7500]), tensor([0.2500]), tensor([0.]))
    """
    if variant not in TERMS:
        hint = did_you_mean(variant, TERMS)
        raise InputError(f"unknown variant {variant!r} of the structure score; {hint}")
    scores, (flat, bare, *_) = _scored(maps, {"finder": finder, "timing": timing}, box, "box")
    values = dict(zip(NAMES, (scores[key] for key in _keys(("finder", "timing"))), strict=True))
    values["score"] = structure_score(*(values[name] for name in (*TERMS[variant], "dts")))
    return PerImage(values, [flat, bare._replace(names=("dts", "score"))])


EXAMPLE = """
>>> parts = [[1, 0], [0, 0]], [[0, 1], [0, 0]], [[1, 1], [0, 0]]
>>> {name}([[[3.0, 1.0], [0, 0]]], *parts)["{key}"]""".strip()
_score = kit.members(_metric, structure, PerImage.only, '{key}, "b".', EXAMPLE)
_facts = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
fmr, tmr, bl, auc_f, auc_t, auc_bg, dts, structure_map_score = (
    _score(name, **{key: tuple(v) if isinstance(v, list) else v for key, v in facts.items()})
    for name, facts in _facts.items()
)


def structure_score(finder: Number, timing: Number, background: Number, distance: Number) -> Number:
    """Sum of coverages (eq. 10) or of masses (Fig. 5), in which leakage counts three times.

    A run computes it from maps: structure_map_score.

    Args:
        finder, timing, background: coverages (auc_f, auc_t, auc_bg) or masses (fmr, tmr, bl).
        distance: dts.

    Returns:
        finder + timing - 3 background - distance.

    Example:
        >>> structure_score(0.5, 0.25, 0.125, 0.125)
        0.25
    """
    return finder + timing - 3 * background - distance


def _parts_in_a_run(
    function: Callable[..., PerImage], context: BatchContext, options: dict[str, Any]
) -> dict[str, PerImage]:
    """Every mask is a part, except that of the region, which the option names."""
    masks, name = dict(context.batch.truth.masks if context.batch.truth else {}), options.get("region")
    if name is not None and name not in masks:
        raise InputError(f"structure_parts: there is no mask {name!r}; {did_you_mean(name, masks)}")
    region = None if name is None else masks.pop(name)
    return {method: function(maps, masks, region) for method, maps in context.maps.items()}


@metric(
    "structure_parts", needs=("maps", "masks"), cite=CITE, family="Structure", question="network",
    call=_parts_in_a_run, volumes=True,
)  # fmt: skip
def structure_parts(
    maps: Maps | ArrayLike, parts: Mapping[str, ArrayLike], region: ArrayLike | None = None
) -> PerImage:
    """Scores as of structure for any named parts, such as lung fields or the blocks of a document.

    Args:
        maps: Maps, or "b h w".
        parts: masks by name, "b H W" or one "H W" for all.
        region: mask of the whole object (in a run: its name); default: the union of the parts. Mass outside
            it is leakage.

    Returns:
        mass_<part> and coverage_<part> of each, leakage, coverage_outside and distance, each "b"; NaN for
        an image without the part.

    Example:
        >>> structure_parts([[[3.0, 1.0], [0, 0]]], {"lung": [[1, 0], [0, 0]]})["mass_lung"]
        tensor([0.7500])
    """
    if not parts:
        raise InputError("parts is empty; pass at least one mask, such as {'lung': mask}")
    return PerImage(*_scored(maps, parts, region, "region"))


def _keys(parts: Sequence[str]) -> list[str]:
    masses, coverages = [f"mass_{p}" for p in parts], [f"coverage_{p}" for p in parts]
    return [*masses, "leakage", *coverages, "coverage_outside", "distance"]


def _scored(
    maps: Maps | ArrayLike, parts: Mapping[str, ArrayLike], region: ArrayLike | None, region_name: str
) -> tuple[dict[str, Tensor], list[Cause]]:
    values, size = kit.sized_maps(maps)
    values = values.detach()
    masks = [align(mask, size, values, name) for name, mask in parts.items()]
    union = reduce(torch.logical_or, masks)
    inside = union if region is None else align(region, size, values, region_name)
    areas = [mask.expand(len(values), *size) for mask in (*masks, ~inside)]
    pieces = []
    for part in chunks(values, size):
        distance = distance_to(union[part] if len(union) > 1 else union)
        pieces.append(_measure(upsample(values[part], size), [area[part] for area in areas], distance))
    table = torch.cat(pieces) if pieces else values.new_zeros((0, 2 * len(masks) + 4), dtype=torch.float32)
    scores = dict(zip(_keys(tuple(parts)), table[:, 1:].unbind(1), strict=True))
    bare, *absent = (~mask.flatten(1).any(1).expand(len(values)) for mask in (union, *masks))
    return scores, [
        Cause(CONSTANT, table[:, 0] > 0),
        Cause(NO_PART, bare, ("distance",)),
        *(
            Cause(f"the image has no {name}", where, (f"mass_{name}", f"coverage_{name}"))
            for name, where in zip(parts, absent, strict=True)
        ),
    ]


def _measure(values: Tensor, areas: Sequence[Tensor], distance: Tensor) -> Tensor:
    """Table "b columns" from maps at image size, also empty ones, which column 0 marks; others as `_keys`."""
    low, high = extremes(values.clamp(min=0), spatial_dims(values))
    pixels = (normalise(values) * ((high - low) / (high - low + EPSILON))).flatten(1)
    mass = pixels.sum(1, dtype=torch.float64) + EPSILON
    shares = [(pixels * area.flatten(1)).sum(1, dtype=torch.float64) / mass for area in areas]
    coverages = _coverage(pixels, [area.flatten(1) for area in areas])
    diagonal = sum(side**2 for side in values.shape[1:]) ** 0.5
    far = (pixels * distance.flatten(1)).sum(1, dtype=torch.float64) / (mass * diagonal)
    return torch.stack([(mass <= 2 * EPSILON).double(), *shares, *coverages, far], 1).float()


def _coverage(pixels: Tensor, areas: Sequence[Tensor]) -> list[Tensor]:
    """Mean over the thresholds of each area's share of {C~ >= tau}: "b n", each "b n" -> each "b"."""
    ranks = np.ceil(np.linspace(0, 0.99, THRESHOLDS) * (pixels.shape[1] - 1)).astype(int).tolist()
    thresholds = kit.ascending(pixels)[:, ranks].contiguous()
    # Bin k + 1 holds the pixels at or above tau_k and below tau_k+1; summed from the top, bins become sets.
    bins = torch.searchsorted(thresholds, pixels, right=True)

    def set_sizes(area: Tensor) -> Tensor:
        counts = torch.zeros((len(pixels), THRESHOLDS + 1), dtype=torch.int64, device=pixels.device)
        counts.scatter_add_(1, bins, area.long())
        return counts.flip(1).cumsum(1).flip(1)[:, 1:].double()

    total = set_sizes(torch.ones_like(pixels)) + EPSILON
    return [(set_sizes(area) / total).mean(1) for area in areas]


def distance_to(masks: Tensor) -> Tensor:
    """Distance to masks "b h w", float32, infinite where a mask has no pixel; each mask is transformed once.

    >>> distance_to(torch.tensor([[[True, False, False]]])).tolist()
    [[[0.0, 1.0, 2.0]]]
    """
    size = tuple(masks.shape[1:])
    packed = np.packbits(masks.flatten(1).cpu().numpy(), axis=1)
    fields = [_transform(size, bits.tobytes()) for bits in packed]
    return torch.from_numpy(np.stack(fields) if fields else np.zeros((0, *size), np.float32)).to(masks.device)


@lru_cache(maxsize=512)
def _transform(size: tuple[int, ...], packed: bytes) -> np.ndarray:
    bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=math.prod(size))
    mask = bits.reshape(size).astype(bool)
    if not mask.any():
        return np.full(size, np.inf, np.float32)
    field: np.ndarray = distance_transform_edt(~mask).astype(np.float32)
    return field


@metric(
    "bl_slope", needs=("severities",), higher_is_better=False, cite=CITE, aliases=("slope",),
    family="Robustness", floors=(),
)  # fmt: skip
def bl_slope(values: ArrayLike, severities: ArrayLike) -> PerImage:
    """Growth of a metric per unit of a distortion's severity, mean over distortions.

    Args:
        values: a metric of b images under d distortions at s severities, "b d s" or "d s".
        severities: "s" numbers.

    Returns:
        bl_slope, and n, the distortions that counted, each "b".

    Example:
        >>> bl_slope([[0.1, 0.2, 0.3]], [0, 1, 2])["bl_slope"].round(decimals=3)
        tensor(0.1000)
    """
    curves, levels = _curves(values, severities)
    centred = levels - levels.mean()
    return _averaged("bl_slope", (curves * centred).sum(-1) / centred.square().sum(), GAP)


@metric(
    "aurc", needs=("severities",), higher_is_better=True, bounds=(0.0, float("inf")), cite=CITE,
    family="Robustness", floors=(),
)  # fmt: skip
def aurc(values: ArrayLike, severities: ArrayLike) -> PerImage:
    """Share of a metric that remains under distortion: area under its curve, relative to the start.

    Args:
        values, severities: as for bl_slope; one severity is 0.

    Returns:
        aurc, and n, the distortions that counted, each "b".

    Example:
        >>> aurc([[0.4, 0.2]], [0, 1])["aurc"]
        tensor(0.7500)
    """
    curves, levels = _curves(values, severities)
    if levels[0] != 0:
        raise InputError(f"aurc compares with severity 0; the severities start at {levels[0]:g}")
    start = curves[..., :1]
    shares = curves / torch.where(start == 0, torch.nan, start)
    return _averaged("aurc", torch.trapezoid(shares, levels, dim=-1), NO_START)


def _curves(values: ArrayLike, severities: ArrayLike) -> tuple[Tensor, Tensor]:
    """Tensor "... d s" and "s", in order of severity, float64."""
    curves = as_tensor(values).detach().double()
    levels = as_tensor(severities).detach().double().to(curves.device)
    if curves.ndim < 2 or levels.ndim != 1 or curves.shape[-1] != len(levels):
        raise InputError(
            f"values must be 'b d s' or 'd s' with one column for each of the {levels.numel()} severities; "
            f"got shape {tuple(curves.shape)}"
        )
    levels, order = levels.sort()
    if len(levels) < 2 or not torch.isfinite(levels).all() or (levels.diff() == 0).any():
        given = as_tensor(severities).tolist()
        raise InputError(f"severities must be at least two different numbers; got {given}")
    return curves[..., order], levels


def _averaged(name: str, per_distortion: Tensor, sentence: str) -> PerImage:
    defined = torch.isfinite(per_distortion)
    n = defined.sum(-1)
    mean = torch.where(defined, per_distortion, 0.0).sum(-1) / n.clamp(min=1)
    return PerImage({name: mean.float(), "n": n.float()}, [Cause(sentence, n == 0, (name,))])
