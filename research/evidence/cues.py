"""Cues: what gives a class away. Each changes images in place of the object's own evidence.

    anywhere    a tag at a random position
    inside      a smaller tag at a random position inside the object region
    corner      a mark in one corner
    word        printed text at a random position
    frame       a border of one colour
    tint        a colour over the whole image
    texture     slanted stripes over the whole image, or over the background only
    sharpness   the whole image blurred, noisy or sharpened

A cue has variants (colours, words, directions, levels). Scheme `single`: one class has the cue, the others
have nothing. Scheme `each`: every class has its own variant. Only a share of the images, the strength, has
what its class has; the others have nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from heatproof.explain.baselines import gaussian_blur

KINDS = ("anywhere", "inside", "corner", "word", "frame", "tint", "texture", "sharpness")
SCHEMES = ("single", "each")
NONE = -1  # the variant of an image without a cue
VARIANTS = 4
COLOURS = ((214, 0, 122), (0, 140, 60), (20, 80, 230), (240, 170, 0))
LETTERS = ("Hp", "Xo", "42", "KZ")
WORDS = ("COPY", "DRAFT", "PROOF", "SAMPLE")
TAG, INSIDE, MARK, WORD = (0.15, 0.25), 0.5, (0.14, 0.14), (0.13, 0.5)  # height and width, of the side
MARGIN = 0.02  # of the side, around a corner mark
BORDER, OPACITY, STRIPES, PERIOD = 0.05, (0.15, 0.25), 0.1, 0.08
BLUR, NOISE, SHARPENED = 0.012, 0.08, 2.0  # sigma by the side, standard deviation, amount
ENLARGED = 8  # drawn so many times larger, then reduced
PRESENT = 0.5  # share of the images that have a cue where it is independent of the class


@dataclass(frozen=True)
class Cue:
    """A cue as one member uses it."""

    kind: str
    scheme: str
    strength: float
    classes: int
    seed: int
    share: float = 0.3  # of the image that the object region covers

    @property
    def positive(self) -> int:
        """The class that has the cue in scheme `single`."""
        return self.seed % self.classes

    @property
    def on_background(self) -> bool:
        """Whether a texture covers the background only."""
        return self.kind == "texture" and self.seed % 2 == 1

    def variant_of(self, labels: Tensor) -> Tensor:
        """The variant "n" that always goes with these classes."""
        if self.scheme == "each":
            return (labels + self.seed) % self._variants
        first = torch.full_like(labels, self.seed % (2 if self.kind == "sharpness" else VARIANTS))
        return torch.where(labels == self.positive, first, NONE)

    @property
    def _variants(self) -> int:
        return 3 if self.kind == "sharpness" and self.classes < 4 else VARIANTS

    def correlated(self, labels: Tensor, random: torch.Generator) -> Tensor:
        """Variants that go with the class in a share of the images, the strength."""
        return torch.where(_uniform(labels, random) < self.strength, self.variant_of(labels), NONE)

    def independent(self, labels: Tensor, random: torch.Generator) -> Tensor:
        """Variants that say nothing about the class."""
        variants = self.added(labels, random)
        return torch.where(_uniform(labels, random) < PRESENT, variants, NONE)

    def added(self, labels: Tensor, random: torch.Generator) -> Tensor:
        """The cue in every image, of whichever class."""
        if self.scheme == "single":
            return self.variant_of(torch.full_like(labels, self.positive))
        return self.variant_of(_integers(labels, self.classes, random))

    def others(self, labels: Tensor, random: torch.Generator) -> Tensor:
        """Another class for every image: the one whose cue it gets; the positive one in scheme `single`."""
        if self.scheme == "single":
            return torch.full_like(labels, self.positive)
        return (labels + 1 + _integers(labels, self.classes - 1, random)) % self.classes

    def put(
        self, images: Tensor, regions: Tensor, variants: Tensor, random: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Images "n 3 H W" in [0, 1] with the cue, in steps of 8 bits, and the pixels "n H W" it covers."""
        present = variants != NONE
        chosen = variants.clamp(min=0)
        if self.kind in ("anywhere", "inside", "corner", "word"):
            changed, masks = self._sprites(images, regions, chosen, random)
        else:
            changed, masks = self._whole(images, regions, chosen, random)
        masks = masks & present[:, None, None]
        changed = torch.where(masks[:, None], changed, images)
        return (changed.clamp(0, 1) * 255).round() / 255, masks

    def _sprites(
        self, images: Tensor, regions: Tensor, variants: Tensor, random: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        side = images.shape[-1]
        top, left, bottom, right = torch.zeros(4, len(images), device=images.device)
        bottom, right = bottom + side, right + side
        scale = 1.0
        if self.kind == "inside":
            top, left, bottom, right = boxes_of(regions)
            scale = min(1.0, INSIDE * math.sqrt(self.share) / TAG[1])
        sprites = drawn_variants(self.kind, side, scale, images.device)
        height, width = sprites.shape[-2:]
        y = top + (_uniform(variants, random) * (bottom - top - height + 1).clamp(min=1)).floor()
        x = left + (_uniform(variants, random) * (right - left - width + 1).clamp(min=1)).floor()
        if self.kind == "corner":
            edge, far = round(MARGIN * side), side - round(MARGIN * side)
            down, across = divmod(self.seed // 2 % 4, 2)
            y = torch.full_like(y, far - height if down else edge)
            x = torch.full_like(x, far - width if across else edge)
        pixels = torch.arange(side, device=images.device)
        rows, columns = (pixels - start[:, None].long() for start in (y, x))
        inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None]
        rows, columns = rows.clamp(0, height - 1), columns.clamp(0, width - 1)
        number = torch.arange(len(images), device=images.device)[:, None, None]
        patches = sprites[variants].permute(0, 2, 3, 1)[number, rows[:, :, None], columns[:, None, :]]
        opacity = patches[..., 3] * inside
        colours = patches[..., :3].permute(0, 3, 1, 2)
        return torch.lerp(images, colours, opacity[:, None]), opacity > 0

    def _whole(
        self, images: Tensor, regions: Tensor, variants: Tensor, random: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        side, everywhere = images.shape[-1], torch.ones_like(regions)
        colours = torch.tensor(COLOURS, device=images.device)[variants].to(images)[..., None, None] / 255
        if self.kind == "frame":
            width = max(2, round(BORDER * side))
            everywhere[:, width:-width, width:-width] = False
            return colours.expand_as(images), everywhere
        if self.kind == "tint":
            low, high = OPACITY
            opacity = low + (high - low) * _uniform(variants, random)[:, None, None, None]
            return torch.lerp(images, colours.expand_as(images), opacity), everywhere
        if self.kind == "texture":
            angle = variants * (math.pi / VARIANTS) + math.pi / 8
            down, across = torch.meshgrid(*[torch.arange(side, device=images.device)] * 2, indexing="ij")
            distance = (down * angle.sin()[:, None, None] + across * angle.cos()[:, None, None]) / max(
                4.0, PERIOD * side
            )
            phase = _uniform(variants, random)[:, None, None]
            stripes = STRIPES * (2 * math.pi * (distance + phase)).sin()
            return images + stripes[:, None], ~regions if self.on_background else everywhere
        blurred = gaussian_blur(images, max(0.8, BLUR * side))
        noise = NOISE * torch.randn(images.shape, generator=random, device=images.device)
        levels = [blurred, images + noise, images + SHARPENED * (images - blurred), blurred + noise]
        every = torch.stack(levels, 1)
        return every[torch.arange(len(images), device=images.device), variants], everywhere


def _uniform(like: Tensor, random: torch.Generator) -> Tensor:
    return torch.rand(len(like), generator=random, device=like.device)


def _integers(like: Tensor, below: int, random: torch.Generator) -> Tensor:
    return torch.randint(below, (len(like),), generator=random, device=like.device)


def boxes_of(regions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Top, left, bottom and right of the tight boxes, each "n"; the last two are outside."""
    rows, columns = regions.any(2).float(), regions.any(1).float()
    height, width = regions.shape[1:]
    top, left = rows.argmax(1), columns.argmax(1)
    bottom, right = height - rows.flip(1).argmax(1), width - columns.flip(1).argmax(1)
    return top.float(), left.float(), bottom.float(), right.float()


@lru_cache(maxsize=16)
def drawn_variants(kind: str, side: int, scale: float, device: torch.device) -> Tensor:
    """The variants of a tag, mark or word, "v 4 h w": colours and opacity in [0, 1]."""
    shape = {"corner": MARK, "word": WORD}.get(kind, TAG)
    height, width = (max(3, round(extent * scale * side)) for extent in shape)
    draw = {"corner": _mark, "word": _word}.get(kind, _tag)
    every = []
    for variant in range(VARIANTS):
        drawn = Image.new("RGBA", (width * ENLARGED, height * ENLARGED))
        draw(drawn, variant)
        small = drawn.resize((width, height), Image.Resampling.BOX)
        every.append(np.asarray(small, np.float32) / 255)
    return torch.from_numpy(np.stack(every)).permute(0, 3, 1, 2).contiguous().to(device)


def _tag(drawn: Image.Image, variant: int) -> None:
    """A white label with a coloured block and two letters."""
    width, height = drawn.size
    pen, edge = ImageDraw.Draw(drawn), height // 8
    pen.rectangle((0, 0, width, height), fill="white")
    pen.rectangle((edge, edge, int(width * 0.4), height - 1 - edge), fill=COLOURS[variant])
    font = ImageFont.load_default(height * 0.7)
    pen.text((width * 0.7, height / 2), LETTERS[variant], fill=(12, 12, 12), font=font, anchor="mm")


def _mark(drawn: Image.Image, variant: int) -> None:
    """A disc, a cross, a triangle or a ring on a plate."""
    width, height = drawn.size
    pen, edge = ImageDraw.Draw(drawn), width // 6
    pen.rectangle((0, 0, width, height), fill=(245, 245, 245))
    inner, ink = (edge, edge, width - edge, height - edge), COLOURS[variant]
    if variant == 0:
        pen.ellipse(inner, fill=ink)
    elif variant == 1:
        pen.line((edge, edge, width - edge, height - edge), fill=ink, width=edge)
        pen.line((edge, height - edge, width - edge, edge), fill=ink, width=edge)
    elif variant == 2:
        pen.polygon([(width / 2, edge), (width - edge, height - edge), (edge, height - edge)], fill=ink)
    else:
        pen.ellipse(inner, outline=ink, width=edge)


def _word(drawn: Image.Image, variant: int) -> None:
    """White letters with a dark outline, without a plate."""
    width, height = drawn.size
    pen = ImageDraw.Draw(drawn)
    font = ImageFont.load_default(height * 0.8)
    length = pen.textlength(WORDS[variant], font=font)
    font = ImageFont.load_default(height * 0.8 * min(1.0, 0.92 * width / length))
    pen.text(
        (width / 2, height / 2), WORDS[variant], fill="white", font=font, anchor="mm",
        stroke_width=max(1, height // 14), stroke_fill=(10, 10, 10),
    )  # fmt: skip
