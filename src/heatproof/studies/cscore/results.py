"""Results of C-Score studies: tables as data, the checkpoint and method to use, the network to use.

One network: candidates are a checkpoint whose AUC is not below the best by more than sampling error, with a
method that has no alarm there. The best has the highest lower end of the 95 % interval in its worst class.

Several networks are judged by their last weights, which are those one would deploy:

    not recommended          AUC is surely below its own best or that of the best network, or below 0.75; or
                             a class has lost its gold list; or no method is free of alarms
    with a choice of method  some methods have an alarm: use another one
    recommended              no method has one

Of those that remain, the best is the network whose best method has the highest worst class. AUCs of networks
on the same images are compared image by image (delong1988auc), p corrected over the pairs (Holm). On the
published tables this gives the paper's answer: DenseNet201; InceptionV3 with a choice of method; not
ResNet50V2.

New weights against a reference: a score has fallen where the two 95 % intervals do not meet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import combinations, pairwise
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from heatproof.errors import InputError
from heatproof.metrics.consistency import CScore
from heatproof.report.figures.cscore import labels, methods, named, score, scored
from heatproof.report.tables import Cell, Column, Table, TableSpec, Value, number
from heatproof.store import RunFolder
from heatproof.studies.common import mean_value
from heatproof.train.recipe import Epoch, History
from heatproof.verdict.alarms import Alarm, Thresholds, find_alarms
from heatproof.verdict.epochs import epoch_flag, gradient_jumps, grown_layers, whole_norm
from heatproof.verdict.follow import holm
from heatproof.verdict.trajectory import (
    AucDifference,
    CheckpointState,
    MethodState,
    Trajectory,
    auc_difference,
    auc_falls,
)

better = partial(Column, higher_is_better=True)
PLACES = {"pointing": "hits the object", "inside": "share inside", "mask_iou": "IoU at the budget"}
RECOMMENDED, CHOICE, REFUSED = "recommended", "with a choice of method", "not recommended"


def as_value(score: CScore) -> Value:
    return Value(score.value, score.interval, score.n)


def average(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return fmean(known) if known else math.nan


def best_auc(run: Trajectory) -> CheckpointState:
    return max(run, key=lambda c: -1 if math.isnan(c.auc) else c.auc)


def changes(run: Trajectory, ends: tuple[str, str]) -> dict[str, float]:
    """By method: C-Score over all classes at the second checkpoint minus that at the first."""
    first, last = (named(run, name) for name in ends)
    return {method: score(last, method) - score(first, method) for method in methods([run])}


def compared_classes(state: MethodState) -> dict[int, CScore]:
    """Classes with a score of at least two images, the lowest first."""
    known = {c: s for c, s in state.classes.items() if s.n >= 2 and not math.isnan(s.value)}
    return dict(sorted(known.items(), key=lambda item: item[1].value))


def class_gap(state: MethodState) -> float:
    values = [score.value for score in compared_classes(state).values()]
    return values[-1] - values[0] if len(values) > 1 else math.nan


def flag_of(epoch: Epoch, run: Trajectory) -> str:
    return epoch_flag(epoch.auc, epoch.accuracy, len(labels([run])))


ALARMS = TableSpec(
    "alarms", "Alarms, in the order of training",
    ("checkpoint", "mechanism", "where", "severity", "what and what to do", "AUC tells at"),
    lambda a: (a.checkpoint, f"{a.mechanism} {a.name}", a.where, a.severity, a.sentence,
               a.auc_tells_at or "never"),
    f"Thresholds and their reasons: docs/alarms.md. {Thresholds()}",
)  # fmt: skip
TRAINING = TableSpec(  # table 2 of the paper
    "training", "Every epoch of training, scored on the held-out pictures",
    (Column("epoch", "d"), "phase", Column("loss", ".4f"), "accuracy", "AUC", Column("learning rate", ".2e"),
     Column("seconds", ".1f"), "flag"),
    lambda e, flag: (e.epoch, e.phase, e.loss, e.accuracy, e.auc, e.lr, e.seconds, flag),
)  # fmt: skip
DEPTH = TableSpec(
    "depth", "C-Score of every CAM at every depth of the network",
    ("layer", "checkpoint", "method", "C-Score, all classes", "worst class", "which", "empty maps"),
    lambda layer, checkpoint, method, overall, worst: (
        layer, checkpoint.name, method, as_value(overall), *worst, overall.degenerate),
    "From early to late layers; the last one is where the other tables look.",
)  # fmt: skip
GRADIENTS = TableSpec(
    "gradients", "How large the gradients are",
    (Column("epoch", "d"), "phase", Column("norm, all layers", ".3g"),
     Column("highest of a layer and step", ".3g"), "jump", "layers that grew most"),
    lambda e, jump, grown: (
        e.epoch, e.phase, whole_norm(e.gradients),
        max((n.highest for n in e.gradients.values()), default=math.nan), jump, ", ".join(grown)),
    "A jump: at least twice the median of the five epochs before, beyond three deviations.",
)  # fmt: skip
NETWORKS = TableSpec(
    "networks", "The networks",
    ("network", "answer", "why", better("AUC"), better("accuracy"), better("C-Score, mean of methods"),
     Column("mean change", "+.3f", True), Column("widest class gap", higher_is_better=False),
     Column("alarms", "d"), Column("critical", "d"), Column("epochs flagged", "d")),
    lambda n, stand: (
        n.name, stand.answer, stand.why, n.last.auc, n.last.accuracy,
        average(state.overall.value for state in n.last.methods.values()), average(n.changes.values()),
        max((gap for m in n.last.methods.values() if not math.isnan(gap := class_gap(m))), default=math.nan),
        len(n.alarms), sum(a.severity == "critical" for a in n.alarms),
        sum(bool(flag_of(e, n.run)) for e in n.history.epochs) if n.history else None),
    "AUC to class gap: last weights. Alarms: at all checkpoints. Changes: over the second phase.",
)  # fmt: skip
METHODS = TableSpec(
    "methods", "Every method of every network, at its last weights",
    ("network", "method", better("last C-Score"), Column("change", "+.3f"), better("worst class"), "which",
     Column("class gap", higher_is_better=False), "alarms"),
    lambda n, method, state, worst: (
        n.name, method, as_value(state.overall), n.changes.get(method, math.nan),
        *((as_value(worst[1]), n.run.class_name(worst[0])) if worst else (None, "")), class_gap(state),
        ", ".join(f"{a.mechanism} at {a.checkpoint}" for a in n.alarms if a.method in (method, None))),
    "Alarms by mechanism: 1 gold-list collapse, 2 attribution collapse, 3 class masking.",
)  # fmt: skip
AUC = TableSpec(
    "auc", "Is one network's AUC above another's?",
    ("network", "beside", Column("AUC", ".4f"), Column("AUC beside", ".4f"), Column("difference", "+.4f"),
     Column("95 % from", "+.4f"), Column("to", "+.4f"), Column("p", ".3f"), "same pictures"),
    lambda a, b, apart, p: (
        a.name, b.name, a.last.auc, b.last.auc, apart.value, *apart.interval, p,
        "yes" if apart.paired else "no"),
    "DeLong's paired test where both were scored on the same pictures; p by Holm over the pairs.",
    marked=False,
)  # fmt: skip
WEIGHTS = TableSpec(
    "classifier", "The classifier, before and now", ("weights", "AUC", "accuracy", "gold lists"),
    lambda run, c: (c.name, c.auc, c.accuracy, ", ".join(
        f"{run.class_name(k)} {s.gold} of {s.total}" for k, s in sorted(c.classes.items()))),
)  # fmt: skip
SCORES = TableSpec(
    "scores", "C-Score on the same pictures", ("method", "class", "reference", "new", "change", ""),
    lambda move, name: (move.method, name, as_value(move.old), as_value(move.new),
                        f"{move.new.value - move.old.value:+.3f}", "fell" if move.fell else ""),
)  # fmt: skip


def classifier_table(run: Trajectory) -> Table:
    """Every checkpoint, its AUC compared with the best one image by image."""
    best = best_auc(run)
    columns = (
        Column("checkpoint"), better("AUC"), Column("AUC less best", "+.4f"), Column("p", ".3f"),
        better("accuracy"), *(Column(f"gold list, {run.class_name(c)}") for c in labels([run])),
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for c in run:
        apart = auc_difference(c, best)
        tested = (None, None) if c is best else (apart.value, apart.p)
        sizes = (f"{c.classes[k].gold} of {c.classes[k].total}" for k in labels([run]))
        rows.append((c.name, c.auc, *tested, c.accuracy, *sizes))
    note = f"p: whether AUC differs from the best, {best.name}, on the same pictures (DeLong's paired test)."
    title = "The classifier at every checkpoint, and whom its maps are compared for"
    return Table("classifier", title, columns, tuple(rows), note)


def overall_table(run: Trajectory, ends: tuple[str, str]) -> Table:
    """Tables 3 to 5: the score over all classes, its change over the second phase, and the average."""
    rows: list[tuple[Cell, ...]] = [
        (m, *(score(c, m) for c in run), change) for m, change in changes(run, ends).items()
    ]
    columns = Column("method"), *(better(c.name) for c in run), Column("change", "+.3f")
    averages = (average(number(row[j]) for row in rows) for j in range(1, len(columns)))
    note = f"change: {ends[1]} less {ends[0]}. The last row is the plain mean over the methods."
    title, last = "C-Score over all classes, weighted by their gold lists", frozenset({len(rows)})
    return Table("overall", title, columns, (*rows, ("average", *averages)), note, unranked=last)


def classes_table(run: Trajectory) -> Table:
    """Tables 6 to 8: the score of each class at every checkpoint."""

    def cell(c: CheckpointState, method: str, label: int) -> Cell:
        known = scored(c, method, label)
        return None if known is None else Value(score(c, method, label), known.interval, known.n)

    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (run.class_name(label), m, *(cell(c, m, label) for c in run))
        for label in labels([run]) for m in methods([run])
    )  # fmt: skip
    columns = Column("class"), Column("method"), *(Column(c.name) for c in run)
    note = "n of each number is the gold list of its class. An empty list has no score: –."
    return Table("classes", "C-Score of each class at every checkpoint", columns, rows, note)


def gap_table(run: Trajectory) -> Table:
    """How far the best class is above the worst."""
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (m, *(class_gap(c.methods[m]) if m in c.methods else math.nan for c in run)) for m in methods([run])
    )
    columns = Column("method"), *(Column(c.name, higher_is_better=False) for c in run)
    note = "Classes with two pictures or more in their gold list; – where fewer than two have so many."
    title = "Class gap: C-Score of the most consistent class less that of the least"
    return Table("gaps", title, columns, rows, note)


def class_table(run: Trajectory, ends: tuple[str, str]) -> Table:
    spec = TableSpec(
        "by-class", f"C-Score by class at {ends[0]} and {ends[1]}",
        ("method", "class", better(ends[0]), Column("n", "d"), better(ends[1]), Column("n at the end", "d"),
         Column("change", "+.3f")),
        lambda m, k, old, new: (
            m, run.class_name(k), as_value(old), old.n, as_value(new), new.n, new.value - old.value),
        "n: pictures of the class that are in its gold list.",
    )  # fmt: skip
    first, last = (named(run, name) for name in ends)
    pairs = ((m, k) for m in methods([run]) for k in sorted(last.classes))
    return spec.fill((m, k, *(c.methods[m].classes[k] for c in (first, last))) for m, k in pairs)


def depth_table(swept: Mapping[str, Trajectory]) -> Table:
    rows = []
    for layer, run in swept.items():
        for checkpoint in run:
            for method, state in checkpoint.methods.items():
                known = [(s.value, run.class_name(c)) for c, s in state.classes.items() if s.value == s.value]
                worst = min(known, key=itemgetter(0), default=(None, ""))
                rows.append((layer, checkpoint, method, state.overall, worst))
    return DEPTH.fill(rows)


def place_table(folder: RunFolder, run: Trajectory) -> Table:
    """Consistency beside correctness, on the images of the gold lists of the last checkpoint."""
    last = run.checkpoints[-1]
    marks = ", ".join("?" for _ in PLACES)
    rows = folder.scores().sql(
        "select s.method, s.label, s.metric, s.value from scores s join scores p on p.image = s.image and "
        "p.checkpoint = s.checkpoint and p.model = s.model and p.metric = 'predicted' and p.value = s.label "
        f"where s.checkpoint = ? and s.image <> '' and s.metric in ({marks}) order by s.image",
        [last.name, *PLACES],
    )
    values: dict[tuple[str, int, str], list[float]] = {}
    for row in rows:
        values.setdefault((row["method"], row["label"], row["metric"]), []).append(row["value"])
    table: tuple[tuple[Cell, ...], ...] = tuple(
        (method, run.class_name(label), as_value(of),
         *(mean_value(values.get((method, label, metric), [])) for metric in PLACES))
        for method, state in last.methods.items() for label, of in state.classes.items()
    )  # fmt: skip
    columns = Column("method"), Column("class"), better("C-Score"), *map(better, PLACES.values())
    note = (
        "The right-hand columns: pictures of the class that are recognised, against their boxes or masks; a "
        "share of pictures whose hottest pixel is on the object, a share of the hottest fifth of the pixels "
        "inside it, its IoU. Maps that agree on the wrong place have a high C-Score and low ones there."
    )
    return Table("places", f"Consistent and correct? At {last.name}", columns, table, note)


def gradient_table(history: History) -> Table:
    """The norm over all layers at every epoch, where it jumps, and which layers grew most."""
    jumps = gradient_jumps(history.epochs)
    grew = {
        now.epoch: grown_layers(before.gradients, now.gradients)
        for before, now in pairwise(history.epochs) if before.phase == now.phase
    }  # fmt: skip
    return GRADIENTS.fill(
        (e, "jump" if e.epoch in jumps else "", grew.get(e.epoch, [])) for e in history.epochs
    )


class Candidate(NamedTuple):
    """A checkpoint with a method, and the class where its score is lowest."""

    checkpoint: CheckpointState
    method: str
    label: int
    score: CScore

    @property
    def floor(self) -> float:
        low = self.score.interval[0]
        return self.score.value if math.isnan(low) else low

    def text(self, run: Trajectory) -> str:
        low, high = self.score.interval
        interval = "" if math.isnan(low) else f" (95 % {low:.3f} to {high:.3f})"
        return (
            f"worst class ({run.class_name(self.label)}, {self.score.n} pictures) a C-Score of "
            f"{self.score.value:.3f}{interval}"
        )


def usable(checkpoint: CheckpointState, alarms: Sequence[Alarm]) -> list[Candidate]:
    """The methods of a checkpoint without an alarm and with a score for every class, best first."""
    raised = {a.method for a in alarms if a.checkpoint == checkpoint.name}
    known = [
        Candidate(checkpoint, method, *next(iter(compared_classes(state).items())))
        for method, state in checkpoint.methods.items()
        if len(compared_classes(state)) == len(state.classes) and not raised & {None, method}
    ]
    return sorted(known, key=lambda one: -one.floor)


def candidates(run: Trajectory, alarms: Sequence[Alarm]) -> list[Candidate]:
    """What may be recommended, best first."""
    best = best_auc(run)
    good = (
        c for c in run if not math.isnan(c.auc) and (c is best or not auc_difference(c, best).surely_below)
    )
    return sorted((one for c in good for one in usable(c, alarms)), key=lambda one: -one.floor)


def recommend(run: Trajectory, alarms: Sequence[Alarm]) -> str:
    """One paragraph that names a checkpoint and a method, or says why there is none."""
    known, best = candidates(run, alarms), best_auc(run)
    if not known:
        return (
            f"No checkpoint can be recommended: wherever AUC is within sampling error of its best "
            f"({best.auc:.3f} at {best.name}), every method has an alarm or a class without a score. "
            "See the alarms for what to do."
        )
    first, beside, gain = known[0], " No other method passes.", ""
    if second := next((c for c in known if c.method != first.method), None):
        beside = f" Next comes {second.method} at {second.checkpoint.name}: {second.score.value:.3f}."
    if first.checkpoint is not best:
        gain = f" AUC is best at {best.name} ({best.auc:.3f}), not by more than sampling error."
    return (
        f"Take the weights of **{first.checkpoint.name}** and explain them with **{first.method}**: AUC "
        f"{first.checkpoint.auc:.3f}, no alarm, and in its {first.text(run)}, the highest floor of "
        f"{len(known)} candidates.{beside}{gain} Consistency is not correctness: maps may agree on the wrong "
        "place, so look at some, and localise where there are boxes."
    )


@dataclass(frozen=True)
class Network:
    """One network's training."""

    name: str
    run: Trajectory
    ends: tuple[str, str]  # checkpoints at the end of each phase
    history: History | None = None
    pictures: str = ""  # hash of the images it was scored on

    @property
    def last(self) -> CheckpointState:
        return self.run.checkpoints[-1]

    @cached_property
    def alarms(self) -> list[Alarm]:
        return find_alarms(self.run)

    @cached_property
    def changes(self) -> dict[str, float]:
        return changes(self.run, self.ends)


