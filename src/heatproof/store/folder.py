"""One run, one folder, which can be left at any moment and taken up again.

    run.json               the manifest
    scores/PART.parquet    rows of a finished unit; the unit is done exactly when this file exists
    maps/...               maps, in place before the rows of their unit (see maps.py)
    pictures/...           the pictures as the model saw them, likewise (see pictures.py)
    locks/                 who is writing; the system frees a lock when its process ends, however it ends

Every file is whole or absent, so a resume asks only which parts exist. Several processes may write
different units at the same time, and the same unit twice does no harm: the bytes are equal.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from heatproof.errors import StoreError
from heatproof.store._files import clear_failure, host_name, remove_leftovers, write_whole
from heatproof.store.manifest import GROWING, Manifest
from heatproof.store.maps import MapStore, shard_files
from heatproof.store.pictures import Pictures
from heatproof.store.scores import Scores, write_part
from heatproof.types import Maps, Score, Unit

_held: set[int] = set()  # descriptors of locks of this process


class RunFolder:
    """A run on disk: its manifest, its finished units, their scores and maps."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest

    @classmethod
    def create(cls, path: str | Path, manifest: Manifest) -> RunFolder:
        """Start a new run; a folder that already holds one is refused."""
        path = Path(path)
        with _manifest_lock(path):
            if (path / "run.json").exists():
                raise StoreError(f"{path} already holds a run; resume it or choose another folder")
            manifest.write(path / "run.json")
        return cls(path, manifest)

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """An existing run, to read or to write more units; nothing on disk is touched.

        The folder of a study serves too: its run lies inside, in run/.
        """
        path = Path(path)
        if not (path / "run.json").exists() and (path / "run" / "run.json").exists():
            path = path / "run"
        return cls(path, Manifest.read(path / "run.json"))

    @classmethod
    def resume(
        cls,
        path: str | Path,
        manifest: Manifest,
        growing: Collection[str] = GROWING,
        free: Collection[str] = (),
    ) -> RunFolder:
        """Go on with a run, or start it where there is none.

        Refused, with what changed, unless the manifest is the same or only adds (see `compare_configs`);
        additions are written to run.json, which keeps the earlier manifest too.
        """
        path = Path(path)
        with _manifest_lock(path):
            if not (path / "run.json").exists():
                manifest.write(path / "run.json")
                return cls(path, manifest)
            old = Manifest.read(path / "run.json")
            changes = old.changes(manifest, growing, free)
            refused = [change.sentence for change in changes if not change.addition]
            if refused:
                raise StoreError(
                    f"{path} was started with other settings: {'; '.join(refused)}; "
                    "undo the change or choose another folder"
                )
            if not changes:
                return cls(path, old)
            grown = manifest.grown_from(old)
            grown.write(path / "run.json")
            return cls(path, grown)

    @contextmanager
    def lock(self, name: str = "0/1") -> Iterator[None]:
        """Hold one shard of the run; a second process on the same shard is refused.

        What killed processes left half-written is cleaned up on the way in.
        """
        with _lock(self.path, name):
            remove_leftovers(self.path)
            yield

    def write_unit(
        self,
        unit: Unit,
        scores: Sequence[Score] = (),
        maps: Mapping[str, Maps] | None = None,
        pictures: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Write a finished unit: first its maps and pictures, then its rows (maybe none), which make it done.

        `maps` is keyed by the method as the rows name it, `pictures` ("H W 3" uint8) by the image; a picture
        that is there is left alone. May be called from any thread or process.
        """
        files = shard_files(self.path / "maps", unit, maps) if maps else {}
        kept = self.pictures()
        for name in kept.missing(pictures or ()):
            files |= kept.files(name, pictures[name])  # type: ignore[index]  # missing() names what was given
        if files:
            write_whole(files)
        part = self.path / "scores" / f"{unit.hash}.parquet"
        write_whole({part: partial(write_part, scores=scores, unit=unit.hash)})

    def done(self) -> set[str]:
        """Hashes of the finished units."""
        return {part.stem for part in (self.path / "scores").glob("*.parquet")}

    def scores(self) -> Scores:
        return Scores(self.path / "scores")

    def maps(self) -> MapStore:
        return MapStore(self.path / "maps", self.path / "scores")

    def pictures(self) -> Pictures:
        return Pictures(self.path / "pictures")


def _manifest_lock(path: Path) -> contextlib.AbstractContextManager[None]:
    """Shards that start together take turns at run.json."""
    with clear_failure(path):
        path.mkdir(parents=True, exist_ok=True)
    return _lock(path, "manifest", wait=True)


@contextmanager
def _lock(path: Path, name: str, wait: bool = False) -> Iterator[None]:
    import fcntl  # absent on Windows, where everything but writing runs still works

    file = path / "locks" / re.sub(r"[^\w-]+", "-", name)
    with clear_failure(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    _held.add(descriptor)
    try:
        with clear_failure(file):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                owner = os.read(descriptor, 200).decode(errors="replace") or "another process"
                raise StoreError(
                    f"{path} is being written by {owner} (shard {name}); wait for it to end or stop it first"
                ) from None
            os.truncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {host_name()}".encode())
        try:
            yield
        finally:
            if descriptor in _held:  # not in a forked child, which never owned the lock
                os.truncate(descriptor, 0)
    finally:
        if descriptor in _held:
            _held.discard(descriptor)
            os.close(descriptor)


def _forget_locks() -> None:
    """A forked child must not keep its parent's locks alive when the parent is killed."""
    for descriptor in _held:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)
