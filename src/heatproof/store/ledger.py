"""Records with a checksum, and the seals of finished units.

    seals/UNIT.json    the SHA-256 of each file of the unit, the unit's fields, the versions that computed it

The seal is written last: a unit is done exactly when its seal and its files exist, and rows that no seal
names do not count. A seal, like run.json, plan.json and status.json, holds a checksum of itself. Files are
compared with their seals when they are read, once per process as long as size, times and inode stay. Links
are not followed: in a folder from elsewhere they could lead anywhere.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from heatproof.disk import clear_failure, digest, valid_unicode, write_whole
from heatproof.errors import StoreError
from heatproof.images.files import MAX_PIXELS
from heatproof.images.source import file_state, is_settled
from heatproof.rows import Unit

FOLDERS = ("scores", "maps", "pictures", "seals")
ASIDE = "set-aside"
MAX_INDEX_BYTES = 1 << 26  # of an unpacked index of maps: a million maps
CHECKSUM = '"checksum": "'
OWN = re.compile(r"(scores|maps(/[\w-]+)?|pictures)/\w[\w.-]*")  # what a seal may name


class DamagedError(StoreError):
    """A file of a run folder is missing, or its content is not what was written."""


class Plan(TypedDict):
    """plan.json."""

    run: str  # id of its manifest
    images: int
    checkpoints: list[str]
    units: list[str]  # hashes
    retry: NotRequired[list[str]]  # images whose content may change
    records: NotRequired[list[str]]  # that were written before it


class ShardState(TypedDict):
    """Entry of status.json about a shard."""

    state: str
    reason: str


RECORDS: dict[str, Any] = {  # types of the records of a run folder; run.json has those of Manifest
    "plan.json": Plan,
    "images.json": dict[str, list[tuple[str, str]]],
    "status.json": dict[str, ShardState],
    "hashes.json": dict[str, dict[str, list[Any]]],
    "gradients.json": dict[str, dict[str, dict[str, tuple[float, float]]]],
    "left_out.json": dict[str, dict[str, str]],
    "album.json": dict[str, Any],
    "verdict.json": dict[str, Any],
}
_verified: dict[str, tuple[Any, ...]] = {}


def write_record(path: Path, content: Mapping[str, Any], lease: str = "", indent: int | None = 1) -> None:
    """Write a JSON file whose first entry is the SHA-256 of all that follows."""
    rest = json.dumps(content, indent=indent, default=str)[1:] + "\n"
    text = f'{{{CHECKSUM}{_hash(rest)}",{rest}'
    write_whole({path: text}, lease)


def known_record(path: Path) -> dict[str, Any] | None:
    """A record; None if it was never written."""
    try:
        return read_record(path)
    except FileNotFoundError:
        return None


def read_record(path: Path) -> dict[str, Any]:
    """Read what `write_record` wrote; raises DamagedError for other content, or types other than RECORDS."""
    try:
        text = plain(path).read_bytes().decode()
        start = len(CHECKSUM) + 1
        checksum, rest = text[start : start + 64], text[start + 66 :]
        if text != f'{{{CHECKSUM}{checksum}",{rest}' or checksum != _hash(rest):
            raise damaged(path, "its content is not what was written")
        content = json.loads(f"{{{rest}")
        check_types(content, RECORDS.get(path.name, dict[str, Any]))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, str(error)) from error
    return dict(content)


def check_types(content: Any, kind: Any) -> Any:
    """Content as an object of `kind`; ValueError where a value has another type than that declares."""
    import msgspec  # optional here: a monitor without a run folder does not need it

    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:  # no ValueError before msgspec 0.20
        raise ValueError(str(error)) from error


def is_plain(path: Path) -> bool:
    """Whether it is a regular file: a link could lead out of the folder, a pipe would block."""
    with suppress(FileNotFoundError):
        return stat.S_ISREG(os.lstat(path).st_mode)
    return False


def plain(path: Path) -> Path:
    """The path of a regular file, or raise StoreError."""
    if not is_plain(path) and os.path.lexists(path):
        raise _leads_away(path)
    return path


def refuse_links(root: Path) -> None:
    """Raise StoreError if a part of a run folder is a link."""
    if linked := linked_folders(root):
        raise _leads_away(root / linked[0])


def remove(root: Path, files: Iterable[Path]) -> None:
    """Delete files of a run, never through a link."""
    links = linked_folders(root)
    for path in files:
        if not any(path.is_relative_to(root / link) for link in links):
            with clear_failure(path):
                path.unlink(missing_ok=True)


def linked_folders(root: Path) -> list[str]:
    """Parts of a run folder that are links to elsewhere."""
    links = [name for name in (*FOLDERS, "locks", ASIDE) if (root / name).is_symlink()]
    if "maps" not in links:
        links += [f"maps/{entry.name}" for entry in _entries(root / "maps") if entry.is_symlink()]
    return links


def damaged(path: Path, why: str) -> DamagedError:
    return DamagedError(
        f"cannot read {path}: {why}; heatproof verify RUN lists all damage and --repair removes it"
    )


def check_file(path: Path, expected: str) -> None:
    """Raise DamagedError if the SHA-256 of a file is not the expected one."""
    try:
        state = file_state(plain(path))
        if _verified.get(str(path)) == (expected, *state):
            return
        if digest(path) != expected:
            raise damaged(path, "its content is not what was written")
    except FileNotFoundError:
        raise damaged(path, "it is missing") from None
    except OSError as error:
        raise damaged(path, error.strerror or str(error)) from error
    if is_settled(state):
        _verified[str(path)] = expected, *state


@dataclass(frozen=True)
class Seal:
    """The record of one finished unit."""

    unit: Mapping[str, Any]
    files: Mapping[str, str] = field(default_factory=dict)  # relative path -> SHA-256
    made: Mapping[str, str] = field(default_factory=dict)  # versions and device


class Ledger:
    """The seals of a folder; each is read once."""

    def __init__(self, root: Path) -> None:
        self.root = root / "seals"
        self.files: dict[str, str] = {}  # of all seals read so far
        self._read: dict[str, tuple[Any, Seal | None]] = {}

    def seals(self) -> dict[str, Seal]:
        """By the unit's hash, without damaged ones."""
        return {unit: seal for unit, seal in self.all().items() if seal is not None}

    def all(self) -> dict[str, Seal | None]:
        read: dict[str, tuple[Any, Seal | None]] = {}
        for entry in _entries(self.root):
            if not entry.name.endswith(".json"):
                continue
            state = entry.stat(follow_symlinks=False)
            key, unit = (state.st_size, state.st_mtime_ns, state.st_ino), entry.name.removesuffix(".json")
            known = self._read.get(unit)
            read[unit] = known if known and known[0] == key else (key, self._take(unit))
        self._read = read
        return {unit: seal for unit, (_, seal) in read.items()}

    def _take(self, unit: str) -> Seal | None:
        try:
            record = read_record(self.root / f"{unit}.json")
            seal = Seal(record["unit"], record["files"], record["made"])
            check_types(asdict(seal), Seal)
            check_types(seal.unit, Unit)
            fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in seal.unit.items()}
            if Unit(**fields).hash != unit or not all(map(OWN.fullmatch, seal.files)):
                return None
        except (StoreError, FileNotFoundError, KeyError, TypeError, ValueError):
            return None
        self.files |= seal.files
        return seal

    def write(self, unit: Unit, files: Mapping[str, str], made: Mapping[str, str], lease: str) -> None:
        seal = Seal(unit.record, files, made)
        write_record(self.root / f"{unit.hash}.json", asdict(seal), lease)
        self.files |= files

    def present(self) -> set[str]:
        """Parts, indexes and shards that exist, as a seal names them."""
        root = self.root.parent
        shards = [f"maps/{entry.name}" for entry in _entries(root / "maps") if entry.is_dir()]
        return {f"{name}/{e.name}" for name in ("scores", "maps", *shards) for e in _entries(root / name)}

    def forget(self, unit: str) -> None:
        path = self.root / f"{unit}.json"
        with clear_failure(path):
            path.unlink(missing_ok=True)
        if (known := self._read.pop(unit, None)) and known[1]:
            for file in known[1].files:
                self.files.pop(file, None)


