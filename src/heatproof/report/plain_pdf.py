"""A PDF file by hand: A4 pages of text, lines and JPEG pictures, with a number on each page.

Text is in the three fonts that every reader has (Helvetica, its bold, Courier); letters beyond Western Europe
come from elsewhere where that is installed (pdf_letters.py). So it needs no library and no browser.
"""

from __future__ import annotations

import io
import zlib
from dataclasses import dataclass, field
from datetime import UTC, datetime

from PIL import Image

from heatproof.report.pdf_letters import WIDE, embed, is_lost, runs, stream, wide_letters

WIDTH, HEIGHT = 595.0, 842.0  # points: A4
MARGIN, FOOT = 40.0, 30.0
FONTS = {"plain": "Helvetica", "bold": "Helvetica-Bold", "code": "Courier"}
COURIER = 0.6  # ems of every letter
BOLDER = 1.06  # letters of the bold font, beside those of the plain one
# ems / 1000 of the letters from space to ~ in Helvetica, as its metrics file gives them
WIDTHS = (
    278, 278, 355, 556, 556, 889, 667, 191, 333, 333, 389, 584, 278, 333, 278, 278, 556, 556, 556, 556, 556,
    556, 556, 556, 556, 556, 278, 278, 584, 584, 584, 556, 1015, 667, 667, 722, 722, 667, 611, 778, 722, 278,
    500, 667, 556, 833, 722, 778, 667, 778, 722, 667, 611, 722, 667, 944, 667, 667, 611, 278, 278, 278, 469,
    556, 333, 556, 556, 500, 556, 556, 278, 556, 556, 222, 222, 500, 222, 833, 556, 556, 556, 556, 333, 500,
    278, 556, 500, 722, 500, 500, 500, 334, 260, 334, 584,
)  # fmt: skip
Colour = tuple[float, float, float]
BLACK: Colour = (0.0, 0.0, 0.0)


def width(text: str, size: float, font: str = "plain") -> float:
    """Points that a line takes; of the readers' fonts, letters beyond ASCII count as a digit does."""
    return sum(_ems(run, WIDE if wide else font) for wide, run in runs(text)) * size


def _ems(run: str, font: str) -> float:
    if font == WIDE:
        return sum(wide_letters()[letter].ems for letter in run)
    if font == "code":
        return COURIER * len(run)
    ems = sum(WIDTHS[ord(c) - 32] if 32 <= ord(c) < 127 else 556 for c in run) / 1000
    return ems * (BOLDER if font == "bold" else 1)


def wrapped(text: str, size: float, room: float, font: str = "plain") -> list[str]:
    """Lines of whole words that fit; a word that fits nowhere is cut."""
    lines = [""]
    for word in text.split():
        while width(word, size, font) > room and len(word) > 1:
            fits = next((k for k in range(len(word), 1, -1) if width(word[:k], size, font) <= room), 1)
            lines, word = [*lines, word[:fits]] if lines[-1] else [*lines[:-1], word[:fits]], word[fits:]
            lines.append("")
        longer = f"{lines[-1]} {word}".strip()
        if width(longer, size, font) <= room or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(word)
    return [line for line in lines if line] or [""]


@dataclass
class Leaf:
    """One page: what is drawn on it, and the pictures it shows. y is from the top."""

    drawn: list[bytes] = field(default_factory=list)
    pictures: dict[str, int] = field(default_factory=dict)  # name -> object
    wide: set[str] = field(default_factory=set)  # letters of the embedded font
    lost: bool = False  # whether a letter was not printed

    def text(
        self, x: float, y: float, line: str, size: float, font: str = "plain", colour: Colour = BLACK
    ) -> None:
        said = [f"{_rgb(colour)} rg BT {x:.1f} {HEIGHT - y:.1f} Td".encode()]
        for wide, run in runs(line):
            if wide:
                glyphs = "".join(f"{wide_letters()[letter].glyph:04x}" for letter in run)
                said.append(f"/{WIDE} {size:g} Tf <{glyphs}> Tj".encode())
                self.wide |= set(run)
            else:
                letters = (
                    run.encode("cp1252").replace(b"\\", rb"\\").replace(b"(", rb"\(").replace(b")", rb"\)")
                )
                said.append(f"/{font} {size:g} Tf (".encode() + letters + b") Tj")
        self.drawn.append(b" ".join([*said, b"ET"]))
        self.lost = self.lost or is_lost(line)

    def line(
        self, points: list[tuple[float, float]], colour: Colour = BLACK, thick: float = 0.6, dash: str = ""
    ) -> None:
        path = " ".join(f"{x:.1f} {HEIGHT - y:.1f} {'l' if k else 'm'}" for k, (x, y) in enumerate(points))
        self.drawn.append(f"{_rgb(colour)} RG {thick:g} w [{dash}] 0 d {path} S".encode())

    def box(self, x: float, y: float, wide: float, high: float, colour: Colour) -> None:
        self.drawn.append(
            f"{_rgb(colour)} rg {x:.1f} {HEIGHT - y - high:.1f} {wide:.1f} {high:.1f} re f".encode()
        )

    def picture(self, name: str, thing: int, x: float, y: float, wide: float, high: float) -> None:
        self.pictures[name] = thing
        self.drawn.append(
            f"q {wide:.1f} 0 0 {high:.1f} {x:.1f} {HEIGHT - y - high:.1f} cm /{name} Do Q".encode()
        )


