"""An audit while it runs: step by step, and after each what is left is chosen anew by what it really took.

OUT/study.toml and OUT/audit.json tell the step in hand, so that an audit can be left at any moment, taken up
again, and given more minutes.
"""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from heatproof.disk import write_whole
from heatproof.errors import InputError, ModelError
from heatproof.models.function import is_function
from heatproof.models.model import Model
from heatproof.report.sections import note_left_out
from heatproof.run.config import read_study, toml
from heatproof.run.engine import Result
from heatproof.run.progress import spell
from heatproof.studies.audit.choose import FIRST, MANY, VOTE, BudgetPlanner, Choice, Selection, in_minutes
from heatproof.studies.audit.held import HeldPictures
from heatproof.studies.audit.looked import Inspection, look
from heatproof.studies.audit.prices import CostModel
from heatproof.studies.audit.settings import AuditSettings, study_tables
from heatproof.studies.common import study_file

KEPT = "audit.json"
Say = Callable[[str], object]


@dataclass(frozen=True)
class Kept:
    """What an earlier call left in audit.json."""

    minutes: float  # that it was allowed
    spent: float = 0.0  # seconds, of all calls
    ended: bool = False  # whether nothing more fitted
    choices: tuple[Choice, ...] = ()
    notes: tuple[str, ...] = ()
    more: str = ""  # what was left out for want of time, and how to have it


def read_kept(settings: AuditSettings) -> Kept:
    """Refused where the call before was told something else; minutes may differ."""
    path = settings.out / KEPT
    try:
        content = json.loads(path.read_text("utf-8"))
        before, asked = content.pop("asked"), settings.asked()
        choices = tuple(Choice(*one) for one in content.pop("choices"))
        kept = Kept(**content, choices=choices)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"cannot read {path}: {error}; name a new folder with --out") from error
    if other := [
        key for key in asked if key != "minutes" and (before.get(key) or None) != (asked[key] or None)
    ]:
        key = other[0]
        raise InputError(
            f"{settings.out} holds an audit with {key} = {before.get(key)}, not {asked[key]}; name a new "
            f"folder with --out, or extend this one: heatproof run {study_file(settings.out)}"
        )
    return replace(kept, notes=tuple(kept.notes))


