"""Maps as half-precision shards at their own size, memory-mapped when read, and the images they explain.

    maps/METHOD/PART.npy          "b h w", of volumes "b d h w", float16
    maps/METHOD/PART.signed.npy   the same for methods that keep a signed map beside the unsigned one
    maps/PART.json.gz             what the part holds: method, checkpoint, ids, explained, scale, offset

Half precision keeps 11 bits, so each map is brought to one range first and back when read:

    stored = (map - offset) / scale * 32768,   scale = max |map - offset|,
    offset = the value nearest to zero where all values have one sign, else 0

The signs are preserved, the largest value too (to float32 rounding), and a normalised map is within 1e-3 of
the original, also where a small contrast is added to a large constant. Only maps of finished units are read.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from heatproof.disk import Content, valid_unicode
from heatproof.errors import InputError, StoreError, UnknownNameError
from heatproof.images.files import MAX_PIXELS
from heatproof.rows import Unit
from heatproof.show import Sheet
from heatproof.store.ledger import Ledger, Seal, check_file, check_types, damaged, hash_of, plain, slug

if TYPE_CHECKING:
    from torch import Tensor

    from heatproof.types import Maps

INDEX = tuple[str, list[str], list[list[str]]]  # types of a checkpoint's name, ids, and ids by method
MAX_INDEX_BYTES = 1 << 26  # of an unpacked index of maps: a million maps
TOP = 32768.0  # where the largest value goes: leaves the most room for small ones in half precision
UNREADABLE = (
    OSError, EOFError, zlib.error, ValueError, LookupError, AttributeError, TypeError, RecursionError,
)  # fmt: skip
SMALLEST = 2.0**-24  # the smallest half-precision number above zero
FEW_COLOURS = 256  # images with at most so many (codes, drawings) are stored as PNG, the others as JPEG
QUALITY = 90
MOST_BYTES, MOST_PIXELS = 1 << 26, 1 << 26
NO_PICTURE = (
    OSError, ValueError, SyntaxError, Image.DecompressionBombError, Image.DecompressionBombWarning,
)  # fmt: skip
PLANES = re.compile(r"planes (\d{1,6}(?: \d{1,6}){2})")


def pack(values: Tensor) -> tuple[np.ndarray, dict[str, list[float]]]:
    """Convert "b h w" to half precision with scale and offset; half the bytes are copied from a GPU."""
    stored, *numbers = halved(values)
    scale, offset = ([float(str(n)) for n in some.flatten().cpu().numpy()] for some in numbers)
    return stored.cpu().numpy(), {"scale": scale, "offset": offset}  # with the fewest digits


def unpack(stored: np.ndarray, scale: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Undo `pack`: "b h w", float32."""
    scale, offset = (numbers.reshape(-1, *[1] * (stored.ndim - 1)) for numbers in (scale, offset))
    return np.asarray(stored.astype(np.float32) / np.float32(TOP) * scale + offset)


