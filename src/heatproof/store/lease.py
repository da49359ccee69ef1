"""Leases: which processes write in a run folder; valid while their lock is held or their heartbeat changes.

    locks/ID.lease     "BEAT {shards, process, host, kernel}"

On the same kernel, containers included, the file's lock decides: the system frees it when the process ends,
however it ends. For another kernel, where locks may not work, the heartbeat is watched: one that does not
change for PATIENCE seconds of the watcher's own clock has ended. Clocks and process numbers of different
machines or containers are never compared. A temporary file carries the lease of its process, so that files of
killed processes can be distinguished from those of live ones.

Not filelock: it has a lock for one machine, but no heartbeat. On a shared file system without locks its
SoftFileLock blocks for ever after a crash, and it can tell neither a dead machine from a working one nor
whose temporary files may be removed.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from heatproof.disk import clear_failure
from heatproof.errors import StoreError

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
            _held.discard(self.descriptor)
            with suppress(OSError):
                self.path.unlink(missing_ok=True)
            os.close(self.descriptor)

    def _write(self) -> None:
        about = {
            "shards": self.shards,
            "process": os.getpid(),
            "host": socket.gethostname(),
            "kernel": kernel(),
        }
        text = f"{self.beats:012d} {json.dumps(about)}\n".encode()
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
    rivals: dict[Path, tuple[str, dict[str, Any]]] = {}
    for path, about in _leases_in(root):
        taken = [other for other in about.get("shards", ()) if _overlap(shard, other)]
        if taken and alive(path) is not False:
            rivals[path] = taken[0], about
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
    return [
        shard
        for path, about in _leases_in(root)
        if alive(path) is not False
        for shard in about.get("shards", ())
    ]


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


class Leftovers:
    """Removes temporary files of processes that ended; never those of living ones."""

    def __init__(self, root: Path) -> None:
        self.root, self.began, self.unsure = root, time.monotonic(), {}
        files: dict[str, list[Path]] = {}
        for parent, _, names in os.walk(root):
            for name in names:
                if owner := lease_of(name):
                    files.setdefault(owner, []).append(Path(parent, name))
        leases = {path.stem: path for path in (root / "locks").glob("*.lease")}
        for owner in {*files, *leases}:
            path = leases.get(owner, root / "locks" / f"{owner}.lease")
            state = alive(path)
            if state is False:
                self._remove([*files.get(owner, []), path])
            elif state is None:
                self.unsure[path] = _read(path)[0], files.get(owner, [])

    def look_again(self) -> None:
        """After the work, remove files of processes whose heartbeat has not changed since the start."""
        if time.monotonic() - self.began > PATIENCE:
            for path, (beat, files) in self.unsure.items():
                if alive(path) is not True and _read(path)[0] == beat:
                    self._remove([*files, path])

    def _remove(self, files: list[Path]) -> None:
        for path in files:
            with clear_failure(path):
                path.unlink(missing_ok=True)


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


def _leases_in(root: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in sorted((root / "locks").glob("*.lease")):
        yield path, _read(path)[1]


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


def _overlap(shard: str, other: str) -> bool:
    """Whether two shards share images: shards of different counts do.

    >>> _overlap("0/2", "1/2"), _overlap("0/2", "1/3")
    (False, True)
    """
    return shard == other or shard.rpartition("/")[2] != other.rpartition("/")[2]


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
