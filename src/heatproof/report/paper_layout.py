"""A page's blocks on sheets of paper: lines, tables, pictures and charts, headings with what follows them."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from itertools import groupby

from PIL import Image

from heatproof.report.paper_blocks import PaperBlock, PaperBlocks
from heatproof.report.plain_pdf import FOOT, HEIGHT, MARGIN, WIDTH, Colour, Document, Leaf, width, wrapped

ROOM, BOTTOM = WIDTH - 2 * MARGIN, HEIGHT - FOOT - 12
STYLES = {  # size, font, indent, space before
    "h1": (17.0, "bold", 0.0, 10.0), "h2": (13.0, "bold", 0.0, 14.0), "h3": (10.5, "bold", 0.0, 9.0),
    "h4": (9.5, "bold", 0.0, 6.0), "summary": (9.0, "bold", 0.0, 6.0), "p": (8.0, "plain", 0.0, 2.5),
    "li": (8.0, "plain", 12.0, 1.5), "dt": (8.0, "bold", 0.0, 4.0), "dd": (8.0, "plain", 12.0, 1.0),
    "pre": (6.5, "code", 6.0, 3.0), "figcaption": (7.5, "plain", 0.0, 1.0),
}  # fmt: skip
HEADINGS = ("h1", "h2", "h3", "h4", "summary", "dt")
LEADING = 1.32  # from line to line, in sizes
CELL, PAD = 6.3, 3.0  # size of a table's letters, and the space around them
CHART, PICTURE, GAP, TITLE = 0.47, 48.0, 8.0, 6.5  # a chart's scale, an image's height, between, letters
LABEL = 5.5  # size of a chart's letters
SMALLER = 0.6  # how far pictures may shrink to stand in one row
UNPRINTED = (
    'Some letters could not be printed and stand here as "?". With Chromium they are; with matplotlib '
    "(heatproof's extra plots), those of its font DejaVu Sans are."
)
GREY: Colour = (0.78, 0.78, 0.78)
COLOURS: dict[str, Colour] = {
    "one": (0.0, 0.45, 0.7), "two": (0.72, 0.29, 0.0), "three": (0.0, 0.47, 0.35), "four": (0.64, 0.29, 0.51),
    "grid": GREY, "span": GREY, "faint": (0.4, 0.4, 0.4), "alarm": (0.64, 0.15, 0.11),
}  # fmt: skip


def plain_pdf(page: str) -> bytes:
    """The PDF of a page that heatproof made."""
    read = PaperBlocks(page)
    layout = Typesetter(Document(read.title.strip()))
    for kind, lot in _lots(_captioned(read.found)):
        layout.place(kind, lot)
    if any(sheet.lost for sheet in layout.document.sheets):
        layout.place("p", [PaperBlock("p", UNPRINTED)])
    return layout.document.file()


def _captioned(blocks: Sequence[PaperBlock]) -> list[PaperBlock]:
    """Captions behind an image become its title, a term and its text one line; empty blocks go."""
    found: list[PaperBlock] = []
    for block in blocks:
        before = found[-1] if found else None
        if block.kind == "figcaption" and before and before.kind == "tile" and not before.text:
            before.text = block.text
        elif block.kind == "dd" and before and before.kind == "dt":
            before.kind, before.text = "p", f"{before.text}: {block.text}"
        elif block.text.strip() or block.kind in ("row", "tile"):
            found.append(block)
    return found


def _lots(blocks: Sequence[PaperBlock]) -> Iterator[tuple[str, list[PaperBlock]]]:
    """Rows of one table together, pictures that stand beside each other together, texts one by one."""
    for kind, run in groupby(blocks, key=lambda block: block.kind):
        lot = list(run)
        if kind == "row":
            starts = [i for i, row in enumerate(lot) if row.head and (i == 0 or not lot[i - 1].head)] or [0]
            for start, stop in zip(starts, [*starts[1:], len(lot)], strict=True):
                yield kind, lot[start:stop]
        elif kind == "tile":
            yield kind, lot
        else:
            yield from ((kind, [block]) for block in lot)


class Typesetter:
    """Where the next thing goes; headings wait for what follows them."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.sheet: Leaf = document.new_leaf()
        self.y = MARGIN
        self.waiting: list[PaperBlock] = []  # headings

    def place(self, kind: str, lot: list[PaperBlock]) -> None:
        if kind in HEADINGS:
            self.waiting.append(lot[0])
            return
        first = {"row": 40.0, "tile": _tile_rows(lot)[0][1] if kind == "tile" else 0.0}.get(kind, 26.0)
        self._need(first + sum(self._height(block) for block in self.waiting))
        for heading in self.waiting:
            self._write(heading)
        self.waiting = []
        if kind == "row":
            self._table(lot)
        elif kind == "tile":
            self._tiles(lot)
        else:
            self._write(lot[0])

    def _need(self, height: float) -> None:
        if self.y + height > BOTTOM and self.y > MARGIN:
            self.sheet, self.y = self.document.new_leaf(), MARGIN

    def _lines(self, block: PaperBlock) -> list[str]:
        size, font, indent, _ = STYLES[block.kind]
        if block.kind == "pre":
            most = int((ROOM - indent) / (0.6 * size))
            lines = block.text.expandtabs(4).splitlines()
            return [line[k : k + most] for line in lines for k in range(0, max(1, len(line)), most)]
        text = f"- {block.text}" if block.kind == "li" else block.text
        return wrapped(text, size, ROOM - indent, font)

    def _height(self, block: PaperBlock) -> float:
        size, _, _, before = STYLES[block.kind]
        return before + len(self._lines(block)) * size * LEADING

    def _write(self, block: PaperBlock) -> None:
        size, font, indent, before = STYLES[block.kind]
        self.y += before if self.y > MARGIN else 0
        for line in self._lines(block):
            self._need(size * LEADING)
            self.y += size * LEADING
            self.sheet.text(MARGIN + indent, self.y - 0.25 * size, line, size, font)

    def _table(self, rows: list[PaperBlock]) -> None:
        columns = max(len(row.cells) for row in rows)
        cells = [
            [" ".join(c.split()).strip(" |") for c in row.cells + [""] * columns][:columns] for row in rows
        ]
        wide = _column_widths(cells)
        for row, texts in zip(rows, cells, strict=True):
            font = "bold" if row.head else "plain"
            lines = [wrapped(t, CELL, w - 2 * PAD, font) for t, w in zip(texts, wide, strict=True)]
            high = max(map(len, lines)) * CELL * LEADING + PAD
            self._need(high)
            x = MARGIN
            for own, w in zip(lines, wide, strict=True):
                for k, line in enumerate(own):
                    self.sheet.text(x + PAD, self.y + (k + 1) * CELL * LEADING - 1, line, CELL, font)
                x += w
            self.y += high
            self.sheet.line([(MARGIN, self.y), (MARGIN + ROOM, self.y)], GREY, 0.4)
        self.y += 6

    def _tiles(self, tiles: list[PaperBlock]) -> None:
        shrunk = _shrunk(tiles)
        for row, high in _tile_rows(tiles):
            self._need(high)
            x = MARGIN
            for tile in row:
                wide, tall = (shrunk * side for side in _tile_size(tile))
                top = self.y + TITLE * LEADING + 2
                title = (wrapped(tile.text, TITLE, wide) or [""])[0]
                self.sheet.text(x, self.y + TITLE, title, TITLE, "bold" if tile.shapes else "plain")
                if tile.picture:
                    thing = self.document.add_picture(tile.picture)
                    self.sheet.picture(f"im{thing}", thing, x, top, wide, tall)
                else:
                    self._chart(tile, x, top, wide / tile.size[0])
                x += wide + GAP
            self.y += high

    def _chart(self, tile: PaperBlock, left: float, top: float, scale: float) -> None:
        def at(x: str, y: str) -> tuple[float, float]:
            return left + float(x) * scale, top + float(y) * scale

        for tag, facts, text in tile.shapes:
            kinds = facts.get("class", "").split()
            colour = next((COLOURS[kind] for kind in kinds if kind in COLOURS), (0.1, 0.1, 0.1))
            if tag == "line":
                ends = [at(facts["x1"], facts["y1"]), at(facts["x2"], facts["y2"])]
                self.sheet.line(ends, colour, 3.0 if "span" in kinds else 0.4)
            elif tag == "polyline":
                points = [at(*pair.split(",")) for pair in facts["points"].split()]
                self.sheet.line(points, colour, 1.3, {"two": "4 3", "faint": "2 2"}.get(kinds[-1], ""))
            elif tag == "rect":
                wide, high = float(facts["width"]) * scale, float(facts["height"]) * scale
                self.sheet.box(*at(facts["x"], facts["y"]), wide, high, colour)
            elif tag == "circle":
                r = float(facts["r"]) * scale
                x, y = at(facts["cx"], facts["cy"])
                self.sheet.box(x - r, y - r, 2 * r, 2 * r, colour)
            elif tag == "path":
                x, y = at(*facts["d"][1:].partition("l")[0].split(","))
                self.sheet.box(x - 3, y, 6, 6, colour)
            elif text.strip():
                x, y = at(facts["x"], facts["y"])
                shift = {"end": 1.0, "middle": 0.5}.get(facts.get("text-anchor", ""), 0.0)
                self.sheet.text(x - shift * width(text, LABEL), y, text, LABEL)


