"""Pages of C-Score studies: one network over training, several networks, new weights against a reference."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, pairwise, product
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from heatproof.images import Failure
from heatproof.metrics.results import PerClass
from heatproof.report import figures
from heatproof.report.figures import Line, Panel, line_style
from heatproof.report.markdown_report import MarkdownReport
from heatproof.report.tables import Cell, Table, Value
from heatproof.store import RunFolder
from heatproof.studies.common import TableFile, mean_value
from heatproof.studies.cscore.results import (
    Move,
    Network,
    best_auc,
    class_gap,
    compared_classes,
    difference,
    labels_of,
    methods_of,
    named,
    recommend,
    recommendation,
    score_of,
    score_value,
    standing,
)
from heatproof.verdict.alarms import Alarm, Thresholds
from heatproof.verdict.epochs import Norms, early_warning, gradient_jumps, grown_layers, whole_norm
from heatproof.verdict.follow import holm
from heatproof.verdict.trajectory import CheckpointState, Trajectory, auc_difference

AUC = {"color": "#555555", "linestyle": "--", "linewidth": 1.2}
LIMITS = {"ylim": (0, 1.06)}


def write_network(
    out: Path, network: Network, folder: RunFolder, swept: Mapping[str, Trajectory],
    held_out: float | None, failures: Sequence[Failure] = (), places: bool = False,
) -> MarkdownReport:  # fmt: skip
    """Write the page of one network.

    Args:
        swept: runs at other layers, by layer.
        held_out: share of the images that was not trained on.
        failures: images that training could not read.
        places: whether the images have boxes or masks.
    """
    run, ends, epochs, alarms = network.run, network.ends, network.epochs, network.alarms
    methods, flagged = methods_of([run]), [epoch for epoch, flag in network.flags.items() if flag]
    norms = [(e.epoch, e.gradients) for e in epochs] if any(e.gradients for e in epochs) else []
    tables = [
        alarm_table(alarms), classifier_table(run), overall_table(network), classes_table(run),
        gap_table(run), class_table(network),
    ]  # fmt: skip
    auc, marks, warnings = [(position(run, c), c.auc) for c in run], list[float](), list[str]()
    if network.history is not None:
        tables.append(TABLES.fill("training", epochs, flags=network.flags))
        auc, marks = [(e.epoch, e.auc) for e in epochs], [position(run, network.end_states[0])]
    if norms:
        tables.append(gradient_table(network))
        raised = [a.epoch for a in alarms if a.epoch is not None]
        jumps, every = gradient_jumps(epochs), [e.epoch for e in epochs]
        both = ((raised, "an alarm"), (flagged, "a flag"))
        warnings = [early_warning(every, jumps, at, what).sentence for at, what in both]
    scores = {f"{c.name}, AUC {c.auc:.3f}": score_grid(run, c) for c in network.end_states}
    drawn = {
        "trajectories": trajectory_figure(run, alarms, auc, marks, norms),
        "ends": figures.heatmaps(scores, methods, "C-Score"),
        "by-class": class_figure(run, marks),
    }
    if ends[0] != ends[1]:
        (before, columns), (after, _) = scores.values()
        changes = dict(zip(columns, (after - before).T, strict=True))
        label = f"change of the C-Score from {ends[0]} to {ends[1]}"
        drawn["net-change"] = figures.bars(changes, methods, label)
    if places:
        tables.append(place_table(folder, run))
    if swept:
        tables.append(depth_table(swept))
        drawn["depth"] = depth_figure(swept)
    book = MarkdownReport(out)
    book.write(
        "studies/cscore/network.md", tables, drawn, network=network, methods=methods, held_out=held_out,
        classes={run.class_name(c): state.total for c, state in sorted(network.last.classes.items())},
        failures=failures, recommendation=recommend(run, alarms), flagged=flagged, warnings=warnings,
        places=places, swept=swept,
    )  # fmt: skip
    return book


def write_networks(out: Path, networks: Sequence[Network], pages: Mapping[str, str]) -> MarkdownReport:
    """Write the page of several networks. pages: where a network's own page is, relative to this one."""
    methods, names = methods_of(network.run for network in networks), [network.name for network in networks]
    changes = {n.name: [n.changes.get(m, math.nan) for m in methods] for n in networks}
    panels = {}
    for side, title in enumerate(("end of the first phase", "end of the second phase")):
        states = [network.end_states[side] for network in networks]
        panels[title] = np.array([[score_value(c, m) for c in states] for m in methods]), names
    drawn = {
        "net-change": figures.bars(changes, methods, "change of the C-Score over the second phase"),
        "ends": figures.heatmaps(panels, methods, "C-Score"),
        "trajectories": networks_figure({network.name: network.run for network in networks}),
    }
    tables = [
        TABLES.fill("networks", [(network, standing(network, networks)) for network in networks]),
        method_table(networks), auc_table(networks) if len(networks) > 1 else None,
        epoch_table(networks) if all(network.history for network in networks) else None,
    ]  # fmt: skip
    book = MarkdownReport(out)
    book.write(
        "studies/cscore/networks.md", tables, drawn, networks=networks, pages=pages,
        same=len({network.images for network in networks}) == 1, recommendation=recommendation(networks),
        size=sum(state.total for state in networks[0].last.classes.values()),
    )  # fmt: skip
    return book


