"""Whole-image properties that may carry a class, and how one image takes them over from another.

Evidence without a place: no window holds a tint, a frame or a blur. Each function takes the images that shall
change ("n c H W" in [0, 1]), the images whose property they get, and weights of the pixels from which
statistics are estimated: 1 off the object, 0 on it (all 1 without annotations). With annotations, colours,
illumination, sharpness, noise and texture are thus those of the backgrounds, and the whole image takes them
over: a tint covers objects too, while an object whose own colour is its class is not reported.

    colour         mean and standard deviation of each channel
    illumination   the image under a Gaussian of 1/6 of its side
    background     everything off the object; the other image's object is filled by its surroundings
    frame          an outer frame of 1/14 of the side
    corner, edge   a square of 1/5 of the side, a strip of 1/8
    sharpness      mean absolute Laplacian relative to the contrast, reached by blurring or sharpening
    noise          standard deviation of noise (Immerkaer 1996), added where the other image has more
    texture        Fourier amplitudes, added where the other image has larger ones; phases stay
    size           height and width of the image file, before preprocessing
    compression    quantisation tables of a JPEG file

The last two read image files, so a caller passes them; the others need tensors alone.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from heatproof.explain.baselines import gaussian_blur

FRAME, CORNER, EDGE, ILLUMINATION = 1 / 14, 1 / 5, 1 / 8, 1 / 6  # of the image's side
BLURS, SHARPER = (0.5, 0.8, 1.2, 1.8, 2.7, 4.0), (0.5, 1.0, 2.0, 4.0)  # sigmas in pixels; amounts
LEAST_WEIGHT, LEAST_DEVIATION = 1e-3, 1e-3
COARSE = 48  # pixels at which low frequencies are computed
SMALL, FINE = 112, 256  # pixels at which colours, and sharpness and noise of an image's centre, are measured
PLACES = {  # slices of height and width, of a region of `part` of the side
    "corner, top left": ("first", "first"), "corner, top right": ("first", "last"),
    "corner, bottom left": ("last", "first"), "corner, bottom right": ("last", "last"),
    "edge, top": ("first", "all"), "edge, bottom": ("last", "all"),
    "edge, left": ("all", "first"), "edge, right": ("all", "last"),
}  # fmt: skip
Transfer = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # images, others, both weights -> images


def region_mask(name: str, size: tuple[int, int]) -> Tensor | None:
    """Bool "H W": the pixels of a property that has a place; None for the others.

    >>> int(region_mask("corner, top left", (10, 10)).sum()), region_mask("colour", (10, 10))
    (4, None)
    """
    height, width = size
    mask = torch.zeros(size, dtype=torch.bool)
    if name == "frame":
        wide = max(1, round(FRAME * min(size)))
        mask[:] = True
        mask[wide : height - wide, wide : width - wide] = False
        return mask
    if name not in PLACES:
        return None
    wide = max(1, round((CORNER if name.startswith("corner") else EDGE) * min(size)))
    spans = {"first": slice(0, wide), "last": slice(-wide, None), "all": slice(None)}
    rows, columns = PLACES[name]
    mask[spans[rows], spans[columns]] = True
    return mask


def colour(images: Tensor, others: Tensor, weights: Tensor, other_weights: Tensor) -> Tensor:
    """Images with the mean and standard deviation per channel of the others."""
    mean, std = _moments(images, weights)
    other_mean, other_std = _moments(others, other_weights)
    return (images - mean) / std * other_std + other_mean


def illumination(images: Tensor, others: Tensor, weights: Tensor, other_weights: Tensor) -> Tensor:
    """Images with the low frequencies of the others."""
    return images + _smooth(others, other_weights) - _smooth(images, weights)


def background(images: Tensor, others: Tensor, weights: Tensor, other_weights: Tensor) -> Tensor:
    """The objects of the images on the backgrounds of the others, whose objects are filled in smoothly."""
    filled = torch.where(other_weights[:, None] > 0, others, _smooth(others, other_weights))
    return torch.where(weights[:, None] > 0, filled, images)


def sharpness(images: Tensor, others: Tensor, weights: Tensor, other_weights: Tensor) -> Tensor:
    """Images blurred or sharpened to the relative mean absolute Laplacian of the others, in grey."""
    changes = [partial(gaussian_blur, sigma=sigma) for sigma in BLURS]
    changes += [partial(_sharpened, amount=amount) for amount in SHARPER]
    grey, other_grey = (each.mean(1, keepdim=True) for each in (images, others))
    reached = [_laplacian(made, weights) for made in (grey, *(change(grey) for change in changes))]
    wanted = _laplacian(other_grey, other_weights)
    best = (torch.stack(reached).log() - wanted.log()).abs().argmin(0) - 1  # -1: unchanged
    result = images.clone()
    for number in best[best >= 0].unique().tolist():
        result[best == number] = changes[number](images[best == number])
    return result


def _sharpened(images: Tensor, amount: float) -> Tensor:
    return images + amount * (images - gaussian_blur(images, BLURS[1]))


def noise(images: Tensor, others: Tensor, weights: Tensor, other_weights: Tensor) -> Tensor:
    """Images with Gaussian noise added, up to the noise of the others; unchanged where those have less."""
    missing = (_noise_level(others, other_weights) ** 2 - _noise_level(images, weights) ** 2).clamp(min=0)
    drawn = torch.randn(images.shape[1:], generator=torch.Generator().manual_seed(0)).to(images)
    return images + missing.sqrt()[:, None, None, None] * drawn


def texture(images: Tensor, others: Tensor, weights: Tensor, other_weights: Tensor) -> Tensor:
    """Images with the Fourier amplitudes that they lack beside the others, at their own phases."""
    own, phase = _spectrum(images, weights)
    missing = (_spectrum(others, other_weights)[0] - own).clamp(min=0)
    missing[..., 0, 0] = 0  # the mean is a colour
    added: Tensor = torch.fft.irfft2(torch.polar(missing, phase), s=images.shape[-2:])
    return images + added


def pasted(mask: Tensor) -> Transfer:
    """The transfer of a property that has a place: its pixels are copied."""

    def transfer(images: Tensor, others: Tensor, weights: Tensor, other_weights: Tensor) -> Tensor:
        return torch.where(mask.to(images.device), others, images)

    return transfer


STATISTICS: dict[str, Transfer] = {
    "colour": colour, "illumination": illumination, "sharpness": sharpness, "noise": noise,
    "texture": texture,
}  # fmt: skip


def transfers(size: tuple[int, int], with_regions: bool) -> dict[str, Transfer]:
    """By name, the transfers that need no files. with_regions: whether objects are annotated."""
    named = STATISTICS | ({"background": background} if with_regions else {})
    for name in ("frame", *PLACES):
        mask = region_mask(name, size)
        assert mask is not None
        named[name] = pasted(mask)
    return named


def resized_like(image: Image.Image, other: Image.Image) -> Image.Image:
    """The image at the height and width of the other image."""
    return image.resize(other.size, Image.Resampling.BILINEAR)


def compressed_like(image: Image.Image, other: Image.Image) -> Image.Image:
    """The image after JPEG coding with the other image's quantisation tables; unchanged if it has none."""
    tables = getattr(other, "quantization", None)
    if not tables:
        return image
    coded = io.BytesIO()
    # A grey image has one table, a colour image needs two.
    image.convert("RGB").save(coded, "JPEG", qtables={0: tables[0], 1: tables.get(1, tables[0])})
    with Image.open(coded) as opened:
        return opened.convert(image.mode)


