"""Shared parts of the protocols: runs in the study's folder, means, tables as data, and the page."""

from __future__ import annotations

import csv
import io
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from string import Formatter
from typing import Any

import numpy as np
from jinja2 import Environment
from scipy.stats import rankdata

from heatproof.disk import write_whole
from heatproof.explain.api import read_methods
from heatproof.explain.baselines import is_floor
from heatproof.metrics.agreement import rank_correlation
from heatproof.metrics.results import mean_interval, percentile_interval, resample
from heatproof.models import Model
from heatproof.report.figures import save
from heatproof.report.pieces import TEMPLATES
from heatproof.report.tables import Cell, Column, Table, Value, cell_text
from heatproof.run.config import toml
from heatproof.run.engine import Result, run_study
from heatproof.run.progress import Progress


@dataclass(frozen=True)
class MarkdownReport:
    """The page of a study, and the tables and figures that were written with it.

    OUT/summary.md      the page
    OUT/tables/         each table as Markdown, CSV and LaTeX
    OUT/figures/        each figure as SVG, PDF and PNG
    """

    folder: Path
    tables: dict[str, Table] = field(default_factory=dict)
    figures: list[str] = field(default_factory=list)  # names

    @property
    def page(self) -> Path:
        return self.folder / "summary.md"


@dataclass(frozen=True)
class Outcome:
    """Results of a study; the base of each study's own."""

    book: MarkdownReport

    @property
    def page(self) -> Path:
        return self.book.page


def need_one_class(model: Model, who: str) -> None:
    """Raise an error if the network does not predict one class per image, tested on a blank image."""
    model.logits(model.preprocess.blank)
    model.head.need_one_class(who)


def some(settings: Any, *names: str) -> dict[str, Any]:
    """The named settings with their values."""
    return {name: getattr(settings, name) for name in names}


def with_floors(methods: Sequence[str], floors: Sequence[str]) -> tuple[str, ...]:
    """The methods, then the floors that are not among them."""
    names = {request.entry.name for request in read_methods(methods)}
    return (*methods, *(floor for floor in floors if floor not in names))


def run_config(
    settings: Any,
    methods: Iterable[str],
    metrics: Iterable[str],
    model: Mapping[str, Any],
    images: Mapping[str, Any],
    targets: str = "label",
    **more: Mapping[str, Any],
) -> dict[str, Any]:
    """The configuration of a run, in the form of run/config.py, without the values that are None.

    settings: of a study whose runs have seed, batch_size, device and threads.
    """
    run = some(settings, "seed", "batch_size") | {"targets": targets} | some(settings, "device", "threads")
    tables = {"run": run, "model": model, "images": images, **more}
    return {"methods": list(methods), "metrics": list(metrics)} | {
        name: {key: value for key, value in table.items() if value is not None}
        for name, table in tables.items()
    }


def study_file(folder: Path, name: str = "run") -> Path:
    """The TOML file of the run FOLDER/NAME, which `heatproof run` accepts too."""
    return folder / ("study.toml" if name == "run" else f"{name}.toml")


def named_run(folder: Path, name: str, config: Mapping[str, Any], progress: Progress | None) -> Result:
    """Do or resume the run FOLDER/NAME. Ctrl-C, which stops a run after a unit, stops the study too."""
    study = study_file(folder, name)
    write_whole({study: toml(config)})
    result = run_study(study, folder / name, progress=progress)
    if result.done < result.units:
        raise KeyboardInterrupt
    return result


