"""Claims of the CAMBench-QR paper, fixed before the trainings.

A claim is a number per seed, computed from the trainings of that seed, with the side of a limit that the
paper predicts; the same function applied to the paper's tables is the published number. "In every regime" and
"for all methods" are the worst case over them. Limits other than 0 are ours; the paper names none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import numpy as np

from heatproof.train.protocols import GRID, REGIMES
from research.qr.measure import BACKBONES, PAPER
from research.replication.claims import UNTESTED, answer, overall, t_interval

Numbers = Mapping[tuple[str, str], Mapping[str, float]]  # by regime and method
ZS, STRUCT, LEAKMIN = REGIMES
EIGEN, XGRAD = "eigengradcam", "xgradcam"
TUNED = (STRUCT, LEAKMIN)
DEPTH = (ZS, STRUCT, "depth-l3-l4", "depth-all")
BOTH = " and ".join(BACKBONES)


@dataclass(frozen=True)
class Claim:
    """A claim. above: the paper predicts a number above the limit; else below it."""

    where: str
    text: str
    measured: str  # what the number is
    number: Callable[[Numbers], float]
    limit: float = 0.0
    above: bool = True
    published: str = ""  # where the function cannot be applied to the paper's tables

    @property
    def predicted(self) -> str:
        return f"{'above' if self.above else 'below'} {self.limit:g}"


def least(values: Iterable[float]) -> float:
    """The minimum; NaN if one of the values is."""
    return float(np.min([*values]))


def greatest(values: Iterable[float]) -> float:
    return float(np.max([*values]))


def cell(lam: float, alpha: float) -> str:
    return f"lambda{lam:g}-alpha{alpha:g}"


def lead(column: str, method: str, regimes: Sequence[str] = REGIMES) -> Callable[[Numbers], float]:
    """How far a method is above the two others, at least."""

    def number(of: Numbers) -> float:
        return least(
            of[r, method][column] - greatest(of[r, m][column] for m in PAPER if m != method) for r in regimes
        )

    return number


def behind(column: str, method: str) -> Callable[[Numbers], float]:
    """How far a method is below the two others, at least; negative if it is."""

    def number(of: Numbers) -> float:
        return greatest(
            of[r, method][column] - least(of[r, m][column] for m in PAPER if m != method) for r in REGIMES
        )

    return number


def change(
    column: str, before: str, after: str, worst: Callable[[Iterable[float]], float] = least
) -> Callable[[Numbers], float]:
    return lambda of: worst(of[after, m][column] - of[before, m][column] for m in PAPER)


def mean_of(*columns: str) -> Callable[[Numbers], float]:
    return lambda of: float(np.mean([of[r, m][c] for r, m, c in product(REGIMES, PAPER, columns)]))


def left_on_parts(of: Numbers) -> float:
    mass = {(r, m): of[r, m]["fmr"] + of[r, m]["tmr"] for r in TUNED for m in PAPER}
    return float(np.mean([mass[LEAKMIN, m] / mass[STRUCT, m] for m in PAPER]))


def causal_lead(of: Numbers) -> float:
    def rho(regime: str, method: str) -> float:
        return (of[regime, method]["rho_finder"] + of[regime, method]["rho_timing"]) / 2

    return least(rho(r, EIGEN) - greatest(rho(r, m) for m in PAPER if m != EIGEN) for r in TUNED)


def step(column: str, first: int, last: int) -> Callable[[Numbers], float]:
    """The smallest step of EigenGrad-CAM's column from one depth to the next."""
    pairs = [(DEPTH[i], DEPTH[i + 1]) for i in range(first, last)]
    return lambda of: least(of[b, EIGEN][column] - of[a, EIGEN][column] for a, b in pairs)


def pull(of: Numbers) -> float:
    with_pull, without = (of[cell(0.25, alpha), EIGEN] for alpha in (0.25, 0.0))
    return with_pull["fmr"] + with_pull["tmr"] - without["fmr"] - without["tmr"]


def cells(column: str, before: float, after: float) -> Callable[[Numbers], float]:
    return lambda of: float(
        np.mean([of[cell(after, a), EIGEN][column] - of[cell(before, a), EIGEN][column] for a in GRID])
    )