def _leads_away(path: Path) -> StoreError:
    return StoreError(
        f"{path} is a link or a device, which is not followed in a run folder; if you know where it leads, "
        "copy the folder with what is behind its links: cp -rL"
    )


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        yield from entries


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def slug(method: str) -> str:
    """Folder name for a method with its options, unique for each text.

    >>> slug("gradcam"), slug("lime(samples=200)")
    ('gradcam', 'lime-samples-200-6a7d122a')
    """
    if re.fullmatch(r"[a-z0-9_]{1,60}", method):
        return method
    words = re.sub(r"[^a-z0-9_]+", "-", method.lower()).strip("-")[:40].rstrip("-")
    return f"{words}-{hashlib.sha256(valid_unicode(method).encode()).hexdigest()[:8]}".lstrip("-")


def read_index(path: Path) -> dict[str, Any]:
    """Read an index of maps; a few bytes may unpack to more than the memory, so the size is limited."""
    with gzip.open(plain(path)) as file:
        text = file.read(MAX_INDEX_BYTES + 1)
    if len(text) > MAX_INDEX_BYTES:
        raise ValueError(f"it unpacks to more than {MAX_INDEX_BYTES >> 20} MB")
    index: dict[str, Any] = json.loads(text)
    for entry in index["maps"]:
        if math.prod(map(int, entry["image_size"])) > MAX_PIXELS:
            raise ValueError(f"its images of {entry['image_size']} are too large")
    return index
