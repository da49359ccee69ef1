"""heatproof study qr: on codes, where the truth is known, do maps land on the parts that matter?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from heatproof.cli._console import console, steps, stopped
from heatproof.cli._study import StudyCommand, shown
from heatproof.registry import explainers, split_calls

SHOWN = ("table-2", "table-3", "table-4", "table-5", "table-6")


@click.command("qr", cls=StudyCommand)
@click.option(
    "--full", is_flag=True, help="The paper's size: ResNet-50, 224 pixels, 600 and 300 codes; a GPU."
)
@click.option("--model", "-M", help="small, lite0, torchvision:NAME, timm:NAME, FILE.py:FACTORY.  [small]")
@click.option("--pretrained", is_flag=True, help="Begin with the library's own weights; else a proxy task.")
@click.option("--symbol", help="What is drawn: qr, datamatrix, aztec, barcode.  [qr]")
@click.option("--photos", type=click.Path(path_type=Path), help="A folder of photographs for backgrounds.")
@click.option("--size", type=int, help="Pixels along a side.  [64]")
@click.option("--width", type=int, help="Channels of the small network's first stage.  [8]")
@click.option("--train", type=int, help="Codes to train on, and as many negatives.  [200]")
@click.option("--test", type=int, help="Codes to test on, and as many negatives.  [100]")
@click.option("--proxy", type=int, help="Pictures of the proxy task; 0: take the backbone as it is.  [900]")
@click.option("--proxy-epochs", type=int, help="Of the proxy task.  [10]")
@click.option("--proxy-lr", type=float, help="Learning rate of the proxy task.  [0.003]")
@click.option("--head-epochs", type=int, help="Of ZS.  [10]")
@click.option("--head-lr", type=float, help="Learning rate of ZS.  [0.01]")
@click.option("--epochs", type=int, help="Of every other training.  [8]")
@click.option("--lr", type=float, help="Learning rate of every other training.  [0.001]")
@click.option("--schedule", help="cosine or constant.  [cosine]")
@click.option("--train-batch", type=int, help="Pictures per step of training.  [32]")
@click.option("--lam", type=float, help="FT-LeakMin's price of leakage, lambda.  [0.25]")
@click.option("--alpha", type=float, help="FT-LeakMin's reward of mass inside the code.  [0.25]")
@click.option("--methods", "-m", help='Scored on every code: "gradcam,layercam".  [the CAMs]')
@click.option("--heavy", help='Scored on the subset only: "lime,rise(masks=500)"; all: all others.  [none]')
@click.option("--subset", type=int, help="Codes for insertion, deletion and --heavy.  [24]")
@click.option("--robust", type=int, help="Codes that are distorted.  [32]")
@click.option("--causal", type=int, help="Codes whose parts are occluded.  [100]")
@click.option("--depth-study/--no-depth-study", default=None, help="Table 5 and Figure 4.  [on]")
@click.option("--ablation/--no-ablation", default=None, help="Table 6.  [on]")
@click.option("--figures/--no-figures", default=None, help="Draw them.  [on]")
@click.option("--layer", "-l", help="Where CAMs look; found by itself by default.")
@click.option("--batch-size", type=int, help="Codes per unit of a run.  [50]")
@click.option("--device", help="cpu, cuda, cuda:1, ...; a GPU where there is one.")
@click.option(
    "--threads", type=click.IntRange(min=1), help="Of torch; OMP_NUM_THREADS or one per CPU by default."
)
@click.option(
    "--amp/--no-amp", default=None, help="Train in bfloat16 where it is safe.  [off; on with --full]"
)
@click.option("--seed", type=int, help="Everything follows from it.  [0]")
@click.option("--seeds", type=int, help="Repeat all behind the data so often, for intervals over seeds.  [1]")
@click.option(
    "--out",
    "-o",
    type=click.Path(path_type=Path),
    default=Path("runs/qr"),
    show_default=True,
    help="Folder.",
)
@click.pass_context
def qr_command(ctx: click.Context, full: bool, **given: Any) -> None:
    """On codes, whose parts are known, do maps land on what makes a code one, and stay off the rest?

    Draws QR codes (or other codes) with exact masks and hard negatives, trains a network in three ways (ZS:
    the head; FT-Struct: the last stage too; FT-LeakMin: with a price on evidence outside the code), explains
    the test codes and scores the maps: mass on finder and timing patterns, leakage, distance, robustness,
    what happens when a part is occluded, insertion and deletion, speed.

    Without options it is small and takes minutes on two cores. A network without weights of its own first
    learns to tell the negatives apart, so that ZS does not read random features; the page says so.

    \b
    Written to the folder --out, which can be left at any moment and taken up by the same command:
      summary.md      answers, Tables 2 to 6, Figures 4 and 5, published values beside ours
      data/           codes, negatives and masks
      training/       every training, and weights/ with what came of it
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
    from heatproof.run.progress import Progress  # needs msgspec
    from heatproof.studies.qr import FULL, QrSettings, qr_study, total_epochs

    chosen = {key: value for key, value in given.items() if value is not None and value != ""}
    for key in ("methods", "heavy"):
        if key in chosen:
            chosen[key] = tuple(split_calls(chosen[key]))
    settings = QrSettings(**(FULL if full else {}) | chosen)
    if settings.heavy == ("all",):
        asked = {name.partition("(")[0] for name in settings.every_method}
        rest = tuple(name for name in explainers.names() if name not in asked)
        settings = QrSettings(**(FULL if full else {}) | chosen | {"heavy": rest})
    with steps("training", total_epochs(settings)) as bar:

        def told(name: str, state: Any) -> None:
            bar.now(f"{name}, epoch {state.epoch}, batch {state.batch} of {state.batches}")
            if (one := state.result) is not None:
                last = one.epoch == state.epochs
                text = f"{name}: loss {one.loss:.3f}, accuracy {one.accuracy:.3f}, AUC {one.auc:.3f}"
                bar.done(text if last else None)

        outcome = qr_study(settings, Progress(console), told)
    if outcome.page is None:
        stopped(ctx)
    assert outcome.book is not None
    made = outcome.book.tables
    for name in SHOWN:
        if table := made.get(f"{name}-seeds") or made.get(name):
            console.print(shown(table))
    console.print(f"the page: {outcome.page}", soft_wrap=True)
