"""Images of a run by choice: filtered, sorted, one page at a time, or all of them as CSV.

    method     whose scores and maps are shown
    label      true class, by its number
    answer     right or wrong
    search     part of the name, whatever the case of its letters
    sort       name, confidence, or a metric (of the method); order: up or down
    page       from 1

An image without the number it is sorted by comes last either way; equal numbers are in order of their names.
"""

from __future__ import annotations

import csv
import io
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from heatproof.errors import InputError, UnknownNameError
from heatproof.report.gallery import image_record, json_number
from heatproof.report.live import key_of
from heatproof.store.scores import csv_cell
from heatproof.verdict.data import RunData

PER_PAGE = 60
ANSWERS = ("", "right", "wrong")
ORDERS = ("down", "up")
ANSWER_COLUMNS = (
    "model", "checkpoint", "image", "class", "predicted", "confidence", "right", "explained", "method",
)  # fmt: skip
OWN = ("name", "confidence")  # what images can be sorted by besides metrics


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
