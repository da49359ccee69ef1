"""The tables of a QR study: the paper's 2 to 6, what lies behind them, and all of them over several seeds.

Published rows stand below ours, named as such and out of competition, and so do the floors (random, edges).
Over seeds, a cell is the mean of the seeds' values with the 95 % interval of Student's t; n counts seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from scipy.stats import t as student

from heatproof.images.distort import DISTORTIONS
from heatproof.report.tables import Cell, Column, Table, Value, number
from heatproof.studies import _qr_published as published
from heatproof.studies._qr_results import Results, is_floor, mean_value
from heatproof.studies._qr_train import cell_name, depth_name
from heatproof.train import DEPTHS, REGIMES, ablation_grid

OURS = "ours"
LESS, MORE = False, True
Row = tuple[Cell, ...]


def tables(results: Results) -> dict[str, Table]:
    """Every table of one seed, in the order of the page."""
    made = [
        structure_table(results), coverage_table(results), faithfulness_table(results),
        robustness_table(results), distortion_table(results), causal_table(results),
    ]  # fmt: skip
    if results.settings.depth_study:
        made.append(depth_table(results))
    if results.settings.ablation:
        made.append(ablation_table(results))
    return {table.name: table for table in made}


def structure_table(results: Results) -> Table:
    columns = (
        *_names("source", "regime", "method"), Column("BL", higher_is_better=LESS),
        Column("FMR", higher_is_better=MORE), Column("TMR", higher_is_better=MORE),
        Column("DtS", higher_is_better=LESS), Column("ms/image", ".2f", LESS), Column("empty maps"),
        Column("accuracy"), Column("n"),
    )  # fmt: skip
    rows: list[Row] = []
    for regime in REGIMES:
        for method in results.methods:
            values = [results.mean(regime, method, metric) for metric in ("bl", "fmr", "tmr", "dts")]
            codes = len(results.column(regime, method, "bl"))
            empty = results.mean(regime, method, "degenerate").value
            time = results.milliseconds(regime, method)
            rows.append((OURS, regime, method, *values, time, empty, results.accuracy(regime), codes))
    backbone = published.backbone_of(results.settings.model)
    for regime in REGIMES:
        for method, numbers in published.TABLE_2[backbone][regime].items():
            rows.append((f"paper, {backbone}", regime, method, *numbers, None, None, None))
    note = (
        "Codes only, explained class: code. n: codes; an all-zero map has no mass and counts as empty. "
        f"Accuracy: on the test codes and negatives. Time: one picture, warm, median, on {results.device}. "
        "Floors (random, edges) and published rows do not compete."
    )
    for lot in results.twins():
        note += f" The same maps here, up to rounding: {', '.join(lot)}."
    return _table("table-2", "Table 2: structure and speed", columns, rows, note)


def coverage_table(results: Results) -> Table:
    columns = (
        *_names("source", "regime", "method"), Column("AUC finder", higher_is_better=MORE),
        Column("AUC timing", higher_is_better=MORE), Column("AUC background", higher_is_better=LESS),
        Column("StructureScore", higher_is_better=MORE), Column("mass score", higher_is_better=MORE),
    )  # fmt: skip
    names = ("auc_f", "auc_t", "auc_bg", "structure_score", "structure_score(variant='mass')")
    rows: list[Row] = [
        (OURS, regime, method, *(results.mean(regime, method, name) for name in names))
        for regime in REGIMES
        for method in results.methods
    ]
    backbone = published.backbone_of(results.settings.model)
    for regime in REGIMES:
        for method in published.METHODS:
            score = published.mass_score(backbone, regime, method)
            rows.append((f"paper, {backbone}", regime, method, None, None, None, None, score))
    note = (
        "StructureScore: eq. 10, of coverages; mass score: FMR + TMR - 3 BL - DtS, which Figure 5 shows. The "
        "paper prints no coverages; its mass scores are computed from its Table 2."
    )
    return _table("coverage", "Table 2, continued: coverage and StructureScore", columns, rows, note)


def faithfulness_table(results: Results) -> Table:
    columns = (
        *_names("source", "regime", "method"), Column("insertion", higher_is_better=MORE),
        Column("deletion", higher_is_better=LESS), Column("rho(score, insertion)", "+.3f"),
        Column("rho(score, deletion)", "+.3f"), Column("n"),
    )  # fmt: skip
    subset = results.runs["subset"]
    rows: list[Row] = []
    for regime in REGIMES:
        for method in results.methods:
            areas = [_mean(results, subset.get((regime, method, m), {})) for m in ("insertion", "deletion")]
            rhos = [results.agreement(regime, method, m) for m in ("insertion", "deletion")]
            rows.append((OURS, regime, method, *areas, *rhos, areas[0].n))
    note = (
        "Probability of the class, blurred baseline, 100 steps. rho: Spearman, over codes, of the "
        "StructureScore with the area; both agree where it is positive for insertion, negative for deletion."
    )
    return _table("faithfulness", "Insertion and deletion", columns, rows, note)


def robustness_table(results: Results) -> Table:
    columns = (
        *_names("source", "regime", "method"), Column("BL slope", "+.3f", LESS),
        Column("FMR-AURC", higher_is_better=MORE), Column("TMR-AURC", higher_is_better=MORE),
        Column("empty maps"), Column("n"),
    )  # fmt: skip
    rows: list[Row] = []
    for regime in REGIMES:
        for method in results.light:
            values = [results.robustness(regime, method, mass) for mass in ("bl", "fmr", "tmr")]
            rows.append((OURS, regime, method, *values, results.empty(regime, method), values[0].n))
    for regime in REGIMES:
        for method, numbers in published.TABLE_3[regime].items():
            rows.append(("paper", regime, method, *numbers, None, None))
    note = (
        f"Over {', '.join(DISTORTIONS).replace('_', ' ')}, severities 0 to 1; masks are distorted with the "
        "picture. Slope and AURC are those of the mean curves. 1 is an AURC that does not move. Empty maps "
        "have no mass to leak and are left out; a distortion under which all of them are empty at some "
        "severity does not count, so that many empty maps make a slope look better than it is."
    )
    return _table("table-3", "Table 3: robustness", columns, rows, note)


def distortion_table(results: Results) -> Table:
    kinds = (Column(kind.replace("_", " "), "+.3f", LESS) for kind in DISTORTIONS)
    columns = (*_names("source", "regime", "method"), *kinds)
    rows: list[Row] = [
        (OURS, regime, method, *results.slopes(regime, method).values())
        for regime in REGIMES
        for method in results.light
    ]
    return _table("distortions", "Table 3, by distortion: growth of BL with severity", columns, rows)


def causal_table(results: Results) -> Table:
    columns = (
        *_names("source", "regime", "method"), Column("rho(FMR, drop without finder)", "+.3f", MORE),
        Column("rho(TMR, drop without timing)", "+.3f", MORE), Column("drop without finder"),
        Column("drop without timing"), Column("n"),
    )  # fmt: skip
    measured = results.runs["measured"]
    rows: list[Row] = []
    for regime in REGIMES:
        drops = [_mean(results, measured.get((regime, "", f"drop_{p}"), {})) for p in ("finder", "timing")]
        for method in results.light:
            rhos = [results.causality(regime, method, part) for part in ("finder", "timing")]
            rows.append((OURS, regime, method, *rhos, *drops, rhos[0].n))
    for regime in REGIMES:
        for method, numbers in published.TABLE_4[regime].items():
            rows.append(("paper", regime, method, *numbers, None, None, None))
    note = (
        "Spearman over codes; drop: of the class's logit when the part's pixels are blurred away (sigma 10)."
    )
    return _table("table-4", "Table 4: does mass on a part go with what the part means?", columns, rows, note)


def depth_table(results: Results) -> Table:
    columns = (
        *_names("source", "trained", "method"), Column("BL", higher_is_better=LESS),
        Column("FMR", higher_is_better=MORE), Column("TMR", higher_is_better=MORE),
        Column("DtS", higher_is_better=LESS), Column("% of parameters", ".1f"), Column("accuracy"),
    )  # fmt: skip
    rows: list[Row] = []
    for method in shown_methods(results):
        for depth in DEPTHS:
            values = [results.mean(depth_name(depth), method, name) for name in ("bl", "fmr", "tmr", "dts")]
            share = 100 * results.trained.shares[depth]
            rows.append((OURS, depth, method, *values, share, results.accuracy(depth_name(depth))))
    for depth, numbers in published.TABLE_5.items():
        rows.append(("paper, ResNet-50", depth, "eigengradcam", *numbers, None))
    note = "Of parameters the paper says: less than 0.1, about 40, about 75 and 100 per cent."
    return _table("table-5", "Table 5: how deep to fine-tune (cross-entropy)", columns, rows, note)


def ablation_table(results: Results) -> Table:
    columns = (
        *_names("source", "method"), Column("lambda", ".2f"), Column("alpha", ".2f"),
        Column("BL", higher_is_better=LESS), Column("FMR", higher_is_better=MORE),
        Column("TMR", higher_is_better=MORE), Column("accuracy", higher_is_better=MORE),
    )  # fmt: skip
    rows: list[Row] = []
    for method in shown_methods(results):
        for lam, alpha in ablation_grid():
            name = cell_name(results.settings, lam, alpha)
            values = [results.mean(name, method, metric) for metric in ("bl", "fmr", "tmr")]
            rows.append((OURS, method, lam, alpha, *values, results.accuracy(name)))
    for (lam, alpha), numbers in published.TABLE_6.items():
        rows.append(("paper, ResNet-50", "not named", lam, alpha, *numbers))
    note = "lambda 0 is FT-Struct, whatever alpha is. The paper's table is on another scale than its Table 2."
    return _table("table-6", "Table 6: the price of leakage and the pull inside", columns, rows, note)


def shown_methods(results: Results) -> tuple[str, ...]:
    """Of the depth study and the ablation: the paper's method, and the one that the penalty speaks of."""
    return tuple(dict.fromkeys(m for m in (results.main, "gradcam") if m in results.real))


