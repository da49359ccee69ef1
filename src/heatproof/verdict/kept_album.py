"""The evidence album of a run, stored as album.json with the crops as small PNG files inside.

Reading it needs no torch; making it does (album.py).
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from heatproof.errors import InputError, StoreError
from heatproof.store import RunFolder
from heatproof.store.ledger import known_record, write_record
from heatproof.verdict.trajectory import models, ordered

FILE, SCHEMA = "album.json", 1
CROP = 96  # pixels of a crop's longer side, at most
Box = tuple[int, int, int, int]  # top, left, bottom, right; the last two are exclusive
StudySource = str | Path | Mapping[str, Any]  # a TOML file, or a dict of the same form


@dataclass(frozen=True, eq=False)
class Crop:
    """The place in one image where its maps are strongest."""

    id: str
    box: Box
    pixels: np.ndarray  # "h w 3" uint8
    changed: bool  # whether painting the box over changes the prediction
    elsewhere: bool  # the same for a box where the maps are weakest
    drop: float  # fall of the class's probability


@dataclass(frozen=True, eq=False)
class CropGroup:
    """Crops with similar features."""

    n: int  # images
    changed: int  # of them, those whose prediction changes if the crop is painted over
    elsewhere: int  # the same for a box of that size where the maps are weakest
    drop: float  # mean fall of the class's probability
    crops: tuple[Crop, ...]  # the most typical first

    @property
    def sentence(self) -> str:
        """Effect of painting the crops over, as a sentence.

        >>> CropGroup(12, 11, 0, 0.8, ()).sentence
        'Painting it over changes the answer in 11 of 12 images, painting elsewhere in 0.'
        """
        return (
            f"Painting it over changes the answer in {self.changed} of {self.n} "
            f"image{'s' * (self.n != 1)}, painting elsewhere in {self.elsewhere}."
        )


@dataclass(frozen=True, eq=False)
class ClassPages:
    """The groups of one class, largest first."""

    label: int
    name: str
    n: int  # images in all groups, also those that are not stored
    groups: tuple[CropGroup, ...]
    others: int = 0  # groups that are not stored
    blank: int = 0  # images whose maps mark nothing
    called_otherwise: int = 0  # images that the network predicts as another class than the explained one


@dataclass(frozen=True, eq=False)
class Album:
    """The groups of crops of every class."""

    classes: tuple[ClassPages, ...]
    methods: tuple[str, ...]
    checkpoint: str = ""

    def __getitem__(self, of: int | str) -> ClassPages:
        """The pages of a class, by its number or name."""
        for pages in self.classes:
            if of in (pages.label, pages.name):
                return pages
        known = ", ".join(pages.name for pages in self.classes)
        raise InputError(f"the album has no class {of!r}; it has {known or 'none'}")


def write_album(
    folder: RunFolder,
    methods: Sequence[str] | None = None,
    *,
    checkpoint: str | None = None,
    study: StudySource | None = None,
) -> Path:
    """Make the album of a run and store it in its folder; returns the file.

    Args:
        folder: of the run.
        methods: those that follow the network; by default all with maps but the floors.
        checkpoint: by default the last one with maps.
        study: what the run was made from. By default the run's own record of it, with paths relative to the
            working folder; raises InputError if building the network from it would run the study's own code.
    """
    from heatproof.verdict.album import album_of_run, open_model  # with torch

    checkpoint = checkpoint or last_with_maps(folder)
    model, layer = open_model(folder, checkpoint, study)
    album = album_of_run(folder, model, methods, checkpoint, layer)
    path = folder.path / FILE
    write_record(path, {"schema": SCHEMA, **msgspec.to_builtins(album, enc_hook=png)}, indent=None)
    return path


def read_album(folder: RunFolder) -> Album | None:
    """The album in a run folder, None if it has none."""
    path = folder.path / FILE
    record = known_record(path)
    if record is None:
        return None
    if record.get("schema") != SCHEMA:
        raise StoreError(f"{path} was written by another heatproof; make the album again")
    try:
        return msgspec.convert(record, Album, dec_hook=_from_png)
    except (msgspec.ValidationError, OSError, SyntaxError) as error:
        raise StoreError(f"cannot read {path}: {error}; make the album again") from error


def last_with_maps(folder: RunFolder) -> str:
    """The last checkpoint of a run that has maps."""
    with_maps = {checkpoint for checkpoint, _ in folder.maps().contents()}
    if not with_maps:
        raise StoreError(f"{folder.path} holds no maps yet, which an album needs; run its study first")
    in_order = [checkpoint for model in models(folder) for checkpoint in ordered(folder, model)]
    return ([checkpoint for checkpoint in in_order if checkpoint in with_maps] or sorted(with_maps))[-1]


def png(image: np.ndarray) -> str:
    """A small image as a PNG file in base64."""
    out = io.BytesIO()
    Image.fromarray(image).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


def _from_png(_kind: type, content: Any) -> np.ndarray:
    with Image.open(io.BytesIO(base64.b64decode(content, validate=True)), formats=("PNG",)) as image:
        if max(image.size) > CROP:
            raise ValueError("a crop is too large")
        return np.asarray(image.convert("RGB"))
