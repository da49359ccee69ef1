"""heatproof score: metrics of stored maps, and a verdict where control maps are stored beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from heatproof.cli._console import console, errors, new_table, say, stopped
from heatproof.cli._study import PlacedCommand
from heatproof.run.progress import Progress
from heatproof.studies.audit.settings import ScoreSettings

if TYPE_CHECKING:
    from heatproof.studies.audit.protocol import AuditPlan


@click.command("score", cls=PlacedCommand, settings=ScoreSettings)
@click.pass_context
def score_command(ctx: click.Context, given: dict[str, Any]) -> None:
    """Score maps that you have already: how good are they for MODEL on IMAGES?

    The maps may come from any package or program. A folder holds one file for each picture, named after it
    (cat/001.png: cat/001.npy); a pattern such as maps/{id}.npy says how they are named; one .npy file holds
    all, in the order of the pictures, one .npz or .safetensors file `values` with `ids`. PNG files are grey.
    A map has any size, and covers what the network sees, after its crop.

    Every metric that needs no new map is computed, beside floors that never look at the network; the others
    are listed with the reason. The verdict also needs the same program's maps of three networks with random
    weights, in the folders maps-random/0, maps-random/1 and maps-random/2 beside the folder maps.

    \b
    Written to the folder --out, which can be left at any moment and taken up by the same command:
      report.html     the page: the verdict, pictures, scores
      study.toml      what was computed, to repeat or extend it with heatproof run
      run/            scores, maps and verdict.json, for every command that reads a run

    \b
    Examples:
      heatproof score lite0 pictures --maps maps
      heatproof score net.py:make pictures --checkpoint best.pt --maps "maps/{id}.npy"
      heatproof score client.py:predict pictures --maps maps.npz --targets predicted --out runs/served

    The exit code is 1 where pictures could not be used, 130 where it was stopped.
    """
    from heatproof.images.kinds import guess_source
    from heatproof.run.files import check_network

    settings = ScoreSettings(**given)
    guess_source(settings.images)  # before torch is imported, which takes its time
    check_network(settings.model, settings.checkpoint)
    from heatproof.studies.audit.protocol import run_audit
    from heatproof.studies.audit.score import FLOORS, means, plan_score

    plan = plan_score(settings, say)
    for note in plan.notes:
        say(f"note: {note}")
    outcome = run_audit(settings.audit, plan, Progress(console))
    if outcome.result.broken:
        from heatproof.cli.run import broken_table

        errors.print(broken_table(outcome.result.broken))
    if outcome.verdict is None or outcome.page is None:
        stopped(ctx)
    shown = (settings.method, FLOORS[0])
    _show(plan, shown, means(outcome.folder, shown))
    say(outcome.verdict.headline, style="bold")
    say(outcome.verdict.sentence)
    say(f"the page: {outcome.page}; to repeat or extend it: heatproof run {plan.study}")
    if outcome.result.broken or outcome.result.unanswered:
        ctx.exit(1)


def _show(plan: AuditPlan, methods: tuple[str, ...], found: dict[str, dict[str, tuple[float, int]]]) -> None:
    """Means over pictures beside those of noise, then what was not computed and why."""
    table = new_table("means over pictures (n)")
    table.add_column("metric", overflow="fold")
    for method in methods:
        table.add_column(method, justify="right", overflow="fold")
    for metric, of in found.items():
        if methods[0] in of:
            shown = (f"{of[m][0]:.4f} ({of[m][1]})" if m in of else "" for m in methods)
            table.add_row(metric, *shown)
    console.print(table)
    if left := plan.reasons(False):
        table = new_table("not computed")
        table.add_column("metrics", overflow="fold")
        table.add_column("because", overflow="fold")
        for why, names in left.items():
            table.add_row(", ".join(names), why)
        console.print(table)
