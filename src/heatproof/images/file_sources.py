"""Sources of image files: folders, CSV manifests, ImageNet and Pascal VOC boxes, DICOM, Hugging Face data.

A CSV manifest lists paths, labels, boxes and masks:

    path,label,x0,y0,x1,y1,mask_finder
    photos/1.jpg,dog,30,40,199,180,
    photos/1.jpg,dog,250,60,330,170,
    photos/2.jpg,cat,,,,,masks/2.png

Only `path` is required; paths are relative to the CSV file. Rows of one path, one per box, belong to one
image. A label is a class's name or its number from 0 on; all images have one, or none has. Box corners are
pixel indices, both inside the box; the first pixel is 0, or 1 with `first_pixel=1` (Pascal VOC). `width` and
`height` are those of the image the boxes were drawn on. A column mask_NAME holds the file of the mask of the
part NAME. Other columns are ignored. Multi-label images (`multilabel` or `label_columns`, docs/findings.md)
have the findings of all their rows. A box belongs to those that the label beside it names, a mask to the
finding of its name, or to all. The folder of an imagenet source holds

    ROOT/images/...JPEG          flat, or in a folder per class; any depth (or ROOT itself)
    ROOT/boxes.csv               file, class_index, class_name, width, height, x0, y0, x1, y1; a row per box
    ROOT/.../NAME.xml            or: one file per image, with the image's name, in the Pascal VOC form
    ROOT/class_index.json        {"0": ["n01440764", "tench"], ...}; where present, it orders the classes

Corners of ImageNet's XML files count from 0, those of Pascal VOC from 1. Only images with boxes are samples.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from heatproof.errors import InputError, about, did_you_mean, first_line, need
from heatproof.images import findings
from heatproof.images.files import Box, Size, check_box, is_dicom_name, is_picture, picture_reader, read_dicom
from heatproof.images.source import Sample, Source, file_source

LEVELS = ("top", "parent")
CORNERS = ("x0", "y0", "x1", "y1")
XML_CORNERS = ("xmin", "ymin", "xmax", "ymax")
MASK = "mask_"
SAVED_DATASET = ("dataset_info.json", "dataset_dict.json", "state.json")


def walk(root: Path) -> Iterator[Path]:
    """Every file that is not hidden, through links to folders too, each folder once."""

    def refuse(error: OSError) -> None:
        raise InputError(f"cannot list the folder {error.filename}: {error.strerror}") from error

    seen: set[str] = set()
    for folder, below, names in os.walk(root, onerror=refuse, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:
            below.clear()
            continue
        seen.add(real)
        below[:] = [name for name in below if not name.startswith(".")]
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def open_folder(
    path: str | Path, wanted: Callable[[Path], bool] = is_picture, *,
    class_names: Sequence[str] | None = None, level: str = "top", bits: int | None = None,
) -> Source:  # fmt: skip
    """Images below CLASS/..., or in a folder without class folders, which gives no labels.

    class_names: the model's classes in its own order; else the folders' names, sorted. level: whether the
    folder that names the class is the topmost ("top") or the one the image lies in ("parent"). bits: of
    16-bit greys, else inferred (files.py). wanted: which files are images.
    """
    read, root = picture_reader(bits), Path(path)
    if level not in LEVELS:
        raise InputError(f"level is one of {', '.join(LEVELS)}; got {level!r}")
    if not root.is_dir():
        raise InputError(f"there is no folder {root}")
    files = sorted((file.relative_to(root) for file in walk(root) if wanted(file)), key=Path.as_posix)
    if not files:
        raise InputError(f"there is no image in {root}")
    labels, classes = folder_labels(files, "images", class_names, level, root)
    named = zip(files, labels, strict=True)
    samples = [Sample(file.as_posix(), label, content=root / file) for file, label in named]
    return file_source(samples, classes, read)


def folder_labels(
    files: Sequence[Path], noun: str, class_names: Sequence[str] | None, level: str, root: Path
) -> tuple[Sequence[int | None], tuple[str, ...]]:
    """Labels by the folders that name the classes, and the class names; none without class folders."""
    loose = [file for file in files if len(file.parts) == 1]
    if 0 < len(loose) < len(files):
        raise InputError(
            f"{root} holds class folders and also {noun} outside them, such as {loose[0]}; move those away"
        )
    if loose:
        return [None] * len(files), ()
    folders = [file.parts[0] if level == "top" else file.parts[-2] for file in files]
    classes = tuple(class_names) if class_names is not None else tuple(sorted(set(folders)))
    if unknown := sorted(set(folders) - set(classes)):
        raise InputError(f"{root} has a folder {unknown[0]!r} that class_names does not list")
    number = {name: k for k, name in enumerate(classes)}
    return [number[folder] for folder in folders], classes


def open_dicom(
    path: str | Path, *, window: tuple[float, float] | None = None, first_pixel: int = 0,
    multilabel: bool = False, label_columns: Sequence[str] | None = None, **listed: Any,
) -> Source:  # fmt: skip
    """DICOM files of a folder or CSV manifest (see open_files, open_csv). window: centre, width."""
    need("pydicom", "dicom")
    if window is not None and not (len(window) == 2 and window[1] >= 1):
        raise InputError(f"a window is a centre and a width of at least 1; got {window}")
    stated = {"first_pixel": first_pixel, "multilabel": multilabel, "label_columns": label_columns}
    source = open_files(path, is_dicom_name, **listed, csv_options=stated)
    return file_source(source.samples, source.classes, partial(read_dicom, window=window))


def open_files(
    path: str | Path, wanted: Callable[[Path], bool], csv_options: Mapping[str, Any] | None = None, *,
    class_names: Sequence[str] | None = None, level: str = "top", root: str | Path | None = None,
) -> Source:  # fmt: skip
    """Files of a folder (see open_folder), or of a CSV manifest (see open_csv), which has further options."""
    if Path(path).is_file():
        return open_csv(path, root=root, class_names=class_names, **(csv_options or {}))
    return open_folder(path, wanted, class_names=class_names, level=level)


@dataclass
class Listed:
    """The rows of one image. Findings are gathered only of multi-label images."""

    label: str
    frame: Size | None
    row: Mapping[str, str]  # the first
    boxes: list[Box] = field(default_factory=list)
    masks: dict[str, str] = field(default_factory=dict)
    findings: set[str] = field(default_factory=set)
    box_findings: list[tuple[str, ...]] = field(default_factory=list)


def open_csv(
    path: str | Path, *, root: str | Path | None = None, class_names: Sequence[str] | None = None,
    first_pixel: int = 0, path_column: str = "path", label_column: str = "label", bits: int | None = None,
    multilabel: bool = False, label_columns: Sequence[str] | None = None,
) -> Source:  # fmt: skip
    """Images of a CSV manifest. root: where its paths start; else the CSV file's folder.

    class_names: the model's classes in its own order; else names are sorted and numbers name themselves.
    bits: the depth of 16-bit greys, else inferred (files.py). multilabel, label_columns: see the top.
    """
    read, path = picture_reader(bits), Path(path)
    columns, known = tuple(label_columns or ()), class_names or label_columns
    several = multilabel or bool(columns)
    entries = read_entries(path, path_column, label_column, first_pixel, columns, several, known)
    start = Path(root) if root is not None else path.parent
    stated: Sequence[tuple[int, ...] | None] = [None] * len(entries)
    labels: Sequence[int | None] = [None] * len(entries)
    if several:
        rows = [sorted(entry.findings) for entry in entries.values()]
        stated, classes = findings.number_findings(rows, known, str(path))
    else:
        texts = [entry.label for entry in entries.values()]
        labels, classes = findings.number_labels(texts, class_names, path)
    samples = []
    for (name, entry), label, own in zip(entries.items(), labels, stated, strict=True):
        masks = {part: start / file for part, file in entry.masks.items()}
        of = tuple(findings.number_findings(entry.box_findings, classes, str(path))[0]) if several else ()
        samples.append(Sample(
            name, label, tuple(entry.boxes), masks, entry.frame, start / name, findings=own, box_findings=of,
        ))  # fmt: skip
    return file_source(samples, classes, read)


def read_entries(
    path: Path, path_column: str, label_column: str, first_pixel: int = 0, columns: Sequence[str] = (),
    several: bool = False, known: Sequence[str] | None = None,
) -> dict[str, Listed]:  # fmt: skip
    """The rows of a CSV file, gathered by image.

    columns: further ones that must exist; of multi-label images (several), one of 0 and 1 per label.
    """
    entries: dict[str, Listed] = {}
    for line, row in read_rows(path, path_column, *columns):
        where = f"{path.name}, line {line}"
        name, label = row[path_column], row.get(label_column, "")
        if not name:
            raise InputError(f"{where}: the column {path_column!r} is empty")
        entry = entries.setdefault(name, Listed(label, read_frame(row, where), row))
        if not several and entry.label != label:
            raise InputError(f"{where}: {name} has the label {label!r} here and {entry.label!r} before")
        box = read_box([row.get(corner, "") for corner in CORNERS], where, first_pixel)
        if box is not None:
            entry.boxes.append(box)
        if several:
            named = findings.named_findings(label, known)
            stated = findings.marked_findings(row, columns, where) if columns else named
            if absent := [finding for finding in named if finding not in stated]:
                raise InputError(f"{where}: the label names {absent[0]!r}, but its column is not 1; set it")
            entry.findings.update(stated)
            if box is not None and not named and len(stated) != 1:
                many = f"{len(stated)} labels" if stated else "no label"
                raise InputError(f"{where}: a box in a row with {many}; name its own in {label_column!r}")
            if box is not None:
                entry.box_findings.append(named or stated)
        for column, file in row.items():
            if column.startswith(MASK) and file:
                part = column.removeprefix(MASK)
                if entry.masks.setdefault(part, file) != file:
                    raise InputError(f"{where}: {name} has two masks of {part!r}; merge them into one file")
    if not entries:
        raise InputError(f"{path} lists no image")
    return entries


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
    with about(where):
        try:
            corners = [float(text) - first_pixel for text in texts]
        except ValueError:
            raise InputError(f"a box is four numbers; got {', '.join(texts)}") from None
        return check_box(corners)


def read_frame(row: Mapping[str, str], where: str) -> Size | None:
    width, height = row.get("width", ""), row.get("height", "")
    if not width and not height:
        return None
    if not (width.isdecimal() and height.isdecimal() and int(width) and int(height)):
        raise InputError(f"{where}: width and height are whole numbers; got {width!r} and {height!r}")
    return int(width), int(height)


def open_imagenet(
    path: str | Path, *, boxes: str | Path | None = None, images: str | Path | None = None,
    class_index: str | Path | None = None, first_pixel: int = 0, bits: int | None = None,
) -> Source:  # fmt: skip
    """Images with boxes. boxes: a CSV file or a folder of XML files. All paths have defaults below `path`.

    Labels are the numbers of class_index.json or of the CSV file; without either, classes in sorted order.
    bits: the depth of 16-bit greys, else inferred (files.py).
    """
    read = picture_reader(bits)
    root = Path(path)
    if not root.is_dir():
        raise InputError(f"there is no folder {root}")
    folder, drawn = (
        Path(given) if given is not None else root / usual if (root / usual).exists() else root
        for given, usual in ((images, "images"), (boxes, "boxes.csv"))
    )
    index_file = Path(class_index) if class_index is not None else root / "class_index.json"
    index = read_class_index(index_file) if class_index is not None or index_file.exists() else {}
    if drawn.is_dir():
        samples, names = _from_xml(drawn, folder, index, first_pixel)
    else:
        samples, names = _from_csv(drawn, folder, first_pixel)
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
    """Image files by their names without ending, which are unique in ImageNet."""
    files: dict[str, Path] = {}
    for file in walk(root):
        if is_picture(file) and files.setdefault(file.stem, file) != file:
            raise InputError(f"{file} and {files[file.stem]} have one name, so a box file could mean either")
    return files


def _from_csv(path: Path, root: Path, first_pixel: int) -> tuple[list[Sample], dict[int, str]]:
    entries = read_entries(path, "file", "class_index", first_pixel, ["class_index"])
    nested = {} if all((root / name).exists() for name in entries) else by_stem(root)
    samples, names = [], {}
    for name, entry in entries.items():
        if not entry.label.isdecimal():
            raise InputError(f"{path.name}: class_index of {name} is {entry.label!r}, not a number")
        number = int(entry.label)
        names[number] = entry.row.get("class_name") or entry.label
        file = root / name if (root / name).exists() else nested.get(Path(name).stem, root / name)
        samples.append(Sample(name, number, tuple(entry.boxes), frame=entry.frame, content=file))
    return samples, names


def _from_xml(
    folder: Path, root: Path, index: Mapping[int, tuple[str, str]], first_pixel: int
) -> tuple[list[Sample], dict[int, str]]:
    annotations = sorted(file for file in walk(folder) if file.suffix.lower() == ".xml")
    if not annotations:
        raise InputError(f"there is no XML box file in {folder}, and no boxes.csv was given")
    files = by_stem(root)
    drawn = {file: read_xml(file, first_pixel) for file in annotations}
    labels = {file: label_of(file, objects, files) for file, (_, objects) in drawn.items()}
    wnids = {wnid: number for number, (wnid, _) in index.items()}
    numbers = wnids or {name: k for k, name in enumerate(sorted(set(labels.values())))}
    samples = []
    for file, (frame, objects) in drawn.items():
        label = labels[file]
        if label not in numbers:
            raise InputError(f"{file.name}: the class {label!r} is not in the class index")
        image = files.get(file.stem, root / f"{file.stem}.JPEG")
        boxes = tuple(box for name, box in objects if name == label)
        others = len(objects) - len(boxes)
        name = image.relative_to(root).as_posix()
        samples.append(Sample(name, numbers[label], boxes, frame=frame, content=image, others=others))
    return samples, {number: name for name, number in numbers.items()}


def read_xml(file: Path, first_pixel: int) -> tuple[Size | None, list[tuple[str, Box]]]:
    """Width and height of the image, and each object's class and box."""
    try:
        tree = ElementTree.parse(file)
    except (OSError, ElementTree.ParseError) as error:
        raise InputError(f"cannot read {file} as a box file: {error}") from error
    sides = {side: (tree.findtext(f"size/{side}") or "").strip() for side in ("width", "height")}
    objects = []
    for node in tree.iterfind("object"):
        corners = [(node.findtext(f"bndbox/{corner}") or "").strip() for corner in XML_CORNERS]
        box = read_box(corners, file.name, first_pixel)
        if box is None:
            raise InputError(f"{file.name}: an object has no bndbox")
        objects.append(((node.findtext("name") or "").strip(), box))
    return read_frame(sides, file.name), objects


