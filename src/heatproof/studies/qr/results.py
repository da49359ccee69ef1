"""What was measured for one seed by checkpoint, method and metric, and the tables made from it.

Means are over codes, with a 95 % bootstrap interval over codes (1,000 resamples, seeded). Two numbers are not
means of a value of each code, and their intervals draw codes all the same:

    robustness   slope and AURC of the curve of means over severity, averaged over the distortions. A code's
                 own m(s) / m(0) is not averaged: where m(0) is near zero, the ratio is huge.
    causality    Spearman's rho over codes

Published rows (cambench.json) stand below ours for reference and are not ranked, and neither are the floors
(random, edges). Over seeds, a cell is the mean of the seeds' values with the 95 % interval of Student's t; n
counts seeds. Cite: chakraborty2025cambench.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.resources import files
from itertools import product
from typing import Any

import numpy as np
from scipy.stats import rankdata
from scipy.stats import t as student

from heatproof.explain.floors import is_floor
from heatproof.images.distort import DISTORTIONS, SEVERITIES
from heatproof.images.edits import EDITS
from heatproof.metrics import aurc, bl_slope
from heatproof.metrics.on_parts import structure_score
from heatproof.metrics.stats import percentile_interval, resample
from heatproof.registry import Explainer, explainers, parse_call
from heatproof.report.tables import Cell, Column, Table, Value, number
from heatproof.store import RunFolder
from heatproof.studies.qr.settings import QrSettings
from heatproof.studies.qr.trainings import Trained, cell_name, depth_name
from heatproof.studies.skeleton import mean_value, rho_value
from heatproof.studies.tables import Field, less, more, study_table
from heatproof.train import DEPTHS, REGIMES, ablation_grid

TWINS = 2e-3  # of BL: what half precision of the stored maps may change
CLEAN = "clean"
RUNS = ("run", "depth", "ablation", "subset")  # all codes before some of them
MEASURED = ("measured",)

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

    def accuracy(self, name: str) -> float:
        """On the test codes and negatives, at the end of a training."""
        return self.trained.histories[name].epochs[-1].accuracy

    def twins(self) -> list[list[str]]:
        """Light methods whose leakage is the same on every code under every regime: so are their maps."""
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
        return self.column(regime, method, "ms", MEASURED).get("", math.nan)

    def curves(self, regime: str, method: str, mass: str) -> np.ndarray:
        """ "n d s" of every distorted code."""

        def values(kind: str, level: float) -> list[float]:
            return list(self.column(regime, method, at(mass, kind, level), MEASURED).values())

        clean = values(CLEAN, 0)
        lines = [[clean, *(values(kind, level) for level in SEVERITIES[1:])] for kind in DISTORTIONS]
        return np.array(lines, dtype=np.float64).transpose(2, 0, 1)

    def robustness(self, regime: str, method: str, mass: str) -> Value:
        """BL's slope, or the AURC of FMR and TMR."""
        return curve_value(self.curves(regime, method, mass), mass, self.seed)

    def empty(self, regime: str, method: str) -> float:
        """Share of all-zero maps of distorted codes."""
        return float(np.isnan(self.curves(regime, method, "bl")[..., 1:]).mean())

    def slope(self, regime: str, method: str, kind: str) -> float:
        """BL's slope under a distortion."""
        line = mean_curves(self.curves(regime, method, "bl"))[list(DISTORTIONS).index(kind)]
        return float(bl_slope(line[None], SEVERITIES)["bl_slope"])

    def causal_pairs(self, regime: str, method: str, part: str) -> tuple[ByImage, ByImage]:
        """The mass on a part, and the fall of the logit without it."""
        mass = self.column(regime, method, {"finder": "fmr", "timing": "tmr"}[part])
        return mass, self.column(regime, "", f"drop_{part}", MEASURED)

    def causality_at_size(
        self, regime: str, method: str, part: str, how: Callable[[np.ndarray], float]
    ) -> Value:
        """A correlation of both that takes the size of the code into account.

        Large codes have large parts and lose more without them, which even a random map shows.
        """
        first, second = self.causal_pairs(regime, method, part)
        shared = [i for i in first if i in second and i in self.sizes]
        columns = np.array([(first[i], second[i], self.sizes[i]) for i in shared]).reshape(-1, 3)
        return controlled(columns[np.isfinite(columns).all(1)], how, self.seed)

    def edited(self, regime: str, method: str, what: str, kind: str) -> ByImage:
        """What an edit of a finder did to each code: leaves, arrives, or, without a method, drop."""
        return self.column(regime, method, f"edit_{what}({kind})", MEASURED)

    def empty_share(self, checkpoint: str, method: str, *_: object) -> float:
        """Of the maps of all codes."""
        return self.mean(checkpoint, method, "degenerate").value

    @property
    def curve_runs(self) -> list[str]:
        """Where insertion and deletion are: on all codes, or on some of them."""
        return ["run", "subset"] if self.settings.curves == "all" else ["subset"]

    def rho(self, first: ByImage, second: ByImage) -> Value:
        """Spearman's, over the codes that both have."""
        shared = [image for image in first if image in second]
        return rho_value([first[i] for i in shared], [second[i] for i in shared], self.seed)


