"""Leases of processes that write in a run folder, records with a checksum, and seals of finished units.

    locks/ID.lease     "BEAT {shards, process, host, kernel}"
    seals/UNIT.json    the SHA-256 of each file of the unit, the unit's fields, the versions that computed it

On the same kernel, containers included, the lock of a lease's file decides: the system frees it when the
process ends. For another kernel, where locks may not work, the heartbeat is watched: one that does not
change for PATIENCE seconds of the watcher's own clock has ended. Clocks and process numbers of different
machines are never compared. A temporary file carries the lease of its process. (filelock has no heartbeat:
on a file system without locks it blocks for ever after a crash.)

The seal is written last: a unit is done exactly when its seal and its files exist. Records hold a checksum
of themselves. Files are compared with their seals when they are read, once per process as long as size,
times and inode stay. Links are not followed: in a folder from elsewhere they could lead anywhere.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import socket
import stat
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from heatproof.disk import clear_failure, digest, valid_unicode, write_whole
from heatproof.errors import StoreError
from heatproof.images.source import file_state, is_settled
from heatproof.rows import Unit

log = logging.getLogger("heatproof.store")

BEAT = 5.0  # seconds
PATIENCE = 60.0
_TEMPORARY = re.compile(r"\.([0-9a-f]{12})\.[0-9a-f]{8}\.tmp$")  # see write_whole
_held: set[int] = set()  # descriptors of leases and locks of this process
_leases: dict[Path, tuple[Lease, int]] = {}  # with the number of those who use it
_guard = threading.RLock()


class Lease:
    """This process's right to write in one folder."""

    def __init__(self, root: Path) -> None:
        self.id = uuid.uuid4().hex[:12]
        self.path = root / "locks" / f"{self.id}.lease"
        self.shards: list[str] = []
        self.beats = 0
        self._stop = threading.Event()
        with clear_failure(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            made = self.path.with_suffix(".new")  # invisible to others until it is locked
            self.descriptor = os.open(made, os.O_RDWR | os.O_CREAT, 0o666)
            _held.add(self.descriptor)
            _flock(self.descriptor, wait=True)
            self._write()
            os.replace(made, self.path)
        threading.Thread(target=self._beat, name="heatproof-lease", daemon=True).start()

    def hold(self, shards: list[str]) -> None:
        with clear_failure(self.path):
            self.shards = shards
            self._write()

    def close(self) -> None:
        self._stop.set()
        if self.descriptor in _held:  # not in a forked child, which never owned it
            with suppress(OSError):
                self.path.unlink(missing_ok=True)
            _release(self.descriptor)

    def _write(self) -> None:
        own = {"process": os.getpid(), "host": socket.gethostname(), "kernel": kernel()}
        text = f"{self.beats:012d} {json.dumps({'shards': self.shards, **own})}\n".encode()
        os.pwrite(self.descriptor, text, 0)
        os.ftruncate(self.descriptor, len(text))
        os.fsync(self.descriptor)

    def _beat(self) -> None:
        while not self._stop.wait(BEAT):
            self.beats += 1
            with suppress(OSError):  # a missed heartbeat on a full disk must not stop the work
                self._write()


@contextmanager
def writing(root: Path) -> Iterator[Lease]:
    """The lease of this process in a folder, valid while any thread uses it."""
    key = root.absolute()
    with _guard:
        lease, users = _leases.get(key) or (Lease(root), 0)
        _leases[key] = lease, users + 1
    try:
        yield lease
    finally:
        with _guard:
            current, users = _leases.get(key, (None, 0))  # none in a forked child
            if current is lease and users > 1:
                _leases[key] = lease, users - 1
            elif current is lease:
                del _leases[key]
                lease.close()


def claim(lease: Lease, root: Path, shard: str) -> None:
    """Claim a shard; raises StoreError if a living process has it, or one that overlaps with it."""
    count = shard.rpartition("/")[2]
    rivals: dict[Path, tuple[str, dict[str, Any]]] = {}
    for path, about in _possible_writers(root):
        for other in about.get("shards", ()):
            if shard == other or other.rpartition("/")[2] != count:  # shards of other counts share images
                rivals.setdefault(path, (other, about))
    living = next((path for path in rivals if alive(path)), None) or _watch(set(rivals))
    if living:
        other, about = rivals[living]
        beside = f"; shards of one run all have the same count, so not {shard} beside it"
        raise StoreError(
            f"{root} is being written by process {about['process']} on {about['host']} (shard {other}); "
            f"wait for it to end or stop it first{beside * (other != shard)}"
        )
    lease.hold([*lease.shards, shard])


def claims(root: Path) -> list[str]:
    """Shards that a process works on, or may work on if it is on another machine."""
    return [shard for _, about in _possible_writers(root) for shard in about.get("shards", ())]


def alive(path: Path) -> bool | None:
    """Whether the process of a lease is alive; None if only its heartbeat can show it."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    except OSError:
        return None  # a folder that may only be read
    try:
        _flock(descriptor, shared=True)
        return False if _read(path)[1].get("kernel") == kernel() else None
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)


def lease_of(name: str) -> str | None:
    """The lease under which a temporary file is written; None for other files."""
    match = _TEMPORARY.search(name)
    return match[1] if match else None


@contextmanager
def without_leftovers(root: Path) -> Iterator[None]:
    """Remove temporary files of processes that ended; never those of living ones.

    If only the heartbeat can show it, they are removed after the work, unless the heartbeat has changed.
    """
    began, files = time.monotonic(), {path: [path] for path in (root / "locks").glob("*.lease")}
    for parent, _, names in os.walk(root):
        for name in names:
            if owner := lease_of(name):
                path = root / "locks" / f"{owner}.lease"
                files.setdefault(path, [path]).append(Path(parent, name))
    states = {path: alive(path) for path in files}
    unsure = {path: _read(path)[0] for path, state in states.items() if state is None}
    remove(root, [file for path, state in states.items() if state is False for file in files[path]])
    yield
    if time.monotonic() - began > PATIENCE:
        ended = [path for path, beat in unsure.items() if not alive(path) and _read(path)[0] == beat]
        remove(root, [file for path in ended for file in files[path]])


@contextmanager
def turn(root: Path) -> Iterator[None]:
    """Lock under which run.json, plan.json and leases are written."""
    file = root / "locks" / "manifest"
    with clear_failure(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    _held.add(descriptor)
    try:
        with clear_failure(file):
            _flock(descriptor, wait=True)
        yield
    finally:
        _release(descriptor)


def _release(descriptor: int) -> None:
    if descriptor in _held:
        _held.discard(descriptor)
        os.close(descriptor)


@cache
def kernel() -> str:
    """Identifier of the running kernel, equal in all containers of a machine until reboot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return f"{socket.gethostname()}-{uuid.getnode()}"


def _possible_writers(root: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Leases of processes that are alive, or may be."""
    leases = sorted((root / "locks").glob("*.lease"))
    return [(path, _read(path)[1]) for path in leases if alive(path) is not False]


def _watch(paths: set[Path]) -> Path | None:
    """The first of these leases whose heartbeat changes."""
    before = {path: _read(path)[0] for path in paths}
    end = time.monotonic() + PATIENCE
    if paths:
        log.warning("checking for up to %.0f s whether another machine writes this run", PATIENCE)
    while paths and time.monotonic() < end:
        time.sleep(min(1.0, BEAT / 2))
        for path in paths:
            if path.exists() and _read(path)[0] != before[path]:
                return path
    return None


def _read(path: Path) -> tuple[str, dict[str, Any]]:
    try:
        beat, _, about = path.read_text(errors="replace").partition(" ")
        content = json.loads(about)
        return beat, content if isinstance(content, dict) else {}
    except (OSError, ValueError):
        return "", {}


def _flock(descriptor: int, wait: bool = False, shared: bool = False) -> None:
    import fcntl  # absent on Windows, where everything but writing runs still works

    fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))


def _forget() -> None:
    """Drop leases after a fork: a child must not keep its parent's leases alive."""
    global _guard
    _guard = threading.RLock()  # which another thread of the parent may have held
    for descriptor in _held:
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()
    _leases.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


FOLDERS = ("scores", "maps", "pictures", "evidence", "seals")
ASIDE = "set-aside"
CHECKSUM = '"checksum": "'
OWN = re.compile(r"(scores|maps(/[\w-]+)?|pictures)/\w[\w.-]*|evidence/[\w%.~-]+")  # what a seal may name


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
    "gradients.json": dict[str, dict[str, dict[str, tuple[float, ...]]]],
    "left_out.json": dict[str, dict[str, str]],
    "verdict.json": dict[str, Any],
}
_verified: dict[str, tuple[Any, ...]] = {}


def write_record(path: Path, content: Mapping[str, Any], lease: str = "", indent: int | None = 1) -> None:
    """Write a JSON file whose first entry is the SHA-256 of all that follows."""
    write_whole({path: record_text(content, indent)}, lease)


def record_text(content: Mapping[str, Any], indent: int | None = None) -> str:
    """The text of a record, with its checksum."""
    rest = json.dumps(content, indent=indent, default=str)[1:] + "\n"
    return f'{{{CHECKSUM}{hash_of(rest)}",{rest}'


def known_record(path: Path) -> dict[str, Any] | None:
    """Read what `write_record` wrote; None if it was never written.

    Raises DamagedError for other content, or types other than RECORDS.
    """
    try:
        text = plain(path).read_bytes().decode()
        start = len(CHECKSUM) + 1
        checksum, rest = text[start : start + 64], text[start + 66 :]
        if text != f'{{{CHECKSUM}{checksum}",{rest}' or checksum != hash_of(rest):
            raise damaged(path, "its content is not what was written")
        content = json.loads(f"{{{rest}")
        check_types(content, RECORDS.get(path.name, dict[str, Any]))
    except FileNotFoundError:
        return None
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
        raise StoreError(
            f"{path} is a link or a device, which is not followed in a run folder; if you know where it "
            "leads, copy the folder with what is behind its links: cp -rL"
        )
    return path


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
    files: Mapping[str, str]  # relative path -> SHA-256
    made: Mapping[str, str]  # versions and device


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
            seal: Seal = check_types(known_record(self.root / f"{unit}.json"), Seal)
            if check_types(seal.unit, Unit).hash != unit or not all(map(OWN.fullmatch, seal.files)):
                return None
        except (StoreError, ValueError):
            return None
        self.files |= seal.files
        return seal

    def write(self, unit: Unit, files: Mapping[str, str], made: Mapping[str, str], lease: str) -> None:
        seal = {"unit": unit.record, "files": files, "made": made}
        write_record(self.root / f"{unit.hash}.json", seal, lease)
        self.files |= files

    def picture_hash(self, path: Path) -> str:
        """SHA-256 of a stored image; "" if no seal names it."""
        name = f"pictures/{path.name}"
        if name not in self.files:
            self.all()
        return self.files.get(name, "")

    def present(self) -> set[str]:
        """Parts, indexes and shards that exist, as a seal names them."""
        root = self.root.parent
        shards = [f"maps/{entry.name}" for entry in _entries(root / "maps") if entry.is_dir()]
        return {
            f"{name}/{e.name}"
            for name in ("scores", "maps", "evidence", *shards)
            for e in _entries(root / name)
        }

    def forget(self, unit: str) -> None:
        path = self.root / f"{unit}.json"
        with clear_failure(path):
            path.unlink(missing_ok=True)
        if (known := self._read.pop(unit, None)) and known[1]:
            for file in known[1].files:
                self.files.pop(file, None)


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        yield from entries


def hash_of(text: str) -> str:
    """SHA-256 of a text, of which what is not valid Unicode is escaped."""
    return hashlib.sha256(valid_unicode(text).encode()).hexdigest()


def slug(method: str) -> str:
    """Folder name for a method with its options, unique for each text.

    >>> slug("gradcam"), slug("lime(samples=200)")
    ('gradcam', 'lime-samples-200-6a7d122a')
    """
    if re.fullmatch(r"[a-z0-9_]{1,60}", method):
        return method
    words = re.sub(r"[^a-z0-9_]+", "-", method.lower()).strip("-")[:40].rstrip("-")
    return f"{words}-{hash_of(method)[:8]}".lstrip("-")
