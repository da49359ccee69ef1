"""Tables and the page of a study: marks, formats, files."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from jinja2 import DictLoader

from heatproof.errors import InputError
from heatproof.report.figures import Line, Panel, lines
from heatproof.report.pieces import TEMPLATES
from heatproof.report.tables import Column, Table, Value
from heatproof.studies.common import write_page

NAN = float("nan")


def table() -> Table:
    columns = (
        Column("method"),
        Column("FMR", higher_is_better=True),
        Column("BL", higher_is_better=False),
        Column("n", "d"),
    )
    rows = (
        ("a|b", Value(0.5, (0.25, 0.75), 9), 0.3, 9),
        ("c", Value(0.7, (0.6, 0.8), 9), 0.1, 9),
        ("d", Value(NAN, None, 0), 0.2, 0),
        ("floor", Value(0.9, (0.8, 1.0), 9), 0.0, 9),
    )
    return Table("scores", "Some scores", columns, rows, "A note.", unranked=frozenset({3}))


def test_best_and_second_best_leave_out_what_does_not_compete() -> None:
    assert table().marks() == {(1, 1): 1, (0, 1): 2, (1, 2): 1, (2, 2): 2}


def test_markdown_shows_marks_arrows_intervals_and_escapes() -> None:
    text = table().markdown()
    assert "| method | FMR ↑ | BL ↓ | n |" in text
    assert "| a\\|b | *0.500 [0.250, 0.750]* | 0.300 | 9 |" in text
    assert "| c | **0.700 [0.600, 0.800]** | **0.100** | 9 |" in text
    assert "| d | – | *0.200* | 0 |" in text
    assert text.rstrip().endswith("A note.")


def test_csv_has_a_column_for_every_number() -> None:
    rows = list(csv.reader(io.StringIO(table().csv())))
    assert rows[0] == ["method", "FMR", "FMR low", "FMR high", "FMR n", "BL", "n"]
    assert rows[1] == ["a|b", "0.5", "0.25", "0.75", "9", "0.3", "9"]
    assert {len(row) for row in rows} == {7}


def test_latex_is_escaped_and_marked() -> None:
    text = table().latex()
    assert r"\textbf{0.700}" in text and r"\underline{0.500}" in text
    assert r"FMR $\uparrow$" in text and text.count(r"\\") == 5


def test_a_row_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match="1 cells for 2 columns"):
        Table("t", "t", (Column("a"), Column("b")), (("x",),))


@pytest.fixture
def template(monkeypatch: pytest.MonkeyPatch) -> str:
    page = 'It went well.\n\n\n{{ table("scores") }}{{ table("absent") }}\n\n{{ figure("line", "A line.") }}'
    monkeypatch.setattr(TEMPLATES, "loader", DictLoader({"page.md": page}))
    return "page.md"


@pytest.mark.usefixtures("every_format")
def test_a_report_writes_one_page_and_its_files(tmp_path: Path, template: str) -> None:
    line = lines([[Panel([Line([0, 1], [0, 1])])]], 4, 3)
    text = write_page(tmp_path, template, [table(), None], {"line": line}).page.read_text()
    assert text.index("It went well.") < text.index("Some scores") < text.index("figures/line.png")
    written = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()}
    assert written == {
        "summary.md", "tables/scores.md", "tables/scores.csv", "tables/scores.tex",
        "figures/line.svg", "figures/line.pdf", "figures/line.png",
    }  # fmt: skip


@pytest.mark.usefixtures("every_format")
def test_the_same_figure_is_the_same_file(tmp_path: Path, template: str) -> None:
    for name in ("a", "b"):
        line = lines([[Panel([Line([0, 1], [1, 0], "falls")])]], 4, 3)
        write_page(tmp_path / name, template, [], {"line": line})
    for suffix in ("svg", "pdf", "png"):
        first, second = ((tmp_path / n / "figures" / f"line.{suffix}").read_bytes() for n in "ab")
        assert first == second, suffix
