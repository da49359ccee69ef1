"""heatproof study qr: mass of maps on the parts of codes."""

from __future__ import annotations

from typing import Any

import click

from heatproof.cli._console import console, steps
from heatproof.cli._study import StudyCommand, finish_study, terminal_table
from heatproof.run.progress import Progress
from heatproof.studies.qr.settings import FULL, QrSettings

SHOWN = ("table-2", "table-3", "table-4", "table-5", "table-6")
FULL_SIZE = click.Option(
    ["--full"], is_flag=True, help="The paper's size: ResNet-50, 224 pixels, 600 and 300 codes; a GPU."
)


@click.command("qr", cls=StudyCommand, settings=QrSettings, more={"model": FULL_SIZE})
@click.pass_context
def qr_command(ctx: click.Context, full: bool, given: dict[str, Any]) -> None:
    """Measure whether maps mark the functional parts of codes, whose position is known.

    Draws QR codes (or other codes) with exact masks and hard negatives, trains a network in three ways (ZS:
    the head; FT-Struct: the last stage too; FT-LeakMin: with a price on evidence outside the code), explains
    the test codes and scores the maps: mass on finder and timing patterns, leakage, distance, robustness,
    what happens when a part is occluded, insertion and deletion, speed; then scenes with two codes and a
    distractor, and codes one finder of which was removed, moved or swapped.

    Without options it is small and takes minutes on two cores. A network without pretrained weights first
    learns to distinguish the negatives, so that ZS does not use random features.

    \b
    Written to the folder --out; the same command resumes a stopped study:
      summary.md      answers, Tables 2 to 6, Figures 3 to 5, published values beside ours
      data/           codes, negatives and masks
      training/       every training, and weights/ with the results
      run/            rows and maps, for heatproof report and serve; subset/, depth/, ablation/ likewise
      measured/       rows of distorted and occluded codes, and times

    \b
    Examples:
      heatproof study qr
      heatproof study qr --seeds 5 --methods gradcam,layercam --no-ablation
      heatproof study qr --model lite0 --size 224 --heavy lime,rise --device cuda
      heatproof study qr --symbol datamatrix --out runs/matrix
      heatproof study qr --full --model torchvision:convnext_base --device cuda
    """
    from heatproof.studies.qr import qr_study, total_epochs

    settings = QrSettings(**(FULL if full else {}) | given)
    with steps("training", total_epochs(settings)) as bar:

        def show(name: str, state: Any) -> None:
            bar.now(f"{name}, epoch {state.epoch}, batch {state.batch} of {state.batches}")
            if (epoch := state.result) is not None:
                last = epoch.epoch == state.epochs
                text = f"{name}: loss {epoch.loss:.3f}, accuracy {epoch.accuracy:.3f}, AUC {epoch.auc:.3f}"
                bar.done(text if last else None)

        outcome = qr_study(settings, Progress(console), show)
    made = outcome.book.tables
    for name in SHOWN:
        if table := made.get(f"{name}-seeds") or made.get(name):
            console.print(terminal_table(table))
    finish_study(ctx, outcome.page, failed=False)
