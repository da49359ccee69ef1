"""Maps that are there already: npy, npz, png or safetensors, one file per picture or one for all.

    files:maps/{id}.npy     a file for each picture; {id} is its name in the source, ending or not
    files:maps              a folder of such files, of any kind, named after the pictures
    files:maps.npy          "n h w", in the order of the source
    files:maps.npz          values "n h w" with ids, as Maps.save writes it; or an array named after each
    files:maps.safetensors  the same as .npz

A map may have any size that covers what the network sees: after its crop, not the picture file. Beside
`values` a file may hold `signed` (the map with its signs) and `explained` (the class); another class than the
run asks about is refused. A PNG is grey: 8 or 16 bits, read as 0 to 1.

Control maps, by the same method for three networks with random weights, lie beside them in a folder whose
name ends in "-random", numbered by network: maps-random/0 to maps-random/2, or maps-random/0.npz and so on.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from heatproof.errors import InputError, counted
from heatproof.images.files import check_file
from heatproof.registry import Card, Explainer

if TYPE_CHECKING:
    from heatproof.types import Signed, Trace

SUFFIXES = (".npy", ".npz", ".safetensors", ".png")
AS_STORED = Card(*["as its maker says"] * 4)
CONTROLS = 3  # networks with random weights, as many as the verdict's error rates were measured with
SAME_SHAPE = 1.25  # by how much sides may differ in proportion: a coarse layer rounds them
Arrays = Mapping[str, np.ndarray]


class StoredMap(NamedTuple):
    """What is stored of one picture."""

    values: np.ndarray  # "h w"
    signed: np.ndarray | None = None
    explained: int | None = None


@dataclass(frozen=True)
class MapFiles:
    """Where maps lie, and which belongs to which picture."""

    path: Path
    order: Callable[[], Sequence[str]] | None = None  # names of all pictures, as the source has them

    @property
    def each(self) -> bool:
        """Whether there is a file for each picture."""
        return "{id}" in str(self.path) or self.path.is_dir()

    def read(self, names: Sequence[str]) -> list[StoredMap]:
        """The maps of these pictures, in their order."""
        if not self.each:
            return [self._row(name) for name in names]
        return [_one(_load(path), path) for path in self.files(names)]

    def files(self, names: Sequence[str]) -> list[Path]:
        """The file of each of these pictures, or the one file of all."""
        if not self.each:
            if not self.path.is_file():
                raise InputError(f"there is no file or folder of maps {os.path.normpath(self.path)}")
            return [self.path]
        found = {name: next(filter(Path.is_file, self._forms(name)), None) for name in names}
        if lost := [name for name, path in found.items() if path is None]:
            forms = self._forms(lost[0])[:: 1 if "{id}" in str(self.path) else len(SUFFIXES)]
            raise InputError(
                f"{len(lost)} of {counted(len(names), 'picture')} have no map, such as {lost[0]}; "
                f"looked for {' or '.join(map(os.path.normpath, forms))}"
            )
        paths = [path for path in found.values() if path is not None]
        readers = Counter(paths)
        if twice := next((path for path in paths if readers[path] > 1), None):
            shared = [name for name, path in found.items() if path == twice]
            raise InputError(
                f"{shared[0]} and {shared[1]} would both read {twice}; name maps by the whole id"
            )
        return paths

    def _forms(self, name: str) -> list[Path]:
        names = dict.fromkeys([name, plain := without_ending(name), Path(plain).name])
        if "{id}" in str(self.path):
            return [Path(str(self.path).replace("{id}", one)) for one in names]
        return [self.path / f"{one}{suffix}" for one in names for suffix in SUFFIXES]

    @cached_property
    def _arrays(self) -> Arrays:
        self.files(())
        return _load(self.path)

    @cached_property
    def _rows(self) -> Mapping[str, int] | None:
        """By name: the map's place in the array; None where each picture has an array of its own name."""
        held = self._arrays
        if "values" not in held and len(held) > 1:
            return None
        count = len(_values(held, self.path))
        if "ids" in held:
            return {str(name): i for i, name in enumerate(held["ids"].tolist())}
        names = list(self.order()) if self.order else [str(i) for i in range(count)]
        if len(names) != count:
            raise InputError(
                f"{self.path} holds {count} maps, but there are {len(names)} pictures; "
                "give one for each, or an .npz file with values and ids"
            )
        return {name: i for i, name in enumerate(names)}

    def _row(self, name: str) -> StoredMap:
        held, rows = self._arrays, self._rows
        known = held if rows is None else rows
        if name not in known:
            raise InputError(f"{self.path} has no map of {name}; its first is {next(iter(known), 'missing')}")
        if rows is None:
            return StoredMap(_numbers(held[name], self.path))
        at, every = rows[name], {k: held[k] for k in ("signed", "explained") if k in held}
        return StoredMap(
            _numbers(_values(held, self.path)[at], self.path),
            _numbers(every["signed"][at], self.path) if "signed" in every else None,
            int(every["explained"][at]) if "explained" in every else None,
        )


