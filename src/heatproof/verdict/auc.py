"""AUC along a training and between networks: differences with their errors, and where it has fallen.

    AUC_t >= AUC_best - 1.96 SE(AUC_best - AUC_t),    best: the highest AUC of s < t

SE is that of a difference on the same images (delong1988auc). Pages print AUC alone: there SE^2 is the sum of
both squared errors, by hanley1982auc.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from heatproof.verdict.trajectory import CheckpointState, Trajectory


def auc_falls(trajectory: Trajectory, confidence: float = 0.95, finding: int | None = None) -> list[bool]:
    """By checkpoint: whether AUC is below its best so far by more than sampling error.

    finding: its own AUC, where images may have several.
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    fallen: list[bool] = []
    best: CheckpointState | None = None
    for checkpoint in trajectory if finding is None else (each.of(finding) for each in trajectory):
        # False where one is NaN
        fallen.append(best is not None and checkpoint.auc < best.auc - z * difference_error(checkpoint, best))
        if best is None or math.isnan(best.auc) or checkpoint.auc > best.auc:
            best = checkpoint
    return fallen


def difference_error(first: CheckpointState, second: CheckpointState) -> float:
    """The standard error of AUC - AUC': paired, or of two AUCs apart where their images are not known."""
    if first.moves and second.moves:
        images = sorted(first.moves.keys() | second.moves.keys())  # sums in one order
        moved = (first.moves.get(name, 0.0) - second.moves.get(name, 0.0) for name in images)
        if not math.isnan(paired := math.sqrt(sum(each * each for each in moved))):
            return paired
    return math.hypot(auc_error(first), auc_error(second))


class AucDifference(NamedTuple):
    """One AUC less another, with its standard error."""

    value: float
    error: float
    paired: bool  # whether both were measured on the same images, image by image

    @property
    def p(self) -> float:
        """The chance of so large a difference where there is none, two-sided."""
        if math.isnan(self.value) or math.isnan(self.error):
            return math.nan
        if self.error == 0:
            return 1.0 if self.value == 0 else 0.0
        return 2 * NormalDist().cdf(-abs(self.value) / self.error)

    @property
    def interval(self) -> tuple[float, float]:
        """95 %."""
        reach = NormalDist().inv_cdf(0.975) * self.error
        return self.value - reach, self.value + reach

    @property
    def surely_below(self) -> bool:
        return self.interval[1] < 0


def auc_difference(
    first: CheckpointState, second: CheckpointState, same_images: bool = True
) -> AucDifference:
    """AUC of the first less AUC of the second: by DeLong's paired error where they share images.

    Args:
        first, second: checkpoints, of one network or of two.
        same_images: False where images of one name are not the same images.
    """
    paired = bool(same_images and first.moves and second.moves)
    error = difference_error(first, second) if paired else math.hypot(auc_error(first), auc_error(second))
    return AucDifference(first.auc - second.auc, error, paired)


def auc_error(checkpoint: CheckpointState) -> float:
    """The standard error of a checkpoint's AUC, from its value and the sizes of the classes."""
    a, every = checkpoint.auc, sum(state.total for state in checkpoint.classes.values())
    two_own, two_rest = a / (2 - a) - a * a, 2 * a * a / (1 + a) - a * a
    pairs = [(state.total, every - state.total) for state in checkpoint.classes.values()]
    errors = [
        math.sqrt(max(a * (1 - a) + (own - 1) * two_own + (rest - 1) * two_rest, 0.0) / (own * rest))
        for own, rest in pairs
        if own and rest
    ]
    return sum(errors) / len(errors) if errors else math.nan
