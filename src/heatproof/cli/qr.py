"""heatproof qr: images of codes with exact masks of their parts."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np
from PIL import Image

from heatproof.cli._console import PATH, Steps, console, say, steps
from heatproof.errors import InputError
from heatproof.images.codes import QRSet, check_folder, make_qr, write_codes
from heatproof.images.distort import DISTORTIONS, check_distortion, distort
from heatproof.images.symbols import SYMBOLS
from heatproof.report.panels import Tile, sheet

PREVIEW = "preview.png"
LINE_EVERY = 200  # images per line without a terminal
TINTS = {"box": (60, 120, 255), "finder": (255, 40, 40), "timing": (0, 170, 60)}
STUDY = """
methods = ["gradcam", "layercam"]
metrics = ["structure", "localise"]
[model]
spec = "YOUR MODEL"        # label 1 is a code, 0 is none
[images]
kind = "csv"
path = "{path}"
classes = ["1"]            # only codes have parts to score"""


@click.group("qr")
def qr_command() -> None:
    """Generate images of QR codes and other codes, with exact masks of their parts.

    \b
    Examples:
      heatproof qr make codes
      heatproof qr make matrices --symbol datamatrix --photos holiday/
    """


@qr_command.command("make")
@click.argument("out", type=PATH)
@click.option("--positives", type=click.IntRange(min=0), default=600, help="Number of images with a code.")
@click.option("--negatives", type=click.IntRange(min=0), default=600, help="Number of images without a code.")
@click.option("--size", type=int, default=224, help="Pixels along a side.")
@click.option("--seed", type=int, default=0, help="Seed of all random numbers.")
@click.option("--symbol", default="qr", help=f"One of {', '.join(sorted(SYMBOLS))}.")
@click.option("--versions", help="Sizes of the code, such as 1-6 or 2,5,10; default: those of the symbol.")
@click.option("--photos", type=PATH, help="A folder of photographs for backgrounds.")
@click.option("--distortion", help=f"One of {', '.join(DISTORTIONS)}.")
@click.option("--severity", type=float, help="Severity of the distortion, from 0 to 1.  [default: 0.5]")
@click.option("--overwrite", is_flag=True, help="Replace an older set in the same folder.")
def make_command(
    out: Path, positives: int, negatives: int, size: int, seed: int, symbol: str, versions: str | None,
    photos: Path | None, distortion: str | None, severity: float | None, overwrite: bool,
) -> None:  # fmt: skip
    """Write images of codes and of hard negatives, their masks and a manifest into the folder OUT.

    \b
    Examples:
      heatproof qr make codes
      heatproof qr make rotated --distortion rotation --severity 0.5 --positives 300 --negatives 300 --seed 1
      heatproof qr make matrices --symbol datamatrix --photos holiday/
    """
    if positives + negatives == 0:
        raise InputError("there is nothing to generate; set --positives or --negatives above 0")
    if distortion is None and severity is not None:
        raise InputError("--severity needs a distortion; name it with --distortion")
    strength = 0.5 if severity is None else severity
    if distortion is not None:
        check_distortion(distortion, strength)
    check_folder(out, overwrite)
    count = positives + negatives
    with steps("drawing", count) as progress:
        data = make_qr(
            positives, negatives, size, seed, symbol=symbol,
            versions=parse_versions(versions), photos=photos, progress=counter(progress, "drawn"),
        )  # fmt: skip
    if distortion is not None:
        pictures, masks = distort(data.pictures, distortion, strength, seed, data.masks)
        data = data._replace(pictures=pictures, masks=masks or {})
    with steps("writing", count) as progress:
        manifest = write_codes(data, out, counter(progress, "written"), overwrite)
    preview(data).save(out / PREVIEW)
    what = f", {distortion} {strength:g}" if distortion else ""
    console.print(f"{positives} codes ({symbol}) and {negatives} negatives, {size}x{size}, seed {seed}{what}")
    for name, path in (("manifest", manifest), ("preview", out / PREVIEW)):
        say(f"{name}: {path}")
    study = STUDY.format(path=manifest.as_posix())
    console.print("a study that scores maps on their parts:", study, soft_wrap=True)


def parse_versions(text: str | None) -> list[int] | None:
    """Parse versions and ranges of versions.

    >>> parse_versions("1-3,7")
    [1, 2, 3, 7]
    """
    if text is None:
        return None
    versions: set[int] = set()
    for piece in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,3})\s*(?:-\s*(\d{1,3})\s*)?", piece)
        if not match:
            raise InputError(f"cannot read the versions {text!r}; write them like 1-6 or 2,5,10")
        versions |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return sorted(versions)


def counter(progress: Steps, what: str) -> Callable[[int], None]:
    """Advance the bar; without a terminal, print a line now and then."""

    def made(count: int) -> None:
        after = progress.finished + count
        line = after == progress.total or after // LINE_EVERY > progress.finished // LINE_EVERY
        progress.done(what if line else None, count)

    return made


def preview(data: QRSet, columns: int = 6) -> Image.Image:
    """Some codes, the same with their parts tinted, and negatives of every kind."""

    def tile(i: int) -> Tile:
        code, drawn = data.spots[i].code, f"{data.spots[i].scale} px per module"
        about = f"version {code.version}{code.level}, {drawn}" if code else drawn
        return Tile(Image.fromarray(data.pictures[i]), str(data.kinds[i]), about)

    def tinted(i: int) -> Tile:
        image = data.pictures[i].astype(float)
        for part, colour in TINTS.items():
            inside = data.masks[part][i]
            image[inside] = (data.pictures[i][inside] + np.array(colour)) / 2
        return Tile(Image.fromarray(image.round().astype(np.uint8)), "finder red, timing green, box blue")

    codes, others = (np.flatnonzero(data.labels == label)[:columns] for label in (1, 0))
    rows = ([tile(i) for i in codes], [tinted(i) for i in codes], [tile(i) for i in others])
    return sheet([row for row in rows if row], heading=f"{len(data.labels)} images")
