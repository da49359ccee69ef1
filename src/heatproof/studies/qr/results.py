"""Measurements of one seed by checkpoint, method and metric, and the tables made from them.

Means are over codes, with a 95 % bootstrap interval over codes (1,000 resamples, seeded). Two numbers are not
means of a value of each code, and their intervals draw codes all the same:

    robustness   slope and AURC of the curve of means over severity, averaged over the distortions. A code's
                 own m(s) / m(0) is not averaged: where m(0) is near zero, the ratio is huge.
    causality    Spearman's rho over codes

The tables are declared in tables.toml. Published rows stand below ours for reference and are
not ranked, and neither are the floors (random, edges). Over seeds, a cell is the mean of the seeds' values
with the 95 % interval of Student's t; n counts seeds. Cite: chakraborty2025cambench.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, permutations, product
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import rankdata, sem
from scipy.stats import t as student

from heatproof.errors import InputError
from heatproof.explain.floors import is_floor
from heatproof.images.codes import EDITS
from heatproof.images.distort import DISTORTIONS, SEVERITIES
from heatproof.metrics import aurc, bl_slope, rank_correlation
from heatproof.metrics.on_parts import structure_score
from heatproof.metrics.stats import percentile_interval, resample
from heatproof.registry import Explainer, explainers, parse_call, split_calls
from heatproof.report.tables import Cell, Table, Value, number
from heatproof.store import RunFolder
from heatproof.studies.common import TableFile, mean_value, rho_value
from heatproof.studies.qr.trainings import Trained, cell_name, depth_name
from heatproof.studies.settings import QrSettings
from heatproof.train import DEPTHS, REGIMES, ablation_grid

CLEAN = "clean"
RUNS = ("run", "depth", "ablation", "subset", "measured")  # all codes before some of them

BACKBONES = {"resnet50": "ResNet-50", "convnext_base": "ConvNeXt-B"}
OURS = "ours"
EXACT = 8  # methods up to which p of a rank correlation is counted over all orders
SCORES = {"BL": -1, "FMR": 1, "TMR": 1, "DtS": -1}  # 1: more is better
LAYER_WISE = ("hirescam", "ms-gradcam++", "fullgrad")  # beside those of the paper

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
        """From the first of these runs that has it; a metric of the network alone serves every method."""
        keys = (checkpoint, method, metric), (checkpoint, "", metric)
        known = (self.runs[run].get(key) for run in runs if run in self.runs for key in keys)
        return next((of for of in known if of is not None), {})

    def mean(self, checkpoint: str, method: str, metric: str, runs: Sequence[str] = RUNS) -> Value:
        return mean_value(self.column(checkpoint, method, metric, runs).values(), self.seed)

    def defined(self, checkpoint: str, method: str, *metrics: str, runs: Sequence[str] = RUNS) -> int:
        """Number of images with a value of all these metrics."""
        columns = [self.column(checkpoint, method, metric, runs) for metric in metrics]
        return sum(not any(math.isnan(of.get(image, math.nan)) for of in columns) for image in columns[0])

    def mean_of_methods(self, checkpoint: str, methods: str, metric: str) -> float:
        return mean_value(self.mean(checkpoint, m, metric).value for m in split_calls(methods)).value

    def accuracy(self, checkpoint: str) -> float:
        """On the test codes and negatives, at the end of a training."""
        return self.trained.histories[checkpoint].epochs[-1].accuracy

    @property
    def twins(self) -> list[list[str]]:
        """Light methods with the same mean scores under every regime, so that their maps are equal."""
        groups: dict[str, list[str]] = {}
        for method in self.settings.real:
            means = [
                self.mean(r, method, score).value for r in REGIMES for score in ("bl", "fmr", "tmr", "dts")
            ]
            groups.setdefault(" ".join(f"{mean:.3f}" for mean in means), []).append(method)
        return [members for members in groups.values() if len(members) > 1]

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

    def rho(self, checkpoint: str, method: str, first: str, second: str, runs: Sequence[str] = RUNS) -> Value:
        """Spearman's rho of two metrics, over the codes that have both."""
        x, y = (self.column(checkpoint, method, metric, runs) for metric in (first, second))
        shared = [image for image in x if image in y]
        return rho_value([x[i] for i in shared], [y[i] for i in shared], self.seed)

    def rho_without_size(self, regime: str, method: str, mass: str, drop: str) -> Value:
        """Rank correlation of codes without the effect of their size, which even a random map shows.

        Large codes have large parts and lose more without them.
        """
        x, y = (self.column(regime, method, metric) for metric in (mass, drop))
        rows = [(x[i], y[i], self.sizes[i]) for i in x if i in y and i in self.sizes]
        columns = np.array(rows).reshape(-1, 3)
        columns = columns[np.isfinite(columns).all(1)]
        if len(columns) < 9:
            return Value(math.nan, None, len(columns))
        drawn = [partial_rho(columns[rows]) for rows in resample(len(columns), 200, self.seed)]
        return Value(partial_rho(columns), _interval(np.array(drawn)), len(columns))

    @property
    def curve_runs(self) -> list[str]:
        """Where insertion and deletion are: on all codes, or on some of them."""
        return ["run", "subset"] if self.settings.curves == "all" else ["subset"]


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


