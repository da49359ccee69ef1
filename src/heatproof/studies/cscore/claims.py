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
from collections.abc import Mapping, Sequence
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
        """Whether the method follows the hypothesis: yes, no or undecided; "" without a hypothesis."""
        if self.uses_gradients:
            against = self.below >= 0 or self.rise <= 0
            confirmed = self.below < 0 and self.p <= LEVEL
        else:
            against, confirmed = self.p <= LEVEL, self.rise <= 0
        stated = self.uses_gradients or self.is_eigencam
        return ("no" if against else "yes" if confirmed else "undecided") * stated


def uses_gradients(method: str) -> bool:
    """Whether a registered method reads gradients; False for unknown methods."""
    try:
        return explainers.get(parse_call(method)[0]).reads_gradients
    except UnknownNameError:
        return False


def is_eigencam(method: str) -> bool:
    return parse_call(method)[0].lower() == EIGEN


def mean_rise(trainings: Sequence[Phases]) -> tuple[float, float]:
    """Mean over trainings of late minus early scores, and its one-sided p; see the top.

    Scores that are NaN, and trainings with one phase only, are left out.

    >>> mean_rise([(np.array([0.1, 0.2, 0.9]), np.array([False, False, True]))])
    (0.75, 0.3333333333333333)
    """

    def rise(scores: np.ndarray, late: np.ndarray) -> np.ndarray:
        changes: np.ndarray = late @ scores / late.sum(1) - ~late @ scores / (~late).sum(1)
        return changes

    known = [(scores[~np.isnan(scores)], late[~np.isnan(scores)]) for scores, late in trainings]
    known = [(scores, late) for scores, late in known if 0 < late.sum() < len(late)]
    if not known:
        return math.nan, math.nan
    true = float(sum(rise(scores, late[None])[0] for scores, late in known))
    exact = math.prod(math.comb(len(late), int(late.sum())) for _, late in known) <= MOST
    rng = np.random.default_rng(0)
    sums = np.zeros(1 if exact else MOST)
    for scores, late in known:
        if exact:
            chosen = combinations(range(len(late)), int(late.sum()))
            ways = rise(scores, np.array([np.isin(np.arange(len(late)), some) for some in chosen]))
            sums = np.add.outer(sums, ways).ravel()
        else:
            sums += rise(scores, rng.permuted(np.tile(late, (MOST, 1)), axis=1))
    sums = sums if exact else np.append(sums, true)
    return true / len(known), float((sums >= true - 1e-12).mean())


def rises(trainings: Sequence[tuple[Trajectory, Sequence[bool]]]) -> list[Rise]:
    """Every method that all trainings have. trainings: with a flag by checkpoint: of the second phase."""
    states = [checkpoint.methods for run, _ in trainings for checkpoint in run]
    methods = [m for m in (states[0] if states else ()) if all(m in state for state in states)]
    scores = {m: [np.array([c.methods[m].value for c in run]) for run, _ in trainings] for m in methods}
    eigen = next((m for m in methods if is_eigencam(m)), "")
    others = {
        m: [a - b for a, b in zip(of, scores[eigen], strict=True)]
        for m, of in scores.items() if eigen and m != eigen
    }  # fmt: skip

    def tested(scores: Mapping[str, Sequence[np.ndarray]]) -> dict[str, tuple[float, float]]:
        phases = [np.array(late) for _, late in trainings]
        results = {m: mean_rise(list(zip(of, phases, strict=True))) for m, of in scores.items()}
        corrected = holm({m: p for m, (_, p) in results.items() if not math.isnan(p)})
        return {m: (rise, corrected.get(m, math.nan)) for m, (rise, _) in results.items()}

    own, beyond = tested(scores), tested(others)
    starts = {m: float(np.mean([values[0] for values in of])) for m, of in scores.items()}
    return [
        Rise(
            m, uses_gradients(m), starts[m], starts[m] - starts.get(eigen, math.nan), *own[m],
            *beyond.get(m, (math.nan, math.nan)),
        )
        for m in methods
    ]  # fmt: skip


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
