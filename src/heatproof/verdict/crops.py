"""Where the maps of a class are strongest, picture by picture, and what becomes of the answer without it.

Of the pictures that the network calls this class:

    heat      the mean of the methods' maps, each normalised at the size of the picture
    box       about the connected region above half of the heat's maximum in which that maximum lies: around
              its centre of mass, half a cell of the map wider, for a map cannot be finer than its cells; each
              side between 1/8 and 1/2 of the picture's
    painted   the box under a blur or under the picture's mean colour, whichever takes more of the class away;
              beside it the same for a box of that size where the heat is least
    features  the activation of the explained layer, averaged over the box
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from scipy.ndimage import center_of_mass, find_objects, label
from torch import Tensor
from torch.nn import functional as F

from heatproof.errors import InputError
from heatproof.explain.baselines import baseline_images
from heatproof.metrics.kit import pixel_maps
from heatproof.models.capture import capture
from heatproof.models.model import Model
from heatproof.models.queue import Queue, all_logits
from heatproof.models.running import frozen_eval
from heatproof.show import pixels
from heatproof.types import Maps

SMALLEST, LARGEST = 1 / 8, 1 / 2  # sides of a box, of the picture's
PAINTS = ("blur", "mean")
Box = tuple[int, int, int, int]  # top, left, bottom, right; the last two lie outside
Layer = str | Sequence[str] | None


@dataclass(frozen=True, eq=False)
class Crop:
    """What lies under the strongest place of one picture's maps."""

    id: str
    box: Box
    pixels: np.ndarray  # "h w 3" uint8
    changed: bool  # whether the answer is another one with the box painted over
    elsewhere: bool  # the same where the maps are weakest
    drop: float  # fall of the class's probability


@dataclass(frozen=True, eq=False)
class ClassCrops:
    """The crops of one class's pictures, and what their layer shows."""

    crops: tuple[Crop, ...]
    blank: int  # pictures whose maps mark nothing
    called_otherwise: int  # pictures that the network calls another class
    features: Tensor  # "n c": mean activation in the box
    moments: Tensor  # "3 c": sums over all places of 1, the activation and its square


