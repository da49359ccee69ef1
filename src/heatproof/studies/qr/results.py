"""What was measured for one seed, by checkpoint, method and metric, and the numbers that tables show of it.

Means are over codes, with a 95 % bootstrap interval over codes (1,000 resamples, seeded). Two numbers are not
means of what each code has, and their intervals draw codes all the same:

    robustness   slope and AURC of the curve of means over severity, averaged over the distortions. A code's
                 own m(s) / m(0) is not averaged: where m(0) is next to nothing, the ratio is huge.
    causality    Spearman's rho over codes
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.stats import rankdata

from heatproof.images.distort import DISTORTIONS, SEVERITIES
from heatproof.metrics import aurc, bl_slope
from heatproof.metrics.stats import percentile_interval, resample
from heatproof.report.tables import Value
from heatproof.store import RunFolder
from heatproof.studies.qr.settings import QrSettings
from heatproof.studies.qr.trainings import Trained
from heatproof.studies.skeleton import mean_value, rho_value
from heatproof.train import REGIMES

TWINS = 2e-3  # of BL: what half precision of the stored maps may change
CLEAN = "clean"
RUNS = ("run", "depth", "ablation", "subset")  # all codes before some of them

ByImage = Mapping[str, float]
Columns = dict[tuple[str, str, str], dict[str, float]]  # checkpoint, method, metric -> image -> value


def at(mass: str, kind: str, level: float) -> str:
    """How rows name a mass on a code under a distortion.

    >>> at("bl", "rotation", 0.25)
    'bl(rotation=0.25)'
    """
    return f"{mass}({kind}={level:g})"


def read_columns(folder: RunFolder) -> Columns:
    """Rows about images, and those about none under the image ''."""
    names = ("checkpoint", "method", "metric", "image", "value")
    rows = folder.scores().columns(f"select {', '.join(names)} from scores order by image")
    found: Columns = {}
    for *key, image, value in zip(*(rows[name].tolist() for name in names), strict=True):
        found.setdefault((key[0], key[1], key[2]), {})[image] = value
    return found


@dataclass(frozen=True)
class Results:
    """Everything that was measured for one seed."""

    settings: QrSettings
    seed: int
    trained: Trained
    runs: Mapping[str, Columns]  # run, subset, measured; depth and ablation where they were asked for
    device: str = "cpu"
    sizes: Mapping[str, float] = field(default_factory=dict)  # share of the picture that each code covers

    def column(self, checkpoint: str, method: str, metric: str, runs: Sequence[str] = RUNS) -> ByImage:
        """From the first of these runs that has it."""
        key = checkpoint, method, metric
        return next((self.runs[run][key] for run in runs if key in self.runs.get(run, {})), {})

    def mean(self, checkpoint: str, method: str, metric: str, runs: Sequence[str] = RUNS) -> Value:
        return mean_value(self.column(checkpoint, method, metric, runs).values(), self.seed)

    def measured(self, regime: str, method: str, metric: str) -> ByImage:
        return self.column(regime, method, metric, ["measured"])

    def accuracy(self, name: str) -> float:
        """On the test codes and negatives, at the end of a training."""
        return self.trained.histories[name].epochs[-1].accuracy

    def twins(self) -> list[list[str]]:
        """Light methods whose leakage is the same on every code under every regime: so are their maps."""
        lots: list[list[str]] = []
        leaks = {
            method: np.array([list(self.column(regime, method, "bl").values()) for regime in REGIMES])
            for method in self.settings.real
        }
        for method, mine in leaks.items():
            for lot in lots:
                theirs = leaks[lot[0]]
                if mine.shape == theirs.shape and np.allclose(mine, theirs, atol=TWINS, equal_nan=True):
                    lot.append(method)
                    break
            else:
                lots.append([method])
        return [lot for lot in lots if len(lot) > 1]

    def milliseconds(self, regime: str, method: str) -> float:
        return self.measured(regime, method, "ms").get("", math.nan)

    def curves(self, regime: str, method: str, mass: str) -> np.ndarray:
        """ "n d s" of every distorted code."""

        def values(kind: str, level: float) -> list[float]:
            return list(self.measured(regime, method, at(mass, kind, level)).values())

        clean = values(CLEAN, 0)
        lines = [[clean, *(values(kind, level) for level in SEVERITIES[1:])] for kind in DISTORTIONS]
        return np.array(lines, dtype=np.float64).transpose(2, 0, 1)

    def robustness(self, regime: str, method: str, mass: str) -> Value:
        """BL's slope, or the AURC of FMR and TMR."""
        return curve_value(self.curves(regime, method, mass), mass, self.seed)

    def empty(self, regime: str, method: str) -> float:
        """Share of all-zero maps of distorted codes."""
        return float(np.isnan(self.curves(regime, method, "bl")[..., 1:]).mean())

    def slopes(self, regime: str, method: str) -> list[float]:
        """BL's slope under each distortion."""
        lines = mean_curves(self.curves(regime, method, "bl"))
        return [float(bl_slope(line[None], SEVERITIES)["bl_slope"]) for line in lines]

    def causality(self, regime: str, method: str, part: str) -> Value:
        """Spearman's rho of the mass on a part with the fall of the logit without it."""
        return self._rho(*self._causal(regime, method, part))

    def causality_at_size(self, regime: str, method: str, part: str) -> tuple[Value, Value]:
        """The same among codes of about one size, and with the size of the code taken out (partial).

        Large codes have large parts and lose more without them, which even a random map shows.
        """
        first, second = self._causal(regime, method, part)
        shared = [i for i in first if i in second and i in self.sizes]
        columns = np.array([(first[i], second[i], self.sizes[i]) for i in shared]).reshape(-1, 3)
        known = columns[np.isfinite(columns).all(1)]
        return controlled(known, within_thirds, self.seed), controlled(known, partial_rho, self.seed)

    def edited(self, regime: str, method: str, what: str, kind: str) -> ByImage:
        """What an edit of a finder did to each code: leaves, arrives, or, without a method, drop."""
        return self.measured(regime, method, f"edit_{what}({kind})")

    def follows_edit(self, regime: str, method: str, kind: str) -> Value:
        """Spearman's rho of the mass that leaves with the fall of the logit."""
        return self._rho(self.edited(regime, method, "leaves", kind), self.edited(regime, "", "drop", kind))

    def empty_share(self, checkpoint: str, method: str) -> float:
        """Of the maps of all codes."""
        return self.mean(checkpoint, method, "degenerate").value

    def _causal(self, regime: str, method: str, part: str) -> tuple[ByImage, ByImage]:
        mass = self.column(regime, method, {"finder": "fmr", "timing": "tmr"}[part])
        return mass, self.measured(regime, "", f"drop_{part}")

    def agreement(self, regime: str, method: str, metric: str) -> Value:
        """Spearman's rho of the StructureScore with insertion or deletion, over the subset."""
        runs = self.curve_runs
        pair = (self.column(regime, method, name, runs) for name in ("structure_score", metric))
        return self._rho(*pair)

    @property
    def curve_runs(self) -> list[str]:
        """Where insertion and deletion are: on all codes, or on some of them."""
        return ["run", "subset"] if self.settings.curves == "all" else ["subset"]

    def _rho(self, first: ByImage, second: ByImage) -> Value:
        shared = [image for image in first if image in second]
        return rho_value([first[i] for i in shared], [second[i] for i in shared], self.seed)


