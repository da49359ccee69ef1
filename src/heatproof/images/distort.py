"""Six distortions of images with a severity s in [0, 1]; masks follow the geometry.

    rotation     by 40 s degrees, either way, about the centre
    perspective  each corner moves inwards by up to 0.3 s of either side
    blur         Gaussian, sigma = 4 s at 224 pixels, in proportion for other sizes
    jpeg         quality 90 - 85 s
    low_light    (1 - 0.9 s) of the light, and noise with a deviation of 8 s grey levels
    occlusion    one rectangle over 0.25 s of the area; masks stay, because the part is still there

The six and the severities are those of chakraborty2025cambench, which gives no strengths; these are ours.
Random choices (a direction, corners, noise, the rectangle's place, shape and colour) follow from the seed,
the image's index and the distortion, not from s: the severities of an image are steps along one path.

Geometry: an output pixel's centre is sent back through the inverse map. Images are read there bilinearly, and
beyond their edge by its nearest pixel; masks take the pixel they land in, and nothing beyond the edge, which
is exact because modules are whole pixels. A rotated image is shrunk so far that all of it stays in the frame.
(Not 45 degrees: there the shrunken pixel grid falls on pixel centres, and every border would be a tie.)
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter

from heatproof.errors import InputError, UnknownNameError
from heatproof.images.symbols import Random

SEVERITIES = (0.0, 0.25, 0.5, 0.75, 1.0)
IMAGES_AT_ONCE = 32
ANGLE, CORNER_SHIFT, SIGMA, QUALITY, DARKER, NOISE, HIDDEN = 40.0, 0.3, 4 / 224, (90, 85), 0.9, 8.0, 0.25

Masks = dict[str, np.ndarray]
Pixels = np.ndarray  # "H W 3", uint8


def rotation(severity: float, height: int, width: int, random: Random) -> np.ndarray:
    """Matrix "3 3" from the image's points (x, y, 1) to those of the distorted image."""
    angle = math.radians(ANGLE * severity) * (1 if random.random() < 0.5 else -1)
    cos, sin = math.cos(angle), math.sin(angle)
    spread = max(cos + abs(sin) * height / width, cos + abs(sin) * width / height)
    centre = np.array([[1, 0, width / 2], [0, 1, height / 2], [0, 0, 1]])
    turn = np.array([[cos / spread, -sin / spread, 0], [sin / spread, cos / spread, 0], [0, 0, 1]])
    return np.asarray(centre @ turn @ np.linalg.inv(centre))


def perspective(severity: float, height: int, width: int, random: Random) -> np.ndarray:
    """Matrix "3 3" that maps the frame's corners to points inside it."""
    shifts = CORNER_SHIFT * severity * random.random((4, 2))
    corners = np.array([[0, 0], [1, 0], [1, 1], [0, 1]])
    frame = np.array([width, height])
    return homography(corners * frame, (corners + (1 - 2 * corners) * shifts) * frame)