def defined(*columns: ByImage) -> int:
    """How many images have a value in all columns."""
    return sum(not any(math.isnan(of.get(image, math.nan)) for of in columns) for image in columns[0])


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


OURS = "ours"
EMPTY = Column("empty maps", ".1%")
MASS_COLUMNS = {"bl": less("BL"), "fmr": more("FMR"), "tmr": more("TMR"), "dts": less("DtS")}
PARTS = {"finder": "FMR", "timing": "TMR"}
BY_REGIME: list[Field] = [
    (Column("source"), lambda *_: OURS),
    (Column("regime"), lambda regime, method: regime),
    (Column("method"), lambda regime, method: method),
]


def regime_table(
    name: str, title: str, methods: Sequence[str], fields: Sequence[Field], note: str = "", source: str = "",
    published: Mapping[str, Mapping[str, Sequence[Cell]]] | None = None,
) -> Table:  # fmt: skip
    """A row for each method under each regime, then those of the paper (regime -> method -> cells)."""
    below = [
        (source, regime, method, *cells)
        for regime in REGIMES if published for method, cells in published[regime].items()
    ]  # fmt: skip
    return study_table(name, title, product(REGIMES, methods), [*BY_REGIME, *fields], note, below)


def mass_fields(results: Results, metrics: Iterable[str] = MASS_COLUMNS) -> list[Field]:
    return [(MASS_COLUMNS[m], lambda c, method, *_, m=m: results.mean(c, method, m)) for m in metrics]


def structure_table(results: Results) -> Table:
    note = (
        "Codes only, explained class: code. n: codes; an all-zero map has no mass and counts as empty. "
        f"Accuracy: on the test codes and negatives. Time: one image, warm, median, on {results.device}. "
        "Floors (random, edges) and published rows are not ranked."
    )
    for members in results.twins():
        note += f" The same maps here, up to rounding: {', '.join(members)}."
    fields: list[Field] = [
        *mass_fields(results),
        (less("ms/image", ".2f"), results.milliseconds),
        (EMPTY, results.empty_share),
        (Column("accuracy"), lambda regime, _: results.accuracy(regime)),
        (Column("n"), lambda regime, method: len(results.column(regime, method, "bl"))),
    ]
    backbone = backbone_of(results.settings.model)
    return regime_table(
        "table-2", "Table 2: structure and speed", results.settings.listed, fields, note,
        f"paper, {backbone}", TABLE_2[backbone],
    )  # fmt: skip


def coverage_table(results: Results) -> Table:
    columns = {
        "auc_f": more("AUC finder"), "auc_t": more("AUC timing"), "auc_bg": less("AUC background"),
        "structure_score": more("StructureScore"), "structure_score(variant='mass')": more("mass score"),
    }  # fmt: skip
    fields: list[Field] = [(c, partial(results.mean, metric=name)) for name, c in columns.items()]
    backbone = backbone_of(results.settings.model)
    scores: Any = {
        regime: {m: [None] * 4 + [mass_score(backbone, regime, m)] for m in methods}
        for regime, methods in TABLE_2[backbone].items()
    }
    note = (
        "StructureScore: eq. 10, of coverages; mass score: FMR + TMR - 3 BL - DtS, which Figure 5 shows. The "
        "paper prints no coverages; its mass scores are computed from its Table 2."
    )
    return regime_table(
        "coverage", "Table 2, continued: coverage and StructureScore", results.settings.listed,
        [*fields, (EMPTY, results.empty_share)], note, f"paper, {backbone}", scores,
    )  # fmt: skip


def faithfulness_table(results: Results) -> Table:
    runs = results.curve_runs

    def rho(metric: str, regime: str, method: str) -> Value:
        return results.rho(*(results.column(regime, method, m, runs) for m in ("structure_score", metric)))

    fields: list[Field] = [
        (more("insertion"), partial(results.mean, metric="insertion", runs=runs)),
        (less("deletion"), partial(results.mean, metric="deletion", runs=runs)),
        (Column("rho(score, insertion)", "+.3f"), partial(rho, "insertion")),
        (Column("rho(score, deletion)", "+.3f"), partial(rho, "deletion")),
        (EMPTY, results.empty_share),
        (Column("n"), lambda regime, method: defined(results.column(regime, method, "insertion", runs))),
    ]
    note = (
        "Probability of the class, blurred baseline, 100 steps. rho: Spearman, over codes, of the "
        "StructureScore with the area; both agree where it is positive for insertion, negative for deletion."
    )
    return regime_table("faithfulness", "Insertion and deletion", results.settings.listed, fields, note)


