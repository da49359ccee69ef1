"""What a unit is made from: weights, pictures, the code of a FILE.py factory, settings.

All of it goes into the unit's name, so a part that was made from something else is never taken for it, even
where run.json was lost. What may grow or move (methods, metrics, checkpoints, paths) stays out.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heatproof.errors import InputError, StoreError
from heatproof.images.identity import Hashes, files_of, identify
from heatproof.models.names import placed_spec
from heatproof.run.config import as_config, study_from
from heatproof.store import Manifest
from heatproof.store.ledger import read_record, write_record

if TYPE_CHECKING:
    from heatproof.images import Loaded, Source

MEMORY = "hashes.json"
BY_MTIME = "mtime:"
ADDED = ("methods", "metrics", "checkpoints")
# What may change without a word: no number depends on it, or the hashes of weights and pictures guard it.
FREE = (
    "run.workers", "run.out", "run.pictures", "run.both_classes", "run.inputs_per_pass",
    "run.expect_accuracy", "images.path", "model.checkpoints",
)  # fmt: skip


@dataclass
class Origin:
    """The pictures of a run, one by one, as they were when it was opened."""

    pictures: list[tuple[str, str]]  # id, identity
    hashes: Hashes = field(default_factory=Hashes)
    known: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # before they were looked at

    @staticmethod
    def of(source: Source, run: Path, by_mtime: bool) -> Origin:
        """As the pictures are now; what the run folder remembers of their files is not read again."""
        try:
            known = {path: tuple(entry) for path, entry in read_record(run / MEMORY)["files"].items()}
        except (StoreError, OSError, KeyError):
            known = {}
        hashes = Hashes(dict(known), by_mtime)
        return Origin(identify(source, hashes), hashes, known)

    @property
    def hash(self) -> str:
        text = hashlib.sha256(json.dumps(self.pictures).encode()).hexdigest()[:16]
        return f"{BY_MTIME}{text}" if self.hashes.by_mtime else text

    def remember(self, run: Path) -> None:
        if self.hashes.known != self.known:
            write_record(run / MEMORY, {"files": self.hashes.known}, indent=None)

    def check(self, source: Source, span: tuple[int, int], loaded: Loaded) -> None:
        """Refuse pictures that changed between the start of the run and their use."""
        samples = source.samples[slice(*span)]
        if all(self.hashes.remembered(path) for sample in samples for path in files_of(sample)):
            return
        unread = {failure.id for failure in loaded.failures}
        now = identify(source.subset(range(*span)), self.hashes)
        for (name, before), (_, mark) in zip(self.pictures[slice(*span)], now, strict=True):
            if mark != before and name not in unread:
                changed = f"{name} changed while the run was going"
                raise InputError(f"{changed}; start again to see what is changed")


def growing(config: Mapping[str, Any]) -> tuple[str, ...]:
    """What may be added to a run."""
    return (*ADDED, "limit") if config["images"].get("growing") else ADDED


def filled(manifest: Manifest) -> Manifest:
    """With the defaults of settings that did not exist when it was written."""
    return replace(manifest, config=as_config(study_from(manifest.config)))


def code_hashes(spec: str, folder: Path) -> dict[str, str]:
    """SHA-256 of a factory's file and of all that it imports from its own folder, by relative path."""
    path = Path(placed_spec(spec, folder).rpartition(":")[0])
    if path.suffix != ".py":
        return {}
    root, files, unread = path.resolve().parent, set[Path](), [path.resolve()]
    while unread:
        if (file := unread.pop()) not in files:
            files.add(file)
            unread += _imported_files(file, root)
    return {
        file.relative_to(root).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        for file in sorted(files)
    }


def _imported_files(file: Path, root: Path) -> Iterator[Path]:
    """Python files below the folder `root` that a file imports, also in folders without an __init__.py.

    Import statements anywhere in the file count, and import_module("name"); a computed name is not known.
    """
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (SyntaxError, ValueError):  # running it raises the error
        return
    for node in nodes:
        base, names = root, []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = file.parents[node.level - 1] if node.level else root
            names = [f"{node.module or ''}.{alias.name}".strip(".") for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            names = [str(node.args[0].value)] if isinstance(node.args[0], ast.Constant) else []
        for name in names:
            parts = name.strip(".").split(".")
            places = [base.joinpath(*parts[:end]) for end in range(1, len(parts) + 1)]
            packages = places if base == root else [base, *places]
            for known in (*(p.with_suffix(".py") for p in places), *(p / "__init__.py" for p in packages)):
                if known.is_file() and known.resolve().is_relative_to(root):
                    yield known.resolve()


def unit_origin(
    manifest: Manifest, pictures: Sequence[tuple[str, str]]
) -> Callable[[Sequence[str], tuple[int, int]], str]:
    """The origin of a unit over some checkpoints and images; '' without images."""
    if not pictures:
        return lambda checkpoints, span: ""
    first = manifest.earlier[0]["config"] if manifest.earlier else manifest.config
    shared = [manifest.format, _settings(first), manifest.code, list(manifest.classes)]

    def origin(checkpoints: Sequence[str], span: tuple[int, int]) -> str:
        own = [[manifest.models[name] for name in checkpoints], [mark for _, mark in pictures[slice(*span)]]]
        return hashlib.sha256(json.dumps([*shared, *own], sort_keys=True).encode()).hexdigest()[:16]

    return origin


def _settings(config: Any, path: str = "") -> Any:
    """What changes numbers and may not change in a run."""
    if not isinstance(config, Mapping):
        return config
    return {
        key: _settings(value, f"{path}{key}.")
        for key, value in config.items()
        if f"{path}{key}" not in FREE and key not in ADDED
    }
