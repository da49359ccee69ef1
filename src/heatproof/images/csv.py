"""A CSV file that lists pictures: path, label, boxes, masks.

    path,label,x0,y0,x1,y1,mask_finder
    photos/1.jpg,dog,30,40,199,180,
    photos/1.jpg,dog,250,60,330,170,
    photos/2.jpg,cat,,,,,masks/2.png

Only `path` must be there; paths are relative to the CSV file. A row per box: rows of one path belong to one
picture. A label is a class's name or its number from 0 on. All pictures have one, or none has: empty cells
("nan" counts as empty) mean no label; some of them, a negative number, a name among numbers, or several
classes in one cell (a|b, a;b) are refused. Box corners are pixel indices, both inside the box; the first
pixel is 0, or 1 where `first_pixel=1` says so (Pascal VOC). `width` and `height`, where present, are those of
the picture the boxes were drawn on. A column mask_NAME holds the file of the mask of the part NAME.
Other columns are ignored.

Pictures may have several findings, or none, where `multilabel=true` or `label_columns` says so:

    path,label,x0,y0,x1,y1                  path,mass,nodule,label,x0,y0,x1,y1,mask_mass
    1.png,mass,30,40,60,80                  1.png,1,1,nodule,10,12,20,24,masks/1.png
    1.png,nodule,10,12,20,24                2.png,0,0,,,,,,
    2.png,mass|nodule,,,,                   label_columns = ["mass", "nodule"]: a column of 0 and 1 for each
    3.png,,,,,

A picture has the findings of all its rows. A box belongs to those that the label beside it names, a mask to
the finding of its name; one of another name to all.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from heatproof.errors import InputError, did_you_mean
from heatproof.images.files import Box, Size, check_box, picture_reader
from heatproof.images.findings import SEPARATORS, marked_findings, named_findings, number_findings
from heatproof.images.source import Sample, Source, file_source

CORNERS = ("x0", "y0", "x1", "y1")
MASK = "mask_"
NEGATIVE = re.compile(r"-\d+(\.\d*)?")


def open_csv(
    path: str | Path,
    *,
    root: str | Path | None = None,
    class_names: Sequence[str] | None = None,
    first_pixel: int = 0,
    path_column: str = "path",
    label_column: str = "label",
    bits: int | None = None,
    multilabel: bool = False,
    label_columns: Sequence[str] | None = None,
) -> Source:
    """Pictures of a CSV manifest. root: where its paths start; else the CSV file's folder.

    class_names: the model's classes in its own order; else names are sorted and numbers name themselves.
    bits: the depth of 16-bit greys, else found (files.py). multilabel, label_columns: see the top.
    """
    read, path = picture_reader(bits), Path(path)
    known = class_names or label_columns
    stated = _Stated(label_column, tuple(label_columns or ()), known) if multilabel or label_columns else None
    entries = read_entries(path, path_column, label_column, first_pixel, stated)
    start = Path(root) if root is not None else path.parent
    if stated is not None:
        return file_source(*_with_findings(entries, known, start, path), read)
    labels, classes = number_labels([entry.label for entry in entries.values()], class_names, path)
    samples = []
    for (name, entry), label in zip(entries.items(), labels, strict=True):
        masks = {part: start / file for part, file in entry.masks.items()}
        samples.append(Sample(name, label, tuple(entry.boxes), masks, entry.frame, start / name))
    return file_source(samples, classes, read)


@dataclass
class Listed:
    """What the rows of one picture say."""

    label: str
    frame: Size | None = None
    boxes: list[Box] = field(default_factory=list)
    masks: dict[str, str] = field(default_factory=dict)
    findings: set[str] = field(default_factory=set)  # where there may be several
    box_findings: list[tuple[str, ...]] = field(default_factory=list)


@dataclass(frozen=True)
class _Stated:
    """Where a row says which findings there are."""

    label_column: str
    columns: tuple[str, ...]
    known: Sequence[str] | None

    def read(self, row: dict[str, str], entry: Listed, boxed: bool, where: str) -> None:
        named = named_findings(row.get(self.label_column, ""), self.known)
        found = marked_findings(row, self.columns, where) if self.columns else named
        if self.columns and (absent := [name for name in named if name not in found]):
            raise InputError(
                f"{where}: the label names {absent[0]!r}, but its column does not hold 1; correct one of them"
            )
        entry.findings.update(found)
        if boxed:
            of = named or found
            if len(of) != 1 and not named:
                many = f"{len(of)} findings" if of else "no finding"
                raise InputError(
                    f"{where}: a box in a row with {many}; name the one it belongs to in the column "
                    f"{self.label_column!r}"
                )
            entry.box_findings.append(of)


def read_entries(
    path: Path, path_column: str, label_column: str, first_pixel: int = 0, stated: _Stated | None = None
) -> dict[str, Listed]:
    """The rows of a CSV file, gathered by picture. stated: where pictures may have several findings."""
    entries: dict[str, Listed] = {}
    for line, row in read_rows(path, path_column, *(stated.columns if stated else ())):
        where = f"{path.name}, line {line}"
        name, label = row[path_column], row.get(label_column, "")
        if not name:
            raise InputError(f"{where}: the column {path_column!r} is empty")
        entry = entries.setdefault(name, Listed(label, read_frame(row, where)))
        if stated is None and entry.label != label:
            raise InputError(f"{where}: {name} has the label {label!r} here and {entry.label!r} before")
        box = read_box([row.get(corner, "") for corner in CORNERS], where, first_pixel)
        if box is not None:
            entry.boxes.append(box)
        if stated is not None:
            stated.read(row, entry, box is not None, where)
        for column, file in row.items():
            if column.startswith(MASK) and file:
                part = column.removeprefix(MASK)
                if entry.masks.setdefault(part, file) != file:
                    raise InputError(f"{where}: {name} has two masks of {part!r}; merge them into one file")
    if not entries:
        raise InputError(f"{path} lists no picture")
    return entries


def _with_findings(
    entries: Mapping[str, Listed], known: Sequence[str] | None, start: Path, path: Path
) -> tuple[list[Sample], tuple[str, ...]]:
    findings, classes = number_findings([sorted(e.findings) for e in entries.values()], known, str(path))
    samples = []
    for (name, entry), own in zip(entries.items(), findings, strict=True):
        masks = {part: start / file for part, file in entry.masks.items()}
        of = tuple(number_findings(entry.box_findings, classes, str(path))[0])
        boxes = tuple(entry.boxes)
        samples.append(
            Sample(name, None, boxes, masks, entry.frame, start / name, findings=own, box_findings=of)
        )
    return samples, classes


def read_rows(path: Path, *columns: str) -> Iterable[tuple[int, dict[str, str]]]:
    """Line number and cells of each row; the named columns must exist."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, restval="", strict=True)
            header = [name.strip() for name in reader.fieldnames or []]
            reader.fieldnames = header
            missing = [name for name in columns if name not in header]
            if missing:
                raise InputError(f"{path} has no column {missing[0]!r}; {did_you_mean(missing[0], header)}")
            corners = [corner for corner in CORNERS if corner in header]
            if corners and len(corners) < len(CORNERS):
                raise InputError(f"{path} has {', '.join(corners)}, but a box needs {', '.join(CORNERS)}")
            for row in reader:
                if None in row:
                    raise InputError(f"{path.name}, line {reader.line_num}: more cells than columns")
                yield reader.line_num, {name: cell.strip() for name, cell in row.items()}
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        detail = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read {path} as a CSV file: {detail}") from error