def find_crops(
    model: Model, number: int, images: Tensor, maps: Sequence[Maps], most: int, layer: Layer = None
) -> ClassCrops:
    """Of one class's pictures. maps: of several methods; most: pixels of a crop's longer side."""
    if images.ndim > 4:
        raise InputError("an evidence album is made of pictures, and these are volumes")
    images, size = images.to(model.device), (int(images.shape[-2]), int(images.shape[-1]))
    heat = torch.stack([pixel_maps(one, size).cpu() for one in maps]).mean(0)
    marked = heat.flatten(1).amax(1) > 0
    chance, otherwise = (one.cpu() for one in _ask(model, images, number))
    rows = (marked & ~otherwise).nonzero().flatten()
    left_out = int((~marked & ~otherwise).sum()), int(otherwise.sum())
    if not len(rows):
        return ClassCrops((), *left_out, torch.zeros(0, 1), torch.zeros(3, 1))
    images, heat, chance = images[rows.to(images.device)], heat[rows], chance[rows]
    reach = [max(side // (2 * one.values.shape[i]) for one in maps) for i, side in enumerate(size, start=1)]
    boxes = [strongest_box(one, reach) for one in heat.numpy()]
    inside = _masks(boxes, size)
    left, changed = _ask_painted(model, images, inside, number)
    _, elsewhere = _ask_painted(model, images, _masks(_weakest_boxes(heat, boxes), size), number)
    drawn = pixels(images, model.preprocess if model.preprocess.channels == images.shape[1] else None)
    crops = tuple(
        Crop(maps[0].ids[row] if maps[0].ids else str(row), box, _cut(picture, box, most), *told)
        for row, box, picture, *told in zip(
            rows.tolist(), boxes, drawn, changed.tolist(), elsewhere.tolist(), (chance - left).tolist(),
            strict=True,
        )
    )  # fmt: skip
    return ClassCrops(crops, *left_out, *_seen(model, images, inside, layer))


def strongest_box(heat: np.ndarray, reach: Sequence[int] = (0, 0)) -> Box:
    """Around the region of a map "H W" in which its maximum lies, widened by rows and columns on either side.

    >>> heat = np.zeros((16, 16)); heat[2:6, 8:13] = 1; heat[12, 2] = 0.9
    >>> strongest_box(heat), strongest_box(heat, (1, 0))
    ((2, 8, 6, 13), (1, 8, 7, 13))
    """
    regions, _ = label(heat >= heat.max() / 2)
    region = regions[np.unravel_index(heat.argmax(), heat.shape)]
    extent, centre = find_objects(regions)[region - 1], center_of_mass(heat, regions, region)
    corners = []
    for side, span, middle, more in zip(heat.shape, extent, centre, reach, strict=True):
        length = max(span.stop - span.start + 2 * more, round(SMALLEST * side), 1)
        length = min(length, max(1, round(LARGEST * side)))
        first = min(max(round(middle - (length - 1) / 2), 0), side - length)
        corners.append((first, first + length))
    (top, bottom), (left, right) = corners
    return top, left, bottom, right


def _weakest_boxes(heat: Tensor, boxes: Sequence[Box]) -> list[Box]:
    """Boxes of the same sizes where the maps have least."""
    found = []
    for one, (top, left, bottom, right) in zip(heat, boxes, strict=True):
        height, width = bottom - top, right - left
        means = F.avg_pool2d(one[None, None], (height, width), stride=1)[0, 0]
        y, x = divmod(int(means.argmin()), means.shape[1])
        found.append((y, x, y + height, x + width))
    return found


def _masks(boxes: Sequence[Box], size: tuple[int, int]) -> Tensor:
    masks = torch.zeros(len(boxes), *size, dtype=torch.bool)
    for mask, (top, left, bottom, right) in zip(masks, boxes, strict=True):
        mask[top:bottom, left:right] = True
    return masks


def _ask(model: Model, images: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The class's probability, 0 where the answer is no number, and whether another class is said."""
    logits = all_logits(model, images)
    chance = model.measured(logits, torch.full((len(images),), number, device=logits.device))
    return chance.nan_to_num(0), (model.predicted(logits) != number) | chance.isnan()


def _ask_painted(model: Model, images: Tensor, masks: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """The same with the masked pixels painted over, by the paint that takes more of the class away."""
    covered = masks[:, None].to(images.device)
    asked = [
        _ask(model, torch.where(covered, baseline_images(model, images, paint), images), number)
        for paint in PAINTS
    ]
    chances, otherwise = (torch.stack(each) for each in zip(*asked, strict=True))
    best = chances.argmin(0)[None]
    return chances.gather(0, best)[0].cpu(), otherwise.gather(0, best)[0].cpu()


def _seen(model: Model, images: Tensor, masks: Tensor, layer: Layer) -> tuple[Tensor, Tensor]:
    """The features and moments of the explained layer."""
    parts: list[tuple[Tensor, Tensor]] = []

    def work(start: int, stop: int) -> tuple[Tensor, Tensor]:
        trace = capture(model, images[start:stop], None, frozenset({"activations"}), layer)
        seen = trace.activation.cpu().double()
        shares = F.interpolate(masks[start:stop, None].double(), seen.shape[-2:], mode="area")
        inside = (seen * shares).sum((2, 3)) / shares.sum((2, 3))
        return inside, torch.stack([(seen**power).sum((0, 2, 3)) for power in range(3)])

    with frozen_eval(model.module):
        Queue(model, (int(images.shape[-2]), int(images.shape[-1]))).each(len(images), work, parts.append)
    return torch.cat([inside for inside, _ in parts]), torch.stack([sums for _, sums in parts]).sum(0)


def _cut(picture: np.ndarray, box: Box, most: int) -> np.ndarray:
    top, left, bottom, right = box
    cut = Image.fromarray(picture[top:bottom, left:right])
    cut.thumbnail((most, most))
    return np.asarray(cut)