def robustness_table(results: Results) -> Table:
    fields: list[Field] = [
        (less("BL slope", "+.3f"), partial(results.robustness, mass="bl")),
        (more("FMR-AURC"), partial(results.robustness, mass="fmr")),
        (more("TMR-AURC"), partial(results.robustness, mass="tmr")),
        (EMPTY, results.empty),
        (Column("n"), lambda regime, method: len(results.curves(regime, method, "bl"))),
    ]
    note = (
        f"Over {', '.join(DISTORTIONS).replace('_', ' ')}, severities 0 to 1; masks are distorted with the "
        "image. Slope and AURC are those of the mean curves. 1 is an AURC that does not change. Empty maps "
        "have no mass to leak and are left out; a distortion under which all of them are empty at some "
        "severity does not count, so that many empty maps make a slope look better than it is."
    )
    return regime_table(
        "table-3", "Table 3: robustness", results.settings.light, fields, note, "paper", TABLE_3
    )


def distortion_table(results: Results) -> Table:
    fields: list[Field] = [
        (less(kind.replace("_", " "), "+.3f"), partial(results.slope, kind=kind)) for kind in DISTORTIONS
    ]
    title = "Table 3, by distortion: growth of BL with severity"
    return regime_table("distortions", title, results.settings.light, [*fields, (EMPTY, results.empty)])


def causal_table(results: Results) -> Table:
    def rho(part: str, regime: str, method: str) -> Value:
        return results.rho(*results.causal_pairs(regime, method, part))

    ways = {"one size": within_thirds, "size taken out": partial_rho}
    fields: list[Field] = [
        *((more(f"rho({mass}, drop without {p})", "+.3f"), partial(rho, p)) for p, mass in PARTS.items()),
        *(
            (more(f"{part}, {title}", "+.3f"), partial(results.causality_at_size, part=part, how=how))
            for part in PARTS
            for title, how in ways.items()
        ),
        *(
            (
                Column(f"drop without {p}"),
                lambda regime, _, p=p: results.mean(regime, "", f"drop_{p}", MEASURED),
            )
            for p in PARTS
        ),
        (EMPTY, results.empty_share),
        (Column("n"), lambda regime, method: defined(*results.causal_pairs(regime, method, "finder"))),
    ]
    note = (
        "Spearman over codes; drop: of the class's logit when the part's pixels are blurred away (sigma 10). "
        "Pooled over codes it is confounded: large codes have large parts and lose more without them, which "
        "a random map shows too. One size: mean over three thirds by size; size taken out: partial."
    )
    title = "Table 4: does mass on a part go with what the part means?"
    return regime_table("table-4", title, results.settings.light, fields, note, "paper", TABLE_4)


def depth_table(results: Results) -> Table:
    fields: list[Field] = [
        BY_REGIME[0],
        (Column("trained"), lambda checkpoint, method, depth: depth),
        (Column("method"), lambda checkpoint, method, depth: method),
        *mass_fields(results),
        (Column("% of parameters", ".1f"), lambda *row: 100 * results.trained.shares[row[2]]),
        (Column("accuracy"), lambda checkpoint, *_: results.accuracy(checkpoint)),
        (EMPTY, results.empty_share),
    ]
    rows = [(depth_name(depth), method, depth) for method in results.settings.shown for depth in DEPTHS]
    below: Any = [("paper, ResNet-50", depth, "eigengradcam", *cells) for depth, cells in TABLE_5.items()]
    note = "Of parameters the paper says: less than 0.1, about 40, about 75 and 100 per cent."
    return study_table("table-5", "Table 5: how deep to fine-tune (cross-entropy)", rows, fields, note, below)


def ablation_table(results: Results) -> Table:
    fields: list[Field] = [
        BY_REGIME[0],
        (Column("method"), lambda checkpoint, method, *_: method),
        (Column("lambda", ".2f"), lambda *row: row[2]),
        (Column("alpha", ".2f"), lambda *row: row[3]),
        *mass_fields(results, ("bl", "fmr", "tmr")),
        (more("accuracy"), lambda checkpoint, *_: results.accuracy(checkpoint)),
        (EMPTY, results.empty_share),
    ]
    cells = product(results.settings.shown, ablation_grid())
    rows = [(cell_name(results.settings, *cell), method, *cell) for method, cell in cells]
    below: Any = [("paper, ResNet-50", "not named", *cell, *numbers) for cell, numbers in TABLE_6.items()]
    note = "lambda 0 is FT-Struct, whatever alpha is. The paper's table is on another scale than its Table 2."
    title = "Table 6: the price of leakage and the pull inside"
    return study_table("table-6", title, rows, fields, note, below)


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


