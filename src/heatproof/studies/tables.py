"""Tables of studies as data: the rows, the columns with the cell of each row, and published rows below."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from heatproof.explain.floors import is_floor
from heatproof.report.tables import Cell, Column, Table

Cells = tuple[Cell, ...]
Field = tuple[Column, Callable[..., Cell]]  # a column, and its cell from the values that name a row
less, more = partial(Column, higher_is_better=False), partial(Column, higher_is_better=True)


def study_table(
    name: str, title: str, rows: Iterable[tuple[Any, ...]], fields: Sequence[Field], note: str = "",
    published: Sequence[Cells] = (), marked: bool = True,
) -> Table:  # fmt: skip
    """A table with one column per field.

    Args:
        rows: the arguments of the fields' functions, one tuple per row.
        published: further rows; empty cells are added at their end. They are not ranked, nor are floors.
    """
    columns = tuple(column for column, _ in fields)
    cells = [tuple(cell(*row) for _, cell in fields) for row in rows]
    method = next((j for j, column in enumerate(columns) if column.name == "method"), None)
    floors = {i for i, row in enumerate(cells) if method is not None and is_floor(str(row[method]))}
    unranked = floors | set(range(len(cells), len(cells) + len(published)))
    cells += [(*row, *[None] * (len(columns) - len(row))) for row in published]
    return Table(name, title, columns, tuple(cells), note, marked, frozenset(unranked))
