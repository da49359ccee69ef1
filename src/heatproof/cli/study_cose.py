"""heatproof study cose: consistency and sensitivity of maps."""

from __future__ import annotations

import math
from typing import Any

import click

from heatproof.cli._console import console, new_table, say
from heatproof.cli._study import StudyCommand, finish_study
from heatproof.run.progress import Progress
from heatproof.studies.cose.settings import CoseSettings


@click.command("cose", cls=StudyCommand, settings=CoseSettings)
@click.pass_context
def cose_command(ctx: click.Context, given: dict[str, Any]) -> None:
    """Measure whether maps change if, and only if, the prediction changes (consistency and sensitivity).

    The final model explains each image in 48 versions (rotated, shifted, flipped, brightened, blurred, ...);
    the untrained network and every checkpoint explain the original. If the prediction stays, the map should
    stay (consistency, mean SSIM); if it changes, the map should change (sensitivity, mean 1 - SSIM). COSE is
    their harmonic mean. Maps of rotated and shifted images are transformed back before they are compared.

    \b
    Written to the folder --out; the same command resumes a stopped study:
      summary.md      everything below on one page
      tables/         COSE, Table 1 beside the published one, splits, SSIM to the final maps
      figures/        violins over images, curves over magnitude, SSIM against accuracy
      panels/         maps before and after a change, with the same and with another prediction
      scores/ maps/   a row per image, method and pair (heatproof sql OUT "from scores"), the final maps

    \b
    Examples:
      heatproof study cose --model lite0 --images photos --methods gradcam,layercam --limit 20
      heatproof study cose --model timm:vit_tiny_patch16_224 --images data/test \\
          --checkpoints 'epochs/vit*.pt' --methods all --device cuda --out runs/cose-vit
      heatproof study cose examples/cose.toml --limit 8
      heatproof study cose examples/cose.toml --beside runs/cose-vit       both models in one Table 1

    The paper trains its networks with these transforms and requires 75 % accuracy; the page lists which
    networks meet that (`heatproof study cscore --transforms` trains such a network). --paper uses the
    authors' settings, --similarity another comparison of maps.

    An image or a checkpoint that cannot be used is reported and skipped; the exit code is then 1.
    """
    from heatproof.studies.cose import cose_study

    result = cose_study(CoseSettings(**given), Progress(console))
    found, heads = result.results, ("method", "consistency", "sensitivity", "COSE, %")
    ranked = sorted(found.scores.items(), key=lambda item: (math.isnan(item[1].value), -item[1].value))
    rows = [(m, f"{s.consistency:.3f}", f"{s.sensitivity:.3f}", f"{s.value:.2f}") for m, s in ranked]
    title = f"COSE of {found.model} on {found.dataset}, {found.images} images"
    console.print(new_table(title, heads, rows, right=heads[1:]))
    for reason in dict.fromkeys(score.reason for score in found.scores.values() if score.reason):
        say(f"not defined: {reason}")
    broken = [{"image": f.id, "reason": f.reason} for f in result.failed]
    finish_study(ctx, result.page, result.failed or result.skipped, broken=broken)