def partial_rho(columns: np.ndarray) -> float:
    """Spearman's rho of the first two columns, with the ranks of the third taken out of both."""
    xy, xz, yz = (_spearman(columns[:, i], columns[:, j]) for i, j in ((0, 1), (0, 2), (1, 2)))
    left = (1 - xz**2) * (1 - yz**2)
    return (xy - xz * yz) / math.sqrt(left) if left > 1e-12 else math.nan


def _spearman(x: np.ndarray, y: np.ndarray) -> float:
    """Spearman's rho without its p value, which a bootstrap does not need hundreds of times."""
    constant = np.ptp(x) == 0 or np.ptp(y) == 0
    return math.nan if constant else float(np.corrcoef(rankdata(x), rankdata(y))[0, 1])


def _interval(draws: np.ndarray) -> tuple[float, float] | None:
    return percentile_interval(draws) if np.isfinite(draws).any() else None


TABLES = TableFile("heatproof.studies.qr")


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
    settings, spec = results.settings, TABLES.content[name]
    backbone = next((title for part, title in BACKBONES.items() if part in settings.model), "ResNet-50")
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
        "results": results, "backbone": backbone, "device": results.device,
        "distortions": ", ".join(DISTORTIONS).replace("_", " "),
        "twins": "".join(f" The same maps here, up to rounding: {', '.join(of)}." for of in results.twins),
    }  # fmt: skip
    published = [(spec["source"].format(**words), *row) for row in published_rows(name, backbone)]
    return TABLES.fill(name, (TableRow(results, *row) for row in rows[spec["rows"]]), published, **words)


def published_rows(name: str, backbone: str) -> list[Sequence[Any]]:
    """The paper's rows of a table, without their source; mass scores of its Figure 5 follow from Table 2."""
    if name == "coverage":
        return [
            (regime, method, *[None] * 4, float(structure_score(finder, timing, leakage, distance)))
            for regime, method, leakage, finder, timing, distance, _ in published_rows("table-2", backbone)
        ]
    rows = TABLES.content[name].get("published", [])
    return list(rows[backbone] if isinstance(rows, dict) else rows)


def axis_rows(methods: Sequence[str]) -> list[tuple[str, str, tuple[str, str]]]:
    """Regime, methods, axis and level: the levels of each axis of Figure 3 under each regime."""
    rows = []
    for k, axis in enumerate(("importance", "aggregation", "cost")):
        levels = {m: axes_of(explainers.get(parse_call(m)[0]))[k] for m in methods}
        for level, regime in product(dict.fromkeys(levels.values()), REGIMES):
            rows.append((regime, ", ".join(m for m in methods if levels[m] == level), (axis, level)))
    return rows


def axes_of(entry: Explainer) -> tuple[str, ...]:
    """A method on the axes of Figure 3: as the paper assigns it (tables.toml), else by what it computes.

    importance    what a pixel's weight comes from: gradient, activation, perturbation
    aggregation   how feature maps become one: global pooling, layer-wise, subspace; none at the input
    cost          light: a part of one shared pass; heavy: more passes, or one to the input

    >>> axes_of(explainers.get("eigencam"))
    ('activation', 'subspace', 'heavy')
    >>> axes_of(explainers.get("smoothgrad"))
    ('gradient', 'at the input', 'heavy')
    >>> axes_of(explainers.get("rise"))
    ('perturbation', 'at the input', 'heavy')
    """
    if of_paper := TABLES.content["axes"]["paper"].get(entry.name):
        return tuple(of_paper)
    needs = set(entry.needs)
    slopes = entry.reads_gradients
    shared = bool(needs & {"gradients", "activations", "scales"})
    pooled = "layer-wise" if entry.name in LAYER_WISE else "global pooling"
    importance = "gradient" if slopes else "perturbation"
    cost = "light" if shared and slopes and not entry.own_gradients else "heavy"
    return importance, pooled if shared or pooled == "layer-wise" else "at the input", cost


