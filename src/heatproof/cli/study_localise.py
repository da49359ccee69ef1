"""heatproof study localise: localisation and faithfulness under a pixel budget."""

from __future__ import annotations

from typing import Any

import click

from heatproof.cli._console import broken_table, console, errors, new_table
from heatproof.cli._study import StudyCommand, finish_study, terminal_table
from heatproof.run.progress import Progress
from heatproof.studies.localise.settings import LocaliseSettings

MAX_ASIDE = 10


@click.command("localise", cls=StudyCommand, settings=LocaliseSettings)
@click.pass_context
def localise_command(ctx: click.Context, given: dict[str, Any]) -> None:
    """Measure whether maps mark the object and what the model used, on images with boxes.

    Every method may mark the same share of pixels (--budget), so that a coarse heatmap and a map of segments
    can be compared. Maps are scored against the box (mask IoU, box IoU, share inside, pointing game) and
    against the model (insertion, deletion), for each class and as means over classes with 95 % intervals.
    Three control maps (random, edges, centre) are always included.

    Images are filtered as in the thesis behind the protocol: one object, one box of 10 to 80 % of the image;
    --exclude leaves out ambiguous labels. An image that cannot be used is reported and skipped; the exit code
    is then 1.

    Also on the page: how many pixels suffice (where insertion and deletion cross), how scattered maps are
    against the network's confidence, what the flagged images of a class share; optionally tables by group of
    classes (--groups), the same images with other seeds (--repeats), LIME by number of segments
    (--segment-counts).

    \b
    Written to the folder --out:
      summary.md      everything below on one page
      tables/         each table as Markdown, CSV and LaTeX
      figures/        scores against the budget, insertion and deletion curves
      panels/         case studies, and confused images explained for both classes
      run/            rows and maps; a stopped study is resumed

    \b
    Examples:
      heatproof study localise --model lite0 --images imagenet --limit 40
      heatproof study localise examples/localise.toml --device cuda
      heatproof study localise --model lite0 --images imagenet --groups imagenet --exclude ambiguous \\
          --repeats 5 --segment-counts 30,100,200,300
      heatproof study localise --model torchvision:resnet18 --checkpoint best.pt --images imagenet \\
          --methods "gradcam,lime,gradcam++,rise" --preprocess thesis --layer last_conv

    An imagenet folder holds images/ and boxes.csv (file, class_index, x0, y0, x1, y1; a row per box) or XML
    box files. In FILE.toml the keys are the names of these options, with _ for -.
    """
    from heatproof.studies.localise import localise_study

    outcome = localise_study(LocaliseSettings(**given), Progress(console))
    if outcome.sifted.aside:
        table = new_table(f"{len(outcome.sifted.aside)} images were set aside")
        table.add_column("image", overflow="fold")
        table.add_column("reason", overflow="fold")
        for image in outcome.sifted.aside[:MAX_ASIDE]:
            table.add_row(*image)
        errors.print(table)
    if outcome.run.broken:
        errors.print(broken_table(outcome.run.broken))
    for name in ("localisation", "faithfulness"):
        console.print(terminal_table(outcome.book.tables[name]))
    failed = outcome.sifted.aside or outcome.run.broken
    finish_study(ctx, outcome.page, failed, before=f"{len(outcome.panels)} panels; ")
