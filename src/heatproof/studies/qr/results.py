"""Measurements of one seed by checkpoint, method and metric, and the tables made from them.

Means are over codes, with a 95 % bootstrap interval over codes (1,000 resamples, seeded). Two numbers are not
means of a value of each code, and their intervals draw codes all the same:

    robustness   slope and AURC of the curve of means over severity, averaged over the distortions. A code's
                 own m(s) / m(0) is not averaged: where m(0) is near zero, the ratio is huge.
    causality    Spearman's rho over codes

The tables are declared in tables.toml. Published rows (cambench.json) stand below ours for reference and are
not ranked, and neither are the floors (random, edges). Over seeds, a cell is the mean of the seeds' values
with the 95 % interval of Student's t; n counts seeds. Cite: chakraborty2025cambench.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib.resources import files
from itertools import product
from typing import Any

import numpy as np
from scipy.stats import rankdata
from scipy.stats import t as student

from heatproof.explain.floors import is_floor
from heatproof.images.codes import EDITS
from heatproof.images.distort import DISTORTIONS, SEVERITIES
from heatproof.metrics import aurc, bl_slope
from heatproof.metrics.on_parts import structure_score
from heatproof.metrics.stats import percentile_interval, resample
from heatproof.registry import Explainer, explainers, parse_call, split_calls
from heatproof.report.tables import Cell, Table, Value, number
from heatproof.store import RunFolder
from heatproof.studies.common import TableFile, mean_value, rho_value
from heatproof.studies.qr.settings import QrSettings
from heatproof.studies.qr.trainings import Trained, cell_name, depth_name
from heatproof.train import DEPTHS, REGIMES, ablation_grid

TWINS = 2e-3  # of BL: what half precision of the stored maps may change
CLEAN = "clean"
RUNS = ("run", "depth", "ablation", "subset", "measured")  # all codes before some of them

BACKBONES = {"resnet50": "ResNet-50", "convnext_base": "ConvNeXt-B"}
_PUBLISHED: dict[str, Any] = json.loads(
    files("heatproof.studies.qr").joinpath("cambench.json").read_text(encoding="utf-8")
)
ByRegime = dict[str, dict[str, list[float]]]  # regime -> method -> numbers
TABLE_2: dict[str, ByRegime] = _PUBLISHED["table_2"]  # by backbone: BL, FMR, TMR, DtS, ms per image
TABLE_3: ByRegime = _PUBLISHED["table_3"]  # BL slope, FMR-AURC, TMR-AURC; the backbone is not named
# rho of FMR with the drop without finders, of TMR with the drop without timing; the backbone is not named
TABLE_4: ByRegime = _PUBLISHED["table_4"]
# by depth: BL, FMR, TMR, DtS, per cent of the parameters; ResNet-50, EigenGrad-CAM
TABLE_5: dict[str, list[float]] = _PUBLISHED["table_5"]
# (lambda, alpha): BL, FMR, TMR, accuracy; ResNet-50, no explainer is named
TABLE_6 = {(lam, alpha): tuple(numbers) for lam, alpha, *numbers in _PUBLISHED["table_6"]}
TABLES = TableFile("heatproof.studies.qr")

ByImage = Mapping[str, float]
Columns = dict[tuple[str, str, str], dict[str, float]]  # checkpoint, method, metric -> image -> value


def at(mass: str, kind: str, level: float) -> str:
    """How rows name a mass on a code under a distortion.

    >>> at("bl", "rotation", 0.25)
    'bl(rotation=0.25)'
    """
    return f"{mass}({kind}={level:g})"


def read_columns(folder: RunFolder) -> Columns:
    """By checkpoint, method and metric: the value of each image; '' is the image of rows about none."""
    names = ("checkpoint", "method", "metric", "image", "value")
    rows = folder.scores().columns(f"select {', '.join(names)} from scores order by image")
    columns: Columns = {}
    for *key, image, value in zip(*(rows[name].tolist() for name in names), strict=True):
        columns.setdefault((key[0], key[1], key[2]), {})[image] = value
    return columns


@dataclass(frozen=True)
class Results:
    """Everything that was measured for one seed."""

    settings: QrSettings
    seed: int
    trained: Trained
    runs: Mapping[str, Columns]  # run, subset, measured; depth and ablation if requested
    device: str = "cpu"
    sizes: Mapping[str, float] = field(default_factory=dict)  # share of the image that each code covers

    def column(self, checkpoint: str, method: str, metric: str, runs: Sequence[str] = RUNS) -> ByImage:
        """From the first of these runs that has it."""
        key = checkpoint, method, metric
        return next((self.runs[run][key] for run in runs if key in self.runs.get(run, {})), {})

    def mean(self, checkpoint: str, method: str, metric: str, runs: Sequence[str] = RUNS) -> Value:
        return mean_value(self.column(checkpoint, method, metric, runs).values(), self.seed)

    def count(self, checkpoint: str, method: str, metric: str) -> int:
        return len(self.column(checkpoint, method, metric))

    def undefined_share(self, checkpoint: str, method: str, metric: str) -> float:
        values = self.column(checkpoint, method, metric)
        return (len(values) - defined(values)) / max(1, len(values))

    def empty_share(self, checkpoint: str, method: str) -> float:
        """Of the maps of all codes."""
        return self.mean(checkpoint, method, "degenerate").value

    def network_mean(self, checkpoint: str, _: str, metric: str) -> Value:
        """Of a metric that is about no method."""
        return self.mean(checkpoint, "", metric)

    def mean_of_methods(self, checkpoint: str, methods: str, metric: str) -> float:
        return mean_value(self.mean(checkpoint, m, metric).value for m in split_calls(methods)).value

    def accuracy(self, checkpoint: str, _: str = "") -> float:
        """On the test codes and negatives, at the end of a training."""
        return self.trained.histories[checkpoint].epochs[-1].accuracy

    def trained_per_cent(self, checkpoint: str, _: str) -> float:
        """Of the parameters."""
        return 100 * next(self.trained.shares[depth] for depth in DEPTHS if depth_name(depth) == checkpoint)

    @cached_property
    def twins(self) -> list[list[str]]:
        """Light methods with equal leakage on every code under every regime, so that their maps are equal."""
        groups: list[tuple[np.ndarray, list[str]]] = []
        for method in self.settings.real:
            mine = np.array([list(self.column(regime, method, "bl").values()) for regime in REGIMES])
            for leak, members in groups:
                if mine.shape == leak.shape and np.allclose(mine, leak, atol=TWINS, equal_nan=True):
                    members.append(method)
                    break
            else:
                groups.append((mine, [method]))
        return [members for _, members in groups if len(members) > 1]

    def milliseconds(self, regime: str, method: str) -> float:
        return self.column(regime, method, "ms").get("", math.nan)

    def curves(self, regime: str, method: str, mass: str) -> np.ndarray:
        """Array "n d s" of every distorted code."""

        def values(kind: str, level: float) -> list[float]:
            return list(self.column(regime, method, at(mass, kind, level)).values())

        clean = values(CLEAN, 0)
        lines = [[clean, *(values(kind, level) for level in SEVERITIES[1:])] for kind in DISTORTIONS]
        return np.array(lines, dtype=np.float64).transpose(2, 0, 1)

    def robustness(self, regime: str, method: str, mass: str) -> Value:
        """BL's slope, or the AURC of FMR and TMR."""
        return curve_value(self.curves(regime, method, mass), mass, self.seed)

    def distorted_empty_share(self, regime: str, method: str) -> float:
        """Share of all-zero maps of distorted codes."""
        return float(np.isnan(self.curves(regime, method, "bl")[..., 1:]).mean())

    def slope(self, regime: str, method: str, kind: str) -> float:
        """BL's slope under a distortion."""
        line = mean_curves(self.curves(regime, method, "bl"))[list(DISTORTIONS).index(kind)]
        return float(bl_slope(line[None], SEVERITIES)["bl_slope"])

    def causal_pairs(self, regime: str, method: str, part: str) -> tuple[ByImage, ByImage]:
        """The mass on a part, and the fall of the logit without it."""
        mass = self.column(regime, method, {"finder": "fmr", "timing": "tmr"}[part])
        return mass, self.column(regime, "", f"drop_{part}")

    def causality(self, regime: str, method: str, part: str) -> Value:
        """Spearman's rho of both."""
        return self._rho(*self.causal_pairs(regime, method, part))

    def causal_count(self, regime: str, method: str) -> int:
        return defined(*self.causal_pairs(regime, method, "finder"))

    def causality_at_size(self, regime: str, method: str, part: str, how: str) -> Value:
        """Rank correlation among codes of similar size (within_thirds), or without its effect (partial_rho).

        Large codes have large parts and lose more without them, which even a random map shows.
        """
        first, second = self.causal_pairs(regime, method, part)
        shared = [i for i in first if i in second and i in self.sizes]
        columns = np.array([(first[i], second[i], self.sizes[i]) for i in shared]).reshape(-1, 3)
        return controlled(columns[np.isfinite(columns).all(1)], AT_SIZE[how], self.seed)

    def edit_rho(self, regime: str, method: str, kind: str) -> Value:
        """Spearman's rho of the mass that leaves an edited finder with the fall of the logit."""
        leaves = self.column(regime, method, f"edit_leaves({kind})")
        return self._rho(leaves, self.column(regime, "", f"edit_drop({kind})"))

    def area(self, regime: str, method: str, metric: str) -> Value:
        """Mean insertion or deletion."""
        return self.mean(regime, method, metric, self.curve_runs)

    def area_rho(self, regime: str, method: str, metric: str) -> Value:
        """Spearman's rho of the StructureScore with insertion or deletion."""
        names = ("structure_score", metric)
        return self._rho(*(self.column(regime, method, name, self.curve_runs) for name in names))

    def area_count(self, regime: str, method: str) -> int:
        return defined(self.column(regime, method, "insertion", self.curve_runs))

    @property
    def curve_runs(self) -> list[str]:
        """Where insertion and deletion are: on all codes, or on some of them."""
        return ["run", "subset"] if self.settings.curves == "all" else ["subset"]

    def _rho(self, first: ByImage, second: ByImage) -> Value:
        """Spearman's, over the codes that both have."""
        shared = [image for image in first if image in second]
        return rho_value([first[i] for i in shared], [second[i] for i in shared], self.seed)


