"""heatproof verify: is a run folder still what was written into it?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from heatproof.cli._console import console, new_table, say
from heatproof.errors import counted

if TYPE_CHECKING:
    from heatproof.store import RunFolder

SHOWN = 20


@click.command("verify")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--repair", is_flag=True, help="Drop what is damaged, set aside what is foreign.")
@click.option(
    "--upgrade", is_flag=True, help="Seal a folder of heatproof 0.1, which has no checksums, as it is."
)
@click.pass_context
def verify_command(ctx: click.Context, run: Path, repair: bool, upgrade: bool) -> None:
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
    if upgrade:
        _upgrade(RunFolder.open(path))
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
        folder = RunFolder.open(path)
        status = folder.status()
        sealed = "every file is what was written" if folder.manifest.format > 1 else (
            "made by heatproof 0.1, without checksums; --upgrade adds them"
        )  # fmt: skip
        say(f"{sealed}; {status.sentence}")
    if findings or status.state == "unknown":
        ctx.exit(1)


def _upgrade(folder: RunFolder) -> None:
    """The units of an old run follow from its settings and from how many images its rows name."""
    from heatproof.run.plan import make_plan
    from heatproof.store.verify import upgrade

    if folder.manifest.format > 1:
        return
    (row,) = folder.scores().sql(
        "select count(distinct image) as n from scores where metric in ('predicted', 'image') and image <> ''"
    )
    plan = make_plan(folder.manifest, row["n"])
    folder = upgrade(folder, plan.units)
    folder.plan([unit.hash for unit in plan.units], row["n"], plan.checkpoints())
    say(f"{len(folder.done())} units of {folder.path} have checksums now")
