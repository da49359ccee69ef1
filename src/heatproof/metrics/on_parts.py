"""Does the map's mass lie on the parts that make the concept, and off everything else?

With C~ the map in [0, 1], S = sum C~, masks M_p of the parts, M_B of the region that holds them (eq. 3-9):

    mass_p     = <C~, M_p> / S                      FMR, TMR for a QR code's finder and timing patterns
    leakage    = <C~, 1 - M_B> / S                  BL
    coverage_p = mean over tau of |{C~ >= tau} & M_p| / |{C~ >= tau}|,  tau at 31 quantiles of C~    AUC
    distance   = <C~, D> / (S sqrt(H^2 + W^2)),  D the distance to the nearest pixel of any part     DtS
    score      = AUC_F + AUC_T - 3 AUC_BG - DtS   ("auc", eq. 10)
                 FMR + TMR - 3 BL - DtS           ("mass", what the paper's Fig. 5 plots)

Cite: chakraborty2025cambench.

Where the paper leaves room or errs:
- Quantile levels are linspace(0, 0.99, 31); the AUC is their plain mean. The paper says a map that stays
  inside the finders has AUC_F 1; with quantile thresholds the zeros around it count too, and a version-1
  code's own finder mask gets 0.548387.
- {C~ >= the q-quantile} is {C~ >= the value of rank ceil(q (n-1))}, ties included. The code uses that and
  interpolates nothing, so only q (n-1) rounds, in float64: that is one pixel of a 21x21 map, and none at 224.
- Epsilon (1e-6) is added after the shared normalisation, not to the raw range, so that a rescaled map keeps
  its scores.
- A constant map has no mass to share out: every value is NaN, although the formulas would return numbers.
- Masks of another size are resized to the nearest pixel centre, then binarised at 0.5.

D is scipy's Euclidean distance transform, the field's own and exact. It is slow beside everything else here,
and masks repeat (every method is scored on the same images), so each distinct mask is transformed once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, reduce
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from heatproof.errors import InputError, did_you_mean
from heatproof.metrics.kit import CONSTANT, Cause, PerImage, align, ascending, chunks, pixel_maps, sized_maps
from heatproof.metrics.scene import BatchContext
from heatproof.registry import metric
from heatproof.types import ArrayLike, Maps, constant

EPSILON = 1e-6
THRESHOLDS = 31
NO_CODE = "the picture has no code, so there is no structure to find"
NO_PART = "no pixel belongs to a part, so there is no distance to one"
Number = TypeVar("Number", float, Tensor)


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
    """
    terms = {"auc": ("auc_f", "auc_t", "auc_bg"), "mass": ("fmr", "tmr", "bl")}
    if variant not in terms:
        raise InputError(
            f"unknown variant {variant!r} of the structure score; {did_you_mean(variant, terms)}"
        )
    found, causes = _score(maps, {"finder": finder, "timing": timing}, box, "box")
    names = ("fmr", "tmr", "bl", "auc_f", "auc_t", "auc_bg", "dts")
    values = dict(zip(names, (found[key] for key in _keys(("finder", "timing"))), strict=True))
    values["score"] = structure_score(*(values[name] for name in (*terms[variant], "dts")))
    flat, bare = causes
    return PerImage(values, [flat, bare._replace(names=("dts", "score"))])


def structure_score(finder: Number, timing: Number, background: Number, distance: Number) -> Number:
    """Eq. 10 over coverages, or Fig. 5 over masses: leakage counts three times.

    Args:
        finder, timing, background: coverages (auc_f, auc_t, auc_bg) or masses (fmr, tmr, bl).
        distance: dts.
    """
    return finder + timing - 3 * background - distance


def structure_parts(
    maps: Maps | ArrayLike, parts: Mapping[str, ArrayLike], region: ArrayLike | None = None
) -> PerImage:
    """The same for any named parts, such as lung fields or the blocks of a document.

    Args:
        maps: Maps, or "b h w".
        parts: masks by name, "b H W" or one "H W" for all.
        region: a mask of what holds the parts (their union where None); mass outside it has leaked.

    Returns:
        mass_<part> and coverage_<part> of each, leakage, coverage_outside and distance, each "b".
    """
    if not parts:
        raise InputError("parts is empty; pass at least one mask, such as {'lung': mask}")
    found, causes = _score(maps, parts, region, "region")
    return PerImage(found, causes)


def _keys(parts: Sequence[str]) -> list[str]:
    masses, coverages = [f"mass_{p}" for p in parts], [f"coverage_{p}" for p in parts]
    return [*masses, "leakage", *coverages, "coverage_outside", "distance"]


def _score(
    maps: Maps | ArrayLike, parts: Mapping[str, ArrayLike], region: ArrayLike | None, region_name: str
) -> tuple[dict[str, Tensor], list[Cause]]:
    values, size = sized_maps(maps)
    values = values.detach()
    masks = [align(mask, size, values, name) for name, mask in parts.items()]
    union = reduce(torch.logical_or, masks)
    inside = union if region is None else align(region, size, values, region_name)
    areas = [mask.expand(len(values), *size) for mask in (*masks, ~inside)]
    pieces = []
    for part in chunks(values, size):
        distance = distance_to(union[part] if len(union) > 1 else union)
        pieces.append(_measure(pixel_maps(values[part], size), [area[part] for area in areas], distance))
    table = torch.cat(pieces) if pieces else values.new_zeros((0, 2 * len(masks) + 4), dtype=torch.float32)
    found = dict(zip(_keys(tuple(parts)), table[:, 1:].unbind(1), strict=True))
    bare = ~union.flatten(1).any(1).expand(len(values))
    return found, [Cause(CONSTANT, table[:, 0] > 0), Cause(NO_PART, bare, ("distance",))]


