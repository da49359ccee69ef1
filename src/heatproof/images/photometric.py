"""What changes the colours of a picture and moves nothing, in 8 bits and on the device.

Pictures are "b c h w" uint8, c = 1 (grey) or 3 (red, green, blue). The numbers are Pillow's:

    brightness, colour, contrast, sharpness   cut(d + f (x - d)),  f = 1 + magnitude, one per picture,
        d = black, the grey picture, its mean grey, the smoothed picture; cut: to [0, 255], fractions dropped
    autocontrast, equalize                    a table of 256 values per channel, from its histogram
    blur, smooth                              the ring of 16 of 5x5, and (1 1 1, 1 5 1, 1 1 1) / 13; rounded,
                                              border pixels left alone

Deviations: none from Pillow; a grey picture has no colour to change. Sums of slices stand for convolutions,
which a GPU may compute in reduced precision.
"""

from __future__ import annotations

import torch
from torch import Tensor

LUMINANCE = (19595, 38470, 7471)  # of red, green, blue, in 65536ths: how Pillow makes a picture grey


def brightness(pictures: Tensor, magnitudes: Tensor) -> Tensor:
    return _between(torch.zeros_like(pictures), pictures, magnitudes)


def colour(pictures: Tensor, magnitudes: Tensor) -> Tensor:
    return _between(_grey(pictures).expand_as(pictures), pictures, magnitudes)


def contrast(pictures: Tensor, magnitudes: Tensor) -> Tensor:
    mean = (_grey(pictures).double().mean((1, 2, 3), keepdim=True) + 0.5).floor()
    return _between(mean, pictures, magnitudes)


def sharpness(pictures: Tensor, magnitudes: Tensor) -> Tensor:
    return _between(smooth(pictures), pictures, magnitudes)


def autocontrast(pictures: Tensor, _magnitudes: Tensor | None = None) -> Tensor:
    """The darkest value of each channel to 0, the lightest to 255; a flat channel stays."""
    low, high = (extreme(pictures, dim=(2, 3)).double() for extreme in (torch.amin, torch.amax))
    levels = torch.arange(256, device=pictures.device, dtype=torch.float64)
    scale = 255 / torch.where(high > low, high - low, torch.inf)[..., None]
    table = (levels * scale - low[..., None] * scale).trunc()
    return _look_up(torch.where((high > low)[..., None], table, levels), pictures)


def equalize(pictures: Tensor, _magnitudes: Tensor | None = None) -> Tensor:
    """Each channel's values spread so that all occur about equally often."""
    histogram = _histogram(pictures)
    total = histogram.sum(-1, keepdim=True)
    step = (total - histogram.gather(-1, pictures.long().amax((2, 3))[..., None])) // 255
    below = histogram.cumsum(-1) - histogram
    table = (below + step // 2) // step.clamp(min=1)
    levels = torch.arange(256, device=pictures.device)
    return _look_up(torch.where(step > 0, table, levels), pictures)


def blur(pictures: Tensor, _magnitudes: Tensor | None = None) -> Tensor:
    """The mean of the 16 pixels two steps away."""
    x = pictures.to(torch.int32)
    return _inner(pictures, (_square(x, 5) - _square(x, 3)[..., 1:-1, 1:-1]).float() / 16, 2)


def smooth(pictures: Tensor, _magnitudes: Tensor | None = None) -> Tensor:
    """The mean of the 3x3 around each pixel, itself counted five times."""
    x = pictures.to(torch.int32)
    return _inner(pictures, (_square(x, 3) + 4 * x[..., 1:-1, 1:-1]).float() / 13, 1)


def _between(start: Tensor, pictures: Tensor, magnitudes: Tensor) -> Tensor:
    """From `start` (magnitude -1) through the picture (0) and as far beyond it (1)."""
    start, end = start.float(), pictures.float()
    factors = (1 + magnitudes).float().view(-1, 1, 1, 1)
    return (start + factors * (end - start)).clamp(0, 255).to(torch.uint8)


def _grey(pictures: Tensor) -> Tensor:
    """ "b 1 h w", integers."""
    if pictures.shape[1] == 1:
        return pictures
    weighted = sum(weight * pictures[:, k].to(torch.int32) for k, weight in enumerate(LUMINANCE))
    assert isinstance(weighted, Tensor)
    return ((weighted + 0x8000) >> 16)[:, None]


def _histogram(pictures: Tensor) -> Tensor:
    """ "b c 256" counts."""
    values = pictures.flatten(2).long()
    counts = torch.zeros(*values.shape[:2], 256, dtype=torch.long, device=values.device)
    return counts.scatter_add_(2, values, torch.ones_like(values))


def _look_up(table: Tensor, pictures: Tensor) -> Tensor:
    """Each value replaced by its channel's entry, table "b c 256"."""
    entries = table.clamp(0, 255).to(torch.uint8)
    return entries.gather(2, pictures.flatten(2).long()).view_as(pictures)


def _square(x: Tensor, side: int) -> Tensor:
    """Sums over side x side windows that lie inside."""
    wide, tall = x.shape[-1] - side + 1, x.shape[-2] - side + 1
    rows = sum(x[..., k : k + wide] for k in range(side))
    assert isinstance(rows, Tensor)
    sums = sum(rows[..., k : k + tall, :] for k in range(side))
    assert isinstance(sums, Tensor)
    return sums


def _inner(pictures: Tensor, values: Tensor, border: int) -> Tensor:
    """The picture with all but its border replaced by the rounded values."""
    result = pictures.clone()
    result[..., border:-border, border:-border] = (values + 0.5).floor().clamp(0, 255).to(torch.uint8)
    return result
