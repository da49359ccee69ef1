"""heatproof run: a study in TOML becomes a run folder; heatproof init writes such a study."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click

from heatproof.cli._console import PATH, broken_table, console, errors, new_table, say, stopped
from heatproof.errors import counted
from heatproof.studies.settings import EXPECT_ACCURACY, HEAD


@click.command("run")
@click.argument("study", type=PATH)
@click.option("--out", "-o", type=PATH, help="Run folder; runs/STUDY by default.")
@click.option("--engine", type=click.Choice(["local", "ray"]), default="local", help="What executes the run.")
@click.option("--shard", default="0/1", help="Compute only part i of n, from 0: i/n.")
@click.option("--dry-run", is_flag=True, help="Check everything, print the plan, write nothing.")
@click.option("--trust", is_flag=True, help="Allow --dry-run to run code of the study, to check it too.")
@click.option("--expect-accuracy", type=click.FloatRange(0, 1), help=EXPECT_ACCURACY)
@click.option("--fail-fast", is_flag=True, help="Stop at the first image that cannot be used.")
@click.option("--retry-broken", is_flag=True, help="Try images again that could not be used.")
@click.option(
    "--trust-mtime",
    is_flag=True,
    help="Identify images by size and time instead of content: for huge datasets.",
)
@click.pass_context
def run_command(
    ctx: click.Context, study: Path, out: Path | None, engine: str, shard: str, dry_run: bool, trust: bool,
    expect_accuracy: float | None, fail_fast: bool, retry_broken: bool, trust_mtime: bool,
) -> None:  # fmt: skip
    """Run the study in STUDY.toml, or resume it.

    Everything is checked before the work starts. After an interruption (Ctrl-C, kill, power failure) the same
    command resumes the run. Methods, metrics or checkpoints appended to their lists are added to a finished
    run; any other change of the study is refused.

    \b
    A study:
      methods = ["gradcam", "rise(masks=500)"]        # heatproof list methods
      metrics = ["insertion", "specificity"]          # heatproof list metrics
      [model]
      spec = "torchvision:resnet50"                   # or timm:NAME, hf:FOLDER, net.py:build, lite0
      checkpoints = "best.pt"                         # several, or a pattern, for a whole training
      [images]
      kind = "folder"                                 # a folder for each class; csv, imagenet, dicom, ...
      path = "pictures"

    \b
    Examples:
      heatproof run study.toml --dry-run            units, passes and time, before spending it
      heatproof run study.toml --dry-run --trust    also if the study contains code (net.py:make, pickles)
      heatproof run study.toml --out runs/first
      heatproof run study.toml --shard 0/2          on one machine, and 1/2 on another, into one folder
      heatproof run study.toml --engine ray
      heatproof run study.toml --retry-broken       after images were restored or replaced

    An image that cannot be used, or for which the output is NaN, becomes a row with the reason and the run
    continues; the exit code is then 1. Ctrl-C finishes the current unit and exits with 130.
    """
    from heatproof.run.config import read_study

    read_study(study)  # reports mistakes in the file before torch is imported, which takes seconds
    from heatproof.run.engine import estimate, outline, prepare, run_study
    from heatproof.run.plan import read_shard
    from heatproof.run.progress import Progress
    from heatproof.run.study import foreign_code, open_study
    from heatproof.verdict.judge import conclude

    def show(rows: Iterable[tuple[str, str]]) -> None:
        console.print(new_table(f"plan of {study}; nothing was written", ("what", "how much"), rows))

    part, opened = read_shard(shard), open_study(study)
    if runs := foreign_code(opened.study.model, opened.study.methods):
        say(f"this study {runs}")
    if runs and dry_run and not trust:
        show(outline(opened))
        say("model, layers and time were not checked, since its code was not run; if you trust it: --trust")
        return
    say(f"checking {study}: images, weights and metrics")
    if dry_run:
        prepared = prepare(study, out, expect_accuracy=expect_accuracy)
        for line in prepared.opened.describe():
            say(line)
        show(list(estimate(prepared, part, say)))
        return
    result = run_study(
        study, out, engine=engine, shard=part, fail_fast=fail_fast, progress=Progress(console),
        retry_broken=retry_broken, trust_mtime=trust_mtime, expect_accuracy=expect_accuracy,
    )  # fmt: skip
    folder = result.folder.path
    if result.broken:
        errors.print(broken_table(result.broken))
    if unanswered := result.unanswered:
        errors.print(
            f"{counted(unanswered, 'image')} without a prediction: the network's output is NaN or infinite",
            soft_wrap=True,
        )
    say(f"{result.done} of {result.units} units are done in {folder}")
    if result.stopped:
        stopped(ctx)
    if result.done < result.units:
        say("the rest belongs to other shards; the last one adds the group metrics")
    else:
        verdict = conclude(result.folder)
        say(f"{verdict.headline}: heatproof verdict {folder}")
        for note in verdict.notes:
            say(f"note: {note}")
        say(f"next: heatproof report {folder}")
    if result.broken or unanswered:
        ctx.exit(1)


@click.command("init")
@click.argument("folder", type=PATH)
@click.option("--out", "-o", type=PATH, default=Path("study.toml"), help="The file; never overwritten.")
@click.option("--model", "-M", default="", help="lite0, torchvision:NAME, timm:NAME, FILE.py:FACTORY, ...")
@click.option("--checkpoint", "-c", default="", help="Its weights, as seen from the file.")
@click.option("--head", default="", help=HEAD)
def init_command(folder: Path, out: Path, model: str, checkpoint: str, head: str) -> None:
    """Write a study for the images in FOLDER, to complete and run with heatproof run.

    The command detects how the images are listed (a folder for each class, a CSV file, box files, DICOM,
    arrays), the classes, and boxes or masks, and lists the metrics that these allow. Complete the marked
    entries: the network and its weights.

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
