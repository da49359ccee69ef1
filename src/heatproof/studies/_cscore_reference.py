"""New weights against a reference run on the same pictures: did consistency fall where AUC does not tell?

The network, pictures, methods and metrics are the reference's own; only the weights differ. A score has
fallen where the two 95 % intervals do not meet. Alarms are judged as if one checkpoint followed the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from heatproof.errors import InputError
from heatproof.monitor.alarms import Alarm, find_alarms
from heatproof.monitor.trajectory import Checkpoint, Trajectory
from heatproof.report.book import Book
from heatproof.report.tables import Cell, Column, Table, Value
from heatproof.run.config import study_from
from heatproof.run.progress import Progress
from heatproof.run.study import Opened
from heatproof.store import RunFolder
from heatproof.studies._cscore_page import alarm_table
from heatproof.studies.skeleton import whole_run, write_study


@dataclass(frozen=True)
class Comparison:
    """How the new weights do beside the old ones."""

    page: Path
    book: Book
    fell: tuple[str, ...]  # one sentence each
    alarms: tuple[Alarm, ...]

    @property
    def worse(self) -> bool:
        return bool(self.fell or self.alarms)


def compare(
    reference: Path,
    weights: Path,
    out: Path,
    checkpoint: str | None = None,
    images: Path | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Score `weights` as the reference was scored. checkpoint: of the reference; its last by default."""
    old = RunFolder.open(reference)
    before = _chosen(Trajectory.from_run(old), checkpoint)
    config = _config(old, weights, images)
    if Opened(study_from(config), out).source.hash != old.manifest.data:
        raise InputError(
            f"the pictures are not those of {reference}; name their folder with --images, unchanged"
        )
    result = whole_run(write_study(out / "study.toml", config), out / "run", progress)
    run = Trajectory.from_run(result.folder)
    after = replace(run.checkpoints[-1], name=f"{run.checkpoints[-1].name} (new)", epoch=None)
    pair = Trajectory((replace(before, epoch=None), after), run.class_names)
    alarms = tuple(a for a in find_alarms(pair) if a.checkpoint == after.name)
    fell = tuple(_falls(pair))
    book = Book(out, f"{weights.name} beside {before.name} of the reference")
    book.text(_verdict(pair, fell, alarms))
    book.table(classifier(pair))
    book.table(scores(pair))
    if alarms:
        book.table(alarm_table(alarms))
    return Comparison(book.write(), book, fell, alarms)


def _chosen(run: Trajectory, name: str | None) -> Checkpoint:
    if not len(run):
        raise InputError("the reference run has no checkpoint with a C-Score")
    if name is None:
        return run.checkpoints[-1]
    found = [c for c in run if c.name == name]
    if not found:
        raise InputError(f"the reference has no checkpoint {name!r}; it has {', '.join(c.name for c in run)}")
    return found[0]


def _config(old: RunFolder, weights: Path, images: Path | None) -> dict[str, Any]:
    """The reference's own study with other weights."""
    if not weights.is_file():
        raise InputError(f"there is no weight file {weights}")
    config = {key: dict(v) if isinstance(v, dict) else v for key, v in old.manifest.config.items()}
    model = config["model"] | {"checkpoints": [str(weights.absolute())]}
    model |= {"random_init": False, "pretrained": False}
    place = images or (old.path.parent / config["images"]["path"])
    return {**config, "model": model, "images": config["images"] | {"path": str(Path(place).absolute())}}


def _falls(pair: Trajectory) -> list[str]:
    before, after = pair.checkpoints
    found = []
    for method, label, old, new in _cells(before, after):
        if not math.isnan(new.interval[1]) and new.interval[1] < old.interval[0]:
            of = pair.class_name(label) if label is not None else "all classes"
            found.append(f"{method}, {of}: C-Score {old.value:.3f} to {new.value:.3f}")
    return found


def _cells(before: Checkpoint, after: Checkpoint) -> list[tuple[str, int | None, Any, Any]]:
    found: list[tuple[str, int | None, Any, Any]] = []
    for method, state in before.methods.items():
        other = after.methods[method]
        found.append((method, None, state.overall, other.overall))
        found += [(method, c, s, other.classes[c]) for c, s in state.classes.items() if c in other.classes]
    return found


def classifier(pair: Trajectory) -> Table:
    columns = (Column("weights"), Column("AUC"), Column("accuracy"), Column("gold lists"))
    rows = tuple(
        (
            c.name, c.auc, c.accuracy,
            ", ".join(f"{pair.class_name(k)} {s.gold} of {s.total}" for k, s in sorted(c.classes.items())),
        )
        for c in pair
    )  # fmt: skip
    return Table("classifier", "The classifier, before and now", columns, rows)


def scores(pair: Trajectory) -> Table:
    columns = tuple(map(Column, ("method", "class", "reference", "new", "change", "")))
    rows: list[tuple[Cell, ...]] = []
    for method, label, old, new in _cells(*pair.checkpoints):
        fell = not math.isnan(new.interval[1]) and new.interval[1] < old.interval[0]
        rows.append(
            (
                method, "all" if label is None else pair.class_name(label),
                Value(old.value, old.interval, old.n), Value(new.value, new.interval, new.n),
                f"{new.value - old.value:+.3f}", "fell" if fell else "",
            )
        )  # fmt: skip
    return Table("scores", "C-Score on the same pictures", columns, tuple(rows))


def _verdict(pair: Trajectory, fell: tuple[str, ...], alarms: tuple[Alarm, ...]) -> str:
    before, after = pair.checkpoints
    auc = f"AUC {before.auc:.3f} before, {after.auc:.3f} now."
    if not fell and not alarms:
        return f"No score fell by more than its intervals allow, and no alarm is raised. {auc}"
    return f"{len(fell)} scores fell and {len(alarms)} alarms are raised. {auc} " + "; ".join(fell)
