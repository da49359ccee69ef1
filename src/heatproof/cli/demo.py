"""heatproof demo: run the full audit on generated images and print the results."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from heatproof.cli._console import PATH, console, say, steps

if TYPE_CHECKING:
    from heatproof.demo import Audit


@click.command("demo")
@click.option("--out", "-o", type=PATH, default=Path("demo"), help="Folder.")
@click.option("--quick", is_flag=True, help="Smaller: one or two minutes, and a weaker network.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of all random numbers.")
def demo_command(out: Path, quick: bool, seed: int) -> None:
    """Generate QR images, train a small network on them twice, once badly, and audit its heatmaps.

    Needs no data, no download and no GPU. A second call shows the result again without computing; a stopped
    one is resumed.

    \b
    Examples:
      heatproof demo
      heatproof demo --quick --out first-look
    """
    from heatproof import demo

    started = time.perf_counter()
    sizes = demo.QUICK if quick else demo.FULL
    show(demo.run(out, sizes, seed, steps, console, say), time.perf_counter() - started)


def show(audit: Audit, seconds: float) -> None:
    """Print the verdict, what to do, the cheating twin, both trainings, and where the page is."""
    from heatproof.demo.story import first_alarms, told_apart
    from heatproof.report.page import advice
    from heatproof.verdict.answers import USES

    say(f"\n{audit.verdict.headline}", "bold")
    say(audit.verdict.sentence)
    for of in audit.verdict.network.classes:
        say(f"  {of.name}: {USES[of.answer]}; {of.test}")
    say(f"What to do: {advice(audit.verdict)}")
    say(f"\nThe cheating twin, a copy that was trained to use a tag: {audit.twin.flips}")
    say(f"  {told_apart(audit.twin)}")
    for name, data in audit.twins.items():
        firsts = first_alarms(data.alarms)
        count = f"{len(data.alarms)} alarm{'s' * (len(data.alarms) != 1)}"
        say(f"\nThe {name} training, {len(data.checkpoints)} checkpoints: {count if firsts else 'no alarm'}.")
        for alarm in firsts:
            say(f"  {alarm.name}, {alarm.where}: {alarm.sentence}")
    again = "" if audit.computed else "; nothing had to be computed"
    say(f"\n{seconds:.0f} s{again}. Open the report:\n{audit.report.resolve().as_uri()}")
