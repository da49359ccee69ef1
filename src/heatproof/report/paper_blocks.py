"""A page's HTML as blocks in reading order: headings, text, lists, tables, pictures, charts.

Only what heatproof's own templates write is known. What is hidden from the eye, navigation and folds that are
not open are left out.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from html.parser import HTMLParser

TEXTS = ("h1", "h2", "h3", "h4", "p", "li", "dt", "dd", "pre", "summary", "figcaption")
SKIPPED = ("style", "script", "nav", "title", "desc")
HIDDEN = frozenset({"hidden", "sign", "key", "barkey", "swatch", "floorkey", "screen"})  # classes
SHAPES = ("line", "polyline", "rect", "circle", "path", "text")


@dataclass
class PaperBlock:
    """A piece of text of one kind (a tag's name), or with kind row, tile."""

    kind: str
    text: str = ""
    cells: list[str] = field(default_factory=list)  # of a row
    head: bool = False  # of a table
    picture: bytes = b""  # of a tile
    shapes: list[tuple[str, Mapping[str, str], str]] = field(
        default_factory=list
    )  # of a tile: tag, facts, text
    size: tuple[float, float] = (0.0, 0.0)  # of the shapes' own scale


class PaperBlocks(HTMLParser):
    """Reads a page; `found` are its blocks."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[PaperBlock] = []
        self.title = ""
        self._open: list[tuple[str, bool]] = []  # tags, and whether what is in them is left out
        self._text: PaperBlock | None = None
        self._row: PaperBlock | None = None
        self._tile: PaperBlock | None = None
        self._shape: tuple[str, Mapping[str, str], str] | None = None
        self._in_head = self._in_title = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        facts = {name: value or "" for name, value in attrs}
        self._in_title |= tag == "title" and not self._tile
        if tag == "br":
            self._write(" ")
        elif tag == "img" and not self._left_out:
            self._picture(facts)
        elif tag in SHAPES and self._tile is not None and not self._left_out:
            self._shape = (tag, facts, "")
            if tag != "text":
                self._tile.shapes.append(self._shape)
        if tag in ("br", "img", "meta", "link", "input"):
            return
        hidden = not HIDDEN.isdisjoint(facts.get("class", "").split()[:1])
        hidden |= tag == "details" and "open" not in facts
        self._open.append((tag, self._left_out or tag in SKIPPED or hidden))
        if self._left_out:
            return
        if tag == "svg":
            _, _, wide, high = map(float, facts.get("viewbox", "0 0 1 1").split())
            self._tile = PaperBlock("tile", text=self._caption(), size=(wide, high))
        elif tag == "thead":
            self._in_head = True
        elif tag == "tr":
            self._row = PaperBlock("row", head=self._in_head)
        elif tag in ("td", "th") and self._row is not None:
            self._row.cells += [""] * int(facts.get("colspan", "1"))
            self._row.cells[-int(facts.get("colspan", "1"))] = ""
            self._at = len(self._row.cells) - int(facts.get("colspan", "1"))
        elif tag in TEXTS and self._row is None:
            self._text = PaperBlock(tag)
            self.found.append(self._text)
        elif tag in ("span", "code", "i") and "sub" in facts.get("class", "").split():
            self._write(" | " if self._row is not None else " ")

    def handle_endtag(self, tag: str) -> None:
        self._in_title &= tag != "title"
        while self._open and self._open.pop()[0] != tag:
            pass
        if tag == "thead":
            self._in_head = False
        elif tag == "tr" and self._row is not None:
            self.found.append(self._row)
            self._row = None
        elif tag == "svg" and self._tile is not None:
            self.found.append(self._tile)
            self._tile = None
        elif tag == "text" and self._shape is not None and self._tile is not None:
            self._tile.shapes.append(self._shape)
            self._shape = None
        elif tag in TEXTS:
            self._text = None

    def handle_data(self, data: str) -> None:
        if self._in_title and not self._open_svg:
            self.title += data
        if self._left_out:
            return
        if self._tile is not None:
            if self._shape is not None and self._shape[0] == "text":
                self._shape = (*self._shape[:2], self._shape[2] + data)
        else:
            self._write(data)

    @property
    def _left_out(self) -> bool:
        return bool(self._open) and self._open[-1][1]

    @property
    def _open_svg(self) -> bool:
        return any(tag == "svg" for tag, _ in self._open)

    def _write(self, text: str) -> None:
        if self._row is not None:
            if self._row.cells:
                self._row.cells[self._at] += text
        elif self._text is not None:
            self._text.text += text
        elif text.strip():
            self.found.append(PaperBlock("p", text))

    def _caption(self) -> str:
        """A figure's words, which stood before its chart."""
        if self.found and self.found[-1].kind == "figcaption":
            return self.found.pop().text
        return ""

    def _picture(self, facts: Mapping[str, str]) -> None:
        kind, _, content = facts.get("src", "").partition(";base64,")
        if kind.startswith("data:image/"):
            self.found.append(PaperBlock("tile", picture=base64.b64decode(content)))
