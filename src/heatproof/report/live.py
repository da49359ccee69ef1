"""A run folder while it grows: snapshots of what is finished, each read once, however many ask for it.

A snapshot is the set of parts that exist at one moment; its queries see these parts and no later one, so that
numbers on one page belong together. A new snapshot is taken when there are new parts, but no sooner than five
times what reading the last one took: watching a run must not slow it down.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

from heatproof.errors import HeatproofError, StoreError, UnknownNameError
from heatproof.report.gallery import front_pictures, offered, packed_maps
from heatproof.report.page import read_report
from heatproof.report.pieces import Section
from heatproof.store import RunFolder
from heatproof.store.ledger import Seal
from heatproof.verdict.data import RunData, read_run
from heatproof.verdict.judge import judge

WAITING = "waiting for the first unit"
KEPT = 12  # readings that are remembered: a few checkpoints of one snapshot
PATIENCE = 1.0, 5.0  # seconds between snapshots at least, and how often the time that reading takes
T = TypeVar("T")


class Snapshot(RunFolder):
    """A run as it was when it was looked at: parts that are finished later are not seen."""

    def __init__(self, folder: RunFolder, parts: Sequence[str]) -> None:
        super().__init__(folder.path, folder.manifest)
        self.parts = parts

    @cached_property
    def version(self) -> str:
        """A name for exactly these parts under these settings."""
        text = "\n".join([self.manifest.config_hash, *self.parts])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def done(self) -> set[str]:
        return set(self.parts)

    def units(self) -> dict[str, Seal | None]:
        return {unit: seal for unit, seal in super().units().items() if unit in self.parts}


class SharedCache:
    """Values by key, each made once, also when many ask for it at the same time; the oldest are forgotten."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._made: OrderedDict[Any, Future[Any]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Any, make: Callable[[], T]) -> T:
        with self._lock:
            mine = key not in self._made
            waiting = self._made.setdefault(key, Future())
            self._made.move_to_end(key)
            while len(self._made) > self.most:
                self._made.popitem(last=False)
        if mine:
            try:
                waiting.set_result(make())
            except BaseException as error:  # whoever waits must hear of it; the next one tries again
                with self._lock:
                    self._made.pop(key, None)
                waiting.set_exception(error)
        return cast(T, waiting.result())


class Live:
    """What the live page asks about a run; safe to ask from many threads."""

    def __init__(self, path: str | Path) -> None:
        self._folder = RunFolder.open(path)
        self.path = self._folder.path
        self._store, self._store_lock = self._folder.maps(), threading.Lock()
        self._kept, self._lock = SharedCache(KEPT), threading.Lock()
        self._snapshot = Snapshot(self._folder, ())
        self._look_again, self._reading = 0.0, 0.0  # when, and the seconds that reading took

    def warm(self) -> None:
        """Read what the page will ask for first."""
        with contextlib.suppress(HeatproofError):  # whoever asks will hear of it
            self.report(self.data())

    def snapshot(self) -> Snapshot:
        """The run as the page shows it now."""
        with self._lock:
            if time.monotonic() >= self._look_again:
                parts = tuple(sorted(self._folder.done()))
                if parts != self._snapshot.parts:  # the settings may have grown with them
                    self._snapshot = Snapshot(RunFolder.open(self.path), parts)
                least, factor = PATIENCE
                self._look_again = time.monotonic() + max(least, factor * self._reading)
                self._reading = 0.0
            return self._snapshot

    def state(self) -> dict[str, Any]:
        """How much there is, and a name for it that changes when it grows."""
        now = self.snapshot()
        found: dict[str, Any] = {"version": now.version, "units": len(now.parts), "rows": 0}
        if now.parts:
            count = "select count(*) as n from scores"
            found["rows"] = self._read(now, ("rows",), lambda: int(now.scores().sql(count)[0]["n"]))
            found["idle"] = max(0, round(time.time() - (now.path / "scores").stat().st_mtime))
        return found

    def data(self, model: str | None = None, checkpoint: str | None = None) -> RunData:
        """One model at one checkpoint (its last with rows by default)."""
        now = self.snapshot()
        if not now.parts:
            raise StoreError(WAITING)
        found = self._read(now, ("data", model, checkpoint), lambda: read_run(now, model, checkpoint))
        if (model, checkpoint) == (found.model, found.checkpoint):
            return found
        return self._read(now, ("data", found.model, found.checkpoint), lambda: found)  # one for both names

    def choices(self, data: RunData) -> dict[str, Any]:
        """What can be chosen on the page."""
        present = sorted({label for label in data.images.labels if label is not None})
        return {
            "model": data.model,
            "models": data.models,
            "checkpoint": data.checkpoint,
            "checkpoints": data.checkpoints,
            "classes": [{"label": label, "name": data.class_name(label)} for label in present],
            **offered(data),
        }

    def report(self, data: RunData) -> dict[str, str]:
        """The parts of the report's page as HTML; the pictures' place is left to the live page."""

        def make() -> dict[str, str]:
            verdict, place = judge(data), Section("pictures", "Pictures", {})
            return read_report(data, verdict, place, front=front_pictures(data, verdict)).fragments()

        assert isinstance(data.folder, Snapshot), "take the data from Live.data()"
        return self._read(data.folder, ("report", data.model, data.checkpoint), make)

    def picture(self, key: str) -> bytes:
        """PNG or JPEG of the image with this key."""
        content = self._folder.pictures().read(self.image(key))
        if content is None:
            raise UnknownNameError("picture", key, ())
        return content

    def image(self, key: str) -> str:
        """The image with this key, at any checkpoint."""
        now, names = self.snapshot(), dict[str, str]()
        if now.parts:
            every = "select distinct image from scores where image <> ''"
            names = self._read(
                now, ("names",), lambda: {key_of(r["image"]): r["image"] for r in now.scores().sql(every)}
            )
        if key not in names:
            raise UnknownNameError("image", key, ())
        return names[key]

    def maps(self, data: RunData, method: str, keys: Sequence[str]) -> dict[str, Any]:
        """Maps by key, None for an image that has none (yet)."""
        if method not in data.methods:
            raise UnknownNameError("method", method, data.methods)
        ids = {key: self.image(key) for key in keys}
        with self._store_lock:
            found = packed_maps(data, method, list(ids.values()), self._store)
        return {key: found.get(name) for key, name in ids.items()}

    def _read(self, of: Snapshot, what: tuple[Any, ...], make: Callable[[], T]) -> T:
        def timed() -> T:
            began = time.monotonic()
            try:
                return make()
            finally:
                self._reading += time.monotonic() - began

        return self._kept.get((of.version, *what), timed)


def key_of(image: str) -> str:
    """What an image is called in an address: any name becomes 24 harmless letters.

    >>> key_of("../../etc/passwd")
    '3754d6cb3a38e1185e5b382d'
    """
    return hashlib.sha256(image.encode("utf-8", "backslashreplace")).hexdigest()[:24]
