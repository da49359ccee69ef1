"""Studies with fixed contents: scores of stored maps, and what a network uses.

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
from heatproof.metrics.interventions import METHODS
from heatproof.models.running import has_gradients
from heatproof.run.checks import MetricAvailability
from heatproof.run.config import study_from, toml
from heatproof.store import RunFolder
from heatproof.studies.audit.planner import FORWARD_ONLY, Choice, Inspection, inspect
from heatproof.studies.audit.protocol import AuditPlan
from heatproof.studies.audit.settings import AuditSettings, EvidenceSettings, ScoreSettings, study_tables
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

    def choose(inspection: Inspection) -> list[Choice]:
        resolved = inspection.resolved
        chosen = [Choice(name, True, "requested") for name in settings.metrics]
        available = MetricAvailability(resolved, inspection.classes, inspection.labels, stored=True)
        reasons = {} if chosen else available.all()
        return chosen + [
            Choice(name, not why, why or "can be computed from stored maps") for name, why in reasons.items()
        ]

    return _plan(settings.audit, [settings.method, *FLOORS], choose, say, settings.targets)


def plan_evidence(settings: EvidenceSettings, say: Callable[[str], object] = lambda text: None) -> AuditPlan:
    """Plan the study of what the network uses and record it in OUT; an existing one must be the same."""
    wanted = [Choice(name, True, "what the network uses") for name in ("evidence", "accuracy")]
    return _plan(settings.audit, settings.methods, lambda inspection: wanted, say)


def _plan(
    audit: AuditSettings, methods: Sequence[str], choose: Callable[[Inspection], list[Choice]],
    say: Callable[[str], object], targets: str | None = None,
) -> AuditPlan:  # fmt: skip
    """Plan a study with these methods, if any, and the metrics that `choose` returns."""
    source, folder = guess_source(audit.images), audit.out.resolve()
    say(f"looking at {audit.model} and {source.path}: {source.seen}")
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
