"""heatproof report: one HTML file that says whether the maps of a run can be trusted."""

from __future__ import annotations

from pathlib import Path

import click

from heatproof.cli._console import console


@click.command("report")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--out", "-o", type=click.Path(path_type=Path), help="The file; RUN/report.html by default.")
@click.option("--model", help="Which model, where the run holds several.")
@click.option("--checkpoint", help="Which checkpoint; the last by default.")
@click.option(
    "--gallery", default=48, show_default=True, type=click.IntRange(min=0), help="Pictures to embed, at most."
)
@click.option(
    "--jet", is_flag=True, help="Also offer the jet colour map, which shows steps that are not there."
)
def report_command(
    run: Path, out: Path | None, model: str | None, checkpoint: str | None, gallery: int, jet: bool
) -> None:
    """Write what the folder RUN shows as one self-contained HTML file, with a verdict at the top.

    The file opens from disk, asks the network for nothing and prints to PDF.

    \b
    Examples:
      heatproof report runs/first
      heatproof report runs/first --out audit.html --gallery 24
      heatproof report runs/first --checkpoint epoch05
    """
    from heatproof.store import RunFolder

    folder = RunFolder.open(run)  # before torch is imported, which takes its time
    from heatproof.report.page import write_page
    from heatproof.verdict.data import read_run  # needs duckdb and msgspec
    from heatproof.verdict.judge import keep

    path = out or folder.path / "report.html"
    data = read_run(folder, model, checkpoint)
    verdict = write_page(data, path, most=gallery, jet=jet)
    for line in filter(None, (str(verdict), folder.status().sentence, keep(data, verdict), f"wrote {path}")):
        console.print(line, soft_wrap=True)
