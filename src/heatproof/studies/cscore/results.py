"""Results and pages of C-Score studies: one network over training, several networks, new weights.

One network: candidates are a checkpoint whose AUC is not below the best by more than sampling error, with a
method that has no alarm there. The best has the highest lower end of the 95 % interval in its worst class.

Several networks are judged by their last weights:

    not recommended          AUC is surely below its own best or that of the best network, or below 0.75; or
                             a class has lost its gold list; or no method is free of alarms
    with a choice of method  some methods have an alarm: use another one
    recommended              no method has one

Of those that remain, the best is the network whose best method has the highest worst class. AUCs of networks
on the same images are compared image by image (delong1988auc). On the published tables this gives the paper's
answer: DenseNet201; InceptionV3 with a choice of method; not ResNet50V2.

New weights against a reference: a score has fallen if the two 95 % intervals do not meet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise, product
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from heatproof.errors import InputError
from heatproof.images import Failure
from heatproof.metrics.classifier import reading
from heatproof.metrics.cscores import dom
from heatproof.metrics.results import PerClass
from heatproof.report import figures
from heatproof.report.figures import Line, Panel, line_style
from heatproof.report.pieces import TEMPLATES
from heatproof.report.tables import Cell, Value
from heatproof.store import RunFolder
from heatproof.store.scores import read_predictions
from heatproof.studies.common import MarkdownReport, TableFile, average, mean_value, write_page
from heatproof.studies.cscore import claims
from heatproof.train.recipe import Epoch, History
from heatproof.verdict import trajectory as training
from heatproof.verdict.alarms import Alarm, Thresholds, find_alarms
from heatproof.verdict.follow import holm
from heatproof.verdict.trajectory import (
    AucDifference,
    CheckpointState,
    Trajectory,
    auc_difference,
    auc_falls,
)

RECOMMENDED, CHOICE, REFUSED = "recommended", "with a choice of method", "not recommended"
AUC = {"color": "#555555", "linestyle": "--", "linewidth": 1.2}
LIMITS = {"ylim": (0, 1.06)}
BANDS = "Colours as in the paper: green from 0.80 on, amber below 0.30, red 0.000."


def methods_of(runs: Iterable[Trajectory]) -> list[str]:
    """Methods of all checkpoints, in the order in which they first occur."""
    return list(dict.fromkeys(method for run in runs for checkpoint in run for method in checkpoint.methods))


def labels_of(runs: Iterable[Trajectory]) -> list[int]:
    return sorted({label for run in runs for checkpoint in run for label in checkpoint.classes})


def named(run: Trajectory, name: str) -> CheckpointState:
    return next(checkpoint for checkpoint in run if checkpoint.name == name)


def best_auc(run: Trajectory) -> CheckpointState:
    return max(run, key=lambda c: -1 if math.isnan(c.auc) else c.auc)


def score_of(checkpoint: CheckpointState, method: str, label: int | None = None) -> PerClass | None:
    """A method's C-Score of a class, or over all classes; None if it has none."""
    state = checkpoint.methods.get(method)
    return None if state is None else state.overall if label is None else state.classes.get(label)


def score_value(checkpoint: CheckpointState, method: str, label: int | None = None) -> float:
    """The value of `score_of`; NaN if there is none, and for a class whose gold list is empty."""
    score = score_of(checkpoint, method, label)
    return math.nan if score is None or (label is not None and not score.n) else score.value


def compared_classes(state: PerClass) -> dict[int, PerClass]:
    """Classes with a score of at least two images, the lowest first."""
    known = {c: s for c, s in state.classes.items() if s.n >= 2 and not math.isnan(s.value)}
    return dict(sorted(known.items(), key=lambda item: item[1].value))


def class_gap(state: PerClass) -> float:
    """C-Score of the most consistent class minus that of the least."""
    values = [score.value for score in compared_classes(state).values()]
    return values[-1] - values[0] if len(values) > 1 else math.nan