class Standing(NamedTuple):
    """Whether a network can be recommended, and why not."""

    answer: str
    why: str
    best: Candidate | None  # at its last checkpoint


def read_network(folder: Path, name: str = "") -> Network:
    """From a finished study's folder, or from any run folder with a C-Score."""
    opened = RunFolder.open(folder)
    run = Trajectory.from_run(opened)
    if not len(run):
        raise InputError(f"{folder} has no checkpoint with a C-Score yet; finish it first")
    files = [place / "training" / "history.json" for place in (folder, opened.path.parent)]
    texts = [file.read_text(encoding="utf-8") for file in files if file.exists()]
    history = History.from_json(texts[0]) if texts else None
    model = opened.manifest.config.get("model", {})
    name = name or str(model.get("name") or model.get("spec") or folder.name)
    return Network(name, run, phase_ends(run, history), history, opened.manifest.data)


def phase_ends(run: Trajectory, history: History | None) -> tuple[str, str]:
    """The checkpoints at the end of phase 1 and 2; the first and the last where no phase is known."""
    first = run.checkpoints[0].name
    if history is not None and history.epochs:
        phase = history.epochs[0].phase
        until = max(e.epoch for e in history.epochs if e.phase == phase)
        first = [first, *(c.name for c in run if c.epoch is not None and c.epoch <= until)][-1]
    return first, run.checkpoints[-1].name


