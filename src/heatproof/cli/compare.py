"""heatproof compare: runs side by side, on the terminal and as a page."""

from __future__ import annotations

import json
import math
from pathlib import Path

import click

from heatproof.cli._console import PATH, console, new_table, say


@click.command("compare")
@click.argument("runs", nargs=-1, required=True, metavar="RUN RUN...")
@click.option("--out", "-o", type=PATH, default=Path("compare.html"), help="The page.")
@click.option("--pictures", default=12, type=click.IntRange(min=0), help="Whose maps changed most, to show.")
@click.option("--all", "everything", is_flag=True, help="Also print numbers that did not surely change.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON; write no page.")
def compare_command(runs: tuple[str, ...], out: Path, pictures: int, everything: bool, as_json: bool) -> None:
    """Put runs side by side: what became better or worse, and which maps changed most.

    Each RUN is a folder, perhaps with a checkpoint or a method behind @; the first is what the others are
    held against. Networks, checkpoints of one training, and methods of one network can be compared so.
    Where the pictures are the same they are compared one by one, else as two samples, with 95 % intervals.

    \b
    Examples:
      heatproof compare runs/before runs/after
      heatproof compare runs/resnet runs/convnext runs/vit --out networks.html
      heatproof compare runs/training@epoch05 runs/training@epoch30
      heatproof compare runs/first@gradcam runs/first@layercam
      heatproof compare runs/before runs/after --json > changes.json
    """
    from heatproof.report.compare import compare_runs

    found = compare_runs(runs, pictures)
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=1, ensure_ascii=False, allow_nan=False))
        return
    table = new_table(found.headline)
    for name in ("run", "verdict", "methods that follow"):
        table.add_column(name, overflow="fold")
    for side in found.sides:
        follow = [m.method for m in side.verdict.methods if m.follows == "yes"]
        table.add_row(side.name, side.headline, ", ".join(follow) or "none")
    console.print(table)
    shown = [d for d in found.differences if everything or d.answer != "unclear"]
    if shown:
        changes = new_table("what surely changed" if not everything else "every number")
        for name in ("number", "method", "from", "to", "before", "after", "change", "95 % interval", ""):
            changes.add_column(name, overflow="fold")
        for d in shown:
            interval = "" if math.isnan(d.low) else f"{d.low:+.3f} to {d.high:+.3f}"
            ends = (found.sides[k].name for k in d.sides)
            values = f"{d.before:.3f}", f"{d.after:.3f}", f"{d.change:+.3f}", interval, d.answer
            changes.add_row(f"{d.of.short} {d.of.arrow}", d.method, *ends, *values)
        console.print(changes)
    for one in found.moved[:3]:
        say(f"maps moved most: {one.image} (alike {one.alike:.2f})")
    say(f"the page: {found.report(out)}")
