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


def declared_fields(columns: Iterable[Sequence[Any]], cells: object) -> list[Field]:
    """Fields from data: name, better ("less", "more" or ""), format, cell and its arguments.

    A cell is a method of `cells`, called with the first two values of a row and the arguments, or "key" for
    the value of the row at a place.
    """

    def cell(name: str, arguments: Sequence[Any], *row: Any) -> Cell:
        found: Cell = row[arguments[0]] if name == "key" else getattr(cells, name)(*row[:2], *arguments)
        return found

    better = {"less": False, "more": True, "": None}
    return [
        (Column(title, form, better[way]), partial(cell, name, arguments))
        for title, way, form, name, *arguments in columns
    ]