def halved(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Tensor "b h w" in half precision, and the scale and offset of each, "b 1 1", where the maps are."""
    maps = values.detach().float()
    axes = tuple(range(1, maps.ndim))
    low, high = maps.amin(axes, keepdim=True), maps.amax(axes, keepdim=True)
    offset = low.where(low > 0, high.clamp(max=0))
    scale = (high - offset).maximum(offset - low)
    centred = maps - offset
    stored = (centred / scale.where(scale > 0, 1) * TOP).half()
    # A value too small for half precision must not lose its sign: normalising looks at it.
    vanished = (stored == 0) & (centred != 0)
    return stored.where(~vanished, centred.sign().half() * SMALLEST), scale, offset


def restored(stored: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """Undo `halved`: float32."""
    return stored.float().div_(TOP).mul_(scale).add_(offset)


def shard_files(root: Path, unit: Unit, maps: Mapping[str, Maps]) -> dict[Path, Content]:
    """The files of a unit's maps, and a function that writes each."""
    files: dict[Path, Content] = {}
    entries: list[dict[str, Any]] = []
    shared: dict[str, list[Any]] = {}  # ids and explained are mostly the same for all methods of a unit
    for method, given in maps.items():
        _check(method, given)
        if len(given) == 0:
            continue
        own = {"ids": [valid_unicode(i) for i in given.ids], "explained": given.explained.tolist()}
        shared = shared or own
        entry: dict[str, Any] = {"method": valid_unicode(method), "image_size": list(given.image_size)}
        entry |= {key: value for key, value in own.items() if value != shared[key]}
        for kind, values, suffix in (
            ("values", given.values, ""),
            ("signed", given.signed_values, ".signed"),
        ):
            if values is not None:
                stored, entry[kind] = pack(values)
                files[root / slug(method) / f"{unit.hash}{suffix}.npy"] = partial(
                    save, write=np.save, arr=stored
                )
        entries.append(entry)
    if entries:
        index = {"checkpoint": valid_unicode(unit.checkpoint), **shared, "maps": entries}
        text = json.dumps(index, separators=(",", ":")).encode()
        files[root / f"{unit.hash}.json.gz"] = gzip.compress(text, mtime=0)
    return files


class StoredMaps(NamedTuple):
    """One method's maps as arrays; the fields of types.Maps."""

    method: str
    values: np.ndarray  # "b h w" float32
    image_size: tuple[int, ...]
    explained: np.ndarray  # "b"
    ids: tuple[str, ...]
    signed_values: np.ndarray | None = None

    def as_tensors(self) -> Maps:
        import torch

        from heatproof.types import Maps  # with torch, which reading scores and drawing maps does without

        fields: list[Any] = [torch.from_numpy(v) if isinstance(v, np.ndarray) else v for v in self]
        return Maps(*fields)


@dataclass(frozen=True, eq=False)
class Shard:
    """One method's maps of one finished unit, still on disk."""

    method: str
    checkpoint: str
    ids: tuple[str, ...]
    image_size: tuple[int, ...]
    explained: np.ndarray
    path: Path
    scales: Mapping[str, Mapping[str, np.ndarray]]  # "values" and, where it exists, "signed"
    seal: Seal

    def read(self, rows: Sequence[int]) -> StoredMaps:
        """The maps of these rows; no other row is read."""
        signed = self._values("signed", rows) if "signed" in self.scales else None
        ids, explained = tuple(self.ids[row] for row in rows), self.explained[list(rows)]
        return StoredMaps(self.method, self._values("values", rows), self.image_size, explained, ids, signed)

    def _values(self, kind: str, rows: Sequence[int]) -> np.ndarray:
        path = self.path if kind == "values" else self.path.with_suffix(".signed.npy")
        check_file(path, self.seal.files.get(f"maps/{path.parent.name}/{path.name}", "it has none"))
        try:
            stored = np.load(plain(path), mmap_mode="r", allow_pickle=False)
            if len(stored) != len(self.ids):
                raise ValueError(f"it holds {len(stored)} maps instead of {len(self.ids)}")
        except (OSError, ValueError) as error:
            raise _unreadable(path, error) from error
        picked = list(rows)
        return unpack(stored[picked], *(self.scales[kind][name][picked] for name in ("scale", "offset")))


class MapStore:
    """The maps of all finished units. Indexes are read once per store; maps on demand."""

    def __init__(self, root: Path, units: Callable[[], Mapping[str, Seal]]) -> None:
        self.root, self._units = root, units
        self._known: set[str] = set()
        self._places: dict[tuple[str, str], dict[str, tuple[Shard, int]]] = {}

    def contents(self) -> list[tuple[str, str]]:
        """Every (checkpoint, method) that has maps."""
        self._refresh()
        return sorted(self._places)

    def ids(self, checkpoint: str, method: str) -> tuple[str, ...]:
        """The images whose maps are stored, in order of their ids."""
        self._refresh()
        return tuple(sorted(self._of(checkpoint, method)))

    def known(self, checkpoint: str, method: str, ids: Sequence[str]) -> list[bool]:
        """Which of these images have a map; new indexes are read only if an image seems to have none."""
        key, wanted = _key(checkpoint, method), [valid_unicode(i) for i in ids]
        if any(i not in self._places.get(key, {}) for i in wanted):
            self._refresh()
        return [i in self._places.get(key, {}) for i in wanted]

    def shared(self, places: Sequence[tuple[str, str]]) -> list[str]:
        """The images with a map at every one of these (checkpoint, method), in order of their ids."""
        self._refresh()
        return sorted(set.intersection(*(set(self._places.get(_key(*place), ())) for place in places)))

    def read(self, checkpoint: str, method: str, ids: Sequence[str] | None = None) -> Maps:
        """The maps of these images in the order given, or of all images in order of their ids."""
        return self.read_arrays(checkpoint, method, ids).as_tensors()

    def read_arrays(self, checkpoint: str, method: str, ids: Sequence[str] | None = None) -> StoredMaps:
        """As `read`, without torch."""
        if not ids or not all(self.known(checkpoint, method, ids)):
            self._refresh()
        places = self._of(checkpoint, method)
        wanted = sorted(places) if ids is None else [valid_unicode(i) for i in ids]
        missing = [i for i in wanted if i not in places]
        if missing:
            raise InputError(
                f"no map of {method} at {checkpoint} for {len(missing)} of {len(wanted)} images, "
                f"such as {missing[0]!r}; finish the run first or name other images"
            )
        if not wanted:
            raise InputError(f"no images were named; {len(places)} maps of {method} are stored")
        return _gather(places, wanted)

    def _of(self, checkpoint: str, method: str) -> dict[str, tuple[Shard, int]]:
        """Shard and row of each image's map."""
        if places := self._places.get(_key(checkpoint, method)):
            return places
        checkpoints = sorted({name for name, _ in self._places})
        if valid_unicode(checkpoint) not in checkpoints:
            raise UnknownNameError("checkpoint with stored maps", checkpoint, checkpoints)
        methods = sorted(m for name, m in self._places if name == valid_unicode(checkpoint))
        raise UnknownNameError(f"method with stored maps at {checkpoint}", method, methods)

    def _refresh(self) -> None:
        """Read the indexes of newly finished units. A map stored by two units is equal in both."""
        for part, seal in self._units().items():
            path = self.root / f"{part}.json.gz"
            if part in self._known or f"maps/{path.name}" not in seal.files:
                continue
            check_file(path, seal.files[f"maps/{path.name}"])
            self._known.add(part)
            for shard in _read_index(self.root, path, part, seal):
                places = self._places.setdefault((shard.checkpoint, shard.method), {})
                for row, name in enumerate(shard.ids):
                    places.setdefault(name, (shard, row))


def _key(checkpoint: str, method: str) -> tuple[str, str]:
    return valid_unicode(checkpoint), valid_unicode(method)


def _gather(places: Mapping[str, tuple[Shard, int]], wanted: Sequence[str]) -> StoredMaps:
    """The maps of these images, read shard by shard."""
    positions: dict[Shard, list[int]] = {}
    for position, name in enumerate(wanted):
        positions.setdefault(places[name][0], []).append(position)
    parts = []
    for shard, own in positions.items():
        parts.append(shard.read([places[wanted[position]][1] for position in own]))
        if _sizes(parts[-1]) != _sizes(parts[0]):
            raise InputError(
                f"maps of {shard.method} at {shard.checkpoint} differ in size "
                f"({_sizes(parts[0])}; {_sizes(parts[-1])}); name images of one size"
            )
    order = np.argsort(np.concatenate(list(positions.values())))
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts])[order]
        for name in ("values", "explained", "signed_values")
        if getattr(parts[0], name) is not None
    }
    return parts[0]._replace(ids=tuple(wanted), **arrays)


