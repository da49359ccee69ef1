"""Rewrites the tables of README.md and docs/results/*.md from the CSV files of docs/results.

    python docs/results_pages.py       after a study or `python -m benchmarks --csv` was run again

So it does with sentences between marks. Then it says what else the pages should say, or say and is not so:
other sentences are for people to write. What a page may say is in tests/project/claims, and
tests/project/test_results_pages.py holds it.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests/project"))

from test_results_pages import PAGES, block, missing, uncovered  # noqa: E402

TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
LINK = re.compile(r"\[([^]]*)\]\(([^)]*)\)")


def rewritten(text: str, tables: list[list[list[str]] | None]) -> str:
    """The page with the rows of its tables replaced; a link in a cell stays where its words are."""
    waiting = iter(tables)

    def table(match: re.Match[str]) -> str:
        made = next(waiting)
        if made is None:
            return match[0]
        head = match[0].splitlines()[:2]
        body = "".join(f"| {' | '.join(row)} |\n" for row in made)
        for words, where in LINK.findall(match[0]):
            body = re.sub(rf"(?<!\[){re.escape(words)}(?!\])", f"[{words}]({where})", body, count=1)
        return "\n".join(head) + "\n" + body.replace("|  |", "| |")

    return TABLE.sub(table, text)


def main() -> None:
    for page in PAGES:
        path = ROOT / page.name
        text = rewritten(path.read_text(encoding="utf-8"), page.tables)
        for name, sentences in page.blocks.items():
            text = block(name).sub(
                lambda match, text_of_block=sentences: match[1] + text_of_block + match[3], text
            )
        path.write_text(text, encoding="utf-8")
        for line in [
            *missing(page, text),
            *(f"nothing accounts for: {words}" for words in uncovered(page, text)),
        ]:
            print(f"{page.name}: {line}")


if __name__ == "__main__":
    main()
