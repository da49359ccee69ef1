"""Scores as Parquet parts, one per finished unit, read together with DuckDB; predictions among them.

A part holds the rows of its unit in the order given; equal rows give equal bytes. Values are float64,
bit for bit, except that every NaN is stored as the same NaN. Parts are never changed or merged.
"""

from __future__ import annotations

import atexit
import errno
import glob
import hashlib
import importlib
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from heatproof.disk import output_path, valid_unicode, write_whole
from heatproof.errors import InputError, MissingExtraError, StoreError, UnknownNameError, did_you_mean
from heatproof.images.findings import THRESHOLD, entry_id, finding_limits, finding_name
from heatproof.rows import Score

if TYPE_CHECKING:
    from heatproof.store.folder import RunFolder
    from heatproof.store.manifest import Manifest

COLUMNS = {
    "model": "VARCHAR", "checkpoint": "VARCHAR", "image": "VARCHAR", "label": "BIGINT", "explained": "BIGINT",
    "method": "VARCHAR", "metric": "VARCHAR", "value": "DOUBLE", "reason": "VARCHAR", "unit": "VARCHAR",
}  # fmt: skip
FIRST = "first"  # an anchor: the first checkpoint of a run or of a monitored training
FORMATS = ("csv", "parquet", "latex")

# DuckDB must not download an extension because a query names an unknown function.
CONFIG = {"autoinstall_known_extensions": "false"}
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # beginnings of text that a spreadsheet would compute

_databases: dict[int, Any] = {}  # one per process: a database does not survive a fork


