"""Atomic writes: under a temporary name, forced to disk, then renamed."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from heatproof.errors import StoreError

Content = str | bytes | Callable[[Path], object]  # what a file holds, or what writes it at a path


def write_whole(files: Mapping[Path, Content], tag: str = "") -> dict[Path, str]:
    """Write several files, each completely or not at all, and return their digests.

    All are on disk before the first is renamed: one wait for the disk serves many small files. Temporary
    names are NAME.TAG.RANDOM.tmp, so that files left behind can be traced to their process.
    """
    middle = f"{tag}." if tag else ""
    temporary = {path: path.with_name(f"{path.name}.{middle}{uuid.uuid4().hex[:8]}.tmp") for path in files}
    digests: dict[Path, str] = {}
    folders = {path.parent for path in files}
    try:
        for path, content in files.items():
            with clear_failure(path):
                if not path.parent.is_dir():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    folders.add(path.parent.parent)
                if callable(content):
                    content(temporary[path])
                else:
                    temporary[path].write_bytes(content.encode() if isinstance(content, str) else content)
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
    """Raise StoreError with one sentence and a remedy for an OSError about a file."""
    try:
        yield
    except OSError as error:
        if is_full(error):
            why = "the disk is full; free some space and start again"
            with suppress(OSError):
                folder = next(parent for parent in path.absolute().parents if parent.is_dir())
                why += f" ({shutil.disk_usage(folder).free / 1e6:,.1f} MB are free in {folder})"
        elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            why = "the folder is not writable; change its permissions or choose another folder"
        else:
            why = f"{error.strerror or error}; what was written before is kept"
        raise StoreError(f"cannot write {path}: {why}") from error


def output_path(path: str | Path) -> Path:
    """The path of a file to write, whose folder must exist."""
    path = Path(path)
    if not path.parent.is_dir():
        raise StoreError(f"cannot write {path}: the folder {path.parent} does not exist; create it first")
    return path


def is_full(error: OSError) -> bool:
    """Whether the disk was full; NumPy only reports that it wrote fewer items than it should."""
    short = error.errno is None and re.search(r"\d+ requested and \d+ written", str(error))
    return bool(short) or error.errno in (errno.ENOSPC, errno.EDQUOT)


def digest(path: Path) -> str:
    """SHA-256 in hexadecimal, as sha256sum prints it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def valid_unicode(text: str) -> str:
    r"""Escape what is not valid Unicode in a file name, so that the text can be stored.

    >>> valid_unicode("caf\udce9.png")
    'caf\\udce9.png'
    """
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)
