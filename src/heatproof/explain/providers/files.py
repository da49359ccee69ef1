"""Precomputed maps from files: npy, npz, png or safetensors, one file per image or one for all.

    files:maps/{id}.npy     a file for each image; {id} is its name in the source, with or without suffix
    files:maps              a folder of such files, of any kind, named after the images
    files:maps.npy          "n h w", in the order of the source
    files:maps.npz          values "n h w" with ids, as Maps.save writes it; or an array for each name
    files:maps.safetensors  the same as .npz

A map may have any size that covers the input of the network: after its crop, not the image file. Besides
`values` a file may hold `signed` (the map with its signs) and `explained` (the class); a class other than
that of the run raises InputError. A PNG is grey: 8 or 16 bits, read as 0 to 1.

Control maps, by the same method for three networks with random weights, are in a folder beside them, by
network: maps-random/0 to maps-random/2, or maps-random/0.npz and so on.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from heatproof.errors import InputError, counted, first_line
from heatproof.images.files import check_file
from heatproof.registry import Card, Explainer
from heatproof.types import Signed, Trace

SUFFIXES = (".npy", ".npz", ".safetensors", ".png")
AS_STORED = Card(*["defined by its author"] * 4)
CONTROLS = 3  # networks with random weights, as many as the verdict's error rates were measured with
ASPECT = 1.25  # largest difference of aspect ratios: a coarse layer rounds its sides
Arrays = Mapping[str, np.ndarray]


class StoredMap(NamedTuple):
    """The stored map of an image."""

    values: np.ndarray  # "h w"
    signed: np.ndarray | None = None
    explained: int | None = None


@dataclass(frozen=True)
class MapFiles:
    """The files of maps, by image."""

    path: Path
    order: Callable[[], Sequence[str]] | None = None  # returns the names of all images of the source

    @property
    def per_image(self) -> bool:
        return "{id}" in str(self.path) or self.path.is_dir()

    def read(self, names: Sequence[str]) -> list[StoredMap]:
        """The maps of these images, in their order."""
        if self.per_image:
            return [_stored_map(_load(path), path, squeeze=True) for path in self.files(names)]
        for name in names:
            if name not in self._rows:
                first = next(iter(self._rows), "missing")
                raise InputError(f"{self.path} has no map of {name}; its first is {first}")
        return [_stored_map(self._rows[name], self.path) for name in names]

    def files(self, names: Sequence[str]) -> list[Path]:
        """The file of each of these images, or the single file for all."""
        if not self.per_image:
            if not self.path.is_file():
                raise InputError(f"there is no file or folder of maps {os.path.normpath(self.path)}")
            return [self.path]
        found = {name: next(filter(Path.is_file, self._candidates(name)), None) for name in names}
        if missing := [name for name, path in found.items() if path is None]:
            paths = self._candidates(missing[0])[:: 1 if "{id}" in str(self.path) else len(SUFFIXES)]
            raise InputError(
                f"{len(missing)} of {counted(len(names), 'image')} have no map, such as {missing[0]}; "
                f"looked for {' or '.join(map(os.path.normpath, paths))}"
            )
        readers: dict[Path, str] = {}
        for name, path in found.items():
            assert path is not None
            if readers.setdefault(path, name) != name:
                raise InputError(
                    f"{readers[path]} and {name} would both read {path}; name maps by the whole id"
                )
        return list(readers)

    def _candidates(self, name: str) -> list[Path]:
        stem = without_suffix(name)
        names = dict.fromkeys([name, stem, Path(stem).name])
        if "{id}" in str(self.path):
            return [Path(str(self.path).replace("{id}", form)) for form in names]
        return [self.path / f"{form}{suffix}" for form in names for suffix in SUFFIXES]

    @cached_property
    def _rows(self) -> Mapping[str, Arrays]:
        """The arrays of each image in the single file."""
        (path,) = self.files(())
        arrays = _load(path)
        if "values" not in arrays and len(arrays) > 1:  # an array for each name
            return {name: {"values": values} for name, values in arrays.items()}
        kept = {"values": _values(arrays, path)}
        kept |= {key: arrays[key] for key in ("signed", "explained") if key in arrays}
        count = len(kept["values"])
        known: Iterable[Any] = self.order() if self.order else range(count)
        names = [str(name) for name in (arrays["ids"].tolist() if "ids" in arrays else known)]
        if len(names) != count:
            raise InputError(
                f"{path} holds {count} maps, but there are {len(names)} images; "
                "give one for each, or an .npz file with values and ids"
            )
        return {name: {key: array[i] for key, array in kept.items()} for i, name in enumerate(names)}


@dataclass(frozen=True)
class Stored(Explainer):
    """A method whose maps are read from files."""

    place: MapFiles = field(default_factory=lambda: MapFiles(Path()))

    @cached_property
    def controls(self) -> list[MapFiles]:
        """Maps of networks with random weights; empty if none are stored."""
        folder, paths = control_paths(self.place.path)
        return [MapFiles(path, self.place.order) for path in paths] if folder.is_dir() else []

    def control_values(self, names: Sequence[str], size: tuple[int, ...]) -> list[Tensor]:
        """Tensor "b h w" for each network with random weights."""
        return [torch.from_numpy(_stacked(place.read(names), names, size)) for place in self.controls]

    def check(self, names: Sequence[str], size: tuple[int, ...]) -> None:
        """Raise InputError for maps that are missing or do not fit."""
        for place in (self.place, *self.controls):
            _stacked(place.read(names), names, size)

    def hash(self, names: Sequence[str]) -> str:
        """A hash of the contents."""
        digest = hashlib.sha256()
        for path in (path for place in (self.place, *self.controls) for path in place.files(names)):
            check_file(path)
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()[:16]


def control_paths(path: Path) -> tuple[Path, list[Path]]:
    """The folder of control maps, and the path in it for each network with random weights.

    >>> [control_paths(Path(path))[1][2].as_posix() for path in ("maps", "maps/{id}.npy", "a/maps.npz")]
    ['maps-random/2', 'maps-random/2/{id}.npy', 'a/maps-random/2.npz']
    """
    at = next((i for i, part in enumerate(path.parts) if "{id}" in part), len(path.parts))
    top = Path(*path.parts[:at])
    suffix = top.suffix if top.suffix.lower() in SUFFIXES else ""
    folder = top.with_name(f"{top.stem if suffix else top.name or 'maps'}-random")
    return folder, [folder.joinpath(f"{k}{suffix}", *path.parts[at:]) for k in range(CONTROLS)]


def from_path(name: str, folder: Path, order: Callable[[], Sequence[str]] | None = None) -> Explainer:
    """files:PATH, relative to a folder. order: returns the names of all images, for arrays without names."""
    place = MapFiles(folder / Path(name.partition(":")[2].strip()).expanduser(), order)

    def read(trace: Trace) -> Tensor | Signed:
        """Read the maps from the files."""
        maps = place.read(trace.ids)
        values = torch.from_numpy(_stacked(maps, trace.ids, trace.image_size)).to(trace.images.device)
        for stored, image, target in zip(maps, trace.ids, trace.targets.tolist(), strict=True):
            if stored.explained is not None and stored.explained != target:
                raise InputError(
                    f"the map of {image} in {place.path.name} explains class {stored.explained}, but class "
                    f"{target} is requested; set run.targets to the explained classes, or compute other maps"
                )
        signed = [stored.signed for stored in maps if stored.signed is not None]
        if len(signed) < len(maps):
            return values
        return Signed(values, torch.from_numpy(np.stack(signed)).to(trace.images.device))

    return Stored(
        name, read, card=AS_STORED, forward_only=True, precomputed=True, volumes=True, cost="no pass",
        place=place,
    )  # fmt: skip


def _stacked(maps: Sequence[StoredMap], names: Sequence[str], size: tuple[int, ...]) -> np.ndarray:
    """Array "b h w"; raises InputError unless all maps have one size that fits the network's input."""

    def sides(shape: Sequence[int]) -> str:
        return " x ".join(map(str, shape))

    for stored, name in zip(maps, names, strict=True):
        shape, first = stored.values.shape, maps[0].values.shape
        if len(shape) != len(size) or 0 in shape:
            wanted = "height and width" if len(size) == 2 else "depth, height and width"
            raise InputError(f"the map of {name} has shape {shape}; a map has {wanted}")
        if shape != first:
            raise InputError(
                f"maps differ in size: {names[0]} has {sides(first)}, {name} {sides(shape)}; "
                "resize them to one size"
            )
        shares = [own / side for own, side in zip(shape, size, strict=True)]
        if max(shares) / min(shares) > ASPECT:
            raise InputError(
                f"the map of {name} is {sides(shape)}, but the input is {sides(size)}, another shape; "
                "give maps of the network's input, after its crop"
            )
    return np.stack([stored.values for stored in maps])