def tables(results: Results) -> dict[str, Table]:
    """Every table of one seed for which there are rows, in the order of the page."""
    first = REGIMES[0], results.settings.light[0]
    there = {
        "table-5": results.settings.depth_study, "table-6": results.settings.ablation,
        "scenes": results.column(*first, "scene_codes"),
        "edits": results.column(*first, f"edit_leaves({EDITS[0]})"),
    }  # fmt: skip
    named = (name for name, spec in TABLES.content.items() if "rows" in spec)
    return {name: qr_table(results, name) for name in named if there.get(name, True)}


def stored_table(folder: Path, like: Table) -> Table:
    """Our rows of the same table of a finished study, from its CSV file."""
    path = folder / "tables" / f"{like.name}.csv"
    if not path.exists():
        raise InputError(f"there is no {path}; finish that study first, or leave it out of --beside")

    def cell(row: Mapping[str, str], name: str) -> Cell:
        if name in ("source", "regime", "method"):
            return row[name]
        value, low, high = (float(row.get(f"{name}{end}") or "nan") for end in ("", " low", " high"))
        return Value(value, None if math.isnan(low) else (low, high))

    with path.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["source"] == OURS]
    return replace(like, rows=tuple(tuple(cell(row, c.name) for c in like.columns) for row in rows))


def compared(model: str, table: Table, others: Mapping[str, Path]) -> list[Table]:
    """Table 2 of all networks, with the paper's two below, and the order of methods on each pair of them.

    others: by network, the folders of other studies.
    """
    networks = {model: table} | {name: stored_table(folder, table) for name, folder in others.items()}
    rows = [(name, *row[1:]) for name, of in networks.items() for row in of.rows if row[0] == OURS]
    published = [(f"paper, {of}", *row) for of in BACKBONES.values() for row in published_rows("table-2", of)]
    orders: list[tuple[Cell, ...]] = []
    for (first, a), (second, b) in combinations(networks.items(), 2):
        for regime, (column, better) in product(REGIMES, SCORES.items()):
            x, y = (ours(of, regime, column) for of in (a, b))
            defined = [m for m in x if m in y and not math.isnan(number(x[m]) + number(y[m]))]
            methods = [method for method in defined if not is_floor(method)]
            values = [[number(of[method]) for method in methods] for of in (x, y)]
            best = [methods[int(np.argmax(better * np.array(of)))] if of else "" for of in values]
            rho, p, n, _ = rank_correlation(values[0], values[1])
            p = exact_p(values[0], values[1]) if 3 <= n <= EXACT and not math.isnan(rho) else p
            orders.append((f"{first}, {second}", regime, column, rho, p, n, *best))
    if not orders:
        return []
    return [TABLES.fill("backbones", rows, published), TABLES.fill("order", orders)]


def exact_p(x: Sequence[float], y: Sequence[float]) -> float:
    """Two-sided p of Spearman's rho: share of all orders of y that correlate at least as much.

    >>> exact_p([1, 2, 3], [2, 4, 6])
    0.3333333333333333
    """
    a, b = (rankdata(values) - (len(x) + 1) / 2 for values in (x, y))
    products = np.abs(b[np.array(list(permutations(range(len(b)))))] @ a)
    return float((products >= abs(b @ a) - 1e-9).mean())


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
    low, high = (
        student.interval(0.95, len(known) - 1, known.mean(), sem(known)) if known.std() else known[[0, 0]]
    )
    return Value(float(known.mean()), (float(low), float(high)), len(known))


def apart(first: Cell, second: Cell) -> int:
    """-1 if the first interval lies below the second, 1 above it, 0 if they overlap or one is missing."""
    if not (isinstance(first, Value) and isinstance(second, Value) and first.interval and second.interval):
        return 0
    return (first.interval[0] > second.interval[1]) - (first.interval[1] < second.interval[0])


def ours(table: Table, group: str, column: str, paper: bool = False) -> dict[str, Cell]:
    """By method: our cells, or the paper's, of one regime (or depth) in a column."""
    place = [c.name for c in table.columns].index(column)
    rows = (row for row in table.rows if (row[0] != OURS) == paper and row[1] == group)
    return {str(row[2]): row[place] for row in rows}
