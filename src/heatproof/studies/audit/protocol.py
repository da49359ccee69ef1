"""An audit end to end: choose what to compute, run it as any study is run, judge, write the page.

OUT/study.toml      what was chosen; heatproof run takes it, also with more methods or metrics in it
OUT/audit.json      what was asked for and every choice, so that the same call goes on
OUT/run             the run folder: scores, maps, verdict.json
OUT/report.html     the page
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heatproof.disk import write_whole
from heatproof.errors import InputError, ModelError
from heatproof.images.guess import guess_source
from heatproof.models.function import is_function
from heatproof.models.model import Model
from heatproof.report.page import write_page
from heatproof.run.config import read_study, toml
from heatproof.run.engine import Result, run_study
from heatproof.run.progress import Progress, spell
from heatproof.run.study import Opened
from heatproof.store import RunFolder
from heatproof.studies.audit.choose import FIRST, MANY, VOTE, Choice, Ladder, Selection, in_minutes
from heatproof.studies.audit.held import HeldPictures
from heatproof.studies.audit.looked import look
from heatproof.studies.audit.prices import Prices
from heatproof.studies.audit.settings import AuditSettings, study_tables
from heatproof.studies.skeleton import study_file
from heatproof.verdict.answers import Verdict
from heatproof.verdict.data import read_run
from heatproof.verdict.judge import keep

KEPT = "audit.json"
Say = Callable[[str], object]


@dataclass(frozen=True)
class AuditPlan:
    """What an audit is going to compute."""

    study: Path
    choices: tuple[Choice, ...]
    seconds: float
    notes: tuple[str, ...] = ()
    begun: bool = False  # whether an earlier call chose it

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

    plan: AuditPlan
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
) -> AuditPlan:
    """The study that answers most in the time there is, written to OUT; or the one that lies there.

    network, pictures: those that Python holds.
    """
    began, out, study = time.perf_counter(), settings.out, study_file(settings.out)
    if settings.minutes <= 0:
        raise InputError(f"minutes must be above 0, got {settings.minutes:g}")
    begun = (out / KEPT).exists()
    if not begun and (study.exists() or (out / "run.json").exists()):
        raise InputError(f"{out} holds another run; name a new folder with --out")
    found = pictures() if pictures else HeldPictures(guess_source(settings.images), {})
    if begun:
        return _begun(settings)
    say(f"looking at {settings.model} and {found.source.path}: {found.source.seen}")
    looked = look(settings, study_tables(settings, found.source, Path.cwd(), found.preprocess), network)
    opened = looked.opened
    if is_function(opened.model(opened.checkpoints[-1].name).module):
        raise ModelError(
            f"{settings.model} is only a function: it has no weights to redraw, on which an audit "
            "rests; run a study of occlusion, rise or lime with insertion and deletion instead"
        )
    say(f"timing passes on {opened.device}, to choose what fits into {in_minutes(settings.minutes)}")
    ladder = Ladder(
        opened=opened,
        prices=Prices(opened, settings.methods[:1] or FIRST, VOTE, 60 * settings.minutes),
        classes=looked.classes,
        left=lambda: 60 * settings.minutes - (time.perf_counter() - began),
        minutes=settings.minutes,
        most=min(settings.limit or MANY, MANY),
        labels=looked.labels,
    )
    chosen = ladder.climb(settings.methods)
    tables = study_tables(settings, found.source, out.resolve(), found.preprocess)
    if looked.head:
        tables["model"]["head"] = looked.head
    plan = AuditPlan(study, chosen.choices, chosen.seconds, looked.notes)
    kept = {"asked": settings.asked(), "choices": plan.choices, "seconds": plan.seconds, "notes": plan.notes}
    write_whole({
        study: _with_comments(_config(tables, chosen, opened), plan, settings),
        out / KEPT: json.dumps(kept, indent=1, ensure_ascii=False) + "\n",
    })  # fmt: skip
    return plan


def run_audit(
    settings: AuditSettings, plan: AuditPlan, progress: Progress | None = None, network: Model | None = None
) -> AuditOutcome:
    """Do what was planned, or go on with it; then the verdict and the page."""
    result = run_study(plan.study, settings.out / "run", progress=progress, network=network)
    if result.done < result.units:
        return AuditOutcome(plan, result)
    data, page = read_run(result.folder), settings.out / "report.html"
    verdict = write_page(data, page)
    keep(data, verdict)
    return AuditOutcome(plan, result, page, verdict)


def _begun(settings: AuditSettings) -> AuditPlan:
    """The plan that an earlier call of the same audit made."""
    path = settings.out / KEPT
    try:
        kept = json.loads(path.read_text("utf-8"))
        before, asked = kept["asked"], settings.asked()
        choices = tuple(Choice(*one) for one in kept["choices"])
        seconds, notes = float(kept["seconds"]), tuple(kept["notes"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"cannot read {path}: {error}; name a new folder with --out") from error
    if other := [key for key in asked if before.get(key) != asked[key]]:
        key = other[0]
        raise InputError(
            f"{settings.out} holds an audit with {key} = {before.get(key)}, not {asked[key]}; name a new "
            f"folder with --out, or extend this one: heatproof run {study_file(settings.out)}"
        )
    read_study(study_file(settings.out))
    return AuditPlan(study_file(settings.out), choices, seconds, notes, begun=True)


def _config(tables: Mapping[str, Any], chosen: Selection, opened: Opened) -> dict[str, Any]:
    images = {**tables["images"]}
    if chosen.pictures < len(opened.source):
        images["limit"] = chosen.pictures
    run = {**tables["run"], "targets": opened.targets}
    rest = {name: table for name, table in tables.items() if name not in ("run", "images")}
    return {
        "methods": list(chosen.methods),
        "metrics": chosen.all_metrics,
        "run": run,
        **rest,
        "images": images,
    }


def _with_comments(config: Mapping[str, Any], plan: AuditPlan, settings: AuditSettings) -> str:
    """The study as TOML, with what was left out and why."""
    left = [f"#   {', '.join(names)}: {why}" for why, names in plan.reasons(False).items()]
    expected = f"about {spell(plan.seconds)} were expected"
    head = [
        f"# Chosen by heatproof audit for {in_minutes(settings.minutes)}; {expected}.",
        "# Add methods or metrics at the end of their lists, then: heatproof run this file.",
    ]
    if settings.held:
        head.append("# The network came from Python: to run this file, name it as FILE.py:FUNCTION.")
    if left:
        head += ["# Left out:", *left]
    return "\n".join(head) + "\n\n" + toml(config)
