"""Images of printed codes with exact masks of their parts, of hard negatives, scenes and edited codes.

A positive is a real code (symbols.py), drawn with whole pixels per module and a quiet zone on a plate
somewhere in the image; because the geometry is known, the masks are exact. A negative has the same kind of
background, plate, size, colours and blackness, not the patterns:

    checkerboard, clutter, barcode, stripes    other things made of dark and light cells
    finderless   a real code whose finder (and a module around it) is random; of a linear code, whole columns
    shuffled     a real code cut into blocks of 1, 2, 4 or 7 modules in random order; of large blocks, whole
                 finders may remain at wrong places

Protocol: chakraborty2025cambench; varied backgrounds and a margin around the plate are there so that maps
have an outside to leak into. Where photographs are given, half of the backgrounds are random pieces of them,
at least half as wide or high as the whole. Image i follows from the seed and i alone. `write_codes` writes
files and a manifest that the csv source reads:

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
from numpy.lib.stride_tricks import sliding_window_view
from PIL import Image
from scipy.ndimage import find_objects, label

from heatproof.errors import InputError, did_you_mean
from heatproof.images.file_sources import CORNERS, MASK, walk
from heatproof.images.files import is_picture, open_image
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
PHOTO_SHARE = 0.5
SHUFFLED_BLOCKS = (1, 2, 4, 7)


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
    *,
    symbol: str = "qr",
    versions: Sequence[int] | None = None,
    photos: str | Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> QRSet:
    """Make images of QR codes, or of another symbol, then images without one, whose kinds alternate.

    Args:
        n_positive, n_negative: number of images with a code, and without.
        size: side of an image in pixels, or height and width.
        seed: of all random numbers.
        symbol: the kind of code.
        versions: those to draw from; default: the symbol's usual ones as far as they fit.
        photos: a folder of photographs for half of the backgrounds.
        progress: called with the number of images made since the last call.

    Example:
        >>> make_qr(1, 2, 64).kinds.tolist()
        ['qr', 'checkerboard', 'clutter']
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
        older = "or overwrite its set" if (out / MANIFEST).is_file() else "it holds other files"
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


def flat(rows: np.ndarray, columns: np.ndarray, random: Random) -> np.ndarray:
    return np.zeros(rows.shape)


def gradient(rows: np.ndarray, columns: np.ndarray, random: Random) -> np.ndarray:
    angle = random.uniform(0, 2 * np.pi)
    return np.asarray(0.5 + (rows - 0.5) * np.sin(angle) + (columns - 0.5) * np.cos(angle))


def clouds(rows: np.ndarray, columns: np.ndarray, random: Random) -> np.ndarray:
    """A 5 x 5 grid of random values, linear in between along each axis."""
    values = random.random((5, 5))
    knots = np.arange(5)
    across, down = (np.linspace(0, 4, side) for side in rows.shape[::-1])
    wide = np.stack([np.interp(across, knots, line) for line in values])
    return np.stack([np.interp(down, knots, line) for line in wide.T], axis=1)


def grain(rows: np.ndarray, columns: np.ndarray, random: Random) -> np.ndarray:
    return random.random(rows.shape)


def blocks(rows: np.ndarray, columns: np.ndarray, random: Random) -> np.ndarray:
    cells = int(random.integers(4, 12))
    levels = random.random((cells + 1, cells + 1))
    return np.asarray(levels[(rows * cells).astype(int), (columns * cells).astype(int)])


def bars(rows: np.ndarray, columns: np.ndarray, random: Random) -> np.ndarray:
    angle, count = random.uniform(0, np.pi), random.uniform(4, 20)
    return np.asarray(np.floor((rows * np.sin(angle) + columns * np.cos(angle)) * count) % 2)


BACKGROUNDS: dict[str, Callable[[np.ndarray, np.ndarray, Random], np.ndarray]] = {
    kind.__name__: kind for kind in (flat, gradient, clouds, grain, blocks, bars)
}


def background(height: int, width: int, random: Random, photos: Sequence[Path] = ()) -> np.ndarray:
    """Array "H W 3" in [0, 255]: a blend of two random colours, or a photograph."""
    if photos and random.random() < PHOTO_SHARE:
        return photograph(photos[int(random.integers(len(photos)))], height, width, random)
    kind = list(BACKGROUNDS.values())[int(random.integers(len(BACKGROUNDS)))]
    rows, columns = np.indices((height, width)) / max(height, width)
    blend = np.clip(kind(rows, columns, random), 0, 1)[..., None]
    first, second = random.uniform(0, 255, (2, 3))
    return np.asarray(first + blend * (second - first))


