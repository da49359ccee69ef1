"""An audit end to end: choose what to compute, run it step by step, judge, write the page.

OUT/study.toml      a record of what was chosen; heatproof run takes it, also with more methods or metrics
OUT/audit.json      settings and every choice, so that the same call, also with more minutes, is resumed
OUT/run             the run folder: scores, maps, verdict.json
OUT/report.html     the page

After each step the rest is chosen anew by the measured time. The study is resolved once and extended at each
step; an audit that is resumed takes it from the manifest of its run.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from heatproof.disk import write_whole
from heatproof.errors import InputError, ModelError
from heatproof.images.kinds import guess_source
from heatproof.models.model import Model
from heatproof.models.running import is_function
from heatproof.report.page import write_page
from heatproof.report.sections import note_left_out
from heatproof.run.config import study_from, toml
from heatproof.run.engine import Result, run_study
from heatproof.run.progress import Progress, spell
from heatproof.run.study import ResolvedStudy
from heatproof.store import Manifest, RunFolder
from heatproof.studies.audit.memory_images import AuditImages
from heatproof.studies.audit.planner import (
    FIRST,
    MANY,
    BudgetPlanner,
    Choice,
    CostModel,
    Inspection,
    Selection,
    in_minutes,
    inspect,
    pass_threads,
)
from heatproof.studies.audit.settings import AuditSettings, study_tables
from heatproof.studies.common import study_file
from heatproof.verdict.answers import Verdict
from heatproof.verdict.data import read_run
from heatproof.verdict.judge import follow_answers, keep

RECORD = "audit.json"
ProgressCallback = Callable[[str], object]


@dataclass(frozen=True)
class AuditState:
    """The content of audit.json, beside the settings."""

    minutes: float  # that were allowed
    spent: float = 0.0  # seconds, of all calls
    ended: bool = False  # nothing more fitted
    choices: tuple[Choice, ...] = ()
    notes: tuple[str, ...] = ()
    more: str = ""  # what was left out because of the time, and how to compute it

    @staticmethod
    def read(settings: AuditSettings) -> AuditState:
        """Raises InputError if the earlier call had other settings; minutes may differ."""
        path = settings.out / RECORD
        try:
            content = json.loads(path.read_text("utf-8"))
            before, now = content.pop("asked"), settings.recorded()
            content |= {"choices": tuple(Choice(*c) for c in content["choices"])}
            state = AuditState(**content | {"notes": tuple(content["notes"])})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"cannot read {path}: {error}; name a new folder with --out") from error
        for key in now:
            if key != "minutes" and (before.get(key) or None) != (now[key] or None):
                raise InputError(
                    f"{settings.out} holds an audit with {key} = {before.get(key)}, not {now[key]}; name a "
                    f"new folder with --out, or extend this one: heatproof run {study_file(settings.out)}"
                )
        return state


@dataclass(eq=False)
class AuditScheduler:
    """Choose the steps of an audit and record each."""

    settings: AuditSettings
    images: AuditImages
    network: Model | None
    say: ProgressCallback  # called with lines for people
    trying: ProgressCallback  # called with what is timed, "" at the end
    state: AuditState
    began: float  # time.perf_counter() at the start
    step: Selection | None = None  # that this call chose

    @property
    def spent(self) -> float:
        """Seconds, those of earlier calls too."""
        return self.state.spent + time.perf_counter() - self.began

    def begin(self) -> tuple[ResolvedStudy, Selection]:
        """The first step as a study, and everything that is expected to fit."""
        step, whole = self._next()
        assert step is not None  # the first step is never left out
        self.state = replace(self.state, notes=self.inspection.notes)
        return self._write(step, whole), whole

    def after(self, result: Result) -> tuple[ResolvedStudy | None, Selection]:
        """The next step as a study, None if the run has all that fits; and all that fits."""
        planner = self.planner
        if self.step is None:  # an earlier call chose it, and maybe did part of it
            planner.done = self._in_manifest(result.folder.manifest)
        else:
            planner.record(self.step, result.seconds)
        answers = follow_answers(read_run(result.folder))
        planner.decided = frozenset(m for m, answer in answers.items() if answer != "undecided")
        (step, whole), done = self._next(), planner.done
        assert done is not None
        if step is None:
            self.state = replace(self.state, ended=True)
            self._write(done, whole)
            note_left_out(result.folder, {c.what: c.why for c in whole.choices if not c.taken})
            return None, whole
        names = [n for n in (*step.methods, *step.metrics) if n not in (*done.methods, *done.metrics)]
        count = [f"{step.images} images"] if step.images > done.images else []
        tests = step.tested[len(done.tested) :]
        names += [f"{', '.join(methods)} on {n} images" for n, methods in tests if not {*methods} & {*names}]
        decided = f"decided: {', '.join(m for m in done.methods if m in planner.decided)}; "
        self.say(
            f"{decided if planner.decided else ''}next: {', '.join([*count, *names])}, about "
            f"{spell(planner.step_seconds(step))}"
        )
        return self._write(step, whole), whole

    def save(self) -> None:
        """Write audit.json, with the time that was spent."""
        content = {"asked": self.settings.recorded(), **asdict(self.state), "spent": round(self.spent, 1)}
        write_whole({self.settings.out / RECORD: json.dumps(content, indent=1, ensure_ascii=False) + "\n"})

    @cached_property
    def tables(self) -> dict[str, Any]:
        """The tables of the study, in the form of run/config.py."""
        tables = study_tables(
            self.settings, self.images.source, self.settings.out.resolve(), self.images.preprocess
        )
        tables["images"]["growing"] = True
        return tables

    @cached_property
    def inspection(self) -> Inspection:
        settings, source = self.settings, self.images.source
        self.say(f"inspecting {settings.model} and {source.path}: {source.seen}")
        inspection = inspect(settings, self.tables, settings.out.resolve(), self.network)
        resolved = inspection.resolved
        if resolved.device == "cpu" and not settings.threads:
            resolved.threads = pass_threads(resolved)
        for line in resolved.describe():
            self.say(line)
        if is_function(resolved.model(resolved.checkpoints[-1].name).module):
            raise ModelError(
                f"{settings.model} is a function without weights that can be randomised, which an audit "
                "needs; run a study of occlusion, rise or lime with insertion and deletion instead"
            )
        return inspection

    @cached_property
    def planner(self) -> BudgetPlanner:
        settings, inspection = self.settings, self.inspection
        budget, seconds = in_minutes(settings.minutes), 60 * settings.minutes
        self.say(f"timing passes on {inspection.resolved.device} to choose what fits into {budget}")
        return BudgetPlanner(
            inspection.resolved,
            CostModel(inspection.resolved, settings.methods[:1] or FIRST, seconds, self.trying),
            inspection.classes,
            left=lambda: seconds - self.spent,
            minutes=settings.minutes,
            most=min(settings.limit or MANY, MANY),
            labels=inspection.labels,
        )

    def _next(self) -> tuple[Selection | None, Selection]:
        try:
            return self.planner.step(self.settings.methods)
        finally:
            self.trying("")

    def _in_manifest(self, manifest: Manifest) -> Selection:
        """What a run computes."""
        config = manifest.config
        count = config["images"]["limit"] or len(self.inspection.resolved.source)
        methods, metrics = tuple(config["methods"]), tuple(config["metrics"])
        tested = [(images, tuple(own)) for images, own in config["run"].get("tested", ())]
        return Selection(methods, metrics, count, self.state.choices, tuple(tested or [(count, methods)]))

    def _write(self, step: Selection, whole: Selection) -> ResolvedStudy:
        """The step as a study; the study and every choice so far are recorded."""
        resolved, tables = self.inspection.resolved, self.tables
        tested = [[images, list(methods)] for images, methods in step.tested]
        chosen = {"targets": resolved.targets, "threads": resolved.threads, "tested": tested}
        run = {**tables["run"], **chosen}
        if resolved.targets == "label" and resolved.predicts_classes and not resolved.is_multilabel:
            run["both_classes"] = True  # for wrong predictions, maps of both classes are useful
        head = {"head": self.inspection.head} if self.inspection.head else {}
        config = {
            "methods": list(step.methods), "metrics": list(step.metrics), **tables, "run": run,
            "model": tables["model"] | head, "images": tables["images"] | {"limit": step.images},
        }  # fmt: skip
        self.step = step
        self.state = replace(
            self.state, choices=whole.choices, minutes=self.settings.minutes, more=self._more(whole)
        )
        write_whole({study_file(self.settings.out): self._comments(whole) + toml(config)})
        self.save()
        return resolved.extended(study_from(config))

    def _more(self, whole: Selection) -> str:
        """What was left out for lack of time, and how to compute it."""
        left, minutes = whole.out_of_time, self.settings.minutes
        total = min(len(self.inspection.resolved.source), self.planner.most)
        if whole.images < total:
            left = [*left, f"{total - whole.images} images"]
        if not left:
            return ""
        return (
            f"left out for lack of time: {', '.join(left)}; the same call with more minutes, such as "
            f"{2 * minutes:g}, continues this audit"
        )

    def _comments(self, whole: Selection) -> str:
        lines = [
            f"Chosen by heatproof audit for {in_minutes(self.settings.minutes)}.",
            "Add methods or metrics at the end of their lists, or raise limit; then: heatproof run FILE.",
            "On images above a raised limit, methods are tested if a step at the end of tested names them.",
        ]
        if self.settings.from_python:
            lines.append("The network came from Python: to run this file, name it as FILE.py:FUNCTION.")
        for taken, title in ((True, "Chosen:"), (False, "Left out:")):
            own = [f"  {choice.what}: {choice.why}" for choice in whole.choices if choice.taken == taken]
            lines += [title, *own] if own else []
        return "".join(f"# {line}\n" for line in lines) + "\n"


@dataclass(frozen=True)
class AuditPlan:
    """What an audit will compute."""

    study: Path  # its record
    resolved: ResolvedStudy
    choices: tuple[Choice, ...]
    seconds: float = math.nan
    notes: tuple[str, ...] = ()
    begun: bool = False  # by an earlier call
    more: str = ""  # what was left out because of the time, and how to compute it
    scheduler: AuditScheduler | None = None  # of further steps

    def reasons(self, taken: bool) -> dict[str, list[str]]:
        """What was chosen, or left out, by reason."""
        reasons: dict[str, list[str]] = {}
        for choice in self.choices:
            if choice.taken == taken:
                reasons.setdefault(choice.why, []).append(choice.what)
        return reasons

    def lines(self) -> Iterator[str]:
        """What was chosen and why, what was left out, and notes."""
        for why, names in self.reasons(True).items():
            yield f"chosen: {', '.join(names)} ({why})"
        yield from self.notices()

    def notices(self) -> Iterator[str]:
        """What was left out, and notes."""
        if left := [choice.what for choice in self.choices if not choice.taken]:
            yield f"left out: {', '.join(left)} (reasons in {self.study})"
        yield from (f"note: {note}" for note in self.notes)


@dataclass(frozen=True)
class AuditOutcome:
    """Results of an audit. page and verdict: None if it was stopped before its end."""

    plan: AuditPlan  # with the final choices
    result: Result
    page: Path | None = None
    verdict: Verdict | None = None

    @property
    def folder(self) -> RunFolder:
        return self.result.folder


def plan_audit(
    settings: AuditSettings,
    network: Model | None = None,
    images: Callable[[], AuditImages] | None = None,
    say: ProgressCallback = lambda text: None,
    trying: ProgressCallback = lambda what: None,
    began: float | None = None,
) -> AuditPlan:
    """Choose the study that answers most within the time, and record its first step; or resume one.

    network, images: used instead of those that the settings name. say, trying, began: as in AuditScheduler.
    """
    out, study = settings.out, study_file(settings.out)
    if not 0 < settings.minutes < math.inf:
        raise InputError(f"minutes must be above 0, got {settings.minutes:g}")
    known = (out / RECORD).exists()
    if not known and (study.exists() or (out / "run.json").exists()):
        raise InputError(f"{out} holds another run; name a new folder with --out")
    state = AuditState.read(settings) if known else AuditState(settings.minutes)
    begun = known and (out / "run" / "run.json").exists()
    config = RunFolder.open(out / "run").manifest.config if begun else {}
    if begun:
        settings = replace(settings, threads=config["run"]["threads"])  # rows depend on it
    chosen = images() if images else AuditImages(guess_source(settings.images), {})
    if begun and settings.minutes > state.minutes:
        say(f"continuing an audit of {in_minutes(state.minutes)}, of which {spell(state.spent)} were used")
        state = replace(state, ended=False)
    scheduler = AuditScheduler(settings, chosen, network, say, trying, state, began or time.perf_counter())
    if not begun:
        resolved, last = scheduler.begin()
        seconds, notes = scheduler.planner.seconds(last), scheduler.state.notes
        return AuditPlan(study, resolved, last.choices, seconds, notes, scheduler=scheduler)
    resolved = ResolvedStudy(study_from(config), out.resolve(), network=network)
    further = None if state.ended else scheduler
    return AuditPlan(study, resolved, state.choices, math.nan, state.notes, True, state.more, further)


def run_audit(settings: AuditSettings, plan: AuditPlan, progress: Progress | None = None) -> AuditOutcome:
    """Run what was planned, or resume it, step by step; then write the verdict and the page."""
    scheduler, out = plan.scheduler, settings.out / "run"
    resolved: ResolvedStudy | None = plan.resolved
    try:
        while resolved is not None:
            result = run_study(resolved, out, progress=progress)
            if result.done < result.units:
                return AuditOutcome(plan, result)
            resolved = None
            if scheduler:
                resolved, chosen = scheduler.after(result)
                plan = replace(plan, choices=chosen.choices, more=scheduler.state.more)
        data, page = read_run(result.folder), settings.out / "report.html"
        verdict = write_page(data, page)
        keep(data, verdict)
    finally:
        if scheduler:
            scheduler.save()
    return AuditOutcome(plan, result, page, verdict)
