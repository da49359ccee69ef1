"""What a C-Score study says: tables, figures, alarms, the sweep over depths, and what to use.

The recommendation follows one rule. Candidates are a checkpoint whose AUC is not below the best by more than
sampling error, with a method about which no alarm was raised there. The best is the one whose worst class is
surely best: the highest lower end of the 95 % interval, taken over the class where it is lowest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import NamedTuple

from heatproof.images import Failure
from heatproof.metrics.consistency import CScore
from heatproof.report.book import Book
from heatproof.report.figures import cscore as figures
from heatproof.report.tables import Cell, Column, Table, Value
from heatproof.store import RunFolder
from heatproof.train.recipe import History
from heatproof.verdict.alarms import Alarm, Thresholds, difference_error, find_alarms
from heatproof.verdict.trajectory import CheckpointState, Trajectory

Z95 = 1.96
better = partial(Column, higher_is_better=True)


def write(
    book: Book,
    folder: RunFolder,
    history: History | None,
    ends: tuple[str, str],
    swept: Mapping[str, RunFolder],
    held_out: float | None,
    failures: Sequence[Failure] = (),
) -> None:
    """Everything, in the order a reader wants it."""
    run = Trajectory.from_run(folder)
    alarms = find_alarms(run)
    book.text(introduction(run, held_out))
    if failures:
        shown = "; ".join(f"{one.id}: {one.reason}" for one in failures[:3])
        book.text(f"{len(failures)} pictures could not be read for training ({shown}).")
    book.heading("What to use")
    book.text(recommend(run, alarms))
    book.heading("Alarms")
    if alarms:
        book.table(alarm_table(alarms))
    else:
        book.text("No mechanism of failure was found at any checkpoint.")
    book.heading("The classifier")
    book.table(classifier_table(run))
    auc, phase_end = [(int(figures.place(run, c)), c.auc) for c in run], None
    if history is not None:
        book.table(history_table(history))
        auc = [(epoch.epoch, epoch.auc) for epoch in history.epochs]
        phase_end = figures.place(run, figures.named(run, ends[0]))
    book.heading("Consistency")
    with figures.trajectories(run, alarms, auc, phase_end) as figure:
        book.figure(figure, "trajectories", "C-Score over training beside AUC; red numbers are alarms.")
    book.table(overall_table(run))
    book.table(class_table(run, ends))
    with figures.ends(run, list(dict.fromkeys(ends))) as figure:
        book.figure(figure, "ends", f"C-Score by method and class at {ends[0]} and {ends[1]}.")
    if ends[0] != ends[1]:
        with figures.net_change(run, ends) as figure:
            book.figure(figure, "net-change", f"What changed from {ends[0]} to {ends[1]}.")
    with figures.by_class(run, phase_end) as figure:
        book.figure(figure, "by-class", "C-Score of each class with its 95 % interval.")
    if swept:
        book.heading("How deep to look")
        book.table(depth_table(swept))


def introduction(run: Trajectory, held_out: float | None) -> str:
    last = run.checkpoints[-1]
    sizes = ", ".join(f"{run.class_name(c)} {state.total}" for c, state in sorted(last.classes.items()))
    of = f" held out ({held_out:.0%} of each class)" if held_out is not None else ""
    return (
        f"{sum(s.total for s in last.classes.values())} pictures{of}: {sizes}. "
        f"{len(run)} checkpoints, {len(figures.methods(run))} methods. A C-Score of 1 means that the maps of "
        "all correctly classified pictures of a class are the same, 0 that no two of them overlap."
    )


class Candidate(NamedTuple):
    """A checkpoint with a method, and the class where it is worst."""

    checkpoint: CheckpointState
    method: str
    label: int
    score: CScore

    @property
    def floor(self) -> float:
        low = self.score.interval[0]
        return self.score.value if math.isnan(low) else low


def candidates(run: Trajectory, alarms: Sequence[Alarm]) -> list[Candidate]:
    """What may be recommended, best first."""
    best, found = best_auc(run), []
    for checkpoint in run:
        slack = Z95 * difference_error(checkpoint, best)
        if math.isnan(checkpoint.auc) or checkpoint.auc < best.auc - slack:
            continue
        raised = {a.method for a in alarms if a.checkpoint == checkpoint.name}
        for method, state in checkpoint.methods.items():
            complete = all(not math.isnan(s.value) and s.n >= 2 for s in state.classes.values())
            if complete and not raised & {None, method}:
                label, score = min(state.classes.items(), key=lambda item: item[1].value)
                found.append(Candidate(checkpoint, method, label, score))
    return sorted(found, key=lambda one: -one.floor)


def best_auc(run: Trajectory) -> CheckpointState:
    return max(run, key=lambda c: -1 if math.isnan(c.auc) else c.auc)


def recommend(run: Trajectory, alarms: Sequence[Alarm]) -> str:
    """One paragraph that names a checkpoint and a method, or says why there is none."""
    found, best = candidates(run, alarms), best_auc(run)
    if not found:
        return (
            f"No checkpoint can be recommended: wherever AUC is within sampling error of its best "
            f"({best.auc:.3f} at {best.name}), every method has an alarm or a class without a score. "
            "See the alarms for what to do."
        )
    one = found[0]
    low, high = one.score.interval
    interval = "" if math.isnan(low) else f" (95 % {low:.3f} to {high:.3f})"
    beside, gain = " No other method passes.", ""
    if second := next((c for c in found if c.method != one.method), None):
        beside = f" Next comes {second.method} at {second.checkpoint.name}: {second.score.value:.3f}."
    if one.checkpoint is not best:
        gain = f" AUC is best at {best.name} ({best.auc:.3f}), not by more than sampling error."
    return (
        f"Take the weights of **{one.checkpoint.name}** and explain them with **{one.method}**: AUC "
        f"{one.checkpoint.auc:.3f}, no alarm, and in its worst class ({run.class_name(one.label)}, "
        f"{one.score.n} pictures) a C-Score of {one.score.value:.3f}{interval}, the highest floor of "
        f"{len(found)} candidates.{beside}{gain} Consistency is not correctness: maps may agree on the wrong "
        "place, so look at some, and localise where there are boxes."
    )


def alarm_table(alarms: Sequence[Alarm]) -> Table:
    heads = ("checkpoint", "mechanism", "where", "severity", "what and what to do", "AUC tells at")
    rows = tuple(
        (a.checkpoint, f"{a.mechanism} {a.name}", a.where, a.severity, a.sentence, a.auc_tells_at or "never")
        for a in alarms
    )
    note = f"Thresholds and their reasons: docs/alarms.md. {Thresholds()}"
    return Table("alarms", "Alarms, in the order of training", tuple(map(Column, heads)), rows, note)


def classifier_table(run: Trajectory) -> Table:
    labels = figures.labels(run)
    lists = (Column(f"gold list, {run.class_name(c)}") for c in labels)
    columns = Column("checkpoint"), better("AUC"), better("accuracy"), *lists
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (c.name, c.auc, c.accuracy, *(f"{c.classes[k].gold} of {c.classes[k].total}" for k in labels))
        for c in run
    )
    title = "The classifier at every checkpoint, and whom its maps are compared for"
    return Table("classifier", title, columns, rows)


def history_table(history: History) -> Table:
    columns = (
        Column("epoch", "d"), Column("phase"), Column("loss", ".4f"), Column("accuracy"), Column("AUC"),
        Column("learning rate", ".2e"), Column("seconds", ".1f"),
    )  # fmt: skip
    rows = tuple((e.epoch, e.phase, e.loss, e.accuracy, e.auc, e.lr, e.seconds) for e in history.epochs)
    return Table("training", "Every epoch of training, scored on the held-out pictures", columns, rows)


def overall_table(run: Trajectory) -> Table:
    rows = tuple(
        (m, *(c.methods[m].overall.value if m in c.methods else None for c in run))
        for m in figures.methods(run)
    )
    columns = Column("method"), *(better(c.name) for c in run)
    return Table("overall", "C-Score over all classes, weighted by their gold lists", columns, rows)


def class_table(run: Trajectory, ends: tuple[str, str]) -> Table:
    first, last = (figures.named(run, name) for name in ends)
    columns = (
        Column("method"), Column("class"), better(ends[0]), Column("n", "d"),
        better(ends[1]), Column("n at the end", "d"), Column("change", "+.3f"),
    )  # fmt: skip
    rows = []
    for method in figures.methods(run):
        for label in sorted(last.classes):
            old, new = (c.methods[method].classes[label] for c in (first, last))
            cells = as_value(old), old.n, as_value(new), new.n, new.value - old.value
            rows.append((method, run.class_name(label), *cells))
    note = "n: pictures of the class that are recognised with a probability of at least one half."
    return Table("by-class", f"C-Score by class at {ends[0]} and {ends[1]}", columns, tuple(rows), note)


def depth_table(swept: Mapping[str, RunFolder]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for layer, folder in swept.items():
        for checkpoint in (run := Trajectory.from_run(folder)):
            (state,) = checkpoint.methods.values()
            known = [
                (s.value, run.class_name(c)) for c, s in state.classes.items() if not math.isnan(s.value)
            ]
            worst = min(known, key=itemgetter(0), default=(None, ""))
            rows.append((layer, checkpoint.name, as_value(state.overall), *worst, state.overall.degenerate))
    columns = (
        Column("layer"), Column("checkpoint"), better("C-Score, all classes"), Column("worst class"),
        Column("which"), Column("empty maps"),
    )  # fmt: skip
    note = "From early to late layers; the last one is where the other tables look."
    return Table("depth", "Grad-CAM's C-Score at every depth of the network", columns, tuple(rows), note)


def as_value(score: CScore) -> Value:
    return Value(score.value, score.interval, score.n)