def photograph(photo: Path, height: int, width: int, random: Random) -> np.ndarray:
    """A random piece, resized to "H W 3" float."""
    image = open_image(photo).convert("RGB")
    scale = min(image.width / width, image.height / height) * random.uniform(0.5, 1)
    left = random.uniform(0, image.width - scale * width)
    top = random.uniform(0, image.height - scale * height)
    frame = (left, top, left + scale * width, top + scale * height)
    return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR, box=frame), dtype=float)


def find_photos(photos: str | Path | None) -> list[Path]:
    """The images of a folder, in the order of their paths."""
    if photos is None:
        return []
    root = Path(photos)
    if not root.is_dir():
        raise InputError(f"there is no folder {root} of photographs")
    files = sorted(file for file in walk(root) if is_picture(file))
    if not files:
        raise InputError(f"there is no image in {root}; name a folder of photographs")
    return files


def checkerboard(random: Random, symbol: Symbol, version: int) -> Modules:
    cell = int(random.integers(1, 5))
    return np.asarray((np.indices(symbol.shape(version)) // cell).sum(0) % 2 == 0)


def clutter(random: Random, symbol: Symbol, version: int) -> Modules:
    """Rectangles over rectangles, dark and light in turn."""
    tall, wide = symbol.shape(version)
    modules = np.zeros((tall, wide), bool)
    for i in range(int(random.integers(15, 40))):
        top, left = random.integers(0, tall - 1), random.integers(0, wide - 1)
        rows, columns = random.integers(1, max(2, tall // 3)), random.integers(1, max(2, wide // 3))
        modules[top : top + rows, left : left + columns] = i % 2 == 0
    return modules


def barcode(random: Random, symbol: Symbol, version: int) -> Modules:
    """Bars one to four modules wide, as linear barcodes have them, upright or lying."""
    shape, upright = symbol.shape(version), random.random() < 0.5
    n = shape[upright]
    edges = np.cumsum(random.integers(1, 5, n))
    bars = np.searchsorted(edges, np.arange(n), side="right") % 2 == 0
    return np.broadcast_to(bars if upright else bars[:, None], shape).copy()


def stripes(random: Random, symbol: Symbol, version: int) -> Modules:
    """Stripes of one width: upright, lying or diagonal."""
    rows, columns = np.indices(symbol.shape(version))
    across = (rows, columns, rows + columns, rows - columns)[int(random.integers(4))]
    return np.asarray(across // int(random.integers(1, 5)) % 2 == 0)


def finderless(random: Random, symbol: Symbol, version: int) -> Modules:
    code = symbol.random(random, version)
    # One module more on every side: a QR code's separators outline the finder as clearly as its own ring.
    around = sliding_window_view(np.pad(code.parts["finder"], 1), (3, 3)).any((2, 3))
    tall, wide = code.modules.shape
    return np.where(around, random.random((1 if symbol.linear else tall, wide)) < 0.5, code.modules)


def shuffled(random: Random, symbol: Symbol, version: int) -> Modules:
    modules = symbol.random(random, version).modules.copy()
    block = int(random.choice(SHUFFLED_BLOCKS))
    high = len(modules) if symbol.linear else block
    down, across = modules.shape[0] // high, modules.shape[1] // block
    whole = modules[: down * high, : across * block]  # what is left over at two edges stays
    blocks = whole.reshape(down, high, across, block).swapaxes(1, 2).reshape(-1, high, block)
    mixed = random.permutation(blocks, axis=0)
    whole[:] = mixed.reshape(down, across, high, block).swapaxes(1, 2).reshape(whole.shape)
    return modules


NEGATIVES: dict[str, Callable[[Random, Symbol, int], Modules]] = {
    kind.__name__: kind for kind in (checkerboard, clutter, barcode, stripes, finderless, shuffled)
}


def negatives_of(symbol: Symbol) -> list[str]:
    """Kinds of negatives for a symbol: bars are too much like a barcode to be a negative of it."""
    return [kind for kind in NEGATIVES if kind != symbol.name]