def write_comparison(
    out: Path, weights: str, pair: Trajectory, moves: Sequence[Move], fell: Sequence[str],
    alarms: Sequence[Alarm],
) -> MarkdownReport:  # fmt: skip
    """Write the page of new weights against a reference. fell: the scores that fell, a sentence each."""

    def gold_lists(c: CheckpointState) -> str:
        return ", ".join(f"{pair.class_name(k)} {s.gold} of {s.total}" for k, s in sorted(c.classes.items()))

    tables = [
        TABLES.fill("compared-classifier", pair, gold_lists=gold_lists),
        TABLES.fill("scores", moves, run=pair), alarm_table(alarms),
    ]  # fmt: skip
    before, after = pair
    book = MarkdownReport(out)
    book.write(
        "studies/cscore/comparison.md", tables, weights=weights, before=before, after=after, fell=fell,
        alarms=alarms,
    )  # fmt: skip
    return book


def as_value(score: PerClass) -> Value:
    return Value(score.value, score.interval, score.n)


def average(values: Iterable[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return fmean(known) if known else math.nan


def class_value(checkpoint: CheckpointState, method: str, label: int) -> Cell:
    score = score_of(checkpoint, method, label)
    value = score_value(checkpoint, method, label)
    return None if score is None else Value(value, score.interval, score.n)


TABLES = TableFile(
    "heatproof.studies.cscore", value=as_value, score=score_value, class_value=class_value, gap=class_gap,
    average=average, mean=mean_value, whole_norm=whole_norm, auc_difference=auc_difference, nan=math.nan,
)  # fmt: skip


def alarm_table(alarms: Sequence[Alarm]) -> Table | None:
    return TABLES.fill("alarms", alarms, thresholds=Thresholds()) if alarms else None


def classifier_table(run: Trajectory) -> Table:
    """All checkpoints, with AUC compared to the best checkpoint on the same images."""
    classes = [(label, run.class_name(label)) for label in labels_of([run])]
    return TABLES.fill("classifier", run, best=best_auc(run), classes=classes)


def overall_table(network: Network) -> Table:
    """The score over all classes, its change over the second phase, and the average over methods."""
    changes, (first, last) = network.changes, network.ends
    averages = [average(score_value(c, m) for m in changes) for c in network.run]
    below: list[list[Cell]] = [["average", *averages, average(changes.values())]]
    words = {"first": first, "last": last, "checkpoints": list(network.run)}
    return TABLES.fill("overall", changes.items(), below, **words)


def classes_table(run: Trajectory) -> Table:
    """The score of each class at every checkpoint."""
    rows = product(labels_of([run]), methods_of([run]))
    return TABLES.fill("classes", rows, run=run, checkpoints=list(run))


def gap_table(run: Trajectory) -> Table:
    """Difference between the best and the worst class."""
    return TABLES.fill("gaps", methods_of([run]), checkpoints=list(run))


def class_table(network: Network) -> Table:
    rows = [
        (method, label, *(c.methods[method].classes[label] for c in network.end_states))
        for method, label in product(methods_of([network.run]), sorted(network.last.classes))
    ]
    return TABLES.fill("by-class", rows, run=network.run, first=network.ends[0], last=network.ends[1])


def depth_table(swept: Mapping[str, Trajectory]) -> Table:
    rows = []
    for layer, run in swept.items():
        for checkpoint in run:
            for method, state in checkpoint.methods.items():
                known = [(s.value, run.class_name(c)) for c, s in state.classes.items() if s.value == s.value]
                worst = min(known, key=itemgetter(0), default=(None, ""))
                rows.append((layer, checkpoint.name, method, state.overall, *worst))
    return TABLES.fill("depth", rows)


def place_table(folder: RunFolder, run: Trajectory) -> Table:
    """Consistency beside localisation, on the images of the gold lists of the last checkpoint."""
    last = run.checkpoints[-1]
    rows = folder.scores().sql(
        "select s.method, s.label, s.metric, s.value from scores s join scores p on p.image = s.image and "
        "p.checkpoint = s.checkpoint and p.model = s.model and p.metric = 'predicted' and p.value = s.label "
        "where s.checkpoint = ? and s.image <> '' and s.metric in ('pointing', 'inside', 'mask_iou') "
        "order by s.image",
        [last.name],
    )
    values: dict[tuple[str, int, str], list[float]] = {}
    for row in rows:
        values.setdefault((row["method"], row["label"], row["metric"]), []).append(row["value"])
    scores = [(m, label, of) for m, state in last.methods.items() for label, of in state.classes.items()]
    return TABLES.fill("places", scores, run=run, values=values, checkpoint=last.name)


def gradient_table(network: Network) -> Table:
    """The norm over all layers at every epoch, where it jumps, and which layers grew most."""
    grew = {
        now.epoch: grown_layers(before.gradients, now.gradients)
        for before, now in pairwise(network.epochs) if before.phase == now.phase
    }  # fmt: skip
    return TABLES.fill("gradients", network.epochs, jumps=gradient_jumps(network.epochs), grew=grew)


def method_table(networks: Sequence[Network]) -> Table:
    def alarms(network: Network, method: str) -> str:
        raised = [a for a in network.alarms if a.method in (method, None)]
        return ", ".join(f"{a.mechanism} at {a.checkpoint}" for a in raised)

    rows = [
        (network, method, state, next(iter(compared_classes(state).items()), None))
        for network in networks
        for method, state in network.last.methods.items()
    ]
    return TABLES.fill("methods", rows, alarms=alarms)


def auc_table(networks: Sequence[Network]) -> Table:
    pairs = [(a, b, difference(a, b)) for a, b in combinations(networks, 2)]
    corrected = holm({k: apart.p for k, (*_, apart) in enumerate(pairs) if not math.isnan(apart.p)})
    return TABLES.fill("auc", [(*pair, corrected.get(k)) for k, pair in enumerate(pairs)])


def epoch_table(networks: Sequence[Network]) -> Table:
    """AUC and accuracy of every network at every epoch, with flags."""
    phases = {epoch: e.phase for network in reversed(networks) for epoch, e in network.by_epoch.items()}
    return TABLES.fill("epochs", sorted(phases), phases=phases, networks=list(networks))


def position(run: Trajectory, checkpoint: CheckpointState) -> float:
    """A checkpoint on the axis of a figure: its epoch, or its number if epochs are unknown."""
    if all(c.epoch is not None for c in run):
        return float(checkpoint.epoch or 0)
    return float(run.checkpoints.index(checkpoint) + 1)


def score_grid(run: Trajectory, checkpoint: CheckpointState) -> tuple[np.ndarray, list[str]]:
    """Methods x (all, each class), NaN if there is no score, and the names of the columns."""
    labels = sorted(checkpoint.classes)
    methods = methods_of([run])
    table = np.array([[score_value(checkpoint, m, c) for c in (None, *labels)] for m in methods])
    return table, ["all", *(run.class_name(label) for label in labels)]


def curves(
    run: Trajectory, methods: Sequence[str], label: int | None = None, bands: bool = False
) -> list[Line]:
    """The C-Score of each method over training. bands: with 95 % intervals."""
    x, lines = [position(run, c) for c in run], []
    for k, method in enumerate(methods):
        scores = [score_of(c, method, label) for c in run]
        low, high = ([math.nan if s is None else s.interval[i] for s in scores] for i in (0, 1))
        y = [score_value(c, method, label) for c in run]
        lines.append(Line(x, y, method, line_style(k), (low, high) if bands else None))
    return lines


def x_label(run: Trajectory) -> str:
    return "epoch" if all(c.epoch is not None for c in run) else "checkpoint"


def trajectory_figure(
    run: Trajectory, alarms: Sequence[Alarm], auc: Sequence[tuple[float, float]],
    marks: Sequence[float] = (), norms: Sequence[tuple[int, Norms]] = (),
) -> Any:  # fmt: skip
    """The C-Score of every method and AUC by epoch, with the numbers of alarms.

    norms: gradient norms by epoch and layer, drawn below.
    """
    notes = []
    for (name, method), mechanism in {(a.checkpoint, a.method): a.mechanism for a in alarms}.items():
        checkpoint = named(run, name)
        y = score_value(checkpoint, str(method)) if method in checkpoint.methods else checkpoint.auc
        if not math.isnan(y):
            notes.append((position(run, checkpoint), y, str(mechanism)))
    x, y_auc = zip(*auc, strict=True)
    lines = [Line(x, y_auc, "AUC", AUC), *curves(run, methods_of([run]))]
    labels = {"ylabel": "C-Score, all classes", "xlabel": "" if norms else x_label(run)}
    grid = [[Panel(lines, LIMITS | labels, marks, notes)]]
    if norms:
        grid.append([gradient_panel(norms, marks)])
    ratios = {"sharex": True, "height_ratios": [3, 2][: len(grid)]}
    return figures.lines(grid, 7.2, 3.8 + 2.2 * bool(norms), "right center", **ratios)


def gradient_panel(norms: Sequence[tuple[int, Norms]], marks: Sequence[float]) -> Panel:
    """Every layer as a thin line, all layers together as a thick one."""
    layers = list(dict.fromkeys(layer for _, of in norms for layer in of))
    thin, lines = {"color": "#999999", "linewidth": 0.6, "alpha": 0.6}, []
    for layer in layers:
        x, y = zip(*((epoch, of[layer].mean) for epoch, of in norms if layer in of), strict=True)
        lines.append(Line(x, y, f"each of {len(layers)} layers", thin))
    thick = {"color": "black", "linewidth": 1.6, "marker": "o", "markersize": 3}
    lines.append(Line([e for e, _ in norms], [whole_norm(of) for _, of in norms], "all layers", thick))
    return Panel(lines, {"yscale": "log", "xlabel": "epoch", "ylabel": "gradient norm"}, marks)


def depth_figure(swept: Mapping[str, Trajectory]) -> Any:
    """C-Score of every CAM at every depth, a panel for each checkpoint."""
    names, methods = (
        list(dict.fromkeys(c.name for run in swept.values() for c in run)),
        methods_of(swept.values()),
    )
    x, panels = range(len(swept)), []
    for name in names:
        states = [named(run, name) for run in swept.values()]
        lines = [
            Line(x, [score_value(c, m) for c in states], m, line_style(k)) for k, m in enumerate(methods)
        ]
        ticks = {"xticks": x, "xticklabels": list(swept), "title": name}
        panels.append(Panel(lines, LIMITS | ticks | {"ylabel": "C-Score, all classes"}))
    return figures.lines([panels], 3.2 * len(names) + 1.6, 3.4, sharey=True)


def class_figure(run: Trajectory, marks: Sequence[float]) -> Any:
    """A panel for each class, every method with its 95 % interval."""
    labels = labels_of([run])
    panels = [
        Panel(
            curves(run, methods_of([run]), label, bands=True),
            LIMITS | {"title": run.class_name(label), "xlabel": x_label(run), "ylabel": "C-Score"}, marks,
        )
        for label in labels
    ]  # fmt: skip
    return figures.lines([panels], 3.4 * len(labels) + 1.4, 3.2, "right center", sharex=True, sharey=True)


def networks_figure(runs: Mapping[str, Trajectory]) -> Any:
    """A column for each network; over all classes, then class by class."""
    methods, first = methods_of(runs.values()), next(iter(runs.values()))
    labels = [None, *labels_of(runs.values())]

    def panel(label: int | None, name: str, run: Trajectory) -> Panel:
        lines, axes = curves(run, methods, label), {"ylim": (0, 1.06)}
        if label is None:
            lines.insert(0, Line([position(run, c) for c in run], [c.auc for c in run], "AUC", AUC))
        title = {"title": name} if label is None else {}
        below = {"xlabel": x_label(run)} if label == labels[-1] else {}
        of = "all classes" if label is None else first.class_name(label)
        return Panel(lines, {**axes, **title, **below, **({"ylabel": of} if run is first else {})})

    grid = [[panel(label, name, run) for name, run in runs.items()] for label in labels]
    size = 2.8 * len(runs) + 1.4, 2.1 * len(labels) + 0.4
    return figures.lines(grid, *size, sharey=True, sharex="col")
