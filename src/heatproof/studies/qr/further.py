"""The paper's three axes as a comparison of families, and what lies beyond its single codes.

Figure 3 of chakraborty2025cambench puts methods on three axes. Here they are facts that can be counted with:

    importance    what a pixel's weight comes from: gradient, activation, perturbation
    aggregation   how feature maps become one: global pooling, layer-wise, subspace; none at the input
    cost          light: a part of one shared pass; heavy: more passes, or one to the input

A level's row is the mean over the methods on it, of their means over codes. Methods do not fill all
combinations, so a difference between levels is one between these methods, and nothing more.
"""

from __future__ import annotations

from collections.abc import Callable

from heatproof.explain.floors import is_floor
from heatproof.images.edits import EDITS
from heatproof.registry import Explainer, explainers, parse_call
from heatproof.report.tables import Cell, Column, Table
from heatproof.studies.qr.results import Results
from heatproof.studies.qr.tables import (
    BY_REGIME,
    EMPTY,
    MASS_COLUMNS,
    Cells,
    by_regime,
    less,
    more,
    qr_table,
)
from heatproof.studies.skeleton import mean_value
from heatproof.train import REGIMES

SUBSPACE = ("eigencam", "eigengradcam")
LAYER_WISE = ("layercam", "hirescam", "ms-gradcam++", "fullgrad")
AXES = ("importance", "aggregation", "cost")


def axes_of(entry: Explainer) -> tuple[str, str, str]:
    """Where a method stands on the three axes.

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
    pooled = "global pooling" if shared else "at the input"
    aggregation = (
        "subspace" if entry.name in SUBSPACE else "layer-wise" if entry.name in LAYER_WISE else pooled
    )
    light = shared and importance != "perturbation"
    return importance, aggregation, "light" if light else "heavy"


def axis_table(results: Results) -> Table:
    """Levels of the axes, the methods on each, and the mean of their structure under each regime."""
    rows: list[Cells] = []
    methods = [m for m in results.settings.listed if not is_floor(m)]
    placed = {m: axes_of(explainers.get(parse_call(m)[0])) for m in methods}
    for axis, title in enumerate(AXES):
        for level in dict.fromkeys(places[axis] for places in placed.values()):
            those = [m for m in methods if placed[m][axis] == level]
            for regime in REGIMES:
                found = ([results.mean(regime, m, metric).value for m in those] for metric in MASS_COLUMNS)
                means = (mean_value(values).value for values in found)
                rows.append((title, level, regime, ", ".join(those), *means))
    heads = (Column("axis"), Column("level"), Column("regime"), Column("methods"))
    note = (
        "Means over the methods of a level. Levels are not independent: methods do not fill all combinations "
        "of the three axes, so a difference between levels is one between the methods named there."
    )
    columns = (*heads, *MASS_COLUMNS.values())
    return Table("axes", "Figure 3: families along three axes", columns, tuple(rows), note, marked=False)


def scene_table(results: Results) -> Table:
    """Two codes and a distractor in one picture."""
    columns = {
        "scene_codes": more("mass on codes"), "scene_distractors": less("mass on the distractor"),
        "scene_found": more("codes marked", ".1%"), "scene_weakest": more("weaker code's share"),
    }  # fmt: skip
    note = (
        "Codes marked: of which the best pixels, as many as the codes have, cover half or more. Weaker "
        "code's share: of the mass on codes, against an even split (1: both the same). The networks saw one "
        "code at a time in training."
    )

    def cells(regime: str, method: str) -> Cells:
        found = [results.measured(regime, method, metric) for metric in columns]
        means = [mean_value(of.values(), results.seed) for of in found]
        empty = sum(value != value for value in found[0].values()) / max(1, len(found[0]))
        return *means, empty, len(found[0])

    rows = by_regime(results.settings.light, cells)
    heads = (*BY_REGIME, *columns.values(), EMPTY, Column("n"))
    return qr_table("scenes", "Several objects in one picture", heads, rows, note)


def edit_table(results: Results) -> Table:
    """One finder removed, moved, swapped."""

    def cells(regime: str, method: str) -> Cells:
        found: list[Cell] = []
        for kind in EDITS:
            leaves, arrives, drop = (
                mean_value(results.edited(regime, of, what, kind).values(), results.seed)
                for of, what in ((method, "leaves"), (method, "arrives"), ("", "drop"))
            )
            moved = [] if kind == "remove" else [arrives]
            found += [leaves, *moved, results.follows_edit(regime, method, kind), drop]
        return tuple(found)

    columns = [
        column
        for kind in EDITS
        for column in (
            more(f"leaves, {kind}", "+.3f"),
            *([more(f"arrives, {kind}", "+.3f")] if kind != "remove" else []),
            more(f"rho with the drop, {kind}", "+.3f"), Column(f"drop of the logit, {kind}", "+.2f"),
        )
    ]  # fmt: skip
    note = (
        "Leaves: mass that goes from where the finder was; arrives: mass that comes to where it is now. "
        "Edges follow every edit, because the picture changed: only what goes with the fall of the logit "
        "(rho) speaks of the network. Codes without room for a moved finder, and empty maps, are left out."
    )
    rows = by_regime(results.settings.light, cells)
    return qr_table("edits", "Counterfactual edits of a finder", (*BY_REGIME, *columns), rows, note)


def further_tables(results: Results) -> dict[str, Table]:
    """Those for which there is something to show."""
    makers: list[Callable[[Results], Table]] = [axis_table]
    if results.measured(REGIMES[0], results.settings.light[0], "scene_codes"):
        makers.append(scene_table)
    if results.edited(REGIMES[0], results.settings.light[0], "leaves", EDITS[0]):
        makers.append(edit_table)
    return {table.name: table for table in (make(results) for make in makers)}
