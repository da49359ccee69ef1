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
    measured: str  # what the number is
    published: tuple[float, ...] | str  # of DenseNet201, InceptionV3, ResNet50V2; or in words
    number: Callable[[Any], Any]  # of a training; of several: a number per training, by group
    limit: float = 0.0
    above: bool = True

    @property
    def side(self) -> str:
        return "above" if self.above else "below"

    @property
    def title(self) -> str:
        return f"{self.text} ({self.measured}, {self.side} {self.limit:g})"

    @property
    def published_text(self) -> str:
        if isinstance(self.published, str):
            return self.published
        return ", ".join(f"{number:.3f}" for number in self.published) or "no number"

    def row(self, kind: str, group: str, numbers: Sequence[float]) -> dict[str, Any]:
        """A row of claims.csv from the numbers of a group's trainings. kind: of group, such as network."""
        mean, low, high = t_interval(numbers)
        return {
            "claim": self.text, kind: group, "trainings": len(numbers), "mean": mean, "low": low,
            "high": high, "limit": self.limit, "predicted": self.side,
            "answer": answer(low, high, self.limit, self.above) if math.isfinite(mean) else UNTESTED,
        }  # fmt: skip

    def entry(
        self, paper: str, rows: Sequence[Mapping[str, str]], name: Callable[[Mapping[str, str]], str]
    ) -> dict[str, str]:
        """The entry of the index of all claims from rows of claims.csv. name: of a row's group."""
        own = [row for row in rows if row["claim"] == self.text]
        return {
            "paper": paper, "where": self.where, "text": self.title, "published": self.published_text,
            "here": "; ".join(f"{name(row)} {interval_text(row)}" for row in own),
            "answer": overall([row["answer"] for row in own]),
        }  # fmt: skip


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
    Claim("3.3", "Grad-CAM++ is more consistent than Grad-CAM", "mean difference over seven checkpoints",
          (0.267, 0.269, 0.160), _margin("gradcam++", "gradcam", EPOCHS)),
    Claim("3.3", "LayerCAM is comparable to Grad-CAM++", "mean distance over seven checkpoints",
          (0.016, 0.060, 0.059), _distance("layercam", "gradcam++"), 0.05, False),
    Claim("3.3, Tables 3 and 4", "EigenCAM is stable during transfer learning", "distance of epochs 1 and 20",
          (0.000, 0.002, 0.099), lambda rows: abs(_c(rows, 20, "eigencam") - _c(rows, 1, "eigencam")), 0.05,
          False),
    Claim("Tables 3 to 5", "EigenCAM is the most consistent method after transfer learning",
          "margin to the next method at epoch 20", (0.005, 0.188, 0.034), _eigen_is_first),
    Claim("4.1, Table 2", "AUC rises during transfer learning", "epoch 20 less epoch 1",
          (0.072, 0.098, 0.032), lambda rows: rows[20]["auc"] - rows[1]["auc"]),
    Claim("4.2.1", "Gradient methods become more consistent by fine-tuning",
          "mean change of four methods from epoch 20 to 30", (0.354, 0.189, -0.098),
          lambda rows: float(np.mean([_gain(m)(rows) for m in GRADIENT]))),
    Claim("4.2.1", "Fine-tuning raises Grad-CAM more than EigenCAM", "difference of the changes",
          (0.399, -0.048, 0.178), lambda rows: _gain("gradcam")(rows) - _gain("eigencam")(rows)),
    Claim("4.2.1", "Methods converge after fine-tuning (method equivalence)",
          "spread of Grad-CAM++, LayerCAM and ScoreCAM at epoch 30", (0.010, 0.004, 0.489),
          _spread(CONVERGING, 30), 0.05, False),
    Claim("4.3.1", "A large class gap of Grad-CAM during transfer learning",
          "largest gap between the classes", (0.659, 0.242, 0.398), _relative_gap, 0.2),
    Claim("4.4, mechanism 1", "Accuracy collapses at the start of fine-tuning while AUC stays",
          "smallest accuracy in epochs 21 to 23", (0.271, 0.288, 0.425), _threshold_crossing, 0.5, False),
    Claim("3.3", "MS-Grad-CAM++ dilutes: it is below Grad-CAM++ after fine-tuning", "difference at epoch 30",
          (-0.252, -0.108, -0.069), _margin("ms-gradcam++", "gradcam++", (30,)), 0.0, False),
    Claim("3.3", "MS-Grad-CAM++ changes less by fine-tuning than ScoreCAM",
          "difference of the absolute changes", (0.077, 0.145, 0.514),
          lambda rows: abs(_gain(SCORE)(rows)) - abs(_gain("ms-gradcam++")(rows))),
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


def claim_rows(
    results: Sequence[Mapping[str, Any]], claims: Sequence[Claim] = CLAIMS, epochs: int = 30
) -> list[dict[str, Any]]:
    """A row per claim and network, from trainings of at least so many epochs."""
    networks: dict[str, list[Rows]] = {}
    for result in results:
        rows = {row["epoch"]: row for row in result["epochs"]}
        if max(rows) >= epochs:
            networks.setdefault(result["training"]["network"], []).append(rows)
    return [
        claim.row("network", network, [claim.number(rows) for rows in trainings])
        for claim in claims
        for network, trainings in networks.items()
    ]


def interval_text(row: Mapping[str, str]) -> str:
    """Mean and interval of a row of claims.csv."""
    mean, low, high = (float(row[key]) for key in ("mean", "low", "high"))
    if not math.isfinite(mean):
        return "no number"
    return f"{mean:.2f} ({low:.2f} to {high:.2f})" if math.isfinite(low) else f"{mean:.2f} (one training)"


def overall(answers: Sequence[str]) -> str:
    """The answer over networks."""
    return answers[0] if answers and len(set(answers)) == 1 else MIXED if answers else UNTESTED
