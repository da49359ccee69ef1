"""Commands that read a run folder: sql, export, serve and verify."""

from __future__ import annotations

import csv
import json
import sys
import threading
import webbrowser
from pathlib import Path

import click

from heatproof.cli._console import PATH, console, has_screen, new_table, say
from heatproof.errors import InputError, counted, visible

FINDINGS_SHOWN = 20


@click.command("sql")
@click.argument("run", type=PATH)
@click.argument("query")
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "csv", "json"]),
    default="table",
    help="How to print the rows.",
)
@click.option("--files", is_flag=True, help="Allow the query to read and write files of this machine.")
def sql_command(run: Path, query: str, form: str, files: bool) -> None:
    """Run a DuckDB QUERY over the table `scores` of the folder RUN.

    Columns: model, checkpoint, image, label, explained, method, metric, value, reason, unit. Rows about a
    whole class or checkpoint have image ''. A running run shows what is finished. The query works on a
    copy of the rows in memory and cannot access files without --files. Ctrl-C ends it.

    \b
    Examples:
      heatproof sql runs/first "from scores limit 5"
      heatproof sql runs/first "select metric, method, avg(value), count(*) from scores
                                where image <> '' and not isnan(value) group by all order by all"
      heatproof sql runs/first "select image, reason from scores where metric = 'image'" --format csv
    """
    from heatproof.store import RunFolder
    from heatproof.store.scores import csv_cell

    rows = RunFolder.open(run).scores().ask(query, files)
    names = list(rows[0]) if rows else []
    if form == "json":
        click.echo(json.dumps(rows, default=str))
    elif form == "csv":
        writer = csv.DictWriter(sys.stdout, names, lineterminator="\n")
        writer.writeheader()
        text = visible if sys.stdout.isatty() else str
        for row in rows:
            writer.writerow({n: csv_cell(text(v)) if isinstance(v, str) else v for n, v in row.items()})
    elif not rows:
        console.print("no row")
    else:
        numeric = [n for n in names if all(isinstance(row[n], int | float | None) for row in rows)]
        console.print(new_table("", names, ([_cell(row[n]) for n in names] for row in rows), numeric))


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


@click.command("export")
@click.argument("run", type=PATH)
@click.option("--csv", type=PATH, help="All rows, sorted.")
@click.option("--parquet", type=PATH, help="All rows, sorted.")
@click.option("--latex", type=PATH, help="Means with their n, metrics by methods.")
def export_command(run: Path, **files: Path | None) -> None:
    """Write the scores of the folder RUN to files.

    \b
    Examples:
      heatproof export runs/first --csv scores.csv
      heatproof export runs/first --parquet scores.parquet --latex table.tex
    """
    from heatproof.store import RunFolder

    wanted = {form: path for form, path in files.items() if path}
    if not wanted:
        raise InputError("nothing to export; name a file with --csv, --parquet or --latex")
    scores = RunFolder.open(run).scores()
    for form in ("csv", "parquet", "latex"):
        if path := wanted.get(form):
            scores.export(path, form)
            say(f"wrote {path}")


@click.command("serve")
@click.argument("run", type=PATH)
@click.option("--port", default=8080, type=click.IntRange(0, 65535), help="0: any.")
@click.option("--host", default="127.0.0.1", help="0.0.0.0: all, with a token.")
@click.option("--token", is_flag=True, help="Require a token on loopback too.")
@click.option(
    "--open/--no-open", "open_page", default=True, show_default=False, help="Open the page in a browser."
)
def serve_command(run: Path, port: int, host: str, token: bool, open_page: bool) -> None:
    """Show the folder RUN as a live page, also during the run; Ctrl-C ends it.

    The report with every image: filter, sort, search, compare two methods or checkpoints with a slider, and
    download what is shown. Only this machine can open it; with another --host, a token is required.

    \b
    Examples:
      heatproof serve runs/first
      heatproof serve runs/first --port 9000 --no-open
      heatproof serve runs/first --host 0.0.0.0
    """
    from heatproof.report.serve import Server

    with Server(run, host, port, token) as server:
        say(f"{server.live.path} is shown at {server.address}")
        if not server.live.state()["units"]:
            say("it has no finished unit yet; the page updates automatically")
        if server.token:
            say("this address contains the token; keep it secret")
        say("Ctrl-C ends it")
        threading.Thread(target=server.live.warm, daemon=True).start()
        if open_page and has_screen():
            threading.Thread(target=webbrowser.open, args=[server.address], daemon=True).start()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("\nended")


@click.command("verify")
@click.argument("run", type=PATH)
@click.option("--repair", is_flag=True, help="Remove damaged files and set unknown ones aside.")
@click.pass_context
def verify_command(ctx: click.Context, run: Path, repair: bool) -> None:
    """Check every file of the folder RUN against its checksum, and whether the run is complete.

    \b
    Examples:
      heatproof verify runs/first
      heatproof verify runs/first --repair     then `heatproof run` computes again what was removed

    The exit code is 1 if a file is damaged, missing or unknown, also if --repair removed it, and if it is
    unknown whether the run is complete.
    """
    from heatproof.store import RunFolder, folder
    from heatproof.store.folder import run_in

    path = run_in(run)
    findings = folder.inspect(path)
    if not findings:
        status = RunFolder.open(path).status()
        say(f"all files are intact; {status.sentence}")
        ctx.exit(1 if status.state == "unknown" else 0)
    first = f"; the first {FINDINGS_SHOWN}" * (len(findings) > FINDINGS_SHOWN)
    rows = [(finding.path, finding.problem) for finding in findings[:FINDINGS_SHOWN]]
    console.print(
        new_table(f"{counted(len(findings), 'problem')} in {path}{first}", ("file", "problem"), rows)
    )
    if repair:
        dropped = f"dropped {counted(len(folder.repair(path, findings)), 'unit')}"
        say(f"{dropped}; made again by heatproof run STUDY --out {path}")
    else:
        say(f"to drop them: heatproof verify {path} --repair")
    ctx.exit(1)
