"""Scores of stored maps: a study with a method that reads them, the floors, and every possible metric.

OUT/study.toml      a record of what is computed; heatproof run takes it too
OUT/run             the run folder: scores, maps, verdict.json
OUT/report.html     the page

It is planned here, and run as an audit is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from heatproof.disk import write_whole
from heatproof.errors import InputError
from heatproof.images.kinds import guess_source
from heatproof.models.running import is_function
from heatproof.run.checks import MetricAvailability
from heatproof.run.config import study_from, toml
from heatproof.store import RunFolder
from heatproof.studies.audit.planner import Choice, inspect
from heatproof.studies.audit.protocol import AuditPlan
from heatproof.studies.audit.settings import ScoreSettings, study_tables
from heatproof.studies.common import study_file
from heatproof.verdict.data import part, stands_beside

FLOORS = ("random", "edges", "centre")
MEANS = """
    select method, metric, avg(value) as mean, count(*) as n from scores
    where list_contains(?, method) and (image <> '' or label is null) and not isnan(value)
    group by all order by all
"""


def plan_score(settings: ScoreSettings, say: Callable[[str], object] = lambda text: None) -> AuditPlan:
    """Plan the study that reads these maps and record it in OUT; an existing one must be the same."""
    source, audit, folder = guess_source(settings.images), settings.audit, settings.out.resolve()
    say(f"looking at {settings.model} and {source.path}: {source.seen}")
    tables = study_tables(audit, source, folder, {})
    inspection = inspect(audit, tables, folder, None)
    resolved = inspection.resolved
    function = is_function(resolved.model(resolved.checkpoints[-1].name).module)
    choices = [Choice(name, True, "requested") for name in settings.metrics]
    if not choices:
        available = MetricAvailability(
            resolved, inspection.classes, inspection.labels, stored=True, function=function
        )
        reasons = available.all().items()
        choices = [Choice(name, not why, why or "can be computed from stored maps") for name, why in reasons]
    tables["run"]["targets"] = settings.targets or resolved.targets
    if settings.limit is not None:
        tables["images"]["limit"] = settings.limit
    chosen = [choice.what for choice in choices if choice.taken]
    config = {"methods": [settings.method, *FLOORS], "metrics": chosen, **tables}
    text, study = toml(config), study_file(settings.out)
    begun = (settings.out / "run" / "run.json").exists()  # else a mistake in its maps ended it before work
    if begun and study.exists() and study.read_text(encoding="utf-8") != text:
        raise InputError(f"{settings.out} holds another study; name a new folder with --out")
    write_whole({study: text})
    return AuditPlan(study, resolved.extended(study_from(config)), tuple(choices), notes=inspection.notes)


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