class Candidate(NamedTuple):
    """A checkpoint with a method, and the class where its score is lowest."""

    checkpoint: CheckpointState
    method: str
    label: int
    score: PerClass

    @property
    def floor(self) -> float:
        low = self.score.interval[0]
        return self.score.value if math.isnan(low) else low


def usable(checkpoint: CheckpointState, alarms: Sequence[Alarm]) -> list[Candidate]:
    """The methods of a checkpoint without an alarm and with a score for every class, best first."""
    raised = {a.method for a in alarms if a.checkpoint == checkpoint.name}
    known = [
        Candidate(checkpoint, method, *next(iter(compared_classes(state).items())))
        for method, state in checkpoint.methods.items()
        if len(compared_classes(state)) == len(state.classes) and not raised & {None, method}
    ]
    return sorted(known, key=lambda candidate: -candidate.floor)


def candidates(run: Trajectory, alarms: Sequence[Alarm]) -> list[Candidate]:
    """What may be recommended, best first."""
    best = best_auc(run)
    good = (
        c for c in run if not math.isnan(c.auc) and (c is best or not auc_difference(c, best).surely_below)
    )
    return sorted((of for c in good for of in usable(c, alarms)), key=lambda candidate: -candidate.floor)


def recommend(run: Trajectory, alarms: Sequence[Alarm]) -> str:
    """A paragraph that recommends a checkpoint and a method, or the reason why there is none."""
    text = TEMPLATES.get_template("studies/cscore/recommend.md").module.network  # type: ignore[attr-defined]
    return str(text(run, candidates(run, alarms), best_auc(run))).strip()


@dataclass(frozen=True)
class Network:
    """One network's training."""

    name: str
    run: Trajectory
    ends: tuple[str, str]  # checkpoints at the end of each phase
    history: History | None = None
    images: str = ""  # hash of the images it was scored on
    folder: RunFolder | None = None  # with its maps

    @property
    def training(self) -> tuple[Trajectory, list[bool]] | None:
        """The checkpoints, and which are of the second phase; None if phases are unknown or only one is."""
        until = self.run.checkpoints.index(self.end_states[0])
        late = [k > until for k in range(len(self.run))]
        return (self.run, late) if self.history is not None and any(late) else None

    @property
    def last(self) -> CheckpointState:
        return self.run.checkpoints[-1]

    @property
    def end_states(self) -> tuple[CheckpointState, CheckpointState]:
        return named(self.run, self.ends[0]), named(self.run, self.ends[1])

    @property
    def epochs(self) -> Sequence[Epoch]:
        return self.history.epochs if self.history is not None else ()

    @cached_property
    def by_epoch(self) -> dict[int, Epoch]:
        return {e.epoch: e for e in self.epochs}

    @property
    def widest_gap(self) -> float:
        """The largest class gap of a method at the last checkpoint."""
        gaps = [class_gap(state) for state in self.last.methods.values()]
        return max((gap for gap in gaps if not math.isnan(gap)), default=math.nan)

    @cached_property
    def alarms(self) -> list[Alarm]:
        return find_alarms(self.run)

    @cached_property
    def changes(self) -> dict[str, float]:
        """By method: C-Score over all classes at the end of the second phase minus that of the first."""
        first, last = self.end_states
        return {m: change(first, last, m) for m in methods_of([self.run])}

    @cached_property
    def flags(self) -> dict[int, str]:
        """By epoch: what is wrong with its AUC or accuracy, or ""."""
        classes = len(labels_of([self.run]))
        return {e.epoch: training.epoch_flag(e.auc, e.accuracy, classes) for e in self.epochs}


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
    return Network(name, run, phase_ends(run, history), history, opened.manifest.data, opened)


