"""A run folder while it grows: snapshots of finished units, each read once for all requests.

A snapshot is the set of parts that exist at one moment; its queries see these parts and no later one, so that
numbers on one page belong together. A new snapshot is taken when there are new parts, but no sooner than five
times the duration of the last reading: watching a run must not slow it down.

Images of a run are chosen by a query, one page at a time or all of them as CSV:

    method     whose scores and maps are shown
    class      true class, by its number
    answer     right or wrong
    search     part of the name, ignoring case
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

CACHED = 12  # results: a few checkpoints of one snapshot
PATIENCE = 1.0, 5.0  # seconds between snapshots at least, and multiples of the time that reading takes
PER_PAGE = 60
ANSWERS = ("", "right", "wrong")
ORDERS = ("down", "up")
ANSWER_COLUMNS = (
    "model", "checkpoint", "image", "class", "predicted", "confidence", "right", "explained", "method",
)  # fmt: skip
T = TypeVar("T")


class Snapshot(RunFolder):
    """A run at one moment: parts that are finished later are not seen."""

    def __init__(self, folder: RunFolder, parts: Sequence[str]) -> None:
        super().__init__(folder.path, folder.manifest)
        self.parts = parts

    @cached_property
    def version(self) -> str:
        """Hash of these parts and settings."""
        return hashlib.sha256("\n".join([self.manifest.config_hash, *self.parts]).encode()).hexdigest()[:16]

    def done(self) -> set[str]:
        return set(self.parts)

    def units(self) -> dict[str, Seal]:
        return {unit: seal for unit, seal in super().units().items() if unit in self.parts}


class SharedCache:
    """Values by key, each made once, also for simultaneous requests; the oldest are dropped."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._values: OrderedDict[Any, Future[Any]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Any, make: Callable[[], T]) -> T:
        with self._lock:
            is_new = key not in self._values
            value = self._values.setdefault(key, Future())
            self._values.move_to_end(key)
            while len(self._values) > self.most:
                self._values.popitem(last=False)
        if is_new:
            try:
                value.set_result(make())
            except BaseException as error:  # raised for all that wait; the next request tries again
                with self._lock:
                    self._values.pop(key, None)
                value.set_exception(error)
        return cast(T, value.result())


