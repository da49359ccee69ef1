"""heatproof study cscore: does the model look at the same place for every image of a class?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from heatproof.cli._console import console, errors, steps, stopped
from heatproof.cli._study import StudyCommand, shown
from heatproof.cli.run import broken_table
from heatproof.errors import InputError
from heatproof.registry import split_calls


@click.command("cscore", cls=StudyCommand)
@click.option(
    "--images",
    "-i",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Folder with a folder per class; may be repeated, then all are pooled.",
)
@click.option(
    "--kind",
    type=click.Choice(["folder", "csv"]),
    default="folder",
    show_default=True,
    help="How the pictures are listed.",
)
@click.option(
    "--model",
    "-M",
    default="lite0",
    show_default=True,
    help="lite0, torchvision:NAME, timm:NAME, keras:NAME, FILE.py:FACTORY, ...",
)
@click.option(
    "--checkpoints",
    "-c",
    multiple=True,
    help="Weights that exist, or a pattern; then nothing is trained. May be repeated.",
)
@click.option("--pretrained", is_flag=True, help="Begin with the library's own weights.")
@click.option("--methods", "-m", help="Comma-separated; the paper's six by default.")
@click.option("--held-out", type=float, default=0.2, show_default=True, help="Share that is not trained on.")
@click.option("--head-epochs", type=click.IntRange(min=0), default=20, show_default=True, help="Of phase 1.")
@click.option("--full-epochs", type=click.IntRange(min=0), default=10, show_default=True, help="Of phase 2.")
@click.option("--head-lr", type=float, default=1e-4, show_default=True, help="Learning rate of phase 1.")
@click.option("--full-lr", type=float, default=1e-5, show_default=True, help="Learning rate of phase 2.")
@click.option("--label-smoothing", type=float, default=0.1, show_default=True, help="In phase 2.")
@click.option("--clip", type=float, default=1.0, show_default=True, help="Gradient norm in phase 2.")
@click.option(
    "--train-batch",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    help="Pictures per step of training.",
)
@click.option(
    "--first-phase",
    type=click.Choice(["head", "all"]),
    default="head",
    show_default=True,
    help="What phase 1 trains: all, where the backbone has no weights worth freezing.",
)
@click.option("--class-weights", is_flag=True, help="Weigh classes by their inverse frequency.")
@click.option("--keep", default="1,5,10,15,20,25,30", show_default=True, help="Epochs that are scored.")
@click.option("--layer", "-l", help="Where CAMs look; found by itself by default.")
@click.option("--sweep/--no-sweep", default=True, show_default=True, help="C-Score at every depth, too.")
@click.option("--limit", type=click.IntRange(min=1), help="At most so many pictures, classes in proportion.")
@click.option(
    "--reference",
    type=click.Path(path_type=Path),
    help="A finished run: score --checkpoints FILE beside it, on its pictures, with its methods.",
)
@click.option(
    "--out",
    "-o",
    type=click.Path(path_type=Path),
    default=Path("runs/cscore"),
    show_default=True,
    help="Folder.",
)
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    help="Pictures per unit of the run.",
)
@click.option("--device", help="cpu, cuda, cuda:1, ...; a GPU where there is one.")
@click.option(
    "--threads", type=click.IntRange(min=1), help="Of torch; OMP_NUM_THREADS or one per CPU by default."
)
@click.option("--amp", is_flag=True, help="Train in bfloat16 where it is safe.")
@click.option("--seed", type=int, default=0, show_default=True, help="Repeats the study exactly.")
@click.pass_context
def cscore_command(ctx: click.Context, **given: Any) -> None:
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
    if given["reference"] is not None:
        _reference(ctx, given)
        return
    from heatproof.run.progress import Progress  # needs msgspec
    from heatproof.studies.cscore import METHODS, CscoreSettings, cscore_study

    given.pop("reference")
    given["methods"] = tuple(split_calls(given["methods"])) if given["methods"] else METHODS
    given["keep"] = _epochs(given["keep"])
    settings = CscoreSettings(**given)
    with steps("training", settings.head_epochs + settings.full_epochs) as bar:

        def told(state: Any) -> None:
            bar.now(f"epoch {state.epoch}, batch {state.batch} of {state.batches}")
            if (one := state.result) is not None:
                scores = f"loss {one.loss:.3f}, accuracy {one.accuracy:.3f}, AUC {one.auc:.3f}"
                bar.done(f"epoch {one.epoch}, {one.phase}: {scores}")

        outcome = cscore_study(settings, Progress(console), told)
    if outcome.run.broken:
        errors.print(broken_table(outcome.run.broken))
    if outcome.page is None:
        stopped(ctx)
    assert outcome.book is not None
    console.print(shown(outcome.book.tables["overall"]))
    alarms = len(outcome.book.tables["alarms"].rows) if "alarms" in outcome.book.tables else 0
    console.print(f"{alarms} alarms; the page: {outcome.page}", soft_wrap=True)
    if outcome.run.broken:
        ctx.exit(1)


def _reference(ctx: click.Context, given: dict[str, Any]) -> None:
    from heatproof.run.progress import Progress
    from heatproof.studies._cscore_reference import compare

    if len(given["checkpoints"]) != 1:
        raise InputError("--reference compares one weight file: name it with --checkpoints FILE")
    images = given["images"][0] if given["images"] else None
    (weights,) = given["checkpoints"]
    found = compare(given["reference"], Path(weights), given["out"], None, images, Progress(console))
    if found.page is None:
        stopped(ctx)
    assert found.book is not None
    for table in found.book.tables.values():
        console.print(shown(table))
    verdict = (
        f"worse: {len(found.fell)} scores fell, {len(found.alarms)} alarms" if found.worse else "no worse"
    )
    console.print(f"{verdict}; the page: {found.page}", soft_wrap=True)
    if found.worse:
        ctx.exit(1)


def _epochs(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in str(text).split(","))
    except ValueError:
        raise InputError(f"--keep is a list of epochs such as 1,5,10; got {text!r}") from None
