"""heatproof export: the scores of a run, for other programs and for papers."""

from __future__ import annotations

from pathlib import Path

import click

from heatproof.cli._console import say
from heatproof.errors import InputError


@click.command("export")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--csv", type=click.Path(path_type=Path), help="All rows, sorted.")
@click.option("--parquet", type=click.Path(path_type=Path), help="All rows, sorted.")
@click.option("--latex", type=click.Path(path_type=Path), help="Means with their n, metrics by methods.")
def export_command(run: Path, csv: Path | None, parquet: Path | None, latex: Path | None) -> None:
    """Write the scores of the folder RUN to files.

    \b
    Examples:
      heatproof export runs/first --csv scores.csv
      heatproof export runs/first --parquet scores.parquet --latex table.tex
    """
    from heatproof.store import RunFolder

    wanted = {name: path for name, path in (("csv", csv), ("parquet", parquet), ("latex", latex)) if path}
    if not wanted:
        raise InputError("nothing to export; name a file with --csv, --parquet or --latex")
    scores = RunFolder.open(run).scores()
    for form, path in wanted.items():
        scores.export(path, form)
        say(f"wrote {path}")
