"""Images with a known object region: an object of a class pasted into a background that is independent of it.

    source              objects                                      backgrounds
    shapes              discs, stars, triangles, squares; patterned  drawn
    shapes-photos       the same                                     photographs
    qr                  QR codes and look-alikes (make_qr)           drawn
    qr-photos           the same                                     photographs
    cifar               CIFAR-10 images                              photographs
    xrays               the lung fields of an X-ray                  blurred X-rays of any class
    photographs         what the box of a photograph contains        landscapes, and drawn
    scenes              windows of photographs with their own boxes and surroundings

In all sources but `scenes`, only the object region contains information about the class. The box of a member
covers 10, 30 or 60 % of the image, plus or minus 15 % of that. Objects and backgrounds are split into
training, checking and held-out ones: no X-ray, CIFAR image or photograph occurs in two splits. Images are
composed anew in every draw, on the device of the network.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFilter
from torch import Tensor
from torch.nn import functional as F

from heatproof.errors import InputError
from heatproof.images import make_qr
from heatproof.images.codes import background
from research.calibration.population import ANIMALS

TRAIN, CHECK, HELD_OUT = 0, 1, 2  # splits
JITTER, ASPECT = 0.15, 1.15  # of the share of the box, and its longest aspect ratio
ZOOM = 0.7  # smallest share of a background's side that is visible
DRAWN = 120  # generated objects per class, and backgrounds
SHAPES = ("disc", "star", "triangle", "square")
QR_CLASSES = ("qr", "barcode", "checkerboard", "clutter")  # of three classes and more
CIFAR_CLASSES = {2: (1, 7), 3: (1, 6, 8), 4: (1, 6, 7, 8)}  # automobile, frog, horse, ship
XRAY_CLASSES = ("NORMAL", "PNEUMONIA")
BLUR = ImageFilter.GaussianBlur(20)  # of X-rays of 224 pixels
LUNG_FIELDS = (0.1, 0.1, 0.9, 0.9)  # left, top, right, bottom, of an X-ray's sides
LANDSCAPES = (970, 972, 979, 980, 984)  # alp, cliff, valley, volcano, rapeseed
WINDOWS = 4  # per photograph, of scenes
TOLERANCE = 1.3  # of the share of a box in a scene


ByClass = list[list[Tensor]]  # by split and class: numbers of entries


class Drawn(NamedTuple):
    """Composed images."""

    images: Tensor  # "n 3 H W" in [0, 1]
    labels: Tensor  # "n"
    regions: Tensor  # "n H W" bool: the box of the object


@dataclass(frozen=True)
class Pasted:
    """Objects to paste into backgrounds."""

    side: int  # of an image, in pixels
    share: float  # of the image that the box covers
    objects: Tensor  # "m 4 S S" uint8: colours and opacity
    labels: Tensor  # "m"
    splits: Tensor  # "m"
    backgrounds: Tensor  # "k 3 T T" uint8
    background_splits: Tensor  # "k"
    flip: bool = True

    @property
    def classes(self) -> int:
        return int(self.labels.max()) + 1

    def to(self, device: str | torch.device) -> Pasted:
        return replace(self, **_moved(self, device))

    @cached_property
    def by_class(self) -> ByClass:
        return _by_class(self.labels, self.splits)

    @cached_property
    def backgrounds_by_split(self) -> list[Tensor]:
        return [(self.background_splits == split).nonzero().flatten() for split in range(3)]

    def draw(self, count: int, split: int, random: torch.Generator) -> Drawn:
        """Compose images, the classes in turn."""
        device = self.objects.device
        chosen, labels = _balanced(self.by_class[split], count, random)
        behind = _any_of(self.backgrounds_by_split[split], count, random)
        backgrounds = _window(self.backgrounds[behind].float() / 255, self.side, self.flip, random)
        area = self.share * (1 + JITTER * (2 * _uniform(count, random) - 1)) * self.side**2
        aspect = ASPECT ** (2 * _uniform(count, random) - 1)
        height = (area * aspect).sqrt().round().clamp(max=self.side)
        width = (area / height).round().clamp(max=self.side)
        top = (_uniform(count, random) * (self.side - height + 1)).floor()
        left = (_uniform(count, random) * (self.side - width + 1)).floor()
        pixels = torch.arange(self.side, device=device) + 0.5
        v = (pixels - top[:, None]) / height[:, None] * 2 - 1
        u = (pixels - left[:, None]) / width[:, None] * 2 - 1
        regions = (v.abs() < 1)[:, :, None] & (u.abs() < 1)[:, None, :]
        if self.flip:
            u = u * _signs(count, random)[:, None]
        grid = torch.stack([u[:, None, :].expand_as(regions), v[:, :, None].expand_as(regions)], -1)
        pasted = F.grid_sample(
            self.objects[chosen].float() / 255, grid, padding_mode="border", align_corners=False
        )
        opacity = pasted[:, 3:] * regions[:, None]
        return Drawn(torch.lerp(backgrounds, pasted[:, :3], opacity), labels, regions)


@dataclass(frozen=True)
class Windows:
    """Finished images with their regions, for scenes."""

    side: int
    share: float
    images: Tensor  # "m 3 H W" uint8
    regions: Tensor  # "m H W" bool
    labels: Tensor  # "m"
    splits: Tensor  # "m"

    @property
    def classes(self) -> int:
        return int(self.labels.max()) + 1

    def to(self, device: str | torch.device) -> Windows:
        return replace(self, **_moved(self, device))

    @cached_property
    def by_class(self) -> ByClass:
        return _by_class(self.labels, self.splits)

    def draw(self, count: int, split: int, random: torch.Generator) -> Drawn:
        """Select images, the classes in turn, and mirror half of them."""
        chosen, labels = _balanced(self.by_class[split], count, random)
        mirrored = _signs(count, random) < 0
        images, regions = self.images[chosen].float() / 255, self.regions[chosen]
        images = torch.where(mirrored[:, None, None, None], images.flip(-1), images)
        return Drawn(images, labels, torch.where(mirrored[:, None, None], regions.flip(-1), regions))


Source = Pasted | Windows


def _moved(source: Any, device: str | torch.device) -> dict[str, Any]:
    values = {field.name: getattr(source, field.name) for field in fields(source)}
    return {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}


def _uniform(count: int, random: torch.Generator) -> Tensor:
    return torch.rand(count, generator=random, device=random.device)


def _signs(count: int, random: torch.Generator) -> Tensor:
    return torch.where(_uniform(count, random) < 0.5, -1.0, 1.0)


def _any_of(numbers: Tensor, count: int, random: torch.Generator) -> Tensor:
    """`count` of the numbers, in random order; each equally often, as far as the count allows."""
    rounds = math.ceil(count / len(numbers))
    order = [torch.randperm(len(numbers), generator=random, device=random.device) for _ in range(rounds)]
    return numbers[torch.cat(order)[:count]]


def _by_class(labels: Tensor, splits: Tensor) -> ByClass:
    classes = range(int(labels.max()) + 1)
    return [[((splits == s) & (labels == c)).nonzero().flatten() for c in classes] for s in range(3)]


def _balanced(by_class: list[Tensor], count: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Numbers of entries whose classes take turns, and their labels."""
    classes = len(by_class)
    labels = torch.arange(count, device=random.device) % classes
    chosen = torch.empty_like(labels)
    for label, numbers in enumerate(by_class):
        chosen[label::classes] = _any_of(numbers, len(range(label, count, classes)), random)
    return chosen, labels