def homography(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The projective map that sends four points to four points, each "4 2"."""
    rows = []
    for (x, y), (u, v) in zip(source, target, strict=True):
        rows += [[x, y, 1, 0, 0, 0, -u * x, -u * y], [0, 0, 0, x, y, 1, -v * x, -v * y]]
    return np.append(np.linalg.solve(np.array(rows), target.reshape(-1)), 1).reshape(3, 3)


def blur(image: Pixels, severity: float, random: Random) -> Pixels:
    sigma = SIGMA * severity * min(image.shape[:2])
    return to_bytes(gaussian_filter(image.astype(np.float32), (sigma, sigma, 0), mode="nearest"))


def jpeg(image: Pixels, severity: float, random: Random) -> Pixels:
    best, worse = QUALITY
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=round(best - worse * severity))
    return np.asarray(Image.open(buffer).convert("RGB"))


def low_light(image: Pixels, severity: float, random: Random) -> Pixels:
    noise = random.standard_normal(image.shape, dtype=np.float32)
    return to_bytes((1 - DARKER * severity) * image + NOISE * severity * noise)


def occlusion(image: Pixels, severity: float, random: Random) -> Pixels:
    height, width = image.shape[:2]
    middle, log_aspect, colour = random.random(2), random.uniform(-1, 1), random.integers(0, 256, 3)
    aspect, share = 2**log_aspect, HIDDEN * severity
    tall, wide = round(math.sqrt(share / aspect) * height), round(math.sqrt(share * aspect) * width)
    top, left = round(middle[0] * (height - tall)), round(middle[1] * (width - wide))
    hidden = image.copy()
    hidden[top : top + tall, left : left + wide] = colour
    return hidden


def to_bytes(values: np.ndarray) -> Pixels:
    return values.round().clip(0, 255).astype(np.uint8)


MOVING = {"rotation": rotation, "perspective": perspective}
RECOLOURING = {"blur": blur, "jpeg": jpeg, "low_light": low_light, "occlusion": occlusion}
DISTORTIONS = (*MOVING, *RECOLOURING)


def distort(
    pictures: np.ndarray, kind: str, severity: float, seed: int = 0, masks: Mapping[str, Any] | None = None
) -> tuple[np.ndarray, Masks | None]:
    """Images "n H W 3" uint8 and their masks (each "n H W"), distorted; severity 0 returns copies."""
    check_distortion(kind, severity)
    shape, dtype = np.shape(pictures), getattr(pictures, "dtype", type(pictures).__name__)
    if len(shape) != 4 or shape[3] != 3 or dtype != np.uint8:
        raise InputError(f"images to distort are 8-bit 'n H W 3'; got {dtype} of shape {shape}")
    for part, mask in (masks or {}).items():
        if np.shape(mask) != shape[:3]:
            raise InputError(f"the masks of {part!r} must have the shape {shape[:3]}; got {np.shape(mask)}")
    binary = None if masks is None else {part: np.array(mask) >= 0.5 for part, mask in masks.items()}
    severity = float(severity)
    if severity == 0 or not shape[0]:
        return pictures.copy(), binary
    if kind in MOVING:
        maps = geometry(kind, severity, shape[1:3], seed, shape[0])
        warped, moved = _warp(pictures, binary or {}, maps)
        return warped, None if binary is None else moved
    with ThreadPoolExecutor() as threads:
        randoms = (_random(seed, number, kind) for number in range(shape[0]))
        changed = threads.map(RECOLOURING[kind], pictures, repeat(severity), randoms)
        return np.stack(list(changed)), binary


def check_distortion(kind: str, severity: float) -> None:
    if kind not in DISTORTIONS:
        raise UnknownNameError("distortion", kind, DISTORTIONS)
    if not isinstance(severity, int | float | np.number) or not 0 <= float(severity) <= 1:
        raise InputError(f"a severity is a number from 0 (none) to 1; got {severity!r}")


def geometry(kind: str, severity: float, size: Sequence[int], seed: int = 0, count: int = 1) -> np.ndarray:
    """Array "n 3 3": where `distort` moves points (x, y, 1) of images of height and width `size`.

    The corner of the first pixel is 0, its centre 0.5. The identity where a distortion moves nothing.
    """
    check_distortion(kind, severity)
    if kind not in MOVING or severity == 0:
        return np.repeat(np.eye(3)[None], count, 0)
    height, width = size
    return np.stack([MOVING[kind](severity, height, width, _random(seed, i, kind)) for i in range(count)])


def _random(seed: int, number: int, kind: str) -> Random:
    return np.random.default_rng((seed, int(number), *kind.encode()))


def _warp(pictures: np.ndarray, masks: Masks, maps: np.ndarray) -> tuple[np.ndarray, Masks]:
    warped, carried = np.empty_like(pictures), {part: np.empty_like(mask) for part, mask in masks.items()}
    sample = partial(torch.nn.functional.grid_sample, align_corners=False)
    height, width = pictures.shape[1:3]
    rows, columns = np.indices((height, width)) + 0.5
    points = np.stack([columns, rows, np.ones_like(rows)]).reshape(3, -1)
    for start in range(0, len(maps), IMAGES_AT_ONCE):
        some = slice(start, start + IMAGES_AT_ONCE)
        # Where each output pixel's centre comes from, "n H W 2" with the frame's edges at -1 and 1.
        x, y, w = (np.linalg.inv(maps[some]) @ points).reshape(-1, 3, height, width).swapaxes(0, 1)
        grid = np.stack([2 * x / w / width - 1, 2 * y / w / height - 1], axis=-1)
        sources = torch.from_numpy(grid).float()
        values = torch.from_numpy(pictures[some]).permute(0, 3, 1, 2).float()
        read = sample(values, sources, mode="bilinear", padding_mode="border")
        warped[some] = to_bytes(read.permute(0, 2, 3, 1).numpy())
        for part, mask in carried.items():
            flags = torch.from_numpy(masks[part][some])[:, None].float()
            mask[some] = sample(flags, sources, mode="nearest", padding_mode="zeros")[:, 0].numpy() >= 0.5
    return warped, carried
