"""The CSV files of `heatproof bench`: a part that is measured again replaces its old rows, others stay."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

from heatproof.errors import InputError
from heatproof.store.scores import csv_cell

SAME = ("section", "part", "device", "quick")  # rows alike in these are of one measurement
Cells = Mapping[str, object]


class MeasuredRows:
    """Rows by file, read before anything is measured and written after every part."""

    def __init__(self) -> None:
        self.files: dict[Path, list[Cells]] = {}

    def open(self, path: Path) -> None:
        """Read what is there, and see that it can be written."""
        try:
            with path.open("a+", newline="", encoding="utf-8") as file:
                file.seek(0)
                self.files[path] = list(csv.DictReader(file))
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from error
        if any(column not in row for row in self.files[path] for column in SAME):
            raise InputError(f"{path} is no table of heatproof bench; name another file")

    def put(self, path: Path, rows: Sequence[Cells]) -> None:
        """Rows of one part, where its old ones stood, else at the end."""
        if path not in self.files:
            self.open(path)
        kept, keys = self.files[path], {key(row) for row in rows}
        first = next((i for i, row in enumerate(kept) if key(row) in keys), len(kept))
        kept[:] = [
            *kept[:first],
            *rows,
            *(row for row in kept[first:] if key(row) not in keys),
        ]
        columns = dict.fromkeys(name for row in kept for name in row)
        beside = path.with_name(f".{path.name}")
        try:
            with beside.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(columns), lineterminator="\n")
                writer.writeheader()
                writer.writerows({name: csv_cell(cell) for name, cell in row.items()} for row in kept)
            beside.replace(path)
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from error


def key(row: Cells) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in SAME)
