"""Parts of pages: templates, tables, and small charts as SVG.

A piece is data; the template named after its class turns it into HTML. Templates are in the folder
`templates` of their package and escape whatever they print; only those of Markdown and TOML do not. Text from
outside (names of files, classes, methods, checkpoints) is also put into <bdi>, so that it cannot change the
direction of the text around it. Charts need no script; they have a title and a description for screen
readers, and take their colours from the style sheet. Every colour is accompanied by a dash, a shape or a
word.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup
from PIL import Image

from heatproof.show import address

UNSURE = "–"
Point = tuple[float, float]
TEMPLATES = Environment(
    loader=PackageLoader("heatproof", ""),
    autoescape=select_autoescape(disabled_extensions=("md", "toml"), default=True),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    auto_reload=False,
)


def fill(template: str, content: Mapping[str, Any], room: str = "report") -> Markup:
    """Render a template of a package."""
    return Markup(TEMPLATES.get_template(f"{room}/templates/{template}.html").render(content))


def asset(file: str) -> str:
    """A style sheet or a script of the page."""
    return files("heatproof.report").joinpath("assets", file).read_text(encoding="utf-8")


def policy(script: str) -> str:
    """The content policy of a page: it may run this script and show its own styles and images. No network."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def html_page(template: str, content: Mapping[str, Any], script: str = "", room: str = "report") -> str:
    """Render a whole page with its content policy and style sheet; it may run this script alone."""
    frame = {"policy": policy(script), "style": Markup(asset("page.css")), "script": Markup(script)}
    return str(fill(template, {**frame, **content}, room))


class Piece:
    """A part of a page; `this` in its template."""

    def __html__(self) -> str:
        return fill(type(self).__name__.lower(), {"this": self})


@dataclass(frozen=True)
class Section(Piece):
    """A part of the page with an anchor, rendered by its template; or the reason why it is left out."""

    id: str
    title: str
    content: Mapping[str, Any] | None = None
    missing: str = ""
    room: str = "report"  # the package of its template

    @property
    def body(self) -> Markup:
        return Markup() if self.content is None else fill(self.id, self.content, self.room)


@dataclass(frozen=True)
class Grid(Piece):
    """A table whose first column names the row; it scrolls if it is too wide."""

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


@dataclass(frozen=True)
class Line:
    """A name, its points (NaN: a gap) and the class of its style: one, two, or faint."""

    name: str
    points: Sequence[Point]
    style: str = "one"

    @property
    def known(self) -> list[Point]:
        return [(a, b) for a, b in self.points if not math.isnan(b)]


@dataclass(frozen=True)
class Mark:
    """A numbered sign at a point, or at the bottom of the chart if its height is NaN: an alarm."""

    at: Point
    text: str
    says: str


@dataclass(frozen=True)
class Scale:
    """Maps numbers from `low` to `high` to pixels from `start` to `stop`."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return round(self.start + share * (self.stop - self.start), 1)


@dataclass(frozen=True)
class Chart(Piece):
    """Base of charts."""

    title: str

    @property
    def id(self) -> str:
        """Unique among the charts of a page, and the same in the next page of the run."""
        return f"chart-{hashlib.sha256(repr(self).encode()).hexdigest()[:8]}"


@dataclass(frozen=True)
class LinePanel(Chart):
    """Lines over one horizontal scale, whose ticks are given with their words."""

    lines: Sequence[Line]
    ticks: Sequence[tuple[float, str]]
    bounds: tuple[float, float] = (0.0, 1.0)
    marks: Sequence[Mark] = ()

    width, height = 260, 150

    @property
    def x(self) -> Scale:
        return Scale(self.ticks[0][0], self.ticks[-1][0], 34, self.width - 10)

    @property
    def y(self) -> Scale:
        return Scale(*self.bounds, self.height - 24, 10)

    @property
    def levels(self) -> list[float]:
        return nice_ticks(*self.bounds)

    @property
    def description(self) -> str:
        """Where each line begins and ends."""
        lines = [(line.name, line.known) for line in self.lines if line.known]
        ends = [f"{name}: {known[0][1]:.3f} to {known[-1][1]:.3f}" for name, known in lines]
        return "; ".join(ends) or "no value is defined"


@dataclass(frozen=True)
class DotRows(Chart):
    """One row per name: a dot for each (word, value in [0, 1]) and a bar for the value over all."""

    rows: Sequence[tuple[str, Sequence[tuple[str, float]], float]]
    description: str

    width, step = 380, 30

    @property
    def height(self) -> int:
        return self.step * len(self.rows) + 34

    @property
    def x(self) -> Scale:
        return Scale(0, 1, 132, self.width - 14)


def nice_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers between two bounds.

    >>> nice_ticks(0, 1), nice_ticks(-2.4, -1.1)
    ([0.0, 0.25, 0.5, 0.75, 1.0], [-2.0, -1.5])
    """
    span = high - low
    if not span > 0:
        return [low]
    power = 10 ** math.floor(math.log10(span))
    step = next(s * power for s in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0, 5.0) if span / (s * power) < most)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 10) + 0.0 for k in range(first, math.floor(high / step + 1e-9) + 1)]


def named(text: str) -> Markup:
    """Text from outside, isolated from the text around it."""
    return Markup("<bdi>{}</bdi>").format(text)


def with_sub(text: str, below: str) -> Markup:
    """A cell with small print."""
    return Markup('{}<span class="sub">{}</span>').format(text, below)


def number(value: float, form: str = ".3f") -> str:
    """A number for readers, with a true minus.

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


TEMPLATES.filters.update(named=named, number=number, anchor=anchor)
TEMPLATES.filters["address"] = lambda pixels: address(Image.fromarray(pixels))
TEMPLATES.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
TEMPLATES.tests["known"] = lambda value: not math.isnan(value)
