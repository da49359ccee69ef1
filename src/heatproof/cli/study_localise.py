"""heatproof study localise: does the map point at the object, and at what the model used?"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from heatproof.cli._console import console, errors, new_table, stopped
from heatproof.cli._study import StudyCommand, shown
from heatproof.cli.run import broken_table
from heatproof.errors import InputError
from heatproof.registry import split_calls

SHOWN = 10


@click.command("localise", cls=StudyCommand)
@click.option("--model", "-M", help="lite0, torchvision:NAME, timm:NAME, hf:FOLDER, FILE.py:FACTORY, ...")
@click.option("--checkpoint", type=click.Path(path_type=Path), help="Weights: safetensors or torch.")
@click.option("--images", type=click.Path(path_type=Path), help="Folder or CSV file of pictures with boxes.")
@click.option(
    "--kind",
    type=click.Choice(["imagenet", "csv"]),
    default="imagenet",
    show_default=True,
    help="How the pictures are listed.",
)
@click.option(
    "--class-names", default="", help="Comma-separated, in the order of the model's classes; else its own."
)
@click.option(
    "--methods",
    "-m",
    default="gradcam,lime",
    show_default=True,
    help='Comma-separated, options in brackets: "gradcam,lime(samples=200)".',
)
@click.option("--budget", type=float, default=0.2, show_default=True, help="Share of pixels a map may mark.")
@click.option(
    "--target",
    type=click.Choice(["label", "predicted"]),
    default="label",
    show_default=True,
    help="Class to explain: the true or the predicted one.",
)
@click.option(
    "--preprocess",
    type=click.Choice(["own", "thesis"]),
    default="own",
    show_default=True,
    help="The model's own, or resize 256 and crop 224 with its normalisation.",
)
@click.option(
    "--box-share",
    type=float,
    nargs=2,
    default=(0.1, 0.8),
    show_default=True,
    help="Least and most of the picture that its box covers.",
)
@click.option("--limit", type=click.IntRange(min=1), help="At most so many pictures, classes in proportion.")
@click.option(
    "--panels",
    type=click.IntRange(min=0),
    default=12,
    show_default=True,
    help="Case studies to draw, and as many confused pictures.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=100,
    show_default=True,
    help="Steps of insertion and deletion.",
)
@click.option(
    "--baseline",
    type=click.Choice(["blur", "black", "mean", "noise"]),
    default="blur",
    show_default=True,
    help="What deleted pixels become.",
)
@click.option("--layer", "-l", help="Where CAMs look; found by itself by default.")
@click.option("--low-insertion", type=float, default=0.3, show_default=True, help="Flag: unfaithful below.")
@click.option(
    "--high-insertion", type=float, default=0.6, show_default=True, help="Flag: faithful from here."
)
@click.option(
    "--off-object",
    type=float,
    default=0.5,
    show_default=True,
    help="Flag: off-object below this share of what fits into the box.",
)
@click.option("--confident", type=float, default=0.5, show_default=True, help="Flag: confident above.")
@click.option(
    "--rise", type=float, default=0.1, show_default=True, help="Flag: a deletion curve that rises so."
)
@click.option("--overlap", type=float, help="Flag: methods disagree up to here; the budget by default.")
@click.option(
    "--out",
    "-o",
    type=click.Path(path_type=Path),
    default=Path("runs/localise"),
    show_default=True,
    help="Folder.",
)
@click.option(
    "--batch-size", type=click.IntRange(min=1), default=16, show_default=True, help="Pictures per unit."
)
@click.option("--device", help="cpu, cuda, cuda:1, ...; a GPU where there is one.")
@click.option(
    "--threads", type=click.IntRange(min=1), help="Of torch; OMP_NUM_THREADS or one per CPU by default."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Repeats the run exactly.")
@click.pass_context
def localise_command(ctx: click.Context, **given: Any) -> None:
    """Do maps point at the object, and at what the model used? The budget protocol on pictures with boxes.

    Every method may mark the same share of pixels (--budget), so that a coarse heatmap and a map of segments
    can be compared. Maps are scored against the box (mask IoU, box IoU, share inside, pointing game) and
    against the model (insertion, deletion), for each class and as means over classes with 95 % intervals.
    Three maps that know nothing of the model (random, edges, centre) always stand beside the others.

    Pictures are filtered as in the thesis behind the protocol: one object, one box, 10 to 80 % of them.
    One that cannot be used is reported, and the others go on; the exit code is then 1.

    \b
    Written to the folder --out:
      summary.md      everything below on one page
      tables/         each table as Markdown, CSV and LaTeX
      figures/        scores against the budget, insertion and deletion curves
      panels/         case studies, and confused pictures explained for both classes
      run/            rows and maps; a killed study goes on where it stopped

    \b
    Examples:
      heatproof study localise --model lite0 --images imagenet --limit 40
      heatproof study localise examples/localise.toml --device cuda
      heatproof study localise --model torchvision:resnet18 --checkpoint best.pt --images imagenet \\
          --methods "gradcam,lime,gradcam++,rise" --preprocess thesis

    An imagenet folder holds images/ and boxes.csv (file, class_index, x0, y0, x1, y1; a row per box) or XML
    box files. In FILE.toml the keys are the names of these options, with _ for -.
    """
    from heatproof.run.progress import Progress  # needs msgspec
    from heatproof.studies._flags import Thresholds
    from heatproof.studies.localise import LocaliseSettings, localise_study

    for name in ("model", "images"):
        if given[name] is None:
            raise InputError(f"--{name} is missing; name it on the command line or in FILE.toml")
    limits = Thresholds(**{field.name: given.pop(field.name) for field in fields(Thresholds)})
    given["methods"] = tuple(split_calls(given["methods"]))
    given["class_names"] = tuple(name.strip() for name in given["class_names"].split(",") if name.strip())
    settings = LocaliseSettings(**given, thresholds=limits)
    outcome = localise_study(settings, Progress(console))
    if outcome.sifted.aside:
        table = new_table(f"{len(outcome.sifted.aside)} pictures were set aside")
        table.add_column("image", overflow="fold")
        table.add_column("reason", overflow="fold")
        for one in outcome.sifted.aside[:SHOWN]:
            table.add_row(*one)
        errors.print(table)
    if outcome.run.broken:
        errors.print(broken_table(outcome.run.broken))
    if outcome.page is None:
        stopped(ctx)
    assert outcome.book is not None
    for name in ("localisation", "faithfulness"):
        console.print(shown(outcome.book.tables[name]))
    console.print(f"{len(outcome.panels)} panels; the page: {outcome.page}", soft_wrap=True)
    if outcome.sifted.aside or outcome.run.broken:
        ctx.exit(1)