class Document:
    """Pages that become one file."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.sheets: list[Leaf] = []
        self.things: list[bytes] = [b"", b"", b""]  # catalog, pages and facts: filled at the end
        self.fonts = {
            name: self.add(
                f"<< /Type /Font /Subtype /Type1 /BaseFont /{base} /Encoding /WinAnsiEncoding >>".encode()
            )
            for name, base in FONTS.items()
        }
        self._kept: dict[bytes, int] = {}

    def add(self, thing: bytes) -> int:
        """An object of the file; its number."""
        self.things.append(thing)
        return len(self.things)

    def add_picture(self, content: bytes) -> int:
        """A picture once, however often it is shown."""
        if content not in self._kept:
            picture = Image.open(io.BytesIO(content))
            out = io.BytesIO()
            picture.convert("RGB").save(out, "JPEG", quality=85)
            facts = {
                "Type": "/XObject", "Subtype": "/Image", "Width": f"{picture.width}",
                "Height": f"{picture.height}", "ColorSpace": "/DeviceRGB", "BitsPerComponent": "8",
                "Filter": "/DCTDecode",
            }  # fmt: skip
            self._kept[content] = self.add(stream(out.getvalue(), facts))
        return self._kept[content]

    def new_leaf(self) -> Leaf:
        self.sheets.append(Leaf())
        return self.sheets[-1]

    def file(self) -> bytes:
        """The PDF, every page with its number."""
        pages = []
        if wide := sorted({letter for sheet in self.sheets for letter in sheet.wide}):
            self.fonts[WIDE] = embed(wide, self.add)
        fonts = " ".join(f"/{name} {thing} 0 R" for name, thing in self.fonts.items())
        for number, sheet in enumerate(self.sheets, 1):
            sheet.text(MARGIN, HEIGHT - FOOT + 8, "heatproof report", 7.5)
            told = f"page {number} of {len(self.sheets)}"
            sheet.text(WIDTH - MARGIN - width(told, 7.5), HEIGHT - FOOT + 8, told, 7.5)
            content = self.add(stream(zlib.compress(b"\n".join(sheet.drawn)), {"Filter": "/FlateDecode"}))
            shown = " ".join(f"/{name} {thing} 0 R" for name, thing in sheet.pictures.items())
            resources = f"<< /Font << {fonts} >> /XObject << {shown} >> >>"
            page = f"<< /Type /Page /Parent 2 0 R /Contents {content} 0 R /Resources {resources} >>"
            pages.append(self.add(page.encode()))
        kids = " ".join(f"{page} 0 R" for page in pages)
        box = f"[0 0 {WIDTH:g} {HEIGHT:g}]"
        self.things[0] = b"<< /Type /Catalog /Pages 2 0 R /Lang (en) >>"
        self.things[1] = f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} /MediaBox {box} >>".encode()
        made, title = datetime.now(UTC).strftime("D:%Y%m%d%H%M%SZ"), self.title.encode("utf-16").hex()
        self.things[2] = f"<< /Title <{title}> /Producer (heatproof) /CreationDate ({made}) >>".encode()
        return _written(self.things)


def _written(things: list[bytes]) -> bytes:
    out, places = bytearray(b"%PDF-1.4\n%\xe2\xe3\xcf\xd3\n"), []
    for number, thing in enumerate(things, 1):
        places.append(len(out))
        out += f"{number} 0 obj\n".encode() + thing + b"\nendobj\n"
    start = len(out)
    out += f"xref\n0 {len(things) + 1}\n0000000000 65535 f \n".encode()
    out += b"".join(f"{place:010d} 00000 n \n".encode() for place in places)
    facts = f"<< /Size {len(things) + 1} /Root 1 0 R /Info 3 0 R >>"
    return bytes(out) + f"trailer\n{facts}\nstartxref\n{start}\n%%EOF\n".encode()


def _rgb(colour: Colour) -> str:
    return " ".join(f"{part:.2f}" for part in colour)
