"""Whether agreement with the other methods and similarity to untrained networks could replace the test.

    python -m research.calibration.cheap docs/results/calibration/tests.csv

A method follows if its mean agreement is at least `agree` and its excess similarity to an untrained network
(randomisation against its null) at most `excess`; it does not follow below `apart` or above `alike`. The
limits are chosen on every other pair and counted on the rest, as in thresholds.py. The file holds means over
100 images, so there is no test of significance.
"""

from __future__ import annotations

import csv
import math
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

import numpy as np

from research.calibration.collect import CONTROLS
from research.calibration.thresholds import MOST_FALSE_ALARMS, MOST_MISSES, Share

AGREE, EXCESS = np.arange(0.1, 0.9, 0.05), (-0.3, -0.2, -0.1, -0.05, 0.0, 0.05, 0.1, 0.2)
APART, ALIKE = (-math.inf, *np.arange(-0.3, 0.4, 0.05)), (0.3, 0.4, 0.5, 0.6, 0.8, math.inf)
Row = Mapping[str, str]
Limits = tuple[float, float, float, float]  # agree, excess, apart, alike


def answers(rows: Sequence[Row], limits: Limits) -> np.ndarray:
    """1 for "follows", -1 for "does not follow", 0 for undecided."""
    agreement, excess = (
        np.array([float(r[k] or "nan") for r in rows]) for k in ("agreement", "untrained_excess")
    )
    agree, most, apart, alike = limits
    yes = (agreement >= agree) & (excess <= most)
    return np.where(yes, 1, np.where((agreement <= apart) | (excess >= alike), -1, 0))


def outcome(rows: Sequence[Row], limits: Limits) -> tuple[Share, Share, Share, float]:
    """False alarms, misses, undecided methods, and misses of the kind of control that is missed most."""
    given = answers(rows, limits)
    kinds = np.array([row["method"] for row in rows])
    control = np.isin(kinds, CONTROLS)
    follows = ~control & np.array([float(row["contrast_low"]) > 0.5 for row in rows])
    worst = max(float((given[kinds == kind] == 1).mean()) for kind in {*kinds[control]})
    return (
        Share.of(int((given[follows] == -1).sum()), int(follows.sum())),
        Share.of(int((given[control] == 1).sum()), int(control.sum())),
        Share.of(int((given[~control] == 0).sum()), int((~control).sum())),
        worst,
    )


def main(path: Path) -> None:
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    pairs = sorted({row["pair"] for row in rows})
    chose, other = ([row for row in rows if row["pair"] in pairs[k::2]] for k in (0, 1))
    for name, no in (("yes and no", product(APART, ALIKE)), ("yes only", [(-math.inf, math.inf)])):
        tried = [(*yes, *limits) for limits in no for yes in product(AGREE, EXCESS)]
        good = [
            (result[2].share, limits)
            for limits in tried
            if (result := outcome(chose, limits))[0].share <= MOST_FALSE_ALARMS and result[3] <= MOST_MISSES
        ]
        best = min(good)[1]
        for half, of in (("used to choose the limits", chose), ("other half", other)):
            alarm, miss, undecided, worst = outcome(of, best)
            print(f"| {name} | {half} | {alarm.text} | {miss.text} | {undecided.text} | {worst:.1%} |")
        print(f"agree {best[0]:.2f}, excess {best[1]:.2f}, apart {best[2]:.2f}, alike {best[3]:.2f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