AGGREGATIONS = {
    "subspace": ("eigencam", "eigengradcam"),
    "layer-wise": ("layercam", "hirescam", "ms-gradcam++", "fullgrad"),
}


def axis_table(results: Results) -> Table:
    """Levels of the axes of Figure 3, and the mean structure of the methods of each under each regime."""
    methods = [m for m in results.settings.listed if not is_floor(m)]
    rows: dict[tuple[str, str, str], list[str]] = {}
    for axis, title in enumerate(("importance", "aggregation", "cost")):
        levels = {m: axes_of(explainers.get(parse_call(m)[0]))[axis] for m in methods}
        for level, regime in product(dict.fromkeys(levels.values()), REGIMES):
            rows[title, level, regime] = [m for m in methods if levels[m] == level]

    def mean(metric: str, axis: str, level: str, regime: str) -> float:
        found = [results.mean(regime, m, metric).value for m in rows[axis, level, regime]]
        return mean_value(found).value

    fields: list[Field] = [
        *((Column(name), lambda *row, k=k: row[k]) for k, name in enumerate(("axis", "level", "regime"))),
        (Column("methods"), lambda *row: ", ".join(rows[row])),
        *((column, partial(mean, metric)) for metric, column in MASS_COLUMNS.items()),
    ]
    note = (
        "Means over the methods of a level. Levels are not independent: methods do not fill all combinations "
        "of the three axes, so a difference between levels is one between the methods named there."
    )
    return study_table("axes", "Figure 3: families along three axes", rows, fields, note, marked=False)


def scene_table(results: Results) -> Table:
    """Two codes and a distractor in one image."""
    columns = {
        "scene_codes": more("mass on codes"), "scene_distractors": less("mass on the distractor"),
        "scene_found": more("codes marked", ".1%"), "scene_weakest": more("weaker code's share"),
    }  # fmt: skip

    def count(regime: str, method: str) -> int:
        return len(results.column(regime, method, "scene_codes", MEASURED))

    def empty(regime: str, method: str) -> float:
        known = defined(results.column(regime, method, "scene_codes", MEASURED))
        return (count(regime, method) - known) / max(1, count(regime, method))

    fields: list[Field] = [
        (c, partial(results.mean, metric=name, runs=MEASURED)) for name, c in columns.items()
    ]
    note = (
        "Codes marked: of which the best pixels, as many as the codes have, cover half or more. Weaker "
        "code's share: of the mass on codes, against an even split (1: both the same). The networks saw one "
        "code at a time in training."
    )
    return regime_table(
        "scenes", "Several objects in one picture", results.settings.light,
        [*fields, (EMPTY, empty), (Column("n"), count)], note,
    )  # fmt: skip


def edit_table(results: Results) -> Table:
    """One finder removed, moved, swapped."""

    def mean(what: str, kind: str, regime: str, method: str) -> Value:
        of = "" if what == "drop" else method
        return mean_value(results.edited(regime, of, what, kind).values(), results.seed)

    def rho(kind: str, regime: str, method: str) -> Value:
        sides = ((method, "leaves"), ("", "drop"))
        return results.rho(*(results.edited(regime, of, what, kind) for of, what in sides))

    fields: list[Field] = []
    for kind in EDITS:
        for what in ("leaves",) if kind == "remove" else ("leaves", "arrives"):
            fields.append((more(f"{what}, {kind}", "+.3f"), partial(mean, what, kind)))
        fields.append((more(f"rho with the drop, {kind}", "+.3f"), partial(rho, kind)))
        fields.append((Column(f"drop of the logit, {kind}", "+.2f"), partial(mean, "drop", kind)))
    note = (
        "Leaves: mass that goes from where the finder was; arrives: mass that comes to where it is now. "
        "Edges follow every edit, because the image changed: only the correlation with the fall of the logit "
        "(rho) is about the network. Codes without room for a moved finder, and empty maps, are left out."
    )
    return regime_table("edits", "Counterfactual edits of a finder", results.settings.light, fields, note)


def tables(results: Results) -> dict[str, Table]:
    """Every table of one seed for which there are rows, in the order of the page."""
    settings, first = results.settings, (REGIMES[0], results.settings.light[0])
    makers = {
        structure_table: True, coverage_table: True, faithfulness_table: True, robustness_table: True,
        distortion_table: True, causal_table: True, depth_table: settings.depth_study,
        ablation_table: settings.ablation, axis_table: True,
        scene_table: bool(results.column(*first, "scene_codes", MEASURED)),
        edit_table: bool(results.edited(*first, "leaves", EDITS[0])),
    }  # fmt: skip
    return {table.name: table for table in (make(results) for make, there in makers.items() if there)}


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
