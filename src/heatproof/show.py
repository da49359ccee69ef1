"""Colours, overlays of maps on images, and HTML for notebooks. Pillow only.

An overlay is (1 - alpha) grey + alpha colour(map). The colour maps are perceptually uniform and stored as
sixteen points, linear in between; that is within 7 of 255 of matplotlib's tables. HTML loads nothing: images
are small PNG files inside it, and every text is escaped.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image

from heatproof.errors import InputError, UnknownNameError

if TYPE_CHECKING:
    from torch import Tensor

    from heatproof.images.preprocess import Preprocess

COLOUR_MAPS = {
    "inferno": "000004 0c0826 240c4f 420a68 5d126e 781c6d 932667 ae305c c73e4c dd513a ed6925 f8850f fca50a "
    "fac62d f2e661 fcffa4",
    "magma": "000004 0b0924 20114b 3b0f70 57157e 721f81 8c2981 a8327d c43c75 de4968 f1605d fa7f5e fe9f6d "
    "febf84 fddea0 fcfdbf",
    "viridis": "440154 481a6c 472f7d 414487 39568c 31688e 2a788e 23888e 1f988b 22a884 35b779 54c568 7ad151 "
    "a5db36 d2e21b fde725",
    "grey": "000000 ffffff",
}
MOST_SHOWN = 8  # images in a Strip
SIDE = 160  # pixels of the longer side of each
GAP = 2  # pixels between the planes of a volume
AXES = ("depth", "height", "width")  # of the axes of a volume, for captions


def colours(values: Any, cmap: str = "inferno") -> np.ndarray:
    """Values in [0, 1] of any shape -> the same shape with a last axis of red, green, blue (uint8).

    >>> colours([0.0, 1.0], "grey").tolist()
    [[0, 0, 0], [255, 255, 255]]
    """
    if cmap not in COLOUR_MAPS:
        raise UnknownNameError("colour map", cmap, COLOUR_MAPS)
    table = np.array([list(bytes.fromhex(point)) for point in COLOUR_MAPS[cmap].split()], dtype=np.float64)
    values = np.clip(np.asarray(values, dtype=np.float64), 0, 1)
    at = np.linspace(0, 1, len(table))
    return np.stack([np.interp(values, at, column) for column in table.T], -1).round().astype(np.uint8)


def _array(values: Any) -> np.ndarray:
    return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)


def brightened(heat: np.ndarray) -> np.ndarray:
    """Maps "b H W" in [0, 1], each divided by its 99th percentile, unless that is 0, and clipped at 1.

    For display: a few pixels of a gradient are many times as large as the others.
    """
    limit = np.quantile(heat.reshape(len(heat), -1), 0.99, axis=1).astype(heat.dtype)
    limit = limit.reshape(-1, *[1] * (heat.ndim - 1))
    return np.asarray(np.minimum(heat / np.where(limit > 0, limit, heat.dtype.type(1)), 1))


def overlay(picture: Image.Image, heat: Any, cmap: str = "inferno", alpha: float = 0.6) -> Image.Image:
    """Overlay a map "H W" in [0, 1] on an image of the same size."""
    if not 0 <= alpha <= 1:
        raise InputError(f"alpha must be in [0, 1], got {alpha}")
    heat = _array(heat)
    if heat.shape != (picture.height, picture.width):
        raise InputError(
            f"the map is {' x '.join(map(str, heat.shape))} but the image is "
            f"{picture.height} x {picture.width}; upsample the map to the image first"
        )
    grey = picture.convert("L").convert("RGB")
    return Image.blend(grey, Image.fromarray(colours(heat, cmap)), alpha)


def eight_bit(pictures: Tensor) -> Tensor:
    """Images in [0, 1] as uint8, of the same shape."""
    return pictures.mul(255).round().byte()


class Sheet(NamedTuple):
    """Three planes of a volume side by side, and their indices."""

    pixels: np.ndarray  # "h w 3" uint8
    at: tuple[int, ...]


def middle(size: Sequence[int]) -> tuple[int, ...]:
    """The plane half-way along each axis."""
    return tuple(int(side) // 2 for side in size)


def hottest(heat: Any) -> tuple[int, ...]:
    """The plane with the largest sum along each axis of a map "D H W"."""
    return tuple(int(_array(heat).sum(axis=axes).argmax()) for axes in ((1, 2), (0, 2), (0, 1)))


def plane_words(at: Sequence[int], axes: Sequence[str] = AXES) -> str:
    """The planes by axis, in words.

    >>> plane_words((5, 9, 7))
    'planes: depth 5, height 9, width 7'
    """
    return f"planes: {', '.join(f'{axis} {place}' for axis, place in zip(axes, at, strict=True))}"


def sections(volume: Any, at: Sequence[int]) -> np.ndarray:
    """The three planes of "D H W" or "D H W 3" that cross at a point, side by side, 0 between and below.

    >>> sections(np.arange(8).reshape(2, 2, 2), (0, 0, 1)).tolist()
    [[0, 1, 0, 0, 0, 1, 0, 0, 1, 3], [2, 3, 0, 0, 4, 5, 0, 0, 5, 7]]
    """
    planes = [_array(volume).take(place, axis) for axis, place in enumerate(at)]
    height = max(len(plane) for plane in planes)
    padded = [
        np.pad(plane, [(0, height - len(plane)), (0, GAP if i < 2 else 0), (0, 0)][: plane.ndim])
        for i, plane in enumerate(planes)
    ]
    return np.concatenate(padded, axis=1)


def pixels(
    images: Tensor, preprocess: Preprocess | None = None, at: Sequence[Sequence[int]] | None = None
) -> np.ndarray:
    """Model-ready images as "b H W 3" uint8; stretched to the whole range without preprocess.

    Volumes become three planes each, those of `at` or the middle ones; other channel numbers are averaged.
    """
    images = images.detach().float().cpu()
    if preprocess is not None:
        colour = preprocess.restore(images)
    else:
        sides = tuple(range(1, images.ndim))
        low, high = images.amin(sides, keepdim=True), images.amax(sides, keepdim=True)
        colour = (images - low) / (high - low).clamp(min=1e-12)
    if colour.shape[1] != 3:
        colour = colour.mean(1, keepdim=True).expand(-1, 3, *colour.shape[2:])
    arrays = np.asarray(eight_bit(colour).movedim(1, -1).contiguous().numpy())
    if images.ndim == 4:
        return arrays
    planes = at or [middle(volume.shape[:3]) for volume in arrays]
    return np.stack([sections(volume, place) for volume, place in zip(arrays, planes, strict=True)])


def as_pictures(
    images: Tensor | Image.Image | Sequence[Image.Image], preprocess: Preprocess | None
) -> list[Image.Image]:
    """Convert images "b c H W", volumes or Pillow images to Pillow images of what the model saw."""
    if isinstance(images, Image.Image):
        images = [images]
    if not isinstance(images, Sequence):
        return [Image.fromarray(array) for array in pixels(images, preprocess)]
    if not all(isinstance(image, Image.Image) for image in images):
        raise InputError("images are a tensor 'b c H W' or Pillow images; open files with hp.open_image")
    return [preprocess.crop(image) if preprocess else image for image in images]


class Strip(list[Image.Image]):
    """Images that a notebook shows side by side, each above its title."""

    def __init__(self, images: Iterable[Image.Image], titles: Sequence[str] = ()) -> None:
        super().__init__(images)
        self.titles = tuple(titles)

    def _repr_html_(self) -> str:
        figures = ""
        titles = self.titles or ("",) * len(self)
        for image, title in list(zip(self, titles, strict=True))[:MOST_SHOWN]:
            small, scale = image.convert("RGB"), SIDE / max(image.size)
            small.thumbnail((SIDE, SIDE))
            width = f'width="{round(scale * image.width)}" ' if scale > 1 else ""
            figures += f'<figure style="margin:0"><img alt="{escape(title)}" {width}src="{address(small)}">'
            figures += f'<figcaption style="font-size:small">{text(title)}</figcaption></figure>'
        more = f"<p>and {len(self) - MOST_SHOWN} more</p>" if len(self) > MOST_SHOWN else ""
        return f'<div style="display:flex;flex-wrap:wrap;gap:8px">{figures}</div>{more}'


class ByName(dict[str, Any]):
    """Objects by name, such as maps by method, that a notebook shows one below the other."""

    def _repr_html_(self) -> str:
        return "".join(value._repr_html_() for value in self.values())


def address(picture: Image.Image, form: str = "PNG", **options: Any) -> str:
    """The image as a data: URL."""
    out = io.BytesIO()
    picture.save(out, form, **options)
    return f"data:image/{form.lower()};base64,{base64.b64encode(out.getvalue()).decode()}"


def text(content: object) -> str:
    """Text as HTML, escaped and isolated from the direction of the text around it."""
    return f"<bdi>{escape(str(content))}</bdi>"


def plain_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table of texts and numbers; the first column names the row."""
    columns = "".join(f'<th scope="col">{text(cell)}</th>' for cell in head)
    body = ""
    for first, *cells in rows:
        texts = [f"{cell:.3f}" if isinstance(cell, float) else cell for cell in cells]
        data = "".join(f"<td>{text(cell)}</td>" for cell in texts)
        body += f'<tr><th scope="row">{text(first)}</th>{data}</tr>'
    return f"<table><thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table>"
