"""Numbers of every epoch of a training, also between checkpoints: flags, and jumps of the gradients.

Flags (Table 2 of elangovan2026cscore):

    AUC below 0.5                        the ranking is inverted: the network has collapsed
    accuracy below 50 %, AUC intact      the ranking holds (AUC >= 0.75), but the threshold has left a class;
                                         with k classes it is 1 / k, the accuracy of guessing

A jump of the gradients: the norm over all layers is at least twice the median of the five epochs before it in
its phase, and above it by more than three of their robust standard deviations (1.4826 MAD, of logarithms). A
phase's first two epochs are not judged.

Early warning: of the epochs with an alarm, how many had a jump in the five epochs before, compared with all
rotations of the list of epochs (which keep the number of jumps and their grouping):

    p = share of rotations, the true one among them, with at least as many alarms preceded by a jump
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

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


def gradient_jumps(epochs: Sequence[Epoch]) -> list[int]:
    """The epochs at which the gradients jump."""
    past: dict[str, list[float]] = {}
    jumps = []
    for epoch in epochs:
        logs, norm = past.setdefault(epoch.phase, []), whole_norm(epoch.gradients)
        if math.isnan(norm) or norm <= 0:
            continue
        if len(logs) >= PAST:
            middle = median(logs[-WINDOW:])
            spread = 1.4826 * median(abs(value - middle) for value in logs[-WINDOW:])
            if math.log(norm) > middle + max(math.log(TWICE), DEVIATIONS * spread):
                jumps.append(epoch.epoch)
        logs.append(math.log(norm))
    return jumps


def grown_layers(before: Norms, now: Norms, count: int = 3) -> list[str]:
    """The layers whose norms grew most, by factor."""
    shared = [name for name, norm in before.items() if name in now and norm.mean > 0]
    return sorted(shared, key=lambda name: now[name].mean / before[name].mean, reverse=True)[:count]


@dataclass(frozen=True)
class EarlyWarning:
    """How many alarms were preceded by a jump of the gradients."""

    alarms: int  # epochs with an alarm
    foretold: int
    jumps: int
    epochs: int
    p: float  # NaN if there is nothing to test
    what: str = "an alarm"

    @property
    def sentence(self) -> str:
        if not self.alarms or not self.jumps:
            return (
                f"The gradients jumped at {self.jumps} of {self.epochs} epochs; epochs with {self.what}: "
                f"{self.alarms}. There is nothing to test."
            )
        verdict = "more than chance gives" if self.p <= 0.05 else "no more than chance gives"
        return (
            f"{self.foretold} of {self.alarms} epochs with {self.what} had a jump of the gradients in the "
            f"{WINDOW} epochs before ({self.jumps} jumps in {self.epochs} epochs): {verdict}, "
            f"p = {self.p:.2f}."
        )


def early_warning(
    epochs: Sequence[int], jumps: Sequence[int], alarms: Sequence[int], what: str = "an alarm"
) -> EarlyWarning:
    """Test whether jumps precede alarms more often than by chance.

    Args:
        epochs: all of a training, in order.
        jumps, alarms: those of them with one.
        what: name of the event, if it is not an alarm.
    """
    raised, flags = sorted(set(alarms) & set(epochs)), [epoch in set(jumps) for epoch in epochs]

    def foretold(shift: int) -> int:
        at = {epoch for k, epoch in enumerate(epochs) if flags[k - shift]}
        return sum(any(epoch - WINDOW <= other < epoch for other in at) for epoch in raised)

    p = math.nan
    if raised and any(flags):
        p = sum(foretold(shift) >= foretold(0) for shift in range(len(epochs))) / len(epochs)
    return EarlyWarning(len(raised), foretold(0), sum(flags), len(epochs), p, what)


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
