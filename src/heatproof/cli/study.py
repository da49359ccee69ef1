"""heatproof study and heatproof contrast; the help of a command is the file help.txt of its study."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from heatproof.cli._console import PATH, broken_table, console, errors, new_table, say, steps
from heatproof.cli._study import PlacedCommand, StudyCommand, finish_study, study_help, terminal_table
from heatproof.errors import InputError
from heatproof.run.progress import Progress
from heatproof.studies.settings import (
    QR_FULL,
    ContrastSettings,
    CoseSettings,
    CscoreSettings,
    LocaliseSettings,
    QrSettings,
)  # fmt: skip

MAX_ASIDE = 10
PRINTED = ("table-2", "table-3", "table-4", "table-5", "table-6")
FULL_SIZE = click.Option(
    ["--full"], is_flag=True, help="The paper's size: ResNet-50, 224 pixels, 600 and 300 codes; a GPU."
)
REFERENCE = click.Option(
    ["--reference"], type=PATH,
    help="A finished run: score --checkpoints FILE beside it, on its images, with its methods.",
)  # fmt: skip


@contextmanager
def training_progress(epochs: int, last_only: bool = False) -> Iterator[Callable[[str, Any], None]]:
    """A bar for all trainings of a study; the callback takes a training's name and state.

    last_only: print only the last epoch of each training.
    """
    with steps("training", epochs) as bar:

        def show(name: str, state: Any) -> None:
            bar.now(f"{name}, epoch {state.epoch}, batch {state.batch} of {state.batches}")
            if (epoch := state.result) is not None:
                scores = f"loss {epoch.loss:.3f}, accuracy {epoch.accuracy:.3f}, AUC {epoch.auc:.3f}"
                text = f"{name}, epoch {epoch.epoch}, {epoch.phase}: {scores}"
                bar.done(None if last_only and epoch.epoch < state.epochs else text)

        yield show


@click.command("contrast", cls=StudyCommand, settings=ContrastSettings)
@click.pass_context
def contrast_command(ctx: click.Context, given: dict[str, Any]) -> None:
    """Run the contrast test with settings in a file; see `heatproof contrast --help`.

    \b
    Examples:
      heatproof study contrast examples/contrast.toml
      heatproof study contrast --model net.py:make --images pictures --strength 1,0.5
    """
    _run_contrast(ctx, given)


@click.command("contrast", cls=PlacedCommand, settings=ContrastSettings, help=study_help("contrast"))
@click.pass_context
def placed_contrast_command(ctx: click.Context, given: dict[str, Any]) -> None:
    """Which heatmaps show planted evidence."""
    _run_contrast(ctx, given)


def _run_contrast(ctx: click.Context, given: dict[str, Any]) -> None:
    settings = ContrastSettings(**given)  # before torch is imported
    from heatproof.studies.contrast.protocol import contrast_study

    with steps("training", 2 * len(settings.strength)) as bar:
        trained: list[tuple[float, str]] = []

        def training_done(strength: float, which: str) -> None:
            bar.done(f"{which} with the token in {strength:.0%} of the positives")

        def on_progress(strength: float, which: str, state: Any) -> None:
            if which not in ("A", "B"):
                return bar.inputs(state)
            if (strength, which) not in trained:
                if trained:
                    training_done(*trained[-1])
                trained.append((strength, which))
            return bar.now(f"{which}, {strength:.0%}, epoch {state.epoch} of at most {state.epochs}")

        outcome = contrast_study(settings, on_progress, say)
        if trained:
            training_done(*trained[-1])
    for failure in outcome.result.failures[:10]:
        errors.print(f"not used: {failure.id}: {failure.reason}", soft_wrap=True)
    for point in outcome.result.points:
        say(f"{point.strength:.0%}: {point.planting.sentence}")
    if outcome.table.rows:
        console.print(terminal_table(outcome.table))
    finish_study(ctx, outcome.page, failed=not outcome.table.rows)


@click.command("cose", cls=StudyCommand, settings=CoseSettings, help=study_help("cose"))
@click.pass_context
def cose_command(ctx: click.Context, given: dict[str, Any]) -> None:
    """Consistency and sensitivity of maps."""
    from heatproof.studies.cose.protocol import cose_study

    result = cose_study(CoseSettings(**given), Progress(console))
    console.print(terminal_table(result.book.tables["cose"]))
    for reason in dict.fromkeys(score.reason for score in result.results.scores.values() if score.reason):
        say(f"not defined: {reason}")
    broken = [{"image": f.id, "reason": f.reason} for f in result.failed]
    finish_study(ctx, result.page, result.failed or result.skipped, broken=broken)


@click.command("localise", cls=StudyCommand, settings=LocaliseSettings, help=study_help("localise"))
@click.pass_context
def localise_command(ctx: click.Context, given: dict[str, Any]) -> None:
    """Localisation and faithfulness under a pixel budget."""
    from heatproof.studies.localise.protocol import localise_study

    outcome = localise_study(LocaliseSettings(**given), Progress(console))
    if aside := outcome.sifted.aside:
        errors.print(new_table(f"{len(aside)} images were set aside", ("image", "reason"), aside[:MAX_ASIDE]))
    if outcome.run.broken:
        errors.print(broken_table(outcome.run.broken))
    for name in ("localisation", "faithfulness"):
        console.print(terminal_table(outcome.book.tables[name]))
    finish_study(ctx, outcome.page, aside or outcome.run.broken, before=f"{len(outcome.panels)} panels; ")


@click.command("qr", cls=StudyCommand, settings=QrSettings, more={"model": FULL_SIZE}, help=study_help("qr"))
@click.pass_context
def qr_command(ctx: click.Context, full: bool, given: dict[str, Any]) -> None:
    """Mass of maps on the parts of codes."""
    from heatproof.studies.qr.protocol import qr_study
    from heatproof.studies.qr.trainings import total_epochs

    settings = QrSettings(**(QR_FULL if full else {}) | given)
    with training_progress(total_epochs(settings), last_only=True) as show:
        outcome = qr_study(settings, Progress(console), show)
    made = outcome.book.tables
    for name in PRINTED:
        if table := made.get(f"{name}-seeds") or made.get(name):
            console.print(terminal_table(table))
    finish_study(ctx, outcome.page, failed=False)


@click.command(
    "cscore", cls=StudyCommand, settings=CscoreSettings, more={"out": REFERENCE}, words="NETWORK|RUN",
    help=study_help("cscore"),
)  # fmt: skip
@click.pass_context
def cscore_command(
    ctx: click.Context, words: tuple[str, ...], reference: Path | None, given: dict[str, Any]
) -> None:
    """Consistency of the maps of a class over training."""
    from heatproof.studies.cscore import protocol

    settings = CscoreSettings(**_with_words(given, words))
    if reference is not None:
        if len(settings.checkpoints) != 1:
            raise InputError("--reference compares one weight file: name it with --checkpoints FILE")
        images, weights = next(iter(settings.images), None), Path(settings.checkpoints[0])
        outcome = protocol.compare(reference, weights, settings.out, images, Progress(console))
        worse = f"worse: {len(outcome.fell)} scores fell, {len(outcome.alarms)} alarms; "
        failed = bool(outcome.fell or outcome.alarms)
        before = worse if failed else "no worse; "
        return finish_study(ctx, outcome.page, failed, before, tables=outcome.book.tables.values())
    several = bool(settings.networks or settings.beside or settings.seeds)
    study = protocol.networks_study if several else protocol.cscore_study
    with training_progress(settings.last_epoch * len(settings.runs)) as show:
        outcome = study(settings, Progress(console), show)
    tables = outcome.book.tables
    alarms = "" if several else f"{len(tables['alarms'].rows) if 'alarms' in tables else 0} alarms; "
    printed = [tables[name] for name in (("networks", "methods") if several else ("overall",))]
    return finish_study(ctx, outcome.page, outcome.broken, alarms, outcome.broken, printed)


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