def write_rows(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> Path:
    """Write a CSV file."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([header, *rows])
    write_whole({path: out.getvalue()})
    return path


def average(values: Iterable[float]) -> float:
    """The mean of the defined values; NaN without one."""
    known = [value for value in values if not math.isnan(value)]
    return fmean(known) if known else math.nan


def mean_value(values: Iterable[float], seed: int = 0) -> Value:
    """The mean of the defined values, its 95 % interval and their number."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return Value(math.nan, None, 0)
    return Value(float(np.mean(known)), mean_interval(known, seed=seed), len(known))


def rho_value(first: Sequence[float], second: Sequence[float], seed: int = 0) -> Value:
    """Spearman's rho with a bootstrap interval over the pairs that are defined."""
    pairs = np.array([p for p in zip(first, second, strict=True) if not any(map(math.isnan, p))])
    if len(pairs) < 3:
        return Value(math.nan, None, len(pairs))
    rho = rank_correlation(pairs[:, 0], pairs[:, 1]).rho
    drawn = resample(len(pairs), seed=seed)
    ranks = [rankdata(pairs[drawn, k], axis=1) for k in (0, 1)]
    centred = [r - r.mean(1, keepdims=True) for r in ranks]
    lengths = np.sqrt((centred[0] ** 2).sum(1) * (centred[1] ** 2).sum(1))
    rhos = (centred[0] * centred[1]).sum(1)[lengths > 0] / lengths[lengths > 0]
    return Value(rho, percentile_interval(rhos) if len(rhos) else None, len(pairs))


class TableFile:
    """Tables of a study as data: the file tables.toml beside its code.

        [classifier]
        title = "The classifier at every checkpoint"
        note = "The best is {best.name}."
        columns = [["checkpoint", "", "", "row.name"], ["AUC", "more", ".3f", "row.auc"], "{classes}"]

    A column is a name, or a list of name, better ("more", "less" or ""), number format and cell. The cell is
    an expression of Jinja about the `row` and the words given to `fill`; an undefined value is an empty cell.
    Without expressions, the rows hold the cells.
    Words in braces are filled into title, note and names; a column whose word is a list is repeated for each
    of its items, as are the columns of {each = "classes", columns = [...]}. `name` is the name of the files
    if it is not that of the table. `rows` and `below` are expressions of the rows, for tables of a page.
    """

    def __init__(self, package: str, **words: Any) -> None:
        """words: for every table, such as functions that its expressions call."""
        text = files(package).joinpath("tables.toml").read_text(encoding="utf-8")
        self.words = words
        self.content: dict[str, dict[str, Any]] = tomllib.loads(text)

    def fill(
        self, name: str, rows: Iterable[Any], published: Iterable[Sequence[Cell]] = (), **words: Any
    ) -> Table:
        """The table with these rows.

        Args:
            published: rows of cells below them, padded with empty ones. They are not ranked, nor are floors.
        """
        spec, words = self.content[name], self.words | words
        declared = [column for each in spec["columns"] for column in self._columns(each, words)]
        columns = tuple(column for column, _, _ in declared)
        body: list[tuple[Cell, ...]] = []
        for row in rows:
            if declared[0][1]:
                body.append(tuple(_expression(cell[0])(row=row, **of) for _, cell, of in declared))
            else:
                body.append(tuple(row))
        method = next((j for j, column in enumerate(columns) if column.name.lower() == "method"), None)
        floors = {i for i, row in enumerate(body) if method is not None and is_floor(str(row[method]))}
        below = [(*row, *[None] * (len(columns) - len(row))) for row in published]
        title, note = (spec.get(key, "").format(**words) for key in ("title", "note"))
        unranked = frozenset(floors | set(range(len(body), len(body) + len(below))))
        return Table(
            spec.get("name", name), title, columns, (*body, *below), note, spec.get("marked", True), unranked
        )

    def page(self, **words: Any) -> Callable[[str], Table | None]:
        """A function that fills the table of a name from its declared rows; None if there are none."""

        def table(name: str) -> Table | None:
            rows, below = (
                list(_expression(self.content[name].get(key, "[]"))(**self.words, **words) or ())
                for key in ("rows", "below")
            )
            return self.fill(name, rows, below, **words) if rows else None

        return table

    def _columns(
        self, declared: Any, words: Mapping[str, Any]
    ) -> Iterator[tuple[Column, list[Any], Mapping[str, Any]]]:
        """The columns of a declaration, their cells, and the words for each."""
        if isinstance(declared, str):
            declared = [declared]
        each = declared["each"] if isinstance(declared, dict) else self._repeated(declared[0], words)
        for item in words[each] if each else [None]:
            own = {**words, each: item} if each else words
            if isinstance(declared, dict):
                for column in declared["columns"]:
                    yield from self._columns(column, own)
            else:
                name, better, form, *cell = declared + ["", ".3f"][len(declared) - 1 :]
                better_way = {"more": True, "less": False, "": None}[better]
                yield Column(name.format(**own), form or ".3f", better_way), cell, own

    @staticmethod
    def _repeated(name: str, words: Mapping[str, Any]) -> str | None:
        """The word of a column's name that is a list."""
        used = (re.split(r"[.\[]", field)[0] for _, field, _, _ in Formatter().parse(name) if field)
        return next((word for word in used if isinstance(words.get(word), list)), None)


def write_page(
    out: Path, template: str, tables: TableFile | Iterable[Table | None] = (),
    figures: Mapping[str, AbstractContextManager[Any]] | None = None, **content: Any,
) -> MarkdownReport:  # fmt: skip
    """Fill a Markdown template and write it as OUT/summary.md, completely or not at all.

    In the template, table("name") and figure("name", "caption") write the files of a table or figure and
    insert it, or nothing if it is not given.

    Args:
        out: the study's folder.
        template: its path below the package, such as studies/cose/page.md.
        tables: those with declared rows, whose expressions name the same content as the template; or tables.
        figures: by name, as the functions of report/figures.py return them.
        content: what else the template names.
    """
    book, drawings = MarkdownReport(out), figures or {}
    if isinstance(tables, TableFile):
        make = tables.page(**content)
    else:
        make = {table.name: table for table in tables if table}.get

    def table(name: str) -> str:
        if (made := make(name)) is None:
            return ""
        made.write(out / "tables")
        book.tables[made.name] = made
        return made.markdown().strip()

    def figure(name: str, caption: str) -> str:
        if name not in drawings:
            return ""
        with drawings[name] as drawn:
            save(drawn, out / "figures", name)
        book.figures.append(name)
        return f"![{caption}](figures/{name}.png)\n\n*{caption}*"

    text = TEMPLATES.get_template(template).render(table=table, figure=figure, **content)
    write_whole({book.page: re.sub(r"\n{3,}", "\n\n", text.strip()) + "\n"})
    return book


TEMPLATES.filters["cell"] = cell_text


@cache
def _expression(text: str) -> Callable[..., Any]:
    return Environment().compile_expression(text)
