"""The units of a run, from its manifest alone, and the origin of each: what its rows are computed from.

The units of a block share a checkpoint and decoded images, as many as a batch. When all blocks of a
checkpoint are done, its group units follow (C-Score, AUC, ...), from the store alone. A run may grow: the
manifest records the settings it grew from, and each stage adds units for what is new, so no finished unit is
computed again. Units depend on neither shards nor engines.

The hash of a unit covers weights, images, the code of a FILE.py factory and settings, so files computed from
something else are never mistaken for it, even if run.json was lost. Settings that may grow or change
(methods, metrics, checkpoints, paths) are not part of it.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from heatproof.errors import InputError, StoreError, counted
from heatproof.images.source import Hashes, files_of, identify
from heatproof.models.names import placed_spec
from heatproof.rows import Unit
from heatproof.run.config import MetricRequest, as_config, read_metrics, study_from
from heatproof.store import Manifest
from heatproof.store.ledger import hash_of, known_record, write_record
from heatproof.store.scores import anchor_of

if TYPE_CHECKING:
    from heatproof.images import Loaded, Source

ANSWERS = ("probability", "predicted")  # of the classifier, in the first unit of every block
PER_MAP = ("degenerate",)  # in every unit that makes maps
BUILT_IN = (*ANSWERS, *PER_MAP)  # that no registered metric makes
NO_EVIDENCE = "the map is blank: nothing at the layer speaks for the explained class"
DEAD_LAYER = "the map is blank: the layer is dead, its activations are the same at every place"
MEMORY = "hashes.json"
ADDED = ("methods", "metrics", "checkpoints", "tested")
# Settings that may change: no number depends on them, or the hashes of weights and images cover them.
FREE = (
    "run.workers", "run.out", "run.pictures", "run.both_classes", "run.inputs_per_pass",
    "run.expect_accuracy", "images.path", "model.checkpoints",
)  # fmt: skip


@dataclass(frozen=True)
class PlannedUnit(Unit):
    """A unit and how it is computed: new methods in one pass, later metrics of stored maps, or a group."""

    kind: Literal["explain", "score", "group"] = "explain"
    beside: tuple[str, ...] = ()  # of a group: earlier methods, for metrics that compare methods
    among: tuple[str, ...] = ()  # of a group that compares checkpoints: all of them, the last one last
    after: tuple[str, ...] = ()  # of a group: other checkpoints whose predictions it reads

    @property
    def has_predictions(self) -> bool:
        """Whether its rows include predictions and images that could not be read."""
        return ANSWERS[0] in self.metrics


Block = tuple[PlannedUnit, ...]  # units of the same checkpoint and images, in the order of their computation


class RunPlan(NamedTuple):
    """All units of a run, in order."""

    blocks: tuple[Block, ...]
    groups: tuple[PlannedUnit, ...]

    @property
    def units(self) -> list[PlannedUnit]:
        return [*(unit for block in self.blocks for unit in block), *self.groups]

    def described(self, batch_size: int) -> str:
        groups = f", {len(self.groups)} about whole checkpoints" if self.groups else ""
        return f"{sum(map(len, self.blocks)):,} of up to {counted(batch_size, 'image')}{groups}"

    def checkpoints(self) -> list[str]:
        return list(dict.fromkeys(block[0].checkpoint for block in self.blocks))

    def shard(self, index: int, total: int) -> tuple[Block, ...]:
        return self.blocks[index::total]

    def hashes(self, checkpoint: str) -> set[str]:
        """Hashes of the block units of a checkpoint, which its group units wait for."""
        return {u.hash for block in self.blocks if block[0].checkpoint == checkpoint for u in block}


def make_plan(manifest: Manifest, images: int, pictures: Sequence[tuple[str, str]] = ()) -> RunPlan:
    """The units of a run over this many images, in the order in which the run grew.

    pictures: id and identity of each image, which then are part of the hashes of their units.
    """
    stages = [*manifest.earlier, {"config": manifest.config, "models": manifest.models}]
    batch, names = int(manifest.config["run"]["batch_size"]), tuple(manifest.models)
    ranges = [(start, min(start + batch, images)) for start in range(0, images, batch)]
    # The first settings, so that hashes of finished units stay valid when the run grows.
    first = manifest.earlier[0]["config"] if manifest.earlier else manifest.config
    shared = [manifest.format, _settings(first), manifest.code, list(manifest.classes)]

    def placed(unit: PlannedUnit, span: tuple[int, int]) -> PlannedUnit:
        read = unit.among or tuple(dict.fromkeys([unit.checkpoint, *unit.after]))
        own = [[manifest.models[name] for name in read], [mark for _, mark in pictures[slice(*span)]]]
        origin = hash_of(json.dumps([*shared, *own], sort_keys=True))[:16] if pictures else ""
        return replace(unit, images=span, seed=manifest.seed, origin=origin)

    @cache
    def templates(name: str, without: tuple[frozenset[str], ...]) -> list[PlannedUnit]:
        return list(_templates(name, stages, names, without))

    def units(name: str, start: int, group: bool = False) -> list[PlannedUnit]:
        every = templates(name, tuple(untested(stage["config"], start) for stage in stages))
        return [unit for unit in every if (unit.kind == "group") == group]

    blocks = [tuple(placed(u, span) for u in units(name, span[0])) for name in names for span in ranges]
    groups = [unit for name in names for unit in units(name, 0, group=True)]
    requests = [r for r in read_metrics(manifest.config["metrics"]) if r.entry.compares_checkpoints]
    for request in requests if len(names) > 1 else ():  # another last checkpoint makes new units
        template = PlannedUnit(names[-1], (0, 0), (), (request.text,), kind="group", among=names)
        groups += [replace(template, methods=(method,)) for method in manifest.config["methods"]]
    return RunPlan(tuple(blocks), tuple(placed(unit, (0, images)) for unit in groups))


def untested(config: Mapping[str, Any], start: int) -> frozenset[str]:
    """Methods whose sequential test has ended before the image at `start`."""
    ends: dict[str, int] = {}
    for images, methods in config["run"].get("tested", ()):
        ends |= {method: max(images, ends.get(method, 0)) for method in methods}
    return frozenset(method for method, end in ends.items() if end <= start)


def _templates(
    checkpoint: str, stages: Sequence[Mapping[str, Any]], checkpoints: Sequence[str],
    without: Sequence[frozenset[str]],
) -> Iterator[PlannedUnit]:  # fmt: skip
    """Units that each stage of a run adds for a checkpoint, without images. without: `untested` by stage."""
    old: tuple[str, ...] = ()
    known: set[str] = set()
    computed: dict[str, set[str]] = {}  # metrics of images, by method
    for stage, ended in zip(stages, without, strict=True):
        if checkpoint not in stage["models"]:
            continue
        requests = read_metrics(stage["config"]["metrics"])
        new = tuple(method for method in stage["config"]["methods"] if method not in old)
        added = [request for request in requests if request.text not in known]
        anchors = dict.fromkeys(request.anchor for request in requests if request.anchor)
        after = tuple(anchor_of(name, checkpoints) for name in anchors)
        of_images = [r for r in requests if not r.group and not r.entry.compares_checkpoints]
        missing: dict[tuple[str, ...], tuple[str, ...]] = {}  # methods by the metrics they lack
        for method in (*new, *old):
            own = computed.setdefault(method, set())
            wanted = [r for r in of_images if not (r.tests_maps and method in ended)]
            texts = tuple(r.text for r in wanted if r.text not in own)
            key = (*PER_MAP, *texts) if method in new else texts
            missing[key] = (*missing.get(key, ()), method)
            own.update(texts)
        answers = () if old else ANSWERS
        for texts, methods in missing.items():
            if methods[0] in new:
                yield PlannedUnit(checkpoint, (0, 0), methods, (*answers, *texts))
                answers = ()
            elif texts:
                yield PlannedUnit(checkpoint, (0, 0), methods, texts, kind="score")
        # Metrics that compare methods need the earlier ones too, but only pairs with a new one are rows.
        if new and (texts := _texts(requests, per_method=True)):
            yield PlannedUnit(checkpoint, (0, 0), new, texts, kind="group", beside=old, after=after)
        if old and (texts := _texts(added, per_method=True)):
            yield PlannedUnit(checkpoint, (0, 0), old, texts, kind="group", after=after)
        if texts := _texts(added, per_method=False):
            yield PlannedUnit(checkpoint, (0, 0), (), texts, kind="group", after=after)
        old += new
        known |= {request.text for request in added}


def _texts(requests: Sequence[MetricRequest], per_method: bool) -> tuple[str, ...]:
    wanted = [r for r in requests if r.group and not r.entry.compares_checkpoints]
    return tuple(request.text for request in wanted if request.per_method == per_method)


def read_shard(text: str) -> tuple[int, int]:
    """Which of how many, from 0.

    >>> read_shard("0/4")
    (0, 4)
    """
    index, slash, count = text.partition("/")
    if not (slash and index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise InputError(f"a shard is i/n with i from 0 to n - 1, such as 0/4; got {text!r}")
    return int(index), int(count)


@dataclass
class Origin:
    """Identities of the images of a run when it was opened."""

    BY_MTIME = "mtime:"  # how the hash of images begins whose files were not read
    pictures: list[tuple[str, str]]  # id, identity
    hashes: Hashes = field(default_factory=Hashes)
    known: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # hashes of files in the run folder

    @staticmethod
    def of(source: Source, run: Path, by_mtime: bool) -> Origin:
        """Identify the images; files whose hash is cached in the run folder are not read again."""
        known: dict[str, tuple[Any, ...]] = {}
        with suppress(StoreError):
            files = (known_record(run / MEMORY) or {}).get("files", {})
            known = {path: tuple(entry) for path, entry in files.items()}
        hashes = Hashes(dict(known), by_mtime)
        return Origin(identify(source, hashes), hashes, known)

    @property
    def hash(self) -> str:
        text = hash_of(json.dumps(self.pictures))[:16]
        return f"{self.BY_MTIME}{text}" if self.hashes.by_mtime else text

    def remember(self, run: Path) -> None:
        if self.hashes.known != self.known:
            write_record(run / MEMORY, {"files": self.hashes.known}, indent=None)

    def check(self, source: Source, span: tuple[int, int], loaded: Loaded) -> None:
        """Raise InputError if images changed between the start of the run and their use."""
        samples = source.samples[slice(*span)]
        # Unchanged size, times and inode prove an unchanged file without reading it again.
        if all(self.hashes.remembered(path) for sample in samples for path in files_of(sample)):
            return
        unread = {failure.id for failure in loaded.failures}
        now = identify(source.subset(range(*span)), self.hashes)
        for (name, before), (_, mark) in zip(self.pictures[slice(*span)], now, strict=True):
            if mark != before and name not in unread:
                raise InputError(f"{name} changed during the run; start again")


def growing(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Keys of a config under which a run may gain entries."""
    return (*ADDED, "limit") if config["images"].get("growing") else ADDED


def filled(manifest: Manifest) -> Manifest:
    """The manifest with the defaults of settings that did not exist when it was written."""
    return replace(manifest, config=as_config(study_from(manifest.config)))


def code_hashes(spec: str, folder: Path) -> dict[str, str]:
    """SHA-256 of a factory's file and of all files it imports from its own folder, by relative path."""
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


def _settings(config: Any, path: str = "") -> Any:
    """Settings that affect numbers and must not change within a run."""
    if not isinstance(config, Mapping):
        return config
    return {
        key: _settings(value, f"{path}{key}.")
        for key, value in config.items()
        if f"{path}{key}" not in FREE and key not in ADDED
    }
