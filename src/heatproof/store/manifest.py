"""run.json: everything the rows of a run folder were computed from, so that they can be reproduced.

A resume with the same hash of the config continues the run; another config is compared key by key, and only
additions at the end of a list of methods, metrics, checkpoints, models or images are accepted, because
existing rows then stay valid. The format of folders is 2; others are refused.

Facts of the metrics and methods are stored too, so that reading a run needs no registry. Folders of heatproof
0.2 hold none; for those the registry is read, which imports torch.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import platform
import subprocess
import sys
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from heatproof import registry
from heatproof.errors import HeatproofError, StoreError
from heatproof.store.ledger import check_types, known_record, plain, write_record

PACKAGES = (
    "heatproof", "torch", "numpy", "scipy", "pillow", "scikit-image", "duckdb",
    "torchvision", "timm", "transformers", "keras", "ray",
)  # fmt: skip
FORMAT = 2
SEVERAL = "multilabel"  # the head of such a network
GROWING = ("methods", "metrics", "checkpoints", "models", "images")


@dataclass(frozen=True)
class MetricFacts:
    """Facts of a metric that tables, reports and the verdict read; see registry.Metric."""

    name: str
    aliases: tuple[str, ...] = ()
    summary: str = ""
    title: str = ""
    family: str = "Other"
    level: str = "image"
    higher_is_better: bool | None = None
    bounds: tuple[float | None, float | None] = (None, None)  # None: unbounded
    parts: Mapping[str, str] = field(default_factory=dict)
    floors: tuple[str, ...] = ("random", "edges")
    judges: str = ""
    test: bool = False
    headline: bool = False
    cite: str = ""
    module: str = ""  # "" for a metric that is not registered

    @staticmethod
    def of(entry: registry.Metric) -> MetricFacts:
        low, high = (bound if math.isfinite(bound) else None for bound in entry.bounds)
        return MetricFacts(
            entry.name, entry.aliases, entry.summary, entry.title, entry.family, entry.level,
            entry.higher_is_better, (low, high), dict(entry.parts), entry.floors, entry.question, entry.votes,
            entry.headline, entry.cite, entry.function.__module__,
        )  # fmt: skip

    @property
    def titles(self) -> dict[str, str]:
        """Titles by the names that rows have."""
        own = {self.name: self.title} if self.title else {}
        return own | {f"{self.name}_{part}": title for part, title in self.parts.items()}

    @property
    def limits(self) -> tuple[float, float]:
        low, high = self.bounds
        return -math.inf if low is None else low, math.inf if high is None else high


@dataclass(frozen=True)
class MethodFacts:
    """Facts of a method that tables, reports and the verdict read; see registry.Explainer."""

    name: str
    aliases: tuple[str, ...] = ()
    summary: str = ""
    options: str = ""  # with their defaults
    card: registry.Card = field(default_factory=registry.Card)
    cite: str = ""
    floor: bool = False  # whether it ignores the network

    @staticmethod
    def of(entry: registry.Explainer, name: str = "") -> MethodFacts:
        """name: as in the config, if the entry of another package has a different one."""
        known = {registry.key_of(text) for text in ("", entry.name, *entry.aliases)}
        aliases = (*entry.aliases, *([name] if registry.key_of(name) not in known else []))
        options = ", ".join(f"{k}={v!r}" for k, v in entry.options.items() if v is not registry.REQUIRED)
        floor = entry.card == registry.FLOOR_CARD
        return MethodFacts(entry.name, aliases, entry.summary, options, entry.card, entry.cite, floor)


@dataclass(frozen=True)
class Facts:
    """Facts by metric and method; missing ones come from the registry."""

    metrics: tuple[MetricFacts, ...] = ()  # in the order of their files
    methods: tuple[MethodFacts, ...] = ()
    definitions: Mapping[str, str] = field(default_factory=dict)  # docstrings of the metrics' modules

    @staticmethod
    def of_config(config: Mapping[str, Any]) -> Facts:
        """Facts of the metrics and methods that a config names, and of all metrics that vote."""
        named = {registry.key_of(name) for name in _names(config.get("metrics"))}
        registered = registry.metrics.as_registered() if named else []
        held = [
            e for e in registered if named & set(map(registry.key_of, filter(None, (e.bundle, *_called(e)))))
        ]
        described = [entry for entry in registered if entry in held or entry.votes] if held else []
        methods = []
        for name in dict.fromkeys(_names(config.get("methods"))):
            with suppress(HeatproofError):
                if entry := registry.explainers.find(name):
                    methods.append(MethodFacts.of(entry, name))
        modules = dict.fromkeys(entry.function.__module__ for entry in held)
        return Facts(tuple(map(MetricFacts.of, described)), tuple(methods), _docstrings(modules))

    def metric(self, name: str) -> MetricFacts | None:
        if self.metrics:
            return self._metrics.get(registry.key_of(name))
        entry = registry.metrics.find(name)
        return None if entry is None else MetricFacts.of(entry)

    def metric_of(self, name: str) -> MetricFacts | None:
        """Facts of the metric of this name, or of the metric that it is a part of."""
        words = name.split("_")
        prefixes = ("_".join(words[:end]) for end in range(len(words), 0, -1))
        return next(filter(None, map(self.metric, prefixes)), None)

    @property
    def every_metric(self) -> Sequence[MetricFacts]:
        return self.metrics or [MetricFacts.of(entry) for entry in registry.metrics.as_registered()]

    def method(self, text: str) -> MethodFacts | None:
        """Facts of a method, by its name with or without options."""
        try:
            name, _ = registry.parse_call(text)
            if self.methods:
                return self._methods.get(registry.key_of(name))
            return MethodFacts.of(registry.explainers.get(name))
        except HeatproofError:
            return None

    def floor_name(self, method: str) -> str:
        """Name of the floor that a method is; "" for a method that reads the network."""
        facts = self.method(method)
        return facts.name if facts and facts.floor else ""

    def is_floor(self, method: str) -> bool:
        return bool(self.floor_name(method))

    def definition(self, module: str) -> str:
        """The docstring of a module of metrics."""
        return self.definitions.get(module, "") if self.metrics else _docstrings([module]).get(module, "")

    @cached_property
    def _metrics(self) -> dict[str, MetricFacts]:
        return {registry.key_of(name): facts for facts in self.metrics for name in _called(facts)}

    @cached_property
    def _methods(self) -> dict[str, MethodFacts]:
        return {registry.key_of(name): facts for facts in self.methods for name in _called(facts)}


def _called(entry: registry.Entry | MetricFacts | MethodFacts) -> tuple[str, ...]:
    return *entry.aliases, entry.name


def _names(calls: Any) -> Iterator[str]:
    """Names in a list of calls; none for a list of anything else."""
    for text in calls if isinstance(calls, list | tuple) else []:
        with suppress(HeatproofError, AttributeError):
            yield registry.parse_call(text)[0]


def _docstrings(modules: Iterable[str]) -> dict[str, str]:
    """Docstrings of imported modules."""
    return {name: inspect.getdoc(sys.modules[name]) or "" for name in modules if name in sys.modules}


class LaterFormatError(StoreError):
    """The run folder was written by a later version of heatproof."""


class _Images(TypedDict, total=False):
    kind: str
    options: dict[str, Any]


class _Run(TypedDict, total=False):
    tested: list[tuple[int, list[str]]] | None


class _Config(TypedDict, total=False):
    """Types of the settings that commands read from run.json; `run/config.py` checks a study's own."""

    methods: list[str]
    metrics: list[str]
    images: _Images
    model: dict[str, Any]
    run: _Run


