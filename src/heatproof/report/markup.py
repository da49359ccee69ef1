"""Pieces of HTML that the sections share.

Whatever came from outside (names of files, classes, methods, checkpoints) is escaped and stands in <bdi>, so
that it is shown and neither runs nor turns the text around it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

UNSURE = "–"


@dataclass(frozen=True)
class Section:
    """A part of the page with an anchor. Without a body it only says why it is left out."""

    id: str
    title: str
    body: str = ""
    missing: str = ""


def name(text: str) -> str:
    """Text from outside, shown as it is."""
    return f"<bdi>{escape(text)}</bdi>"


def number(value: float, form: str = ".3f") -> str:
    """As people read it, with a true minus.

    >>> number(-0.5), number(-0.0001), number(float("nan")), number(1234.5)
    ('−0.500', '0.000', '–', '1234.5')
    """
    if math.isnan(value):
        return UNSURE
    text = format(value, ".1f" if abs(value) >= 100 else form)
    return f"−{text[1:]}" if text.startswith("-") and float(text) != 0 else text.removeprefix("-")


def table(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str) -> str:
    """Cells of HTML; the first column names the row. The table scrolls by itself where it is too wide."""
    columns = "".join(f'<th scope="col">{cell}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    return scrolling(f"<table><thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table>", caption)


def scrolling(content: str, label: str) -> str:
    """What may be wider than the page; the keyboard can scroll it too."""
    return f'<div class="wide" role="region" tabindex="0" aria-label="{escape(label)}">{content}</div>'


def fold(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def panel(title: str, chart: str) -> str:
    return f'<figure class="panel"><figcaption>{name(title)}</figcaption>{chart}</figure>'


def grid(panels: Sequence[str]) -> str:
    return f'<div class="panels">{"".join(panels)}</div>'


def matrix(
    labels: Sequence[str], cells: Sequence[Sequence[float]], caption: str, heads: Sequence[str] | None = None
) -> str:
    """A table whose shade follows the number written in it; `heads` are shorter words for columns."""

    def shaded(value: float, own: bool) -> str:
        if own:
            return '<td class="own">1</td>'
        if math.isnan(value):
            return f"<td>{UNSURE}</td>"
        kind = "agree" if value >= 0 else "oppose"
        return f'<td class="{kind}" style="--v:{min(1, abs(value)):.2f}">{number(value, ".2f")}</td>'

    columns = "".join(f'<th scope="col">{name(label)}</th>' for label in heads or labels)
    rows = "".join(
        f'<tr><th scope="row">{name(label)}</th>{"".join(shaded(v, i == j) for j, v in enumerate(row))}</tr>'
        for i, (label, row) in enumerate(zip(labels, cells, strict=True))
    )
    head = f"<thead><tr><td></td>{columns}</tr></thead>"
    return scrolling(f'<table class="matrix">{head}<tbody>{rows}</tbody></table>', caption)
