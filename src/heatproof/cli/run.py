"""heatproof run: a study in TOML becomes a run folder; heatproof init writes such a study."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table

from heatproof.cli._console import PATH, broken_table, console, errors, new_table, say, stopped
from heatproof.errors import counted
from heatproof.studies.settings import EXPECT_ACCURACY, HEAD

STAGES_SHOWN = 25

if TYPE_CHECKING:
    from heatproof.run.profile import Profile, StageTime


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
@click.option("--profile", is_flag=True, help="Measure time by stage: a table, and a timeline for Perfetto.")
@click.pass_context
def run_command(
    ctx: click.Context, study: Path, out: Path | None, engine: str, shard: str, dry_run: bool, trust: bool,
    expect_accuracy: float | None, fail_fast: bool, retry_broken: bool, trust_mtime: bool, profile: bool,
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
      heatproof run study.toml --profile            seconds by stage; profile.trace.json for ui.perfetto.dev

    An image that cannot be used, or for which the output is NaN, becomes a row with the reason and the run
    continues; the exit code is then 1. Ctrl-C finishes the current unit and exits with 130.
    """
    if profile and dry_run:
        raise click.UsageError("--profile measures a run; leave out --dry-run")
    from heatproof.run.config import read_study

    read_study(study)  # reports mistakes in the file before torch is imported, which takes seconds
    from heatproof.run.engine import estimate, outline, prepare, run_study
    from heatproof.run.plan import read_shard
    from heatproof.run.profile import profiling
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
    with profiling() if profile else nullcontext() as profiler:
        result = run_study(
            study, out, engine=engine, shard=part, fail_fast=fail_fast, progress=Progress(console),
            retry_broken=retry_broken, trust_mtime=trust_mtime, profiler=profiler,
            expect_accuracy=expect_accuracy,
        )  # fmt: skip
    folder = result.folder.path
    if profiler:
        name = "profile" if part[1] == 1 else f"profile-{part[0]}-of-{part[1]}"
        trace = profiler.write(folder, name)
        console.print(profile_table(profiler.summary()))
        say(f"the table as {name}.csv and .json, and a timeline for ui.perfetto.dev: {trace}")
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


def profile_table(profile: Profile) -> Table:
    """Stages of the main thread, longest first, their sum, then what other threads did meanwhile."""
    busy = profile.busy
    share = "" if busy is None else f"; the GPU was busy for {busy:.0%} of it after the first unit"
    clocks = ["seconds", "device", "host", "waiting"] + ["idle"] * (busy is not None)
    numbers = ("calls", "passes", "inputs", *clocks)
    title = f"where {profile.wall:.1f} s went, on {profile.device}{share}"
    table = new_table(title, ("stage", *numbers), right=numbers)

    def add(stage: StageTime, name: str) -> None:
        counts = (f"{count:,}" if count else "" for count in (stage.calls, stage.passes, stage.inputs))
        times = (f"{time:,.2f}" if (time := getattr(stage, clock)) else "" for clock in clocks)
        table.add_row(name, *counts, *times)

    own = [stage for stage in profile.stages if not stage.beside]
    for stage in own[:STAGES_SHOWN]:
        add(stage, f"{stage.stage} {stage.what}".strip())
    if len(own) > STAGES_SHOWN:
        table.add_row(f"{len(own) - STAGES_SHOWN} more are in the file")
    table.add_section()
    add(profile.total, "all")
    table.add_section()
    for stage in profile.stages[len(own) :]:
        add(stage, f"beside: {stage.stage} {stage.what}".strip())
    return table


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
