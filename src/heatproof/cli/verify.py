"""heatproof verify: is a run folder still what was written into it?"""

from __future__ import annotations

from pathlib import Path

import click

from heatproof.cli._console import console, new_table, say
from heatproof.errors import counted

SHOWN = 20


@click.command("verify")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--repair", is_flag=True, help="Drop what is damaged, set aside what is foreign.")
@click.pass_context
def verify_command(ctx: click.Context, run: Path, repair: bool) -> None:
    """Check every file of the folder RUN against its checksum, and say whether the run is complete.

    \b
    Examples:
      heatproof verify runs/first
      heatproof verify runs/first --repair     then `heatproof run` makes again what was dropped

    The exit code is 1 where a file is damaged, missing or foreign, also where --repair took care of it, and
    where it is not known whether the run is complete.
    """
    from heatproof.store import RunFolder, verify
    from heatproof.store.folder import run_in

    path = run_in(run)
    findings = verify.inspect(path)
    if findings:
        table = new_table(
            f"{counted(len(findings), 'finding')} in {path}"
            + f"; the first {SHOWN}" * (len(findings) > SHOWN)
        )
        table.add_column("file", overflow="fold")
        table.add_column("problem", overflow="fold")
        for finding in findings[:SHOWN]:
            table.add_row(finding.path, finding.problem)
        console.print(table)
    if findings and repair:
        units = verify.repair(path, findings)
        dropped = f"dropped {counted(len(units), 'unit')}"
        say(f"{dropped}; made again by heatproof run STUDY --out {path}")
    elif findings:
        say(f"to drop them: heatproof verify {path} --repair")
    else:
        status = RunFolder.open(path).status()
        say(f"every file is what was written; {status.sentence}")
    if findings or status.state == "unknown":
        ctx.exit(1)