class Scores:
    """All finished rows of a run, as the table `scores`.

    Columns: model, checkpoint, image, label, explained, method, metric, value, reason, unit. Rows about a
    whole class or checkpoint have image ''. Each query sees the parts that exist when it starts. A query that
    names `status` finds there one row about the run as a whole.
    """

    def __init__(
        self, folder: Path, parts: Callable[[], Sequence[Path]], status: Callable[[], Mapping[str, Any]]
    ) -> None:
        self.folder, self._parts, self._status = folder, parts, status

    def sql(self, query: str, parameters: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """The rows of a query as dicts; each `?` in the query is replaced by the next parameter."""
        with _clear_query_failure():
            cursor = self._with_status(self._cursor(), query).execute(query, list(parameters))
            return _rows(cursor)

    def ask(self, query: str, files: bool = False) -> list[dict[str, Any]]:
        """As `sql`, for a query from outside; Ctrl-C ends it.

        The rows are copied to a separate database without access to files, unless `files` is set.
        """
        connection = _duckdb().connect(config=CONFIG)

        def work() -> list[dict[str, Any]]:
            self._with_status(self._cursor(connection, "view" if files else "table"), query)
            if not files:
                connection.execute("set enable_external_access = false")
                connection.execute("set lock_configuration = true")
            return _rows(connection.execute(query))

        with _clear_query_failure(), closing(connection), ThreadPoolExecutor(1) as pool:
            answer = pool.submit(work)
            try:  # DuckDB ignores signals, so it works in a thread while this one waits for Ctrl-C
                return answer.result()
            except BaseException:
                connection.interrupt()
                raise

    def columns(self, query: str = "from scores", parameters: Sequence[Any] = ()) -> dict[str, np.ndarray]:
        """The result of a query as one array per column; columns with NULLs are masked arrays."""
        with _clear_query_failure():
            columns: dict[str, np.ndarray] = self._cursor().execute(query, list(parameters)).fetchnumpy()
            return columns

    def digest(self) -> str:
        """A hash of all rows without their units: equal for equal rows in any order and any parts."""
        rows = self.sql("select * exclude (unit) from scores order by all")
        return hashlib.sha256(ascii(rows).encode()).hexdigest()  # which writes each value in exactly one way

    def export(self, path: str | Path, format: str) -> None:
        """All rows, sorted, as csv or parquet; as latex, means with their n for each metric and method."""
        if format not in FORMATS:
            raise InputError(f"cannot export as {format!r}; {did_you_mean(format, FORMATS)}")
        path = output_path(path)
        if format == "latex":
            write_whole({path: "\n".join(self._latex())})
            return
        query, options = "from scores order by all", f"format {format}"
        if format == "csv":  # as csv_cell does it
            texts = (name for name, kind in COLUMNS.items() if kind == "VARCHAR")
            begins = ", ".join(f"chr({ord(letter)})" for letter in FORMULA)
            safe = (f"if({name}[1] in ({begins}), chr(39) || {name}, {name}) as {name}" for name in texts)
            query, options = f"select * replace ({', '.join(safe)}) from ({query})", "format csv, header"
        write_whole({path: partial(_copy, self._cursor(), query, options=options)})

    def _latex(self) -> Iterator[str]:
        """One table per model and checkpoint: metrics down, methods across, in each cell mean (n)."""
        rows = self.sql(
            """select model, checkpoint, method,
                      case when image <> '' then metric
                           when label is not null then metric || ' (class)'
                           else metric || ' (checkpoint)' end as quantity,
                      avg(value order by value) filter (not isnan(value)) as mean,
                      count(*) filter (not isnan(value)) as n, count(*) as total
               from scores group by all order by all"""
        )
        tables: dict[tuple[str, str], dict[tuple[str, str], str]] = defaultdict(dict)
        for row in rows:
            mean = "--" if row["mean"] is None else f"{row['mean']:.4g}"
            n = str(row["n"]) if row["n"] == row["total"] else f"{row['n']}/{row['total']}"
            tables[row["model"], row["checkpoint"]][row["quantity"], row["method"]] = f"{mean} ({n})"
        yield "% needs \\usepackage{booktabs}; each cell: mean (n), or mean (defined/all)"
        for (model, checkpoint), cells in tables.items():
            methods = sorted({method for _, method in cells})
            yield f"\n% {_one_line(model)}, {_one_line(checkpoint)}"
            yield f"\\begin{{tabular}}{{l{'r' * len(methods)}}}\n\\toprule"
            yield " & ".join(["metric", *map(latex_text, methods)]) + " \\\\\n\\midrule"
            for quantity in sorted({quantity for quantity, _ in cells}):
                values = [cells.get((quantity, method), "") for method in methods]
                yield " & ".join([latex_text(quantity), *values]) + " \\\\"
            yield "\\bottomrule\n\\end{tabular}"
        yield ""

    def _cursor(self, own: Any = None, kind: str = "view") -> Any:
        """A cursor on the shared or a private database, with the view `scores` over the current parts."""
        cursor = own or _database().cursor()
        if parts := self._parts():
            files = ", ".join(_literal(glob.escape(str(part))) for part in parts)
            source = f"select {', '.join(COLUMNS)} from read_parquet([{files}])"
        else:
            empty = ", ".join(f"null::{kind} as {name}" for name, kind in COLUMNS.items())
            source = f"select {empty} where false"
        try:
            cursor.execute(f"create or replace temp {kind} scores as {source}")
        except _duckdb().Error as error:
            raise StoreError(f"cannot read {self.folder}: {str(error).splitlines()[0]}") from error
        return cursor

    def _with_status(self, cursor: Any, query: str) -> Any:
        if re.search(r"\bstatus\b", query):
            kinds = {str: "VARCHAR", float: "DOUBLE", int: "INTEGER"}
            row = {name: f"{_literal(str(v))}::{kinds[type(v)]}" for name, v in self._status().items()}
            values = ", ".join(f"{value} as {name}" for name, value in row.items())
            cursor.execute(f"create or replace temp view status as select {values}")
        return cursor


def csv_cell(value: Any) -> Any:
    """A cell of a CSV file; text that a spreadsheet would evaluate as a formula is quoted.

    >>> csv_cell("=1+1.png"), csv_cell("cat.png"), csv_cell(-0.5)
    ("'=1+1.png", 'cat.png', -0.5)
    """
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def _rows(cursor: Any) -> list[dict[str, Any]]:
    if cursor is None:  # of no statement
        raise InputError("the query is empty; write one, such as: from scores limit 5")
    names = [column[0] for column in cursor.description or ()]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


@contextmanager
def _clear_query_failure() -> Iterator[None]:
    try:
        yield
    except _duckdb().Error as error:
        why = " ".join(str(error).split("\n\nLINE")[0].split())
        raise InputError(f"the query failed: {why}; scores has the columns {', '.join(COLUMNS)}") from error


def write_part(path: Path, scores: Sequence[Score], unit: str) -> None:
    """Write the rows of a unit as one Parquet file under the path itself, which must be a temporary name."""
    rows: dict[str, np.ndarray] = {}
    typed = {name: f"{name}::{kind}" for name, kind in COLUMNS.items()} | {"unit": _literal(unit)}
    for name in Score.__dataclass_fields__:
        values = list(map(attrgetter(name), scores))
        if COLUMNS[name] == "VARCHAR":
            texts = {value: valid_unicode(value) for value in set(values)}  # few, over and over
            rows[name] = np.array([texts[value] for value in values], dtype=object)
        elif COLUMNS[name] == "BIGINT":
            # DuckDB 1 ignores the mask of a masked array, so missing values have a column of their own.
            rows[f"no_{name}"] = np.array([value is None for value in values], dtype=bool)
            rows[name] = np.array([0 if value is None else int(value) for value in values], dtype=np.int64)
            typed[name] = f"(case when no_{name} then null else {name} end)::BIGINT"
        else:  # DuckDB reads NaN in an array as NULL; a value is never NULL, so that is undone without loss
            rows[name] = np.array(values, dtype=np.float64)
            typed[name] = f"coalesce({name}::DOUBLE, 'nan')"
    cursor = _database().cursor()
    cursor.register("rows", rows)
    query = f"select {', '.join(f'{value} as {name}' for name, value in typed.items())} from rows"
    _copy(cursor, query, path, "format parquet, compression zstd")


def _copy(cursor: Any, query: str, path: Path, options: str) -> None:
    try:
        cursor.execute(f"copy ({query}) to {_literal(str(path))} ({options})")
    except _duckdb().Error as error:
        known = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG)
        code = next((code for code in known if os.strerror(code) in str(error)), errno.EIO)
        why = " ".join(str(error).split()) if code == errno.EIO else os.strerror(code)
        raise OSError(code, why) from error


