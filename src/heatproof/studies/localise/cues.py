"""Shape bias: which cue a network follows in images whose shape and texture belong to different classes.

    shape bias = shape answers / (shape answers + texture answers)

geirhos2019texture. An image is stylised (shape and texture are named) or a silhouette (shape alone, so that
the share of shape answers is an accuracy). Answers of other classes do not count towards the bias.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from heatproof.errors import InputError
from heatproof.images.file_sources import read_rows
from heatproof.images.files import open_image
from heatproof.models import Model
from heatproof.models.model import all_logits
from heatproof.report.tables import Cell, Table
from heatproof.studies.common import mean_value
from heatproof.studies.localise.images import class_number
from heatproof.studies.localise.results import TABLES

AT_ONCE = 64  # images in memory


class CueImage(NamedTuple):
    """An image and the classes of its cues; a silhouette has no texture."""

    path: Path
    shape: frozenset[int]
    texture: frozenset[int]


def read_cues(path: Path, classes: Sequence[str], groups: Mapping[str, set[int]]) -> list[CueImage]:
    """Read the list; raises InputError for unknown classes and for cues that share a class."""
    images = []
    for line, row in read_rows(path, "path", "shape"):
        where = f"{path.name}, line {line}"
        shape, texture = (
            frozenset(groups.get(cell) or {class_number(cell, classes, where)}) if cell else frozenset()
            for cell in (row["shape"], row.get("texture", ""))
        )
        image = CueImage(path.parent / row["path"], shape, texture)
        if not shape:
            raise InputError(f"{where}: the column 'shape' is empty; name the class of the shape")
        if shape & texture:
            raise InputError(f"{where}: {row['shape']!r} and {row['texture']!r} share a class; name others")
        if not image.path.is_file():
            raise InputError(f"{where}: there is no file {image.path}; correct the column 'path'")
        images.append(image)
    if not images:
        raise InputError(f"{path} lists no image; add a row for each")
    return images


def cue_table(model: Model, images: Sequence[CueImage], seed: int = 0) -> Table:
    """Answers to stylised images and to silhouettes, each in a row."""
    answers: list[int] = []
    for start in range(0, len(images), AT_ONCE):
        opened = (open_image(image.path) for image in images[start : start + AT_ONCE])
        inputs = torch.stack([model.preprocess(picture) for picture in opened])
        answers += model.predicted(all_logits(model, inputs)).tolist()
    rows: list[Sequence[Cell]] = []
    for name, stylised in (("stylised", True), ("silhouettes", False)):
        both = [(a in i.shape, a in i.texture) for i, a in zip(images, answers, strict=True)
                if bool(i.texture) is stylised]  # fmt: skip
        decided = [float(shape) for shape, texture in both if shape or texture]
        counts = len(both), sum(s for s, _ in both), sum(t for _, t in both), len(both) - len(decided)
        bias = mean_value(decided, seed) if stylised else None
        rows += [(name, *counts, bias, mean_value((float(s) for s, _ in both), seed))] if both else []
    return TABLES.fill("cues", rows)
