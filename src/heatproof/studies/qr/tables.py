"""The tables of a QR study: the paper's 2 to 6, what lies behind them, and all of them over several seeds.

Published rows (cambench.json) stand below ours for reference and never as truth, named as such and out of
competition, and so do the floors (random, edges). Over seeds, a cell is the mean of the seeds' values with
the 95 % interval of Student's t; n counts seeds. Cite: chakraborty2025cambench.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.resources import files
from itertools import product
from typing import Any

import numpy as np
from scipy.stats import t as student

from heatproof.explain.floors import is_floor
from heatproof.images.distort import DISTORTIONS
from heatproof.metrics.on_parts import structure_score
from heatproof.report.tables import Cell, Column, Table, Value, number
from heatproof.studies.qr.results import Results
from heatproof.studies.qr.trainings import cell_name, depth_name
from heatproof.train import DEPTHS, REGIMES, ablation_grid

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
CONTRADICTIONS = (  # a test checks them against the numbers
    "its Table 6 is on another scale than its Table 2: for the same regime, backbone and settings BL is 0.18 "
    "there and at most 0.039 here",
    "in its Table 6 the rows with lambda = 0 differ by alpha, which then multiplies nothing (eq. 2)",
    "it says that FT-LeakMin lifts every method's StructureScore above FT-Struct's; by its own Table 2 that "
    "holds for XGrad-CAM only, and for LayerCAM and EigenGrad-CAM the score falls, on both backbones",
    "it says that a map inside the finders has a coverage AUC of 1; with its quantile thresholds a version-1 "
    "code's own finder mask gets 0.548",
)

OURS = "ours"
less, more = partial(Column, higher_is_better=False), partial(Column, higher_is_better=True)
BY_REGIME = (Column("source"), Column("regime"), Column("method"))
MASS_COLUMNS = {"bl": less("BL"), "fmr": more("FMR"), "tmr": more("TMR"), "dts": less("DtS")}
Cells = tuple[Cell, ...]


def tables(results: Results) -> dict[str, Table]:
    """Every table of one seed, in the order of the page."""
    makers: list[Callable[[Results], Table]] = [
        structure_table, coverage_table, faithfulness_table, robustness_table, distortion_table, causal_table,
    ]  # fmt: skip
    makers += [depth_table] * results.settings.depth_study + [ablation_table] * results.settings.ablation
    return {table.name: table for table in (make(results) for make in makers)}


EMPTY = Column("empty maps", ".1%")


def structure_table(results: Results) -> Table:
    def cells(regime: str, method: str) -> Cells:
        masses = (results.mean(regime, method, metric) for metric in MASS_COLUMNS)
        empty = results.mean(regime, method, "degenerate").value
        codes = len(results.column(regime, method, "bl"))
        return *masses, results.milliseconds(regime, method), empty, results.accuracy(regime), codes

    rest = (less("ms/image", ".2f"), EMPTY, Column("accuracy"), Column("n"))
    backbone = backbone_of(results.settings.model)
    note = (
        "Codes only, explained class: code. n: codes; an all-zero map has no mass and counts as empty. "
        f"Accuracy: on the test codes and negatives. Time: one picture, warm, median, on {results.device}. "
        "Floors (random, edges) and published rows do not compete."
    )
    for lot in results.twins():
        note += f" The same maps here, up to rounding: {', '.join(lot)}."
    rows = by_regime(results.settings.listed, cells) + published(f"paper, {backbone}", TABLE_2[backbone])
    return qr_table(
        "table-2", "Table 2: structure and speed", (*BY_REGIME, *MASS_COLUMNS.values(), *rest), rows, note
    )


def coverage_table(results: Results) -> Table:
    columns = {
        "auc_f": more("AUC finder"), "auc_t": more("AUC timing"), "auc_bg": less("AUC background"),
        "structure_score": more("StructureScore"), "structure_score(variant='mass')": more("mass score"),
    }  # fmt: skip
    backbone = backbone_of(results.settings.model)
    scores: Any = {
        regime: {m: [None] * 4 + [mass_score(backbone, regime, m)] for m in methods}
        for regime, methods in TABLE_2[backbone].items()
    }
    note = (
        "StructureScore: eq. 10, of coverages; mass score: FMR + TMR - 3 BL - DtS, which Figure 5 shows. The "
        "paper prints no coverages; its mass scores are computed from its Table 2."
    )
    rows = by_regime(
        results.settings.listed,
        lambda regime, method: (
            *(results.mean(regime, method, name) for name in columns), results.empty_share(regime, method)
        ),
    )  # fmt: skip
    title = "Table 2, continued: coverage and StructureScore"
    every = rows + published(f"paper, {backbone}", scores)
    return qr_table("coverage", title, (*BY_REGIME, *columns.values(), EMPTY), every, note)


def faithfulness_table(results: Results) -> Table:
    def cells(regime: str, method: str) -> Cells:
        areas = [results.mean(regime, method, name, results.curve_runs) for name in ("insertion", "deletion")]
        rhos = [results.agreement(regime, method, name) for name in ("insertion", "deletion")]
        return *areas, *rhos, results.empty_share(regime, method), areas[0].n

    columns = (
        more("insertion"), less("deletion"), Column("rho(score, insertion)", "+.3f"),
        Column("rho(score, deletion)", "+.3f"), EMPTY, Column("n"),
    )  # fmt: skip
    note = (
        "Probability of the class, blurred baseline, 100 steps. rho: Spearman, over codes, of the "
        "StructureScore with the area; both agree where it is positive for insertion, negative for deletion."
    )
    rows = by_regime(results.settings.listed, cells)
    return qr_table("faithfulness", "Insertion and deletion", (*BY_REGIME, *columns), rows, note)


def robustness_table(results: Results) -> Table:
    def cells(regime: str, method: str) -> Cells:
        values = [results.robustness(regime, method, mass) for mass in ("bl", "fmr", "tmr")]
        return *values, results.empty(regime, method), values[0].n

    columns = (
        less("BL slope", "+.3f"), more("FMR-AURC"), more("TMR-AURC"), EMPTY, Column("n"),
    )  # fmt: skip
    note = (
        f"Over {', '.join(DISTORTIONS).replace('_', ' ')}, severities 0 to 1; masks are distorted with the "
        "picture. Slope and AURC are those of the mean curves. 1 is an AURC that does not move. Empty maps "
        "have no mass to leak and are left out; a distortion under which all of them are empty at some "
        "severity does not count, so that many empty maps make a slope look better than it is."
    )
    rows = by_regime(results.settings.light, cells) + published("paper", TABLE_3)
    return qr_table("table-3", "Table 3: robustness", (*BY_REGIME, *columns), rows, note)


def distortion_table(results: Results) -> Table:
    columns = (*(less(kind.replace("_", " "), "+.3f") for kind in DISTORTIONS), EMPTY)

    def cells(regime: str, method: str) -> Cells:
        return *results.slopes(regime, method), results.empty(regime, method)

    rows = by_regime(results.settings.light, cells)
    title = "Table 3, by distortion: growth of BL with severity"
    return qr_table("distortions", title, (*BY_REGIME, *columns), rows)


def causal_table(results: Results) -> Table:
    parts = ("finder", "timing")
    drops = {
        r: [results.mean(r, "", f"drop_{part}", ["measured"]) for part in parts] for r in REGIMES
    }  # fmt: skip

    def cells(regime: str, method: str) -> Cells:
        rhos = [results.causality(regime, method, part) for part in parts]
        apart = [value for part in parts for value in results.causality_at_size(regime, method, part)]
        return *rhos, *apart, *drops[regime], results.empty_share(regime, method), rhos[0].n

    columns = (
        more("rho(FMR, drop without finder)", "+.3f"), more("rho(TMR, drop without timing)", "+.3f"),
        *(more(f"{part}, {how}", "+.3f") for part in parts for how in ("one size", "size taken out")),
        Column("drop without finder"), Column("drop without timing"), EMPTY, Column("n"),
    )  # fmt: skip
    note = (
        "Spearman over codes; drop: of the class's logit when the part's pixels are blurred away (sigma 10). "
        "Pooled over codes it is confounded: large codes have large parts and lose more without them, which "
        "a random map shows too. One size: mean over three thirds by size; size taken out: partial."
    )
    rows = by_regime(results.settings.light, cells) + published("paper", TABLE_4)
    title = "Table 4: does mass on a part go with what the part means?"
    return qr_table("table-4", title, (*BY_REGIME, *columns), rows, note)


def depth_table(results: Results) -> Table:
    columns = (
        Column("source"), Column("trained"), Column("method"), *MASS_COLUMNS.values(),
        Column("% of parameters", ".1f"), Column("accuracy"), EMPTY,
    )  # fmt: skip
    rows: list[Cells] = []
    for method in results.settings.shown:
        for depth in DEPTHS:
            name, share = depth_name(depth), 100 * results.trained.shares[depth]
            masses = (results.mean(name, method, metric) for metric in MASS_COLUMNS)
            rest = results.accuracy(name), results.empty_share(name, method)
            rows.append((OURS, depth, method, *masses, share, *rest))
    rows += [("paper, ResNet-50", depth, "eigengradcam", *numbers) for depth, numbers in TABLE_5.items()]
    note = "Of parameters the paper says: less than 0.1, about 40, about 75 and 100 per cent."
    return qr_table("table-5", "Table 5: how deep to fine-tune (cross-entropy)", columns, rows, note)


def ablation_table(results: Results) -> Table:
    columns = (
        Column("source"), Column("method"), Column("lambda", ".2f"), Column("alpha", ".2f"),
        *(MASS_COLUMNS[mass] for mass in ("bl", "fmr", "tmr")), more("accuracy"), EMPTY,
    )  # fmt: skip
    rows: list[Cells] = []
    for method in results.settings.shown:
        for lam, alpha in ablation_grid():
            name = cell_name(results.settings, lam, alpha)
            masses = (results.mean(name, method, metric) for metric in ("bl", "fmr", "tmr"))
            rest = results.accuracy(name), results.empty_share(name, method)
            rows.append((OURS, method, lam, alpha, *masses, *rest))
    rows += [("paper, ResNet-50", "not named", *cell, *numbers) for cell, numbers in TABLE_6.items()]
    note = "lambda 0 is FT-Struct, whatever alpha is. The paper's table is on another scale than its Table 2."
    return qr_table("table-6", "Table 6: the price of leakage and the pull inside", columns, rows, note)


def by_regime(methods: Sequence[str], cells: Callable[[str, str], Iterable[Cell]]) -> list[Cells]:
    """Our rows: what was found for each method under each regime."""
    return [(OURS, regime, method, *cells(regime, method)) for regime in REGIMES for method in methods]


def published(source: str, numbers: Mapping[str, Mapping[str, Sequence[Cell]]]) -> list[Cells]:
    """The paper's rows."""
    return [(source, regime, m, *cells) for regime in REGIMES for m, cells in numbers[regime].items()]


