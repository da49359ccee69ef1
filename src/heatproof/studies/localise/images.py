"""Images of a localisation study, checked before it starts: one bad entry must not stop the others.

An image is set aside, with the reason, if it has no box, a box that runs backwards or reaches outside it,
boxes of several classes, or a class that the model's list of classes does not have. The others are written to
one CSV file (images/file_sources.py) for the run.

imagenet.json holds ranges of ImageNet's classes: GROUPS has the two sides that keak2026budget compares with
large subtrees ("imagenet"), and the twelve subtrees from which it draws its classes ("wordnet": hyponyms in
WordNet 3.0 of mammal, bird, ..., fruit; rapeseed is a fruit there). AMBIGUOUS are classes whose images could
as well bear another one's label (two kinds of maillot, sunglass and sunglasses): a network that is called
wrong there is not. The thesis leaves wrong labels out by eye, image by image.

Images with conflicting cues measure the shape bias, shape answers / (shape answers + texture answers)
(geirhos2019texture). An image is stylised (shape and texture are named) or a silhouette (shape alone, so that
the share of shape answers is an accuracy). Answers of other classes do not count towards the bias.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from itertools import starmap
from pathlib import Path
from typing import NamedTuple

import torch

from heatproof.errors import InputError
from heatproof.images import file_sources
from heatproof.images.files import Box, Size, is_picture, open_image, picture_size
from heatproof.models import Model
from heatproof.models.model import all_logits
from heatproof.studies.common import mean_value, write_rows
from heatproof.studies.localise.results import Rows

BACKWARDS_AT_MOST = 0.1  # of the boxes; beyond it the file's order of coordinates is another one
BACKWARDS = "runs backwards"
Span = Sequence[int]  # first and last class; two classes
_DATA = json.loads(files("heatproof.studies.localise").joinpath("imagenet.json").read_text(encoding="utf-8"))
GROUPS: dict[str, dict[str, list[Span]]] = _DATA["groups"]
AMBIGUOUS: list[Span] = _DATA["ambiguous"]
CLASSES = 1000
CUES_AT_ONCE = 64  # images in memory


class Aside(NamedTuple):
    """An image that the study leaves out, with the reason."""

    image: str
    reason: str


@dataclass
class Entry:
    """An image as the lists describe it."""

    image: str
    label: str  # a class's number, WordNet id or name, as written
    boxes: list[Box] = field(default_factory=list)
    frame: Size | None = None
    masks: dict[str, str] = field(default_factory=dict)
    wrong: str = ""


@dataclass(frozen=True)
class Sifted:
    """The folder of the images, those that are used and those that are not."""

    root: Path
    entries: tuple[tuple[Entry, int], ...]  # with the class's number
    classes: tuple[str, ...]
    aside: tuple[Aside, ...]
    left_out: tuple[Aside, ...] = ()  # by the setting `exclude`


def sift(kind: str, path: Path, class_count: int, class_names: Sequence[str] | None = None) -> Sifted:
    """Read an ImageNet-style folder (CSV or XML boxes) or a CSV manifest, and set aside what cannot be used.

    class_count: how many classes the model has. class_names: their names, if the folder has none.
    """
    index: dict[int, tuple[str, str]] = {}
    if kind == "imagenet":
        root, entries, named = _imagenet(path)
        if (file := path / "class_index.json").exists():
            index = file_sources.read_class_index(file)
    else:
        root, (entries, named) = path.parent, _rows(path, "path", "label")
    names = dict(enumerate(class_names or ())) | named | {k: name for k, (_, name) in index.items()}
    numbers = {name: k for k, name in reversed(names.items())} | {w: k for k, (w, _) in index.items()}
    backwards = [entry for entry in entries if BACKWARDS in entry.wrong]
    boxed = sum(bool(entry.boxes or entry.wrong) for entry in entries)
    if len(backwards) > BACKWARDS_AT_MOST * boxed:  # boxes that run forwards by chance would be wrong too
        raise InputError(
            f"{len(backwards)} of {boxed} images have boxes that run backwards, so the numbers seem to be "
            f"x, y, width, height; write x0, y0, x1, y1 (first: {backwards[0].wrong})"
        )
    used: list[tuple[Entry, int]] = []
    aside: list[Aside] = []
    for entry in entries:
        label = int(entry.label) if entry.label.isdecimal() else numbers.get(entry.label)
        known = label is not None and label < class_count and (not index or label in index)
        wrong = entry.wrong or _wrong_boxes(entry, root)
        if not wrong and not known:
            written = f"{entry.label} ({named[label]})" if label in named else repr(entry.label)
            wrong = f"its class {written} is not in the list of {len(index) or class_count} classes"
            wrong += "" if names else "; name the model's classes with --class-names"
        if wrong or label is None:
            aside.append(Aside(entry.image, wrong))
        else:
            used.append((entry, label))
    if not used:
        reason, count, example = reasons(aside)[0]
        raise InputError(
            f"none of the {len(aside)} images in {path} can be used; {count} like {example}: {reason}"
        )
    classes = tuple(names.get(k, f"class {k}") for k in range(class_count))
    return Sifted(root, tuple(used), classes, tuple(aside))


def write_list(sifted: Sifted, path: Path) -> None:
    """The images that are used as a CSV manifest with a row per box."""
    parts = sorted({part for entry, _ in sifted.entries for part in entry.masks})
    rows = (
        [entry.image, label, *(entry.frame or ("", "")), *(f"{v:g}" for v in box)]
        + [entry.masks.get(part, "") for part in parts]
        for entry, label in sifted.entries
        for box in entry.boxes
    )
    write_rows(path, ["path", "label", "width", "height", *file_sources.CORNERS, *parts], rows)


def _imagenet(path: Path) -> tuple[Path, list[Entry], dict[int, str]]:
    """The folder as images/file_sources.py describes it."""
    if not path.is_dir():
        raise InputError(f"there is no folder {path}")
    root = path / "images" if (path / "images").exists() else path
    if (path / "boxes.csv").exists():
        entries, named = _rows(path / "boxes.csv", "file", "class_index")
        if any(not (root / entry.image).exists() for entry in entries):
            nested = file_sources.by_stem(root)
            for entry in entries:
                file = nested.get(Path(entry.image).stem)
                entry.image = file.relative_to(root).as_posix() if file else entry.image
        listed = {entry.image for entry in entries}
        others = (f.relative_to(root).as_posix() for f in file_sources.walk(root) if is_picture(f))
        entries += [Entry(name, "") for name in sorted(others) if name not in listed]
        return root, entries, named
    by_stem = file_sources.by_stem(root)
    annotations = sorted(file for file in file_sources.walk(path) if file.suffix.lower() == ".xml")
    if not annotations:
        raise InputError(f"{path} has neither boxes.csv nor XML box files; localisation needs boxes")
    entries = [_xml(file, by_stem, root) for file in annotations]
    boxed = {Path(entry.image).stem for entry in entries}
    entries += [Entry(f.relative_to(root).as_posix(), "") for stem, f in by_stem.items() if stem not in boxed]
    return root, entries, {}


def _rows(path: Path, file_column: str, label_column: str) -> tuple[list[Entry], dict[int, str]]:
    """A CSV file with a row per box (images/file_sources.py), and the names it gives to classes."""
    entries: dict[str, Entry] = {}
    named: dict[int, str] = {}
    for line, row in file_sources.read_rows(path, file_column, label_column):
        where, name = f"{path.name}, line {line}", row[file_column]
        entry = entries.setdefault(name, Entry(name, row[label_column]))
        entry.masks |= {key: cell for key, cell in row.items() if key.startswith(file_sources.MASK) and cell}
        if row.get("class_name") and row[label_column].isdecimal():
            named[int(row[label_column])] = row["class_name"]
        try:
            entry.frame = file_sources.read_frame(row, where)
            box = file_sources.read_box([row.get(corner, "") for corner in file_sources.CORNERS], where)
        except InputError as error:
            entry.wrong = entry.wrong or str(error)
            continue
        entry.boxes += [] if box is None else [box]
        if entry.label != row[label_column]:
            entry.wrong = f"{where}: it has the class {row[label_column]!r} here and {entry.label!r} before"
    if not entries:
        raise InputError(f"{path} lists no image")
    return list(entries.values()), named


def _xml(file: Path, by_stem: dict[str, Path], root: Path) -> Entry:
    image = by_stem.get(file.stem, root / f"{file.stem}.JPEG").relative_to(root).as_posix()
    try:
        frame, objects = file_sources.read_xml(file, 0)
        label = file_sources.label_of(file, objects, by_stem)
    except InputError as error:
        return Entry(image, "", wrong=str(error))
    others = sorted({name for name, _ in objects} - {label})
    wrong = f"it has boxes of other classes too ({', '.join(others)}), so it shows more than one object"
    boxes = [box for name, box in objects if name == label]
    return Entry(image, label, boxes, frame, wrong=wrong if others else "")


def _wrong_boxes(entry: Entry, root: Path) -> str:
    if not entry.boxes:
        return "it has no box"
    try:
        width, height = entry.frame or picture_size(root / entry.image)
    except InputError:
        return ""  # the loader reports the reason
    for x0, y0, x1, y1 in entry.boxes:
        if x0 < 0 or y0 < 0 or x1 > width or y1 > height:  # tools that count edges write x1 = width
            place = f"the box ({x0:g}, {y0:g}, {x1:g}, {y1:g}) reaches outside the {width}x{height} image"
            return f"{place}; write x0, y0, x1, y1, not x, y, width, height"
    return ""


def reasons(aside: Sequence[Aside]) -> list[tuple[str, int, str]]:
    """Each reason with how many images it set aside and the first of them, the commonest first."""
    first = {of.reason: of.image for of in reversed(aside)}
    return [(reason, n, first[reason]) for reason, n in Counter(of.reason for of in aside).most_common()]


def class_groups(given: str, classes: Sequence[str]) -> dict[str, set[int]]:
    """Classes by group, from a CSV file or ImageNet's own ("imagenet", "wordnet").

    Raises InputError if a class is unknown.
    """
    if given in GROUPS:
        if len(classes) != CLASSES:
            raise InputError(
                f"groups = {given!r} is for ImageNet's 1,000 classes; this network has {len(classes)}"
            )
        spans = GROUPS[given].items()
        return {name: {k for low, high in of for k in range(low, high + 1)} for name, of in spans}
    groups: dict[str, set[int]] = {}
    for line, row in file_sources.read_rows(Path(given), "class", "group"):
        where = f"{Path(given).name}, line {line}"
        groups.setdefault(row["group"], set()).add(class_number(row["class"], classes, where))
    if not groups:
        raise InputError(f"{given} names no group")
    return groups


def class_number(text: str, classes: Sequence[str], where: str) -> int:
    """A class by its number or its name."""
    named = [int(text)] if text.isdecimal() else [k for k, name in enumerate(classes) if name == text]
    if len(named) > 1:
        raise InputError(f"{where}: {text!r} is the name of {len(named)} classes; write the number ({named})")
    if not named or named[0] >= len(classes):
        raise InputError(f"{where}: there is no class {text!r} among the network's {len(classes)}")
    return named[0]


def excluded(given: str, classes: Sequence[str]) -> tuple[dict[int, str], set[str]]:
    """Classes, each with the reason, and images that are left out.

    given: "ambiguous" for ImageNet's, or a text file with a class or an image in each line.
    """
    if given == "ambiguous":
        if len(classes) != CLASSES:
            raise InputError(f"the ambiguous labels are ImageNet's; this network has {len(classes)} classes")
        return {
            label: f"its label is ambiguous: {classes[label]} ({label}) against {classes[other]} ({other})"
            for pair in AMBIGUOUS for label, other in (pair, pair[::-1])
        }, set()  # fmt: skip
    path = Path(given)
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {given}, the list of what is left out: {error}") from error
    named = [line for line in lines if line and not line.startswith("#")]
    labels = {class_number(line, classes, given) for line in named if line.isdecimal() or line in classes}
    images = {line for line in named if not line.isdecimal() and line not in classes}
    return dict.fromkeys(labels, f"its class is listed in {path.name}"), images


def without(sifted: Sifted, exclude: str) -> Sifted:
    """Without the classes and images that `exclude` names."""
    labels, images = excluded(exclude, sifted.classes)
    left_out = {
        entry.image: labels.get(label, f"it is listed in {Path(exclude).name}")
        for entry, label in sifted.entries
        if label in labels or entry.image in images
    }
    used = tuple(pair for pair in sifted.entries if pair[0].image not in left_out)
    if not used:
        raise InputError(f"no image is left: {exclude} leaves out all {len(sifted.entries)}")
    return replace(sifted, entries=used, left_out=tuple(starmap(Aside, left_out.items())))


class CueImage(NamedTuple):
    """An image and the classes of its cues; a silhouette has no texture."""

    path: Path
    shape: frozenset[int]
    texture: frozenset[int]


def read_cues(path: Path, classes: Sequence[str], groups: Mapping[str, set[int]]) -> list[CueImage]:
    """Read the list; raises InputError for unknown classes and for cues that share a class."""
    images = []
    for line, row in file_sources.read_rows(path, "path", "shape"):
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


def cue_rows(model: Model, images: Sequence[CueImage], seed: int = 0) -> Rows:
    """Answers to stylised images and to silhouettes, each in a row."""
    answers: list[int] = []
    for start in range(0, len(images), CUES_AT_ONCE):
        opened = (open_image(image.path) for image in images[start : start + CUES_AT_ONCE])
        inputs = torch.stack([model.preprocess(picture) for picture in opened])
        answers += model.predicted(all_logits(model, inputs)).tolist()
    rows: Rows = []
    for name, stylised in (("stylised", True), ("silhouettes", False)):
        both = [(a in i.shape, a in i.texture) for i, a in zip(images, answers, strict=True)
                if bool(i.texture) is stylised]  # fmt: skip
        decided = [float(shape) for shape, texture in both if shape or texture]
        counts = len(both), sum(s for s, _ in both), sum(t for _, t in both), len(both) - len(decided)
        bias = mean_value(decided, seed) if stylised else None
        rows += [(name, *counts, bias, mean_value((float(s) for s, _ in both), seed))] if both else []
    return rows
