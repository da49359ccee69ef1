"""heatproof audit, evidence and score: from a network and a folder of images to a page, in one line."""

from __future__ import annotations

import time
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from heatproof.cli._console import (
    broken_table,
    console,
    errors,
    has_screen,
    new_table,
    say,
    say_verdict,
    stopped,
)  # fmt: skip
from heatproof.cli._study import PlacedCommand
from heatproof.disk import clear_failure
from heatproof.run.progress import Bar, Progress, spell
from heatproof.studies.audit.settings import AuditSettings, EvidenceSettings, NetworkSettings, ScoreSettings

if TYPE_CHECKING:
    from heatproof.studies.audit.protocol import AuditOutcome
    from heatproof.verdict.answers import Verdict

OPEN = click.Option(
    ["--open/--no-open", "show"],
    default=None,
    help="Open the page in a browser at the end; by default if there is a screen.",
)
DATA_ONLY = click.Option(
    ["--data-only"],
    is_flag=True,
    help="Test the images alone, without MODEL: heatproof evidence --data-only IMAGES.",
)
ABOUT_TRIALS = 25  # number of timings if a network supports every method


def check_input(settings: NetworkSettings) -> None:
    """Raise an error for missing images, networks or weights before torch is imported, which takes long."""
    from heatproof.images.kinds import guess_source
    from heatproof.run.config import check_network

    guess_source(settings.images)
    check_network(settings.model, settings.checkpoint)


def verdict_and_page(outcome: AuditOutcome, ctx: click.Context) -> tuple[Verdict, Path]:
    """List images that could not be used; exit if the audit was stopped before its page."""
    if outcome.result.broken:
        errors.print(broken_table(outcome.result.broken))
    if outcome.verdict is None or outcome.page is None:
        stopped(ctx)
    return outcome.verdict, outcome.page


@click.command("audit", cls=PlacedCommand, settings=AuditSettings, more={"out": OPEN})
@click.pass_context
def audit_command(ctx: click.Context, given: dict[str, Any], show: bool | None) -> None:
    """Test in about --minutes which heatmaps of MODEL can be trusted on IMAGES.

    IMAGES is a folder with a folder of images for each class, a folder of images without classes, or a CSV
    file that lists images; with boxes or masks, the audit also judges whether the network uses the
    object. Methods, controls and metrics are chosen automatically by what the network and the images allow
    and by the time that a pass takes on this machine. The audit runs in steps and adapts the remaining
    choices to the measured time; a method whose answer is decided is tested no further. With little time
    there are fewer methods, then fewer images; the verdict needs at least 30. The same command with more
    --minutes continues it.

    \b
    Written to the folder --out; the same command resumes a stopped audit:
      report.html     the page: verdict, images, scores
      study.toml      what was chosen and left out, with reasons; heatproof run repeats or extends it
      run/            scores, maps and verdict.json, for every command that reads a run

    \b
    Examples:
      heatproof audit lite0 pictures
      heatproof audit timm:resnet18 pictures --checkpoint best.pt
      heatproof audit net.py:make pictures/test --checkpoint "epochs/*.pt" --minutes 20
      heatproof audit torchvision:resnet50 list.csv --pretrained --device cuda --out runs/first

    The exit code is 1 if images could not be used, 130 if the command was stopped.
    """
    began = time.perf_counter()
    settings = AuditSettings(**given)
    check_input(settings)
    from heatproof.studies.audit.protocol import plan_audit, run_audit

    progress = Progress(console)
    plan = plan_audit(settings, say=progress.say, trying=TimingBar(), began=began)
    about = "chosen by an earlier call" if plan.begun else f"about {spell(plan.seconds)}"
    rows = [(", ".join(names), why) for why, names in plan.reasons(True).items()]
    console.print(new_table(f"audit: {about}", ("chosen", "reason"), rows))
    for line in plan.notices():
        say(line)
    outcome = run_audit(settings, plan, progress)
    verdict, path = verdict_and_page(outcome, ctx)
    say("")
    say_verdict(verdict)
    if outcome.plan.more:
        say(f"note: {outcome.plan.more}")
    say(f"choices and reasons: {plan.study}; to repeat or extend the audit: heatproof run {plan.study}")
    _end(ctx, path, show, outcome.result.broken or outcome.result.unanswered)


def _end(ctx: click.Context, path: Path, show: bool | None, unusable: object) -> None:
    """Open the page, or print its address; exit with 1 if images could not be used."""
    page = path.resolve().as_uri()
    show = console.is_terminal and has_screen() if show is None else show
    say(f"{'opened' if show and webbrowser.open(page) else 'open'} the page: {page}")
    if unusable:
        ctx.exit(1)


