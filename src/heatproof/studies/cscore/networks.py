"""Several networks on one page: which one to use, and what its second phase did to its explanations.

Each network has a study of its own (run, tables, page); here they stand side by side, as the paper ends. A
network is judged by its last weights, which are those one would deploy:

    not recommended          AUC is surely below its own best or that of the best network, or below 0.75; or
                             a class has lost its gold list; or no method is free of alarms
    with a choice of method  some methods have an alarm: use another one
    recommended              no method has one

Of those that remain, the network whose best method has the highest worst class (the lower end of its 95 %
interval). AUCs of networks that share pictures are compared image by image (delong1988auc); with several
pairs p is corrected (Holm). On the published tables this gives the paper's own answer: DenseNet201;
InceptionV3 with a choice of method; not ResNet50V2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from heatproof.errors import InputError
from heatproof.report.book import Book
from heatproof.report.figures import beside as figures
from heatproof.report.figures.cscore import methods, named
from heatproof.report.tables import Cell, Column, Table
from heatproof.store import RunFolder
from heatproof.studies.cscore.page import Candidate, usable
from heatproof.studies.cscore.tables import as_value, average, better, change, class_gap, worst_class
from heatproof.train.recipe import History
from heatproof.verdict.alarms import Alarm, Thresholds, find_alarms
from heatproof.verdict.auc import AucDifference, auc_difference, auc_falls
from heatproof.verdict.epochs import epoch_flag
from heatproof.verdict.follow import holm
from heatproof.verdict.trajectory import CheckpointState, Trajectory

RECOMMENDED, CHOICE, REFUSED = "recommended", "with a choice of method", "not recommended"


@dataclass(frozen=True)
class Network:
    """One network's training as the page sees it."""

    name: str
    run: Trajectory
    ends: tuple[str, str]  # checkpoints at the end of each phase
    history: History | None = None
    pictures: str = ""  # what it was scored on

    @property
    def last(self) -> CheckpointState:
        return self.run.checkpoints[-1]

    @property
    def alarms(self) -> list[Alarm]:
        return find_alarms(self.run)

    def changes(self) -> dict[str, float]:
        """By method, over the second phase."""
        first, last = (named(self.run, name) for name in self.ends)
        return {method: change(first, last, method) for method in methods(self.run)}


@dataclass(frozen=True)
class Standing:
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
    kept = next((p for p in (folder, opened.path.parent) if (p / "training" / "history.json").exists()), None)
    history = None
    if kept is not None:
        history = History.from_json((kept / "training" / "history.json").read_text(encoding="utf-8"))
    model = opened.manifest.config.get("model", {})
    shown = name or str(model.get("name") or model.get("spec") or folder.name)
    return Network(shown, run, phase_ends(run, history), history, opened.manifest.data)


def phase_ends(run: Trajectory, history: History | None) -> tuple[str, str]:
    """The checkpoints at the end of phase 1 and 2; the first and the last where no phase is known."""
    first = run.checkpoints[0].name
    if history is not None and history.epochs:
        phase = history.epochs[0].phase
        until = max(e.epoch for e in history.epochs if e.phase == phase)
        before = [c.name for c in run if c.epoch is not None and c.epoch <= until]
        first = before[-1] if before else first
    return first, run.checkpoints[-1].name


def difference(first: Network, second: Network) -> AucDifference:
    """Of the last AUCs."""
    return auc_difference(first.last, second.last, first.pictures == second.pictures)