def label_of(file: Path, objects: Iterable[tuple[str, Box]], files: Mapping[str, Path]) -> str:
    """The class of the objects; where they differ, the one that the image's folder is named after."""
    names = {name for name, _ in objects}
    folder = files[file.stem].parent.name if file.stem in files else ""
    if folder in names or len(names) == 1:
        return folder if folder in names else names.pop()
    listed = ", ".join(sorted(names)) or "none"
    raise InputError(f"{file.name}: an image has one class, but its objects have these: {listed}")


def open_hf(
    path: str | Path, *, split: str | None = None, name: str | None = None, image_column: str = "image",
    label_column: str | None = "label", class_names: Sequence[str] | None = None, bits: int | None = None,
) -> Source:  # fmt: skip
    """A Hugging Face dataset: a folder written by save_to_disk, or anything load_dataset takes.

    Images are decoded here, not by the datasets library, so that a broken one is reported. split: required
    where there are several; name: the dataset's configuration. bits: as for open_folder.
    """
    read = picture_reader(bits)
    datasets = need("datasets", "datasets")
    table = _load_dataset(datasets, str(path), split, name)
    for column in filter(None, (image_column, label_column)):
        if column not in table.column_names:
            raise InputError(f"{path} has no column {column!r}; {did_you_mean(column, table.column_names)}")
    labels, stated, classes = _dataset_labels(table, label_column, class_names, path)
    images = table.select_columns([image_column]).cast_column(image_column, datasets.Image(decode=False))

    def read_row(sample: Sample) -> Any:
        cell = images[sample.content][image_column]
        if cell is None:
            raise InputError("the row has no image")
        return read(Path(cell["path"]) if cell["bytes"] is None else io.BytesIO(cell["bytes"]))

    each = enumerate(zip(labels, stated, strict=True))
    samples = tuple(Sample(f"{i:06d}", label, content=i, findings=own) for i, (label, own) in each)
    mark = str(table._fingerprint)  # the library's own hash of the data and what was done to it
    return Source(samples, classes, read_row, lambda _: mark)


