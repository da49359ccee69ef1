"""The tables of a C-Score study, each as the paper prints it and with what it leaves out: n and intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from operator import itemgetter
from statistics import fmean

from heatproof.metrics.consistency import CScore
from heatproof.report.figures import cscore as figures
from heatproof.report.tables import Cell, Column, Table, Value, number
from heatproof.store import RunFolder
from heatproof.studies.skeleton import mean_value
from heatproof.train.recipe import Epoch, History
from heatproof.verdict.alarms import Alarm, Thresholds
from heatproof.verdict.auc import auc_difference
from heatproof.verdict.epochs import epoch_flag, gradient_jumps, grown_layers, whole_norm
from heatproof.verdict.trajectory import CheckpointState, MethodState, Trajectory

better = partial(Column, higher_is_better=True)
PLACES = {"pointing": "hits the object", "inside": "share inside", "mask_iou": "IoU at the budget"}


def as_value(score: CScore) -> Value:
    return Value(score.value, score.interval, score.n)


def best_auc(run: Trajectory) -> CheckpointState:
    return max(run, key=lambda c: -1 if math.isnan(c.auc) else c.auc)


def alarm_table(alarms: Sequence[Alarm]) -> Table:
    heads = ("checkpoint", "mechanism", "where", "severity", "what and what to do", "AUC tells at")
    rows = tuple(
        (a.checkpoint, f"{a.mechanism} {a.name}", a.where, a.severity, a.sentence, a.auc_tells_at or "never")
        for a in alarms
    )
    note = f"Thresholds and their reasons: docs/alarms.md. {Thresholds()}"
    return Table("alarms", "Alarms, in the order of training", tuple(map(Column, heads)), rows, note)


def classifier_table(run: Trajectory) -> Table:
    """Every checkpoint, its AUC held against the best one image by image."""
    labels, best = figures.labels(run), best_auc(run)
    lists = (Column(f"gold list, {run.class_name(c)}") for c in labels)
    against = Column("AUC less best", "+.4f"), Column("p", ".3f")
    columns = Column("checkpoint"), better("AUC"), *against, better("accuracy"), *lists
    rows = []
    for c in run:
        found = auc_difference(c, best)
        tested: tuple[Cell, Cell] = (None, None) if c is best else (found.value, found.p)
        sizes = (f"{c.classes[k].gold} of {c.classes[k].total}" for k in labels)
        rows.append((c.name, c.auc, *tested, c.accuracy, *sizes))
    note = f"p: whether AUC differs from the best, {best.name}, on the same pictures (DeLong's paired test)."
    title = "The classifier at every checkpoint, and whom its maps are compared for"
    return Table("classifier", title, columns, tuple(rows), note)


def history_table(history: History, classes: int) -> Table:
    """Table 2: every epoch, also those whose weights were not kept."""
    columns = (
        Column("epoch", "d"), Column("phase"), Column("loss", ".4f"), Column("accuracy"), Column("AUC"),
        Column("learning rate", ".2e"), Column("seconds", ".1f"), Column("flag"),
    )  # fmt: skip
    rows = tuple(
        (e.epoch, e.phase, e.loss, e.accuracy, e.auc, e.lr, e.seconds, epoch_flag(e.auc, e.accuracy, classes))
        for e in history.epochs
    )
    return Table("training", "Every epoch of training, scored on the held-out pictures", columns, rows)


def overall_table(run: Trajectory, ends: tuple[str, str]) -> Table:
    """Tables 3 to 5: the score over all classes, its change over the second phase, and the average."""
    first, last = (figures.named(run, name) for name in ends)
    rows: list[tuple[Cell, ...]] = []
    for m in figures.methods(run):
        values = [c.methods[m].overall.value if m in c.methods else math.nan for c in run]
        rows.append((m, *values, change(first, last, m)))
    columns = Column("method"), *(better(c.name) for c in run), Column("change", "+.3f")
    averages: list[Cell] = [average(number(row[j]) for row in rows) for j in range(1, len(columns))]
    note = f"change: {ends[1]} less {ends[0]}. The last row is the plain mean over the methods."
    title = "C-Score over all classes, weighted by their gold lists"
    every: tuple[tuple[Cell, ...], ...] = (*rows, ("average", *averages))
    return Table("overall", title, columns, every, note, unranked=frozenset({len(rows)}))


def change(first: CheckpointState, last: CheckpointState, method: str) -> float:
    states = [c.methods.get(method) for c in (first, last)]
    old, new = (math.nan if state is None else state.overall.value for state in states)
    return new - old


def average(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return fmean(known) if known else math.nan


def classes_table(run: Trajectory) -> Table:
    """Tables 6 to 8: the score of each class at every checkpoint."""
    rows = [
        (run.class_name(label), m, *(_of_class(c, m, label) for c in run))
        for label in figures.labels(run)
        for m in figures.methods(run)
    ]
    columns = Column("class"), Column("method"), *(Column(c.name) for c in run)
    note = "n of each number is the gold list of its class. An empty list has no score: –."
    return Table("classes", "C-Score of each class at every checkpoint", columns, tuple(rows), note)


def _of_class(checkpoint: CheckpointState, method: str, label: int) -> Cell:
    state = checkpoint.methods.get(method)
    score = None if state is None else state.classes.get(label)
    return None if score is None else Value(figures.defined(score), score.interval, score.n)


def gap_table(run: Trajectory) -> Table:
    """The class gap as a number: how far the best class is above the worst."""
    rows: list[tuple[Cell, ...]] = []
    for m in figures.methods(run):
        gaps = [class_gap(c.methods[m]) if m in c.methods else math.nan for c in run]
        rows.append((m, *gaps))
    columns = Column("method"), *(Column(c.name, higher_is_better=False) for c in run)
    note = "Classes with two pictures or more in their gold list; – where fewer than two have so many."
    title = "Class gap: C-Score of the most consistent class less that of the least"
    return Table("gaps", title, columns, tuple(rows), note)


def class_gap(state: MethodState) -> float:
    known = [score.value for score in state.classes.values() if score.n >= 2 and not math.isnan(score.value)]
    return max(known) - min(known) if len(known) > 1 else math.nan


def worst_class(state: MethodState) -> tuple[int, CScore] | None:
    """Where the method agrees least, of the classes that have a score."""
    known = [(c, s) for c, s in state.classes.items() if s.n >= 2 and not math.isnan(s.value)]
    return min(known, key=lambda item: item[1].value, default=None)


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
    note = "n: pictures of the class that are in its gold list."
    return Table("by-class", f"C-Score by class at {ends[0]} and {ends[1]}", columns, tuple(rows), note)


def depth_table(swept: Mapping[str, RunFolder]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for layer, folder in swept.items():
        for checkpoint in (run := Trajectory.from_run(folder)):
            for method, state in checkpoint.methods.items():
                known = [
                    (s.value, run.class_name(c)) for c, s in state.classes.items() if not math.isnan(s.value)
                ]
                worst = min(known, key=itemgetter(0), default=(None, ""))
                place = layer, checkpoint.name, method, as_value(state.overall)
                rows.append((*place, *worst, state.overall.degenerate))
    columns = (
        Column("layer"), Column("checkpoint"), Column("method"), Column("C-Score, all classes"),
        Column("worst class"), Column("which"), Column("empty maps"),
    )  # fmt: skip
    note = "From early to late layers; the last one is where the other tables look."
    return Table("depth", "C-Score of every CAM at every depth of the network", columns, tuple(rows), note)


def place_table(folder: RunFolder, run: Trajectory) -> Table:
    """Consistency beside correctness, on the pictures of the gold lists of the last checkpoint."""
    last = run.checkpoints[-1]
    marks = ", ".join("?" for _ in PLACES)
    rows = folder.scores().sql(
        "select s.method, s.label, s.metric, s.value from scores s join scores p on p.image = s.image and "
        "p.checkpoint = s.checkpoint and p.model = s.model and p.metric = 'predicted' and p.value = s.label "
        f"where s.checkpoint = ? and s.image <> '' and s.metric in ({marks}) order by s.image",
        [last.name, *PLACES],
    )
    found: dict[tuple[str, int, str], list[float]] = {}
    for row in rows:
        found.setdefault((row["method"], row["label"], row["metric"]), []).append(row["value"])
    table: list[tuple[Cell, ...]] = [
        (
            method, run.class_name(label), as_value(score),
            *(mean_value(found.get((method, label, metric), [])) for metric in PLACES),
        )
        for method, state in last.methods.items()
        for label, score in state.classes.items()
    ]  # fmt: skip
    columns = Column("method"), Column("class"), better("C-Score"), *map(better, PLACES.values())
    note = (
        "The right-hand columns: pictures of the class that are recognised, against their boxes or masks; a "
        "share of pictures whose hottest pixel is on the object, a share of the hottest fifth of the pixels "
        "inside it, its IoU. Maps that agree on the wrong place have a high C-Score and low ones there."
    )
    title = f"Consistent and correct? At {last.name}"
    return Table("places", title, columns, tuple(table), note)


def gradient_table(history: History) -> Table:
    """The norm over all layers at every epoch, where it jumps, and which layers grew most."""
    jumps, epochs = gradient_jumps(history.epochs), history.epochs
    grew: dict[int, list[str]] = {b.epoch: _grew(a, b) for a, b in pairwise(epochs)}
    columns = (
        Column("epoch", "d"), Column("phase"), Column("norm, all layers", ".3g"),
        Column("highest of a layer and step", ".3g"), Column("jump"), Column("layers that grew most"),
    )  # fmt: skip
    rows = tuple(
        (
            e.epoch, e.phase, whole_norm(e.gradients),
            max((n.highest for n in e.gradients.values()), default=math.nan),
            "jump" if e.epoch in jumps else "", ", ".join(grew.get(e.epoch, [])),
        )
        for e in epochs
    )  # fmt: skip
    note = "A jump: at least twice the median of the five epochs before, beyond three deviations."
    return Table("gradients", "How large the gradients are", columns, rows, note)


def _grew(before: Epoch, now: Epoch) -> list[str]:
    return grown_layers(before.gradients, now.gradients) if before.phase == now.phase else []