def standing(network: Network, others: Sequence[Network]) -> Standing:
    """What the page says of a network beside the others."""
    alarms = [a for a in network.alarms if a.checkpoint == network.last.name]
    found = sorted(usable(network.last, alarms), key=lambda one: -one.floor)
    best = found[0] if found else None
    auc = network.last.auc
    if auc_falls(network.run)[-1]:
        return Standing(REFUSED, f"AUC fell to {auc:.3f}", best)
    if auc < Thresholds().high_auc:
        return Standing(REFUSED, f"AUC is {auc:.3f}", best)
    above = [other for other in others if other is not network and difference(network, other).surely_below]
    if lost := sorted({a.class_name or "" for a in alarms if a.mechanism == 1}):
        return Standing(REFUSED, f"the gold list of {', '.join(lost)} is lost", best)
    if best is None:
        return Standing(REFUSED, "every method has an alarm or a class without a score", None)
    if above:
        highest = max(above, key=lambda other: other.last.auc)
        return Standing(REFUSED, f"AUC {auc:.3f} is surely below that of {highest.name}", best)
    if alarms:
        about = ", ".join(sorted({a.method or "" for a in alarms}))
        return Standing(CHOICE, f"not with {about}", best)
    return Standing(RECOMMENDED, "", best)


def recommendation(networks: Sequence[Network]) -> str:
    """One paragraph, with its evidence."""
    stands = {one.name: standing(one, networks) for one in networks}
    left = [(one, s) for one in networks if (s := stands[one.name]).answer != REFUSED and s.best]
    refused = [f"{name} ({s.why})" for name, s in stands.items() if s.answer == REFUSED]
    against = f" Not recommended: {'; '.join(refused)}." if refused else ""
    if not left:
        return f"No network can be recommended with its last weights.{against}"
    network, chosen = max(left, key=lambda item: item[1].best.floor if item[1].best else -1.0)
    best = chosen.best
    assert best is not None
    low, high = best.score.interval
    interval = "" if math.isnan(low) else f" (95 % {low:.3f} to {high:.3f})"
    care = f" {chosen.why[0].upper()}{chosen.why[1:]}." if chosen.why else ""
    others = [
        f"{one.name} with {s.best.method} ({s.best.score.value:.3f}; {s.answer}{', ' * bool(s.why)}{s.why})"
        for one, s in left
        if one is not network and s.best
    ]
    beside = f" After it: {'; '.join(others)}." if others else ""
    return (
        f"Take **{network.name}** and explain it with **{best.method}**: AUC {network.last.auc:.3f}, and in "
        f"the worst class ({network.run.class_name(best.label)}, {best.score.n} pictures) a C-Score of "
        f"{best.score.value:.3f}{interval}, the highest of the networks' last weights."
        f"{care}{beside}{against} An earlier checkpoint may be better: see each network's page."
    )


def write(book: Book, networks: Sequence[Network], pages: Callable[[Network], str | None]) -> None:
    """The page. pages: where a network's own page is, relative to this one."""
    linked = {one.name: pages(one) for one in networks}
    names = ", ".join(f"[{name}]({page})" if page else name for name, page in linked.items())
    sizes = {sum(s.total for s in one.last.classes.values()) for one in networks}
    same = len({one.pictures for one in networks}) == 1
    scored = f"on the same {next(iter(sizes))} pictures" if same else "on different pictures (take care)"
    book.text(f"{len(networks)} networks, {scored}: {names}.")
    book.heading("Which network")
    book.text(recommendation(networks))
    book.table(network_table(networks))
    book.heading("By method")
    book.table(method_table(networks))
    with figures.net_changes({one.name: one.changes() for one in networks}) as figure:
        book.figure(figure, "net-change", "What the second phase changed, by network and method.")
    runs = {one.name: one.run for one in networks}
    with figures.end_scores(runs, {one.name: one.ends for one in networks}) as figure:
        book.figure(figure, "ends", "C-Score over all classes at the end of each phase.")
    with figures.panels(runs) as figure:
        book.figure(figure, "trajectories", "C-Score over training: over all classes, then class by class.")
    book.heading("AUC")
    if len(networks) > 1:
        book.table(auc_table(networks))
    if all(one.history for one in networks):
        book.table(epoch_table(networks))


