"""New weights against a reference run on the same pictures: did consistency fall where AUC does not tell?

The network, pictures, methods and metrics are the reference's own; only the weights differ. A score has
fallen where the two 95 % intervals do not meet. Alarms are judged as if one checkpoint followed the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from heatproof.errors import InputError
from heatproof.metrics.consistency import CScore
from heatproof.report.book import Book
from heatproof.report.tables import Column, Table
from heatproof.run.config import study_from
from heatproof.run.progress import Progress
from heatproof.run.study import Opened
from heatproof.store import RunFolder
from heatproof.studies.cscore.tables import alarm_table, as_value
from heatproof.studies.skeleton import named_run
from heatproof.verdict.alarms import Alarm, find_alarms
from heatproof.verdict.trajectory import CheckpointState, Trajectory


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
    run = Trajectory.from_run(named_run(out, "run", config, progress).folder)
    after = replace(run.checkpoints[-1], name=f"{run.checkpoints[-1].name} (new)", epoch=None)
    pair = Trajectory((replace(before, epoch=None), after), run.class_names)
    alarms = tuple(a for a in find_alarms(pair) if a.checkpoint == after.name)
    moves = list(_moves(before, after))
    fell = tuple(
        f"{one.method}, {one.of(pair, 'all classes')}: C-Score {one.old.value:.3f} to {one.new.value:.3f}"
        for one in moves
        if one.fell
    )
    auc = f"AUC {before.auc:.3f} before, {after.auc:.3f} now."
    book = Book(out, f"{weights.name} beside {before.name} of the reference")
    if fell or alarms:
        worse = f"{len(fell)} scores fell and {len(alarms)} alarms are raised."
        book.text(f"{worse} {auc} {'; '.join(fell)}")
    else:
        book.text(f"No score fell by more than its intervals allow, and no alarm is raised. {auc}")
    book.table(_classifier(pair))
    book.table(_scores(pair, moves))
    if alarms:
        book.table(alarm_table(alarms))
    return Comparison(book.write(), book, fell, alarms)


def _chosen(run: Trajectory, name: str | None) -> CheckpointState:
    if not len(run):
        raise InputError("the reference run has no checkpoint with a C-Score")
    found = [c for c in run if name in (None, c.name)]
    if not found:
        raise InputError(f"the reference has no checkpoint {name!r}; it has {', '.join(c.name for c in run)}")
    return found[-1]


def _config(old: RunFolder, weights: Path, images: Path | None) -> dict[str, Any]:
    """The reference's own study with other weights."""
    if not weights.is_file():
        raise InputError(f"there is no weight file {weights}")
    config = old.manifest.config
    own = {"checkpoints": [str(weights.absolute())], "random_init": False, "pretrained": False}
    place = (images or old.path.parent / config["images"]["path"]).absolute()
    images_of = config["images"] | {"path": str(place)}
    return {**config, "model": config["model"] | own, "images": images_of}


class Move(NamedTuple):
    """A method's score of a class, or of all, before and now."""

    method: str
    label: int | None
    old: CScore
    new: CScore

    @property
    def fell(self) -> bool:
        return not math.isnan(self.new.interval[1]) and self.new.interval[1] < self.old.interval[0]

    def of(self, run: Trajectory, all_of_them: str) -> str:
        return all_of_them if self.label is None else run.class_name(self.label)


def _moves(before: CheckpointState, after: CheckpointState) -> Iterator[Move]:
    for method, state in before.methods.items():
        other = after.methods[method]
        yield Move(method, None, state.overall, other.overall)
        for label, score in state.classes.items():
            if label in other.classes:
                yield Move(method, label, score, other.classes[label])


def _classifier(pair: Trajectory) -> Table:
    columns = tuple(map(Column, ("weights", "AUC", "accuracy", "gold lists")))
    lists = [
        ", ".join(f"{pair.class_name(k)} {s.gold} of {s.total}" for k, s in sorted(c.classes.items()))
        for c in pair
    ]
    rows = tuple((c.name, c.auc, c.accuracy, gold) for c, gold in zip(pair, lists, strict=True))
    return Table("classifier", "The classifier, before and now", columns, rows)


def _scores(pair: Trajectory, moves: list[Move]) -> Table:
    columns = tuple(map(Column, ("method", "class", "reference", "new", "change", "")))
    rows = tuple(
        (
            one.method, one.of(pair, "all"), as_value(one.old), as_value(one.new),
            f"{one.new.value - one.old.value:+.3f}", "fell" if one.fell else "",
        )
        for one in moves
    )  # fmt: skip
    return Table("scores", "C-Score on the same pictures", columns, rows)
