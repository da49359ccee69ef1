"""Pictures of printed codes with exact masks of their parts, and of hard negatives.

A positive is a real code (symbols/ has a file for each kind), drawn with whole pixels per module and a
quiet zone on a plate somewhere in the picture. Because the geometry is known, the masks are exact. A
negative has the same kind of background, plate and colours (negatives.py, backgrounds.py). Protocol:
chakraborty2025cambench; varied grounds and a margin around the plate are there so that maps have an outside
to leak into.

Picture i follows from the seed and i alone: asking for more pictures does not change the first ones.

`write_codes` makes files of them, with a manifest that the csv source reads (csv.py):

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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from heatproof.errors import InputError
from heatproof.images.backgrounds import Photos, background, find_photos
from heatproof.images.csv import CORNERS, MASK
from heatproof.images.negatives import NEGATIVES, negatives_of
from heatproof.images.symbols import PARTS, Code, Modules, Random, Symbol, find_symbol

MARGIN = 0.06  # of each side, kept free around the quiet zone, so that there is an outside to leak into
LARGEST_SIDE = 8192
MANIFEST = "manifest.csv"
PLACE = ("scale", "quiet", "top", "left")
DRAWN = ("version", "level", "text")
COLUMNS = ("path", "label", "kind", *CORNERS, *(MASK + part for part in PARTS), *DRAWN, *PLACE)


class Spot(NamedTuple):
    """Where modules lie: the first one's first pixel, pixels per module, modules of quiet zone."""

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
    """Pictures, labels (1: a code), masks of the code's parts (empty for negatives), and what was drawn."""

    pictures: np.ndarray  # "n H W 3", uint8
    labels: np.ndarray  # "n", int64
    masks: dict[str, np.ndarray]  # finder, timing, box: each "n H W", bool
    kinds: np.ndarray  # "n", str: the symbol's name, or the kind of negative
    spots: np.ndarray  # "n", Spot: where and what

    def take(self, which: slice | np.ndarray) -> QRSet:
        """Some of the pictures, with what belongs to them."""
        masks = {part: mask[which] for part, mask in self.masks.items()}
        return QRSet(self.pictures[which], self.labels[which], masks, self.kinds[which], self.spots[which])