EVERY = "in every regime"
CLAIMS = (
    Claim("3.1", "All regimes reach an accuracy near 100 %", "lowest accuracy of the regimes",
          lambda of: least(of[r, EIGEN]["accuracy"] for r in REGIMES), 0.99,
          published="99.2 % and more (Table 6)"),
    Claim("4, Table 2", f"EigenGrad-CAM leaks least {EVERY}", "BL less the lower of the others, worst regime",
          behind("bl", EIGEN), 0.0, False),
    Claim("4, Table 2", f"EigenGrad-CAM is nearest to the structure {EVERY}",
          "DtS less the lower of the others, worst regime", behind("dts", EIGEN), 0.0, False),
    Claim("4, Table 2", f"XGrad-CAM leaks most {EVERY}", "BL less the higher of the others, worst regime",
          lead("bl", XGRAD)),
    Claim("4, Table 2", "XGrad-CAM has most finder mass in ZS", "FMR less the higher of the others",
          lead("fmr", XGRAD, (ZS,))),
    Claim("4, Table 2", "EigenGrad-CAM has most timing mass in ZS", "TMR less the higher of the others",
          lead("tmr", EIGEN, (ZS,))),
    Claim("3.2, 5", "FT-Struct raises finder mass", "change of FMR from ZS, least of three methods",
          change("fmr", ZS, STRUCT)),
    Claim("4, Fig. 5", "FT-Struct lifts all methods",
          "change of the mass score from ZS, least of three methods",
          change("mass_score", ZS, STRUCT)),
    Claim("4, Fig. 5", "FT-LeakMin pushes all methods further up",
          "change of the mass score from FT-Struct, least of three methods",
          change("mass_score", STRUCT, LEAKMIN)),
    Claim("3.2, Table 2", "FT-LeakMin reduces leakage",
          "change of BL from FT-Struct, greatest of three methods",
          change("bl", STRUCT, LEAKMIN, greatest), 0.0, False),
    Claim("3.2, Table 2", "FT-LeakMin reduces the distance to the structure",
          "change of DtS from FT-Struct, greatest of three methods",
          change("dts", STRUCT, LEAKMIN, greatest), 0.0, False),
    Claim("RQ3, 4", "FT-LeakMin does not collapse the mass on the parts",
          "FMR + TMR as a share of FT-Struct's, mean of three methods", left_on_parts, 0.5),
    Claim("4, Table 3", f"EigenGrad-CAM's leakage grows least under distortion {EVERY}",
          "BL slope less the lower of the others, worst regime", behind("bl_slope", EIGEN), 0.0, False),
    Claim("4, Table 3", f"EigenGrad-CAM keeps most finder mass under distortion {EVERY}",
          "FMR-AURC less the higher of the others, worst regime", lead("fmr_aurc", EIGEN)),
    Claim("4, Table 3", "FT-LeakMin flattens the growth of leakage",
          "change of the BL slope from FT-Struct, greatest of three methods",
          change("bl_slope", STRUCT, LEAKMIN, greatest), 0.0, False),
    Claim("4, Table 3", "Leakage grows with distortion", "mean BL slope of three regimes and methods",
          mean_of("bl_slope")),
    Claim("RQ1, Table 4", "Finder mass goes with the fall of the logit without finders",
          "Spearman's rho over codes, mean of three regimes and methods", mean_of("rho_finder")),
    Claim("RQ1, Table 4", "Timing mass goes with the fall of the logit without timing patterns",
          "Spearman's rho over codes, mean of three regimes and methods", mean_of("rho_timing")),
    Claim("4, Table 4", "After fine-tuning EigenGrad-CAM is the most causally aligned",
          "mean rho less the higher of the others, worse of two regimes", causal_lead),
    Claim("4, Table 5", "Training the last block raises finder mass", "FMR of EigenGrad-CAM, L4 less head",
          step("fmr", 0, 1)),
    Claim("4, Table 5", "Deeper fine-tuning adds little finder mass", "FMR of EigenGrad-CAM, all less L4",
          lambda of: of[DEPTH[3], EIGEN]["fmr"] - of[STRUCT, EIGEN]["fmr"], 0.05, False),
    Claim("4, Table 5", "Deeper fine-tuning increases leakage",
          "BL of EigenGrad-CAM, smaller step of L4, L3-L4, all", step("bl", 1, 3)),
    Claim("4, Table 5", "Deeper fine-tuning increases the distance to the structure",
          "DtS of EigenGrad-CAM, smaller step of L4, L3-L4, all", step("dts", 1, 3)),
    Claim("4, Table 6", "A small lambda reduces leakage",
          "change of BL from lambda 0 to 0.25, mean over alpha", cells("bl", 0.0, 0.25), 0.0, False),
    Claim("4, Table 6", "A small lambda costs no accuracy",
          "change of accuracy from lambda 0 to 0.25, mean over alpha", cells("accuracy", 0.0, 0.25), -0.01),
    Claim("4, Table 6", "A pull of alpha = 0.25 raises the mass on the parts",
          "change of FMR + TMR from alpha 0, lambda 0.25", pull),
    Claim("4, Table 6", "A heavier lambda costs accuracy",
          "change of accuracy from lambda 0.25 to 0.5, mean over alpha", cells("accuracy", 0.25, 0.5), 0.0,
          False),
)  # fmt: skip
ORDER = Claim(
    "4, 5", "The order of methods in BL and DtS is the same on both backbones",
    "share of pairs of methods in the same order, all regimes", len, 0.9,
)  # fmt: skip
LATENCY = Claim(
    "4, Table 2", "XGrad-CAM is the fastest, EigenGrad-CAM the slowest", "ms per image", len,
    published="ResNet-50 3.8 and 4.5 ms, ConvNeXt-B 4.7 and 5.6 ms",
)  # fmt: skip
EVERY_CLAIM = (*CLAIMS, ORDER, LATENCY)


