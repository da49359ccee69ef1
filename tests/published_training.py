"""The trainings that elangovan2026cscore prints: seven checkpoints, six methods, two classes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from heatproof.metrics.results import PerClass
from heatproof.verdict.trajectory import CheckpointState, ClassState, Trajectory

TABLES: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "papers.json").read_text())["cscore"]
CLASSES = {"normal": 317, "pneumonia": 855}  # images of each


def published(architecture: str) -> Trajectory:
    """Gold lists as they follow from accuracy and the global scores; intervals are not printed."""
    place, checkpoints = TABLES["archs"].index(architecture), []
    for k, epoch in enumerate(TABLES["epochs"]):
        auc, percent = TABLES["acc"][str(epoch)][place]
        lists = TABLES["gold"][f"{architecture}|E{epoch}"]
        gold = [lists["best_point"]["n0"], lists["N"] - lists["best_point"]["n0"]]
        states = {c: ClassState(total, gold[c]) for c, total in enumerate(CLASSES.values())}
        methods = {
            method: PerClass(
                overall[k],
                sum(gold),
                math.nan,
                classes={
                    c: PerClass(TABLES[n][architecture][method][k], gold[c], math.nan)
                    for c, n in enumerate(CLASSES)
                },
            )
            for method, overall in TABLES["global"][architecture].items()
        }
        checkpoints.append(CheckpointState(f"E{epoch}", epoch, auc, percent / 100, states, methods))
    return Trajectory(tuple(checkpoints), ("Normal", "Pneumonia"))
