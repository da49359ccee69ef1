"""Letters of a PDF file: Western Europe's are in every reader's fonts, others come from DejaVu Sans.

That font lies in matplotlib (the extra `plots`); those of its letters that are used go into the file. Without
it, or where it lacks a letter, accents are left off, and what is still beyond is "?", which the paper says.
"""

from __future__ import annotations

import io
import re
import unicodedata
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

WIDE, NAME = "wide", "HEATPR+DejaVuSans"
LOST = "?"
PLAINER = str.maketrans(
    {
        "✓": "+", "✕": "x", "✗": "x", "★": "*", "↑": "(up)", "↓": "(down)", "−": "-", "▲": "^",
        "≥": ">=", "≤": "<=", "∞": "inf", "\u202f": " ", "\u00a0": " ", "→": "->", "′": "'",
    }
)  # fmt: skip
WITHOUT_STROKE = str.maketrans("łŁđĐħĦıŧŦ", "lLdDhHitT")
RIGHT_TO_LEFT = re.compile(r"[\u0590-\u08ff]+(?:[\s-]+[\u0590-\u08ff]+)*")
MOST_AT_ONCE = 100  # lines of a table of letters, by the PDF standard


class Letter(NamedTuple):
    """A letter of the embedded font."""

    glyph: int
    ems: float


def font_file() -> Path | None:
    """The font, where it and what reads it are installed; neither is imported."""
    found = find_spec("matplotlib")
    if found is None or found.origin is None or find_spec("fontTools") is None:
        return None
    path = Path(found.origin).parent / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf"
    return path if path.exists() else None


@cache
def wide_letters() -> Mapping[str, Letter]:
    """What the font offers."""
    path = font_file()
    if path is None:
        return {}
    from fontTools.ttLib import TTFont

    with TTFont(path, lazy=True) as font:
        size, widths = font["head"].unitsPerEm, font["hmtx"].metrics
        return {
            chr(code): Letter(font.getGlyphID(name), widths[name][0] / size)
            for code, name in font.getBestCmap().items()
        }


def runs(text: str) -> list[tuple[bool, str]]:
    """A line from left to right: letters of the embedded font (True), and those of the readers' own.

    >>> runs("−1 ✓ ü")
    [(False, '-1 + ü')]
    """
    if text.isascii():
        return [(False, text)] if text else []
    shown = unicodedata.normalize("NFC", text.translate(PLAINER))
    shown = RIGHT_TO_LEFT.sub(lambda found: found[0][::-1], shown)
    drawn = (one for letter in shown for one in _drawn(letter))
    return [(wide, "".join(c for _, c in run)) for wide, run in groupby(drawn, key=lambda one: one[0])]


def is_lost(text: str) -> bool:
    """Whether a letter of it is not printed."""
    return sum(run.count(LOST) for _, run in runs(text)) > text.count(LOST)


def _drawn(letter: str) -> Iterator[tuple[bool, str]]:
    if _is_western(letter):
        yield False, letter
    elif letter in wide_letters():
        yield True, letter
    else:
        parts = unicodedata.normalize("NFKD", letter.translate(WITHOUT_STROKE))
        bare = "".join(part for part in parts if _is_western(part))
        yield from ((False, part) for part in bare or LOST)


def _is_western(letter: str) -> bool:
    try:
        letter.encode("cp1252")
    except UnicodeEncodeError:
        return False
    return True


def stream(content: bytes, facts: Mapping[str, str]) -> bytes:
    """An object of a PDF file with content behind its facts."""
    told = " ".join(f"/{key} {value}" for key, value in {**facts, "Length": str(len(content))}.items())
    return f"<< {told} >>\nstream\n".encode() + content + b"\nendstream"


def embed(letters: Sequence[str], add: Callable[[bytes], int]) -> int:
    """These letters of the font as objects of a file; the font's number. add: gives an object its number."""
    from fontTools import subset

    options = subset.Options(retain_gids=True, hinting=False, layout_features=[])
    options.drop_tables += ["FFTM"]  # what the font's editor left, of which a warning would be printed
    out, chosen = io.BytesIO(), subset.Subsetter(options)
    chosen.populate(unicodes=map(ord, letters))
    with subset.load_font(font_file(), options) as font:
        chosen.subset(font)
        font.save(out)
        whole, head, hhea = out.getvalue(), font["head"], font["hhea"]
    sizes = (head.xMin, head.yMin, head.xMax, head.yMax, hhea.ascent, hhea.descent)
    *box, up, down = (round(1000 * value / head.unitsPerEm) for value in sizes)
    packed = {"Filter": "/FlateDecode"}
    file = add(stream(zlib.compress(whole), {**packed, "Length1": str(len(whole))}))
    facts = (
        f"<< /Type /FontDescriptor /FontName /{NAME} /Flags 4 /FontBBox [{' '.join(map(str, box))}] "
        f"/ItalicAngle 0 /Ascent {up} /Descent {down} /CapHeight {up} /StemV 80 /FontFile2 {file} 0 R >>"
    )
    known = wide_letters()
    widths = " ".join(f"{known[c].glyph} [{round(1000 * known[c].ems)}]" for c in letters)
    system = "<< /Registry (Adobe) /Ordering (Identity) /Supplement 0 >>"
    glyphs = (
        f"<< /Type /Font /Subtype /CIDFontType2 /BaseFont /{NAME} /CIDSystemInfo {system} "
        f"/FontDescriptor {add(facts.encode())} 0 R /CIDToGIDMap /Identity /W [{widths}] >>"
    )
    table = add(stream(zlib.compress(_meanings(letters)), packed))
    return add(
        f"<< /Type /Font /Subtype /Type0 /BaseFont /{NAME} /Encoding /Identity-H /ToUnicode {table} 0 R "
        f"/DescendantFonts [{add(glyphs.encode())} 0 R] >>".encode()
    )


def _meanings(letters: Sequence[str]) -> bytes:
    """Which letter each glyph is, for those who search or copy."""
    rows = [f"<{wide_letters()[c].glyph:04x}> <{c.encode('utf-16-be').hex()}>" for c in letters]
    lots = [rows[k : k + MOST_AT_ONCE] for k in range(0, len(rows), MOST_AT_ONCE)]
    listed = "\n".join(f"{len(lot)} beginbfchar\n" + "\n".join(lot) + "\nendbfchar" for lot in lots)
    return (
        "/CIDInit /ProcSet findresource begin 12 dict begin begincmap\n"
        "/CMapName /Letters def /CMapType 2 def\n"
        f"1 begincodespacerange <0000> <ffff> endcodespacerange\n{listed}\n"
        "endcmap CMapName currentdict /CMap defineresource pop end end"
    ).encode()
