"""heatproof init: a commented study for a folder of pictures."""

from __future__ import annotations

from pathlib import Path

import click

from heatproof.cli._console import PATH, say
from heatproof.studies.settings import HEAD


@click.command("init")
@click.argument("folder", type=PATH)
@click.option("--out", "-o", type=PATH, default=Path("study.toml"), help="The file; never overwritten.")
@click.option("--model", "-M", default="", help="lite0, torchvision:NAME, timm:NAME, FILE.py:FACTORY, ...")
@click.option("--checkpoint", "-c", default="", help="Its weights, as seen from the file.")
@click.option("--head", default="", help=HEAD)
def init_command(folder: Path, out: Path, model: str, checkpoint: str, head: str) -> None:
    """Write a study for the pictures in FOLDER, to fill in and give to heatproof run.

    It sees how the pictures are listed (a folder for each class, a CSV file, box files, DICOM, arrays), how
    many classes there are and whether boxes or masks say where to look, and names the metrics that
    these allow. What only you know, the network and its weights, is marked to be filled in.

    \b
    Examples:
      heatproof init pictures
      heatproof init pictures --model timm:resnet18 --checkpoint best.pt --out first.toml
    """
    from heatproof.studies.audit.starter import write_starter

    path, seen = write_starter(folder, out, model, checkpoint, head)
    for line in seen:
        say(line)
    todo = "" if model else "fill in the lines marked <-, then "
    say(f"wrote {path}; {todo}heatproof run {path} --dry-run")
