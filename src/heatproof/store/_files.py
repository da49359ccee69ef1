"""Files that are whole or absent: written under a temporary name, forced to disk, then renamed.

A temporary name carries the host and process that writes it, so that what a killed process left
behind can be told from what a live one is writing.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from heatproof.errors import StoreError

Write = Callable[[Path], object]

FORGOTTEN_AFTER = 3600.0  # seconds; no file takes that long to write, so its writer is gone
_TEMPORARY = re.compile(r"\.(?P<host>[\w-]+)\.(?P<pid>\d+)\.[0-9a-f]+\.tmp$")
_writing: set[Path] = set()  # temporary files of this process that are not finished


def write_whole(files: Mapping[Path, Write]) -> None:
    """Write several files so that each is complete under its name or not there at all.

    All are on disk before the first is renamed: one wait for the disk serves many small files.
    """
    temporary = {path: _temporary_name(path) for path in files}
    folders = {path.parent for path in files}
    try:
        _writing.update(temporary.values())
        for path, write in files.items():
            with clear_failure(path):
                if not path.parent.is_dir():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    folders.add(path.parent.parent)
                write(temporary[path])
                _to_disk(temporary[path])
        for path in files:
            with clear_failure(path):
                os.replace(temporary[path], path)
        for folder in folders:
            with clear_failure(folder):
                _to_disk(folder)
    finally:  # also on Ctrl-C
        for path in temporary.values():
            with suppress(OSError):  # a folder that cannot be written has nothing to clean
                path.unlink(missing_ok=True)
            _writing.discard(path)


@contextmanager
def clear_failure(path: Path) -> Iterator[None]:
    """Turn what the system says about a file into one sentence that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            why = "the disk is full; free some space and start again, what was written is kept"
        elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            why = "the folder may not be written; change its permissions or choose another folder"
        else:
            why = f"{error.strerror or error}; what was written before is kept"
        raise StoreError(f"cannot write {path}: {why}") from error


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files of processes that no longer run."""
    for parent, _, names in os.walk(folder):
        for name in names:
            if name.endswith(".tmp") and _abandoned(Path(parent, name)):
                with clear_failure(Path(parent, name)):
                    Path(parent, name).unlink(missing_ok=True)


def storable(text: str) -> str:
    """Text as it is stored: file names that are not valid Unicode are written with escapes.

    >>> storable("caf\\udce9.png")
    'caf\\\\udce9.png'
    """
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def host_name() -> str:
    return re.sub(r"[^\w-]", "-", socket.gethostname()) or "unknown"


def _temporary_name(path: Path) -> Path:
    return path.with_name(f"{path.name}.{host_name()}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)


def _abandoned(path: Path) -> bool:
    name = _TEMPORARY.search(path.name)
    if name is None:  # not ours
        return False
    try:
        old = time.time() - path.stat().st_mtime > FORGOTTEN_AFTER
    except FileNotFoundError:  # finished just now
        return False
    if old or name["host"] != host_name():
        return old
    if int(name["pid"]) == os.getpid():
        return path not in _writing
    return not _runs(int(name["pid"]))


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
