"""A run with a decided verdict, as a project has one that heatproof is part of."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from heatproof.store import RunFolder
from made_run import made_record, make_run

METRICS = ("specificity_weights", "specificity_place", "pointing", "insertion")
CLASSES = ("normal", "pneumonia")


def make_judged(folder: Path) -> RunFolder:
    """gradcam and lime follow the network, layercam does not; it uses the object for normal only."""

    def values(metric: str, method: str, random: np.random.Generator) -> np.ndarray:
        if metric == "insertion":
            return random.normal(0.5, 0.05, 100)
        if metric == "pointing":
            return (random.random(100) < 0.9).astype(float)
        return random.normal(-0.3 if method == "layercam" else 0.6, 0.1, 100)

    record = made_record(("yes", "no"), classes=CLASSES)
    return make_run(folder, values, images=100, metrics=METRICS, classes=CLASSES, maps=False, evidence=record)