def mean_curves(curves: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """ "n d s" -> "d s", or "r d s" for weights "r n"; undefined points are left out of their mean."""
    chosen = np.ones((1, len(curves))) if weights is None else weights
    flat = curves.reshape(len(curves), -1)
    sums, counts = chosen @ np.nan_to_num(flat), chosen @ np.isfinite(flat)
    means = np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)
    means = means.reshape(len(chosen), *curves.shape[1:])
    return np.asarray(means[0] if weights is None else means)


def curve_value(curves: np.ndarray, mass: str, seed: int = 0) -> Value:
    """Slope (bl) or AURC (others) of mean curves, with the interval of redrawn codes."""
    if not curves.size:
        return Value(math.nan, None, 0)
    drawn = resample(len(curves), seed=seed)
    weights = np.stack([np.bincount(row, minlength=len(curves)) for row in drawn]).astype(float)
    lines = np.concatenate([mean_curves(curves)[None], mean_curves(curves, weights)])
    name, measure = ("bl_slope", bl_slope) if mass == "bl" else ("aurc", aurc)
    found = measure(lines, SEVERITIES)[name].double().numpy()
    return Value(float(found[0]), _interval(found[1:]), len(curves))


def within_thirds(columns: np.ndarray) -> float:
    """Mean over thirds by the third column of Spearman's rho of the first two, each weighted by its n."""
    order = np.argsort(columns[:, 2], kind="stable")
    lots = [columns[lot] for lot in np.array_split(order, 3) if len(lot) >= 3]
    found = [(_spearman(lot[:, 0], lot[:, 1]), len(lot)) for lot in lots]
    known = [(rho, n) for rho, n in found if not math.isnan(rho)]
    return sum(rho * n for rho, n in known) / sum(n for _, n in known) if known else math.nan


def partial_rho(columns: np.ndarray) -> float:
    """Spearman's rho of the first two columns, with the ranks of the third taken out of both."""
    xy, xz, yz = (_spearman(columns[:, i], columns[:, j]) for i, j in ((0, 1), (0, 2), (1, 2)))
    left = (1 - xz**2) * (1 - yz**2)
    return (xy - xz * yz) / math.sqrt(left) if left > 1e-12 else math.nan


def controlled(columns: np.ndarray, how: Callable[[np.ndarray], float], seed: int = 0) -> Value:
    """A correlation with a bootstrap interval over its rows."""
    if len(columns) < 9:
        return Value(math.nan, None, len(columns))
    drawn = np.array([how(columns[rows]) for rows in resample(len(columns), 200, seed)])
    return Value(how(columns), _interval(drawn), len(columns))


def _spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Without the p that scipy's computes too: a bootstrap asks for it hundreds of times."""
    a, b = (rankdata(side) - (len(side) + 1) / 2 for side in (x, y))
    length = math.sqrt(float((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / length if length else math.nan


def _interval(draws: np.ndarray) -> tuple[float, float] | None:
    return percentile_interval(draws) if np.isfinite(draws).any() else None