class Change(NamedTuple):
    """One difference between two configs, as a sentence; existing rows stay valid after an addition."""

    key: str  # its dotted path
    sentence: str
    addition: bool


@dataclass(frozen=True)
class Manifest:
    """Record of a run: config, weights, images, versions and machine."""

    config: Mapping[str, Any]
    seed: int = 0
    models: Mapping[str, str] = field(default_factory=dict)  # hash of the weights by checkpoint name
    data: str = ""  # hash of the images' names and contents
    classes: Sequence[str] = ()  # their names, by label
    versions: Mapping[str, str] = field(default_factory=dict)
    git: Mapping[str, Any] | None = None
    machine: Mapping[str, Any] = field(default_factory=dict)
    started: str = ""
    command: Sequence[str] = ()
    earlier: Sequence[Mapping[str, Any]] = ()  # the manifests this one grew from
    pictures: str = ""  # hash of the images' contents, one by one in images.json
    code: Mapping[str, str] = field(default_factory=dict)  # hash of each file behind a FILE.py factory
    brought: Mapping[str, str] = field(default_factory=dict)  # hash of the files behind a method, by method
    preprocess: str = ""  # what images go through before the network, in words
    warnings: Sequence[str] = ()  # what contradicts it
    format: int = FORMAT
    id: str = ""  # of the run, through all its growth
    facts: Facts = field(default_factory=Facts)  # of the metrics and methods it names

    @staticmethod
    def collect(config: Mapping[str, Any], *, device: str = "cpu", **known: Any) -> Manifest:
        """A manifest of the current versions, git state of the working directory, machine and time.

        known: other fields, such as seed and models.
        """
        given = {name: list(value) if isinstance(value, tuple) else value for name, value in known.items()}
        machine = {
            "cpu": _cpu_name(), "device": device, "device_name": _gpu_name(device) or "cpu",
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "system": platform.platform(), "host": platform.node(),
        }  # fmt: skip
        now: dict[str, Any] = {
            "classes": [], "versions": package_versions(), "git": git_state(Path.cwd()),
            "machine": machine, "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": list(sys.argv), "earlier": [], "warnings": [], "id": uuid.uuid4().hex,
            "facts": Facts.of_config(config),
        }  # fmt: skip
        return Manifest(config=_plain(config), **now | given)

    @property
    def is_multilabel(self) -> bool:
        """Whether the network is multi-label."""
        return bool(self.config.get("model", {}).get("head") == SEVERAL)

    @property
    def config_hash(self) -> str:
        return hashlib.sha256(_canonical(self.config).encode()).hexdigest()[:16]

    def changes(
        self, new: Manifest, growing: Collection[str] = GROWING, free: Collection[str] = ()
    ) -> list[Change]:
        """Differences that a resume with `new` would make: config, seed, weights or images."""
        changes = compare_configs(self.config, new.config, growing, free)
        images_grew = any(change.addition and "images" in change.key.split(".") for change in changes)
        refused: list[tuple[str, str]] = []
        if self.seed != new.seed:
            refused.append(("seed", f"the seed was {self.seed} and is now {new.seed}"))
        for name in sorted({*self.models, *new.models}):
            if name not in self.models:
                changes.append(Change(name, f"checkpoint {name!r} is new", True))
            elif name not in new.models:
                refused.append((name, f"checkpoint {name!r} is gone"))
            elif self.models[name] != new.models[name]:
                refused.append((name, f"the weights of {name!r} are not those of the run"))
        if (self.data != new.data or "" != self.pictures != new.pictures) and not images_grew:
            refused.append(("images", "the images are not those of the run"))
        changed = [name for name in {**self.code, **new.code} if self.code.get(name) != new.code.get(name)]
        if self.code and changed:
            refused.append(("code", f"the code of {', '.join(changed)} is not that of the run"))
        brought = {method for method, mark in self.brought.items() if new.brought.get(method, mark) != mark}
        refused += [(method, f"the files of {method} are not those of the run") for method in brought]
        return changes + [Change(*change, False) for change in refused]

    def completed_by(self, new: Manifest) -> Manifest:
        """This manifest, with what an older version did not record taken from `new`."""
        facts = self.facts if self.facts != Facts() else new.facts
        pictures, code = self.pictures or new.pictures, self.code or new.code
        return replace(self, pictures=pictures, code=code, facts=facts)

    def grown_from(self, old: Manifest) -> Manifest:
        """This manifest with the record of the one it adds to."""
        past = {key: value for key, value in asdict(old).items() if key not in ("earlier", "facts")}
        return replace(self, earlier=[*old.earlier, past], format=old.format, id=old.id)

    def write(self, path: Path) -> None:
        write_record(path, {"config_hash": self.config_hash, **asdict(self)}, indent=2)

    @staticmethod
    def read(path: Path) -> Manifest:
        try:
            content = json.loads(plain(path).read_text(encoding="utf-8"))
            number = content.get("format", FORMAT)
            if number > FORMAT:
                raise LaterFormatError(
                    f"{path.parent} was written by a later version of heatproof (format {number}; this one "
                    f"reads up to {FORMAT}): install a newer heatproof to open it"
                )
            if "config" in content and not {"format", "checksum"} & set(content):
                raise StoreError(
                    f"{path.parent} was written by heatproof 0.1; run its study again in a new folder"
                )
            content = known_record(path) or {}
            check_types(content["config"], _Config)
            manifest: Manifest = check_types(content, Manifest)
            return manifest
        except FileNotFoundError as error:
            raise StoreError(
                f"{path.parent} is not a run folder: it has no {path.name}; name the folder of a run"
            ) from error
        except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
            raise StoreError(f"cannot read {path}: {error}; restore it, or start a new folder") from error


