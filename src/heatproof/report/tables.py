"""Tables of studies, written as Markdown, CSV, LaTeX or on the terminal.

A cell is text, a number, or a `Value`: a mean with its 95 % interval and how many it is the mean of. A column
has the better direction, so that the best and the second best are marked the same way everywhere.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from heatproof.disk import write_whole
from heatproof.errors import InputError
from heatproof.store.scores import csv_cell, latex_text

ARROWS = {True: "↑", False: "↓", None: ""}
LATEX_ARROWS = {True: r" $\uparrow$", False: r" $\downarrow$", None: ""}
SQUARES = {"green": "🟩 ", "amber": "🟧 ", "red": "🟥 "}
LATEX_COLOURS = {  # of xcolor, with its option table
    "green": r"\cellcolor{green!20}", "amber": r"\cellcolor{orange!25}", "red": r"\cellcolor{red!25}",
}  # fmt: skip


@dataclass(frozen=True)
class Value:
    """A number with its interval and count, and the colour of its band."""

    value: float
    interval: tuple[float, float] | None = None  # 95 %
    n: int | None = None
    colour: str = ""  # green, amber or red


Cell = str | float | int | Value | None


@dataclass(frozen=True)
class Column:
    """A heading, how its numbers are written, and which way is better (None: no better)."""

    name: str
    form: str = ".3f"
    higher_is_better: bool | None = None


@dataclass(frozen=True)
class Table:
    """Rows of cells under columns, with a title and a note."""

    name: str  # of its files
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    marked: bool = True  # best **bold**, second best *slanted*
    unranked: frozenset[int] = field(default_factory=frozenset)  # rows that do not compete: floors, published

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise InputError(
                    f"table {self.name}: a row has {len(row)} cells for {len(self.columns)} columns"
                )

    def marks(self) -> dict[tuple[int, int], int]:
        """(row, column) -> 1 for the best, 2 for the second best; ties share."""
        marks: dict[tuple[int, int], int] = {}
        for j, column in enumerate(self.columns):
            if not self.marked or column.higher_is_better is None:
                continue
            numbers = {i: number(row[j]) for i, row in enumerate(self.rows) if i not in self.unranked}
            defined = {i: x for i, x in numbers.items() if not math.isnan(x)}
            order = sorted(set(defined.values()), reverse=column.higher_is_better)
            if len(order) > 1:
                marks |= {(i, j): order.index(x) + 1 for i, x in defined.items() if x in order[:2]}
        return marks

    def text(self, i: int, j: int, interval: bool = True) -> str:
        return cell_text(self.rows[i][j], self.columns[j].form, interval)

    def markdown(self) -> str:
        """The table in GitHub's Markdown."""
        head = [f"{c.name} {ARROWS[c.higher_is_better]}".strip() for c in self.columns]
        rule = ["---" if self._left(j) else "---:" for j in range(len(head))]
        rows = self._texts(("%s", "**%s**", "*%s*"), lambda text: text.replace("|", "\\|"), SQUARES)
        body = "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *rows))
        return f"**{self.title}**\n\n{body}\n" + (f"\n{self.note}\n" if self.note else "")

    def csv(self) -> str:
        """The table as CSV; an interval and a count get columns of their own."""
        out, names = io.StringIO(), [column.name for column in self.columns]
        wide = [any(_is_wide(row[j]) for row in self.rows) for j in range(len(names))]
        parts = [("", " low", " high", " n")[: 4 if has else 1] for has in wide]
        heads = [f"{name}{part}" for name, own in zip(names, parts, strict=True) for part in own]
        cells = (zip(row, wide, strict=True) for row in self.rows)
        lines: list[Sequence[object]] = [heads, *([x for c in row for x in _flat(*c)] for row in cells)]
        csv.writer(out, lineterminator="\n").writerows(map(csv_cell, line) for line in lines)
        return out.getvalue()

    def latex(self) -> str:
        """A booktabs table."""
        spec = "".join("l" if self._left(j) else "r" for j in range(len(self.columns)))
        head = " & ".join(latex_text(c.name) + LATEX_ARROWS[c.higher_is_better] for c in self.columns)
        styles = ("%s", r"\textbf{%s}", r"\underline{%s}")
        rows = map(" & ".join, self._texts(styles, latex_text, LATEX_COLOURS, False))
        lines = [
            r"\begin{table}", rf"\caption{{{latex_text(self.title)}}}",
            rf"\begin{{tabular}}{{{spec}}}", r"\toprule",
            rf"{head} \\", r"\midrule", *(rf"{row} \\" for row in rows), r"\bottomrule", r"\end{tabular}",
            r"\end{table}",
        ]  # fmt: skip
        return "\n".join(lines) + "\n"

    def write(self, folder: Path) -> None:
        """NAME.md, NAME.csv and NAME.tex in this folder."""
        texts = {"md": self.markdown(), "csv": self.csv(), "tex": self.latex()}
        write_whole({folder / f"{self.name}.{suffix}": text for suffix, text in texts.items()})

    def _texts(
        self, styles: tuple[str, str, str], escape: Callable[[str], str], colours: Mapping[str, str],
        interval: bool = True,
    ) -> list[list[str]]:  # fmt: skip
        """Every cell, escaped, with its colour and in the style of its mark: none, best, second best."""
        marks = self.marks()

        def text(i: int, j: int, cell: Cell) -> str:
            colour = colours.get(cell.colour, "") if isinstance(cell, Value) else ""
            return colour + styles[marks.get((i, j), 0)] % escape(self.text(i, j, interval))

        return [[text(i, j, cell) for j, cell in enumerate(row)] for i, row in enumerate(self.rows)]

    def _left(self, j: int) -> bool:
        return all(isinstance(row[j], str) for row in self.rows)


def number(cell: Cell) -> float:
    """The number in a cell; NaN where there is none."""
    if isinstance(cell, Value):
        return cell.value
    return float("nan") if cell is None or isinstance(cell, str) else float(cell)


def cell_text(cell: Cell, form: str = ".3f", interval: bool = True) -> str:
    """A cell as text.

    >>> cell_text(Value(0.5, (0.25, 0.75), 9)), cell_text(float("nan")), cell_text(7, "d")
    ('0.500 [0.250, 0.750]', '–', '7')
    """
    if cell is None or isinstance(cell, str):
        return cell or ""
    if math.isnan(number(cell)):
        return "–"
    if isinstance(cell, Value):
        text = format(cell.value, form)
        if not interval or cell.interval is None or any(map(math.isnan, cell.interval)):
            return text
        return f"{text} [{format(cell.interval[0], form)}, {format(cell.interval[1], form)}]"
    return format(cell, form) if isinstance(cell, float) else str(cell)


def _is_wide(cell: Cell) -> bool:
    return isinstance(cell, Value) and (cell.interval is not None or cell.n is not None)


def _flat(cell: Cell, wide: bool) -> Sequence[object]:
    if isinstance(cell, Value):
        more = [*(cell.interval or ("", "")), "" if cell.n is None else cell.n]
        return [cell.value, *more * wide]
    return ["" if cell is None else cell, *[""] * 3 * wide]
