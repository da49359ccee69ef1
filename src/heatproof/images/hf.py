"""Hugging Face datasets: a folder written by save_to_disk, or anything load_dataset takes.

Pictures are decoded here, not by the datasets library: a broken one gives a reason and not a crash, and
16 bits, orientation and palettes are treated as everywhere else.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from heatproof.errors import InputError, did_you_mean, need
from heatproof.images.csv import number_labels
from heatproof.images.files import picture_reader
from heatproof.images.findings import lists_several, number_findings
from heatproof.images.memory import check_labels
from heatproof.images.source import Sample, Source

SAVED = ("dataset_info.json", "dataset_dict.json", "state.json")


def open_hf(
    path: str | Path,
    *,
    split: str | None = None,
    name: str | None = None,
    image_column: str = "image",
    label_column: str | None = "label",
    class_names: Sequence[str] | None = None,
    bits: int | None = None,
) -> Source:
    """A dataset's pictures. split: needed where there are several; name: the dataset's configuration.

    bits: the depth of 16-bit greys, else found (files.py).
    """
    read = picture_reader(bits)
    datasets = need("datasets", "datasets")
    table = _load(datasets, str(path), split, name)
    for column in filter(None, (image_column, label_column)):
        if column not in table.column_names:
            raise InputError(f"{path} has no column {column!r}; {did_you_mean(column, table.column_names)}")
    labels, classes, findings = _labels(table, label_column, class_names, Path(path))
    pictures = table.select_columns([image_column]).cast_column(image_column, datasets.Image(decode=False))
    samples = tuple(
        Sample(f"{i:06d}", label, content=i, findings=findings[i] if findings else None)
        for i, label in enumerate(labels)
    )
    mark = str(table._fingerprint)  # the library's own hash of the data and what was done to it
    return Source(samples, classes, lambda row: read(_file(pictures, row, image_column)), lambda _: mark)


def _load(datasets: Any, path: str, split: str | None, name: str | None) -> Any:
    try:
        saved = any((Path(path) / file).exists() for file in SAVED)
        tables = datasets.load_from_disk(path) if saved else datasets.load_dataset(path, name, split=split)
    except Exception as error:  # the library fails in many ways: no network, no such split, no such folder
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InputError(f"cannot load the dataset {path}: {reason}") from error
    if not hasattr(tables, "keys"):
        return tables
    names = list(tables.keys())
    if split is None and len(names) == 1:
        return tables[names[0]]
    if split not in names:
        raise InputError(f"{path} has the splits {', '.join(names)}; set split to one of them")
    return tables[split]


def _labels(
    table: Any, column: str | None, class_names: Sequence[str] | None, path: Path
) -> tuple[list[int | None], tuple[str, ...], list[tuple[int, ...]] | None]:
    """Labels, the classes' names, and the findings of each picture where the column holds lists."""
    if column is None:
        return [None] * len(table), (), None
    values = list(table[column])
    feature = table.features[column]
    if lists_several(values):
        named = class_names or getattr(getattr(feature, "feature", feature), "names", None)
        findings, found = number_findings([value or () for value in values], named, str(path))
        return [None] * len(values), found, findings
    if values and all(isinstance(value, int) for value in values):
        numbers, found = check_labels(values, len(values), class_names or getattr(feature, "names", None))
        return numbers, found, None
    numbers, classes = number_labels(["" if v is None else str(v) for v in values], class_names, path)
    return numbers, tuple(classes), None


def _file(pictures: Any, sample: Sample, column: str) -> Path | BinaryIO:
    cell = pictures[sample.content][column]
    if cell is None:
        raise InputError("the row has no picture")
    if cell["bytes"] is not None:
        return io.BytesIO(cell["bytes"])
    return Path(cell["path"])