def phase_ends(run: Trajectory, history: History | None) -> tuple[str, str]:
    """The checkpoints at the end of phase 1 and 2; the first and the last if no phase is known."""
    first = run.checkpoints[0].name
    if history is not None and history.epochs:
        until = max(e.epoch for e in history.epochs if e.phase == history.epochs[0].phase)
        first = [first, *(c.name for c in run if c.epoch is not None and c.epoch <= until)][-1]
    return first, run.checkpoints[-1].name


def difference(first: Network, second: Network) -> AucDifference:
    """Of the last AUCs."""
    return auc_difference(first.last, second.last, first.images == second.images)


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
        (above, REFUSED, f"AUC {auc:.3f} is significantly below that of {highest.name}"),
        (alarms, CHOICE, f"not with {about}"),
        (True, RECOMMENDED, ""),
    )
    return next(Standing(answer, why, best) for holds, answer, why in rules if holds)


def recommendation(networks: Sequence[Network]) -> str:
    """One paragraph that names a network and a method, with its evidence."""
    standings = [(network, standing(network, networks)) for network in networks]
    left = [(s.best, network, s) for network, s in standings if s.answer != REFUSED and s.best]
    chosen = max(left, key=lambda item: item[0].floor, default=None)
    others = [item for item in left if item is not chosen]
    refused = [(network, s) for network, s in standings if s.answer == REFUSED]
    text = TEMPLATES.get_template("studies/cscore/recommend.md").module.networks  # type: ignore[attr-defined]
    return str(text(chosen, others, refused)).strip()


class Move(NamedTuple):
    """A method's score of a class, or of all classes, of the reference and of new weights."""

    method: str
    label: int | None
    old: PerClass
    new: PerClass

    @property
    def fell(self) -> bool:
        return not math.isnan(self.new.interval[1]) and self.new.interval[1] < self.old.interval[0]


def moves(before: CheckpointState, after: CheckpointState) -> list[Move]:
    both = [(method, state, after.methods[method]) for method, state in before.methods.items()]
    return [
        Move(method, label, *(of.overall if label is None else of.classes[label] for of in (old, new)))
        for method, old, new in both
        for label in (None, *(label for label in old.classes if label in new.classes))
    ]


def cell(score: PerClass | None, brief: bool = False) -> Cell:
    """A C-Score in the colour of its band, with interval and n unless it is brief."""
    if score is None:
        return None
    interval, n = (None, None) if brief else (score.interval, score.n)
    return Value(score.value, interval, n, reading(score.value, "colours"))


def zeros(run: Trajectory, method: str, label: int) -> str:
    """The reason of every score of 0, by checkpoint."""
    reasons: dict[str, list[str]] = {}
    for c in run:
        if (score := score_of(c, method, label)) is not None and score.value == 0:
            reasons.setdefault(score.reason or "the gold list is empty" * (not score.n), []).append(c.name)
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items() if reason)


def change(first: CheckpointState, last: CheckpointState, method: str, label: int | None = None) -> float:
    return score_value(last, method, label) - score_value(first, method, label)


def largest(score: PerClass) -> tuple[int | None, float]:
    """The class with the highest number, and that number."""
    known = [(c, value) for c, value in score.classes.items() if not math.isnan(value)]
    return max(known, key=itemgetter(1), default=(None, math.nan))


def events_at(events: Mapping[str, Sequence[int]], epoch: int) -> str:
    return ", ".join(name for name, epochs in events.items() if epoch in epochs)


def raised(network: Network, method: str) -> str:
    """The alarms of a method."""
    alarms = [a for a in network.alarms if a.method in (method, None)]
    return ", ".join(f"{a.mechanism} at {a.checkpoint}" for a in alarms)


def gold_lists(run: Trajectory, c: CheckpointState) -> str:
    return ", ".join(f"{run.class_name(k)} {s.gold} of {s.total}" for k, s in sorted(c.classes.items()))


