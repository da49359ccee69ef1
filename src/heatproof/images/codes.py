"""Images of printed codes with exact masks of their parts, of hard negatives, scenes and edited codes.

A positive is a real code (symbols.py), drawn with whole pixels per module and a quiet zone on a plate
somewhere in the image; because the geometry is known, the masks are exact. A negative has the same kind of
background, plate and colours (patterns.py). Protocol: chakraborty2025cambench; varied backgrounds and a
margin around the plate are there so that maps have an outside to leak into. Image i follows from the seed and
i alone. `write_codes` writes files and a manifest that the csv source reads:

    OUT/manifest.csv             path, label (1: a code), kind, the box's corners, a mask_ column per part,
                                 and what was drawn: version, level, text, and, before a distortion, scale,
                                 quiet, top, left
    OUT/pictures/00000-qr.png
    OUT/masks/00000-finder.png   255 inside; codes only
"""

from __future__ import annotations

import csv
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from scipy.ndimage import find_objects, label

from heatproof.errors import InputError, did_you_mean
from heatproof.images.file_sources import CORNERS, MASK
from heatproof.images.patterns import NEGATIVES, background, find_photos, negatives_of
from heatproof.images.symbols import PARTS, Code, Modules, Random, Symbol, find_symbol

MARGIN = 0.06  # of each side, free around the quiet zone
LARGEST_SIDE = 8192
MANIFEST = "manifest.csv"
PLACE = ("scale", "quiet", "top", "left")
DRAWN = ("version", "level", "text")
COLUMNS = ("path", "label", "kind", *CORNERS, *(MASK + part for part in PARTS), *DRAWN, *PLACE)
EDITS = (
    "remove",  # a finder's pixels take the plate's light colour
    "move",  # and it is printed again in the background; codes without room for it are left out
    "swap",  # it changes places with the data at the corner that has no finder
)


class Spot(NamedTuple):
    """Position of a code: its first pixel, pixels per module, modules of quiet zone."""

    top: int
    left: int
    scale: int
    quiet: int
    shape: tuple[int, int]  # rows and columns of modules
    code: Code | None = None  # None for a negative

    @property
    def rows(self) -> slice:
        return slice(self.top, self.top + self.shape[0] * self.scale)

    @property
    def columns(self) -> slice:
        return slice(self.left, self.left + self.shape[1] * self.scale)

    @property
    def plate(self) -> tuple[slice, slice]:
        """Rows and columns with the quiet zone."""
        zone = self.quiet * self.scale
        rows, columns = self.rows, self.columns
        return slice(rows.start - zone, rows.stop + zone), slice(columns.start - zone, columns.stop + zone)


class QRSet(NamedTuple):
    """Images, labels (1: a code), masks of the code's parts (empty for negatives), and what was drawn."""

    pictures: np.ndarray  # "n H W 3", uint8
    labels: np.ndarray  # "n", int64
    masks: dict[str, np.ndarray]  # finder, timing, box: each "n H W", bool
    kinds: np.ndarray  # "n", str: the symbol's name, or the kind of negative
    spots: np.ndarray  # "n", Spot: where and what

    def take(self, which: slice | np.ndarray) -> QRSet:
        """Select some of the images, with their labels and masks."""
        masks = {part: mask[which] for part, mask in self.masks.items()}
        return QRSet(self.pictures[which], self.labels[which], masks, self.kinds[which], self.spots[which])


def make_qr(
    n_positive: int = 600,
    n_negative: int = 600,
    size: int | tuple[int, int] = 224,
    seed: int = 0,
    **options: Any,
) -> QRSet:
    """Make images of QR codes, then images without one, whose kinds alternate.

    Args:
        n_positive, n_negative: number of images with a code, and without.
        size: side of an image in pixels, or height and width.
        seed: of all random numbers.
        options: those of `make_codes`.

    Example:
        >>> make_qr(1, 2, 64).kinds.tolist()
        ['qr', 'checkerboard', 'clutter']
    """
    return make_codes("qr", n_positive, n_negative, size, seed, **options)