class EvidenceCommand(PlacedCommand):
    """With --data-only, the first argument is IMAGES."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, ["none", *args] if "--data-only" in args else args)


@click.command(
    "evidence", cls=EvidenceCommand, settings=EvidenceSettings, more={"out": OPEN, "methods": DATA_ONLY}
)
@click.pass_context
def evidence_command(ctx: click.Context, given: dict[str, Any], show: bool | None, data_only: bool) -> None:
    """Find out what MODEL uses in IMAGES, by moving its evidence into other images.

    IMAGES is a folder with a folder of images for each class, or a CSV file that lists images with labels.
    The patch under the maximum of each map, and properties of the whole image such as colours, frame and
    sharpness, are moved from images of a class into images of other classes. Evidence that the network uses
    turns the answer; random patches, and transfers within a class, are the controls. With boxes or masks of
    the objects the command judges whether the network uses something else (exit code 0 either way; use
    heatproof gate EVIDENCE --rule no-shortcut in CI). Without them the evidence is shown for you to judge.

    Whether the maps follow the network is not tested here: heatproof audit answers both questions.

    With --data-only there is no network: the command tests which properties of whole images (size, tint,
    frame, compression, corner marks, ...) predict the class of held-out images better than with permuted
    labels. It writes data.html and data.json to the folder --out; of the other options, --limit and --seed
    apply.

    \b
    Written to the folder --out; the same command resumes a stopped run:
      report.html     the page: what the network uses, with images before and after
      study.toml      what was computed; heatproof run repeats or extends it
      run/            scores, maps, evidence and verdict.json

    \b
    Examples:
      heatproof evidence timm:resnet18 pictures --checkpoint best.pt
      heatproof evidence net.py:make pictures/test --methods hirescam --out runs/evidence
      heatproof evidence --data-only pictures/train --limit 1000

    The exit code is 1 if images could not be used, 130 if the command was stopped.
    """
    settings = EvidenceSettings(**given)
    if data_only:
        from heatproof.api import check_data

        result = check_data(settings.images, limit=settings.limit, seed=settings.seed)
        if result.broken:
            errors.print(broken_table(result.broken))
        say(str(result))
        with clear_failure(settings.out):
            settings.out.mkdir(parents=True, exist_ok=True)
        _end(ctx, result.report(settings.out / "data.html"), show, result.broken)
        return
    check_input(settings)
    from heatproof.studies.audit.protocol import plan_evidence, run_audit

    plan = plan_evidence(settings, say)
    for note in plan.notes:
        say(f"note: {note}")
    outcome = run_audit(settings.audit, plan, Progress(console))
    verdict, path = verdict_and_page(outcome, ctx)
    say("")
    say(verdict.network.note, style="bold")
    for answer in verdict.network.classes:
        say(f"  {answer}")
    say(f"to repeat or extend it: heatproof run {plan.study}")
    _end(ctx, path, show, outcome.result.broken or outcome.result.unanswered)


class TimingBar:
    """Progress bar of the methods that are timed, closed by a call with ""."""

    _bar: Bar | None = None
    _what, _count = "", 0

    def __call__(self, what: str) -> None:
        self._what, self._count = what, self._count + 1
        if what:
            self._bar = self._bar or Bar(console, "timing", ABOUT_TRIALS, lambda: f"timing {self._what}")
            self._bar.move(min(self._count, ABOUT_TRIALS), what)
        elif self._bar is not None:
            self._bar.close()
            self._bar = None


@click.command("score", cls=PlacedCommand, settings=ScoreSettings)
@click.pass_context
def score_command(ctx: click.Context, given: dict[str, Any]) -> None:
    """Score existing maps of MODEL on IMAGES.

    The maps may come from any package or program: a folder with one file per image, named after it
    (cat/001.png: cat/001.npy); a pattern such as maps/{id}.npy; one .npy file with all maps in the order of
    the images; or one .npz or .safetensors file with `values` and `ids`. PNG files are grey. A map has any
    size and covers the input of the network, after cropping.

    Every metric that needs no new map is computed, also for control maps; the others are listed with the
    reason. The verdict also needs the same program's maps of three networks with random weights, in the
    folders maps-random/0, maps-random/1 and maps-random/2 beside the folder maps.

    \b
    Written to the folder --out; the same command resumes a stopped run:
      report.html     the page: verdict, images, scores
      study.toml      what was computed; heatproof run repeats or extends it
      run/            scores, maps and verdict.json, for every command that reads a run

    \b
    Examples:
      heatproof score lite0 pictures --maps maps
      heatproof score net.py:make pictures --checkpoint best.pt --maps "maps/{id}.npy"
      heatproof score client.py:predict pictures --maps maps.npz --targets predicted --out runs/served

    The exit code is 1 if images could not be used, 130 if the command was stopped.
    """
    settings = ScoreSettings(**given)
    check_input(settings)
    from heatproof.studies.audit.protocol import FLOORS, means, plan_score, run_audit

    plan = plan_score(settings, say)
    for note in plan.notes:
        say(f"note: {note}")
    outcome = run_audit(settings.audit, plan, Progress(console))
    verdict, page = verdict_and_page(outcome, ctx)
    methods = (settings.method, FLOORS[0])
    table = new_table("means over images (n)", ("metric", *methods), right=methods)
    for metric, of in means(outcome.folder, methods).items():
        if methods[0] in of:
            table.add_row(metric, *(f"{of[m][0]:.4f} ({of[m][1]})" if m in of else "" for m in methods))
    console.print(table)
    if left := plan.reasons(False):
        rows = [(", ".join(names), why) for why, names in left.items()]
        console.print(new_table("not computed", ("metrics", "reason"), rows))
    say(verdict.headline, style="bold")
    say(verdict.sentence)
    say(f"the page: {page}; to repeat or extend it: heatproof run {plan.study}")
    if outcome.result.broken or outcome.result.unanswered:
        ctx.exit(1)