TABLES = TableFile(
    "heatproof.studies.cscore", cell=cell, score=score_of, gap=class_gap, average=average, mean=mean_value,
    whole_norm=training.whole_norm, whole_deviation=training.whole_deviation, auc_difference=auc_difference,
    product=product, raised=raised, zeros=zeros, change=change, largest=largest, events_at=events_at,
    bands=BANDS, reading=reading, spread=claims.spread, converged=claims.converged, gold_lists=gold_lists,
    nan=math.nan, thresholds=Thresholds(),
)  # fmt: skip


def network_content(network: Network) -> dict[str, Any]:
    """What the page of a network and its tables name."""
    run, labels = network.run, labels_of([network.run])
    first, last = network.end_states
    return {
        "network": network, "run": run, "alarms": network.alarms, "first": first, "last": last,
        "best": best_auc(run), "methods": methods_of([run]), "checkpoints": list(run), "labels": labels,
        "classes": [(label, run.class_name(label)) for label in labels],
        "averages": [average(score_value(c, m) for m in network.changes) for c in run],
        "flagged": [epoch for epoch, flag in network.flags.items() if flag],
        "rises": claims.rises([network.training] if network.training else []),
        "trainings": 1, "equal": claims.EQUAL,
    }  # fmt: skip


def causes(
    network: Network, events: Mapping[str, Sequence[int]], flagged: Sequence[int]
) -> list[tuple[Any, ...]]:
    """Event, epochs with it, and for alarms and for flags: how many it precedes, and p."""
    epochs = [e.epoch for e in network.epochs]
    at = [a.epoch for a in network.alarms if a.epoch is not None]
    tests = {
        (event, k): training.early_warning(epochs, when, what)
        for event, when in events.items()
        for k, what in enumerate((at, flagged))
    }
    p = holm({key: test.p for key, test in tests.items() if not math.isnan(test.p)})
    cells = {key: (f"{test.preceded} of {test.alarms}", p.get(key)) for key, test in tests.items()}
    return [
        (event, ", ".join(map(str, when)), *cells[event, 0], *cells[event, 1])
        for event, when in events.items()
    ]


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
    content = network_content(network)
    run, epochs, methods = network.run, network.epochs, content["methods"]
    norms = [(e.epoch, e.gradients) for e in epochs] if any(e.gradients for e in epochs) else []
    auc, marks = [(position(run, c), c.auc) for c in run], list[float]()
    if network.history is not None:
        auc, marks = [(e.epoch, e.auc) for e in epochs], [position(run, network.end_states[0])]
    events = training.training_events(epochs)
    scores = {f"{c.name}, AUC {c.auc:.3f}": score_grid(run, c) for c in network.end_states}
    drawn = {
        "trajectories": trajectory_figure(run, network.alarms, auc, marks, norms),
        "ends": figures.heatmaps(scores, methods, "C-Score"),
        "by-class": classes_figure({"": run}, labels_of([run]), marks, bands=True),
    }
    if network.ends[0] != network.ends[1]:
        (before, columns), (after, _) = scores.values()
        changes = dict(zip(columns, (after - before).T, strict=True))
        label = "change of the C-Score from {} to {}".format(*network.ends)
        drawn["net-change"] = figures.bars(changes, methods, label)
    if swept:
        drawn["depth"] = depth_figure(swept)
    grew = {
        now.epoch: training.grown_layers(before.gradients, now.gradients)
        for before, now in pairwise(epochs) if before.phase == now.phase
    }  # fmt: skip
    return write_page(
        out, "studies/cscore/network.md", TABLES, drawn, **content, held_out=held_out, failures=failures,
        recommendation=recommend(run, network.alarms), logged=bool(norms), events=events, grew=grew,
        causes=causes(network, events, content["flagged"]), converged_at=claims.converged(run),
        places=place_scores(folder, run.checkpoints[-1].name) if places else None, swept=depth_rows(swept),
    )  # fmt: skip


