"""Results of a QR study: measurements of a seed, its tables, and the page with the answers to four questions.

Means are over codes, with a 95 % bootstrap interval over codes (1,000 resamples, seeded). Two numbers are not
means of a value of each code, and their intervals draw codes all the same:

    robustness   slope and AURC of the curve of means over severity, averaged over the distortions. A code's
                 own m(s) / m(0) is not averaged: where m(0) is near zero, the ratio is huge.
    causality    Spearman's rho over codes

The tables are declared in tables.toml. Published rows stand below ours for reference and are not ranked, and
neither are the floors (random, edges). Over seeds, a cell is the mean of the seeds' values with the 95 %
interval of Student's t; n counts seeds. Cite: chakraborty2025cambench.

An answer on the page counts methods and regimes whose 95 % intervals lie apart: intervals over seeds if there
are several, else over codes.
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
from PIL import Image
from scipy.stats import rankdata, sem
from scipy.stats import t as student

from heatproof.errors import InputError
from heatproof.explain.baselines import is_floor
from heatproof.images.codes import EDITS
from heatproof.images.distort import DISTORTIONS, SEVERITIES
from heatproof.metrics import aurc, bl_slope, rank_correlation
from heatproof.metrics.on_parts import structure_score
from heatproof.metrics.results import percentile_interval, resample
from heatproof.registry import Explainer, explainers, parse_call, split_calls
from heatproof.report import figures
from heatproof.report.figures import COLOURS, GREY, MARKERS, Line, Panel, line_style
from heatproof.report.panels import Tile, sheet
from heatproof.report.tables import Cell, Table, Value, number
from heatproof.show import overlay
from heatproof.store import RunFolder
from heatproof.studies.common import MarkdownReport, TableFile, average, mean_value, rho_value, write_page
from heatproof.studies.qr.trainings import BASE, Trained, cell_name, depth_name, uses_proxy
from heatproof.studies.settings import QR_MAIN, QrSettings
from heatproof.train import DEPTHS, REGIMES, ablation_grid

CLEAN = "clean"
RUNS = ("run", "depth", "ablation", "subset", "measured")  # all codes before some of them
BACKBONES = {"resnet50": "ResNet-50", "convnext_base": "ConvNeXt-B"}
OURS = "ours"
EXACT = 8  # methods up to which p of a rank correlation is counted over all orders
SCORES = {"BL": -1, "FMR": 1, "TMR": 1, "DtS": -1}  # 1: more is better
LAYER_WISE = ("hirescam", "ms-gradcam++", "fullgrad")  # beside those of the paper
NEAR_ALL = 0.99  # accuracy of every regime, the paper's premise: it reports 99.2 % and more
LEAST_POINTS = 0.01  # of accuracy that FT-LeakMin may cost
EMPTIED = 0.01  # more all-zero maps than this are reported
TUNED = REGIMES[1:]  # FT-Struct and FT-LeakMin
MAX_CODES = 3  # of the sheet of examples
EXAMPLE_METHODS = ("gradcam", "layercam", "eigengradcam")  # in it, if they are among the methods
WIDE = 10  # slowest over fastest, from which on an axis of times is logarithmic

ByImage = Mapping[str, float]
Columns = dict[tuple[str, str, str], dict[str, float]]  # checkpoint, method, metric -> image -> value
Tables = Mapping[str, Table]


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
            means = [self.mean(r, method, m).value for r in REGIMES for m in ("bl", "fmr", "tmr", "dts")]
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
    slopes = entry.reads_gradients
    shared = bool(set(entry.needs) & {"gradients", "activations", "scales"})
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


def write_qr_page(
    out: Path, seeds: Sequence[Results], others: Mapping[str, Path] | None = None
) -> MarkdownReport:
    """Write the page; that of the first of several seeds is complete.

    others: by network, folders of finished studies of the same codes.
    """
    first, every = seeds[0], [tables(results) for results in seeds]
    settings, own = first.settings, every[0]
    main: Tables = own
    if len(seeds) > 1:
        main = {name: over_seeds([of[name] for of in every]) for name in own}
    if settings.figures:
        draw_examples(first, out)
    both = compared(settings.model, own["table-2"], others or {})
    return write_page(
        out, "studies/qr/page.md", [*main.values(), *own.values(), *both],
        draw_figures(first, own) if settings.figures else {}, settings=settings, results=first,
        seeds=len(seeds), agreement=agreement(main), depths=depths(main, settings.detailed[0]),
        leakage=leakage(main["table-2"]), robustness=robustness(main), floors=floors(main["table-2"]),
        flipped=flipped([of["table-2"] for of in every]),
        proxy=first.accuracy(BASE) if uses_proxy(settings) else None,
        accuracy={name: first.accuracy(name) for name in REGIMES}, near=NEAR_ALL,
        orders=both[1].rows if both else (),
        guidance=guidance(main, settings.detailed[0]),
        headings={name: TABLES.content[name].get("heading") for name in own},
    )  # fmt: skip


def guidance(main: Tables, method: str) -> dict[str, Any]:
    """Best method, depth, lambda and alpha by the mass score of Figure 5, and what speaks against them."""
    masses = [real(main["coverage"], regime, "mass score") for regime in TUNED]
    order = sorted(((sum(number(of[m]) for of in masses) / len(masses), m) for m in masses[0]), key=_rank)
    leaks = {r: ours(main["table-2"], r, "BL") for r in TUNED}
    leaky = [m for _, m in order if all(apart(of[m], of["random"]) >= 0 for of in leaks.values())]
    deep = [(number(ours(main["table-5"], d, "mass score")[method]), d) for d in DEPTHS if "table-5" in main]
    cells = []
    if "table-6" in main:
        table = main["table-6"]
        names = [column.name for column in table.columns]
        ranked = (row for i, row in enumerate(table.rows) if i not in table.unranked and row[1] == method)
        rows = [dict(zip(names[2:], map(number, row[2:]), strict=True)) for row in ranked]
        start = next(row for row in rows if row["lambda"] == 0)
        free = (
            row for row in rows
            if start["accuracy"] - row["accuracy"] <= LEAST_POINTS + 1e-9
            and row["empty maps"] <= start["empty maps"] + EMPTIED
        )  # fmt: skip
        cells = sorted(((row["mass score"], row["lambda"], row["alpha"]) for row in free), key=_rank)
    return {"order": order, "leaky": leaky, "depths": sorted(deep, key=_rank), "cells": cells}


def _rank(scored: Sequence[Any]) -> float:
    """Key that sorts the highest score first and undefined ones last."""
    return math.inf if math.isnan(scored[0]) else -scored[0]


def agreement(main: Tables) -> dict[str, Any]:
    """RQ1: correlations of masses with drops beside those of random maps, and of scores with areas."""
    parts, orders = [], []
    for mass, part, what in (("FMR", "finder", "finders"), ("TMR", "timing", "timing")):
        column = f"rho({mass}, drop without {part})"
        random = {regime: ours(main["table-4"], regime, column)["random"] for regime in REGIMES}
        cells = [(cell, random[r]) for r in REGIMES for cell in real(main["table-4"], r, column).values()]
        signs = [apart(cell, Value(0, (0, 0))) for cell, _ in cells]
        parts.append({
            "what": f"{mass} with the drop without {what}", "pairs": len(cells), "random": random.values(),
            "rhos": [rho for rho in (number(cell) for cell, _ in cells) if not math.isnan(rho)],
            "above": signs.count(1), "below": signs.count(-1),
            "beyond": sum(apart(*both) > 0 for both in cells),
        })  # fmt: skip
    for regime, column in product(REGIMES, ("insertion", "deletion")):
        score = ours(main["coverage"], regime, "StructureScore")
        area = ours(main["faithfulness"], regime, column)
        rho = rank_correlation([number(score[m]) for m in score], [number(area[m]) for m in score]).rho
        orders.append((rho, column, regime))
    return {"parts": parts, "orders": orders, "methods": len(score)}


def depths(main: Tables, method: str) -> list[dict[str, Any]]:
    """RQ2: from Table 5, or from the two of its rows that are regimes."""
    groups = [(depth, main["table-2"], depth_name(depth)) for depth in DEPTHS[:2]]
    if "table-5" in main:
        groups = [(depth, main["table-5"], depth) for depth in DEPTHS]
    rows: list[dict[str, Any]] = []
    for depth, table, group in groups:
        cells = {column: ours(table, group, column)[method] for column in ("FMR", "BL", "DtS")}
        start = rows[0]["cells"] if rows else cells
        moved = {column: apart(cells[column], start[column]) for column in ("FMR", "BL")}
        rows.append({"depth": depth, "cells": cells, "moved": moved})
    return rows


def leakage(table: Table) -> dict[str, Any]:
    """RQ3: FT-LeakMin against FT-Struct, method by method."""

    def both(column: str) -> dict[str, tuple[Cell, Cell]]:
        old, new = (real(table, regime, column) for regime in TUNED)
        return {method: (old[method], new[method]) for method in old}

    struct, leakmin = (number(cell) for cell in next(iter(both("accuracy").values())))
    empty = {method: (number(old), number(new)) for method, (old, new) in both("empty maps").items()}
    return {
        "leaks": both("BL"),
        "moved": {
            (column, way): [m for m, (old, new) in both(column).items() if apart(new, old) == way]
            for column, way in product(("BL", "FMR", "TMR"), (-1, 1))
        },
        "emptied": {m: (old, new) for m, (old, new) in empty.items() if new > old + EMPTIED},
        "accuracy": (struct, leakmin),
        "within": struct - leakmin <= LEAST_POINTS + 1e-9,
    }


def robustness(main: Tables) -> dict[str, Any]:
    """RQ4: means over methods by regime, and distortions by growth of leakage."""

    def mean(name: str, regimes: Iterable[str], column: str) -> float:
        return average(number(cell) for r in regimes for cell in real(main[name], r, column).values())

    regimes = []
    for regime in REGIMES:
        means = (mean("table-3", [regime], c) for c in ("BL slope", "FMR-AURC", "TMR-AURC"))
        empty = {m: number(cell) for m, cell in real(main["table-3"], regime, "empty maps").items()}
        most = max(empty, key=empty.__getitem__)
        regimes.append((regime, *means, empty[most], most))
    kinds = (name.replace("_", " ") for name in DISTORTIONS)
    growth = [(kind, mean("distortions", REGIMES, kind)) for kind in kinds]
    known = [pair for pair in growth if not math.isnan(pair[1])]
    return {"regimes": regimes, "growth": sorted(known, key=lambda pair: -pair[1])}


def floors(table: Table) -> list[tuple[str, dict[str, int], int]]:
    """By column: number of methods that score better than each map that ignores the network."""
    counted = []
    for column, better in SCORES.items():
        of = {regime: ours(table, regime, column) for regime in REGIMES}
        pairs = [(r, cell) for r in REGIMES for cell in real(table, r, column).values()]
        counts = {
            floor: sum(apart(cell, of[regime][floor]) == better for regime, cell in pairs)
            for floor in filter(is_floor, of[REGIMES[0]])
        }
        counted.append((column, counts, len(pairs)))
    return counted


def flipped(seeds: Sequence[Table]) -> list[str]:
    """Pairs of methods that two seeds rank in opposite orders, each beyond its intervals over codes."""
    pairs = []
    for column, regime in product(SCORES, REGIMES):
        cells = [ours(table, regime, column) for table in seeds]
        for a, b in product(cells[0], repeat=2):
            if a < b and {-1, 1} <= {apart(of[a], of[b]) for of in cells}:
                pairs.append(f"{column}: {a} and {b} under {regime}")
    return pairs


def real(table: Table, group: str, column: str) -> dict[str, Cell]:
    """Our cells without the floors."""
    return {m: cell for m, cell in ours(table, group, column).items() if not is_floor(m)}


def draw_figures(results: Results, made: Tables) -> dict[str, Any]:
    """Structure against time, BL against severity, and FMR and BL against what was trained."""
    method, panels, depths = results.settings.detailed[0], [], []
    curves = {regime: mean_curves(results.curves(regime, method, "bl")) for regime in REGIMES}
    for k, kind in enumerate(DISTORTIONS):
        lines = [Line(SEVERITIES, of[k], r, line_style(i)) for i, (r, of) in enumerate(curves.items())]
        axes = {"title": kind.replace("_", " "), "xlabel": "severity", "ylabel": f"BL, {method}"}
        panels.append(Panel(lines, axes))
    grid, shared = [panels[:3], panels[3:]], {"sharex": True, "sharey": True}
    drawn = {
        "figure-5": pareto_figure(made),
        "distortions": figures.lines(grid, 7.4, 4.4, "upper center", **shared),
    }
    if "table-5" in made:
        x = range(len(DEPTHS))
        for column in ("FMR", "BL"):
            cells = [ours(made["table-5"], depth, column)[method] for depth in DEPTHS]
            ends = [getattr(cell, "interval", None) or (math.nan, math.nan) for cell in cells]
            low, high = zip(*ends, strict=True)
            paper = [number(ours(made["table-5"], depth, column, paper=True)[QR_MAIN]) for depth in DEPTHS]
            lines = [
                Line(x, [*map(number, cells)], method, line_style(0), (low, high)),
                Line(x, paper, "published", line_style(1, linestyle="--")),
            ]
            ticks = {"xticks": x, "xticklabels": DEPTHS, "xlabel": "trained"}
            depths.append(Panel(lines, {"title": column, **ticks}))
        drawn["figure-4"] = figures.lines([depths], 6.6, 3.2, "upper center")
    return drawn


def pareto_figure(made: Tables) -> Any:
    """Structure against time, ours and published: their times are of other machines.

    The line joins the points that no other is both faster and better than.
    """
    titles = {False: "measured here", True: str(made["coverage"].rows[-1][0]).replace("paper", "published")}
    panels, colours = [], dict[str, str]()

    def mark(colour: str, regime: str = REGIMES[0]) -> dict[str, Any]:
        return {"color": colour, "marker": MARKERS[REGIMES.index(regime)], "linestyle": "", "markersize": 6}

    for paper, title in titles.items():
        lines, points = [], []
        for regime in REGIMES:
            for method, score in ours(made["coverage"], regime, "mass score", paper).items():
                time = number(ours(made["table-2"], regime, "ms/image", paper)[method])
                if not is_floor(method):
                    colours.setdefault(method, COLOURS[len(colours) % len(COLOURS)])
                    points.append((time, number(score)))
                lines.append(Line([time], [number(score)], style=mark(colours.get(method, GREY), regime)))
        best = frontier(points)
        joined = {"color": "black", "linewidth": 0.8, "alpha": 0.5}
        times = [line.x[0] for line in lines if not math.isnan(line.x[0])]
        scale = "log" if times and max(times) > WIDE * min(times) else "linear"
        axes = {"title": title, "xlabel": "ms per image", "xscale": scale}
        lines.append(Line([time for time, _ in best], [score for _, score in best], style=joined))
        panels.append(Panel(lines, axes | {"ylabel": "FMR + TMR - 3 BL - DtS"}))
    legend = [Line([], [], m, mark(colour)) for m, colour in (colours | {"floors": GREY}).items()]
    legend += [Line([], [], r, mark("black", r) | {"markerfacecolor": "white"}) for r in REGIMES]
    panels[0] = Panel([*panels[0].lines, *legend], panels[0].axes)
    return figures.lines([panels], 3.4 * len(panels) + 1.9, 3.6)


def frontier(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Times and scores that no other is both faster and better than, by time.

    >>> frontier([(3, 0.5), (1, 0), (2, 1), (2, math.nan)])
    [(1, 0), (2, 1)]
    """
    best: list[tuple[float, float]] = []
    for time, score in sorted((p for p in points if not math.isnan(sum(p))), key=lambda p: (p[0], -p[1])):
        if not best or score > best[-1][1]:
            best.append((time, score))
    return best


def draw_examples(results: Results, out: Path) -> None:
    """Write OUT/figures/examples.png, maps of the first codes."""
    maps = RunFolder.open(out / "run").maps()
    methods = [m for m in EXAMPLE_METHODS if m in results.settings.real] or list(results.settings.real[:2])
    rows = []
    for image in sorted(results.column("zs", methods[0], "bl"))[:MAX_CODES]:
        with Image.open(out / "data" / "test" / image) as file:
            picture = file.convert("RGB")
        row = [Tile(picture, "code")]
        for method, regime in product(methods, REGIMES):
            own = maps.read(regime, method, [image])
            heat = own.upsample((picture.height, picture.width))[0]
            leak = results.column(regime, method, "bl")[image]
            answer = results.column(regime, "", "predicted")[image]
            wrong = "" if answer == int(own.explained[0]) else " (predicted: no code)"
            note = f"{regime}, {'empty map' if math.isnan(leak) else f'BL {leak:.2f}'}"
            row.append(Tile(overlay(picture, heat), f"{method}{wrong}", note))
        rows.append(row)
    path = out / "figures" / "examples.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet(rows, heading="explains: code (true label)", cmap="inferno", side=160).save(path)
