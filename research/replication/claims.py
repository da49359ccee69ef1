"""Claims of the C-Score paper, tested on trainings by its protocol.

A claim is a number per training with the sign that the claim predicts. Over the trainings of a network the
mean has a 95 % t interval. A claim holds for a network if the whole interval is on the predicted side of the
limit, does not hold if it is on the other side, and is undecided otherwise; over networks it holds (or does
not) if this is so for all of them, else it is mixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import t

GRADIENT = ("gradcam", "gradcam++", "layercam", "ms-gradcam++")
SCORE = "scorecam(channels=32)"
CONVERGING = ("gradcam++", "layercam", SCORE)
HOLDS, NOT, MIXED, UNTESTED = "holds", "does not hold", "mixed", "cannot be tested here"
Rows = Mapping[int, Mapping[str, Any]]  # by epoch


@dataclass(frozen=True)
class Claim:
    """A claim: where it is in the paper, its number there, and the number of a training.

    above: the claim predicts a number above the limit; else below it.
    """

    where: str
    text: str
    published: tuple[float, float, float]  # of DenseNet201, InceptionV3, ResNet50V2
    number: Callable[[Rows], float]
    measured: str  # what the number is
    limit: float = 0.0
    above: bool = True


def _c(rows: Rows, epoch: int, method: str, label: int | None = None) -> float:
    own = rows[epoch]["cscores"][method]
    return float(own["value"] if label is None else own["classes"][str(label)]["value"])


def _gain(method: str) -> Callable[[Rows], float]:
    return lambda rows: _c(rows, 30, method) - _c(rows, 20, method)


def _margin(first: str, second: str, epochs: Sequence[int]) -> Callable[[Rows], float]:
    return lambda rows: float(np.mean([_c(rows, e, first) - _c(rows, e, second) for e in epochs]))


def _distance(first: str, second: str) -> Callable[[Rows], float]:
    return lambda rows: float(np.mean([abs(_c(rows, e, first) - _c(rows, e, second)) for e in EPOCHS]))


def _spread(methods: Sequence[str], epoch: int) -> Callable[[Rows], float]:
    def number(rows: Rows) -> float:
        values = [_c(rows, epoch, method) for method in methods]
        return max(values) - min(values)

    return number


def _eigen_is_first(rows: Rows) -> float:
    return _c(rows, 20, "eigencam") - max(_c(rows, 20, method) for method in (*GRADIENT, SCORE))


def _threshold_crossing(rows: Rows) -> float:
    """Smallest accuracy in the first three epochs of fine-tuning; 1 if AUC fell too."""
    return min(rows[e]["accuracy"] if rows[e]["auc"] > 0.9 else 1.0 for e in (21, 22, 23))


def _relative_gap(rows: Rows) -> float:
    """Largest difference of Grad-CAM's classes during transfer learning."""
    return max(abs(_c(rows, e, "gradcam", 0) - _c(rows, e, "gradcam", 1)) for e in (1, 5, 10, 15, 20))


EPOCHS = (1, 5, 10, 15, 20, 25, 30)
CLAIMS = (
    Claim("3.3", "Grad-CAM++ is more consistent than Grad-CAM", (0.267, 0.269, 0.160),
          _margin("gradcam++", "gradcam", EPOCHS), "mean difference over seven checkpoints"),
    Claim("3.3", "LayerCAM is comparable to Grad-CAM++", (0.016, 0.060, 0.059),
          _distance("layercam", "gradcam++"),
          "mean distance over seven checkpoints", 0.05, False),
    Claim("3.3, Tables 3 and 4", "EigenCAM is stable during transfer learning", (0.000, 0.002, 0.099),
          lambda rows: abs(_c(rows, 20, "eigencam") - _c(rows, 1, "eigencam")), "distance of epochs 1 and 20",
          0.05, False),
    Claim("Tables 3 to 5", "EigenCAM is the most consistent method after transfer learning",
          (0.005, 0.188, 0.034), _eigen_is_first, "margin to the next method at epoch 20"),
    Claim("4.1, Table 2", "AUC rises during transfer learning", (0.072, 0.098, 0.032),
          lambda rows: rows[20]["auc"] - rows[1]["auc"], "epoch 20 less epoch 1"),
    Claim("4.2.1", "Gradient methods become more consistent by fine-tuning", (0.354, 0.189, -0.098),
          lambda rows: float(np.mean([_gain(m)(rows) for m in GRADIENT])),
          "mean change of four methods from epoch 20 to 30"),
    Claim("4.2.1", "Fine-tuning raises Grad-CAM more than EigenCAM", (0.399, -0.048, 0.178),
          lambda rows: _gain("gradcam")(rows) - _gain("eigencam")(rows), "difference of the changes"),
    Claim("4.2.1", "Methods converge after fine-tuning (method equivalence)", (0.010, 0.004, 0.489),
          _spread(CONVERGING, 30), "spread of Grad-CAM++, LayerCAM and ScoreCAM at epoch 30", 0.05, False),
    Claim("4.3.1", "A large class gap of Grad-CAM during transfer learning", (0.659, 0.242, 0.398),
          _relative_gap, "largest gap between the classes", 0.2),
    Claim("4.4, mechanism 1", "Accuracy collapses at the start of fine-tuning while AUC stays",
          (0.271, 0.288, 0.425), _threshold_crossing, "smallest accuracy in epochs 21 to 23",
          0.5, False),
    Claim("3.3", "MS-Grad-CAM++ dilutes: it is below Grad-CAM++ after fine-tuning", (-0.252, -0.108, -0.069),
          _margin("ms-gradcam++", "gradcam++", (30,)), "difference at epoch 30", 0.0, False),
    Claim("3.3", "MS-Grad-CAM++ changes less by fine-tuning than ScoreCAM", (0.077, 0.145, 0.514),
          lambda rows: abs(_gain(SCORE)(rows)) - abs(_gain("ms-gradcam++")(rows)),
          "difference of the absolute changes"),
)  # fmt: skip


def t_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and 95 % t interval; an infinite interval for fewer than two values."""
    numbers = np.array([v for v in values if math.isfinite(v)])
    if not len(numbers):
        return math.nan, -math.inf, math.inf
    mean, n = float(numbers.mean()), len(numbers)
    if n < 2:
        return mean, -math.inf, math.inf
    half = float(t.ppf(0.975, n - 1) * numbers.std(ddof=1) / math.sqrt(n))
    return mean, mean - half, mean + half


def answer(low: float, high: float, limit: float, above: bool) -> str:
    if low > limit or high < limit:
        return HOLDS if (low > limit) == above else NOT
    return MIXED


def claim_rows(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row per claim and network."""
    networks: dict[str, list[Rows]] = {}
    for result in results:
        rows = {row["epoch"]: row for row in result["epochs"]}
        if 30 in rows:
            networks.setdefault(result["training"]["network"], []).append(rows)
    return [
        {"claim": claim.text, "network": network, "trainings": len(trainings), "mean": mean, "low": low,
         "high": high, "limit": claim.limit, "predicted": "above" if claim.above else "below",
         "answer": answer(low, high, claim.limit, claim.above)}
        for claim in CLAIMS for network, trainings in networks.items()
        for mean, low, high in [t_interval([claim.number(rows) for rows in trainings])]
    ]  # fmt: skip


def overall(answers: Sequence[str]) -> str:
    """The answer over networks."""
    return answers[0] if answers and len(set(answers)) == 1 else MIXED if answers else UNTESTED
