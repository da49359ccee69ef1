"""Every number and every finding on README.md and docs/results/*.md is what the CSV files beside them say.

The folder claims makes, for each page, its tables and its sentences from those files. Here they are looked
for on the page, and what the page has beyond them is reported: a number or a bold finding that nothing was
made for. What was chosen and not measured (settings, versions, dates) is listed there too, as it stands.
"""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest
from claims import RESULTS, ROOT, Page, Rows
from claims.calibration import calibration
from claims.evidence import evidence
from claims.front import front
from claims.passes import passes
from claims.precision import precision
from claims.speed import limits, speed

PAGES = [
    front(),
    calibration(),
    evidence(),
    passes(),
    speed(),
    precision(),
]

NAME = re.compile(r"[A-Za-z][A-Za-z-]*[/-]?\d+")  # ResNet-50, ViT-Ti/16, H200, fp32: no measurement
YEAR = re.compile(r"\b(19|20)\d\d\b")


def block(name: str) -> re.Pattern[str]:
    """What stands between the marks of that name: the second group."""
    begin = rf"<!-- {re.escape(name)}: made by docs/results_pages\.py -->\n?"
    return re.compile(rf"({begin})(.*?)(\n?<!-- end -->)", re.DOTALL)


def readable(text: str) -> str:
    """The page without its code, its pictures, where its links lead, and its emphasis; one line."""
    text = re.sub(r"^```.*?^```$|<!--.*?-->", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!\[[^]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"(?<!\*)\*(?!\*)|\*\*|`", "", text)
    return re.sub(r"\s+", " ", text)


def tables_of(text: str) -> list[Rows]:
    """Cells of each table, without its head, with their emphasis and without where their links lead."""
    tables = re.findall(r"(?:^\|.*\n)+", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text), re.MULTILINE)
    return [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
        for table in tables
    ]


def uncovered(page: Page, text: str) -> list[str]:
    """Words around every number, and bold leads, that no finding and no setting of the page accounts for."""
    without = re.sub(r"(?:^\|.*\n)+|^Made by (?:.+\n)+", "\n", text, flags=re.MULTILINE)
    prose = readable(without)
    covered = [*(match.span() for match in NAME.finditer(prose)), *(f.span() for f in YEAR.finditer(prose))]
    known = [
        readable(sentence) for sentence in (*(sentence for sentence, _ in page.findings), *page.settings)
    ]
    for known_text in known:
        covered += [match.span() for match in re.finditer(re.escape(known_text), prose)]
    left = [
        prose[max(0, match.start() - 40) : match.end() + 40]
        for match in re.finditer(r"\d+", prose)
        if not any(start <= match.start() < end for start, end in covered)
    ]
    leads = [readable(lead) for lead in re.findall(r"^\*\*(.+?)\*\*", text, re.MULTILINE)]
    return left + [lead for lead in leads if not any(lead in text for text in known)]


def missing(page: Page, text: str) -> list[str]:
    """What the page should say and does not, or says and is not so."""
    prose = readable(text)
    sentences = [sentence for sentence, _ in page.findings] + list(page.settings)
    absent = [f"the page does not say: {s}" for s in sentences if readable(s) not in prose]
    return absent + [f"the tables do not say: {s}" for s, holds in page.findings if not holds]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_sentences_say_what_the_tables_say(page: Page) -> None:
    assert missing(page, (ROOT / page.name).read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_show_what_the_files_hold(page: Page) -> None:
    tables = tables_of((ROOT / page.name).read_text(encoding="utf-8"))
    assert len(tables) == len(page.tables)
    for made, table in zip(page.tables, tables, strict=True):
        if made is not None:
            assert table == made


@pytest.mark.parametrize("page", [page for page in PAGES if page.blocks], ids=lambda page: page.name)
def test_sentences_between_marks_are_those_of_the_files(page: Page) -> None:
    text = (ROOT / page.name).read_text(encoding="utf-8")
    for name, sentences in page.blocks.items():
        assert [match[2] for match in block(name).finditer(text)] == [sentences], name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_number_and_no_finding_is_left_unchecked(page: Page) -> None:
    assert uncovered(page, (ROOT / page.name).read_text(encoding="utf-8")) == []


# Written as a whole from CSV files; tests/research compares them.
GENERATED = tuple(
    f"docs/results/{name}.md"
    for name in ("cose", "cscore", "cscore-cifar", "early-warning", "index", "localise", "qr", "rankings")
)


def test_every_results_page_is_checked_and_says_how_it_was_made() -> None:
    pages = sorted(path.relative_to(ROOT).as_posix() for path in RESULTS.glob("*.md"))
    assert pages == sorted([*(page.name for page in PAGES if page.name != "README.md"), *GENERATED])
    for name in pages:
        assert re.search(r"^Made by ", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE), name


def test_a_wrong_number_and_an_unchecked_one_are_noticed() -> None:
    page = Page("x.md")
    page.says("it fell to 0.13")
    page.says("three methods beat it", holds=False)
    page.states("seed 0")
    good = "It is so, with seed 0: **it fell to 0.13**, and\nthree methods beat it on a ResNet-50.\n"
    assert missing(page, good) == ["the tables do not say: three methods beat it"]
    assert uncovered(page, good) == []
    assert missing(page, good.replace("0.13", "0.14"))[0] == "the page does not say: it fell to 0.13"
    assert len(uncovered(page, good.replace("0.13", "0.14"))) == 2
    assert uncovered(page, good + "**All is well.** Nobody checked.\n") == ["All is well."]


def test_sentences_about_limits_come_out_both_ways() -> None:
    rows = [{"what": name, "ratio": ratio, "limit": "<= 2"} for name, ratio in (("a", "1"), ("b", "1.5"))]
    assert limits(rows) == "Both limits are kept."
    rows[1]["ratio"] = "3"
    assert limits(rows) == "1 of 2 limits is missed: b (3, limit 2)."


def test_files_of_measurements_can_be_read() -> None:
    for path in RESULTS.rglob("*.csv"):
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
        assert len(rows) > 1 and len({len(row) for row in rows}) == 1, path


def test_programs_that_write_pages_start_in_any_folder(tmp_path: Path) -> None:
    """The tests' own import path contains the folder of `research`, which that of a program does not."""
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'docs')!r}); import calibration_page, results_pages"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True)