def difference(first: Network, second: Network) -> AucDifference:
    """Of the last AUCs."""
    return auc_difference(first.last, second.last, first.pictures == second.pictures)


def standing(network: Network, others: Sequence[Network]) -> Standing:
    """Whether a network can be recommended among the others."""
    alarms = [a for a in network.alarms if a.checkpoint == network.last.name]
    best = next(iter(usable(network.last, alarms)), None)
    auc = network.last.auc
    above = [other for other in others if other is not network and difference(network, other).surely_below]
    highest = max(above, key=lambda other: other.last.auc, default=network)
    lost = sorted({a.class_name or "" for a in alarms if a.mechanism == 1})
    about = ", ".join(sorted({a.method or "" for a in alarms}))
    rules = (
        (auc_falls(network.run)[-1], REFUSED, f"AUC fell to {auc:.3f}"),
        (auc < Thresholds().high_auc, REFUSED, f"AUC is {auc:.3f}"),
        (lost, REFUSED, f"the gold list of {', '.join(lost)} is lost"),
        (best is None, REFUSED, "every method has an alarm or a class without a score"),
        (above, REFUSED, f"AUC {auc:.3f} is surely below that of {highest.name}"),
        (alarms, CHOICE, f"not with {about}"),
        (True, RECOMMENDED, ""),
    )
    return next(Standing(answer, why, best) for holds, answer, why in rules if holds)


