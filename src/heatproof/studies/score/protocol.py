"""Stored maps as a study: a method that reads them, the floors, and every metric that can be computed.

OUT/study.toml      what is computed; heatproof run takes it too
OUT/run             the run folder: scores, maps, verdict.json
OUT/report.html     the page

It is planned here, and run as an audit is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from heatproof.disk import write_whole
from heatproof.errors import InputError
from heatproof.images.guess import guess_source
from heatproof.models.function import is_function
from heatproof.run.checks import MetricAvailability
from heatproof.run.config import toml
from heatproof.store import RunFolder
from heatproof.studies.audit.choose import Choice
from heatproof.studies.audit.looked import look
from heatproof.studies.audit.protocol import AuditPlan
from heatproof.studies.audit.settings import study_tables
from heatproof.studies.common import study_file
from heatproof.studies.score.settings import ScoreSettings
from heatproof.verdict.measures import part, stands_beside

FLOORS = ("random", "edges", "centre")
POSSIBLE, ASKED = "can be computed from stored maps", "asked for"
MEANS = """
    select method, metric, avg(value) as mean, count(*) as n from scores
    where list_contains(?, method) and (image <> '' or label is null) and not isnan(value)
    group by all order by all
"""
Say = Callable[[str], object]


def plan_score(settings: ScoreSettings, say: Say = lambda text: None) -> AuditPlan:
    """The study that reads these maps, written to OUT; one that lies there already must be the same."""
    found, audit = guess_source(settings.images), settings.audit
    say(f"looking at {settings.model} and {found.path}: {found.seen}")
    looked = look(audit, study_tables(audit, found, Path.cwd(), {}), None)
    opened = looked.opened
    network = opened.model(opened.checkpoints[-1].name)
    able = MetricAvailability(
        opened, looked.classes, looked.labels, stored=True, function=is_function(network.module)
    )
    choices = [Choice(name, True, ASKED) for name in settings.metrics]
    choices = choices or [Choice(name, not why, why or POSSIBLE) for name, why in able.all().items()]
    tables = study_tables(audit, found, settings.out.resolve(), {})
    tables["run"]["targets"] = settings.targets or opened.targets
    if settings.limit is not None:
        tables["images"]["limit"] = settings.limit
    chosen = [one.what for one in choices if one.taken]
    text = toml({"methods": [settings.method, *FLOORS], "metrics": chosen, **tables})
    study = study_file(settings.out)
    begun = (settings.out / "run" / "run.json").exists()  # else a mistake in its maps ended it before work
    if begun and study.exists() and study.read_text(encoding="utf-8") != text:
        raise InputError(f"{settings.out} holds another study; name a new folder with --out")
    write_whole({study: text})
    return AuditPlan(study, tuple(choices), math.nan, looked.notes)


def means(folder: RunFolder, methods: Sequence[str]) -> dict[str, dict[str, tuple[float, int]]]:
    """By metric and method: the mean and the number of images; numbers that complete another are left out."""
    rows = {(row["metric"], row["method"]): row for row in folder.scores().sql(MEANS, [list(methods)])}
    found: dict[str, dict[str, tuple[float, int]]] = {}
    for (metric, method), row in rows.items():
        if not stands_beside(metric, folder.manifest.facts):
            counted = rows.get((part(metric, "n"), method))
            n = int(counted["mean"] if counted else row["n"])
            found.setdefault(metric, {})[method] = float(row["mean"]), n
    return found
