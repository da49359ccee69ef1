"""Structural similarity (SSIM) of maps.

    SSIM = (2 mu_x mu_y + C1) (2 sigma_xy + C2) / ((mu_x^2 + mu_y^2 + C1) (sigma_x^2 + sigma_y^2 + C2))

"local5" (default): in every 5x5 window, sample covariance, C = (K R)^2 with K = 0.01 and 0.03 and R the
larger range of the two maps, averaged over the windows that lie inside the map; what scikit-image computes
with win_size=5, data_range=R. "eq2": once over the whole map, population covariance, C1 = 0.01 and C2 = 0.03
as they stand in COSE's eq. 2. A mask restricts the average (or eq. 2's moments) to its pixels; one that
covers everything changes nothing.

Cite: wang2004ssim, daroya2023cose.

Deviations: COSE prints eq. 2 and says it lies in [0, 1]; the windowed form is the default, and either may
be negative. Two constant maps have R = 0: NaN in "local5".

How: with s = x + y and d = x - y, four window sums (of s, d, s^2, d^2) give all five moments, in float64,
since float32 loses the variance of flat windows next to C2. On the CPU NumPy works in threads, a map at a
time: torch would start and join its threads some forty times per map.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from heatproof.errors import InputError, did_you_mean
from heatproof.metrics.kit import align, as_tensor, chunks, in_threads, pixel_maps, refuse_volumes
from heatproof.registry import metric
from heatproof.types import ArrayLike, Maps

K1, K2 = 0.01, 0.03
C1, C2 = 0.01, 0.03
SIDE, REACH = 5, 2
WINDOW = SIDE * SIDE
REASONS = (
    "",
    "both maps are constant, so they have no range",
    "the mask leaves no pixel to compare",
    "one of the maps is constant, and nothing correlates with that",
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
    kinds = torch.where(pair.unseen, 2, pair.constant.int())
    return [REASONS[kind] for kind in kinds.tolist()]


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