def _database() -> Any:
    process = os.getpid()
    if process not in _databases:
        _databases.setdefault(process, _duckdb().connect(config=CONFIG))
        atexit.register(_databases.clear)  # DuckDB prints about connections that are open at the exit
    return _databases[process]


def _duckdb() -> Any:
    try:
        return importlib.import_module("duckdb")
    except ImportError as error:
        raise MissingExtraError(
            "duckdb, which writes and reads the scores, is not installed or broken; run: pip install duckdb"
        ) from error


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _one_line(text: str) -> str:
    return " ".join(text.split())


_LATEX = str.maketrans(
    {letter: f"\\{letter}" for letter in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
)


def latex_text(text: str) -> str:
    return _one_line(text).translate(_LATEX)


@dataclass(frozen=True)
class StoredPredictions:
    """Predictions of the images that could be read, in the source's order; no label is -1."""

    ids: tuple[str, ...]
    labels: np.ndarray  # "b"; multi-label: "b k" bool
    probabilities: np.ndarray  # "b k"; zero where a class's probability was not kept
    complete: bool  # every class's was
    findings: tuple[str, ...] = ()  # multi-label: names of the labels
    limits: tuple[float, ...] | None = None  # multi-label: threshold of each label

    @cached_property
    def places(self) -> dict[str, int]:
        """Index of each map's image, by the map's id, in the source's order."""
        if self.limits is None:
            return {name: i for i, name in enumerate(self.ids)}
        named = [[valid_unicode(entry_id(name, finding)) for finding in self.findings] for name in self.ids]
        return {name: i for i, names in enumerate(named) for name in names}


def read_predictions(
    folder: RunFolder, checkpoint: str, ids: Sequence[str] | None = None, model: str | None = None
) -> StoredPredictions:
    """Read the predictions of a checkpoint.

    ids: all images as the store writes them, in the order of the result; default: by name.
    """
    rows = folder.scores().columns(
        "select image, coalesce(label, -1) as label, explained, value from scores "
        "where checkpoint = ? and model = coalesce(?, model) and metric = 'probability' and not isnan(value)",
        [valid_unicode(checkpoint), model],
    )
    seen = set(rows["image"])
    known = tuple(sorted(seen) if ids is None else (name for name in ids if name in seen))
    place = {name: i for i, name in enumerate(known)}
    at = np.array([place[name] for name in rows["image"]], dtype=np.int64)
    classes, labels = (rows[name].astype(np.int64) for name in ("explained", "label"))
    table = np.zeros((len(known), max(2, classes.max(initial=-1) + 1)))
    table[at, classes] = rows["value"].astype(np.float64)
    complete = len(classes) == table.size
    if folder.manifest.is_multilabel:
        truth = np.zeros(table.shape, dtype=bool)
        truth[at, classes] = labels == classes
        names = tuple(finding_name(folder.manifest.classes, c) for c in range(table.shape[1]))
        limits = stored_limits(folder.manifest, len(names))
        return StoredPredictions(known, truth, table, complete, names, limits)
    own = np.full(len(known), -1)
    own[at] = labels
    return StoredPredictions(known, own, table, complete)


def anchor_of(name: str, checkpoints: Sequence[str]) -> str:
    """The checkpoint that an anchor name refers to."""
    if name != FIRST and name not in checkpoints:
        raise UnknownNameError("checkpoint to anchor gold lists to", name, [FIRST, *checkpoints])
    return checkpoints[0] if name == FIRST else name


def anchor_probabilities(
    folder: RunFolder, anchor: str, ids: Sequence[str], model: str | None = None
) -> np.ndarray:
    """Array "b k": probabilities of these images at an anchor; zeros for images that could not be read."""
    stored = read_predictions(folder, anchor_of(anchor, list(folder.manifest.models)), ids, model)
    place = {name: i for i, name in enumerate(ids)}
    probabilities = np.zeros((len(ids), stored.probabilities.shape[1]))
    probabilities[[place[name] for name in stored.ids]] = stored.probabilities
    return probabilities


def stored_limits(manifest: Manifest, findings: int) -> tuple[float, ...]:
    """The threshold of each label."""
    limits = manifest.config.get("model", {}).get("thresholds")
    return finding_limits(THRESHOLD if limits is None else limits, findings)
