"""heatproof study cscore: does the model look at the same place for every image of a class?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from heatproof.cli._console import console, errors, steps
from heatproof.cli._study import StudyCommand, shown, tell
from heatproof.cli.run import broken_table
from heatproof.errors import InputError
from heatproof.run.progress import Progress
from heatproof.studies.cscore.settings import CscoreSettings

REFERENCE = click.Option(
    ["--reference"], type=click.Path(path_type=Path),
    help="A finished run: score --checkpoints FILE beside it, on its pictures, with its methods.",
)  # fmt: skip


@click.command("cscore", cls=StudyCommand, settings=CscoreSettings, more={"out": REFERENCE})
@click.pass_context
def cscore_command(ctx: click.Context, reference: Path | None, given: dict[str, Any]) -> None:
    """Does the model look at the same place for every image of a class, and since when?

    Trains in two phases (head, then everything), keeps weights at seven epochs and scores how alike the maps
    of correctly classified held-out pictures are, per class. Raises an alarm where explanations fail while
    AUC says that all is well: a class that is no longer recognised, blank maps, a class hidden in the mean.

    \b
    Written to the folder --out:
      summary.md      what to use, alarms, tables and figures on one page
      training/       weights of the kept epochs; a killed training goes on
      run/            rows and maps, for heatproof report, serve and gate
      depth-0/ ...    the sweep over layers

    \b
    Examples:
      heatproof study cscore --images xrays --pretrained
      heatproof study cscore --images xrays/train --images xrays/test --model timm:densenet201 --device cuda
      heatproof study cscore --images xrays/test --model net.py:build --checkpoints 'weights/epoch*.pt'
      heatproof study cscore --reference runs/cscore --checkpoints new.safetensors --out runs/new

    The last one compares new weights with a finished run and exits with 1 where they are worse.
    """
    settings = CscoreSettings(**given)
    if reference is not None:
        _compare(ctx, reference, settings)
        return
    from heatproof.studies.cscore import cscore_study

    with steps("training", settings.last_epoch) as bar:

        def told(state: Any) -> None:
            bar.now(f"epoch {state.epoch}, batch {state.batch} of {state.batches}")
            if (one := state.result) is not None:
                scores = f"loss {one.loss:.3f}, accuracy {one.accuracy:.3f}, AUC {one.auc:.3f}"
                bar.done(f"epoch {one.epoch}, {one.phase}: {scores}")

        outcome = cscore_study(settings, Progress(console), told)
    if outcome.run.broken:
        errors.print(broken_table(outcome.run.broken))
    tables = outcome.book.tables
    console.print(shown(tables["overall"]))
    alarms = len(tables["alarms"].rows) if "alarms" in tables else 0
    tell(ctx, outcome.page, failed=outcome.run.broken, before=f"{alarms} alarms; ")


def _compare(ctx: click.Context, reference: Path, settings: CscoreSettings) -> None:
    if len(settings.checkpoints) != 1:
        raise InputError("--reference compares one weight file: name it with --checkpoints FILE")
    from heatproof.studies.cscore import compare

    images = settings.images[0] if settings.images else None
    weights = Path(settings.checkpoints[0])
    found = compare(reference, weights, settings.out, None, images, Progress(console))
    for table in found.book.tables.values():
        console.print(shown(table))
    worse = f"worse: {len(found.fell)} scores fell, {len(found.alarms)} alarms; "
    tell(ctx, found.page, failed=found.worse, before=worse if found.worse else "no worse; ")