def networks_content(networks: Sequence[Network]) -> dict[str, Any]:
    """What the page of several networks and its tables name."""
    pairs = [(a, b, difference(a, b)) for a, b in combinations(networks, 2)]
    corrected = holm({k: apart.p for k, (*_, apart) in enumerate(pairs) if not math.isnan(apart.p)})
    trainings = [network.training for network in networks if network.training]
    return {
        "networks": list(networks),
        "standings": [(network, standing(network, networks)) for network in networks],
        "scored": [
            (network, method, state, next(iter(compared_classes(state).items()), None))
            for network in networks
            for method, state in network.last.methods.items()
        ],
        "pairs": [(*pair, corrected.get(k)) for k, pair in enumerate(pairs)],
        "rises": claims.rises(trainings),
        "trainings": len(trainings),
        "distances": [row for pair in combinations(networks, 2) for row in mean_map_distances(*pair)],
        "phases": {epoch: e.phase for n in reversed(networks) for epoch, e in n.by_epoch.items()},
    }


def mean_map_distances(first: Network, second: Network) -> Iterator[tuple[Network, Network, str, PerClass]]:
    """DoM of every method that both have, at their last checkpoints, if their images are the same.

    Maps of a network with another input size are brought to the size of the first.
    """
    if first.folder is None or second.folder is None or first.images != second.images:
        return
    stores, names = (first.folder.maps(), second.folder.maps()), (first.last.name, second.last.name)
    answers = read_predictions(first.folder, names[0])
    for method in [m for m in first.last.methods if m in second.last.methods]:
        own, other = (set(store.ids(name, method)) for store, name in zip(stores, names, strict=True))
        ids = [name for name in answers.ids if name in own & other]
        if ids:
            a, b = (store.read(name, method, ids) for store, name in zip(stores, names, strict=True))
            labels = answers.labels[[answers.places[name] for name in ids]]
            yield first, second, method, dom(a, replace(b, image_size=a.image_size), labels)


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
        "trajectories": classes_figure(
            {network.name: network.run for network in networks},
            [None, *labels_of(network.run for network in networks)],
        ),
    }
    return write_page(
        out, "studies/cscore/networks.md", TABLES, drawn, **networks_content(networks), pages=pages,
        same=len({network.images for network in networks}) == 1, recommendation=recommendation(networks),
        size=sum(state.total for state in networks[0].last.classes.values()),
    )  # fmt: skip


def write_comparison(
    out: Path, weights: str, pair: Trajectory, moved: Sequence[Move], alarms: Sequence[Alarm]
) -> MarkdownReport:
    """Write the page of new weights against a reference."""
    return write_page(
        out, "studies/cscore/comparison.md", TABLES, weights=weights, run=pair, moves=moved, alarms=alarms
    )


def depth_rows(swept: Mapping[str, Trajectory]) -> list[tuple[Any, ...]]:
    """Layer, checkpoint, method, score, and value and name of the worst class."""
    rows: list[tuple[Any, ...]] = []
    for layer, run in swept.items():
        for checkpoint in run:
            for method, state in checkpoint.methods.items():
                known = [(s.value, run.class_name(c)) for c, s in state.classes.items() if s.value == s.value]
                worst = min(known, key=itemgetter(0), default=(None, ""))
                rows.append((layer, checkpoint.name, method, state.overall, *worst))
    return rows


def place_scores(folder: RunFolder, checkpoint: str) -> dict[tuple[str, int, str], list[float]]:
    """Localisation of the images that are recognised, by method, class and metric."""
    rows = folder.scores().sql(
        "select s.method, s.label, s.metric, s.value from scores s join scores p on p.image = s.image and "
        "p.checkpoint = s.checkpoint and p.model = s.model and p.metric = 'predicted' and p.value = s.label "
        "where s.checkpoint = ? and s.image <> '' and s.metric in ('pointing', 'inside', 'mask_iou') "
        "order by s.image",
        [checkpoint],
    )
    values: dict[tuple[str, int, str], list[float]] = {}
    for row in rows:
        values.setdefault((row["method"], row["label"], row["metric"]), []).append(row["value"])
    return values


