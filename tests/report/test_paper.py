"""The report as PDF, printed by Chromium and by Typst, read back with pdftotext."""

from __future__ import annotations

import re
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image

from heatproof.cli.read import report_command
from heatproof.errors import MissingExtraError, StoreError
from heatproof.report import print_pdf
from heatproof.report.page import ReportPage, read_report
from heatproof.report.print_pdf import paper_html, paper_pictures, print_with_typst, write_pdf
from heatproof.show import address
from heatproof.store import RunFolder
from heatproof.verdict.data import RunData, read_run
from heatproof.verdict.judge import judge
from made_run import make_run

needs_pdftotext = pytest.mark.skipif(
    shutil.which("pdftotext") is None, reason="pdftotext is not there: apt-get install poppler-utils"
)
needs_chromium = pytest.mark.skipif(
    print_pdf.find_chromium() is None, reason="no Chromium that numbers pages: apt-get install chromium"
)

needs_typst = pytest.mark.skipif(
    find_spec("typst") is None, reason="typst is not there: pip install 'heatproof[pdf]'"
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
    output = subprocess.run(["pdftotext", path, "-"], capture_output=True, text=True, check=True).stdout
    return " ".join(output.split())


def pages_of(path: Path) -> int:
    output = subprocess.run(["pdfinfo", path], capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"Pages:\s+(\d+)", output)[0])


def check_paper(path: Path, data: RunData, page: ReportPage) -> None:
    """Headline, hashes, date, settings, definitions, every heading and a number on every page."""
    text = text_of(path)
    pages = pages_of(path)
    assert 3 < pages <= 6 and all(f"page {k} of {pages}" in text for k in range(1, pages + 1))
    assert page.verdict.headline in text
    assert data.manifest.config_hash in text and "hash abc" in text and data.manifest.started in text
    for section in page.included:
        assert section.title in text, section.title
    for heading in ("Six examples", "What to do next", "How the verdict is computed"):
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
@needs_typst
@pytest.mark.parametrize("chromium", [None, "false"], ids=["absent", "fails"])
def test_typst_prints_all_of_it(
    data: RunData, page: ReportPage, tmp_path: Path, chromium: str | None
) -> None:
    assert write_pdf(data, judge(data), tmp_path / "a.pdf", chromium=chromium) == "printed by typst"
    check_paper(tmp_path / "a.pdf", data, page)


def test_without_chromium_and_typst_one_sentence_names_both(
    data: RunData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(print_pdf, "find_spec", lambda package: None)
    with pytest.raises(MissingExtraError, match=r"install Chromium, or run: pip install 'heatproof\[pdf\]'"):
        write_pdf(data, judge(data), tmp_path / "a.pdf", chromium=None)
    assert not (tmp_path / "a.pdf").exists()


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
    "chromium",
    [pytest.param("", marks=needs_chromium), pytest.param(None, marks=needs_typst)],
    ids=["chromium", "typst"],
)
def test_an_audit_of_ten_methods_takes_six_pages(tmp_path: Path, chromium: str | None) -> None:
    made = read_run(make_run(tmp_path / "run", methods=FILLED, metrics=MEASURED))
    write_pdf(made, judge(made), tmp_path / "a.pdf", chromium=chromium)
    assert pages_of(tmp_path / "a.pdf") <= 6
    text = text_of(tmp_path / "a.pdf")
    assert not {"Scores", "Pictures", "By class"} & set(re.findall(r"(\w+): beyond 6 pages", text))
    assert all(method in text for method in FILLED) and "How this was made" in text


@needs_pdftotext
@needs_typst
def test_what_does_not_fit_on_the_pages_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(print_pdf, "MOST_PAGES", 4)
    made = read_run(make_run(tmp_path / "run", images=31, methods=FILLED, metrics=MEASURED))
    write_pdf(made, judge(made), tmp_path / "a.pdf", chromium=None)
    assert pages_of(tmp_path / "a.pdf") <= 4
    left = text_of(tmp_path / "a.pdf").partition("Not in this report")[2]
    assert "Agreement: beyond 4 pages; it is in report.html" in left