def recommendation(networks: Sequence[Network]) -> str:
    """One paragraph, with its evidence."""
    stands = [(one, standing(one, networks)) for one in networks]
    refused = [f"{one.name} ({s.why})" for one, s in stands if s.answer == REFUSED]
    against = f" Not recommended: {'; '.join(refused)}." if refused else ""
    left = [(s.best, one, s) for one, s in stands if s.answer != REFUSED and s.best]
    if not left:
        return f"No network can be recommended with its last weights.{against}"
    chosen = max(left, key=lambda item: item[0].floor)
    best, network, stand = chosen
    care = f" {stand.why[0].upper()}{stand.why[1:]}." if stand.why else ""
    others = [
        f"{one.name} with {its.method} ({its.score.value:.3f}; {s.answer}{', ' * bool(s.why)}{s.why})"
        for its, one, s in left
        if one is not network
    ]
    after = f" After it: {'; '.join(others)}." if others else ""
    return (
        f"Take **{network.name}** and explain it with **{best.method}**: AUC {network.last.auc:.3f}, and in "
        f"the {best.text(network.run)}, the highest of the networks' last weights."
        f"{care}{after}{against} An earlier checkpoint may be better: see each network's page."
    )


def network_table(networks: Sequence[Network]) -> Table:
    return NETWORKS.fill((one, standing(one, networks)) for one in networks)


