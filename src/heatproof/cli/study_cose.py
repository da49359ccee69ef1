"""heatproof study cose: does a map stay when the prediction stays, and change when it changes?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from heatproof.cli._console import console, errors, new_table
from heatproof.cli._study import StudyCommand
from heatproof.cli.run import broken_table
from heatproof.errors import InputError
from heatproof.registry import explainers, split_calls


@click.command("cose", cls=StudyCommand)
@click.option("--model", "-M", help="torchvision:NAME, timm:NAME, hf:FOLDER, FILE.py:FACTORY, lite0, ...")
@click.option("--images", type=click.Path(path_type=Path), help="Where the pictures are.")
@click.option("--kind", default="folder", show_default=True, help="folder, csv, imagenet, npz, hf or dicom.")
@click.option(
    "--checkpoints",
    type=click.Path(),
    multiple=True,
    help="Weight files of one training run, or a quoted pattern; may be given several times.",
)
@click.option("--final", help="Name of the trained checkpoint; the last one by default.")
@click.option(
    "--random-init/--no-random-init", default=True, show_default=True, help="Also the untrained network."
)
@click.option("--pretrained", is_flag=True, help="The library's weights are the final model.")
@click.option(
    "--methods",
    "-m",
    default="paper",
    show_default=True,
    help='"paper" (the seven of the paper), "all", or names: "gradcam,lime(samples=200)".',
)
@click.option("--transforms", help="Some of the thirteen, comma-separated; all by default.")
@click.option(
    "--draws",
    type=click.IntRange(1, 60),
    default=6,
    show_default=True,
    help="Magnitudes per image and signed transform.",
)
@click.option("--limit", type=click.IntRange(min=1), help="At most so many pictures, classes in proportion.")
@click.option("--num-classes", type=click.IntRange(min=1), help="Of a network built by name.")
@click.option(
    "--class-names", help="Comma-separated, in the order of the model's classes (folder, imagenet)."
)
@click.option("--layer", "-l", help="Where CAMs look; found by itself by default.")
@click.option("--name", help="The model's name in tables.")
@click.option("--dataset", help="The pictures' name in tables; that of their folder by default.")
@click.option(
    "--beside",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Folder of another COSE study, to stand in the same Table 1.",
)
@click.option("--figures/--no-figures", default=True, show_default=True, help="Draw them.")
@click.option("--same-seed", is_flag=True, help="Both sides of a pair draw the same random numbers.")
@click.option("--require-correct", is_flag=True, help="Only pictures that the final model gets right.")
@click.option("--allow-pickle", is_flag=True, help="Let checkpoints run code. Only if you trust them.")
@click.option(
    "--out",
    "-o",
    type=click.Path(path_type=Path),
    default=Path("runs/cose"),
    show_default=True,
    help="Folder.",
)
@click.option("--batch-size", type=click.IntRange(min=1), help="Inputs per pass; found by itself by default.")
@click.option(
    "--unit-images",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Pictures per unit, which is what a kill can lose.",
)
@click.option("--device", help="cpu, cuda, cuda:1, ...; a GPU where there is one.")
@click.option(
    "--threads", type=click.IntRange(min=1), help="Of torch; OMP_NUM_THREADS or its own choice by default."
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Repeats the study exactly."
)
@click.pass_context
def cose_command(ctx: click.Context, **given: Any) -> None:
    """Does a map stay when the prediction stays, and change when it changes? Consistency and sensitivity.

    Each picture is turned, shifted, flipped, brightened, blurred, ... (48 versions of it) and shown to the
    final model; the picture itself is also shown to the untrained network and to every checkpoint. Where the
    prediction stayed, the map should be the same (consistency, mean SSIM); where it changed, the map should
    change (sensitivity, mean 1 - SSIM). COSE is their harmonic mean. Maps of turned and shifted pictures are
    turned and shifted back before they are compared.

    \b
    Written to the folder --out, which can be left at any moment and taken up by the same command:
      summary.md      everything below on one page
      tables/         COSE, Table 1 beside the published one, splits, SSIM to the final maps
      figures/        violins over images, curves over magnitude, SSIM against accuracy
      scores/ maps/   a row per picture, method and pair (heatproof sql OUT "from scores"), the final maps

    \b
    Examples:
      heatproof study cose --model lite0 --images photos --methods gradcam,layercam --limit 20
      heatproof study cose --model timm:vit_tiny_patch16_224 --images data/test \\
          --checkpoints 'epochs/vit*.pt' --methods all --device cuda --out runs/cose-vit
      heatproof study cose examples/cose.toml --limit 8
      heatproof study cose examples/cose.toml --beside runs/cose-vit       both models in one Table 1

    A picture or a checkpoint that cannot be used is reported and the rest goes on; the exit code is then 1.
    """
    from heatproof.run.progress import Progress
    from heatproof.studies.cose import PAPER_METHODS, CoseSettings, run

    for key in ("model", "images"):
        if given[key] is None:
            raise InputError(f"nothing says which {key}; give --{key}, or name a TOML file that does")
    out, beside = given.pop("out"), given.pop("beside")
    lists = {"paper": PAPER_METHODS, "all": explainers.names()}
    given["methods"] = tuple(lists.get(given["methods"]) or split_calls(given["methods"]))
    for key in ("transforms", "class_names"):
        given[key] = None if given[key] is None else [part.strip() for part in given[key].split(",")]
    names = given.pop("class_names")
    given["image_options"] = {} if names is None else {"class_names": names}
    if given["transforms"] is None:
        del given["transforms"]
    result = run(CoseSettings(**given), out, Progress(console), beside)
    table = new_table(f"COSE of {result.found.model} on {result.found.dataset}, {result.found.images} images")
    for heading in ("method", "consistency", "sensitivity", "COSE, %"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for method, score in sorted(result.found.scores.items(), key=lambda item: -_sortable(item[1].value)):
        table.add_row(method, f"{score.consistency:.3f}", f"{score.sensitivity:.3f}", f"{score.value:.2f}")
    console.print(table)
    for reason in dict.fromkeys(s.reason for s in result.found.scores.values() if s.reason):
        console.print(f"not defined: {reason}", soft_wrap=True)
    if result.failed:
        errors.print(broken_table([{"image": f.id, "reason": f.reason} for f in result.failed]))
    console.print(f"the page: {result.page}", soft_wrap=True)
    if result.failed or result.skipped:
        ctx.exit(1)


def _sortable(value: float) -> float:
    return value if value == value else float("-inf")