class Live:
    """Answers the requests of the live page about a run; thread-safe."""

    def __init__(self, path: str | Path) -> None:
        self._folder = RunFolder.open(path)
        self.path = self._folder.path
        self._store, self._store_lock = self._folder.maps(), threading.Lock()
        self._cache, self._lock = SharedCache(CACHED), threading.Lock()
        self._snapshot = Snapshot(self._folder, ())
        self._look_again, self._reading = 0.0, 0.0  # when, and the seconds that reading took

    def warm(self) -> None:
        """Read in advance what the page requests first."""
        with contextlib.suppress(HeatproofError):  # raised again by the request
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
        """Number of units and rows, and a version that changes when they grow."""
        now = self.snapshot()
        state: dict[str, Any] = {"version": now.version, "units": len(now.parts), "rows": 0}
        if now.parts:
            count = "select count(*) as n from scores"
            state["rows"] = self._read(now, ("rows",), lambda: int(now.scores().sql(count)[0]["n"]))
            state["idle"] = max(0, round(time.time() - (now.path / "scores").stat().st_mtime))
        return state

    def data(self, model: str | None = None, checkpoint: str | None = None) -> RunData:
        """One model at one checkpoint (its last with rows by default)."""
        now = self.snapshot()
        if not now.parts:
            raise StoreError("waiting for the first unit")
        data = self._read(now, ("data", model, checkpoint), lambda: read_run(now, model, checkpoint))
        return self._read(now, ("data", data.model, data.checkpoint), lambda: data)  # the same for both keys

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
        """The parts of the report's page as HTML, without the gallery, which the live page draws."""

        def make() -> dict[str, str]:
            verdict, place = judge(data), Section("pictures", "Images", {})
            return read_report(data, verdict, place, front=front_images(data, verdict)).fragments()

        assert isinstance(data.folder, Snapshot), "take the data from Live.data()"
        return self._read(data.folder, ("report", data.model, data.checkpoint), make)

    def picture(self, key: str) -> bytes:
        """PNG or JPEG of the image with this key."""
        content = self._folder.pictures().read(self.image(key))
        if content is None:
            raise UnknownNameError("image", key, ())
        return content

    def image(self, key: str) -> str:
        """The name of the image with this key, at any checkpoint."""
        now, names = self.snapshot(), dict[str, str]()
        if now.parts:
            every = "select distinct image from scores where image <> ''"
            names = self._read(
                now, ("names",), lambda: {key_of(r["image"]): r["image"] for r in now.scores().sql(every)}
            )
        if key not in names:
            raise UnknownNameError("image", key, ())
        return names[key]

    def images(self, data: RunData, query: Mapping[str, str]) -> dict[str, Any]:
        """One page of records, their number, and means of the method over the chosen images and all.

        With `beside`, another checkpoint, in the query, its scores go with each record.
        """
        chosen, other = read_query(query, data), query.get("beside") or data.checkpoint
        rows = places(data, chosen)
        pages = max(1, -(-len(rows) // PER_PAGE))
        page = min(chosen.page, pages)
        columns = {name: column for (name, m), column in data.images.scores.items() if m == chosen.method}
        records = [record(data, int(i)) for i in rows[(page - 1) * PER_PAGE : page * PER_PAGE]]
        if other != data.checkpoint:
            beside = self.data(data.model, other)
            for image in records:
                image["beside"] = (record_of(beside, image["id"]) or {}).get("scores")
        return {
            "total": len(rows),
            "of": len(data.images.ids),
            "page": page,
            "pages": pages,
            "first": (page - 1) * PER_PAGE + 1,
            "means": {name: [_mean(column[rows]), _mean(column)] for name, column in columns.items()},
            "images": records,
        }

    def maps(self, data: RunData, method: str, keys: str) -> dict[str, Any]:
        """Maps by key, None for an image that has none (yet). keys: with commas between them."""
        if keys.count(",") >= 2 * PER_PAGE:
            raise InputError(f"{keys.count(',') + 1} maps at once; request at most {2 * PER_PAGE}")
        if method not in data.methods:
            raise UnknownNameError("method", method, data.methods)
        ids = {key: self.image(key) for key in keys.split(",")}
        with self._store_lock:
            maps = packed_maps(data, method, list(ids.values()), self._store)
        return {key: maps.get(name) for key, name in ids.items()}

    def _read(self, of: Snapshot, what: tuple[Any, ...], make: Callable[[], T]) -> T:
        def timed() -> T:
            began = time.monotonic()
            try:
                return make()
            finally:
                self._reading += time.monotonic() - began

        return self._cache.get((of.version, *what), timed)


def key_of(image: str) -> str:
    """The key of an image in an address: 24 letters and digits for any name.

    >>> key_of("../../etc/passwd")
    '3754d6cb3a38e1185e5b382d'
    """
    return hashlib.sha256(image.encode("utf-8", "backslashreplace")).hexdigest()[:24]


@dataclass(frozen=True)
class ImageQuery:
    """Filter and order of images."""

    method: str
    label: int | None = None
    answer: str = ""
    search: str = ""
    sort: str = "name"
    order: str = "up"
    page: int = 1


def read_query(query: Mapping[str, str], data: RunData) -> ImageQuery:
    """The choices in a query; raises InputError for one that the data do not have."""
    method = query.get("method") or next(iter(data.methods), "")
    sort = query.get("sort") or "name"
    if method and method not in data.methods:
        raise UnknownNameError("method", method, data.methods)
    sortable = {"name", "confidence", *(name for name, _ in data.images.scores)}
    if sort not in sortable:
        raise UnknownNameError("metric", sort, sorted(sortable))
    answer, order = query.get("answer", ""), query.get("order") or "up"
    for key, value, known in (("answer", answer, ANSWERS), ("order", order, ORDERS)):
        if value not in known:
            names = ", ".join(name or "nothing" for name in known)
            raise InputError(f"{key} is {value!r}; it must be one of {names}")
    label = _integer("class", query["class"]) if query.get("class") else None
    page = max(1, _integer("page", query.get("page") or "1"))
    return ImageQuery(method, label, answer, query.get("search", "").strip(), sort, order, page)


def _integer(key: str, text: str) -> int:
    if not (text.removeprefix("-").isascii() and text.removeprefix("-").isdigit() and len(text) < 10):
        raise InputError(f"{key} is {text!r}; it must be a whole number")
    return int(text)


def places(data: RunData, query: ImageQuery) -> np.ndarray:
    """Indices of the selected images among all images, in the selected order."""
    images = data.images
    chosen = np.ones(len(images.ids), dtype=bool)
    if query.label is not None:
        chosen &= np.array([label == query.label for label in images.labels], dtype=bool)
    if query.answer:
        chosen &= np.array([right is (query.answer == "right") for right in images.right], dtype=bool)
    if query.search:
        part = query.search.casefold()
        chosen &= np.array([part in name.casefold() for name in images.ids], dtype=bool)
    rows = np.flatnonzero(chosen)
    if query.sort == "name":  # the order they are in
        return rows if query.order == "up" else rows[::-1]
    scored = images.scores.get((query.sort, query.method), np.full(len(images.ids), np.nan))
    values = np.asarray(images.confidence if query.sort == "confidence" else scored, dtype=float)[rows]
    values = values if query.order == "up" else -values
    return rows[np.argsort(values, kind="stable")]  # NaN is last


def _mean(values: np.ndarray) -> float | None:
    defined = values[np.isfinite(values)]
    return json_number(defined.mean()) if len(defined) else None


def record(data: RunData, place: int) -> dict[str, Any]:
    """An image's predictions and scores, and the address of the image if it was stored.

    The address names the run too: a browser may cache the image, but not for another run on the same port.
    """
    name = data.images.ids[place]
    key, run = key_of(name), key_of(f"{data.folder.path} {data.manifest.started}")[:8]
    link = f"/picture/{key}?run={run}" if data.folder.pictures().path(name) is not None else None
    return {**image_record(data, place), "key": key, "picture": link}


def record_of(data: RunData, name: str) -> dict[str, Any] | None:
    """The record of an image by its name, None if this checkpoint does not have it."""
    place = bisect_left(data.images.ids, name)
    return record(data, place) if data.images.ids[place : place + 1] == [name] else None


def as_csv(data: RunData, query: ImageQuery) -> str:
    """All chosen images, not one page of them: predictions, and every metric of the method."""
    names = [m.name for m in data.measures if (m.name, query.method) in data.images.scores]
    images, out = data.images, io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow([*ANSWER_COLUMNS, *names])
    for i in places(data, query).tolist():
        label, predicted, explained = (
            data.class_name(column[i]) for column in (images.labels, images.predicted, images.explained)
        )
        right = "" if images.right[i] is None else str(images.right[i]).lower()
        numbers = [images.confidence[i], *(images.scores[name, query.method][i] for name in names)]
        confidence, *scores = ("" if np.isnan(value) else repr(float(value)) for value in numbers)
        cells = [data.model, data.checkpoint, images.ids[i], label, predicted, confidence, right, explained]
        writer.writerow([*map(csv_cell, [*cells, query.method]), *scores])
    return out.getvalue()