def over_seeds(several: Sequence[Table]) -> Table:
    """One table of the same form, over the seeds of a study."""
    first = several[0]
    rows = tuple(
        tuple(_over([table.rows[i][j] for table in several]) for j in range(len(first.columns)))
        for i in range(len(first.rows))
    )
    note = f"Means over {len(several)} seeds with the 95 % interval of Student's t. {first.note}".strip()
    return replace(
        first, name=f"{first.name}-seeds", title=f"{first.title}, {len(several)} seeds", rows=rows, note=note
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
    """-1 where the first interval lies below the second, 1 above it, 0 where they meet or one is missing."""
    if not (isinstance(first, Value) and isinstance(second, Value) and first.interval and second.interval):
        return 0
    if first.interval[1] < second.interval[0]:
        return -1
    return 1 if first.interval[0] > second.interval[1] else 0


def flips(several: Sequence[Table], column: str) -> list[tuple[str, str, str]]:
    """(regime, method, method): pairs that two seeds put in opposite orders, each beyond its intervals."""
    found = []
    for regime in REGIMES:
        cells = [ours(table, regime, column) for table in several]
        for a in cells[0]:
            for b in cells[0]:
                orders = {apart(seed[a], seed[b]) for seed in cells}
                if a < b and {-1, 1} <= orders:
                    found.append((regime, a, b))
    return found


def ours(table: Table, group: str, column: str) -> dict[str, Cell]:
    """By method: our cells of one regime (or depth) in a column."""
    place = [c.name for c in table.columns].index(column)
    return {str(row[2]): row[place] for row in table.rows if row[0] == OURS and row[1] == group}


def _names(*names: str) -> tuple[Column, ...]:
    return tuple(map(Column, names))


def _mean(results: Results, column: dict[str, float]) -> Value:
    return mean_value(list(column.values()), results.seed)


def _table(name: str, title: str, columns: tuple[Column, ...], rows: Sequence[Row], note: str = "") -> Table:
    method = [column.name for column in columns].index("method")
    out = {i for i, row in enumerate(rows) if row[0] != OURS or is_floor(str(row[method]))}
    return Table(name, title, columns, tuple(rows), note, unranked=frozenset(out))
