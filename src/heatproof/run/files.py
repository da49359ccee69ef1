"""Files that a study or a command names, looked for before torch is imported, which takes its time."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heatproof.errors import HeatproofError, InputError, ModelError
from heatproof.models.names import KERAS_FILES, placed_spec
from heatproof.registry import check_methods
from heatproof.run.config import ImagesTable
from heatproof.run.metrics import read_metrics

if TYPE_CHECKING:
    from heatproof.images import Source
    from heatproof.run.config import Study


def check_files(study: Study, folder: Path) -> None:
    """Refuse a study that names unknown methods or metrics, or files that are not in its folder."""
    images = study.images
    with at("methods"):
        check_methods(study.methods)
    with at("metrics"):
        read_metrics(study.metrics)
    if images.kind not in ("hf", "memory") and not (folder / Path(images.path).expanduser()).exists():
        with at("images"):
            check_images(images)
            open_images(images, folder)  # which says what it misses
    with at("model"):
        check_network(study.model.spec, (), folder)
    with at("model.checkpoints"):
        check_network("", listed(study.model.checkpoints), folder)


def check_network(spec: str, checkpoints: Sequence[str | Path], folder: Path | None = None) -> None:
    """Refuse a network's file or weights that are not there."""
    folder = folder or Path.cwd()
    placed = placed_spec(spec, folder)
    file = placed if placed.endswith(KERAS_FILES) else placed.rpartition(":")[0]
    if file.endswith((".py", *KERAS_FILES)) and not Path(file).is_file():
        raise ModelError(f"no such file: {file}")
    for text in checkpoints:
        checkpoint_files(str(text), folder)


def checkpoint_files(text: str, folder: Path) -> list[Path]:
    """The files that a name or a pattern means, in the order of their names."""
    path = Path(os.path.normpath(folder / Path(text).expanduser()))
    if path.exists() or not glob.has_magic(text):
        matches = [path]
    else:
        matches = sorted(map(Path, glob.glob(str(path), recursive=True)))
    if not matches or not matches[0].exists():
        raise InputError(f"there is no file {text!r} in {folder}")
    return matches


def listed(checkpoints: str | list[str]) -> list[str]:
    return [checkpoints] if isinstance(checkpoints, str) else checkpoints


def check_images(table: ImagesTable) -> None:
    """Refuse options that pictures of this kind do not have."""
    from heatproof.images import SOURCES, source_options

    known = source_options(table.kind)
    if table.kind == "memory":
        kinds = ", ".join(kind for kind in SOURCES if kind != "memory")
        raise InputError(f"kind 'memory' is for Python; use one of {kinds}")
    for name in table.options:
        if name in ImagesTable.__struct_fields__:
            raise InputError(f"{name} belongs under [images], not under [images.options]")
        if name not in known:
            offered = [option for option in known if option not in ImagesTable.__struct_fields__]
            raise InputError(f"options.{name}: a {table.kind} source takes {', '.join(offered) or 'none'}")


def open_images(table: ImagesTable, folder: Path) -> Source:
    """The pictures of a study."""
    from heatproof.images import open_source

    path: Any = Path(os.path.normpath(folder / Path(table.path).expanduser()))
    if table.kind == "hf" and not path.exists():
        path = table.path  # the name of a dataset
    options = dict(table.options)
    if isinstance(options.get("root"), str):
        options["root"] = folder / options["root"]
    return open_source(
        table.kind, path, limit=table.limit, classes=table.classes, single_object=table.single_object,
        box_share=table.box_share, stratified=table.stratified, growing=table.growing,
        seed=table.seed, **options,
    )  # fmt: skip


@contextmanager
def at(place: str) -> Iterator[None]:
    """Put the key in front of what is wrong with it."""
    try:
        yield
    except HeatproofError as error:
        kind = ModelError if isinstance(error, ModelError) else InputError
        raise kind(str(error) if str(error).startswith(place) else f"{place}: {error}") from error