def defined(*columns: ByImage) -> int:
    """How many images have a value in all columns."""
    return sum(not any(math.isnan(of.get(image, math.nan)) for of in columns) for image in columns[0])


def mean_curves(curves: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
    """Turn "n d s" into "d s", or "r d s" for weights "r n"; undefined points are left out of their mean."""
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
    values = measure(lines, SEVERITIES)[name].double().numpy()
    return Value(float(values[0]), _interval(values[1:]), len(curves))


def within_thirds(columns: np.ndarray) -> float:
    """Mean over thirds by the third column of Spearman's rho of the first two, each weighted by its n."""
    order = np.argsort(columns[:, 2], kind="stable")
    thirds = [columns[rows] for rows in np.array_split(order, 3) if len(rows) >= 3]
    rhos = [(_spearman(third[:, 0], third[:, 1]), len(third)) for third in thirds]
    known = [(rho, n) for rho, n in rhos if not math.isnan(rho)]
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
    """Spearman's rho without its p value, which a bootstrap does not need hundreds of times."""
    a, b = (rankdata(side) - (len(side) + 1) / 2 for side in (x, y))
    length = math.sqrt(float((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / length if length else math.nan


def _interval(draws: np.ndarray) -> tuple[float, float] | None:
    return percentile_interval(draws) if np.isfinite(draws).any() else None


OURS = "ours"
AT_SIZE = {"within_thirds": within_thirds, "partial_rho": partial_rho}
AGGREGATIONS = {
    "subspace": ("eigencam", "eigengradcam"),
    "layer-wise": ("layercam", "hirescam", "ms-gradcam++", "fullgrad"),
}


@dataclass(frozen=True)
class TableRow:
    """What a row of a table is about; methods of the results are called with its checkpoint and method."""

    results: Results
    checkpoint: str
    method: str
    keys: tuple[Any, ...] = ()

    def __getattr__(self, name: str) -> Any:
        return partial(getattr(self.results, name), self.checkpoint, self.method)


def qr_table(results: Results, name: str) -> Table:
    """A table of tables.toml: our rows, then the published ones."""
    settings, backbone = results.settings, backbone_of(results.settings.model)
    rows: dict[str, Iterable[Sequence[Any]]] = {
        "listed": product(REGIMES, settings.listed),
        "light": product(REGIMES, settings.light),
        "depth": [(depth_name(depth), m, (depth,)) for m, depth in product(settings.detailed, DEPTHS)],
        "ablation": [
            (cell_name(settings, *cell), m, cell) for m, cell in product(settings.detailed, ablation_grid())
        ],
        "axes": axis_rows([m for m in settings.listed if not is_floor(m)]),
    }
    words = {
        "backbone": backbone, "device": results.device,
        "distortions": ", ".join(DISTORTIONS).replace("_", " "),
        "twins": "".join(f" The same maps here, up to rounding: {', '.join(of)}." for of in results.twins),
    }  # fmt: skip
    spec = TABLES.content[name]
    published = [(spec["source"].format(**words), *row) for row in published_rows(name, backbone)]
    own = [TableRow(results, *row) for row in rows[spec["rows"]]]
    return TABLES.fill(name, own, published, **words)


def published_rows(name: str, backbone: str) -> list[Any]:
    """The paper's rows of a table, without their source."""
    by_regime: dict[str, Any] = {
        "table-2": TABLE_2[backbone], "table-3": TABLE_3, "table-4": TABLE_4,
        "coverage": {
            regime: {m: [None] * 4 + [mass_score(backbone, regime, m)] for m in methods}
            for regime, methods in TABLE_2[backbone].items()
        },
    }  # fmt: skip
    if name in by_regime:
        return [(regime, m, *cells) for regime in REGIMES for m, cells in by_regime[name][regime].items()]
    others = {
        "table-5": [(depth, "eigengradcam", *cells) for depth, cells in TABLE_5.items()],
        "table-6": [("not named", *cell, *numbers) for cell, numbers in TABLE_6.items()],
    }
    return others.get(name, [])


def axis_rows(methods: Sequence[str]) -> list[tuple[str, str, tuple[str, str]]]:
    """Regime, methods, axis and level: the levels of each axis of Figure 3 under each regime."""
    rows = []
    for k, axis in enumerate(("importance", "aggregation", "cost")):
        levels = {m: axes_of(explainers.get(parse_call(m)[0]))[k] for m in methods}
        for level, regime in product(dict.fromkeys(levels.values()), REGIMES):
            rows.append((regime, ", ".join(m for m in methods if levels[m] == level), (axis, level)))
    return rows


def axes_of(entry: Explainer) -> tuple[str, str, str]:
    """A method on the axes of Figure 3: importance, aggregation, cost.

    importance    what a pixel's weight comes from: gradient, activation, perturbation
    aggregation   how feature maps become one: global pooling, layer-wise, subspace; none at the input
    cost          light: a part of one shared pass; heavy: more passes, or one to the input

    >>> axes_of(explainers.get("eigengradcam"))
    ('gradient', 'subspace', 'light')
    >>> axes_of(explainers.get("rise"))
    ('perturbation', 'at the input', 'heavy')
    """
    needs = set(entry.needs)
    shared = bool(needs & {"gradients", "activations", "scales"})
    importance = (
        "gradient" if needs & {"gradients", "input_gradient", "scales"}
        else "activation" if entry.name == "eigencam"
        else "perturbation"
    )  # fmt: skip
    aggregation = next(
        (name for name, members in AGGREGATIONS.items() if entry.name in members),
        "global pooling" if shared else "at the input",
    )
    return importance, aggregation, "light" if shared and importance != "perturbation" else "heavy"


def tables(results: Results) -> dict[str, Table]:
    """Every table of one seed for which there are rows, in the order of the page."""
    first = REGIMES[0], results.settings.light[0]
    there = {
        "table-5": results.settings.depth_study, "table-6": results.settings.ablation,
        "scenes": results.count(*first, "scene_codes"),
        "edits": results.count(*first, f"edit_leaves({EDITS[0]})"),
    }  # fmt: skip
    return {name: qr_table(results, name) for name in TABLES.content if there.get(name, True)}


def backbone_of(model: str) -> str:
    """The published backbone to set beside a network: its own where it is one of the two, else ResNet-50.

    >>> backbone_of("torchvision:convnext_base"), backbone_of("small")
    ('ConvNeXt-B', 'ResNet-50')
    """
    return next((title for name, title in BACKBONES.items() if name in model), "ResNet-50")


def mass_score(backbone: str, regime: str, method: str) -> float:
    """The StructureScore of the paper's Figure 5, from its Table 2."""
    leakage, finder, timing, distance, _ = TABLE_2[backbone][regime][method]
    return float(structure_score(finder, timing, leakage, distance))


def over_seeds(seeds: Sequence[Table]) -> Table:
    """A table of the same form with means over the seeds of a study."""
    first, count = seeds[0], len(seeds)
    rows = tuple(
        tuple(_over(cells) for cells in zip(*same, strict=True))
        for same in zip(*(table.rows for table in seeds), strict=True)
    )
    note = f"Means over {count} seeds with the 95 % interval of Student's t. {first.note}".strip()
    return replace(
        first, name=f"{first.name}-seeds", title=f"{first.title}, {count} seeds", rows=rows, note=note
    )


def _over(cells: Sequence[Cell]) -> Cell:
    counts = [cell for cell in cells if isinstance(cell, int)]
    if len(counts) == len(cells):
        return min(counts)
    if all(isinstance(cell, Value) for cell in cells) or len(set(cells)) > 1:
        return seed_value([number(cell) for cell in cells])
    return cells[0]


def seed_value(values: Iterable[float]) -> Value:
    """Mean of a few seeds, and the t interval of that mean."""
    known = np.array([value for value in values if not math.isnan(value)])
    if len(known) < 2:
        return Value(float(known[0]) if len(known) else math.nan, None, len(known))
    half = float(student.ppf(0.975, len(known) - 1) * known.std(ddof=1) / math.sqrt(len(known)))
    mean = float(known.mean())
    return Value(mean, (mean - half, mean + half), len(known))


def apart(first: Cell, second: Cell) -> int:
    """-1 if the first interval lies below the second, 1 above it, 0 if they overlap or one is missing."""
    if not (isinstance(first, Value) and isinstance(second, Value) and first.interval and second.interval):
        return 0
    return (first.interval[0] > second.interval[1]) - (first.interval[1] < second.interval[0])


def flips(seeds: Sequence[Table], column: str) -> list[tuple[str, str, str]]:
    """(regime, method, method): pairs that two seeds rank in opposite orders, each beyond its intervals."""
    flipped: list[tuple[str, str, str]] = []
    for regime in REGIMES:
        cells = [ours(table, regime, column) for table in seeds]
        pairs = ((a, b) for a, b in product(cells[0], repeat=2) if a < b)
        flipped += [(regime, a, b) for a, b in pairs if {-1, 1} <= {apart(of[a], of[b]) for of in cells}]
    return flipped


def ours(table: Table, group: str, column: str, paper: bool = False) -> dict[str, Cell]:
    """By method: our cells, or the paper's, of one regime (or depth) in a column."""
    place = [c.name for c in table.columns].index(column)
    rows = (row for row in table.rows if (row[0] != OURS) == paper and row[1] == group)
    return {str(row[2]): row[place] for row in rows}
