"""What pages are made of. A piece is data; the template named after its class turns it into HTML.

Templates lie in the folder `templates` of their room and escape whatever they print; only those of Markdown
(.md) do not. Text from outside (names of files, classes, methods, checkpoints) also stands in <bdi>, so that
it is shown and neither runs nor turns the text around it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from heatproof.errors import StoreError

UNSURE = "–"
TEMPLATES = Environment(
    loader=PackageLoader("heatproof", ""),
    autoescape=select_autoescape(disabled_extensions=("md",), default=True),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    auto_reload=False,
)


def fill(template: str, content: Mapping[str, Any], room: str = "report") -> Markup:
    """A template of a room with its content."""
    return Markup(TEMPLATES.get_template(f"{room}/templates/{template}.html").render(content))


def output_path(path: str | Path) -> Path:
    """The path of a file to write, whose folder must exist."""
    path = Path(path)
    if not path.parent.is_dir():
        raise StoreError(f"cannot write {path}: the folder {path.parent} does not exist; create it first")
    return path


class Piece:
    """A part of a page; its template knows it as `this`."""

    def __html__(self) -> str:
        return fill(type(self).__name__.lower(), {"this": self})


@dataclass(frozen=True)
class Section(Piece):
    """A part of the page with an anchor, filled into the template of that name; or why it is left out."""

    id: str
    title: str
    content: Mapping[str, Any] | None = None
    missing: str = ""
    room: str = "report"  # where its template lies

    @property
    def body(self) -> Markup:
        return Markup() if self.content is None else fill(self.id, self.content, self.room)


@dataclass(frozen=True)
class Grid(Piece):
    """A table of cells, the first of which names the row; it scrolls by itself where it is too wide."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str


@dataclass(frozen=True)
class ShadedTable(Piece):
    """A square table whose shade follows the number written in it; `heads` are shorter words for columns."""

    labels: Sequence[str]
    cells: Sequence[Sequence[float]]
    caption: str
    heads: Sequence[str] = ()


@dataclass(frozen=True)
class Panels(Piece):
    """Charts side by side under their titles."""

    panels: Sequence[tuple[str, Piece]]


def named(text: str) -> Markup:
    """Text from outside, shown as it is."""
    return Markup("<bdi>{}</bdi>").format(text)


def with_sub(text: str, below: str) -> Markup:
    """A cell with small print."""
    return Markup('{}<span class="sub">{}</span>').format(text, below)


def number(value: float, form: str = ".3f") -> str:
    """As people read it, with a true minus.

    >>> number(-0.5), number(-0.0001), number(float("nan")), number(1234.5)
    ('−0.500', '0.000', '–', '1234.5')
    """
    if math.isnan(value):
        return UNSURE
    text = format(value, ".1f" if abs(value) >= 100 else form)
    return f"−{text[1:]}" if text.startswith("-") and float(text) != 0 else text.removeprefix("-")


def anchor(name: str, kind: str) -> str:
    """An id for the definition of a metric or a method, whatever letters its name has."""
    return f"def-{kind}-" + "".join(c if c.isascii() and c.isalnum() else f"-{ord(c):x}-" for c in name)


def short(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


TEMPLATES.filters.update(named=named, number=number, anchor=anchor, short=short)
TEMPLATES.tests["known"] = lambda value: not math.isnan(value)
