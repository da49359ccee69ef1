"""What a C-Score study says: tables, figures, alarms, the sweep over depths, and what to use.

The recommendation follows one rule. Candidates are a checkpoint whose AUC is not below the best by more than
sampling error, with a method about which no alarm was raised there. The best is the one whose worst class is
surely best: the highest lower end of the 95 % interval, taken over the class where it is lowest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from heatproof.images import Failure
from heatproof.metrics.consistency import CScore
from heatproof.report.book import Book
from heatproof.report.figures import cscore as figures
from heatproof.store import RunFolder
from heatproof.studies.cscore import tables
from heatproof.studies.cscore.tables import best_auc
from heatproof.train.recipe import History
from heatproof.verdict.alarms import Alarm, find_alarms
from heatproof.verdict.auc import auc_difference
from heatproof.verdict.epochs import early_warning, epoch_flag, gradient_jumps
from heatproof.verdict.trajectory import CheckpointState, Trajectory


def write(
    book: Book,
    folder: RunFolder,
    history: History | None,
    ends: tuple[str, str],
    swept: Mapping[str, RunFolder],
    held_out: float | None,
    failures: Sequence[Failure] = (),
    places: bool = False,
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
        book.table(tables.alarm_table(alarms))
    else:
        book.text("No mechanism of failure was found at any checkpoint.")
    book.heading("The classifier")
    book.table(tables.classifier_table(run))
    auc, phase_end = [(int(figures.place(run, c)), c.auc) for c in run], None
    if history is not None:
        book.text(flagged_epochs(run, history))
        book.table(tables.history_table(history, len(figures.labels(run))))
        auc = [(epoch.epoch, epoch.auc) for epoch in history.epochs]
        phase_end = figures.place(run, figures.named(run, ends[0]))
    book.heading("Consistency")
    logged = history is not None and any(epoch.gradients for epoch in history.epochs)
    norms = [(e.epoch, e.gradients) for e in history.epochs] if history is not None and logged else []
    with figures.trajectories(run, alarms, auc, phase_end, norms) as figure:
        under = " Below: the norm of each layer's gradients and, thick, of all." if logged else ""
        caption = f"C-Score over training beside AUC; red numbers are alarms.{under}"
        book.figure(figure, "trajectories", caption)
    book.table(tables.overall_table(run, ends))
    book.table(tables.classes_table(run))
    book.table(tables.gap_table(run))
    book.table(tables.class_table(run, ends))
    with figures.ends(run, list(dict.fromkeys(ends))) as figure:
        book.figure(figure, "ends", f"C-Score by method and class at {ends[0]} and {ends[1]}.")
    if ends[0] != ends[1]:
        with figures.net_change(run, ends) as figure:
            book.figure(figure, "net-change", f"What changed from {ends[0]} to {ends[1]}.")
    with figures.by_class(run, phase_end) as figure:
        book.figure(figure, "by-class", "C-Score of each class with its 95 % interval.")
    if places:
        book.heading("Consistent and correct?")
        book.table(tables.place_table(folder, run))
    if history is not None and logged:
        book.heading("Gradients")
        book.text(gradient_warning(run, history, alarms))
        book.table(tables.gradient_table(history))
    if swept:
        book.heading("How deep to look")
        book.table(tables.depth_table(swept))
        with figures.depths({layer: Trajectory.from_run(one) for layer, one in swept.items()}) as figure:
            book.figure(figure, "depth", "C-Score of every CAM from early to late layers.")


def introduction(run: Trajectory, held_out: float | None) -> str:
    last = run.checkpoints[-1]
    sizes = ", ".join(f"{run.class_name(c)} {state.total}" for c, state in sorted(last.classes.items()))
    of = f" held out ({held_out:.0%} of each class)" if held_out is not None else ""
    return (
        f"{sum(s.total for s in last.classes.values())} pictures{of}: {sizes}. "
        f"{len(run)} checkpoints, {len(figures.methods(run))} methods. A C-Score of 1 means that the maps of "
        "all correctly classified pictures of a class are the same, 0 that no two of them overlap."
    )


def flagged_epochs(run: Trajectory, history: History) -> str:
    """Which epochs AUC or accuracy tells about, also between the checkpoints."""
    classes = len(figures.labels(run))
    flags = {e.epoch: flag for e in history.epochs if (flag := epoch_flag(e.auc, e.accuracy, classes))}
    if not flags:
        return f"None of {len(history)} epochs has an AUC below 0.5, or fewer right answers than guessing."
    said = "; ".join(f"epoch {epoch}: {flag}" for epoch, flag in flags.items())
    return f"{len(flags)} of {len(history)} epochs are flagged ({said})."


def gradient_warning(run: Trajectory, history: History, alarms: Sequence[Alarm]) -> str:
    """Whether jumps of the gradients come before alarms, and before epochs that are flagged."""
    epochs, classes = [e.epoch for e in history.epochs], len(figures.labels(run))
    jumps = gradient_jumps(history.epochs)
    raised = [a.epoch for a in alarms if a.epoch is not None]
    flagged = [e.epoch for e in history.epochs if epoch_flag(e.auc, e.accuracy, classes)]
    tested = ((raised, "an alarm"), (flagged, "a flag"))
    both = (early_warning(epochs, jumps, at, what).sentence for at, what in tested)
    return f"Do the gradients warn early? {' '.join(both)}"


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
    best = best_auc(run)
    good = (
        c for c in run if not math.isnan(c.auc) and (c is best or not auc_difference(c, best).surely_below)
    )
    found = [one for checkpoint in good for one in usable(checkpoint, alarms)]
    return sorted(found, key=lambda one: -one.floor)


def usable(checkpoint: CheckpointState, alarms: Sequence[Alarm]) -> list[Candidate]:
    """The methods of a checkpoint without an alarm and with a score for every class."""
    raised = {a.method for a in alarms if a.checkpoint == checkpoint.name}
    found = []
    for method, state in checkpoint.methods.items():
        complete = all(not math.isnan(s.value) and s.n >= 2 for s in state.classes.values())
        if complete and not raised & {None, method}:
            label, score = min(state.classes.items(), key=lambda item: item[1].value)
            found.append(Candidate(checkpoint, method, label, score))
    return found


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
