"""How do a map's scores hold up as the image gets worse?

For a metric m at severities s of one distortion:

    slope = least-squares slope of m on s
    aurc  = trapezoid of m(s) / m(0) over s        1 for a metric that does not move

Both are averaged over the distortions. Cite: chakraborty2025cambench (its BL slope and FMR-, TMR-AURC).

The paper does not say how either is computed; these are the plain readings. A curve with an undefined point
is left out and `n` counts the rest; m(0) = 0 leaves nothing to compare with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from heatproof.errors import InputError
from heatproof.metrics.kit import Cause, PerImage, as_tensor
from heatproof.registry import metric
from heatproof.types import ArrayLike

GAP = "every distortion has a severity at which the metric is not defined"
NO_START = "the metric is 0 or not defined at severity 0 (or later) under every distortion"


@metric(
    "bl_slope", needs=("severities",), higher_is_better=False, cite="chakraborty2025cambench",
    aliases=("slope",), family="Robustness", floors=(),
    about="Growth of a metric per unit of a distortion's severity, mean over distortions.",
)  # fmt: skip
def bl_slope(values: ArrayLike, severities: ArrayLike) -> PerImage:
    """Growth of a metric per unit of severity, mean over distortions.

    Args:
        values: a metric of b images under d distortions at s severities, "b d s" or "d s".
        severities: "s" numbers.

    Returns:
        bl_slope, and n, the distortions that counted, each "b".
    """
    curves, levels = _curves(values, severities)
    centred = levels - levels.mean()
    slopes = (curves * centred).sum(-1) / centred.square().sum()
    return _averaged("bl_slope", slopes, GAP)


@metric(
    "aurc", needs=("severities",), higher_is_better=True, bounds=(0.0, float("inf")),
    cite="chakraborty2025cambench", family="Robustness", floors=(),
    about="How much of a metric is left under distortion: area under its curve, as a share of the start.",
)  # fmt: skip
def aurc(values: ArrayLike, severities: ArrayLike) -> PerImage:
    """Area under m(s) / m(0), mean over distortions.

    Args:
        values, severities: as for bl_slope; one severity is 0.

    Returns:
        aurc, and n, the distortions that counted, each "b".
    """
    curves, levels = _curves(values, severities)
    if levels[0] != 0:
        raise InputError(f"aurc compares with severity 0; the severities start at {levels[0]:g}")
    start = curves[..., :1]
    kept = curves / torch.where(start == 0, torch.nan, start)
    return _averaged("aurc", torch.trapezoid(kept, levels, dim=-1), NO_START)


def _curves(values: ArrayLike, severities: ArrayLike) -> tuple[Tensor, Tensor]:
    """ "... d s" and "s", in order of severity, float64."""
    curves = as_tensor(values).detach().double()
    levels = as_tensor(severities).detach().double().to(curves.device)
    if curves.ndim < 2 or levels.ndim != 1 or curves.shape[-1] != len(levels):
        raise InputError(
            f"values must be 'b d s' or 'd s' with one column for each of the {levels.numel()} severities; "
            f"got shape {tuple(curves.shape)}"
        )
    levels, order = levels.sort()
    if len(levels) < 2 or not torch.isfinite(levels).all() or (levels.diff() == 0).any():
        raise InputError(
            f"severities must be at least two different numbers; got {as_tensor(severities).tolist()}"
        )
    return curves[..., order], levels


def _averaged(name: str, per_distortion: Tensor, sentence: str) -> PerImage:
    defined = torch.isfinite(per_distortion)
    n = defined.sum(-1)
    mean = torch.where(defined, per_distortion, 0.0).sum(-1) / n.clamp(min=1)
    return PerImage({name: mean.float(), "n": n.float()}, [Cause(sentence, n == 0, (name,))])
