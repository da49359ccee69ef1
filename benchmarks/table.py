"""The CSV files of the benchmarks: a part that is measured again replaces its old rows, others stay."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path

from heatproof.disk import write_whole
from heatproof.errors import InputError
from heatproof.store.scores import csv_cell

SAME = ("section", "part", "device")  # rows alike in these are of one measurement
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
        if any(column not in row for row in self.files[path] for column in (*SAME, "quick")):
            raise InputError(f"{path} is no table of python -m benchmarks; name another file")

    def put(self, path: Path, rows: Sequence[Cells]) -> None:
        """Rows of one part, where its old ones stood, else at the end; quick ones replace quick ones only."""
        if path not in self.files:
            self.open(path)
        again = {(*key(row), quick) for row in rows for quick in {"True", str(row["quick"])}}
        stored = self.files[path]
        old = [(*key(row), str(row["quick"])) in again for row in stored]
        first = old.index(True) if any(old) else len(stored)
        stays = [row for row, gone in zip(stored, old, strict=True) if not gone]
        new = [{name: csv_cell(cell) for name, cell in row.items()} for row in rows]
        stored[:] = [*stays[:first], *new, *stays[first:]]
        text = StringIO()
        columns = dict.fromkeys(name for row in stored for name in row)
        writer = csv.DictWriter(text, list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(stored)
        write_whole({path: text.getvalue()})


def key(row: Cells) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in SAME)