@dataclass(frozen=True)
class Stored(Explainer):
    """A method whose maps are read."""

    place: MapFiles = field(default_factory=lambda: MapFiles(Path()))

    @cached_property
    def controls(self) -> list[MapFiles]:
        """Maps of networks with random weights; empty where none are stored."""
        paths = [control_path(self.place.path, k) for k in range(CONTROLS)]
        stored = control_folder(self.place.path).is_dir()
        return [MapFiles(path, self.place.order) for path in paths] if stored else []

    def control_values(self, names: Sequence[str], size: tuple[int, ...]) -> list[Tensor]:
        """ "b h w" for each network with random weights."""
        return [torch.from_numpy(_stacked(place.read(names), names, size)) for place in self.controls]

    def check(self, names: Sequence[str], size: tuple[int, ...]) -> None:
        """Refuse maps that are missing or do not fit, before any work."""
        for place in (self.place, *self.controls):
            _stacked(place.read(names), names, size)

    def hash(self, names: Sequence[str]) -> str:
        """Of the contents."""
        digest = hashlib.sha256()
        for path in (path for place in (self.place, *self.controls) for path in place.files(names)):
            check_file(path)
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()[:16]


def control_folder(path: Path) -> Path:
    """Where control maps lie.

    >>> [control_folder(Path(path)).as_posix() for path in ("maps", "maps/{id}.npy", "a/maps.npz")]
    ['maps-random', 'maps-random', 'a/maps-random']
    """
    top = _split(path)[0]
    return top.with_name((top.stem if top.suffix.lower() in SUFFIXES else top.name or "maps") + "-random")


def control_path(path: Path, network: int) -> Path:
    """Where the control maps of one network with random weights lie.

    >>> [control_path(Path(path), 2).as_posix() for path in ("maps", "maps/{id}.npy", "a/maps.npz")]
    ['maps-random/2', 'maps-random/2/{id}.npy', 'a/maps-random/2.npz']
    """
    top, rest = _split(path)
    ending = top.suffix if top.suffix.lower() in SUFFIXES else ""
    return control_folder(path).joinpath(f"{network}{ending}", *rest)


def _split(path: Path) -> tuple[Path, tuple[str, ...]]:
    """A path up to the part with the images' names, and the rest."""
    at = next((i for i, part in enumerate(path.parts) if "{id}" in part), len(path.parts))
    return Path(*path.parts[:at]), path.parts[at:]


def from_path(
    name: str, folder: Path = Path(), order: Callable[[], Sequence[str]] | None = None
) -> Explainer:
    """files:PATH, relative to a folder. order: names of all pictures, for an array without names."""
    place = MapFiles(folder / Path(name.partition(":")[2].strip()).expanduser(), order)

    def read(trace: Trace) -> Tensor | Signed:
        """Maps that are read from files."""
        from heatproof.types import Signed

        maps = place.read(trace.ids)
        values = _stacked(maps, trace.ids, trace.image_size)
        for one, picture, asked in zip(maps, trace.ids, trace.targets.tolist(), strict=True):
            if one.explained is not None and one.explained != asked:
                raise InputError(
                    f"the map of {picture} in {place.path.name} explains class {one.explained}, but class "
                    f"{asked} is asked about; set run.targets to what was explained, or make other maps"
                )
        found = torch.from_numpy(values).to(trace.images.device)
        if any(one.signed is None for one in maps):
            return found
        signed = np.stack([one.signed for one in maps if one.signed is not None])
        return Signed(found, torch.from_numpy(signed).to(trace.images.device))

    made = Stored(
        name, read, card=AS_STORED, forward_only=True, precomputed=True, volumes=True, cost="no pass"
    )
    return replace(made, place=place)


