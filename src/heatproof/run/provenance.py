"""What a unit is made from: weights, pictures, the code of a FILE.py factory, settings.

All of it goes into the unit's name, so a part that was made from something else is never taken for it, even
where run.json was lost. What may grow or move (methods, metrics, checkpoints, paths) stays out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any

from heatproof.errors import InputError, StoreError
from heatproof.images import Loaded, Source
from heatproof.images.identity import Hashes, files_of, identify
from heatproof.models.specs import placed_spec
from heatproof.run.config import as_config, study_from
from heatproof.store import Manifest
from heatproof.store.ledger import read_record, write_record

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
    root = path.resolve().parent
    finder = ModuleFinder(path=[str(root)])
    finder.run_script(str(path))
    named = (getattr(module, "__file__", None) for module in finder.modules.values())
    files = {Path(file).resolve() for file in named if file}
    return {
        file.relative_to(root).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()[:16]
        for file in sorted({path.resolve(), *files})
    }


def unit_origin(
    manifest: Manifest, pictures: Sequence[tuple[str, str]]
) -> Callable[[Sequence[str], tuple[int, int]], str]:
    """The origin of a unit over some checkpoints and images; of folders that 0.1 began, always ''."""
    if manifest.upgraded or manifest.format < 2 or not pictures:
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