def compare_configs(
    old: Mapping[str, Any], new: Mapping[str, Any],
    growing: Collection[str] = GROWING, free: Collection[str] = (),
) -> list[Change]:  # fmt: skip
    """Differences between two configs, key by key.

    Under a key named in `growing` a list may gain entries at its end, a table of named things new names,
    and a number may rise; keys in `free` (dotted paths, such as run.workers) may change without notice.
    Everything else is not an addition.

    >>> old, new = {"methods": ["rise"], "seed": 0}, {"methods": ["rise", "lime"], "seed": 1}
    >>> [(change.sentence, change.addition) for change in compare_configs(old, new)]
    [("methods gained 'lime'", True), ('seed was 0 and is now 1', False)]
    """
    return list(_changes(_plain(old), _plain(new), "", growing, free))


def _changes(
    old: Any, new: Any, path: str, growing: Collection[str], free: Collection[str]
) -> Iterator[Change]:
    name = path.rpartition(".")[2]
    grows = name in growing
    if old == new or path in free:
        return
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            where = f"{path}.{key}" if path else key
            if key in old and key in new:
                yield from _changes(old[key], new[key], where, growing, free)
            elif where in free:
                continue
            # A new key under checkpoints is a new checkpoint, but one under images is a new setting.
            elif key in new and grows and name != "images":
                yield Change(where, f"{path} gained {key!r}", True)
            else:
                before, now = (_short(table[key]) if key in table else "absent" for table in (old, new))
                yield Change(where, f"{where} was {before} and is now {now}", False)
    elif isinstance(old, list) and isinstance(new, list) and (grows or _tables(old + new)):
        paired = list(zip(old, new, strict=False))
        if len(new) < len(old) or not all(a == b or _tables([a, b]) for a, b in paired):
            lost = [entry for entry in old if entry not in new]
            what = f"lost {', '.join(map(_short, lost))}" if lost else "has its entries in another order"
            yield Change(path, f"{path} {what}", False)
            return
        for i, (a, b) in enumerate(paired):
            yield from _changes(a, b, f"{path}[{i}]", growing, free)
        if gained := new[len(old) :]:
            yield Change(path, f"{path} gained {', '.join(map(_short, gained))}", grows)
    elif grows and type(old) in (int, float) and type(new) in (int, float) and new > old:
        yield Change(path, f"{path} rose from {old} to {new}", True)
    else:
        yield Change(path, f"{path} was {_short(old)} and is now {_short(new)}", False)


def _tables(entries: list[Any]) -> bool:
    return all(isinstance(entry, dict) for entry in entries)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _plain(config: Mapping[str, Any]) -> Any:
    """The config as read back from JSON, so that tuples equal lists and paths equal their text."""
    return json.loads(_canonical(config))


def _canonical(config: Mapping[str, Any]) -> str:
    return json.dumps(config, sort_keys=True, default=str, separators=(",", ":"))


def package_versions() -> dict[str, str]:
    installed = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed


@cache
def maker(device: str) -> dict[str, str]:
    """Versions and device with which this process computes."""
    known = package_versions()
    versions = {name: known[name] for name in ("heatproof", "torch", "python") if name in known}
    return versions | {"device": device, "device_name": _gpu_name(device) or _cpu_name()}


def git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the repository around a folder and whether it has changes; None outside a repository."""

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
        return subprocess.check_output(command, text=True, timeout=10, stdin=none, stderr=none).strip()

    none = subprocess.DEVNULL
    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _gpu_name(device: str) -> str:
    """Name of a CUDA device; "" for another device."""
    if device.partition(":")[0] != "cuda":
        return ""
    import torch  # not needed to read a run

    return torch.cuda.get_device_name(device) if torch.cuda.is_available() else ""


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
