"""A folder of pictures: one subfolder per class, or no subfolders and no labels."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from heatproof.errors import InputError
from heatproof.images.files import picture_reader, suffixes
from heatproof.images.source import Sample, Source, file_source

LEVELS = ("top", "parent")


def open_folder(
    path: str | Path,
    *,
    class_names: Sequence[str] | None = None,
    level: str = "top",
    bits: int | None = None,
) -> Source:
    """Pictures below CLASS/..., or in a folder without class folders, which gives no labels.

    class_names: the model's classes in its own order; else the folders' names, sorted. level: whether the
    folder that names the class is the topmost ("top") or the one the picture lies in ("parent", for trees
    such as train/CLASS and test/CLASS taken together). bits: of 16-bit greys, else found (files.py).
    """
    read = picture_reader(bits)
    samples, classes = list_folder(Path(path), is_picture, class_names, level)
    return file_source(samples, classes, read)


def is_picture(file: Path) -> bool:
    return file.suffix.lower() in suffixes()


def list_folder(
    root: Path, wanted: Callable[[Path], bool], class_names: Sequence[str] | None = None, level: str = "top"
) -> tuple[list[Sample], list[str]]:
    """Samples in the order of their paths, and the classes."""
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
        return [Sample(file.name, content=root / file) for file in files], []
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
    return samples, classes


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
