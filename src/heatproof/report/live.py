"""A run folder while it grows: snapshots of what is finished, each read once, however many ask for it.

A snapshot is the set of parts that exist at one moment; its queries see these parts and no later one, so that
numbers on one page belong together. A new snapshot is taken when there are new parts, but no sooner than five
times what reading the last one took: watching a run must not slow it down.

Images of a run are chosen by a query, one page at a time or all of them as CSV:

    method     whose scores and maps are shown
    label      true class, by its number
    answer     right or wrong
    search     part of the name, whatever the case of its letters
    sort       name, confidence, or a metric (of the method); order: up or down
    page       from 1

An image without the number it is sorted by comes last either way; equal numbers are in order of their names.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import threading
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from heatproof.errors import HeatproofError, InputError, StoreError, UnknownNameError
from heatproof.report.gallery import front_images, image_record, json_number, offered, packed_maps
from heatproof.report.page import read_report
from heatproof.report.pieces import Section
from heatproof.store import RunFolder
from heatproof.store.ledger import Seal
from heatproof.store.scores import csv_cell
from heatproof.verdict.data import RunData, read_run
from heatproof.verdict.judge import judge

WAITING = "waiting for the first unit"
KEPT = 12  # readings that are remembered: a few checkpoints of one snapshot
PATIENCE = 1.0, 5.0  # seconds between snapshots at least, and how often the time that reading takes
T = TypeVar("T")
PER_PAGE = 60
ANSWERS = ("", "right", "wrong")
ORDERS = ("down", "up")
ANSWER_COLUMNS = (
    "model", "checkpoint", "image", "class", "predicted", "confidence", "right", "explained", "method",
)  # fmt: skip
OWN = ("name", "confidence")  # what images can be sorted by besides metrics


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

    def units(self) -> dict[str, Seal]:
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
            return read_report(data, verdict, place, front=front_images(data, verdict)).fragments()

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


@dataclass(frozen=True)
class Wanted:
    """Which images, in which order."""

    method: str
    label: int | None = None
    answer: str = ""
    search: str = ""
    sort: str = "name"
    order: str = "up"
    page: int = 1


def read_wanted(query: Mapping[str, str], data: RunData) -> Wanted:
    """The choices in a query, checked against the data."""
    method = query.get("method") or next(iter(data.methods), "")
    sort = query.get("sort") or "name"
    if method and method not in data.methods:
        raise UnknownNameError("method", method, data.methods)
    sortable = {*OWN, *(name for name, _ in data.images.scores)}
    if sort not in sortable:
        raise UnknownNameError("metric", sort, sorted(sortable))
    answer = _one_of("answer", query.get("answer", ""), ANSWERS)
    order = _one_of("order", query.get("order") or "up", ORDERS)
    label = _whole("class", query["class"]) if query.get("class") else None
    page = max(1, _whole("page", query.get("page") or "1"))
    return Wanted(method, label, answer, query.get("search", "").strip(), sort, order, page)


def places(data: RunData, wanted: Wanted) -> np.ndarray:
    """Where the wanted images stand among all images, in the wanted order."""
    images = data.images
    keep = np.ones(len(images.ids), dtype=bool)
    if wanted.label is not None:
        keep &= np.array([label == wanted.label for label in images.labels], dtype=bool)
    if wanted.answer:
        keep &= np.array([right is (wanted.answer == "right") for right in images.right], dtype=bool)
    if wanted.search:
        part = wanted.search.casefold()
        keep &= np.array([part in name.casefold() for name in images.ids], dtype=bool)
    found = np.flatnonzero(keep)
    if wanted.sort == "name":  # the order they are in
        return found if wanted.order == "up" else found[::-1]
    missing = np.full(len(images.ids), np.nan)
    scored = images.scores.get((wanted.sort, wanted.method), missing)
    values = np.asarray(images.confidence if wanted.sort == "confidence" else scored, dtype=float)[found]
    values = values if wanted.order == "up" else -values
    return found[np.argsort(values, kind="stable")]  # NaN is last


def one_page(data: RunData, wanted: Wanted, beside: RunData | None = None) -> dict[str, Any]:
    """One page of records, how many there are, and means of the chosen method over these and over all.

    `beside`: another checkpoint, whose scores go with each record.
    """
    found = places(data, wanted)
    pages = max(1, -(-len(found) // PER_PAGE))
    page = min(wanted.page, pages)
    shown = found[(page - 1) * PER_PAGE : page * PER_PAGE]
    columns = {name: column for (name, m), column in data.images.scores.items() if m == wanted.method}
    return {
        "total": len(found),
        "of": len(data.images.ids),
        "page": page,
        "pages": pages,
        "first": (page - 1) * PER_PAGE + 1,
        "means": {name: [_mean(column[found]), _mean(column)] for name, column in columns.items()},
        "images": [_compared(record(data, int(i)), beside) for i in shown],
    }


def _compared(found: dict[str, Any], beside: RunData | None) -> dict[str, Any]:
    if beside is None:
        return found
    other = one_image(beside, found["id"])
    return {**found, "beside": None if other is None else other["scores"]}


def record(data: RunData, place: int) -> dict[str, Any]:
    """An image's answers and scores, and the address of its picture where it was kept.

    The address names the run too: a browser may keep the picture, but not for another run on the same port.
    """
    name = data.images.ids[place]
    key, run = key_of(name), key_of(f"{data.folder.path} {data.manifest.started}")[:8]
    kept = data.folder.pictures().path(name) is not None
    return {**image_record(data, place), "key": key, "picture": f"/picture/{key}?run={run}" if kept else None}


def one_image(data: RunData, name: str) -> dict[str, Any] | None:
    """The record of one image, None where this checkpoint has not seen it."""
    place = bisect_left(data.images.ids, name)
    return record(data, place) if data.images.ids[place : place + 1] == [name] else None


def as_csv(data: RunData, wanted: Wanted) -> str:
    """All wanted images, not one page of them: answers, and every metric of the method."""
    names = [m.name for m in data.measures if (m.name, wanted.method) in data.images.scores]
    images, out = data.images, io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow([*ANSWER_COLUMNS, *names])
    for i in places(data, wanted).tolist():
        label, guess, explained = (
            data.class_name(column[i]) for column in (images.labels, images.predicted, images.explained)
        )
        right = "" if images.right[i] is None else str(images.right[i]).lower()
        told = [data.model, data.checkpoint, images.ids[i], label, guess, _text(images.confidence[i]), right]
        numbers = [_text(images.scores[name, wanted.method][i]) for name in names]
        writer.writerow([*map(csv_cell, [*told, explained, wanted.method]), *numbers])
    return out.getvalue()


def _mean(values: np.ndarray) -> float | None:
    defined = values[np.isfinite(values)]
    return json_number(defined.mean()) if len(defined) else None


def _text(value: float) -> str:
    return "" if np.isnan(value) else repr(float(value))


def _one_of(what: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise InputError(f"{what} is {value!r}; it must be one of {', '.join(k or 'nothing' for k in known)}")
    return value


def _whole(what: str, text: str) -> int:
    if not (text.removeprefix("-").isascii() and text.removeprefix("-").isdigit() and len(text) < 10):
        raise InputError(f"{what} is {text!r}; it must be a whole number")
    return int(text)