def method_table(networks: Sequence[Network]) -> Table:
    return METHODS.fill(
        (one, method, state, next(iter(compared_classes(state).items()), None))
        for one in networks
        for method, state in one.last.methods.items()
    )


def auc_table(networks: Sequence[Network]) -> Table:
    pairs = [(a, b, difference(a, b)) for a, b in combinations(networks, 2)]
    corrected = holm({k: apart.p for k, (*_, apart) in enumerate(pairs) if not math.isnan(apart.p)})
    return AUC.fill((*pair, corrected.get(k)) for k, pair in enumerate(pairs))


def epoch_table(networks: Sequence[Network]) -> Table:
    """Table 2: AUC and accuracy of every network at every epoch, with flags."""
    histories = [(one, {e.epoch: e for e in one.history.epochs}) for one in networks if one.history]
    columns, rows = [Column("epoch", "d"), Column("phase")], []
    for one, _ in histories:
        columns += [Column(f"{one.name}, AUC", ".4f"), Column("accuracy", ".1%"), Column("flag")]
    for epoch in sorted({epoch for _, history in histories for epoch in history}):
        row: list[Cell] = [epoch, next(h[epoch].phase for _, h in histories if epoch in h)]
        for one, history in histories:
            e = history.get(epoch)
            row += (None, None, "") if e is None else (e.auc, e.accuracy, flag_of(e, one.run))
        rows.append(tuple(row))
    note = "Flags: AUC below 0.5; accuracy below guessing while AUC holds."
    return Table("epochs", "Every epoch of every network", tuple(columns), tuple(rows), note)


class Move(NamedTuple):
    """A method's score of a class, or of all classes, of the reference and of new weights."""

    method: str
    label: int | None
    old: CScore
    new: CScore

    @property
    def fell(self) -> bool:
        return not math.isnan(self.new.interval[1]) and self.new.interval[1] < self.old.interval[0]


def moves(before: CheckpointState, after: CheckpointState) -> Iterator[Move]:
    for method, state in before.methods.items():
        other = after.methods[method]
        yield Move(method, None, state.overall, other.overall)
        for label in state.classes:
            if label in other.classes:
                yield Move(method, label, state.classes[label], other.classes[label])
