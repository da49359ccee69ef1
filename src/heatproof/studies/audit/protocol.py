"""An audit end to end: choose what to compute, run it step by step, judge, write the page.

OUT/study.toml      a record of what was chosen; heatproof run takes it, also with more methods or metrics
OUT/audit.json      settings and every choice, so that the same call, also with more minutes, is resumed
OUT/run             the run folder: scores, maps, verdict.json
OUT/report.html     the page

After each step the rest is chosen anew by the measured time. The study is resolved once and extended at each
step; an audit that is resumed takes it from the manifest of its run. Images in memory are written as files
beside the study. Scores of stored maps, and what a network uses, are studies with fixed contents: they are
planned once, without audit.json, and run in the same way.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from heatproof.disk import write_whole
from heatproof.errors import InputError, ModelError, about
from heatproof.images.findings import check_labels
from heatproof.images.kinds import Guess, guess_source, to_pixels
from heatproof.metrics.interventions import METHODS
from heatproof.models.model import Model
from heatproof.models.running import has_gradients, is_function
from heatproof.report.page import write_page
from heatproof.report.sections import note_left_out
from heatproof.run.checks import MetricAvailability
from heatproof.run.config import study_from, toml
from heatproof.run.engine import Result, run_study
from heatproof.run.progress import Progress, spell
from heatproof.run.study import ResolvedStudy
from heatproof.show import eight_bit
from heatproof.store import Manifest, RunFolder
from heatproof.studies.audit.planner import (
    FIRST,
    FORWARD_ONLY,
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
from heatproof.studies.audit.settings import AuditSettings, EvidenceSettings, ScoreSettings, study_tables
from heatproof.studies.common import study_file, write_rows
from heatproof.verdict.answers import Verdict
from heatproof.verdict.data import part, read_run, stands_beside
from heatproof.verdict.judge import follow_answers, growth_needed, keep

RECORD = "audit.json"
FLOORS = ("random", "edges", "centre")
MEANS = """
    select method, metric, avg(value) as mean, count(*) as n from scores
    where list_contains(?, method) and (image <> '' or label is null) and not isnan(value)
    group by all order by all
"""
MOST_IMAGES = 1000  # images of a dataset that are used
TOLERANCE = 1 / 255  # beyond 0 and 1: rounding
ProgressCallback = Callable[[str], object]


class AuditImages(NamedTuple):
    """Where images are; and, of model-ready ones, what replaces parts of the model's preprocessing."""

    source: Guess
    preprocess: dict[str, Any]


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
        data = read_run(result.folder)
        answers = follow_answers(data)
        planner.decided = frozenset(m for m, answer in answers.items() if answer != "undecided")
        planner.growth = growth_needed(data, answers)
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


def plan_score(settings: ScoreSettings, say: ProgressCallback = lambda text: None) -> AuditPlan:
    """Plan the study that reads these maps and record it in OUT; an existing one must be the same."""

    def choose(inspection: Inspection) -> list[Choice]:
        resolved = inspection.resolved
        chosen = [Choice(name, True, "requested") for name in settings.metrics]
        available = MetricAvailability(resolved, inspection.classes, inspection.labels, stored=True)
        reasons = {} if chosen else available.all()
        return chosen + [
            Choice(name, not why, why or "can be computed from stored maps") for name, why in reasons.items()
        ]

    return _plan(settings.audit, [settings.method, *FLOORS], choose, say, settings.targets)


def plan_evidence(settings: EvidenceSettings, say: ProgressCallback = lambda text: None) -> AuditPlan:
    """Plan the study of what the network uses and record it in OUT; an existing one must be the same."""
    wanted = [Choice(name, True, "what the network uses") for name in ("evidence", "accuracy")]
    return _plan(settings.audit, settings.methods, lambda inspection: wanted, say)


def _plan(
    audit: AuditSettings, methods: Sequence[str], choose: Callable[[Inspection], list[Choice]],
    say: ProgressCallback, targets: str | None = None,
) -> AuditPlan:  # fmt: skip
    """Plan a study with these methods, if any, and the metrics that `choose` returns."""
    source, folder = guess_source(audit.images), audit.out.resolve()
    say(f"inspecting {audit.model} and {source.path}: {source.seen}")
    tables = study_tables(audit, source, folder, {})
    inspection = inspect(audit, tables, folder, None)
    choices = choose(inspection)
    network = inspection.resolved.model(inspection.resolved.checkpoints[-1].name)
    methods = methods or (METHODS if has_gradients(network.module) else FORWARD_ONLY[:1])
    tables["run"]["targets"] = targets or inspection.resolved.targets
    tables["images"] |= {} if audit.limit is None else {"limit": audit.limit}
    chosen = [choice.what for choice in choices if choice.taken]
    config = {"methods": list(methods), "metrics": chosen, **tables}
    text, study = toml(config), study_file(audit.out)
    begun = (audit.out / "run" / "run.json").exists()  # else a mistake in its input ended it before work
    if begun and study.exists() and study.read_text(encoding="utf-8") != text:
        raise InputError(f"{audit.out} holds another study; name a new folder with --out")
    write_whole({study: text})
    resolved = inspection.resolved.extended(study_from(config))
    return AuditPlan(study, resolved, tuple(choices), notes=inspection.notes)