def test_no_fold_is_printed_and_nothing_runs(data: RunData) -> None:
    text = paper_html(data, judge(data))
    assert "<script" not in text and "<details open" not in text
    assert "default-src &#39;none&#39;" in text and text.count("<img") >= 12 + 5 * 4
    assert 'src="http' not in text and "window.hacked" in text, "evil names are shown"
    assert "&lt;script&gt;window.hacked" in text


@needs_pdftotext
@needs_typst
def test_a_run_that_kept_nothing_goes_on_paper_too(tmp_path: Path) -> None:
    bare = read_run(make_run(tmp_path / "run", images=4, methods=["random"], metrics=(), maps=False))
    write_pdf(bare, judge(bare), tmp_path / "a.pdf", chromium=None)
    text = text_of(tmp_path / "a.pdf")
    assert "Not in this report" in text and "the run stored no images" in text


def typst_text(body: str, path: Path) -> str:
    """What pdftotext reads from a page with this body."""
    page = f"<!DOCTYPE html><html><head><title>t</title></head><body>{body}</body></html>"
    path.write_bytes(print_with_typst(page))
    return subprocess.run(["pdftotext", path, "-"], capture_output=True, text=True, check=True).stdout


@needs_pdftotext
@needs_typst
def test_a_heading_and_its_introduction_stay_with_what_follows(tmp_path: Path) -> None:
    line = "<p>some words that fill a line of the page from its left to its right side, and a bit more</p>"
    table = "<table><tbody>" + "<tr><th>row</th><td>1</td></tr>" * 3 + "</tbody></table>"
    for lines in range(40, 75, 2):
        body = f"{line * lines}<section><h2>Heading</h2><p>Introduction.</p>{table}</section>"
        sheets = typst_text(body, tmp_path / "a.pdf").split("\f")
        sheet = next(sheet for sheet in sheets if "Heading" in sheet)
        assert "row" in sheet.partition("Introduction.")[2], lines


NAMES = "Łódź, ňőşțřů, кошка, γάτα, שלום, αβγ"


@needs_pdftotext
@needs_typst
def test_letters_of_other_countries_are_printed_and_can_be_searched(tmp_path: Path) -> None:
    long = "integrated_gradients(baseline=blur,steps=64)"
    body = (
        f'<p>{NAMES}</p><p><code>дом (a\\b) {long}</code> \x07 &lt;b&gt; <span class="hidden">no</span></p>'
    )
    text = typst_text(body, tmp_path / "a.pdf")
    assert all(name in text for name in NAMES.split(", ")), text
    assert f"дом (a\\b) {long}" in text and "<b>" in text and "no" not in text.split()
    assert (tmp_path / "a.pdf").stat().st_size < 100_000


@needs_pdftotext
@needs_typst
def test_charts_images_and_long_names_stay_inside_the_page(tmp_path: Path) -> None:
    chart = '<svg class="chart" viewBox="0 0 10 5"><title>no</title><text x="1" y="2">5</text></svg>'
    cells = f"<td>{'abcdefghij' * 6}</td>" * 9
    image = f'<img alt="" src="{address(Image.new("RGB", (8, 8)))}">'
    body = (
        f'<figure>{chart}</figure><table class="scores"><tbody><tr>{cells}</tr></tbody></table>'
        f'<figure class="crops"><div>{image * 3}</div><figcaption>Alike.</figcaption></figure>'
        f'<div class="tiles"><figure>{image}<figcaption>map</figcaption></figure></div>'
        "<table><tbody></tbody></table>"
    )
    text = typst_text(body, tmp_path / "a.pdf")
    assert "5" in text.split() and "no" not in text.split() and text.count("abcdefghij") == 9 * 6
    assert "Alike." in text and "map" in text.split()
    process = subprocess.run(["pdftotext", "-bbox", tmp_path / "a.pdf", "-"], capture_output=True, text=True)
    assert max(float(x) for x in re.findall(r'xMax="([\d.]+)"', process.stdout)) < 595 - 39


def test_paper_needs_a_folder(data: RunData, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="does not exist; create it first"):
        write_pdf(data, judge(data), tmp_path / "nowhere" / "a.pdf")