def same_order(first: Numbers, second: Numbers) -> float:
    """Share of regimes, scores and pairs of methods whose order two networks have in common."""
    gaps = np.array([
        [of[r, a][c] - of[r, b][c] for of in (first, second)]
        for r, c in product(REGIMES, ("bl", "dts")) for a, b in combinations(PAPER, 2)
    ])  # fmt: skip
    return float(np.mean(np.sign(gaps[:, 0]) == np.sign(gaps[:, 1]))) if np.isfinite(gaps).all() else math.nan


def with_cells(numbers: Numbers, lam: float = 0.25, alpha: float = 0.25) -> Numbers:
    """Add Table 6's names of the two regimes that are cells of it."""
    other = {cell(0, a): STRUCT for a in GRID} | {cell(lam, alpha): LEAKMIN}
    more = {(name, m): own for name, r in other.items() for (of, m), own in numbers.items() if of == r}
    return {**numbers, **more}


def evaluated(number: Callable[..., float], *of: Numbers) -> float | None:
    """The number; None if a training or a column is missing, or a mean is undefined as all maps are empty."""
    try:
        value = number(*of)
    except KeyError:
        return None
    return value if math.isfinite(value) else None


def claim_rows(
    trainings: Mapping[str, Mapping[int, Numbers]], papers: Mapping[str, Numbers]
) -> list[dict[str, Any]]:
    """A row per claim and network. trainings: by network and seed. papers: published numbers by backbone."""
    rows = []
    for claim in EVERY_CLAIM:
        numbers: dict[str, list[float | None]] = {}
        printed = claim.published
        if claim is ORDER:
            first, second = (trainings.get(n, {}) for n in BACKBONES)
            pairs = [(own, second[seed]) for seed, own in first.items() if seed in second]
            numbers = {BOTH: [evaluated(same_order, *pair) for pair in pairs]}
            printed = f"{' and '.join(papers)} {same_order(*papers.values()):.2f}"
        elif claim is not LATENCY:
            numbers = {n: [evaluated(claim.number, s) for s in own.values()] for n, own in trainings.items()}
            values = {name: evaluated(claim.number, own) for name, own in papers.items()}
            printed = printed or "; ".join(f"{k} {v:.3f}" for k, v in values.items() if v is not None)
        tested = {n: [v for v in own if v is not None] for n, own in numbers.items()}
        for network, known in {n: own for n, own in tested.items() if own}.items() or [("", [])]:
            mean, low, high = t_interval(known)
            rows.append({
                "where": claim.where, "claim": claim.text, "measured": claim.measured,
                "predicted": claim.predicted, "published": printed, "network": network, "seeds": len(known),
                "mean": mean, "low": low, "high": high,
                "answer": answer(low, high, claim.limit, claim.above) if known else UNTESTED,
            })  # fmt: skip
    return rows


def answers(rows: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """The answer of each claim over its networks."""
    return {c.text: overall([r["answer"] for r in rows if r["claim"] == c.text]) for c in EVERY_CLAIM}