def make_qr(
    n_positive: int = 600,
    n_negative: int = 600,
    size: int | tuple[int, int] = 224,
    seed: int = 0,
    **options: Any,
) -> QRSet:
    """QR codes first, then negatives, kinds in turn; options are those of `make_codes`.

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
    photos: str | Path | Sequence[Any] | None = None,
    progress: Callable[[int], None] | None = None,
) -> QRSet:
    """Positives first, then negatives, kinds in turn.

    size: the side, or height and width. versions: those to draw from; else the symbol's usual ones as far as
    they fit. photos: a folder, or arrays "H W 3" uint8, for half of the backgrounds. progress: called with
    the number of pictures made since the last call.
    """
    kind = find_symbol(symbol)
    frame = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
    if n_positive < 0 or n_negative < 0:
        raise InputError(f"cannot make {n_positive} positives and {n_negative} negatives; ask for 0 or more")
    if seed < 0:
        raise InputError(f"the seed is a number from 0 on; got {seed}")
    fitting = versions_that_fit(kind, versions, frame)
    behind = find_photos(photos)
    count = n_positive + n_negative
    pictures = np.empty((count, *frame, 3), np.uint8)
    labels = np.repeat(np.array([1, 0]), [n_positive, n_negative])
    masks = {part: np.zeros((count, *frame), bool) for part in PARTS}
    wrong = negatives_of(kind)
    names = [symbol] * n_positive + [wrong[i % len(wrong)] for i in range(n_negative)]
    spots = np.empty(count, object)
    for i, label in enumerate(labels):
        random = np.random.default_rng((seed, int(label), i if label else i - n_positive))
        version = fitting[int(random.integers(len(fitting)))]
        code = kind.random(random, version) if label else None
        modules = code.modules if code else NEGATIVES[names[i]](random, kind, version)
        pictures[i], spot = draw(modules, frame, random, kind.quiet_zones, behind)
        if code:
            for part, mask in code.parts.items():
                masks[part][i, spot.rows, spot.columns] = enlarge(mask, spot.scale)
        spots[i] = spot._replace(code=code)
        if progress:
            progress(1)
    return QRSet(pictures, labels, masks, np.array(names, dtype="<U16"), spots)


def draw(
    modules: Modules, frame: tuple[int, int], random: Random, quiet_zones: Sequence[int], photos: Photos = ()
) -> tuple[np.ndarray, Spot]:
    """Modules with a quiet zone on a background: "H W 3" uint8, and where they are."""
    spot, inks = find_spot(modules, frame, random, quiet_zones)
    picture = background(*frame, random, photos)
    stamp(picture, modules, spot, inks)
    return picture.round().astype(np.uint8), spot


Inks = tuple[np.ndarray, np.ndarray]  # dark, light


def find_spot(
    modules: Modules, frame: tuple[int, int], random: Random, quiet_zones: Sequence[int]
) -> tuple[Spot, Inks]:
    """A place in the frame, whole pixels per module, and two colours, all by chance."""
    quiet = int(random.choice([q for q in quiet_zones if largest_scale(modules.shape, q, frame)]))
    largest = largest_scale(modules.shape, quiet, frame)
    scale = int(random.integers((largest + 1) // 2, largest + 1))
    plate = [(side + 2 * quiet) * scale for side in modules.shape]
    top, left = (
        (side - room(side)) // 2 + int(random.integers(room(side) - long + 1))
        for side, long in zip(frame, plate, strict=True)
    )
    rows, columns = modules.shape
    spot = Spot(top + quiet * scale, left + quiet * scale, scale, quiet, (rows, columns))
    return spot, (random.uniform(0, 70, 3), random.uniform(185, 255, 3))


def stamp(picture: np.ndarray, modules: Modules, spot: Spot, inks: Inks) -> None:
    """Print the modules on their plate."""
    dark, light = inks
    picture[spot.plate] = light
    picture[spot.rows, spot.columns][enlarge(modules, spot.scale)] = dark


def enlarge(modules: Modules, scale: int) -> np.ndarray:
    """Every module as scale x scale pixels."""
    return modules.repeat(scale, 0).repeat(scale, 1)


def room(side: int) -> int:
    """Pixels along a side without the margins."""
    return side - 2 * math.ceil(side * MARGIN)


def largest_scale(shape: Sequence[int], quiet: int, frame: tuple[int, int]) -> int:
    """Pixels per module that leave the margins free; 0 where not even one does."""
    return min(room(long) // (side + 2 * quiet) for side, long in zip(shape, frame, strict=True))


def versions_that_fit(
    symbol: Symbol, versions: Sequence[int] | None, frame: tuple[int, int]
) -> tuple[int, ...]:
    """The versions asked for, all of which must fit, or those of the usual ones that do."""
    chosen = symbol.check_versions(versions)
    height, width = frame
    if not (0 < height <= LARGEST_SIDE and 0 < width <= LARGEST_SIDE):
        raise InputError(f"a picture's sides are 1 to {LARGEST_SIDE} pixels; got {height}x{width}")
    quiet = min(symbol.quiet_zones)
    fitting = tuple(v for v in chosen if largest_scale(symbol.shape(v), quiet, frame))
    if not fitting or (versions is not None and fitting != chosen):
        wanted = min(chosen) if versions is None else max(set(chosen) - set(fitting))
        least = max(symbol.shape(wanted)) + 2 * quiet
        side = next(s for s in range(least, 3 * least + 9) if room(s) >= least)
        raise InputError(
            f"version {wanted} of the {symbol.title} does not fit into {height}x{width} pixels; "
            f"make them at least {side}x{side}"
        )
    return fitting


def check_folder(out: Path, overwrite: bool = False) -> None:
    """The folder for new files: empty, or holding an older set that may be replaced."""
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; name a folder")
    if out.exists() and any(out.iterdir()) and not (overwrite and (out / MANIFEST).is_file()):
        older = "ask to overwrite it" if (out / MANIFEST).is_file() else "it holds other files"
        raise InputError(f"the folder {out} is not empty; name another ({older})")


def write_codes(
    data: QRSet, out: Path, progress: Callable[[int], None] | None = None, overwrite: bool = False
) -> Path:
    """Writes pictures, masks and the manifest, which is returned; replaces an older set only on request."""
    check_folder(out, overwrite)
    try:
        for folder in ("pictures", "masks"):
            shutil.rmtree(out / folder, ignore_errors=True)
            (out / folder).mkdir(parents=True)
        manifest = (out / MANIFEST).open("w", newline="", encoding="utf-8")
        with ThreadPoolExecutor() as threads, manifest as file:
            rows = csv.DictWriter(file, COLUMNS)
            rows.writeheader()
            for row in threads.map(lambda i: write_one(data, i, out), range(len(data.labels))):
                rows.writerow(row)
                if progress:
                    progress(1)
    except OSError as error:
        raise InputError(f"cannot write into {out}: {error.strerror or error}") from error
    return out / MANIFEST


def write_one(data: QRSet, i: int, out: Path) -> dict[str, Any]:
    """One picture's files; its row of the manifest."""
    kind, spot = str(data.kinds[i]), data.spots[i]
    path = f"pictures/{i:05d}-{kind}.png"
    Image.fromarray(data.pictures[i]).save(out / path)
    row: dict[str, Any] = {"path": path, "label": int(data.labels[i]), "kind": kind}
    row |= {name: getattr(spot, name) for name in PLACE}
    if data.labels[i]:
        row |= dict(zip(CORNERS, corners(data.masks["box"][i]), strict=True))
        row |= {name: getattr(spot.code, name) for name in DRAWN}
        for part in PARTS:
            row[MASK + part] = f"masks/{i:05d}-{part}.png"
            Image.fromarray(data.masks[part][i]).convert("L").save(out / row[MASK + part])
    return row


def corners(mask: np.ndarray) -> tuple[int, int, int, int]:
    """x0, y0, x1, y1 of a mask, all inside it."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return int(columns[0]), int(rows[0]), int(columns[-1]), int(rows[-1])