def _read_index(root: Path, path: Path, part: str, seal: Seal) -> list[Shard]:
    """The shards of a unit; a few bytes may unpack to more than the memory, so the size is limited."""
    try:
        with gzip.open(plain(path)) as packed_index:
            text = packed_index.read(MAX_INDEX_BYTES + 1)
        if len(text) > MAX_INDEX_BYTES:
            raise ValueError(f"it unpacks to more than {MAX_INDEX_BYTES >> 20} MB")
        index = json.loads(text)
        check_types([index["checkpoint"], index["ids"], [e.get("ids", []) for e in index["maps"]]], INDEX)
        ids, shards = tuple(index["ids"]), []  # one tuple for all methods
        for entry in index["maps"]:
            size, method = tuple(map(int, entry["image_size"])), entry["method"]
            if math.prod(size) > MAX_PIXELS:
                raise ValueError(f"its images of {entry['image_size']} are too large")
            own = tuple(entry["ids"]) if "ids" in entry else ids
            explained = np.array(entry.get("explained", index["explained"]), dtype=np.int64)
            packed = {kind: entry[kind] for kind in ("values", "signed") if kind in entry}
            scales = {k: {n: np.array(v, np.float32) for n, v in of.items()} for k, of in packed.items()}
            array = root / slug(method) / f"{part}.npy"
            shards.append(Shard(method, index["checkpoint"], own, size, explained, array, scales, seal))
        return shards
    except UNREADABLE as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> StoreError:
    return StoreError(f"cannot read {path}: {error}; delete the part of this unit and run again")


