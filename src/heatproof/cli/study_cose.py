"""heatproof study cose: consistency and sensitivity of maps."""

from __future__ import annotations

import math
from typing import Any

import click

from heatproof.cli._console import broken_table, console, errors, new_table, say
from heatproof.cli._study import StudyCommand, finish_study
from heatproof.run.progress import Progress
from heatproof.studies.cose.settings import CoseSettings


@click.command("cose", cls=StudyCommand, settings=CoseSettings)
@click.pass_context
def cose_command(ctx: click.Context, given: dict[str, Any]) -> None:
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
      panels/         maps before and after a change that kept the answer, and one that did not
      scores/ maps/   a row per picture, method and pair (heatproof sql OUT "from scores"), the final maps

    \b
    Examples:
      heatproof study cose --model lite0 --images photos --methods gradcam,layercam --limit 20
      heatproof study cose --model timm:vit_tiny_patch16_224 --images data/test \\
          --checkpoints 'epochs/vit*.pt' --methods all --device cuda --out runs/cose-vit
      heatproof study cose examples/cose.toml --limit 8
      heatproof study cose examples/cose.toml --beside runs/cose-vit       both models in one Table 1

    The paper trains its networks with these transforms and asks for 75 % accuracy; the page says which
    networks meet that (`heatproof study cscore --transforms` trains one so). --paper takes the authors' own
    settings where the paper leaves a choice, --similarity another way to compare maps.

    A picture or a checkpoint that cannot be used is reported and the rest goes on; the exit code is then 1.
    """
    from heatproof.studies.cose import cose_study

    result = cose_study(CoseSettings(**given), Progress(console))
    table = new_table(
        f"COSE of {result.results.model} on {result.results.dataset}, {result.results.images} images"
    )
    for heading in ("method", "consistency", "sensitivity", "COSE, %"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    ranked = sorted(
        result.results.scores.items(), key=lambda item: (math.isnan(item[1].value), -item[1].value)
    )
    for method, score in ranked:
        table.add_row(method, f"{score.consistency:.3f}", f"{score.sensitivity:.3f}", f"{score.value:.2f}")
    console.print(table)
    for reason in dict.fromkeys(s.reason for s in result.results.scores.values() if s.reason):
        say(f"not defined: {reason}")
    if result.failed:
        errors.print(broken_table([{"image": f.id, "reason": f.reason} for f in result.failed]))
    finish_study(ctx, result.page, failed=result.failed or result.skipped)
