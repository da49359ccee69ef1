"""The report as a PDF of at most six numbered pages.

It has the sections of report.html without settings, tables behind charts and long definitions. Sections that
do not fit are left out and listed. Chromium prints it if there is a version that can number pages; else Typst
(the extra `pdf`), with a simpler layout (assets/paper.typ). Both read one HTML page without scripts.
"""

from __future__ import annotations

import base64
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

from heatproof.disk import output_path, write_whole
from heatproof.errors import MissingExtraError, need
from heatproof.report.gallery import GROUPS, choose, draw_images, front_images, map_agreement
from heatproof.report.page import read_report
from heatproof.report.pieces import Section, asset, html_page
from heatproof.report.sections import scores
from heatproof.verdict.answers import Verdict
from heatproof.verdict.data import RunData

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
NUMBERS_PAGES = 131  # the first Chromium that fills the margins of a page
SECONDS = 180
MOST, TILE = 6, 112  # images, and pixels of each
MOST_METHODS = 8  # maps beside an image
WIDEST = 9  # columns of a table of scores
MOST_PAGES = 6
LEFT_OUT_FIRST = ("agreement", "curves", "classes", "trajectories", "paperpictures", "scores")


def write_pdf(data: RunData, verdict: Verdict, path: str | Path, chromium: str | None = "") -> str:
    """Write the PDF; returns which program printed it.

    chromium: the path of Chromium; "" searches for it, None uses Typst.
    """
    path = output_path(path)
    program = find_chromium() if chromium == "" else chromium
    for left in range(len(LEFT_OUT_FIRST) + 1):
        text = paper_html(data, verdict, LEFT_OUT_FIRST[:left])
        printed = print_with_chromium(program, text) if program else None
        content = printed or print_with_typst(text)
        if len(re.findall(rb"/Type\s*/Page\b", content)) <= MOST_PAGES:
            break
    write_whole({path: content})
    return f"printed by {Path(program).name}" if program and printed else "printed by typst"


def paper_html(data: RunData, verdict: Verdict, without: Sequence[str] = ()) -> str:
    """The HTML that is printed: no script and no folds, without the sections of these ids."""
    page = read_report(data, verdict, paper_pictures(data), front=front_images(data, verdict))

    def printed(section: Section) -> Section:
        if section.content is None:
            return section
        if section.id in without:
            return replace(section, content=None, missing=f"beyond {MOST_PAGES} pages; it is in report.html")
        if section.id == "scores":
            return scores(data, WIDEST)
        if section.id == "agreement":
            return replace(section, content={**section.content, "metrics": None})
        return replace(section, id="paperdefinitions") if section.id == "definitions" else section

    first, rest = [*map(printed, page.first)], [*map(printed, page.rest)]
    page = replace(page, first=first, pictures=printed(page.pictures), rest=rest, paper=True)
    images = data.manifest.config.get("images", {})
    content = {
        "this": page,
        "dataset": " ".join(str(images[key]) for key in ("kind", "path") if images.get(key)),
        "printed": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    return html_page("paper", content)


def paper_pictures(data: RunData) -> Section:
    """The best, the worst and the most disputed images, each with every method's map."""
    methods, groups = data.real[:MOST_METHODS], choose(data, map_agreement(data), MOST)
    drawn = {GROUPS[key]: draw_images(data, places, methods, TILE) for key, places in groups.items()}
    drawn = {title: images for title, images in drawn.items() if images}
    left = len(data.real) - len(methods)
    content = {"groups": drawn, "headline": data.headline, "methods": methods, "left": left}
    title, missing = "Images: best, worst and most disputed", "the run stored no images"
    return Section("paperpictures", title, content if drawn else None, missing)


def find_chromium() -> str | None:
    """The first Chromium on the path that numbers pages."""
    for program in filter(None, map(shutil.which, NAMES)):
        with suppress(OSError, subprocess.SubprocessError):
            answer = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=30)
            version = re.search(r"(\d+)\.\d+", answer.stdout)
            if version and int(version[1]) >= NUMBERS_PAGES:
                return program
    return None


def print_with_chromium(program: str, text: str) -> bytes | None:
    """The PDF of an HTML page; None if the browser fails."""
    with tempfile.TemporaryDirectory() as folder:
        page, pdf = Path(folder, "page.html"), Path(folder, "page.pdf")
        page.write_text(text, encoding="utf-8", errors="replace")
        command = [
            program, "--headless", "--disable-gpu", "--no-first-run", "--disable-background-networking",
            "--no-pdf-header-footer", f"--user-data-dir={folder}/profile", f"--print-to-pdf={pdf}",
        ]  # fmt: skip
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            command.append("--no-sandbox")  # Chromium refuses to start for root without it
        try:
            subprocess.run([*command, page.as_uri()], capture_output=True, timeout=SECONDS, check=True)
            content = pdf.read_bytes()
        except (OSError, subprocess.SubprocessError):
            return None
    return content if content.startswith(b"%PDF") else None


def print_with_typst(text: str) -> bytes:
    """The PDF of a page by heatproof's templates, which are XML but for what is changed here."""
    if find_spec("typst") is None:
        raise MissingExtraError(
            f"neither Chromium {NUMBERS_PAGES} or newer nor typst was found to print the PDF; "
            "install Chromium, or run: pip install 'heatproof[pdf]'"
        )
    with tempfile.TemporaryDirectory() as folder:
        images: list[Path] = []

        def write_image(match: re.Match[str]) -> str:
            images.append(Path(folder, f"{len(images)}.image"))
            images[-1].write_bytes(base64.b64decode(match[1]))
            return f'src="{images[-1].name}"'

        text = re.sub(r'src="data:image/[^"]*;base64,([^"]*)"', write_image, text)
        text = re.sub(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]", "\ufffd", text)
        text = re.sub(r"<(meta|img|br)\b([^>]*)>", r"<\1\2/>", text.partition("<!DOCTYPE html>")[2])
        chart = r'<svg\1><![CDATA[<svg xmlns="http://www.w3.org/2000/svg"\1>\2</svg>]]></svg>'
        text = re.sub(r"<svg([^>]*)>(.*?)</svg>", chart, text, flags=re.DOTALL)
        Path(folder, "page.xml").write_text(text.strip(), encoding="utf-8")
        content: bytes = need("typst", "pdf").compile(asset("paper.typ").encode(), root=folder, format="pdf")
    return content