def _stacked(maps: Sequence[StoredMap], names: Sequence[str], size: tuple[int, ...]) -> np.ndarray:
    """ "b h w", where all maps are of one size that fits what the network sees."""
    for one, name in zip(maps, names, strict=True):
        shape, first = one.values.shape, maps[0].values.shape
        if len(shape) != len(size) or 0 in shape:
            wanted = "height and width" if len(size) == 2 else "depth, height and width"
            raise InputError(f"the map of {name} has shape {shape}; a map has {wanted}")
        if shape != first:
            raise InputError(
                f"maps differ in size: {names[0]} has {_sides(first)}, {name} {_sides(shape)}; "
                "bring them to one size"
            )
        shares = [own / side for own, side in zip(shape, size, strict=True)]
        if max(shares) / min(shares) > SAME_SHAPE:
            raise InputError(
                f"the map of {name} is {_sides(shape)}, but the network sees {_sides(size)}, another shape; "
                "give maps of what the network sees, after its crop"
            )
    return np.stack([one.values for one in maps])


def without_ending(name: str) -> str:
    """A picture's name without its file's ending; one finding of a picture keeps its own.

    >>> without_ending("cat/1.png"), without_ending("cat/1.png#mass"), without_ending("cat/1#2.png")
    ('cat/1', 'cat/1#mass', 'cat/1#2')
    """
    picture, mark, finding = name.rpartition("#")
    if mark and "#" in Path(name).suffix:
        return f"{Path(picture).with_suffix('')}#{finding}"
    return str(Path(name).with_suffix(""))


def _sides(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


def _load(path: Path) -> Arrays:
    """The arrays in a file, by name."""
    kind = path.suffix.lower()
    if kind not in SUFFIXES:
        raise InputError(f"maps are {', '.join(SUFFIXES)} files; cannot read {path}")
    try:
        check_file(path)
        if kind == ".safetensors":
            from safetensors.numpy import load_file

            return dict(load_file(path))
        if kind == ".png":
            return {"values": _picture(path)}
        held = np.load(path, allow_pickle=False)
        return {"values": held} if kind == ".npy" else dict(held)
    except InputError:
        raise
    except Exception as error:
        why = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"cannot read maps from {path}: {why}") from error


def _picture(path: Path) -> np.ndarray:
    from PIL import Image

    with Image.open(path) as picture:
        if picture.mode not in ("L", "1", "I", "I;16"):
            raise InputError(
                f"{path} is in colour ({picture.mode}), and colours cannot be read back; save values, or grey"
            )
        pixels = np.asarray(picture.convert("L") if picture.mode == "1" else picture)
        most = 255 if picture.mode in ("L", "1") else 65535
    return (pixels / most).astype(np.float32)


def _values(held: Arrays, path: Path) -> np.ndarray:
    if "values" in held:
        return held["values"]
    if len(held) == 1:
        return next(iter(held.values()))
    raise InputError(f"{path} holds {', '.join(sorted(held)[:5])}; name the array of maps `values`")


def _one(held: Arrays, path: Path) -> StoredMap:
    """The map in a file of one picture, without axes of length 1 in front."""
    signed, told = held.get("signed"), held.get("explained")
    return StoredMap(
        _front(_numbers(_values(held, path), path)),
        None if signed is None else _front(_numbers(signed, path)),
        int(np.ravel(told)[0]) if told is not None else None,
    )


def _front(values: np.ndarray) -> np.ndarray:
    while values.ndim > 2 and len(values) == 1:
        values = values[0]
    return values


def _numbers(values: np.ndarray, path: Path) -> np.ndarray:
    if values.dtype.kind not in "fiub":
        raise InputError(f"{path} holds {values.dtype}, not numbers")
    return np.ascontiguousarray(values, dtype=np.float32)
