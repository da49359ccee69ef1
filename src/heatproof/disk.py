"""Files that are whole or absent: written under a temporary name, forced to disk, then renamed.

A temporary name in a run folder carries the lease of the process that writes it (see lease.py), so that what
a killed process left behind can be told from what a live one is writing.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from heatproof.errors import StoreError

Write = Callable[[Path], object]

FOLDERS = ("scores", "maps", "pictures", "seals", "locks", "set-aside")  # of a run
_TEMPORARY = re.compile(r"\.([0-9a-f]{12})\.[0-9a-f]{8}\.tmp$")


def write_whole(files: Mapping[Path, Write], lease: str = "") -> dict[Path, str]:
    """Write several files so that each is complete under its name or not there at all; their digests.

    All are on disk before the first is renamed: one wait for the disk serves many small files.
    """
    temporary = {path: _temporary_name(path, lease) for path in files}
    digests: dict[Path, str] = {}
    folders = {path.parent for path in files}
    try:
        for path, write in files.items():
            with clear_failure(path):
                if not path.parent.is_dir():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    folders.add(path.parent.parent)
                write(temporary[path])
                digests[path] = digest(temporary[path])
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
    return digests


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


def is_plain(path: Path) -> bool:
    """Whether it is a file itself: a link could lead out of the folder, a pipe would wait for ever."""
    with suppress(FileNotFoundError):
        return stat.S_ISREG(os.lstat(path).st_mode)
    return False


def plain(path: Path) -> Path:
    """The path of a file that may be read, also in a folder that somebody else made."""
    if not is_plain(path) and os.path.lexists(path):
        raise leads_away(path)
    return path


def leads_away(path: Path) -> StoreError:
    return StoreError(
        f"{path} is a link or a device, which is not followed in a run folder; if you know where it leads, "
        "copy the folder with what is behind its links: cp -rL"
    )


def linked_folders(root: Path) -> list[str]:
    """Parts of a run folder that are links, so that whatever is done in them is done elsewhere."""
    found = [name for name in FOLDERS if (root / name).is_symlink()]
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(root / "maps") as entries:
        found += [f"maps/{entry.name}" for entry in entries if entry.is_symlink() and "maps" not in found]
    return found


def digest(path: Path) -> str:
    """SHA-256, as the tool sha256sum prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def lease_of(name: str) -> str | None:
    """The lease under which a temporary file is written; None for other files."""
    found = _TEMPORARY.search(name)
    return found[1] if found else None


def storable(text: str) -> str:
    """Text as it is stored: file names that are not valid Unicode are written with escapes.

    >>> storable("caf\\udce9.png")
    'caf\\\\udce9.png'
    """
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _temporary_name(path: Path, lease: str) -> Path:
    return path.with_name(f"{path.name}.{f'{lease}.' if lease else ''}{uuid.uuid4().hex[:8]}.tmp")


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)
