"""The album of a run, made from what its folder kept and written into it: album.json.

Crops are small PNG files inside. A run folder is data: its network is only built from a study that the user
names, or where building it runs nothing of the study's own.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from heatproof.disk import valid_unicode
from heatproof.errors import HeatproofError, InputError, StoreError
from heatproof.images.preprocess import to_tensor
from heatproof.models import Model
from heatproof.models.load import best_device
from heatproof.run.study import open_study
from heatproof.run.weights import foreign_code, weights_hash
from heatproof.store import RunFolder
from heatproof.store.ledger import known_record, write_record
from heatproof.verdict.album import CROP, PER_CLASS, Album, bind, by_class, chosen_methods
from heatproof.verdict.crops import Layer, find_crops
from heatproof.verdict.trajectory import class_names, models, ordered

FILE, SCHEMA = "album.json", 1
StudySource = str | Path | Mapping[str, Any]  # a TOML file, or a dict of the same form


def write_album(
    folder: RunFolder,
    methods: Sequence[str] | None = None,
    *,
    checkpoint: str | None = None,
    study: StudySource | None = None,
) -> Path:
    """Make the album of a run and keep it in its folder, where the report finds it; the file.

    Args:
        folder: of the run.
        methods: those that follow the network; all with maps but the floors where None.
        checkpoint: the last one with maps where None.
        study: what the run was made from. Where None, the run's own record of it, with paths relative to the
            working folder, as long as building the network from it runs nothing of the study's own.
    """
    checkpoint = checkpoint or last_with_maps(folder)
    model, layer = _open_model(folder, checkpoint, study)
    album = album_of_run(folder, model, methods, checkpoint, layer)
    path = folder.path / FILE
    write_record(path, {"schema": SCHEMA, **msgspec.to_builtins(album, enc_hook=png)}, indent=None)
    return path


def album_of_run(
    folder: RunFolder,
    model: Model,
    methods: Sequence[str] | None = None,
    checkpoint: str | None = None,
    layer: Layer = None,
) -> Album:
    """From the maps and pictures that a run kept. model: the network of that checkpoint."""
    checkpoint = checkpoint or last_with_maps(folder)
    store, kept = folder.maps(), folder.pictures()
    at, facts = valid_unicode(checkpoint), folder.manifest.facts
    known = [name for of, name in store.contents() if of == at and not facts.is_floor(name)]
    wanted = chosen_methods(methods, known)
    explained = {
        name: number
        for part in store.shards(checkpoint, wanted[0])
        for name, number in zip(part.ids, part.explained.tolist(), strict=True)
    }
    ids = [name for name in store.shared([(checkpoint, method) for method in wanted]) if kept.path(name)]
    if not ids:
        raise InputError(
            f"{folder.path} kept no pictures, which an album is made of; run its study with "
            "run.pictures = true into another folder"
        )

    if len(model.preprocess.size) > 2 or model.preprocess.channels not in (1, 3):
        raise InputError(
            "an evidence album is made of pictures of 1 or 3 channels, and this network takes others"
        )

    def picture(name: str) -> Tensor:
        with Image.open(io.BytesIO(kept.read(name) or b"")) as opened:
            shown = opened.convert("L" if model.preprocess.channels == 1 else "RGB")
        return model.preprocess.normalise(to_tensor(shown))

    found = {}
    for number, rows in by_class([explained[name] for name in ids], PER_CLASS).items():
        lot = [ids[i] for i in rows]
        maps = [store.read(checkpoint, method, lot) for method in wanted]
        images = torch.stack([picture(name) for name in lot])
        found[number] = find_crops(model, number, images, maps, CROP, layer)
    return Album(bind(found, class_names(folder)), tuple(wanted), checkpoint)


def read_album(folder: RunFolder) -> Album | None:
    """The album that a run folder keeps, None where it has none."""
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
    in_order = [checkpoint for model in models(folder) for checkpoint in ordered(folder, model)]
    found = [checkpoint for checkpoint in in_order if checkpoint in with_maps] or sorted(with_maps)
    if not found:
        raise StoreError(f"{folder.path} holds no maps yet, which an album is made of; run its study first")
    return found[-1]


def _open_model(
    folder: RunFolder, checkpoint: str, study: StudySource | None
) -> tuple[Model, str | list[str] | None]:
    """The network of a checkpoint, built again, and where its CAMs look."""
    try:
        opened = open_study(folder.manifest.config if study is None else study)
        if study is None and (runs := foreign_code(opened.study.model)):
            raise InputError(f"that {runs}, and a run folder alone is no reason to")
        found = next((c for c in opened.checkpoints if c.name == checkpoint), None)
        if found is None:
            raise InputError(f"the study has no checkpoint {checkpoint!r}")
        opened.device = best_device()
        model = opened.model(checkpoint)
        if weights_hash(found, model) != folder.manifest.models.get(checkpoint):
            raise InputError(f"the weights of {checkpoint!r} are not those of the run")
    except HeatproofError as error:
        raise InputError(
            f"cannot open the network of {folder.path} again: {error}; name the study that it was run from"
        ) from error
    return model, opened.study.model.layer


def png(picture: np.ndarray) -> str:
    """A small picture as a PNG file in base64."""
    out = io.BytesIO()
    Image.fromarray(picture).save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


def _from_png(_kind: type, content: Any) -> np.ndarray:
    with Image.open(io.BytesIO(base64.b64decode(content, validate=True)), formats=("PNG",)) as picture:
        if max(picture.size) > CROP:
            raise ValueError("a crop is too large")
        return np.asarray(picture.convert("RGB"))