class AuditScheduler:
    """Chooses the steps of one audit and writes each down."""

    def __init__(
        self,
        settings: AuditSettings,
        pictures: HeldPictures,
        network: Model | None,
        say: Say,
        trying: Say,
        kept: Kept,
        began: float | None = None,
    ) -> None:
        """say: told what people should read. trying: told what is timed, "" when that is over.

        began: time.perf_counter() when the clock started; now where None.
        """
        self.settings, self.pictures, self.network = settings, pictures, network
        self.say, self.trying, self.kept = say, trying, kept
        self.study, self.began = study_file(settings.out), began or time.perf_counter()
        self.step: Selection | None = None  # in hand, where this call chose it

    @property
    def spent(self) -> float:
        """Seconds, those of earlier calls too."""
        return self.kept.spent + time.perf_counter() - self.began

    def begin(self) -> Selection:
        """Write down the first step; all that is expected to fit."""
        steps = self._climbed()
        self.kept = replace(self.kept, notes=self.looked.notes)
        self._write(steps[0], steps[-1])
        return steps[-1]

    def after(self, result: Result) -> Selection:
        """Write down the next step; all that fits by now. `kept.ended` where that is what the run has."""
        if self.step is None:  # an earlier call chose it, and maybe did part of it
            self.ladder.held = self._lying
        else:
            self.ladder.took(self.step, result.seconds)
        steps, held = self._climbed(), self.ladder.held
        assert held is not None
        if steps[0].asks == held.asks:
            self.kept = replace(self.kept, ended=True)
            self._write(held, steps[-1])
            note_left_out(result.folder, {one.what: one.why for one in steps[-1].choices if not one.taken})
        else:  # twice the pictures at most, so that a step whose price is wrong is not a long one
            step = replace(steps[0], pictures=min(steps[0].pictures, 2 * held.pictures))
            self.say(f"next, {self._added(held, step)}: about {spell(self.ladder.seconds(step))}")
            self._write(step, steps[-1])
        return steps[-1]

    def keep(self) -> None:
        """The time that was spent, for a later call."""
        asked = {"asked": self.settings.asked(), **asdict(self.kept), "spent": round(self.spent, 1)}
        write_whole({self.settings.out / KEPT: json.dumps(asked, indent=1, ensure_ascii=False) + "\n"})

    def _more(self, chosen: Selection) -> str:
        total = min(len(self.looked.opened.source), self.ladder.most)
        left = [
            *chosen.unhurried,
            *([f"{total - chosen.pictures} pictures"] if chosen.pictures < total else []),
        ]
        if not left:
            return ""
        return (
            f"left out for want of time: {', '.join(left)}; {spell(self.spent)} of "
            f"{in_minutes(self.settings.minutes)} were used, and the same call with more minutes, such as "
            f"{2 * self.settings.minutes:g}, goes on from here"
        )

    @cached_property
    def looked(self) -> Inspection:
        settings, source = self.settings, self.pictures.source
        self.say(f"looking at {settings.model} and {source.path}: {source.seen}")
        tables = study_tables(settings, source, Path.cwd(), self.pictures.preprocess)
        tables["images"]["growing"] = True
        looked = look(settings, tables, self.network)
        for line in looked.opened.describe():
            self.say(line)
        if is_function(looked.opened.model(looked.opened.checkpoints[-1].name).module):
            raise ModelError(
                f"{settings.model} is only a function: it has no weights to redraw, on which an audit "
                "rests; run a study of occlusion, rise or lime with insertion and deletion instead"
            )
        return looked

    @cached_property
    def ladder(self) -> BudgetPlanner:
        settings, opened = self.settings, self.looked.opened
        self.say(f"timing passes on {opened.device}, to choose what fits into {in_minutes(settings.minutes)}")
        first = settings.methods[:1] or FIRST
        return BudgetPlanner(
            opened=opened,
            prices=CostModel(opened, first, VOTE, 60 * settings.minutes, self.trying),
            classes=self.looked.classes,
            left=lambda: 60 * settings.minutes - self.spent,
            minutes=settings.minutes,
            most=min(settings.limit or MANY, MANY),
            labels=self.looked.labels,
        )

    @property
    def _lying(self) -> Selection:
        """What the study asks for."""
        study = read_study(self.study)
        count = study.images.limit or len(self.looked.opened.source)
        return Selection(tuple(study.methods), tuple(study.metrics), count, self.kept.choices)

    def _climbed(self) -> list[Selection]:
        try:
            return self.ladder.climb(self.settings.methods)
        finally:
            self.trying("")

    def _added(self, held: Selection, step: Selection) -> str:
        names = [one for one in (*step.methods, *step.metrics) if one not in (*held.methods, *held.metrics)]
        count = f"{step.pictures} pictures" if step.pictures > held.pictures else ""
        return ", ".join(filter(None, [count, *names]))

    def _write(self, step: Selection, whole: Selection) -> None:
        """The step as a study, every choice so far as a record."""
        config = tomllib.loads(self.study.read_text("utf-8")) if self.study.exists() else self._config()
        config |= {"methods": list(step.methods), "metrics": list(step.metrics)}
        config["images"] = config["images"] | {"limit": step.pictures}
        minutes, more = self.settings.minutes, self._more(whole)
        self.step = step
        self.kept = replace(self.kept, choices=whole.choices, minutes=minutes, more=more)
        write_whole({self.study: self._comments(whole) + toml(config)})
        self.keep()

    def _config(self) -> dict[str, Any]:
        source, opened = self.pictures.source, self.looked.opened
        tables = study_tables(self.settings, source, self.settings.out.resolve(), self.pictures.preprocess)
        if self.looked.head:
            tables["model"]["head"] = self.looked.head
        tables["images"]["growing"] = True
        tables["run"]["targets"] = opened.targets
        if opened.targets == "label" and opened.classes and not opened.several:
            tables["run"]["both_classes"] = True  # of wrong answers, a person wants to see both
        return {"methods": [], "metrics": [], **tables}

    def _comments(self, whole: Selection) -> str:
        """What was left out and why."""
        lines = [
            f"Chosen by heatproof audit for {in_minutes(self.settings.minutes)}.",
            "Add methods or metrics at the end of their lists, or raise limit; then: heatproof run FILE.",
        ]
        if self.settings.held:
            lines.append("The network came from Python: to run this file, name it as FILE.py:FUNCTION.")
        left = [f"  {one.what}: {one.why}" for one in whole.choices if not one.taken]
        return "".join(f"# {line}\n" for line in (*lines, *(["Left out:", *left] if left else []))) + "\n"