def qr_table(
    name: str, title: str, columns: Sequence[Column], rows: Sequence[Cells], note: str = ""
) -> Table:
    """Rows end in empty cells where the paper says nothing; floors and the paper do not compete."""
    place = [column.name for column in columns].index("method")
    out = frozenset(i for i, row in enumerate(rows) if row[0] != OURS or is_floor(str(row[place])))
    whole = tuple((*row, *[None] * (len(columns) - len(row))) for row in rows)
    return Table(name, title, tuple(columns), whole, note, unranked=out)


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


def over_seeds(several: Sequence[Table]) -> Table:
    """One table of the same form, over the seeds of a study."""
    first, count = several[0], len(several)
    rows = tuple(
        tuple(_over(cells) for cells in zip(*same, strict=True))
        for same in zip(*(table.rows for table in several), strict=True)
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
    """-1 where the first interval lies below the second, 1 above it, 0 where they meet or one is missing."""
    if not (isinstance(first, Value) and isinstance(second, Value) and first.interval and second.interval):
        return 0
    return (first.interval[0] > second.interval[1]) - (first.interval[1] < second.interval[0])


def flips(several: Sequence[Table], column: str) -> list[tuple[str, str, str]]:
    """(regime, method, method): pairs that two seeds put in opposite orders, each beyond its intervals."""
    found: list[tuple[str, str, str]] = []
    for regime in REGIMES:
        cells = [ours(table, regime, column) for table in several]
        pairs = ((a, b) for a, b in product(cells[0], repeat=2) if a < b)
        found += [(regime, a, b) for a, b in pairs if {-1, 1} <= {apart(one[a], one[b]) for one in cells}]
    return found


def ours(table: Table, group: str, column: str) -> dict[str, Cell]:
    """By method: our cells of one regime (or depth) in a column."""
    place = [c.name for c in table.columns].index(column)
    return {str(row[2]): row[place] for row in table.rows if row[0] == OURS and row[1] == group}
