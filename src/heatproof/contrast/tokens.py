"""Tokens: small marks that are put into images, each with the exact mask of what it covers.

    tag       a white label with letters and a coloured block       opaque
    tint      a coloured wash                                       half transparent
    blur      the image itself, out of focus                        opaque
    texture   slanted stripes                                       opaque
    FILE      an image file; its alpha channel is respected

The position of a token follows from the seed and the image's id. It is drawn in colours and goes through the
model's own normalisation, so that images in 8 bits and model-ready tensors get the same mark.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from heatproof.errors import InputError, did_you_mean
from heatproof.explain.baselines import gaussian_blur
from heatproof.images.preprocess import Preprocess
from heatproof.metrics.kit import same_length

SIZES = {"tag": 0.25, "tint": 0.4, "blur": 0.4, "texture": 0.3}  # of the image's shorter side, by default
SMALLEST = 3  # pixels
DRAWN = 8  # times larger, then shrunk, so that letters have soft edges
PINK, WHITE, INK, YELLOW = (214, 0, 122), (255, 255, 255), (12, 12, 12), (250, 220, 20)
TINT_ALPHA = 0.5


@dataclass(frozen=True)
class Token:
    """A mark to plant into images.

    kind: tag, tint, blur, texture or an image file; size: its longer side, as a share of the image's shorter
    one. A file without a size keeps its own pixels.
    """

    kind: str = "tag"
    size: float | None = None

    def __post_init__(self) -> None:
        if self.size is not None and not 0 < self.size <= 1:
            raise InputError(
                f"a token of {self.size:g} times the image's side does not fit into it; give a size above "
                "0 and up to 1"
            )
        if self.kind not in SIZES and not Path(self.kind).is_file():
            raise InputError(
                f"there is no token {self.kind!r}; {did_you_mean(self.kind, SIZES)}; or name an image file"
            )

    @property
    def name(self) -> str:
        return self.kind if self.kind in SIZES else Path(self.kind).stem

    def pixels(self, image: tuple[int, int]) -> tuple[int, int]:
        """Height and width of the token on an image of this height and width."""
        size, own = self.size or SIZES.get(self.kind), (3, 5) if self.kind == "tag" else (1, 1)
        if self.kind not in SIZES:
            own = _open_file(self.kind).size[::-1]
        height, width = own
        if size is not None:
            scale = size * min(image) / max(own)
            height, width = (max(1, round(side * scale)) for side in own)
        extent = f"{height}x{width} pixels on images of {image[0]}x{image[1]}"
        if height > image[0] or width > image[1]:
            raise InputError(
                f"the token {self.name} is larger than the image: {extent}; give it a size, its share of "
                "the image's side"
            )
        if max(height, width) < SMALLEST:
            raise InputError(f"the token {self.name} would be {extent}, too small to see; give a larger size")
        return height, width

    def plant(
        self, images: Tensor, ids: Sequence[str], preprocess: Preprocess | None = None, seed: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Images "n c H W" with the token in them, and its masks, "n H W" bool.

        preprocess: that of model-ready images; None if they are in 8 bits, or in [0, 1].
        """
        same_length(ids=ids, images=images)
        if images.dtype == torch.uint8:
            planted, masks = self.plant(images / 255, ids, None, seed)
            return (planted * 255).round().to(torch.uint8), masks
        size = int(images.shape[-2]), int(images.shape[-1])
        height, width = self.pixels(size)
        colour, alpha = (part.to(images.device) for part in _sprite(self.kind, height, width))
        patch = _model_ready(colour, images, preprocess).to(images.dtype)
        alpha, shape = alpha.to(images.dtype), alpha > 0
        if self.kind == "blur":
            patches = gaussian_blur(images.float(), max(height, width) / 6).to(images.dtype)
        planted, masks = images.clone(), images.new_zeros((len(images), *size), dtype=torch.bool)
        for i, name in enumerate(ids):
            top, left = _place(name, seed, size[0] - height, size[1] - width)
            window = (slice(top, top + height), slice(left, left + width))
            put = patches[i][:, *window] if self.kind == "blur" else patch
            planted[i][:, *window] = torch.lerp(planted[i][:, *window], put, alpha)
            masks[i][window] = shape
        return planted, masks


def as_token(token: Token | str | Path) -> Token:
    return token if isinstance(token, Token) else Token(str(token))


def _place(name: str, seed: int, rows: int, columns: int) -> tuple[int, int]:
    """Top and left, uniform over all positions inside the image."""
    drawn = hashlib.blake2b(f"{seed} {name}".encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return int.from_bytes(drawn[:8]) % (rows + 1), int.from_bytes(drawn[8:]) % (columns + 1)


def _model_ready(colour: Tensor, images: Tensor, preprocess: Preprocess | None) -> Tensor:
    """The token "3 h w" in the channels and value range of the images."""
    channels = images.shape[1]
    drawn = colour if channels == 3 else colour.mean(0, keepdim=True).expand(channels, -1, -1)
    if preprocess is None:
        return drawn
    if preprocess.channels == channels:
        return preprocess.normalise(drawn)
    low, high = images.min(), images.max()  # unknown normalisation: use their range
    return low + drawn * (high - low)


@lru_cache(maxsize=8)
def _sprite(kind: str, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Colours "3 h w" in [0, 1] and their opacity "h w"."""
    drawn = {"tag": _tag, "texture": _stripes}.get(kind, _plain)(height, width)
    if kind not in SIZES:
        drawn = _open_file(kind)
    values = np.asarray(drawn.convert("RGBA").resize((width, height), Image.Resampling.BOX), np.float32) / 255
    colour, alpha = torch.from_numpy(values[..., :3].copy()).permute(2, 0, 1), values[..., 3].copy()
    if not alpha.any():
        raise InputError(f"{kind} is transparent everywhere; a token needs a visible pixel")
    return colour, torch.from_numpy(alpha) * (TINT_ALPHA if kind == "tint" else 1)


def _plain(height: int, width: int) -> Image.Image:
    return Image.new("RGB", (width, height), PINK)


def _tag(height: int, width: int) -> Image.Image:
    tall, wide = DRAWN * height, DRAWN * width
    drawn = Image.new("RGB", (wide, tall), WHITE)
    pen, edge = ImageDraw.Draw(drawn), tall // 8
    pen.rectangle((edge, edge, int(wide * 0.4), tall - 1 - edge), fill=PINK)
    pen.text((wide * 0.7, tall / 2), "Hp", fill=INK, font=ImageFont.load_default(tall * 0.7), anchor="mm")
    return drawn


def _stripes(height: int, width: int) -> Image.Image:
    down, across = np.mgrid[:height, :width]
    dark = (down + across) // max(1, round(max(height, width) / 8)) % 2 == 0
    return Image.fromarray(np.where(dark[..., None], INK, YELLOW).astype(np.uint8))


@lru_cache(maxsize=4)
def _open_file(path: str) -> Image.Image:
    try:
        with Image.open(path) as opened:
            return opened.convert("RGBA")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InputError(f"cannot read the token {path} as an image: {error}") from error
