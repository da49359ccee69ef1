"""A folder of pictures, or of DICOM files: one subfolder per class, or no subfolders and no labels."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from heatproof.errors import InputError, need
from heatproof.images.csv import open_csv
from heatproof.images.dicom import is_dicom_name, read_dicom
from heatproof.images.files import picture_reader, suffixes
from heatproof.images.source import Sample, Source, file_source

LEVELS = ("top", "parent")


def is_picture(file: Path) -> bool:
    return file.suffix.lower() in suffixes()


def open_folder(
    path: str | Path,
    wanted: Callable[[Path], bool] = is_picture,
    *,
    class_names: Sequence[str] | None = None,
    level: str = "top",
    bits: int | None = None,
) -> Source:
    """Pictures below CLASS/..., or in a folder without class folders, which gives no labels.

    class_names: the model's classes in its own order; else the folders' names, sorted. level: whether the
    folder that names the class is the topmost ("top") or the one the picture lies in ("parent", for trees
    such as train/CLASS and test/CLASS taken together). bits: of 16-bit greys, else found (files.py). wanted:
    which files are pictures.
    """
    read, root = picture_reader(bits), Path(path)
    if level not in LEVELS:
        raise InputError(f"level is one of {', '.join(LEVELS)}; got {level!r}")
    if not root.is_dir():
        raise InputError(f"there is no folder {root}")
    files = sorted(
        (file.relative_to(root) for file in walk(root) if wanted(file)), key=lambda f: f.as_posix()
    )
    if not files:
        raise InputError(f"there is no picture in {root}")
    loose = [file for file in files if len(file.parts) == 1]
    if len(loose) == len(files):
        return file_source([Sample(file.name, content=root / file) for file in files], [], read)
    if loose:
        raise InputError(
            f"{root} holds class folders and also pictures outside them, such as {loose[0]}; move those away"
        )
    folders = [file.parts[0] if level == "top" else file.parts[-2] for file in files]
    classes = list(class_names) if class_names is not None else sorted(set(folders))
    number = {name: k for k, name in enumerate(classes)}
    unknown = sorted(set(folders) - set(number))
    if unknown:
        raise InputError(f"{root} has a folder {unknown[0]!r} that class_names does not list")
    samples = [
        Sample(file.as_posix(), number[folder], content=root / file)
        for file, folder in zip(files, folders, strict=True)
    ]
    return file_source(samples, classes, read)


def open_dicom(
    path: str | Path,
    *,
    window: tuple[float, float] | None = None,
    class_names: Sequence[str] | None = None,
    level: str = "top",
    root: str | Path | None = None,
    first_pixel: int = 0,
    multilabel: bool = False,
    label_columns: Sequence[str] | None = None,
) -> Source:
    """DICOM files of a folder (see open_folder) or a CSV manifest (see open_csv). window: centre, width."""
    need("pydicom", "dicom")
    if window is not None and not (len(window) == 2 and window[1] >= 1):
        raise InputError(f"a window is a centre and a width of at least 1; got {window}")
    if Path(path).is_file():
        listed = open_csv(
            path, root=root, class_names=class_names, first_pixel=first_pixel, multilabel=multilabel,
            label_columns=label_columns,
        )  # fmt: skip
    else:
        listed = open_folder(path, is_dicom_name, class_names=class_names, level=level)
    return file_source(listed.samples, listed.classes, partial(read_dicom, window=window))


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
