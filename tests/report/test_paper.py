"""The report on paper: printed by a real browser or written plainly, read back with pdftotext."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from heatproof.cli.report import report_command
from heatproof.errors import StoreError
from heatproof.report import paper, pdf_letters
from heatproof.report.page import ReportPage, read_report
from heatproof.report.paper import paper_html, paper_pictures, write_paper
from heatproof.report.paper_blocks import PaperBlocks
from heatproof.report.paper_layout import plain_pdf
from heatproof.report.pdf_letters import runs, wide_letters
from heatproof.report.plain_pdf import WIDTHS, Document, width, wrapped
from heatproof.store import RunFolder
from heatproof.verdict.data import RunData, read_run
from heatproof.verdict.judge import judge
from made_run import make_run

needs_pdftotext = pytest.mark.skipif(
    shutil.which("pdftotext") is None, reason="pdftotext is not there: apt-get install poppler-utils"
)
needs_chromium = pytest.mark.skipif(
    paper.find_chromium() is None, reason="no Chromium that numbers pages: apt-get install chromium"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return make_run(tmp_path_factory.mktemp("paper") / "run", cscores=(0.6, 0.01))


@pytest.fixture(scope="module")
def data(run: RunFolder) -> RunData:
    return read_run(run)


@pytest.fixture(scope="module")
def page(data: RunData) -> ReportPage:
    return read_report(data, judge(data), paper_pictures(data))


def text_of(path: Path) -> str:
    told = subprocess.run(["pdftotext", path, "-"], capture_output=True, text=True, check=True).stdout
    return " ".join(told.split())


def pages_of(path: Path) -> int:
    told = subprocess.run(["pdfinfo", path], capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"Pages:\s+(\d+)", told)[0])


def check_paper(path: Path, data: RunData, page: ReportPage) -> None:
    """Headline, hashes, date, settings, definitions, every heading and a number on every page."""
    text = text_of(path)
    pages = pages_of(path)
    assert 3 < pages <= 6 and all(f"page {k} of {pages}" in text for k in range(1, pages + 1))
    assert page.verdict.headline in text
    assert data.manifest.config_hash in text and "hash abc" in text and data.manifest.started in text
    for section in page.shown:
        assert section.title in text, section.title
    for heading in ("Six pictures that show it", "What to do next", "How the verdict is reached"):
        assert heading in text
    assert all(re.search(rf"{group}, n = [12]", text) for group in ("Best", "Worst", "Most disputed"))
    assert "Petsiuk et al. (2018)" in text and "Lower is better" in text
    assert '"methods": [' not in text and '"kind":' not in text and "run.json" in text, "no JSON on paper"
    assert "No law" not in text and "not an approval" in text


@needs_pdftotext
@needs_chromium
def test_chromium_prints_all_of_it(run: RunFolder, data: RunData, page: ReportPage, tmp_path: Path) -> None:
    args = [str(run.path), "--out", str(tmp_path / "a.html"), "--pdf", str(tmp_path / "a.pdf")]
    result = CliRunner().invoke(report_command, args, catch_exceptions=False)
    assert result.exit_code == 0 and "printed by " in result.output
    check_paper(tmp_path / "a.pdf", data, page)


@needs_pdftotext
def test_without_a_browser_it_is_written_plainly(data: RunData, page: ReportPage, tmp_path: Path) -> None:
    said = write_paper(data, judge(data), tmp_path / "a.pdf", chromium=None)
    assert "written plainly" in said
    check_paper(tmp_path / "a.pdf", data, page)


@needs_pdftotext
def test_a_browser_that_fails_does_not_cost_the_paper(data: RunData, tmp_path: Path) -> None:
    assert "written plainly" in write_paper(data, judge(data), tmp_path / "a.pdf", chromium="false")
    assert judge(data).headline in text_of(tmp_path / "a.pdf")


FILLED = (
    "gradcam", "layercam", "hirescam", "gradient", "gradcam++", "eigencam", "lrp", "guided-backprop",
    "gradient-x-input", "integrated-gradients", "random", "edges", "centre",
)  # fmt: skip
MEASURED = (
    "specificity_weights", "specificity_place", "insertion", "deletion", "randomisation_ssim",
    "randomisation_spearman", "fragility_ssim", "fragility_spearman", "untrained_spearman", "untrained_null",
    "untrained_excess", "untrained_entropy",
)  # fmt: skip


@needs_pdftotext
@pytest.mark.parametrize(
    "chromium", [pytest.param("", marks=needs_chromium), None], ids=["chromium", "plain"]
)
def test_an_audit_of_ten_methods_takes_six_pages(tmp_path: Path, chromium: str | None) -> None:
    made = read_run(make_run(tmp_path / "run", methods=FILLED, metrics=MEASURED))
    write_paper(made, judge(made), tmp_path / "a.pdf", chromium=chromium)
    assert pages_of(tmp_path / "a.pdf") <= 6
    text = text_of(tmp_path / "a.pdf")
    assert not {"Scores", "Pictures", "By class"} & set(re.findall(r"(\w+): beyond 6 pages", text))
    assert all(method in text for method in FILLED) and "How this was made" in text


@needs_pdftotext
def test_what_does_not_fit_on_six_pages_is_listed(tmp_path: Path) -> None:
    methods = [f"{method}({option})" for method in FILLED for option in ("a=1", "a=2", "a=3")]
    made = read_run(make_run(tmp_path / "run", images=31, methods=methods, metrics=MEASURED))
    write_paper(made, judge(made), tmp_path / "a.pdf", chromium=None)
    assert pages_of(tmp_path / "a.pdf") <= 6
    left = text_of(tmp_path / "a.pdf").partition("Not in this report")[2]
    assert "Agreement: beyond 6 pages; it is in report.html" in left


def test_no_fold_is_printed_and_nothing_runs(data: RunData) -> None:
    text = paper_html(data, judge(data))
    assert "<script" not in text and "<details open" not in text
    assert "Settings of the run" not in " ".join(block.text for block in PaperBlocks(text).found)
    assert "default-src &#39;none&#39;" in text and text.count("<img") >= 12 + 5 * 4
    assert 'src="http' not in text and "window.hacked" in text, "evil names are shown"
    assert "&lt;script&gt;window.hacked" in text


@needs_pdftotext
def test_a_run_that_kept_nothing_goes_on_paper_too(tmp_path: Path) -> None:
    bare = read_run(make_run(tmp_path / "run", images=4, methods=["random"], metrics=(), maps=False))
    write_paper(bare, judge(bare), tmp_path / "a.pdf", chromium=None)
    text = text_of(tmp_path / "a.pdf")
    assert "Not in this report" in text and "the run kept no pictures" in text


@needs_pdftotext
def test_a_heading_stays_with_what_follows(tmp_path: Path) -> None:
    line = "<p>some words that fill a line of the page from its left to its right side, and a bit more</p>"
    for lines in range(50, 75):
        page = f"<title>t</title>{line * lines}<h2>Heading</h2>{line * 3}"
        (tmp_path / "a.pdf").write_bytes(plain_pdf(page))
        told = subprocess.run(["pdftotext", tmp_path / "a.pdf", "-"], capture_output=True, text=True).stdout
        sheet = next(sheet for sheet in told.split("\f") if "Heading" in sheet)
        assert "some words" in sheet.partition("Heading")[2], lines


def test_blocks_are_read_in_order() -> None:
    found = PaperBlocks(
        "<title>T &amp; t</title><nav><p>no</p></nav><h2>A <bdi>&lt;b&gt;</bdi></h2>"
        '<table><thead><tr><td></td><th colspan="2">x</th></tr></thead>'
        '<tr><th>r</th><td>1<span class="sub">n</span></td><td>2</td></tr></table>'
        '<figure><figcaption>chart</figcaption><svg viewBox="0 0 10 5"><title>no</title>'
        '<text x="1" y="2">5</text><line x1="0" y1="0" x2="1" y2="1"/></svg></figure>'
        '<p>e<span class="hidden">no</span>nd</p>'
    )
    assert found.title == "T & t"
    assert [block.kind for block in found.found] == ["h2", "row", "row", "tile", "p"]
    heading, head, row, chart, last = found.found
    assert heading.text == "A <b>" and last.text == "end" and chart.text == "chart"
    assert head.head and not row.head and head.cells == ["", "x", ""] and row.cells == ["r", "1 | n", "2"]
    assert [(tag, text) for tag, _, text in chart.shapes] == [("text", "5"), ("line", "")]


def test_letters_are_as_wide_as_the_font_says() -> None:
    matplotlib = pytest.importorskip(
        "matplotlib", reason="matplotlib is not installed: pip install matplotlib"
    )
    folder = Path(matplotlib.get_data_path()) / "fonts" / "pdfcorefonts"

    def widths(font: str) -> dict[int, int]:
        text = (folder / f"{font}.afm").read_text(encoding="latin-1")
        return {int(c): int(w) for c, w in re.findall(r"^C (\d+) ; WX (\d+) ;", text, re.M)}

    plain, bold = widths("Helvetica"), widths("Helvetica-Bold")
    quotes = {ord("'"): 191, ord("`"): 333}  # the file's own encoding has curly ones there
    assert [(plain | quotes)[c] for c in range(32, 127)] == list(WIDTHS)
    sentence = "Maps follow the network, and lie where they should"
    assert width(sentence, 1, "bold") == pytest.approx(sum(bold[ord(c)] for c in sentence) / 1000, rel=0.03)


def test_lines_fit_and_lose_nothing() -> None:
    words = "a few words and averyverylongwordthatfitsnowhereatall in between"
    lines = wrapped(words, 8, 60)
    assert all(width(line, 8) <= 60 for line in lines)
    assert "".join(lines).replace(" ", "") == words.replace(" ", "")
    assert runs("") == [] and runs("−1 ✓ ü")[0] == (False, "-1 + ü")
    assert Document("t").file().startswith(b"%PDF-1.4")


NAMES = "Łódź, ňőşțřů, кошка, γάτα, שלום, αβγ"


@needs_pdftotext
def test_letters_of_other_countries_are_printed_and_can_be_searched(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install matplotlib")
    (tmp_path / "a.pdf").write_bytes(plain_pdf(f"<title>t</title><p>{NAMES}</p><pre>дом (a\\b)</pre>"))
    text = text_of(tmp_path / "a.pdf")
    assert all(name in text for name in NAMES.split(", ")), text
    assert "дом (a\\b)" in text and "could not be printed" not in text
    assert (tmp_path / "a.pdf").stat().st_size < 60_000
    (tmp_path / "b.pdf").write_bytes(plain_pdf("<title>t</title><p>猫 a? b?</p><p>猫</p>"))
    assert text_of(tmp_path / "b.pdf").count("could not be printed") == 1
    assert width("кошка", 10) == pytest.approx(10 * sum(wide_letters()[c].ems for c in "кошка"))


@needs_pdftotext
def test_without_that_font_accents_are_left_off_and_what_is_lost_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pdf_letters, "wide_letters", dict)
    (tmp_path / "a.pdf").write_bytes(plain_pdf(f"<title>t</title><p>{NAMES}</p>"))
    text = text_of(tmp_path / "a.pdf")
    assert "Lódz, nostru, ?????" in text and "could not be printed" in text
    (tmp_path / "a.pdf").write_bytes(plain_pdf("<title>t</title><p>Łódź ü? — ✓</p>"))
    assert "could not be printed" not in text_of(tmp_path / "a.pdf")


def test_paper_needs_a_folder(data: RunData, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="does not exist; create it first"):
        write_paper(data, judge(data), tmp_path / "nowhere" / "a.pdf")
