"""heatproof sql: ask a run folder anything."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from heatproof.cli._console import console, new_table
from heatproof.errors import visible


@click.command("sql")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("query")
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "csv", "json"]),
    default="table",
    show_default=True,
    help="How to print the rows.",
)
@click.option("--files", is_flag=True, help="Let the query read and write files, also of this machine.")
def sql_command(run: Path, query: str, form: str, files: bool) -> None:
    """Run a DuckDB QUERY over the table `scores` of the folder RUN.

    Columns: model, checkpoint, image, label, explained, method, metric, value, reason, unit. Rows about a
    whole class or checkpoint have image ''. A run that is still going shows what is finished. The query works
    on a copy of the rows in memory and can reach no file, unless --files lets it. Ctrl-C ends it.

    \b
    Examples:
      heatproof sql runs/first "from scores limit 5"
      heatproof sql runs/first "select metric, method, avg(value), count(*) from scores
                                where image <> '' and not isnan(value) group by all order by all"
      heatproof sql runs/first "select image, reason from scores where metric = 'image'" --format csv
    """
    from heatproof.store import RunFolder

    rows = RunFolder.open(run).scores().ask(query, files)
    names = list(rows[0]) if rows else []
    if form == "json":
        click.echo(json.dumps(rows, default=str))
    elif form == "csv":
        writer = csv.DictWriter(sys.stdout, names, lineterminator="\n")
        writer.writeheader()
        shown = visible if sys.stdout.isatty() else str
        for row in rows:
            writer.writerow({name: _cell(value, shown) for name, value in row.items()})
    elif not rows:
        console.print("no row")
    else:
        table = new_table("")
        for name in names:
            numeric = all(isinstance(row[name], int | float | None) for row in rows)
            table.add_column(name, justify="right" if numeric else "left", overflow="fold")
        for row in rows:
            table.add_row(*(cell(row[name]) for name in names))
        console.print(table)


def _cell(value: Any, shown: Callable[[str], str]) -> Any:
    from heatproof.store.scores import csv_cell

    return csv_cell(shown(value)) if isinstance(value, str) else value


def cell(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