FILE_TRANSFERS = {"size": resized_like, "compression": compressed_like}


def measured(image: Image.Image) -> dict[str, tuple[float, ...]]:
    """Numbers that describe each property of an "RGB" image, all but size and frame without its frame.

    >>> numbers = measured(Image.new("RGB", (60, 40), (90, 60, 60)))
    >>> numbers["size"], [round(number, 2) for number in numbers["tint"]]
    ((40.0, 60.0), [0.08, -0.04])
    """

    def pixels(resized: Image.Image) -> tuple[Tensor, Tensor]:
        values = torch.from_numpy(np.array(resized)).float().permute(2, 0, 1)[None] / 255
        return values, torch.ones(1, *values.shape[-2:])

    wide = round(FRAME * SMALL)
    around, _ = pixels(image.resize((SMALL, SMALL), Image.Resampling.BILINEAR))
    small = around[..., wide:-wide, wide:-wide]
    mean = small.mean((0, 2, 3))
    left, top = (max(round(FRAME * length), (length - FINE) // 2) for length in image.size)
    fine = pixels(image.crop((left, top, image.width - left, image.height - top)))
    halves = F.adaptive_avg_pool2d(small.mean(1), 2).flatten() - mean.mean()
    numbers = {
        "size": (float(image.height), float(image.width)),
        "aspect": (image.width / image.height,),
        "brightness": (float(mean.mean()),),
        "tint": tuple((mean - mean.mean())[:2].tolist()),
        "contrast": (float(small.mean(1).std()),),
        "illumination": tuple(halves[:3].tolist()),
        "sharpness": (float(_laplacian(*fine)),),
        "noise": (float(_noise_level(*fine)),),
    }
    for name in ("frame", *PLACES):
        region = around if name == "frame" else small
        values = region[0, :, region_mask(name, (region.shape[-2], region.shape[-1]))]
        numbers[name] = (*(values.mean(1) - mean).tolist(), float(values.mean(0).std()))
    return numbers


def _moments(images: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted mean and standard deviation, each "n c 1 1"."""
    shares = (weights / weights.sum((1, 2), keepdim=True).clamp(min=LEAST_WEIGHT))[:, None]
    mean = (images * shares).sum((2, 3), keepdim=True)
    variance = ((images - mean) ** 2 * shares).sum((2, 3), keepdim=True)
    return mean, variance.sqrt().clamp(min=LEAST_DEVIATION)


def _smooth(images: Tensor, weights: Tensor) -> Tensor:
    """Low frequencies from the pixels that count; elsewhere they are extended from these.

    Computed on images of at most COARSE pixels, which hold these frequencies.
    """
    size = images.shape[-2:]
    small = tuple(min(length, COARSE) for length in size)
    sigma = [ILLUMINATION * min(size) * short / length for short, length in zip(small, size, strict=True)]
    both = F.interpolate(torch.cat([images * weights[:, None], weights[:, None]], 1), small, mode="area")
    low = gaussian_blur(both, min(sigma))
    low = low[:, :-1] / low[:, -1:].clamp(min=LEAST_WEIGHT)
    return F.interpolate(low, size, mode="bilinear", align_corners=False)


def _spectrum(images: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Fourier amplitudes, as if the pixels that count filled the image, and phases."""
    share = weights.mean((1, 2))[:, None, None, None].clamp(min=LEAST_WEIGHT)
    spectrum = torch.fft.rfft2((images - _smooth(images, weights)) * weights[:, None])
    return spectrum.abs() / share, spectrum.angle()


def _filtered(images: Tensor, weights: Tensor, kernel: list[list[float]]) -> Tensor:
    """Weighted mean "n" of the absolute response of a 3x3 filter on the grey image."""
    grey = F.pad(images.mean(1, keepdim=True), (1, 1, 1, 1), mode="replicate")
    response = F.conv2d(grey, torch.tensor(kernel).to(images)[None, None])[:, 0].abs()
    return (response * weights).sum((1, 2)) / weights.sum((1, 2)).clamp(min=LEAST_WEIGHT)


def _laplacian(images: Tensor, weights: Tensor) -> Tensor:
    contrast = _moments(images, weights)[1].mean((1, 2, 3))
    return _filtered(images, weights, [[0, 1, 0], [1, -4, 1], [0, 1, 0]]).clamp(min=1e-6) / contrast


def _noise_level(images: Tensor, weights: Tensor) -> Tensor:
    response = _filtered(images, weights, [[1, -2, 1], [-2, 4, -2], [1, -2, 1]])
    # The mean of c channels has less noise than each of them.
    return response * math.sqrt(math.pi / 2 * images.shape[1]) / 6
