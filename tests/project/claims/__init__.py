"""What README.md and docs/results/*.md may say, made from the CSV files of docs/results.

One file for each page. To add a table or a sentence, read its file with `rows` and write the cells or the
sentence as the page shows them; `says` also takes whether it is so, for what the words compare. What `writes`
makes is not typed on the page at all: docs/results_pages.py puts it between `<!-- name: made by ... -->` and
`<!-- end -->`.
test_results_pages.py looks for all of it on the page, and for numbers on the page that nothing here made.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "docs" / "results"
PAPERS: dict[str, Any] = json.loads((ROOT / "tests/data/papers.json").read_text(encoding="utf-8"))
WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
FLOORS = ("random", "edges", "centre")

Rows = list[list[str]]
Row = Mapping[str, str]


class Page:
    """A page with everything on it that can be checked."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tables: list[Rows | None] = []  # in the page's order; None: nothing in it was measured
        self.findings: list[tuple[str, bool]] = []
        self.settings: list[str] = []  # what was chosen, not measured; headings that claim nothing
        self.blocks: dict[str, str] = {}  # what docs/results_pages.py writes between the marks of that name

    def says(self, sentence: str, holds: bool = True) -> None:
        self.findings.append((sentence, holds))

    def writes(self, name: str, text: str) -> None:
        """Sentences that are made from the files whichever way they come out."""
        self.blocks[name] = text
        self.says(text)

    def states(self, *settings: str) -> None:
        self.settings += settings


def summary(folder: str) -> str:
    """The page that the study itself wrote."""
    return (RESULTS / folder / "summary.md").read_text(encoding="utf-8")


def rows(path: str, *key: str) -> dict[str, Row]:
    """A file of docs/results by one column, or by several joined with a space."""
    with (RESULTS / path).open(newline="", encoding="utf-8") as file:
        return {" ".join(row[k] for k in key): row for row in csv.DictReader(file)}


def column(table: Mapping[str, Row], name: str, keys: Sequence[str] | None = None) -> dict[str, float]:
    """One column as numbers; of all rows that have a number there, or of the rows named."""
    chosen = [key for key, row in table.items() if row[name]] if keys is None else keys
    return {key: float(table[key][name]) for key in chosen}


def best_in_bold(values: Mapping[str, float], form: str, best: Callable[..., str] = max) -> dict[str, str]:
    """Formatted; the best in bold, floors out of competition."""
    chosen = best([name for name in values if name not in FLOORS], key=lambda name: values[name])
    return {name: f"**{v:{form}}**" if name == chosen else f"{v:{form}}" for name, v in values.items()}


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def ranked(values: Mapping[str, float]) -> list[str]:
    """Names from the highest value to the lowest."""
    return sorted(values, key=lambda name: values[name], reverse=True)