def _window(images: Tensor, side: int, flip: bool, random: torch.Generator) -> Tensor:
    """A random window of each image, at least ZOOM of its side."""
    count = len(images)
    scale = ZOOM + (1 - ZOOM) * _uniform(count, random)
    shift = [(1 - scale) * (2 * _uniform(count, random) - 1) for _ in range(2)]
    signs = _signs(count, random) if flip else torch.ones_like(scale)
    zero = torch.zeros_like(scale)
    rows = [torch.stack([scale * signs, zero, shift[0]], 1), torch.stack([zero, scale, shift[1]], 1)]
    grid = F.affine_grid(torch.stack(rows, 1), [count, 3, side, side], align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def open_source(name: str, share: float, side: int, classes: int, seed: int, data: Path | None) -> Source:
    """The source of a member; drawn ones follow from the seed.

    Raises InputError if it needs a folder of data and there is none.
    """
    if name in NEEDS_DATA and (data is None or not data.is_dir()):
        raise InputError(f"the source {name} needs real images; name their folder with --data")
    return SOURCES[name](share, side, classes, seed, data)


def box_side(share: float, side: int) -> int:
    return round(math.sqrt(share) * side)


def background_side(side: int) -> int:
    return round(side / ZOOM)


def _three_splits(count: int, seed: int) -> Tensor:
    """Splits of the entries: 50 % training, 12 % checking, 38 % held-out."""
    order = np.random.default_rng((seed, 1)).permutation(count)
    splits = np.empty(count, np.int64)
    splits[order] = np.digitize(np.arange(count) / count, (0.5, 0.62))
    return torch.from_numpy(splits)


def _stacked(images: Sequence[Image.Image], side: int) -> Tensor:
    """Images as "n c side side" uint8."""
    resized = [np.asarray(i.resize((side, side), Image.Resampling.BILINEAR)) for i in images]
    return torch.from_numpy(np.stack(resized)).permute(0, 3, 1, 2).contiguous()


def _opaque(images: Tensor) -> Tensor:
    return torch.cat([images, torch.full_like(images[:, :1], 255)], 1)


def _drawn_backgrounds(side: int, seed: int) -> tuple[Tensor, Tensor]:
    random = np.random.default_rng((seed, 2))
    size = background_side(side)
    images = [Image.fromarray(background(size, size, random).astype(np.uint8)) for _ in range(DRAWN)]
    return _stacked(images, size), _three_splits(DRAWN, seed)


def _photo_backgrounds(data: Path, side: int, seed: int) -> tuple[Tensor, Tensor]:
    photographs = read_photographs(data)
    images = _stacked([photo.image for photo in photographs], background_side(side))
    return images, _three_splits(len(photographs), seed)


def _backgrounds(data: Path | None, side: int, seed: int, photos: bool) -> tuple[Tensor, Tensor]:
    if photos:
        assert data is not None
        return _photo_backgrounds(data, side, seed)
    return _drawn_backgrounds(side, seed)


def _shapes(photos: bool, share: float, side: int, classes: int, seed: int, data: Path | None) -> Pasted:
    random = np.random.default_rng((seed, 3))
    size = box_side(share, side)
    drawn = [draw_shape(SHAPES[label], size, random) for _ in range(DRAWN) for label in range(classes)]
    labels = torch.arange(classes).repeat(DRAWN)
    behind = _backgrounds(data, side, seed, photos)
    return Pasted(side, share, _stacked(drawn, size), labels, _three_splits(len(labels), seed), *behind)


def draw_shape(name: str, size: int, random: np.random.Generator) -> Image.Image:
    """A turned shape, filled with its own pattern of a dark and a light colour, on a transparent square."""
    large = 3 * size
    colours = random.permutation([random.integers(0, 100, 3), random.integers(155, 256, 3)])
    turn, radius = random.uniform(0, 2 * math.pi), large * random.uniform(0.42, 0.49)
    y, x = np.mgrid[:large, :large] - (large - 1) / 2
    along, across = x * math.cos(turn) + y * math.sin(turn), y * math.cos(turn) - x * math.sin(turn)
    distance, step = np.hypot(x, y), large / 7
    pattern = {
        "disc": distance // step % 2,  # rings
        "star": np.zeros_like(x),  # plain
        "triangle": along // step % 2,  # stripes
        "square": (along // step + across // step) % 2,  # checks
    }[name]
    outline = Image.new("L", (large, large))
    corners = {"disc": 60, "square": 4, "triangle": 3, "star": 10}[name]
    radii = [radius * (0.42 if name == "star" and i % 2 else 1) for i in range(corners)]
    angles = [turn + 2 * math.pi * i / corners for i in range(corners)]
    points = [
        (large / 2 + r * math.cos(a), large / 2 + r * math.sin(a)) for r, a in zip(radii, angles, strict=True)
    ]
    ImageDraw.Draw(outline).polygon(points, fill=255)
    drawn = Image.fromarray(colours[pattern.astype(int)].astype(np.uint8))
    drawn.putalpha(outline)
    return drawn


def _codes(photos: bool, share: float, side: int, classes: int, seed: int, data: Path | None) -> Pasted:
    """QR codes against look-alikes; of three classes and more, each kind of look-alike is a class."""
    size = box_side(share, side)
    drawn = make_qr(DRAWN, 6 * DRAWN, 96, seed=seed, versions=(1, 2))
    kinds = drawn.kinds.tolist()
    wanted: Sequence[int] = range(len(kinds))
    labels = drawn.labels.tolist()
    if classes > 2:
        wanted = [i for i, kind in enumerate(kinds) if kind in QR_CLASSES[:classes]]
        labels = [QR_CLASSES.index(kind) if kind in QR_CLASSES else -1 for kind in kinds]
    plates = [Image.fromarray(drawn.pictures[i][drawn.spots[i].plate]) for i in wanted]
    chosen = torch.tensor([labels[i] for i in wanted])
    behind = _backgrounds(data, side, seed, photos)
    objects = _opaque(_stacked(plates, size))
    return Pasted(side, share, objects, chosen, _three_splits(len(chosen), seed), *behind, flip=False)


def _cifar(share: float, side: int, classes: int, seed: int, data: Path | None) -> Pasted:
    assert data is not None
    images, numbers, held_out = read_cifar(data)
    chosen = np.isin(numbers, CIFAR_CLASSES[classes])
    images, numbers, held_out = images[chosen], numbers[chosen], held_out[chosen]
    labels = torch.from_numpy(np.searchsorted(CIFAR_CLASSES[classes], numbers))
    check = np.random.default_rng((seed, 1)).random(len(numbers)) < 0.2
    splits = torch.from_numpy(np.where(held_out, HELD_OUT, np.where(check, CHECK, TRAIN)))
    objects = _opaque(_stacked([Image.fromarray(image) for image in images], box_side(share, side)))
    return Pasted(side, share, objects, labels, splits, *_photo_backgrounds(data, side, seed))


def _xrays(share: float, side: int, classes: int, seed: int, data: Path | None) -> Pasted:
    assert data is not None
    images, numbers, held_out = read_xrays(data)
    check = np.random.default_rng((seed, 1)).random(len(numbers)) < 0.2
    splits = torch.from_numpy(np.where(held_out, HELD_OUT, np.where(check, CHECK, TRAIN)))
    left, top, right, bottom = (round(edge * images[0].width) for edge in LUNG_FIELDS)
    fields = [image.crop((left, top, right, bottom)) for image in images]
    objects = _opaque(_stacked(fields, box_side(share, side)))
    behind = _stacked([image.filter(BLUR) for image in images], background_side(side))
    return Pasted(side, share, objects, torch.from_numpy(numbers), splits, behind, splits)


def _photographs(share: float, side: int, classes: int, seed: int, data: Path | None) -> Pasted:
    assert data is not None
    photographs = read_photographs(data)
    splits = _three_splits(len(photographs), seed)
    single = [i for i, photo in enumerate(photographs) if len(photo.boxes) == 1 and not photo.landscape]
    objects = [photographs[i].image.crop(photographs[i].boxes[0]) for i in single]
    labels = torch.tensor([photographs[i].animal for i in single])
    pasted = _opaque(_stacked(objects, box_side(share, side)))
    wide = [i for i, photo in enumerate(photographs) if photo.landscape]
    landscapes = _stacked([photographs[i].image for i in wide], background_side(side))
    drawn, drawn_splits = _drawn_backgrounds(side, seed)
    drawn, drawn_splits = drawn[: len(wide)], drawn_splits[: len(wide)]
    behind = torch.cat([landscapes, drawn]), torch.cat([splits[wide], drawn_splits])
    return Pasted(side, share, pasted, labels, splits[single], *behind)


def _scenes(share: float, side: int, classes: int, seed: int, data: Path | None) -> Windows:
    """Square windows of the photographs in which the box covers about the wanted share."""
    assert data is not None
    random = np.random.default_rng((seed, 3))
    photographs = read_photographs(data)
    splits = _three_splits(len(photographs), seed)
    images, regions, labels, groups = [], [], [], []
    for number, photo in enumerate(photographs):
        if len(photo.boxes) != 1 or photo.landscape:
            continue
        found = 0
        for _ in range(40):
            window = _try_window(photo, share, random)
            if window is None or found == WINDOWS:
                continue
            found += 1
            inside = Image.new("L", photo.image.size)
            inside.paste(255, photo.boxes[0])
            images.append(photo.image.crop(window))
            region = inside.crop(window).resize((side, side), Image.Resampling.NEAREST)
            regions.append(np.asarray(region) > 0)
            labels.append(photo.animal)
            groups.append(number)
    pixels, masks = _stacked(images, side), torch.from_numpy(np.stack(regions))
    return Windows(side, share, pixels, masks, torch.tensor(labels), splits[groups])


def _try_window(
    photo: Photograph, share: float, random: np.random.Generator
) -> tuple[int, int, int, int] | None:
    """A random square in which the box covers about this share; None if this draw does not."""
    x0, y0, x1, y1 = photo.boxes[0]
    width, height = photo.image.size
    length = math.sqrt((x1 - x0) * (y1 - y0) / share) * random.uniform(0.9, 1.1)
    length = int(min(length, width, height))
    left, top = (int(random.integers(0, extent - length + 1)) for extent in (width, height))
    across = min(x1, left + length) - max(x0, left)
    down = min(y1, top + length) - max(y0, top)
    covered = max(0, across) * max(0, down) / length**2
    whole = max(0, across) * max(0, down) >= 0.8 * (x1 - x0) * (y1 - y0)
    fits = share / TOLERANCE <= covered <= share * TOLERANCE
    return (left, top, left + length, top + length) if whole and fits else None


class Photograph(NamedTuple):
    """An ImageNet photograph."""

    image: Image.Image
    boxes: tuple[tuple[int, int, int, int], ...]  # left, top, right, bottom, the last two outside
    animal: int
    landscape: bool


@lru_cache(maxsize=1)
def read_photographs(data: Path) -> list[Photograph]:
    """The photographs in the order of their names, with boxes in the pixels of the stored files."""
    rows: dict[str, list[dict[str, str]]] = {}
    with (data / "imagenet" / "boxes.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            rows.setdefault(row["file"], []).append(row)
    photographs = []
    for name, listed in sorted(rows.items()):
        image = Image.open(data / "imagenet" / "images" / name).convert("RGB")
        scale = image.width / float(listed[0]["width"])  # prepared files are smaller
        boxes = tuple(_scaled_box(row, scale, image.size) for row in listed)
        number = int(listed[0]["class_index"])
        photographs.append(Photograph(image, boxes, int(number < ANIMALS), number in LANDSCAPES))
    return photographs


def _scaled_box(row: dict[str, str], scale: float, size: tuple[int, int]) -> tuple[int, int, int, int]:
    left, top = (math.floor(float(row[key]) * scale) for key in ("x0", "y0"))
    right, bottom = (math.ceil((float(row[key]) + 1) * scale) for key in ("x1", "y1"))
    return max(left, 0), max(top, 0), min(right, size[0]), min(bottom, size[1])


@lru_cache(maxsize=1)
def read_cifar(data: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images "n 32 32 3", class numbers, and which are of the test set: the first ones of each class."""
    stored = np.load(data / "cifar10" / "cifar10.npz")
    images, labels, held_out = [], [], []
    for split, count in (("train", 500), ("test", 100)):
        numbers = stored[f"{split}_labels"].astype(np.int64)
        each = [np.flatnonzero(numbers == number)[:count] for number in CIFAR_CLASSES[max(CIFAR_CLASSES)]]
        chosen = np.concatenate(each)
        images.append(stored[f"{split}_images"][chosen])
        labels.append(numbers[chosen])
        held_out.append(np.full(len(chosen), split == "test"))
    return np.concatenate(images), np.concatenate(labels), np.concatenate(held_out)


def xray_files(data: Path, train: int = 200, test: int = 100) -> list[tuple[Path, int, bool]]:
    """Files, labels, and whether they are of the test set: the same number of each class."""
    files = []
    for label, name in enumerate(XRAY_CLASSES):
        for split, count in (("train", train), ("test", test)):
            listed = sorted((data / "chestxray" / split / name).glob("*.jp*g"))
            step = max(1, len(listed) // max(1, count))
            files += [(path, label, split == "test") for path in listed[::step][:count]]
    return files


@lru_cache(maxsize=1)
def read_xrays(data: Path) -> tuple[list[Image.Image], np.ndarray, np.ndarray]:
    """X-rays, labels, and which are of the test set."""
    files = xray_files(data)
    images = [Image.open(path).convert("RGB") for path, _, _ in files]
    labels, held_out = (np.array(column) for column in list(zip(*files, strict=True))[1:])
    return images, labels.astype(np.int64), held_out


def _of_both_backgrounds(make: Callable[..., Pasted], name: str) -> dict[str, Callable[..., Source]]:
    return {
        f"{name}{'-photos' * photos}": lambda *arguments, photos=photos: make(photos, *arguments)
        for photos in (False, True)
    }


SOURCES: dict[str, Callable[[float, int, int, int, Path | None], Source]] = {
    **_of_both_backgrounds(_shapes, "shapes"),
    **_of_both_backgrounds(_codes, "qr"),
    "cifar": _cifar, "xrays": _xrays, "photographs": _photographs, "scenes": _scenes,
}  # fmt: skip
NEEDS_DATA = tuple(name for name in SOURCES if name not in ("shapes", "qr"))
