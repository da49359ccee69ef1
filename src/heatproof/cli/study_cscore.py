"""heatproof study cscore: consistency of the maps of a class over training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from heatproof.cli._console import console, steps
from heatproof.cli._study import StudyCommand, finish_study
from heatproof.errors import InputError
from heatproof.run.progress import Progress
from heatproof.studies.cscore.settings import CscoreSettings

REFERENCE = click.Option(
    ["--reference"], type=click.Path(path_type=Path),
    help="A finished run: score --checkpoints FILE beside it, on its images, with its methods.",
)  # fmt: skip


@click.command(
    "cscore", cls=StudyCommand, settings=CscoreSettings, more={"out": REFERENCE}, words="NETWORK|RUN"
)
@click.pass_context
def cscore_command(
    ctx: click.Context, words: tuple[str, ...], reference: Path | None, given: dict[str, Any]
) -> None:
    """Measure how consistent the maps of each class are, over training.

    Trains in two phases (head, then everything), stores weights at seven epochs and scores the consistency of
    the maps of correctly classified held-out images, per class. Raises an alarm if explanations fail while
    AUC looks fine: a class that is no longer recognised, blank maps, a class hidden in the mean.

    \b
    Written to the folder --out:
      summary.md      what to use, alarms, tables and figures on one page
      training/       weights of the stored epochs; a stopped training is resumed
      run/            rows and maps, for heatproof report, serve and gate
      depth-0/ ...    the sweep over layers

    Several networks (as --model takes them), or folders of finished studies, are put on one page: which one
    to use, what the second phase did to each method, AUC by a paired test. Each has a folder in --out.

    \b
    Examples:
      heatproof study cscore --images xrays --pretrained
      heatproof study cscore --images xrays/train --images xrays/test --model timm:densenet201 --device cuda
      heatproof study cscore --images xrays/test --model net.py:build --checkpoints 'weights/epoch*.pt'
      heatproof study cscore keras:DenseNet201 keras:ResNet50V2 --images xrays --pretrained
      heatproof study cscore runs/densenet runs/resnet --out runs/both
      heatproof study cscore --reference runs/cscore --checkpoints new.safetensors --out runs/new

    The last one compares new weights with a finished run and exits with 1 if they are worse.
    """
    from heatproof.studies import cscore

    settings = CscoreSettings(**_with_words(given, words))
    if reference is not None:
        if len(settings.checkpoints) != 1:
            raise InputError("--reference compares one weight file: name it with --checkpoints FILE")
        images, weights = (*settings.images, None)[0], Path(settings.checkpoints[0])
        outcome = cscore.compare(reference, weights, settings.out, images, Progress(console))
        worse = f"worse: {len(outcome.fell)} scores fell, {len(outcome.alarms)} alarms; "
        failed = bool(outcome.fell or outcome.alarms)
        before = worse if failed else "no worse; "
        return finish_study(ctx, outcome.page, failed, before, tables=outcome.book.tables.values())
    several = bool(settings.networks or settings.beside or settings.seeds)
    study = cscore.networks_study if several else cscore.cscore_study
    with steps("training", settings.last_epoch * len(settings.runs)) as bar:

        def show(name: str, state: Any) -> None:
            prefix = f"{name}, " * several
            bar.now(f"{prefix}epoch {state.epoch}, batch {state.batch} of {state.batches}")
            if (epoch := state.result) is not None:
                scores = f"loss {epoch.loss:.3f}, accuracy {epoch.accuracy:.3f}, AUC {epoch.auc:.3f}"
                bar.done(f"{prefix}epoch {epoch.epoch}, {epoch.phase}: {scores}")

        outcome = study(settings, Progress(console), show)
    tables = outcome.book.tables
    alarms = "" if several else f"{len(tables['alarms'].rows) if 'alarms' in tables else 0} alarms; "
    shown = [tables[name] for name in (("networks", "methods") if several else ("overall",))]
    return finish_study(ctx, outcome.page, outcome.broken, alarms, outcome.broken, shown)


def _with_words(given: dict[str, Any], words: tuple[str, ...]) -> dict[str, Any]:
    """Words are finished studies if such a folder exists, else networks; --model is one of them."""
    folders = [word for word in words if Path(word).is_dir()]
    named = [word for word in words if word not in folders]
    networks, beside = (*given.get("networks", ()), *named), (*given.get("beside", ()), *map(Path, folders))
    if "model" in given or (given.get("images") and not networks):
        networks = (given.get("model", CscoreSettings.model), *networks)
    if len(networks) == 1 and not beside:
        return given | {"model": networks[0], "networks": ()}
    return given | {"networks": networks, "beside": beside}