def network_table(networks: Sequence[Network]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for one in networks:
        found, alarms = standing(one, networks), one.alarms
        worst = max((class_gap(state) for state in one.last.methods.values()), default=math.nan, key=_known)
        flags = len([e for e in one.history.epochs if _flag(one, e.auc, e.accuracy)]) if one.history else None
        rows.append((
            one.name, found.answer, found.why, one.last.auc, one.last.accuracy,
            average(state.overall.value for state in one.last.methods.values()),
            average(one.changes().values()), worst, len(alarms),
            len([a for a in alarms if a.severity == "critical"]), flags,
        ))  # fmt: skip
    columns = (
        Column("network"), Column("answer"), Column("why"), better("AUC"), better("accuracy"),
        better("C-Score, mean of methods"), Column("mean change", "+.3f", True),
        Column("widest class gap", higher_is_better=False), Column("alarms", "d"), Column("critical", "d"),
        Column("epochs flagged", "d"),
    )  # fmt: skip
    note = "AUC to class gap: last weights. Alarms: at all checkpoints. Changes: over the second phase."
    return Table("networks", "The networks", columns, tuple(rows), note)


def _known(value: float) -> float:
    return -1.0 if math.isnan(value) else value


def _flag(network: Network, auc: float, accuracy: float) -> str:
    return epoch_flag(auc, accuracy, len(network.last.classes))


def method_table(networks: Sequence[Network]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for one in networks:
        changes, alarms = one.changes(), one.alarms
        for method, state in one.last.methods.items():
            worst = worst_class(state)
            told = [f"{a.mechanism} at {a.checkpoint}" for a in alarms if a.method in (method, None)]
            rows.append((
                one.name, method, as_value(state.overall), changes.get(method, math.nan),
                None if worst is None else as_value(worst[1]),
                "" if worst is None else one.run.class_name(worst[0]), class_gap(state), ", ".join(told),
            ))  # fmt: skip
    columns = (
        Column("network"), Column("method"), better("last C-Score"), Column("change", "+.3f"),
        better("worst class"), Column("which"), Column("class gap", higher_is_better=False), Column("alarms"),
    )  # fmt: skip
    note = "Alarms by mechanism: 1 gold-list collapse, 2 attribution collapse, 3 class masking."
    return Table("methods", "Every method of every network, at its last weights", columns, tuple(rows), note)


def auc_table(networks: Sequence[Network]) -> Table:
    pairs = [(a, b, difference(a, b)) for a, b in combinations(networks, 2)]
    corrected = holm({k: found.p for k, (*_, found) in enumerate(pairs) if not math.isnan(found.p)})
    rows = tuple(
        (
            a.name, b.name, a.last.auc, b.last.auc, found.value, *found.interval, corrected.get(k),
            "yes" if found.paired else "no",
        )
        for k, (a, b, found) in enumerate(pairs)
    )  # fmt: skip
    columns = (
        Column("network"), Column("beside"), Column("AUC", ".4f"), Column("AUC beside", ".4f"),
        Column("difference", "+.4f"), Column("95 % from", "+.4f"), Column("to", "+.4f"), Column("p", ".3f"),
        Column("same pictures"),
    )  # fmt: skip
    note = "DeLong's paired test where both were scored on the same pictures; p by Holm over the pairs."
    return Table("auc", "Is one network's AUC above another's?", columns, rows, note, marked=False)


def epoch_table(networks: Sequence[Network]) -> Table:
    """Table 2: AUC and accuracy of every network at every epoch, with flags."""
    histories = {one.name: {e.epoch: e for e in one.history.epochs} for one in networks if one.history}
    epochs = sorted({epoch for history in histories.values() for epoch in history})
    columns, rows = [Column("epoch", "d"), Column("phase")], []
    for name in histories:
        columns += [Column(f"{name}, AUC", ".4f"), Column("accuracy", ".1%"), Column("flag")]
    for epoch in epochs:
        row: list[Cell] = [epoch, next(h[epoch].phase for h in histories.values() if epoch in h)]
        for network in networks:
            one = histories[network.name].get(epoch)
            known = () if one is None else (one.auc, one.accuracy, _flag(network, one.auc, one.accuracy))
            row += known or (None, None, "")
        rows.append(tuple(row))
    note = "Flags: AUC below 0.5; accuracy below guessing while AUC holds."
    return Table("epochs", "Every epoch of every network", tuple(columns), tuple(rows), note)
