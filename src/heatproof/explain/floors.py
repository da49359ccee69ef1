"""Floors: maps that ignore the model. A method that does not score above them explains nothing.

Many maps look like edges (adebayo2018sanity), and objects mostly lie in the middle (zhang2018excitation).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache, partial, reduce

import numpy as np
import torch
from torch import Tensor

from heatproof.errors import HeatproofError
from heatproof.explain.baselines import LastBatch, in_threads, pictures_of
from heatproof.registry import FLOOR_CARD, explainer, explainers, parse_call
from heatproof.types import Trace

floor = partial(explainer, card=FLOOR_CARD, forward_only=True, volumes=True)
GREY = (0.2125, 0.7154, 0.0721)  # luminance of red, green, blue, as scikit-image weighs them


@floor("random", cite="adebayo2018sanity")
def random(trace: Trace) -> Tensor:
    """Uniform noise, drawn from the seed and the image's pixels.

    u_ij uniform in [0, 1). The same image gets the same map in every batch, another image another map. The
    maximum is 1 and all else below 1 - 2**-9, so that half precision makes no equal maxima: the pointing game
    takes the first of them, which would lie in the top 8 % of a 224-pixel image on average.
    """
    images = trace.images

    def draw(image: np.ndarray) -> np.ndarray:
        key = int.from_bytes(hashlib.blake2b(image.tobytes(), digest_size=16).digest())
        noise = np.random.default_rng((trace.seed, key)).random(trace.image_size, dtype=np.float32)
        peak, noise = noise.argmax(), noise * np.float32(1 - 2**-9)
        noise.flat[peak] = 1
        return noise

    def drawn() -> Tensor:
        maps = in_threads(draw, images.float().contiguous().cpu().numpy())
        return torch.from_numpy(np.stack(maps)).to(images.device)

    return _last(images, trace.seed, drawn).clone()


_last = LastBatch()


@floor("edges", cite="sobel1968edges", aliases=("edge-detector", "sobel"))
def edges(trace: Trace) -> Tensor:
    """The Sobel edge strength of the grey image.

    sqrt((g_y^2 + g_x^2) / 2), g the 3x3 Sobel derivatives with the border pixels repeated. Grey is the
    luminance of the image restored through the model's preprocessing, or the channels' mean where there
    are not three. Of a volume, sqrt((g_z^2 + g_y^2 + g_x^2) / 3).
    """
    pictures = pictures_of(trace.model, trace.images)
    if pictures.shape[1] == 3:
        grey = torch.einsum("c,bc...->b...", pictures.new_tensor(GREY), pictures)
    else:
        grey = pictures.mean(1)
    smooth, difference = grey.new_tensor([0.25, 0.5, 0.25]), grey.new_tensor([1.0, 0.0, -1.0])
    axes = grey.ndim - 1
    sides = [[difference if at == axis else smooth for at in range(axes)] for axis in range(axes)]
    padded = torch.nn.functional.pad(grey[:, None], (1, 1) * axes, mode="replicate")
    convolve = torch.nn.functional.conv2d if axes == 2 else torch.nn.functional.conv3d
    slopes = convolve(padded, torch.stack([_product(kernel) for kernel in sides])[:, None])
    return (slopes.square().sum(1) / axes).sqrt()


@floor("centre", cite="zhang2018excitation", aliases=("center",))
def centre(trace: Trace) -> Tensor:
    """A Gaussian bump around the middle pixel (H // 2, W // 2).

    exp(-8 ((i - H // 2)^2 / H^2 + (j - W // 2)^2 / W^2)): a standard deviation of a quarter of each side.
    """
    bumps = [
        torch.exp(-8 * ((torch.arange(n, device=trace.images.device) - n // 2) / n) ** 2)
        for n in trace.image_size
    ]
    return _product(bumps).expand(len(trace.images), *trace.image_size)


def _product(sides: Sequence[Tensor]) -> Tensor:
    """The outer product: "H", "W" -> "H W", and so on."""
    return reduce(lambda whole, side: whole[..., None] * side, sides)


@lru_cache(maxsize=1024)
def floor_name(method: str) -> str:
    """The name of the floor that a method is; "" for one that reads the network.

    >>> floor_name("sobel"), floor_name("random(seed=3)"), floor_name("gradcam")
    ('edges', 'random', '')
    """
    try:
        entry = explainers.get(parse_call(method)[0])
    except HeatproofError:
        return ""
    return entry.name if entry.card == FLOOR_CARD else ""


def is_floor(method: str) -> bool:
    """Whether a method ignores the network."""
    return bool(floor_name(method))