def means(folder: RunFolder, methods: Sequence[str]) -> dict[str, dict[str, tuple[float, int]]]:
    """Mean and number of images, by metric and method; without parts of other metrics."""
    rows = {(row["metric"], row["method"]): row for row in folder.scores().sql(MEANS, [list(methods)])}
    table: dict[str, dict[str, tuple[float, int]]] = {}
    for (metric, method), row in rows.items():
        if not stands_beside(metric, folder.manifest.facts):
            counted = rows.get((part(metric, "n"), method))
            n = int(counted["mean"] if counted else row["n"])
            table.setdefault(metric, {})[method] = float(row["mean"]), n
    return table


def write_images(images: Any, labels: Any, model: Model | None, folder: Path) -> AuditImages:
    """Write Pillow images, arrays, model-ready tensors or a dataset as PNG files; a path is left as it is.

    Model-ready tensors lose what lies between the 256 levels of a PNG file.
    """
    if isinstance(images, str | Path):
        if labels is not None:
            raise InputError(
                f"labels belong to images in memory; {images} has its own: folders, or a CSV file"
            )
        return AuditImages(guess_source(images), {})
    names: Sequence[str] | None = getattr(images, "classes", None)
    if labels is None:
        images, labels = _split_pairs(images)
    preprocess: dict[str, Any] = {}
    if isinstance(images, np.ndarray | Tensor):
        if images.ndim != 4 and not (images.ndim == 3 and len(images)):
            raise InputError(f"images are 'n c H W'; got shape {tuple(images.shape)}")
        if images.ndim == 4 and torch.as_tensor(images).is_floating_point():
            images, preprocess = _restored(torch.as_tensor(images), model)
    if not len(images):
        raise InputError("there is no image to audit; give a folder, a tensor, Pillow images or a dataset")
    numbers, classes = check_labels(labels, len(images), names)
    if labels is not None and len(numbers) != len(images):
        raise InputError(f"labels has {len(numbers)} entries, but there are {len(images)} images")
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    rows = []
    for i, (image, number) in enumerate(zip(images, numbers, strict=True)):
        path = f"pictures/{i:06d}.png"
        with about(f"image {i}"):
            Image.fromarray(to_pixels(image)).save(folder / path)
        rows.append([path, *([] if number is None else [classes[number]])])
    header = ["path", *(["label"] if classes else [])]
    table = write_rows(folder / "pictures.csv", header, rows)
    return AuditImages(Guess("csv", table, "images from Python"), preprocess)


def _split_pairs(images: Any) -> tuple[Any, Any]:
    """Images and labels of a dataset of pairs, evenly spaced if it is long; others as they are."""
    if isinstance(images, np.ndarray | Tensor) or not hasattr(images, "__len__") or not len(images):
        return images, None
    if not hasattr(images, "__getitem__"):
        raise InputError(
            "images are a folder, a tensor, Pillow images or a dataset; for a loader, its .dataset"
        )
    if not isinstance(images[0], tuple):
        return images, None
    places = np.unique(np.linspace(0, len(images) - 1, min(len(images), MOST_IMAGES)).round().astype(int))
    pairs = [images[int(i)] for i in places]
    chosen, labels = [pair[0] for pair in pairs], [int(pair[1]) for pair in pairs]
    return (torch.stack(chosen) if isinstance(chosen[0], Tensor) else chosen), labels


def _restored(tensors: Tensor, model: Model | None) -> tuple[list[Tensor], dict[str, Any]]:
    """Images in 8 bits that the returned preprocessing turns into these tensors."""
    if not torch.isfinite(tensors).all():
        raise InputError("images hold NaN or infinity; leave those images out")
    channels, *size = map(int, tensors.shape[1:])
    mean, std = (model.preprocess.mean, model.preprocess.std) if model else ((0.0,), (1.0,))
    images = _undone(tensors, mean, std) if len(mean) == channels else None
    if images is None or images.min() < -TOLERANCE or images.max() > 1 + TOLERANCE:
        low, high = float(tensors.min()), float(tensors.max())
        span = max(high - low, 1e-6)  # a pixel of 0 becomes the lowest value, one of 255 the highest
        mean, std = (-low / span,) * channels, (1 / span,) * channels
        images = _undone(tensors, mean, std)
    preprocess = {"size": size, "resize": size, "mean": list(mean), "std": list(std)}
    return list(eight_bit(images.clamp(0, 1))), preprocess


def _undone(tensors: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    return tensors.float() * torch.tensor(std)[:, None, None] + torch.tensor(mean)[:, None, None]