def position(run: Trajectory, checkpoint: CheckpointState) -> float:
    """A checkpoint on the axis of a figure: its epoch, or its number if epochs are unknown."""
    if all(c.epoch is not None for c in run):
        return float(checkpoint.epoch or 0)
    return float(run.checkpoints.index(checkpoint) + 1)


def score_grid(run: Trajectory, checkpoint: CheckpointState) -> tuple[np.ndarray, list[str]]:
    """Methods x (all, each class), NaN if there is no score, and the names of the columns."""
    labels = sorted(checkpoint.classes)
    table = np.array([[score_value(checkpoint, m, c) for c in (None, *labels)] for m in methods_of([run])])
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
    marks: Sequence[float] = (), norms: Sequence[tuple[int, training.Norms]] = (),
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


def gradient_panel(norms: Sequence[tuple[int, training.Norms]], marks: Sequence[float]) -> Panel:
    """Every layer as a thin line, all layers together as a thick one."""
    layers = list(dict.fromkeys(layer for _, of in norms for layer in of))
    thin, lines = {"color": "#999999", "linewidth": 0.6, "alpha": 0.6}, []
    for layer in layers:
        x, y = zip(*((epoch, of[layer].mean) for epoch, of in norms if layer in of), strict=True)
        lines.append(Line(x, y, f"each of {len(layers)} layers", thin))
    thick = {"color": "black", "linewidth": 1.6, "marker": "o", "markersize": 3}
    lines.append(
        Line([e for e, _ in norms], [training.whole_norm(of) for _, of in norms], "all layers", thick)
    )
    return Panel(lines, {"yscale": "log", "xlabel": "epoch", "ylabel": "gradient norm"}, marks)


def depth_figure(swept: Mapping[str, Trajectory]) -> Any:
    """C-Score of every CAM at every depth, a panel for each checkpoint."""
    names, methods = dict.fromkeys(c.name for run in swept.values() for c in run), methods_of(swept.values())
    x, panels = range(len(swept)), []
    for name in names:
        states = [named(run, name) for run in swept.values()]
        values = {m: [score_value(c, m) for c in states] for m in methods}
        lines = [Line(x, of, m, line_style(k)) for k, (m, of) in enumerate(values.items())]
        ticks = {"xticks": x, "xticklabels": list(swept), "title": name}
        panels.append(Panel(lines, LIMITS | ticks | {"ylabel": "C-Score, all classes"}))
    return figures.lines([panels], 3.2 * len(names) + 1.6, 3.4, sharey=True)


def classes_figure(
    runs: Mapping[str, Trajectory], labels: Sequence[int | None], marks: Sequence[float] = (),
    bands: bool = False,
) -> Any:  # fmt: skip
    """A column for each run, by title; a row for each label, None for all classes, beside AUC.

    bands: with 95 % intervals.
    """
    methods, first = methods_of(runs.values()), next(iter(runs.values()))

    def panel(label: int | None, name: str, run: Trajectory) -> Panel:
        lines = curves(run, methods, label, bands)
        if label is None:
            lines.insert(0, Line([position(run, c) for c in run], [c.auc for c in run], "AUC", AUC))
        axes = {"title": name} if label == labels[0] and name else {}
        axes |= {"xlabel": x_label(run)} if label == labels[-1] else {}
        of = "all classes" if label is None else first.class_name(label)
        return Panel(lines, {**LIMITS, **axes, **({"ylabel": of} if run is first else {})}, marks)

    grid = [[panel(label, name, run) for name, run in runs.items()] for label in labels]
    size = max(2.8 * len(runs) + 1.4, 5.6), 2.1 * len(labels) + 0.4
    return figures.lines(grid, *size, sharey=True, sharex="col")
