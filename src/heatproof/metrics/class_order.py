"""Whether another order of the classes explains the labels much better than the assumed one.

Each label gets the output whose AUC for it is highest, no output twice (linear assignment). Each half of the
images is scored with the assignment found on the other half, so that an assignment that fits by chance gains
nothing. Reported if the labels that move gain at least 0.2 in mean AUC and 3 standard errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

LEAST_GAIN, ERRORS = 0.2, 3
PAIRED = 8  # times the variance of an AUC: of a difference of two, and each may depend on another label's
LEAST_POSITIVES = 2  # of each label, in each half of the images
ASSUMED = 0.02  # AUC by which another output must be better
MOST_NAMES = 10


@dataclass(frozen=True)
class ClassOrder:
    """The output that answers for each label, and how well labels and outputs agree before and after."""

    outputs: Mapping[int, int]  # label -> output
    before: float
    after: float
    n: int
    single: bool  # whether the numbers are accuracies; else mean AUCs

    def sentence(self, names: Sequence[str], count: int) -> str:
        """names: of the labels. count: of the network's outputs."""
        order: list[str | None] = [None] * count
        for label, output in self.outputs.items():
            order[output] = names[label]
        rest = iter([name for label, name in enumerate(names) if label not in self.outputs])
        order = [next(rest, None) if name is None else name for name in order]
        moved = {names[label]: output for label, output in self.outputs.items() if label != output}
        is_short = count <= MOST_NAMES and None not in order
        some = ", ".join(f"{name} is output {output}" for name, output in list(moved.items())[:MOST_NAMES])
        shown = ", ".join(map(str, order)) if is_short else some
        if self.single:
            gain = f"right on {self.after:.0%} of {self.n} images instead of {self.before:.0%}"
        else:
            gain = f"at a mean AUC of {self.after:.2f} instead of {self.before:.2f} (n = {self.n})"
        return (
            f"the classes seem to be in another order: {shown}; the network is then {gain}; name the classes "
            "in the order of its outputs (--class-names, or images.options.class_names in a study)"
        )


def class_order(truth: np.ndarray, scores: np.ndarray) -> ClassOrder | None:
    """Another order that explains the labels much better; None if there is none.

    truth: "n k" bool, the labels of each image. scores: "n outputs", probabilities, or 0 and 1 for the
    predicted class.

    >>> labels = np.arange(40) % 2
    >>> class_order(np.eye(2, dtype=bool)[labels], np.eye(2)[1 - labels]).outputs
    {0: 1, 1: 0}
    """
    half = np.empty(len(truth), dtype=bool)
    half[np.lexsort(truth.T)] = np.arange(len(truth)) % 2 == 0  # labels in equal shares
    counts = [np.minimum(truth[part].sum(0), (~truth[part]).sum(0)) for part in (half, ~half)]
    used = np.flatnonzero(np.minimum(*counts) >= LEAST_POSITIVES)
    if len(used) < 2 or scores.shape[1] <= used.max():
        return None
    chosen = _assigned(_auc_matrix(truth[:, used], scores), used)
    if (chosen == used).all():
        return None
    gain, error, moved = 0.0, 0.0, 0
    for part, other in ((half, ~half), (~half, half)):
        own = _assigned(_auc_matrix(truth[part][:, used], scores[part]), used)
        table = _auc_matrix(truth[other][:, used], scores[other])
        rows = np.flatnonzero(own != used)
        gain += float((table[rows, own[rows]] - table[rows, used[rows]]).sum())
        positives = truth[other][:, used[rows]].sum(0)
        negatives = other.sum() - positives
        error += float((PAIRED * (other.sum() + 1) / (12 * positives * negatives)).sum())
        moved += len(rows)
    if not moved or gain / moved < LEAST_GAIN or gain < ERRORS * error**0.5:
        return None
    table = _auc_matrix(truth[:, used], scores)
    single = bool((truth.sum(1) == 1).all() and np.isin(scores, (0, 1)).all())
    places = np.arange(len(used))
    before, after = table[places, used].mean(), table[places, chosen].mean()
    if single:
        label, to = truth.argmax(1), np.arange(truth.shape[1])
        to[used] = chosen
        before, after = (scores[np.arange(len(label)), at[label]].mean() for at in (np.arange(len(to)), to))
    outputs = dict(zip(used.tolist(), chosen.tolist(), strict=True))
    return ClassOrder(outputs, float(before), float(after), len(truth), single)


def _assigned(table: np.ndarray, used: np.ndarray) -> np.ndarray:
    """The output of each label: the assumed one unless others are better together."""
    table = table.copy()
    table[np.arange(len(used)), used] += ASSUMED
    if (table.argmax(1) == used).all():
        return used
    from scipy.optimize import linear_sum_assignment  # takes longer to import than most verdicts

    columns: np.ndarray = linear_sum_assignment(table, maximize=True)[1]
    return columns


def _auc_matrix(truth: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """ "labels outputs": AUC of each output for each label."""
    ranks = np.stack([_ranks(column) for column in scores.T], axis=1)
    positives = truth.sum(0)[:, None]
    above = truth.T.astype(float) @ ranks - positives * (positives + 1) / 2
    table: np.ndarray = above / (positives * (len(truth) - positives))
    return table


def _ranks(column: np.ndarray) -> np.ndarray:
    """From 1, ties get their mean rank: scipy.stats.rankdata, whose import takes long."""
    _, places, counts = np.unique(column, return_inverse=True, return_counts=True)
    ranks: np.ndarray = (counts.cumsum() - (counts - 1) / 2)[places]
    return ranks
