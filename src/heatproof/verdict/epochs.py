"""Numbers of every epoch of a training, also between checkpoints: flags, and events that precede them.

Flags (Table 2 of elangovan2026cscore):

    AUC below 0.5                        the ranking is inverted: the network has collapsed
    accuracy below 50 %, AUC intact      the ranking holds (AUC >= 0.75), but the threshold has left a class;
                                         with k classes it is 1 / k, the accuracy of guessing

Events of a training that may cause a collapse (section 6 of the paper names three and diagnosed none):

    gradient norm                 over all layers, jumps
    gradient norm over batches    sqrt of the sum over layers of its variance over an epoch's steps, jumps
    loss over batches             its standard deviation over the batches of an epoch, jumps
    learning rate                 at least twice that of the epoch before, also from one phase to the next

A number jumps if it is at least twice the median of the five epochs before it in its phase, and above it by
more than three of their robust standard deviations (1.4826 MAD, of logarithms). A phase's first two epochs
are not judged.

Early warning: of the epochs with an alarm, how many had an event in the epoch itself, which is trained before
it is measured, or in the five before, compared with all rotations of the list of epochs (which preserve the
number of events and their grouping):

    p = share of rotations, the true one among them, with at least as many alarms preceded by an event
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from heatproof.store.ledger import known_record, write_record
from heatproof.train.recipe import Epoch, GradientNorm

COLLAPSED = "AUC below 0.5"
INTACT = 0.75  # half way from guessing to perfect, as for alarms
PAST, TWICE, DEVIATIONS = 2, 2.0, 3.0
WINDOW = 5  # epochs from one checkpoint of the paper to the next
FILE = "gradients.json"

Norms = Mapping[str, GradientNorm]


def epoch_flag(auc: float, accuracy: float, classes: int = 2) -> str:
    """The flag of an epoch, "" if there is none.

    >>> epoch_flag(0.9852, 0.2705), epoch_flag(0.1034, 0.7295), epoch_flag(0.9945, 0.9420)
    ('accuracy below 50 %, AUC intact', 'AUC below 0.5', '')
    """
    if auc < 0.5:
        return COLLAPSED
    guessing = 1 / max(classes, 2)
    crossed = auc >= INTACT and accuracy < guessing
    return f"accuracy below {guessing:.0%}, AUC intact".replace("%", " %") if crossed else ""


def whole_norm(norms: Norms) -> float:
    """The norm over all layers; NaN if none was logged."""
    return math.sqrt(sum(norm.mean**2 for norm in norms.values())) if norms else math.nan


def whole_deviation(norms: Norms) -> float:
    """Deviation of the norms over the steps of an epoch, over all layers; NaN if none was logged."""
    return math.sqrt(sum(norm.deviation**2 for norm in norms.values())) if norms else math.nan


def jumps(epochs: Sequence[Epoch], value: Callable[[Epoch], float]) -> list[int]:
    """The epochs at which a number jumps; 0 and NaN are not judged."""
    past: dict[str, list[float]] = {}
    jumped = []
    for epoch in epochs:
        logs, number = past.setdefault(epoch.phase, []), value(epoch)
        if not number > 0:
            continue
        if len(logs) >= PAST:
            middle = median(logs[-WINDOW:])
            spread = 1.4826 * median(abs(value - middle) for value in logs[-WINDOW:])
            if math.log(number) > middle + max(math.log(TWICE), DEVIATIONS * spread):
                jumped.append(epoch.epoch)
        logs.append(math.log(number))
    return jumped


def training_events(epochs: Sequence[Epoch]) -> dict[str, list[int]]:
    """The epochs with each event of the top that can be judged; gradients only if they were logged."""
    judged: dict[str, Callable[[Epoch], float]] = {
        "gradient norm": lambda epoch: whole_norm(epoch.gradients),
        "gradient norm over batches": lambda epoch: whole_deviation(epoch.gradients),
        "loss over batches": lambda epoch: epoch.loss_deviation,
    }
    events = {
        name: jumps(epochs, value) for name, value in judged.items() if any(value(e) > 0 for e in epochs)
    }
    rises = [now.epoch for before, now in pairwise(epochs) if now.lr >= TWICE * before.lr > 0]
    return events | {"learning rate": rises}


def grown_layers(before: Norms, now: Norms, count: int = 3) -> list[str]:
    """The layers whose norms grew most, by factor."""
    shared = [name for name, norm in before.items() if name in now and norm.mean > 0]
    return sorted(shared, key=lambda name: now[name].mean / before[name].mean, reverse=True)[:count]


class EarlyWarning(NamedTuple):
    """How many epochs with an alarm were preceded by an event."""

    alarms: int  # epochs with an alarm
    preceded: int
    p: float  # NaN if there is nothing to test


def early_warning(epochs: Sequence[int], events: Sequence[int], alarms: Sequence[int]) -> EarlyWarning:
    """Test whether events precede alarms more often than by chance.

    Args:
        epochs: all of a training, in order.
        events, alarms: those of them with one.
    """
    raised, flags = sorted(set(alarms) & set(epochs)), [epoch in set(events) for epoch in epochs]

    def preceded(shift: int) -> int:
        at = {epoch for k, epoch in enumerate(epochs) if flags[k - shift]}
        return sum(any(epoch - WINDOW <= other <= epoch for other in at) for epoch in raised)

    p = math.nan
    if raised and any(flags):
        p = sum(preceded(shift) >= preceded(0) for shift in range(len(epochs))) / len(epochs)
    return EarlyWarning(len(raised), preceded(0), p)


def write_gradients(run: Path, checkpoint: str, norms: Norms) -> None:
    """Add a checkpoint's norms to those of a run folder."""
    stored = (known_record(run / FILE) or {}).get("checkpoints", {})
    write_record(run / FILE, {"checkpoints": {**stored, checkpoint: norms}}, indent=None)


def read_gradients(run: Path) -> dict[str, dict[str, GradientNorm]]:
    """Norms that a monitor logged, by checkpoint and layer; {} if it did not."""
    stored = (known_record(run / FILE) or {}).get("checkpoints", {})
    return {
        checkpoint: {layer: GradientNorm(*norm) for layer, norm in norms.items()}
        for checkpoint, norms in stored.items()
    }