def _check(method: str, maps: Maps) -> None:
    n, shape = len(maps), tuple(maps.values.shape)
    if len(shape) not in (3, 4) or 0 in shape[1:]:
        raise InputError(f"maps of {method} must be 'b h w' or 'b d h w'; got shape {shape}")
    if len(maps.ids) != n or maps.explained.shape != (n,):
        raise InputError(
            f"{method} has {n} maps but {len(maps.ids)} ids and {maps.explained.numel()} explained classes; "
            "stored maps need one of each"
        )
    for values in (maps.values, maps.signed):
        if len(values) != n:
            raise InputError(f"{method} has {n} maps but {len(values)} signed maps; they must match")
        if not (finite := values.isfinite().flatten(1).all(1)).all():
            bad = maps.ids[int((~finite).nonzero()[0, 0])]
            raise InputError(f"the map of {method} for {bad!r} has NaN or infinite values; leave it out")


def _sizes(maps: StoredMaps) -> str:
    own, whole = ("x".join(map(str, size)) for size in (maps.values.shape[1:], maps.image_size))
    signed = "" if maps.signed_values is None else ", with signed maps"
    return f"{own} for images of {whole}{signed}"


def save(path: Path, write: Callable[..., None], **arrays: np.ndarray) -> None:
    """Call np.save or np.savez, which would append a suffix to the name of a temporary file."""
    with path.open("wb") as file:
        write(file, **arrays)


class PictureStore:
    """The images of a run by their ids."""

    def __init__(self, root: Path, ledger: Ledger) -> None:
        self.root, self._ledger = root, ledger

    def path(self, name: str) -> Path | None:
        """The file of an image, if it is stored."""
        files = (self.root / f"{file_stem(name)}{suffix}" for suffix in (".png", ".jpg"))
        return next(filter(Path.exists, files), None)

    def read(self, name: str) -> bytes | None:
        """PNG or JPEG bytes; None if not stored. Raises DamagedError if they differ from what was written."""
        path = self.path(name)
        if path is None:
            return None
        with plain(path).open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if hashlib.sha256(content).hexdigest() != self._ledger.picture_hash(path):
            raise damaged(path, "its content is not what was written")
        why = "it is too large"
        try:
            with Image.open(io.BytesIO(content), formats=("PNG", "JPEG")) as picture:
                if len(content) <= MOST_BYTES and math.prod(picture.size) <= MOST_PIXELS:
                    return content
        except NO_PICTURE:
            why = "its image size is implausible"
        raise StoreError(f"cannot show {path}: {why}; heatproof verify names all damage")

    def open(self, name: str) -> Image.Image | None:
        """The stored image; None if it was not stored or is damaged, which `verify` reports."""
        with suppress(StoreError, *NO_PICTURE):
            if content := self.read(name):
                picture = Image.open(io.BytesIO(content), formats=("PNG", "JPEG"))
                picture.load()
                return picture
        return None

    def planes(self, name: str) -> tuple[int, ...] | None:
        """The planes of a volume that its image shows, from the file's comment; None without one."""
        picture = self.open(name)
        note = "" if picture is None else picture.info.get("comment", "")
        match = PLANES.fullmatch(str(note, "ascii", "replace") if isinstance(note, bytes) else str(note))
        return tuple(map(int, match[1].split())) if match else None

    def files(self, name: str, picture: np.ndarray | Sheet) -> dict[Path, Content]:
        """The file of one image, "H W 3" uint8, and its content."""
        content, suffix = encode(*picture) if isinstance(picture, Sheet) else encode(picture)
        return {self.root / f"{file_stem(name)}{suffix}": content}


def encode(pixels: np.ndarray, planes: Sequence[int] = ()) -> tuple[bytes, str]:
    """An image as a file, and its suffix; planes: of a volume, written to the file's comment."""
    picture, out, info = Image.fromarray(pixels), io.BytesIO(), PngInfo()
    note = f"planes {' '.join(map(str, planes))}" if planes else ""
    if note:
        info.add_text("comment", note)
    few = picture.getcolors(FEW_COLOURS) is not None
    how: dict[str, Any] = {"quality": QUALITY, "subsampling": 0, "comment": note.encode()}
    picture.save(out, "PNG" if few else "JPEG", **{"pnginfo": info} if few else how)
    return out.getvalue(), ".png" if few else ".jpg"


def file_stem(name: str) -> str:
    """A name for an image's file that is valid for any id."""
    return hash_of(name)[:24]