def make_codes(
    symbol: str = "qr",
    n_positive: int = 600,
    n_negative: int = 600,
    size: int | tuple[int, int] = 224,
    seed: int = 0,
    *,
    versions: Sequence[int] | None = None,
    photos: str | Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> QRSet:
    """Make images with codes first, then negatives, whose kinds alternate.

    size: the side, or height and width. versions: those to draw from; else the symbol's usual ones as far as
    they fit. photos: a folder of photographs for half of the backgrounds. progress: called with
    the number of images made since the last call.
    """
    kind = find_symbol(symbol)
    frame = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
    if n_positive < 0 or n_negative < 0:
        raise InputError(f"cannot make {n_positive} positives and {n_negative} negatives; use 0 or more")
    if seed < 0:
        raise InputError(f"the seed is a number from 0 on; got {seed}")
    fitting, behind = versions_that_fit(kind, versions, frame), find_photos(photos)
    count = n_positive + n_negative
    images = np.empty((count, *frame, 3), np.uint8)
    labels = np.repeat(np.array([1, 0]), [n_positive, n_negative])
    masks = {part: np.zeros((count, *frame), bool) for part in PARTS}
    wrong = negatives_of(kind)
    names = [symbol] * n_positive + [wrong[i % len(wrong)] for i in range(n_negative)]
    spots = np.empty(count, object)
    for i, positive in enumerate(labels):
        random = np.random.default_rng((seed, int(positive), i if positive else i - n_positive))
        modules, spot, inks = draw(random, kind, fitting, None if positive else names[i], frame)
        code, image = spot.code, background(*frame, random, behind)
        stamp(image, modules, spot, inks)
        images[i] = image.round().astype(np.uint8)
        for part, mask in code.parts.items() if code else ():
            masks[part][i, spot.rows, spot.columns] = enlarge(mask, spot.scale)
        spots[i] = spot
        if progress:
            progress(1)
    return QRSet(images, labels, masks, np.array(names, dtype="<U16"), spots)


Inks = tuple[np.ndarray, np.ndarray]  # dark, light


def draw(
    random: Random, kind: Symbol, versions: Sequence[int], negative: str | None, frame: tuple[int, int]
) -> tuple[Modules, Spot, Inks]:
    """A random code or negative, a place in the frame with whole pixels per module, and two colours."""
    version = versions[int(random.integers(len(versions)))]
    code = None if negative else kind.random(random, version)
    modules = code.modules if code else NEGATIVES[str(negative)](random, kind, version)
    quiet = int(random.choice([q for q in kind.quiet_zones if largest_scale(modules.shape, q, frame)]))
    largest = largest_scale(modules.shape, quiet, frame)
    scale = int(random.integers((largest + 1) // 2, largest + 1))
    plate = [(side + 2 * quiet) * scale for side in modules.shape]
    top, left = (
        (side - free(side)) // 2 + int(random.integers(free(side) - long + 1))
        for side, long in zip(frame, plate, strict=True)
    )
    spot = Spot(top + quiet * scale, left + quiet * scale, scale, quiet, modules.shape[:2], code)
    return modules, spot, (random.uniform(0, 70, 3), random.uniform(185, 255, 3))


def stamp(image: np.ndarray, modules: Modules, spot: Spot, inks: Inks) -> None:
    """Print the modules on their plate."""
    dark, light = inks
    image[spot.plate] = light
    image[spot.rows, spot.columns][enlarge(modules, spot.scale)] = dark


def enlarge(modules: Modules, scale: int) -> np.ndarray:
    """Every module as scale x scale pixels."""
    return modules.repeat(scale, 0).repeat(scale, 1)


def free(side: int) -> int:
    """Pixels along a side without the margins."""
    return side - 2 * math.ceil(side * MARGIN)


def largest_scale(shape: Sequence[int], quiet: int, frame: tuple[int, int]) -> int:
    """Largest number of pixels per module that leaves the margins free; 0 if the code does not fit."""
    return min(free(long) // (side + 2 * quiet) for side, long in zip(shape, frame, strict=True))


def versions_that_fit(
    symbol: Symbol, versions: Sequence[int] | None, frame: tuple[int, int]
) -> tuple[int, ...]:
    """The versions given, all of which must fit, or those of the usual ones that do."""
    chosen = symbol.check_versions(versions)
    height, width = frame
    if not (min(frame) > 0 and max(frame) <= LARGEST_SIDE):
        raise InputError(f"an image's sides are 1 to {LARGEST_SIDE} pixels; got {height}x{width}")
    quiet = min(symbol.quiet_zones)
    fitting = tuple(v for v in chosen if largest_scale(symbol.shape(v), quiet, frame))
    if not fitting or (versions is not None and fitting != chosen):
        wanted = min(chosen) if versions is None else max(set(chosen) - set(fitting))
        least = max(symbol.shape(wanted)) + 2 * quiet
        side = next(s for s in range(least, 3 * least + 9) if free(s) >= least)
        raise InputError(
            f"version {wanted} of the {symbol.title} does not fit into {height}x{width} pixels; "
            f"make them at least {side}x{side}"
        )
    return fitting


def check_folder(out: Path, overwrite: bool = False) -> None:
    """Raise InputError if a folder is not empty, unless it holds an older set that may be replaced."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; name a folder")
    if out.exists() and any(out.iterdir()) and not (overwrite and (out / MANIFEST).is_file()):
        older = "ask to overwrite it" if (out / MANIFEST).is_file() else "it holds other files"
        raise InputError(f"the folder {out} is not empty; name another ({older})")


def write_codes(
    data: QRSet, out: Path, progress: Callable[[int], None] | None = None, overwrite: bool = False
) -> Path:
    """Write images, masks and the manifest, which is returned; an older set is replaced only on request."""
    check_folder(out, overwrite)

    def write(i: int) -> dict[str, Any]:
        """The files of one image; returns its row of the manifest."""
        kind, spot = str(data.kinds[i]), data.spots[i]
        path = f"pictures/{i:05d}-{kind}.png"
        Image.fromarray(data.pictures[i]).save(out / path)
        row: dict[str, Any] = {"path": path, "label": int(data.labels[i]), "kind": kind}
        row |= {name: getattr(spot, name) for name in PLACE}
        if data.labels[i]:
            rows, columns = (np.flatnonzero(data.masks["box"][i].any(axis)) for axis in (1, 0))
            row |= dict(zip(CORNERS, (columns[0], rows[0], columns[-1], rows[-1]), strict=True))
            row |= {name: getattr(spot.code, name) for name in DRAWN}
            for part in PARTS:
                row[MASK + part] = f"masks/{i:05d}-{part}.png"
                Image.fromarray(data.masks[part][i]).convert("L").save(out / row[MASK + part])
        return row

    try:
        for folder in ("pictures", "masks"):
            shutil.rmtree(out / folder, ignore_errors=True)
            (out / folder).mkdir(parents=True)
        manifest = (out / MANIFEST).open("w", newline="", encoding="utf-8")
        with ThreadPoolExecutor() as threads, manifest as file:
            rows = csv.DictWriter(file, COLUMNS)
            rows.writeheader()
            for row in threads.map(write, range(len(data.labels))):
                rows.writerow(row)
                if progress:
                    progress(1)
    except OSError as error:
        raise InputError(f"cannot write into {out}: {error.strerror or error}") from error
    return out / MANIFEST


class Scenes(NamedTuple):
    """Images and the masks of their objects, codes first."""

    pictures: np.ndarray  # "n H W 3", uint8
    codes: np.ndarray  # "n k H W", bool: the code itself, without its quiet zone
    distractors: np.ndarray  # "n d H W", bool
    kinds: tuple[tuple[str, ...], ...]  # of each scene's distractors


def make_scenes(
    count: int,
    size: int = 224,
    seed: int = 0,
    *,
    symbol: str = "qr",
    codes: int = 2,
    distractors: int = 1,
    photos: str | Path | None = None,
) -> Scenes:
    """Make images with several codes and distractors, each in a cell of its own.

    Args:
        count, size, seed: number of images, their side in pixels, and the seed of all random numbers.
        symbol: the kind of code.
        codes, distractors: number per image.
        photos: a folder of photographs for half of the backgrounds.

    Example:
        >>> scenes = make_scenes(1, 128)
        >>> scenes.codes.shape, scenes.distractors.shape
        ((1, 2, 128, 128), (1, 1, 128, 128))
    """
    if count < 0 or codes < 1 or distractors < 0:
        raise InputError(f"a scene has 1 code or more; got {count} scenes of {codes} and {distractors}")
    kind, behind = find_symbol(symbol), find_photos(photos)
    across = math.ceil(math.sqrt(codes + distractors))
    cell = (size // across, size // across)
    fitting, wrong = versions_that_fit(kind, None, cell), negatives_of(kind)
    images = np.empty((count, size, size, 3), np.uint8)
    masks = np.zeros((count, codes + distractors, size, size), bool)
    names = []
    for i in range(count):
        random = np.random.default_rng((seed, 7, i))
        image = background(size, size, random, behind)
        cells = random.permutation(across * across)[: codes + distractors]
        names.append(tuple(str(random.choice(wrong)) for _ in range(distractors)))
        for k, place in enumerate(cells):
            negative = None if k < codes else names[i][k - codes]
            modules, spot, inks = draw(random, kind, fitting, negative, cell)
            row, column = divmod(int(place), across)
            spot = spot._replace(top=spot.top + row * cell[0], left=spot.left + column * cell[1])
            stamp(image, modules, spot, inks)
            masks[i, k, spot.rows, spot.columns] = True
        images[i] = image.round().astype(np.uint8)
    return Scenes(images, masks[:, :codes], masks[:, codes:], tuple(names))


Block = tuple[slice, slice]


class Edited(NamedTuple):
    """Images after an edit. Rows of codes that could not be edited are False in `done`."""

    pictures: np.ndarray  # "n H W 3", uint8
    before: np.ndarray  # "n H W", bool: where the finder was
    after: np.ndarray  # "n H W", bool: where it is now; nothing for remove
    done: np.ndarray  # "n", bool


def edit_finders(codes: QRSet, kind: str, seed: int = 0) -> Edited:
    """Edit a random finder of each code that has three (QR codes that are not distorted)."""
    if kind not in EDITS:
        raise InputError(f"there is no edit {kind!r}; {did_you_mean(kind, EDITS)}")
    images = codes.pictures.copy()
    before, after = np.zeros((2, *images.shape[:3]), bool)
    done = np.zeros(len(images), bool)
    for i, (image, spot) in enumerate(zip(images, codes.spots, strict=True)):
        random = np.random.default_rng((seed, 11, i))
        finders = find_objects(label(codes.masks["finder"][i])[0])
        if len(finders) != 3:
            continue
        finder, target = finders[int(random.integers(3))], None
        if kind != "remove":
            targets = list(_targets(kind, finder, finders, spot, image.shape[:2]))
            if not targets:
                continue
            target = targets[int(random.integers(len(targets))) if kind == "move" else 0]
        pattern, light = image[finder].copy(), image[spot.plate][0, 0].copy()
        image[finder] = image[target].copy() if kind == "swap" and target else light
        before[i][finder] = done[i] = True
        if target is not None:
            image[target] = pattern
            after[i][target] = True
    return Edited(images, before, after, done)


def _targets(
    kind: str, finder: Block, finders: list[Block], spot: Spot, frame: tuple[int, ...]
) -> Iterator[Block]:
    """Where a finder can go: corners of the code without a finder, or anywhere off the plate."""
    height, width = (side.stop - side.start for side in finder)
    tops: Sequence[int] = range(frame[0] - height + 1)
    lefts: Sequence[int] = range(frame[1] - width + 1)
    taken = [spot.plate]
    if kind == "swap":
        (top, bottom), (left, right) = ((of.start, of.stop) for of in (spot.rows, spot.columns))
        tops, lefts, taken = (top, bottom - height), (left, right - width), finders
    for top, left in product(tops, lefts):
        block = slice(top, top + height), slice(left, left + width)
        overlaps = (
            [a.start < b.stop and b.start < a.stop for a, b in zip(block, of, strict=True)] for of in taken
        )
        if not any(map(all, overlaps)):
            yield block
