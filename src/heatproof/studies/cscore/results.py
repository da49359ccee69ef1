"""Results of C-Score studies: the checkpoint and method to use, the network to use, scores that fell.

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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from heatproof.errors import InputError
from heatproof.metrics.results import PerClass
from heatproof.store import RunFolder
from heatproof.train.recipe import Epoch, History
from heatproof.verdict.alarms import Alarm, Thresholds, find_alarms
from heatproof.verdict.epochs import epoch_flag
from heatproof.verdict.trajectory import (
    AucDifference,
    CheckpointState,
    MethodState,
    Trajectory,
    auc_difference,
    auc_falls,
)

RECOMMENDED, CHOICE, REFUSED = "recommended", "with a choice of method", "not recommended"


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


def compared_classes(state: MethodState) -> dict[int, PerClass]:
    """Classes with a score of at least two images, the lowest first."""
    known = {c: s for c, s in state.classes.items() if s.n >= 2 and not math.isnan(s.value)}
    return dict(sorted(known.items(), key=lambda item: item[1].value))


def class_gap(state: MethodState) -> float:
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

    def text(self, run: Trajectory) -> str:
        low, high = self.score.interval
        interval = "" if math.isnan(low) else f" (95 % {low:.3f} to {high:.3f})"
        return (
            f"worst class ({run.class_name(self.label)}, {self.score.n} images) a C-Score of "
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
    known, best = candidates(run, alarms), best_auc(run)
    if not known:
        return (
            f"No checkpoint can be recommended: wherever AUC is within sampling error of its best "
            f"({best.auc:.3f} at {best.name}), every method has an alarm or a class without a score. "
            "See the alarms for what to do."
        )
    first, next_best, gain = known[0], " No other method passes.", ""
    if second := next((c for c in known if c.method != first.method), None):
        next_best = f" Next comes {second.method} at {second.checkpoint.name}: {second.score.value:.3f}."
    if first.checkpoint is not best:
        gain = f" AUC is best at {best.name} ({best.auc:.3f}), not by more than sampling error."
    return (
        f"Take the weights of **{first.checkpoint.name}** and explain them with **{first.method}**: AUC "
        f"{first.checkpoint.auc:.3f}, no alarm, and in its {first.text(run)}, the highest floor of "
        f"{len(known)} candidates.{next_best}{gain} Consistency is not correctness: maps may agree on the "
        "wrong place, so look at some, and localise where there are boxes."
    )


@dataclass(frozen=True)
class Network:
    """One network's training."""

    name: str
    run: Trajectory
    ends: tuple[str, str]  # checkpoints at the end of each phase
    history: History | None = None
    images: str = ""  # hash of the images it was scored on

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
        return {m: score_value(last, m) - score_value(first, m) for m in methods_of([self.run])}

    @cached_property
    def flags(self) -> dict[int, str]:
        """By epoch: what is wrong with its AUC or accuracy, or ""."""
        classes = len(labels_of([self.run]))
        return {e.epoch: epoch_flag(e.auc, e.accuracy, classes) for e in self.epochs}


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
    """The checkpoints at the end of phase 1 and 2; the first and the last if no phase is known."""
    first = run.checkpoints[0].name
    if history is not None and history.epochs:
        phase = history.epochs[0].phase
        until = max(e.epoch for e in history.epochs if e.phase == phase)
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
        (above, REFUSED, f"AUC {auc:.3f} is surely below that of {highest.name}"),
        (alarms, CHOICE, f"not with {about}"),
        (True, RECOMMENDED, ""),
    )
    return next(Standing(answer, why, best) for holds, answer, why in rules if holds)


def recommendation(networks: Sequence[Network]) -> str:
    """One paragraph that names a network and a method, with its evidence."""
    standings = [(network, standing(network, networks)) for network in networks]
    refused = [f"{network.name} ({s.why})" for network, s in standings if s.answer == REFUSED]
    against = f" Not recommended: {'; '.join(refused)}." if refused else ""
    left = [(s.best, network, s) for network, s in standings if s.answer != REFUSED and s.best]
    if not left:
        return f"No network can be recommended with its last weights.{against}"
    best, chosen, stand = max(left, key=lambda item: item[0].floor)
    care = f" {stand.why[0].upper()}{stand.why[1:]}." if stand.why else ""
    others = [
        f"{network.name} with {its.method} ({its.score.value:.3f}; {s.answer}{', ' * bool(s.why)}{s.why})"
        for its, network, s in left
        if network is not chosen
    ]
    after = f" After it: {'; '.join(others)}." if others else ""
    return (
        f"Take **{chosen.name}** and explain it with **{best.method}**: AUC {chosen.last.auc:.3f}, and in "
        f"the {best.text(chosen.run)}, the highest of the networks' last weights."
        f"{care}{after}{against} An earlier checkpoint may be better: see each network's page."
    )


class Move(NamedTuple):
    """A method's score of a class, or of all classes, of the reference and of new weights."""

    method: str
    label: int | None
    old: PerClass
    new: PerClass

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
