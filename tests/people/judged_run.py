"""A run with a decided verdict, as a project has one that heatproof is part of."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from heatproof.store import RunFolder
from made_run import make_run

METRICS = ("specificity_weights", "specificity_place", "pointing", "insertion")


def make_judged(folder: Path) -> RunFolder:
    """gradcam and lime follow the network, layercam does not; it looks where it should for normal only."""

    def values(metric: str, method: str, random: np.random.Generator) -> np.ndarray:
        if metric == "insertion":
            return random.normal(0.5, 0.05, 100)
        if metric == "pointing":
            there = random.random(100) < (0.9 if method in ("gradcam", "lime(samples=9)") else 0.2)
            return np.where(np.arange(100) % 2 == 0, there, 0.0)
        return random.normal(-0.3 if method == "layercam" else 0.6, 0.1, 100)

    return make_run(folder, values, images=100, metrics=METRICS, classes=("normal", "pneumonia"), maps=False)
