"""Two statements of the C-Score paper as tests: gradients and fine-tuning, and the equivalence of methods.

Section 3.2.3 expects gradient methods to start low and to rise when the whole network is trained, and
EigenCAM, which reads no gradient, not to. Over trainings (networks, seeds) with checkpoints in both phases,
per method:

    start  = C at the first checkpoint; below: minus that of EigenCAM
    rise   = mean C over the checkpoints of phase 2 - mean over those of phase 1, mean over the trainings
    p      = share of all ways to exchange checkpoints between the phases of each training whose rise is at
             least the true one; above 20,000 ways, as many are drawn
    beyond = the same of C minus that of EigenCAM: whether the method rises more than EigenCAM does

p are corrected over the methods (Holm). One training of five and two checkpoints has 21 ways, so its smallest
p is 0.048; checkpoints of one training are not independent, so that seeds are the better evidence.

Section 4.2.1 calls methods equivalent where their scores converge. Here: at a checkpoint, the largest group
of methods whose scores differ by at most 0.05; they have converged at the first checkpoint from which on,
until the end, more than half of the methods are in such a group. elangovan2026cscore.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from statistics import pstdev
from typing import NamedTuple

import numpy as np

from heatproof.errors import UnknownNameError
from heatproof.registry import explainers, parse_call
from heatproof.verdict.follow import holm
from heatproof.verdict.trajectory import CheckpointState, Trajectory

MOST = 20_000  # ways to assign checkpoints to phases
LEVEL = 0.05
EQUAL = 0.05  # of C: methods that differ by no more are called equivalent
EIGEN = "eigencam"
GRADIENTS = frozenset({"gradients", "scales", "input_gradient"})  # needs of methods

Phases = tuple[np.ndarray, np.ndarray]  # scores of a training by checkpoint, and which are of phase 2


class Rise(NamedTuple):
    """What the second phase does to a method's C-Score."""

    method: str
    uses_gradients: bool
    start: float
    below: float  # start minus that of EigenCAM
    rise: float
    p: float
    beyond: float  # rise minus that of EigenCAM
    p_beyond: float

    @property
    def is_eigencam(self) -> bool:
        return is_eigencam(self.method)

    @property
    def expected(self) -> str:
        """Whether the method behaves as the hypothesis says: yes, no or undecided; "" if it says nothing."""
        if self.uses_gradients:
            against, shown = not (self.below < 0 < self.rise), self.p <= LEVEL
        else:
            against, shown = self.p <= LEVEL, self.rise <= 0
        stated = self.uses_gradients or self.is_eigencam
        return ("no" if against else "yes" if shown else "undecided") * stated


def uses_gradients(method: str) -> bool:
    """Whether a method reads gradients, by its registered needs; False for unknown methods."""
    try:
        return not GRADIENTS.isdisjoint(explainers.get(parse_call(method)[0]).needs)
    except UnknownNameError:
        return False


def is_eigencam(method: str) -> bool:
    return parse_call(method)[0].lower() == EIGEN


def mean_rise(trainings: Sequence[Phases], seed: int = 0) -> tuple[float, float]:
    """Mean over trainings of late minus early scores, and its one-sided p; see the top.

    Scores that are NaN, and trainings with one phase only, are left out.

    >>> mean_rise([(np.array([0.1, 0.2, 0.9]), np.array([False, False, True]))])
    (0.75, 0.3333333333333333)
    """

    def rise(scores: np.ndarray, late: np.ndarray) -> float:
        return float(scores[late].mean() - scores[~late].mean())

    known = [(scores[~np.isnan(scores)], late[~np.isnan(scores)]) for scores, late in trainings]
    known = [(scores, late) for scores, late in known if 0 < late.sum() < len(late)]
    if not known:
        return math.nan, math.nan
    true = sum(rise(*training) for training in known)
    if math.prod(math.comb(len(late), int(late.sum())) for _, late in known) <= MOST:
        sums = np.zeros(1)
        for scores, late in known:
            chosen = combinations(range(len(late)), int(late.sum()))
            ways = [rise(scores, np.isin(np.arange(len(late)), some)) for some in chosen]
            sums = np.add.outer(sums, ways).ravel()
    else:
        rng = np.random.default_rng(seed)
        drawn = [sum(rise(scores, rng.permutation(late)) for scores, late in known) for _ in range(MOST)]
        sums = np.array([true, *drawn])
    return true / len(known), float((sums >= true - 1e-12).mean())


def rises(trainings: Sequence[tuple[Trajectory, Sequence[bool]]]) -> list[Rise]:
    """Every method that all trainings have. trainings: with a flag by checkpoint: of the second phase."""
    states = [checkpoint.methods for run, _ in trainings for checkpoint in run]
    methods = [m for m in (states[0] if states else ()) if all(m in state for state in states)]
    scores = {m: [np.array([c.methods[m].value for c in run]) for run, _ in trainings] for m in methods}
    eigen = next((of for m, of in scores.items() if is_eigencam(m)), [np.array(math.nan)] * len(trainings))

    def tested(minus: Sequence[np.ndarray] | None) -> dict[str, tuple[float, float]]:
        results = {}
        for m, of in scores.items():
            series = of if minus is None else [a - b for a, b in zip(of, minus, strict=True)]
            phases = [np.array(late) for _, late in trainings]
            results[m] = mean_rise(list(zip(series, phases, strict=True)))
        judged = {
            m: p
            for m, (_, p) in results.items()
            if not math.isnan(p) and (minus is None or not is_eigencam(m))
        }
        corrected = holm(judged)
        return {
            m: (rise if m in judged else math.nan, corrected.get(m, math.nan))
            for m, (rise, _) in results.items()
        }

    own, beyond = tested(None), tested(eigen)
    starts = {m: float(np.mean([values[0] for values in of])) for m, of in scores.items()}
    first = float(np.mean([values.flat[0] for values in eigen])) if methods else math.nan
    return [Rise(m, uses_gradients(m), starts[m], starts[m] - first, *own[m], *beyond[m]) for m in methods]


class Spread(NamedTuple):
    """How far the methods are apart at a checkpoint."""

    checkpoint: str
    methods: int
    width: float  # highest minus lowest score
    deviation: float
    group: tuple[str, ...]  # the largest whose scores differ by at most EQUAL


def spread(checkpoint: CheckpointState) -> Spread:
    """The spread of the scores over all classes."""
    known = {m: s.value for m, s in checkpoint.methods.items() if not math.isnan(s.value)}
    order = sorted(known, key=lambda m: known[m])
    groups = [tuple(m for m in order if 0 <= known[m] - known[low] <= EQUAL + 1e-12) for low in order]
    width = known[order[-1]] - known[order[0]] if order else math.nan
    deviation = pstdev(known.values()) if order else math.nan
    return Spread(checkpoint.name, len(order), width, deviation, max(groups, key=len, default=()))


def converged(run: Trajectory) -> str | None:
    """The checkpoint from which on more than half of the methods are equivalent; None if there is none."""
    since = None
    for each in map(spread, run):
        together = each.methods > 1 and 2 * len(each.group) > each.methods
        since = (since or each.checkpoint) if together else None
    return since
