"""Hashes of the contents of images, so that a replaced image is noticed.

A file is read once; after that, equal size, times and inode mean that it is the same. With `by_mtime`, for
sets too large to read, size and time of change stand for the content, and must survive when the files are
copied.
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
from typing import Any

from heatproof.images.source import Sample, Source, content_stamp, stated_findings

SETTLED = 2_000_000_000  # nanoseconds: a file this young could change again without another time
THREADS = 8

State = tuple[int, int, int, int]


def file_state(path: Path) -> State:
    """Size, times and inode: a file that keeps them all was not changed (ctime cannot be set back)."""
    info = path.stat()
    if not stat.S_ISREG(info.st_mode):  # a pipe or a device, which reading may never end
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino


def is_settled(state: State) -> bool:
    """Whether a later change must show in the file's times, whose steps may be milliseconds."""
    return time.time_ns() - max(state[1:3]) > SETTLED


@dataclass
class Hashes:
    """SHA-256 of files, cached by their state."""

    known: dict[str, tuple[Any, ...]] = field(default_factory=dict)  # path -> state, hash
    by_mtime: bool = False

    def of(self, path: Path) -> str | None:
        """The hash of a file's content; None if it cannot be read."""
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
        """The cached hash of an unchanged file; None if it must be read."""
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
    """Id and identity of every sample: image, masks, label and boxes."""
    files = {path for sample in source.samples for path in files_of(sample)}
    marks = {path: hashes.remembered(path) for path in files}
    unread = [path for path, mark in marks.items() if mark is None]
    with ThreadPoolExecutor(THREADS) as pool:  # hashing and reading release Python's lock
        shares = [unread[k::THREADS] for k in range(THREADS)]  # not a future per file: there may be millions
        for share, read in zip(shares, pool.map(lambda s: [hashes.of(p) for p in s], shares), strict=True):
            marks |= zip(share, read, strict=True)
    return [(sample.id, _identity(source, sample, marks)) for sample in source.samples]


def _identity(source: Source, sample: Sample, marks: Mapping[Path, str | None]) -> str:
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
