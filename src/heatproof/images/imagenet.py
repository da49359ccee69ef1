"""ImageNet photographs with their box files: XML in the Pascal VOC form, or one CSV file.

    ROOT/images/...JPEG          flat, or in a folder per class; any depth (or ROOT itself)
    ROOT/boxes.csv               file, class_index, class_name, width, height, x0, y0, x1, y1; a row per box
    ROOT/.../NAME.xml            or: one file per picture, with the picture's name
    ROOT/class_index.json        {"0": ["n01440764", "tench"], ...}; where present, it orders the classes

ImageNet's XML files look like Pascal VOC's, but its corners count from 0 (a box at the left edge has xmin 0,
one at the right edge of a 500-pixel picture xmax 499), where Pascal VOC's count from 1: first_pixel=1 for
those. Both corners belong to the box. Only pictures with a box file are samples.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

from heatproof.errors import InputError
from heatproof.images.csv import read_box, read_entries, read_frame, read_rows
from heatproof.images.files import Size, picture_reader
from heatproof.images.folder import is_picture, walk
from heatproof.images.source import Sample, Source, file_source

XML_CORNERS = ("xmin", "ymin", "xmax", "ymax")


def open_imagenet(
    path: str | Path,
    *,
    boxes: str | Path | None = None,
    images: str | Path | None = None,
    class_index: str | Path | None = None,
    first_pixel: int = 0,
    bits: int | None = None,
) -> Source:
    """Pictures with boxes. boxes: a CSV file or a folder of XML files. All paths are found by themselves.

    Labels are the numbers of class_index.json or of the CSV file; without either, classes in sorted order.
    bits: the depth of 16-bit greys, else found (files.py).
    """
    read = picture_reader(bits)
    root = Path(path)
    if not root.is_dir():
        raise InputError(f"there is no folder {root}")
    pictures, drawn = (
        Path(given) if given is not None else root / usual if (root / usual).exists() else root
        for given, usual in ((images, "images"), (boxes, "boxes.csv"))
    )
    index_file = Path(class_index) if class_index is not None else root / "class_index.json"
    index = read_class_index(index_file) if class_index is not None or index_file.exists() else {}
    if drawn.is_dir():
        samples, names = _from_xml(drawn, pictures, index, first_pixel)
    else:
        samples, names = _from_csv(drawn, pictures, first_pixel)
    names |= {number: name for number, (_, name) in index.items()}
    classes = [names.get(k, str(k)) for k in range(max(names) + 1)]
    return file_source(samples, classes, read)


def read_class_index(path: Path) -> dict[int, tuple[str, str]]:
    """Class number -> (WordNet id, name)."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        return {int(number): (str(wnid), str(name)) for number, (wnid, name) in table.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise InputError(f'{path} is no class index such as {{"0": ["n01440764", "tench"]}}') from error


def by_stem(root: Path) -> dict[str, Path]:
    """Picture files by their names without ending, which tell ImageNet's files apart in any folder."""
    files: dict[str, Path] = {}
    for file in walk(root):
        if is_picture(file) and files.setdefault(file.stem, file) != file:
            raise InputError(f"{file} and {files[file.stem]} have one name, so a box file could mean either")
    return files


def _from_csv(path: Path, root: Path, first_pixel: int) -> tuple[list[Sample], dict[int, str]]:
    names: dict[int, str] = {}
    for line, row in read_rows(path, "file", "class_index"):
        if not row["class_index"].isdecimal():
            raise InputError(f"{path.name}, line {line}: class_index is {row['class_index']!r}, not a number")
        names[int(row["class_index"])] = row.get("class_name") or row["class_index"]
    entries = read_entries(path, "file", "class_index", first_pixel)
    nested = {} if all((root / name).exists() for name in entries) else by_stem(root)
    samples = []
    for name, entry in entries.items():
        file = root / name if (root / name).exists() else nested.get(Path(name).stem, root / name)
        boxes = tuple(entry.boxes)
        samples.append(Sample(name, int(entry.label), boxes, frame=entry.frame, content=file))
    return samples, names


def _from_xml(
    folder: Path, root: Path, index: Mapping[int, tuple[str, str]], first_pixel: int
) -> tuple[list[Sample], dict[int, str]]:
    found = sorted(file for file in walk(folder) if file.suffix.lower() == ".xml")
    if not found:
        raise InputError(f"there is no XML box file in {folder}, and no boxes.csv was given")
    files = by_stem(root)
    drawn = {file: read_xml(file, first_pixel) for file in found}
    labels = {file: label_of(file, annotation, files) for file, annotation in drawn.items()}
    wnids = {wnid: number for number, (wnid, _) in index.items()}
    numbers = wnids or {name: k for k, name in enumerate(sorted(set(labels.values())))}
    samples = []
    for file, (frame, objects) in drawn.items():
        label = labels[file]
        if label not in numbers:
            raise InputError(f"{file.name}: the class {label!r} is not in the class index")
        picture = files.get(file.stem, root / f"{file.stem}.JPEG")
        boxes = tuple(box for name, box in objects if name == label)
        name = picture.relative_to(root).as_posix()
        others = len(objects) - len(boxes)
        samples.append(Sample(name, numbers[label], boxes, frame=frame, content=picture, others=others))
    return samples, {number: name for name, number in numbers.items()}


Annotation = tuple[Size | None, list[tuple[str, tuple[float, float, float, float]]]]


def read_xml(file: Path, first_pixel: int) -> Annotation:
    """Width and height of the picture, and each object's class and box."""
    try:
        tree = ElementTree.parse(file)
    except (OSError, ElementTree.ParseError) as error:
        raise InputError(f"cannot read {file} as a box file: {error}") from error
    sides = {side: (tree.findtext(f"size/{side}") or "").strip() for side in ("width", "height")}
    frame = read_frame(sides, file.name)
    objects = []
    for node in tree.iterfind("object"):
        corners = [(node.findtext(f"bndbox/{corner}") or "").strip() for corner in XML_CORNERS]
        box = read_box(corners, file.name, first_pixel)
        if box is None:
            raise InputError(f"{file.name}: an object has no bndbox")
        objects.append(((node.findtext("name") or "").strip(), box))
    return frame, objects


def label_of(file: Path, annotation: Annotation, files: Mapping[str, Path]) -> str:
    """The class of the objects; where they differ, the one the picture's folder is named after."""
    names = {name for name, _ in annotation[1]}
    folder = files[file.stem].parent.name if file.stem in files else ""
    if folder in names or len(names) == 1:
        return folder if folder in names else names.pop()
    shown = ", ".join(sorted(names)) or "none"
    raise InputError(f"{file.name}: a picture has one class, but its objects have these: {shown}")
