"""Pictures with boxes, looked through before a study starts: one bad entry must not stop the others.

A picture is set aside, with the reason, where it has no box, a box that runs backwards or reaches outside it,
boxes of several classes, or a class that the model's list of classes does not have. The others are written to
one CSV file (see images/csv.py), which the run reads. Where so many boxes run backwards that the file
seems to hold x, y, width, height, nothing is taken from it: the boxes that run forwards by chance would be
wrong too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from heatproof.errors import InputError
from heatproof.images import csv, imagenet
from heatproof.images.files import Box, Size, picture_size
from heatproof.studies.skeleton import write_rows

BACKWARDS_AT_MOST = 0.1  # of the boxes; beyond it the file's order of coordinates is another one
BACKWARDS = "runs backwards"


class Aside(NamedTuple):
    """A picture that the study leaves out, and why."""

    image: str
    reason: str


@dataclass
class Picture:
    """What the lists say about one picture."""

    image: str
    label: str  # a class's number, WordNet id or name, as written
    boxes: list[Box] = field(default_factory=list)
    frame: Size | None = None
    masks: dict[str, str] = field(default_factory=dict)
    wrong: str = ""


@dataclass(frozen=True)
class Sifted:
    """Where the pictures lie, which are used, which are not."""

    root: Path
    entries: tuple[tuple[Picture, int], ...]  # with the class's number
    classes: tuple[str, ...]
    aside: tuple[Aside, ...]
    left_out: tuple[Aside, ...] = ()  # as the user asked


def sift(kind: str, path: Path, class_count: int, class_names: Sequence[str] | None = None) -> Sifted:
    """Read an ImageNet-style folder (CSV or XML boxes) or a CSV manifest, and sort out what cannot be used.

    class_count: how many classes the model has. class_names: their names, where the folder has none.
    """
    index: dict[int, tuple[str, str]] = {}
    if kind == "imagenet":
        root, entries, named = _imagenet(path)
        if (file := path / "class_index.json").exists():
            index = imagenet.read_class_index(file)
    else:
        root, (entries, named) = path.parent, _rows(path, "path", "label")
    numbers = {wnid: k for k, (wnid, _) in index.items()}
    names = dict(enumerate(class_names or ())) | named | {k: name for k, (_, name) in index.items()}
    by_name = {name: k for k, name in reversed(names.items())}
    _refuse_other_order(entries)
    kept: list[tuple[Picture, int]] = []
    aside: list[Aside] = []
    for entry in entries:
        label = int(entry.label) if entry.label.isdecimal() else numbers.get(entry.label)
        label = by_name.get(entry.label) if label is None else label
        known = label is not None and label < class_count and (not index or label in index)
        wrong = entry.wrong or _wrong(entry, root)
        if not wrong and not known:
            shown = f"{entry.label} ({named[label]})" if label in named else repr(entry.label)
            wrong = f"its class {shown} is not in the list of {len(index) or class_count} classes"
            wrong += "" if names else "; name the model's classes with --class-names"
        if wrong or label is None:
            aside.append(Aside(entry.image, wrong))
        else:
            kept.append((entry, label))
    if not kept:
        reason, count, example = reasons(aside)[0]
        raise InputError(
            f"none of the {len(aside)} pictures in {path} can be used; {count} like {example}: {reason}"
        )
    classes = tuple(names.get(k, f"class {k}") for k in range(class_count))
    return Sifted(root, tuple(kept), classes, tuple(aside))


def write_list(sifted: Sifted, path: Path) -> Path:
    """The pictures that are used as a CSV manifest with a row per box."""
    parts = sorted({part for entry, _ in sifted.entries for part in entry.masks})
    header = ["path", "label", "width", "height", "x0", "y0", "x1", "y1", *parts]
    rows = (
        [entry.image, label, *(entry.frame or ("", "")), *(f"{v:g}" for v in box)]
        + [entry.masks.get(part, "") for part in parts]
        for entry, label in sifted.entries
        for box in entry.boxes
    )
    return write_rows(path, header, rows)


def _imagenet(path: Path) -> tuple[Path, list[Picture], dict[int, str]]:
    """The folder as images/imagenet.py describes it."""
    if not path.is_dir():
        raise InputError(f"there is no folder {path}")
    root = path / "images" if (path / "images").exists() else path
    if (path / "boxes.csv").exists():
        entries, named = _rows(path / "boxes.csv", "file", "class_index")
        if any(not (root / entry.image).exists() for entry in entries):
            nested = imagenet.by_stem(root)
            for entry in entries:
                file = nested.get(Path(entry.image).stem)
                entry.image = file.relative_to(root).as_posix() if file else entry.image
        listed = {entry.image for entry in entries}
        others = (f.relative_to(root).as_posix() for f in imagenet.walk(root) if imagenet.is_picture(f))
        entries += [Picture(name, "") for name in sorted(others) if name not in listed]
        return root, entries, named
    files = imagenet.by_stem(root)
    found = sorted(file for file in imagenet.walk(path) if file.suffix.lower() == ".xml")
    if not found:
        raise InputError(f"{path} has neither boxes.csv nor XML box files; localisation needs boxes")
    entries = [_xml(file, files, root) for file in found]
    boxed = {Path(entry.image).stem for entry in entries}
    entries += [Picture(f.relative_to(root).as_posix(), "") for stem, f in files.items() if stem not in boxed]
    return root, entries, {}


def _rows(path: Path, file_column: str, label_column: str) -> tuple[list[Picture], dict[int, str]]:
    """A CSV file with a row per box, as images/csv.py describes it, and the names it gives to classes."""
    entries: dict[str, Picture] = {}
    named: dict[int, str] = {}
    for line, row in csv.read_rows(path, file_column, label_column):
        where, name = f"{path.name}, line {line}", row[file_column]
        entry = entries.setdefault(name, Picture(name, row[label_column]))
        entry.masks |= {key: cell for key, cell in row.items() if key.startswith(csv.MASK) and cell}
        if row.get("class_name") and row[label_column].isdecimal():
            named[int(row[label_column])] = row["class_name"]
        try:
            entry.frame = csv.read_frame(row, where)
            box = csv.read_box([row.get(corner, "") for corner in csv.CORNERS], where)
        except InputError as error:
            entry.wrong = entry.wrong or str(error)
            continue
        entry.boxes += [] if box is None else [box]
        if entry.label != row[label_column]:
            entry.wrong = f"{where}: it has the class {row[label_column]!r} here and {entry.label!r} before"
    if not entries:
        raise InputError(f"{path} lists no picture")
    return list(entries.values()), named


def _xml(file: Path, files: dict[str, Path], root: Path) -> Picture:
    picture = files.get(file.stem, root / f"{file.stem}.JPEG").relative_to(root).as_posix()
    try:
        annotation = imagenet.read_xml(file, 0)
        label = imagenet.label_of(file, annotation, files)
    except InputError as error:
        return Picture(picture, "", wrong=str(error))
    frame, objects = annotation
    others = sorted({name for name, _ in objects} - {label})
    wrong = f"it has boxes of other classes too ({', '.join(others)}), so it shows more than one object"
    boxes = [box for name, box in objects if name == label]
    return Picture(picture, label, boxes, frame, wrong=wrong if others else "")


def _wrong(entry: Picture, root: Path) -> str:
    if not entry.boxes:
        return "it has no box"
    try:
        width, height = entry.frame or picture_size(root / entry.image)
    except InputError:
        return ""  # the loader will say why
    for box in entry.boxes:
        # x1 = width is what tools write that count edges instead of pixels.
        if box[0] < 0 or box[1] < 0 or box[2] > width or box[3] > height:
            shown = ", ".join(f"{v:g}" for v in box)
            return (
                f"the box ({shown}) reaches outside the {width}x{height} picture; "
                "write x0, y0, x1, y1, not x, y, width, height"
            )
    return ""


def _refuse_other_order(entries: Sequence[Picture]) -> None:
    backwards = [entry for entry in entries if BACKWARDS in entry.wrong]
    boxed = sum(bool(entry.boxes or entry.wrong) for entry in entries)
    if len(backwards) > BACKWARDS_AT_MOST * boxed:
        raise InputError(
            f"{len(backwards)} of {boxed} pictures have boxes that run backwards, so the numbers seem to be "
            f"x, y, width, height; write x0, y0, x1, y1 (first: {backwards[0].wrong})"
        )


def reasons(aside: Sequence[Aside]) -> list[tuple[str, int, str]]:
    """Each reason with how many pictures it set aside and the first of them, the commonest first."""
    first = {one.reason: one.image for one in reversed(aside)}
    return [(reason, n, first[reason]) for reason, n in Counter(one.reason for one in aside).most_common()]