def read_box(texts: Sequence[str], where: str, first_pixel: int = 0) -> Box | None:
    """Corners counted from `first_pixel` as corners counted from 0; None where no cell is filled."""
    if not any(texts):
        return None
    try:
        return check_box(float(text) - first_pixel for text in texts)
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    except ValueError:
        raise InputError(f"{where}: a box is four numbers; got {', '.join(texts)}") from None


def read_frame(row: dict[str, str], where: str) -> Size | None:
    width, height = row.get("width", ""), row.get("height", "")
    if not width and not height:
        return None
    if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        raise InputError(
            f"{where}: width and height are whole numbers of pixels; got {width!r} and {height!r}"
        )
    return int(width), int(height)


def number_labels(
    texts: Sequence[str], class_names: Sequence[str] | None, path: Path
) -> tuple[list[int | None], list[str]]:
    """Labels as indices into the classes; without class names, labels that are all numbers stay so."""
    texts = ["" if text.lower() == "nan" else text for text in texts]  # an empty cell, as some tools write it
    if not any(texts):
        return [None] * len(texts), []
    if not all(texts):
        raise InputError(
            f"{path}: some pictures have a label and some have none; fill the column or empty it"
        )
    numbers = [_whole(text) for text in texts]
    _check_names([t for t, n in zip(texts, numbers, strict=True) if n is None], class_names, path)
    if class_names is not None:
        classes = list(class_names)
    elif None in numbers:
        if any(n is not None for n in numbers):
            name = texts[numbers.index(None)]
            raise InputError(
                f"{path}: some labels are numbers, but {name!r} is none; correct it, or set class_names"
            )
        classes = sorted(set(texts))
    else:
        classes = [str(k) for k in range(max(n for n in numbers if n is not None) + 1)]
    index = {name: k for k, name in enumerate(classes)}
    labels = [index.get(text, number) for text, number in zip(texts, numbers, strict=True)]
    for text, label in zip(texts, labels, strict=True):
        if label is None or label >= len(classes):
            hint = did_you_mean(text, classes)
            raise InputError(f"{path}: the label {text!r} is none of the {len(classes)} classes; {hint}")
    return labels, classes


def _check_names(texts: Iterable[str], class_names: Sequence[str] | None, path: Path) -> None:
    """Refuse what would become a class of its own though it is none."""
    for text in set(texts) - set(class_names or ()):
        if NEGATIVE.fullmatch(text):
            raise InputError(
                f"{path}: the label {text!r} is negative, but class numbers start at 0; "
                "leave pictures without a label out, or empty the whole column"
            )
        if any(mark in text for mark in SEPARATORS):
            raise InputError(
                f"{path}: the label {text!r} seems to name several classes, but a picture has one here; "
                "choose one, list the name in class_names if it is one class, or set multilabel = true if "
                "pictures have several"
            )


def _whole(text: str) -> int | None:
    """A class's number, also as spreadsheets write it (3.0)."""
    number = text.removesuffix(".0")
    return int(number) if number.isdecimal() else None
