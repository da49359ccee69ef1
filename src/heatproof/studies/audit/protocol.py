"""An audit end to end: choose what to compute, run it as any study is run, judge, write the page.

OUT/study.toml      what was chosen; heatproof run takes it, also with more methods or metrics in it
OUT/audit.json      what was asked for and every choice, so that the same call goes on
OUT/run             the run folder: scores, maps, verdict.json
OUT/report.html     the page
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from heatproof.errors import InputError
from heatproof.images.kinds import guess_source
from heatproof.models.model import Model
from heatproof.report.page import write_page
from heatproof.run.config import read_study
from heatproof.run.engine import Result, run_study
from heatproof.run.progress import Progress, spell
from heatproof.store import RunFolder
from heatproof.studies.audit.ascent import KEPT, AuditScheduler, Kept, read_kept
from heatproof.studies.audit.choose import Choice, in_minutes
from heatproof.studies.audit.held import HeldPictures
from heatproof.studies.audit.settings import AuditSettings
from heatproof.studies.common import study_file
from heatproof.verdict.answers import Verdict
from heatproof.verdict.data import read_run
from heatproof.verdict.judge import keep

Say = Callable[[str], object]


@dataclass(frozen=True)
class AuditPlan:
    """What an audit is going to compute."""

    study: Path
    choices: tuple[Choice, ...]
    seconds: float
    notes: tuple[str, ...] = ()
    begun: bool = False  # whether an earlier call chose it
    more: str = ""  # what was left out for want of time, and how to have it
    ascent: AuditScheduler | None = None  # who goes on choosing while it runs

    def reasons(self, taken: bool) -> dict[str, list[str]]:
        """What was chosen, or left out, by why."""
        found: dict[str, list[str]] = {}
        for one in self.choices:
            if one.taken == taken:
                found.setdefault(one.why, []).append(one.what)
        return found

    def told(self) -> list[str]:
        """The same as lines."""
        words = {True: "chosen", False: "left out"}
        lines = [f"{word}: {', '.join(names)} ({why})" for taken, word in words.items()
                 for why, names in self.reasons(taken).items()]  # fmt: skip
        return [*lines, *(f"note: {note}" for note in self.notes)]


@dataclass(frozen=True)
class AuditOutcome:
    """What an audit left behind. page and verdict: None where it was stopped before its end."""

    plan: AuditPlan  # with what was chosen in the end
    result: Result
    page: Path | None = None
    verdict: Verdict | None = None

    @property
    def folder(self) -> RunFolder:
        return self.result.folder


def plan_audit(
    settings: AuditSettings,
    network: Model | None = None,
    pictures: Callable[[], HeldPictures] | None = None,
    say: Say = lambda text: None,
    trying: Say = lambda what: None,
    began: float | None = None,
) -> AuditPlan:
    """The study that answers most in the time there is, its first step written to OUT; or what lies there.

    network, pictures: those that Python holds. trying: told what is timed, "" at the end. began: when the
    clock started, by time.perf_counter(); now where None.
    """
    out, study = settings.out, study_file(settings.out)
    if not 0 < settings.minutes < math.inf:
        raise InputError(f"minutes must be above 0, got {settings.minutes:g}")
    kept = read_kept(settings) if (out / KEPT).exists() else None
    if kept is None and (study.exists() or (out / "run.json").exists()):
        raise InputError(f"{out} holds another run; name a new folder with --out")
    found = pictures() if pictures else HeldPictures(guess_source(settings.images), {})
    if kept is None:
        ascent = AuditScheduler(settings, found, network, say, trying, Kept(settings.minutes), began)
        last = ascent.begin()
        return AuditPlan(study, last.choices, ascent.ladder.seconds(last), ascent.kept.notes, ascent=ascent)
    read_study(study)
    more = settings.minutes > kept.minutes
    if more:
        say(f"going on with an audit of {in_minutes(kept.minutes)}, of which {spell(kept.spent)} were used")
    kept = replace(kept, ended=kept.ended and not more)
    ascent = AuditScheduler(settings, found, network, say, trying, kept, began)
    going = None if kept.ended else ascent
    return AuditPlan(study, kept.choices, math.nan, kept.notes, True, kept.more, going)


def run_audit(
    settings: AuditSettings, plan: AuditPlan, progress: Progress | None = None, network: Model | None = None
) -> AuditOutcome:
    """Do what was planned, or go on with it, step by step; then the verdict and the page."""
    ascent, out = plan.ascent, settings.out / "run"
    try:
        result = run_study(plan.study, out, progress=progress, network=network)
        while ascent and not ascent.kept.ended and result.done == result.units:
            chosen = ascent.after(result)
            plan = replace(plan, choices=chosen.choices, more=ascent.kept.more)
            if not ascent.kept.ended:
                result = run_study(plan.study, out, progress=progress, network=network)
        if result.done < result.units:
            return AuditOutcome(plan, result)
        data, page = read_run(result.folder), settings.out / "report.html"
        verdict = write_page(data, page)
        keep(data, verdict)
    finally:
        if ascent:
            ascent.keep()
    return AuditOutcome(plan, result, page, verdict)