def _load_dataset(datasets: Any, path: str, split: str | None, name: str | None) -> Any:
    try:
        saved = any((Path(path) / file).exists() for file in SAVED_DATASET)
        tables = datasets.load_from_disk(path) if saved else datasets.load_dataset(path, name, split=split)
    except Exception as error:  # the library fails in many ways: no network, no such split, no such folder
        raise InputError(f"cannot load the dataset {path}: {first_line(error)}") from error
    if not hasattr(tables, "keys"):
        return tables
    names = list(tables.keys())
    if split is None and len(names) == 1:
        return tables[names[0]]
    if split not in names:
        raise InputError(f"{path} has the splits {', '.join(names)}; set split to one of them")
    return tables[split]


def _dataset_labels(
    table: Any, column: str | None, class_names: Sequence[str] | None, path: object
) -> tuple[Sequence[int | None], Sequence[tuple[int, ...] | None], tuple[str, ...]]:
    """Labels, the findings of each image where the column holds lists, and the classes' names."""
    nothing = [None] * len(table)
    if column is None:
        return nothing, nothing, ()
    values = list(table[column])
    feature = table.features[column]
    if findings.lists_several(values):
        named = class_names or getattr(getattr(feature, "feature", feature), "names", None)
        stated, classes = findings.number_findings([value or () for value in values], named, str(path))
        return nothing, stated, classes
    if values and all(isinstance(value, int) for value in values):
        named = class_names or getattr(feature, "names", None)
        labels, classes = findings.check_labels(values, len(values), named)
    else:
        texts = ["" if value is None else str(value) for value in values]
        labels, classes = findings.number_labels(texts, class_names, path)
    return labels, nothing, classes
