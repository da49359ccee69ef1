"""COSE's thirteen transforms, on the device, with the inverse that brings maps back (daroya2023cose).

    geometric     translate-x, translate-y (to 32 px of 224, scaled with the image), rotate (to 135 degrees,
                  counter-clockwise, about the centre), flip-x (left and right), flip-y (top and bottom)
    photometric   brightness, colour, contrast, sharpness (factor 1 + m, |m| to .99), autocontrast, equalize,
                  blur, smooth; numbers are Pillow's, in 8 bits

A signed transform has 61 magnitudes, evenly from -reach to reach; zero is dropped. `draw` takes 6 of the 60
per image without replacement: 7 signed transforms x 6 + 6 fixed ones = 48 transformed inputs per image.
Pixels that leave the frame are lost, so a mask of ones makes the same round trip and is eroded by 5x5: where
it is still one, every window of SSIM holds pixels of the transformed image.

Deviations: translations are rounded to whole pixels, at least one, so that they are exact both ways (the
authors drop the fraction, which makes the smallest ones no change at all). Rotations are bilinear, for images
and maps alike; the authors take the nearest pixel for images. New pixels are black.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from heatproof.errors import InputError, UnknownNameError

STEPS = 30  # magnitudes on each side of zero
DRAWS = 6
REFERENCE = 224  # the side that translations are stated for
ERODED = 5  # SSIM's window
WHOLE = 0.999  # a pixel of the mask that survived two interpolations
LUMINANCE = (19595, 38470, 7471)  # of red, green, blue, in 65536ths, as in Pillow


@dataclass(frozen=True)
class Transform:
    """A transform with its inverse. Magnitudes are "b"; a transform that is not signed ignores them."""

    name: str
    reach: float  # the largest magnitude; 0 for a transform that has none
    change: Callable[[Tensor, Tensor], Tensor]  # "b c h w"; geometric: any type, photometric: uint8
    geometric: bool = False

    @property
    def signed(self) -> bool:
        return self.reach > 0

    @property
    def magnitudes(self) -> np.ndarray:
        """All magnitudes that may be drawn: 60, or 0 for a fixed transform."""
        steps = np.delete(np.arange(-STEPS, STEPS + 1), STEPS)
        return steps * self.reach / STEPS if self.signed else np.zeros(1)

    def apply(self, images: Tensor, magnitudes: Tensor) -> Tensor:
        """Transform "b c h w" uint8."""
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] not in (1, 3):
            got = f"got {images.dtype} of shape {tuple(images.shape)}"
            raise InputError(f"{self.name} takes 8-bit images 'b c h w' with 1 or 3 channels; {got}")
        if len(magnitudes) != len(images):
            raise InputError(f"{self.name} needs one magnitude per image: {len(images)}")
        return self.change(images, magnitudes)

    def transport(self, maps: Tensor, magnitudes: Tensor) -> Tensor:
        """Maps "b h w" moved as the image is."""
        return self.change(maps[:, None], magnitudes)[:, 0] if self.geometric else maps

    def inverse_maps(self, maps: Tensor, magnitudes: Tensor) -> Tensor:
        """Maps "b h w" of transformed images, moved back; 0 where nothing is known."""
        return self.transport(maps, -magnitudes)

    def valid(self, size: tuple[int, int], magnitudes: Tensor) -> Tensor | None:
        """Bool tensor "b h w": where a transformed-back map can be compared; None: everywhere."""
        if not (self.signed and self.geometric):
            return None
        ones = torch.ones(len(magnitudes), *size, device=magnitudes.device)
        back = self.inverse_maps(self.transport(ones, magnitudes), magnitudes)
        lost = (back < WHOLE).float()
        return torch.nn.functional.max_pool2d(lost[:, None], ERODED, stride=1, padding=ERODED // 2)[:, 0] == 0


def _translate(pixels: Tensor, magnitudes: Tensor, *, dim: int) -> Tensor:
    """Shift along an axis; positive goes right or down."""
    side = pixels.shape[dim]
    wanted = magnitudes.double() * (side / REFERENCE)
    shift = (wanted.sign() * wanted.abs().round().clamp(min=1)).long()
    source = torch.arange(side, device=pixels.device) - shift[:, None]
    inside = (source >= 0) & (source < side)
    shape = [len(pixels), 1, 1, 1]
    shape[dim] = side
    moved = pixels.gather(dim, source.clamp(0, side - 1).view(shape).expand_as(pixels))
    return moved * inside.view(shape).to(pixels.dtype)


def _rotate(pixels: Tensor, magnitudes: Tensor) -> Tensor:
    """Rotate counter-clockwise by this many degrees, bilinear, 8-bit images rounded."""
    height, width = pixels.shape[-2:]
    x, y = (
        (torch.arange(n, device=pixels.device, dtype=torch.float64) - (n - 1) / 2) for n in (width, height)
    )
    angles = torch.deg2rad(magnitudes.double()).view(-1, 1, 1)
    cos, sin = angles.cos(), angles.sin()
    # By hand, not affine_grid: a GPU may multiply its matrices in reduced precision.
    columns = cos * x - sin * y[:, None]
    rows = sin * x + cos * y[:, None]
    grid = torch.stack([columns * (2 / width), rows * (2 / height)], -1).float()
    read = torch.nn.functional.grid_sample
    turned = read(pixels.float(), grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    return turned if pixels.is_floating_point() else (turned + 0.5).floor().clamp(0, 255).to(pixels.dtype)


def autocontrast(images: Tensor, _magnitudes: Tensor | None = None) -> Tensor:
    """The darkest value of each channel to 0, the lightest to 255; a flat channel stays."""
    low, high = (extreme(images, dim=(2, 3)).double() for extreme in (torch.amin, torch.amax))
    levels = torch.arange(256, device=images.device, dtype=torch.float64)
    scale = 255 / torch.where(high > low, high - low, torch.inf)[..., None]
    table = (levels * scale - low[..., None] * scale).trunc()
    return _look_up(torch.where((high > low)[..., None], table, levels), images)


def equalize(images: Tensor, _magnitudes: Tensor | None = None) -> Tensor:
    """Each channel's values spread so that all occur about equally often."""
    values = images.flatten(2).long()
    empty = torch.zeros(*values.shape[:2], 256, dtype=torch.long, device=values.device)
    histogram = empty.scatter_add_(2, values, torch.ones_like(values))
    total = histogram.sum(-1, keepdim=True)
    step = (total - histogram.gather(-1, values.amax(-1, keepdim=True))) // 255
    below = histogram.cumsum(-1) - histogram
    table = (below + step // 2) // step.clamp(min=1)
    levels = torch.arange(256, device=images.device)
    return _look_up(torch.where(step > 0, table, levels), images)


def blur(images: Tensor, _magnitudes: Tensor | None = None) -> Tensor:
    """The mean of the 16 pixels two steps away."""
    x = images.to(torch.int32)
    return _inner(images, (_square(x, 5) - _square(x, 3)[..., 1:-1, 1:-1]).float() / 16, 2)


def smooth(images: Tensor, _magnitudes: Tensor | None = None) -> Tensor:
    """The mean of the 3x3 around each pixel, itself counted five times."""
    x = images.to(torch.int32)
    return _inner(images, (_square(x, 3) + 4 * x[..., 1:-1, 1:-1]).float() / 13, 1)


def _between(start: Callable[[Tensor], Tensor], images: Tensor, magnitudes: Tensor) -> Tensor:
    """Interpolate from `start` (magnitude -1) through the image (0) and beyond it (1), fractions dropped."""
    begin, end = start(images).float(), images.float()
    factors = (1 + magnitudes).float().view(-1, 1, 1, 1)
    return (begin + factors * (end - begin)).clamp(0, 255).to(torch.uint8)


def _grey(images: Tensor) -> Tensor:
    """Tensor "b 1 h w", integers."""
    if images.shape[1] == 1:
        return images
    weights = torch.tensor(LUMINANCE, dtype=torch.int32, device=images.device).view(3, 1, 1)
    return ((weights * images).sum(1, keepdim=True, dtype=torch.int32) + 0x8000) >> 16


def _look_up(table: Tensor, images: Tensor) -> Tensor:
    """Each value replaced by its channel's entry, table "b c 256"."""
    entries = table.clamp(0, 255).to(torch.uint8)
    return entries.gather(2, images.flatten(2).long()).view_as(images)


def _square(x: Tensor, side: int) -> Tensor:
    """Sums over side x side windows that lie inside; a GPU may compute convolutions in reduced precision."""
    return x.unfold(-2, side, 1).sum(-1, dtype=x.dtype).unfold(-1, side, 1).sum(-1, dtype=x.dtype)


def _inner(images: Tensor, values: Tensor, border: int) -> Tensor:
    """The image with all but its border replaced by the rounded values."""
    result = images.clone()
    result[..., border:-border, border:-border] = (values + 0.5).floor().clamp(0, 255).to(torch.uint8)
    return result


ENHANCED: dict[str, Callable[[Tensor], Tensor]] = {  # where the factor is 0
    "brightness": torch.zeros_like,
    "colour": lambda images: _grey(images),
    "contrast": lambda images: (_grey(images).double().mean((1, 2, 3), keepdim=True) + 0.5).floor(),
    "sharpness": smooth,
}
_ALL = (
    Transform("translate-x", 32.0, partial(_translate, dim=3), geometric=True),
    Transform("translate-y", 32.0, partial(_translate, dim=2), geometric=True),
    Transform("rotate", 135.0, _rotate, geometric=True),
    Transform("flip-x", 0.0, lambda pixels, _: pixels.flip(3), geometric=True),
    Transform("flip-y", 0.0, lambda pixels, _: pixels.flip(2), geometric=True),
    *(Transform(name, 0.99, partial(_between, start)) for name, start in ENHANCED.items()),
    *(Transform(f.__name__, 0.0, f) for f in (autocontrast, equalize, blur, smooth)),
)
TRANSFORMS: dict[str, Transform] = {transform.name: transform for transform in _ALL}


class Variants(NamedTuple):
    """Neighbouring variants made by one transform."""

    transform: Transform
    first: int
    end: int


@dataclass(frozen=True)
class Drawn:
    """Which variants each image gets: the same transforms for all, magnitudes of its own."""

    names: tuple[str, ...]  # "v": the transform of each variant, equal ones side by side
    magnitudes: np.ndarray  # "images v", 0 for fixed transforms

    def runs(self) -> Iterator[Variants]:
        """The variants transform by transform."""
        for name in dict.fromkeys(self.names):
            first = self.names.index(name)
            yield Variants(TRANSFORMS[name], first, first + self.names.count(name))


def draw(seed: int, ids: Sequence[str], draws: int = DRAWS, names: Sequence[str] | None = None) -> Drawn:
    """The variants of each image, which follow from the seed and the image's id alone.

    draws: magnitudes per image and signed transform, 1 to 60, all different. names: some of the transforms.
    A larger number of draws adds to those of a smaller one.
    """
    chosen = list(TRANSFORMS if names is None else dict.fromkeys(names))
    for name in chosen:
        if name not in TRANSFORMS:
            raise UnknownNameError("transform", name, TRANSFORMS)
    if not 1 <= draws <= 2 * STEPS or seed < 0 or not chosen:
        got = f"draws={draws}, {len(chosen)} transforms, seed={seed}"
        raise InputError(
            f"draw 1 to {2 * STEPS} magnitudes, of a transform or more, seed 0 or more; got {got}"
        )
    counts = {name: draws if TRANSFORMS[name].signed else 1 for name in chosen}
    rows = [[_magnitudes(seed, image, name)[: counts[name]] for name in chosen] for image in ids]
    total = sum(counts.values())
    table = np.array([np.concatenate(row) for row in rows]).reshape(len(ids), total)
    return Drawn(tuple(name for name in chosen for _ in range(counts[name])), table)


def vary(images: Tensor, masks: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Each image under a random transform or none, with a random magnitude; masks move along.

    Augmentation for a network whose answers stay under all of them (TrivialAugment). Random numbers are
    torch's, drawn on the CPU whatever the device, so that a training repeats itself anywhere.
    """
    which = torch.randint(len(TRANSFORMS) + 1, (len(images),))
    steps = torch.randint(2 * STEPS, (len(images),)).numpy()
    changed, moved = images.clone(), {part: mask.clone() for part, mask in masks.items()}
    for number, transform in enumerate(TRANSFORMS.values(), start=1):
        rows = (which == number).nonzero().flatten()
        drawn = transform.magnitudes[steps[rows.numpy()] % len(transform.magnitudes)]
        magnitudes, rows = torch.from_numpy(drawn).to(images.device), rows.to(images.device)
        changed[rows] = transform.apply(images[rows], magnitudes)
        for part, mask in masks.items():
            moved[part][rows] = transform.transport(mask[rows].float(), magnitudes) >= 0.5
    return changed, moved


def _magnitudes(seed: int, image: str, name: str) -> np.ndarray:
    """All magnitudes of a transform in the order in which this image draws them."""
    key = hashlib.blake2b(f"{image}\n{name}".encode(errors="surrogateescape"), digest_size=16).digest()
    return np.random.default_rng((seed, int.from_bytes(key))).permutation(TRANSFORMS[name].magnitudes)