def without_suffix(name: str) -> str:
    """An image's name without the suffix of its file; a label behind # stays.

    >>> without_suffix("cat/1.png"), without_suffix("cat/1.png#mass"), without_suffix("cat/1#2.png")
    ('cat/1', 'cat/1#mass', 'cat/1#2')
    """
    image, mark, label = name.rpartition("#")
    if mark and "#" in Path(name).suffix:
        return f"{Path(image).with_suffix('')}#{label}"
    return str(Path(name).with_suffix(""))


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
            return {"values": _grey(path)}
        content = np.load(path, allow_pickle=False)
        return {"values": content} if kind == ".npy" else dict(content)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"cannot read maps from {path}: {first_line(error)}") from error


def _grey(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        if image.mode not in ("L", "1", "I", "I;16"):
            raise InputError(
                f"{path} is in colour ({image.mode}), and colours cannot be read back; save values, or grey"
            )
        pixels = np.asarray(image.convert("L") if image.mode == "1" else image)
        white = 255 if image.mode in ("L", "1") else 65535
    return (pixels / white).astype(np.float32)


def _values(arrays: Arrays, path: Path) -> np.ndarray:
    if "values" in arrays:
        return arrays["values"]
    if len(arrays) == 1:
        return next(iter(arrays.values()))
    raise InputError(f"{path} holds {', '.join(sorted(arrays)[:5])}; name the array of maps `values`")


def _stored_map(arrays: Arrays, path: Path, squeeze: bool = False) -> StoredMap:
    """The map in some arrays. squeeze: drop leading axes of length 1."""

    def numbers(values: np.ndarray) -> np.ndarray:
        if values.dtype.kind not in "fiub":
            raise InputError(f"{path} holds {values.dtype}, not numbers")
        while squeeze and values.ndim > 2 and len(values) == 1:
            values = values[0]
        return np.ascontiguousarray(values, dtype=np.float32)

    signed, explained = arrays.get("signed"), arrays.get("explained")
    return StoredMap(
        numbers(_values(arrays, path)),
        None if signed is None else numbers(signed),
        None if explained is None else int(np.ravel(explained)[0]),
    )
