"""heatproof audit: the common question in one line, from a network and a folder to a page that is open."""

from __future__ import annotations

import os
import sys
import time
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from heatproof.cli._console import console, errors, new_table, say, stopped
from heatproof.cli._study import PlacedCommand
from heatproof.errors import HeatproofError
from heatproof.run.progress import Bar, Progress, spell
from heatproof.studies.audit.settings import AuditSettings

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

    from heatproof.studies.audit.protocol import AuditPlan

OPEN = click.Option(
    ["--open/--no-open", "show"],
    default=None,
    help="Open the page in a browser at the end; by default where there is a screen.",
)
ABOUT_TRIALS = 25  # that are timed where a network takes every method
SO_FAR = """
    select method, metric, avg(value) filter (not isnan(value)) as mean,
           count(*) filter (not isnan(value)) as n
    from scores where image <> '' and method <> '' group by all
"""


@click.command("audit", cls=PlacedCommand, settings=AuditSettings, more={"out": OPEN})
@click.pass_context
def audit_command(ctx: click.Context, given: dict[str, Any], show: bool | None) -> None:
    """Which heatmaps of MODEL can be trusted on IMAGES? Answered in about so many minutes.

    IMAGES is a folder with a folder of pictures for each class, a folder of pictures without classes, or a
    CSV file that lists pictures; with boxes or masks it is also asked whether the network looks where it
    should. Methods, floors and tests are chosen by what the network and the pictures allow and by how long a
    pass takes on this machine; what was chosen, what was left out, and why, is said before the work starts.
    It is computed step by step, and after each the rest is chosen anew by what the step took. The same line
    with more --minutes goes on from there. The verdict needs at least 30 pictures to decide.

    \b
    Written to the folder --out, which can be left at any moment and taken up by the same command:
      report.html     the page: the verdict, pictures, scores
      study.toml      what was chosen, to repeat or extend it with heatproof run
      run/            scores, maps and verdict.json, for every command that reads a run

    \b
    Examples:
      heatproof audit lite0 pictures
      heatproof audit timm:resnet18 pictures --checkpoint best.pt
      heatproof audit net.py:make pictures/test --checkpoint "epochs/*.pt" --minutes 20
      heatproof audit torchvision:resnet50 list.csv --pretrained --device cuda --out runs/first

    The exit code is 1 where pictures could not be used, 130 where it was stopped.
    """
    from heatproof.images.guess import guess_source
    from heatproof.run.files import check_network

    began = time.perf_counter()
    settings = AuditSettings(**given)
    guess_source(settings.images)  # before torch is imported, which takes its time
    check_network(settings.model, settings.checkpoint)
    from heatproof.studies.audit.protocol import plan_audit, run_audit

    table = LiveTable(console, settings.out / "run")
    plan = plan_audit(settings, say=table.say, trying=TimingBar(), began=began)
    console.print(_choices(plan))
    for note in plan.notes:
        say(f"note: {note}")
    outcome = run_audit(settings, plan, table)
    if outcome.result.broken:
        from heatproof.cli.run import broken_table

        errors.print(broken_table(outcome.result.broken))
    if outcome.verdict is None or outcome.page is None:
        stopped(ctx)
    say("")
    say(outcome.verdict.headline, style="bold")
    for line in (
        outcome.verdict.sentence,
        *(f"note: {note}" for note in (*outcome.verdict.notes, *outcome.verdict.warnings)),
    ):
        say(line)
    if outcome.plan.more:
        say(f"note: {outcome.plan.more}")
    say(f"\nto repeat or extend it: heatproof run {plan.study}\n")
    say(plan.study.read_text("utf-8"), style="dim")
    page = outcome.page.resolve().as_uri()
    opened = webbrowser.open(page) if (_has_screen() if show is None else show) else False
    say(f"{'opened' if opened else 'open'} the page: {page}")
    if outcome.result.broken or outcome.result.unanswered:
        ctx.exit(1)


def _has_screen() -> bool:
    desktop = (
        sys.platform in ("darwin", "win32") or "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ
    )
    return console.is_terminal and desktop


def _choices(plan: AuditPlan) -> Table:
    """What was chosen, then what was left out; those of one reason in one row."""
    about = "as an earlier call chose" if plan.begun else f"about {spell(plan.seconds)}"
    table = new_table(f"the audit: {about}")
    for name in ("", "what", "because"):
        table.add_column(name, overflow="fold")
    for taken, word in ((True, "chosen"), (False, "left out")):
        for i, (why, names) in enumerate(plan.reasons(taken).items()):
            table.add_row("" if i else word, ", ".join(names), why)
    return table


class TimingBar:
    """What is timed at the moment, from the first trial until somebody says ""."""

    def __init__(self) -> None:
        self._bar: Bar | None = None
        self._what, self._count = "", 0

    def __call__(self, what: str) -> None:
        self._what, self._count = what, self._count + 1
        if what and self._bar is None:
            self._bar = Bar(console, "timing", ABOUT_TRIALS, lambda: f"timing {self._what}")
        if self._bar is not None and what:
            self._bar.move(min(self._count, ABOUT_TRIALS), what)
        elif self._bar is not None:
            self._bar.close()
            self._bar = None


class LiveTable(Progress):
    """On a terminal, methods with what their maps came to so far; elsewhere, a line every few seconds."""

    def __init__(self, console: Any, run: Path) -> None:
        super().__init__(console)
        self.run = run
        self._live: Live | None = None
        self._rows: dict[str, dict[str, tuple[float, int]]] = {}

    def start(self, images: int, units: int, done: int) -> None:
        if not self.console.is_terminal:
            return super().start(images, units, done)
        from rich.live import Live

        self.quiet = True  # no bar beside the table
        super().start(images, units, done)
        self.quiet = False
        self._read()
        self._live = Live(self.table(), console=self.console, transient=True)
        self._live.start()

    def advance(self, images: int, units: int) -> None:
        if self._live:
            self._read()
        super().advance(images, units)

    def finish(self) -> None:
        if self._live:
            self._live.stop()
            self._live = None
        super().finish()

    def _show(self) -> None:
        if self._live:
            self._live.update(self.table())
        else:
            super()._show()

    def _read(self) -> None:
        """Means of what is finished; a run that has no part yet has none."""
        from heatproof.store import RunFolder

        try:
            rows = RunFolder.open(self.run).scores().sql(SO_FAR)
        except HeatproofError:
            return
        self._rows = {}
        for row in rows:
            if row["mean"] is not None:
                self._rows.setdefault(row["method"], {})[row["metric"]] = row["mean"], row["n"]

    def table(self) -> Table:
        """Every method with the numbers that the verdict rests on."""
        from heatproof.verdict.follow import KINDS, follow_metric

        table = new_table(self.line())
        table.add_column("method", overflow="fold")
        table.add_column("maps", justify="right")
        for kind in KINDS:
            table.add_column(f"{follow_metric().parts[kind]}, so far", justify="right", overflow="fold")
        for method, found in self._rows.items():
            numbers = (found.get(f"{follow_metric().name}_{kind}") for kind in KINDS)
            shown = (f"{one[0]:+.3f} (n = {one[1]})" if one else "" for one in numbers)
            table.add_row(method, str(max(n for _, n in found.values())), *shown)
        return table