def _tile_size(tile: PaperBlock) -> tuple[float, float]:
    if tile.picture:
        wide, high = Image.open(io.BytesIO(tile.picture)).size
        return PICTURE * wide / high, PICTURE
    return CHART * tile.size[0], CHART * tile.size[1]


def _shrunk(tiles: Sequence[PaperBlock]) -> float:
    """How much smaller pictures are drawn, where they then fit into one row."""
    room = ROOM - GAP * (len(tiles) - 1)
    fits = room / sum(_tile_size(tile)[0] for tile in tiles) if all(tile.picture for tile in tiles) else 1.0
    return min(1.0, fits) if fits >= SMALLER else 1.0


def _tile_rows(tiles: Sequence[PaperBlock]) -> list[tuple[list[PaperBlock], float]]:
    """As many side by side as fit, and the height of each row with its titles."""
    rows: list[tuple[list[PaperBlock], float]] = []
    left, shrunk = 0.0, _shrunk(tiles)
    for tile in tiles:
        wide, high = (shrunk * side for side in _tile_size(tile))
        high += TITLE * LEADING + 8
        if not rows or left + wide > ROOM + 0.1:
            rows.append(([], 0.0))
            left = 0.0
        rows[-1] = ([*rows[-1][0], tile], max(rows[-1][1], high))
        left += wide + GAP
    return rows


def _column_widths(cells: Sequence[Sequence[str]]) -> list[float]:
    """Room by what the columns hold, so that no long sentence takes it all; it gets what others leave."""
    longest = [max(width(row[k], CELL) for row in cells) + 2 * PAD + 1 for k in range(len(cells[0]))]
    wanted = [min(max(one, 25.0), 197.0) for one in longest]
    if sum(wanted) > ROOM:
        return [one * ROOM / sum(wanted) for one in wanted]
    lacking = [max(0.0, whole - one) for whole, one in zip(longest, wanted, strict=True)]
    share = min(1.0, (ROOM - sum(wanted)) / max(sum(lacking), 1.0))
    return [one + share * more for one, more in zip(wanted, lacking, strict=True)]
