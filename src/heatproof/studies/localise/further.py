"""What the thesis says by eye, counted: how many pixels suffice, scattered maps, how steady LIME is.

sufficient share   where the curves of insertion and deletion cross: from there on the pixels shown are worth
                   more than those that are left. Between two kept points (every tenth) it is linear; where
                   the class is as likely without any pixel as with all of them there is no crossing.
scattered maps     dispersion (metrics/blobs.py) against the probability of the explained class
repeats            the same pictures with other seeds: rank correlation of the maps and overlap of the
                   budget's pixels, over all pairs of repeats
segment counts     LIME with other numbers of segments on the same pictures
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from heatproof.explain.api import explain, read_methods
from heatproof.metrics.agreement import map_similarity
from heatproof.metrics.localisation import budget_masks, mask_overlap
from heatproof.models import Model
from heatproof.registry import call_text
from heatproof.report.tables import Cell, Column, Table
from heatproof.studies.localise.scored import Scored, macro_value
from heatproof.studies.localise.settings import LocaliseSettings
from heatproof.studies.localise.tables import FAITHFULNESS, LOCALISATION, head
from heatproof.studies.skeleton import floor_rows, mean_value, rho_value
from heatproof.types import Batch

SURE = 0.5  # probability of the explained class


def crossing(insertion: Sequence[float], deletion: Sequence[float]) -> float:
    """The share of pixels at which the two curves cross; points at equal steps from 0 to 1.

    >>> crossing([0.0, 0.5, 1.0], [1.0, 0.0, 0.0])
    0.3333333333333333
    >>> crossing([0.9, 1.0], [0.9, 0.0])
    nan
    """
    gaps = [i - d for i, d in zip(insertion, deletion, strict=True)]
    if any(map(math.isnan, gaps)) or gaps[0] >= 0:
        return math.nan
    after = next((k for k, gap in enumerate(gaps) if gap >= 0), None)
    if after is None:
        return math.nan
    low, high = gaps[after - 1], gaps[after]
    return (after - 1 + low / (low - high)) / (len(gaps) - 1)


def sufficient_table(scored: Scored) -> Table:
    """By method: mean crossing, and in how many pictures it lies within the budget."""
    rows: list[tuple[Cell, ...]] = []
    for method in scored.methods:
        curves = {i: [scored.curve(method, kind, i) for kind in FAITHFULNESS] for i in scored.images}
        found = {image: crossing(*both) for image, both in curves.items()}
        known = [share for share in found.values() if not math.isnan(share)]
        within = sum(share <= scored.budget for share in known) / len(known) if known else math.nan
        rows.append((method, len(known), macro_value(scored.by_class(found), scored.seed), within))
    heads = (
        Column("Method"), Column("images"), Column("Sufficient share", ".3f", False),
        Column(f"within {scored.budget:.0%}", ".1%", True),
    )  # fmt: skip
    note = (
        "The share of pixels at which insertion and deletion cross, mean of class means with its 95 % "
        "interval; the thesis reads about 20 % off its curves. Pictures without a crossing are left out."
    )
    return Table(
        "sufficient", "How many pixels suffice", heads, tuple(rows), note, unranked=floor_rows(scored.methods)
    )


def dispersion_table(scored: Scored) -> Table:
    """By method: how scattered its maps are where the network is sure and where it is not."""
    rows: list[tuple[Cell, ...]] = []
    for method in scored.methods:
        column = scored.column(method, "dispersion")
        pairs = [(v, scored.chances.get((i, scored.explained[i]), math.nan)) for i, v in column.items()]
        known = np.array([pair for pair in pairs if not math.isnan(sum(pair))]).reshape(-1, 2)
        is_sure = known[:, 1] >= SURE
        sure, unsure = (mean_value(known[side, 0], scored.seed) for side in (is_sure, ~is_sure))
        scattered, chances = known.T.tolist()
        rows.append((method, len(known), sure, unsure, rho_value(scattered, chances, scored.seed)))
    heads = (
        Column("Method"), Column("images"), Column(f"scattered, class at {SURE:.0%} or more"),
        Column(f"scattered, class below {SURE:.0%}"), Column("rank correlation with the probability", "+.3f"),
    )  # fmt: skip
    note = (
        "The chance that two of the budget's pixels lie in different areas: 0 for one blob, 1 for dust. The "
        "thesis finds spread blobs where the network is not sure; that would be a negative correlation."
    )
    return Table("dispersion", "Scattered maps and confidence", heads, tuple(rows), note, marked=False)


def repeated(
    model: Model, batches: Sequence[Batch], targets: Mapping[str, int], settings: LocaliseSettings
) -> Table:
    """By method: how alike the maps of the same pictures are under other seeds."""
    alike: dict[str, list[float]] = {method: [] for method in settings.methods}
    shared: dict[str, list[float]] = {method: [] for method in settings.methods}
    for batch in batches:
        classes = [targets[name] for name in batch.ids]
        seeds = range(settings.seed, settings.seed + settings.repeats)
        made = [
            explain(model, batch.images, settings.methods, classes, settings.layer, seed) for seed in seeds
        ]
        for method in settings.methods:
            for one, other in combinations([maps[method] for maps in made], 2):
                kept, too = (budget_masks(maps, settings.budget).flatten(1) for maps in (one, other))
                alike[method] += map_similarity(one, other)["spearman"].tolist()
                common = mask_overlap(kept, too)
                shared[method] += common.masked_fill(one.degenerate | other.degenerate, math.nan).tolist()
    rows = tuple(
        (m, mean_value(alike[m], settings.seed), mean_value(shared[m], settings.seed),
         min((v for v in shared[m] if not math.isnan(v)), default=math.nan))
        for m in settings.methods
    )  # fmt: skip
    heads = (
        Column("Method"), Column("rank correlation", ".3f", True),
        Column(f"overlap of the top {settings.budget:.0%}", ".3f", True),
        Column("lowest overlap", ".3f", True),
    )  # fmt: skip
    pictures = sum(len(batch.ids) for batch in batches)
    note = (
        f"{pictures} pictures, each explained {settings.repeats} times with other seeds; all pairs of maps."
    )
    return Table("repeats", "The same picture, other seeds", heads, rows, note)


def swept_methods(settings: LocaliseSettings) -> dict[int, str]:
    """LIME, with the options it has in this study, for each number of segments."""
    found = [one for one in read_methods(settings.methods) if one.entry.name == "lime"]
    given: dict[str, Any] = dict(found[0].options) if found else {}
    counts = sorted(settings.segment_counts)
    return {count: call_text("lime", given | {"segment_count": count}) for count in counts}


def sweep_table(scored: Scored, methods: Mapping[int, str]) -> Table:
    """By number of segments: localisation and faithfulness on the same pictures."""
    metrics = (*LOCALISATION, *FAITHFULNESS)
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (str(count), *(scored.macro(method, metric) for metric in metrics))
        for count, method in methods.items()
    )
    note = (
        f"{len(scored.images)} pictures. By eye the thesis finds that 30 segments join object and "
        "background, that 200 are too small to mean anything, and takes 100."
    )
    return Table(
        "segments", "LIME by number of segments", (Column("Segments"), *map(head, metrics)), rows, note
    )
