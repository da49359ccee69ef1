"""What a picture is made of: hashes of contents, so that one that is replaced by another is noticed.

A file is read once; after that its size, times and inode say that it is the same. With `by_mtime`, for sets
too large to read, size and time of change stand for the content, and must survive when the files are copied.
"""

from __future__ import annotations

import errno
import hashlib
import json
import stat
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heatproof.images.source import Sample, Source

SETTLED = 2_000_000_000  # nanoseconds: a file this young could change again without another time
THREADS = 8

State = tuple[int, int, int, int]


def file_state(path: Path) -> State:
    """Size, times and inode: a file that keeps them all was not touched (nobody can set ctime back)."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):  # a pipe or a device, which reading may never end
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def is_settled(state: State) -> bool:
    """Whether a later change must show in the file's times, whose steps may be milliseconds."""
    return time.time_ns() - max(state[1:3]) > SETTLED


@dataclass
class Hashes:
    """SHA-256 of files, remembered."""

    known: dict[str, tuple[Any, ...]] = field(default_factory=dict)  # path -> state, hash
    by_mtime: bool = False

    def of(self, path: Path) -> str | None:
        """None where there is no such file, or none that can be read."""
        try:
            state = file_state(path)
            with path.open("rb") as file:
                mark = hashlib.file_digest(file, "sha256").hexdigest()
        except (OSError, ValueError):  # ValueError: a NUL in the path
            return None
        if is_settled(state):
            self.known[str(path)] = *state, mark
        return mark

    def remembered(self, path: Path) -> str | None:
        """The hash of a file that was not touched since; None where only reading it can tell."""
        try:
            state = file_state(path)
        except (OSError, ValueError):
            return None
        if self.by_mtime:
            return f"{state[0]} bytes of {state[1]}"
        *before, mark = self.known.get(str(path), (None,))
        return mark if tuple(before) == state else None


def files_of(sample: Sample) -> list[Path]:
    content = sample.content if isinstance(sample.content, tuple) else (sample.content,)
    return [part for part in (*content, *sample.masks.values()) if isinstance(part, Path)]


def identify(source: Source, hashes: Hashes) -> list[tuple[str, str]]:
    """Id and identity of every sample: picture, masks, label and boxes."""
    files = {path for sample in source.samples for path in files_of(sample)}
    marks = {path: hashes.remembered(path) for path in files}
    unread = [path for path, mark in marks.items() if mark is None]
    with ThreadPoolExecutor(THREADS) as pool:  # hashing and reading leave Python's lock alone
        shares = [unread[k::THREADS] for k in range(THREADS)]
        for share, found in zip(shares, pool.map(lambda s: [hashes.of(p) for p in s], shares), strict=True):
            marks |= zip(share, found, strict=True)
    return [(sample.id, _identity(source, sample, marks)) for sample in source.samples]


def _identity(source: Source, sample: Sample, marks: Mapping[Path, str | None]) -> str:
    from heatproof.images.source import content_stamp, stated_findings

    masks = [
        [name, marks[mask] if isinstance(mask, Path) else content_stamp(mask)]
        for name, mask in sorted(sample.masks.items())
    ]
    content = marks[sample.content] if isinstance(sample.content, Path) else source.stamp(sample)
    if isinstance(sample.content, tuple):  # the slices of a volume
        content = [marks[part] for part in sample.content]
    known = [sample.id, sample.label, sample.boxes, sample.frame, sample.objects, masks, content]
    row = [*known, *stated_findings(sample)]
    return hashlib.sha256(json.dumps(row).encode()).hexdigest()[:32]