def _measure(values: Tensor, areas: Sequence[Tensor], distance: Tensor) -> Tensor:
    """ "b H W" in [0, 1], the masks of the parts and of the outside, the distance field -> "b columns".

    The formulas as they stand, for constant maps too. Column 0 marks those, the others follow `_keys`.
    """
    pixels = (values / (1 + EPSILON)).flatten(1)
    mass = pixels.sum(1, dtype=torch.float64) + EPSILON
    shares = [(pixels * area.flatten(1)).sum(1, dtype=torch.float64) / mass for area in areas]
    coverages = _coverage(pixels, [area.flatten(1) for area in areas])
    diagonal = sum(side**2 for side in values.shape[1:]) ** 0.5
    far = (pixels * distance.flatten(1)).sum(1, dtype=torch.float64) / (mass * diagonal)
    return torch.stack([constant(values).double(), *shares, *coverages, far], 1).float()


def _coverage(pixels: Tensor, areas: Sequence[Tensor]) -> list[Tensor]:
    """Mean over the thresholds of each area's share of {C~ >= tau}: "b n", each "b n" -> each "b"."""
    ranks = np.ceil(np.linspace(0, 0.99, THRESHOLDS) * (pixels.shape[1] - 1)).astype(int).tolist()
    thresholds = ascending(pixels)[:, ranks].contiguous()
    # Bin k + 1 holds the pixels at or above tau_k and below tau_k+1; summed from the top, bins become sets.
    bins = torch.searchsorted(thresholds, pixels, right=True)

    def set_sizes(area: Tensor) -> Tensor:
        counts = torch.zeros((len(pixels), THRESHOLDS + 1), dtype=torch.int64, device=pixels.device)
        counts.scatter_add_(1, bins, area.long())
        return counts.flip(1).cumsum(1).flip(1)[:, 1:].double()

    total = set_sizes(torch.ones_like(pixels)) + EPSILON
    return [(set_sizes(area) / total).mean(1) for area in areas]


def distance_to(masks: Tensor) -> Tensor:
    """ "b h w" bool -> "b h w" float32 on the same device; infinite where a mask has no pixel.

    >>> distance_to(torch.tensor([[[True, False, False]]])).tolist()
    [[[0.0, 1.0, 2.0]]]
    """
    size = tuple(masks.shape[1:])
    packed = np.packbits(masks.flatten(1).cpu().numpy(), axis=1)
    fields = [_transform(size, bits.tobytes()) for bits in packed]
    stacked = np.stack(fields) if fields else np.zeros((0, *size), np.float32)
    return torch.from_numpy(stacked).to(masks.device)


@lru_cache(maxsize=512)
def _transform(size: tuple[int, ...], packed: bytes) -> np.ndarray:
    from scipy.ndimage import distance_transform_edt

    bits = np.unpackbits(np.frombuffer(packed, np.uint8), count=math.prod(size))
    mask = bits.reshape(size).astype(bool)
    if not mask.any():
        return np.full(size, np.inf, np.float32)
    field: np.ndarray = distance_transform_edt(~mask).astype(np.float32)
    return field


def _in_a_run(
    function: Callable[..., Any], scene: BatchContext, options: dict[str, Any]
) -> dict[str, PerImage]:
    assert scene.batch.truth is not None
    masks = scene.batch.truth.masks
    parts = masks["finder"], masks["timing"], masks["box"]
    nothing = Cause(NO_CODE, ~masks["box"].flatten(1).any(1))
    found = {m: function(one, *parts, **options) for m, one in scene.maps.items()}
    # The shares of an empty mask are numbers (0 and 1), but no statement about a map: means leave them out.
    return {m: PerImage(one, [nothing, *one.causes]) for m, one in found.items()}


_SHARE, _COVERED = "Share of the map's mass on {}.", "Share of {} that the map covers, mean over thresholds."
for _name, _better, _alias, _title, _about in (
    ("fmr", True, "finder_mass_ratio", "mass on the finder patterns",
     _SHARE.format("the finder patterns of a code")),
    ("tmr", True, "timing_mass_ratio", "mass on the timing patterns",
     _SHARE.format("the timing patterns of a code")),
    ("bl", False, "background_leakage", "leakage outside the code",
     _SHARE.format("what is not the code: leakage")),
    ("auc_f", True, "coverage_finder", "coverage of the finder patterns",
     _COVERED.format("the finder patterns")),
    ("auc_t", True, "coverage_timing", "coverage of the timing patterns",
     _COVERED.format("the timing patterns")),
    ("auc_bg", False, "coverage_background", "coverage of the background", _COVERED.format("the background")),
    ("dts", False, "distance_to_structure", "distance to the structure",
     "Mean distance of the map's mass to the nearest finder or timing pattern, by the image's diagonal."),
    ("structure_score", True, "score", "structure score",
     "Coverage of both patterns, less three times that of the background and less the distance to them."),
):  # fmt: skip
    metric(
        _name, needs=("maps", "masks"), higher_is_better=_better,
        bounds=(-4.0, 2.0) if _alias == "score" else (0.0, 1.0), cite="chakraborty2025cambench",
        aliases=(_alias,), about=_about, title=_title, family="Structure", bundle="structure", call=_in_a_run,
        question="network", votes=_alias == "score", headline=_alias == "score", volumes=True,
    )(structure)  # fmt: skip
