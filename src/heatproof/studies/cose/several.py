"""Several COSE studies side by side: Table 1 with the paper's, who wins how often, groups of networks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from heatproof.metrics.stability import overall
from heatproof.registry import explainers, parse_call
from heatproof.report.tables import Cell, Column, Table
from heatproof.studies.cose.found import Found
from heatproof.studies.cose.settings import PAPER_METHODS
from heatproof.studies.skeleton import floor_rows, mean_value

# Table 1 of the paper: each model's mean over its five data sets, and the row "Overall"; see PAPER_METHODS.
PUBLISHED = {
    "ConvNext": (59.28, 63.82, 63.43, 55.68, 61.36, 59.59, 56.52),
    "ResNet50": (60.66, 58.47, 42.87, 50.60, 54.25, 57.97, 53.71),
    "Swin-T": (65.57, 66.64, 55.25, 52.63, 63.43, 61.93, 58.96),
    "ViT-B/16": (65.98, 68.72, 58.63, 58.41, 65.56, 61.07, 61.31),
    "Overall": (63.23, 64.66, 54.59, 54.73, 61.33, 60.11, 57.94),
}
PUBLISHED_WINS = (0.225, 0.65, 0.05, 0.025, 0.05, 0.0, 0.0)  # of 40 settings, section 4.2


def first_table(studies: Sequence[Found]) -> Table:
    """Methods down, a column per data set and model; the paper's values last."""
    methods = list(dict.fromkeys(m for study in studies for m in study.methods))
    several = len(studies) > 1
    columns = (
        Column("method"),
        *(Column(f"{study.dataset}, {study.model}", ".2f", True) for study in studies),
        *((Column("overall", ".2f", True), Column("best in", ".0%", True)) if several else ()),
        *(Column(f"published: {name}", ".2f") for name in PUBLISHED),
        Column("published: best in", ".1%"),
    )
    winners = [next(iter(study.ranked), None) for study in studies]
    rows: list[tuple[Cell, ...]] = []
    for method in methods:
        ours = [study.scores[method].value if method in study.scores else math.nan for study in studies]
        entry = explainers.get(parse_call(method)[0]).name
        mean = overall(ours, [1] * len(studies))  # each study is one variant
        both: tuple[Cell, ...] = (mean, winners.count(method) / len(studies)) if several else ()
        theirs: list[Cell] = [None] * (len(PUBLISHED) + 1)
        if entry in PAPER_METHODS and _stands_for(method, methods):
            place = PAPER_METHODS.index(entry)
            theirs = [*(row[place] for row in PUBLISHED.values()), PUBLISHED_WINS[place]]
        rows.append((method, *ours, *both, *theirs))
    note = (
        "COSE in %. Overall: every study counts the same, as every variant of a network does in the paper. "
        "Best in: share of the studies that the method leads. Published: Table 1 of daroya2023cose, each "
        "model's mean over five data sets, other weights and images than ours: a reference, not a target."
    )
    title, floors = "COSE by data set and model", floor_rows(methods)
    return Table("table1", title, columns, tuple(rows), note, unranked=floors)


def _stands_for(method: str, methods: Sequence[str]) -> bool:
    """Whether this call is the one the paper's column stands beside: the plain one, else the only one."""
    name, options = parse_call(method)
    return not options or name not in methods


def group_table(studies: Sequence[Found]) -> Table | None:
    """Mean COSE by kind of network and by pre-training; None where there is nothing to compare."""
    groups: dict[str, list[Found]] = {}
    for study in studies:
        groups.setdefault(study.family, []).append(study)
        if study.pretraining:
            groups.setdefault(study.pretraining, []).append(study)
    if len(groups) < 2:
        return None
    methods = list(dict.fromkeys(m for study in studies for m in study.methods))
    columns = (
        Column("method"),
        *(Column(f"{g}, {len(lot)} studies", ".2f", True) for g, lot in groups.items()),
    )
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (m, *(mean_value(s.scores[m].value for s in lot if m in s.scores) for lot in groups.values()))
        for m in methods
    )
    note = (
        "Means over studies; few of them, and other networks and pictures in each, so this compares loosely."
    )
    return Table("groups", "By kind of network and pre-training", columns, rows, note, marked=False)


def training_table(studies: Sequence[Found]) -> Table:
    """Which networks meet what the paper asks of them: trained with the transforms, 75 % right."""
    rows = tuple(
        (f"{s.dataset}, {s.model}", s.trained_with, s.accuracy[s.final], _enough(s.accuracy[s.final]),
         s.pretraining or "not said")
        for s in studies
    )  # fmt: skip
    heads = ("network", "trained with the transforms", "accuracy on these images", "at least 75 %",
             "pre-training")  # fmt: skip
    columns = tuple(Column(h, ".1%" if h.startswith("accuracy") else ".3f") for h in heads)
    note = (
        "The paper trains its networks with these transforms and asks for 75 % accuracy, so that an answer "
        "that changes is the exception. A network that never saw them answers otherwise more often."
    )
    return Table("networks", "What the paper asks of a network", columns, rows, note, marked=False)


ENOUGH = 0.75


def _enough(accuracy: float) -> str:
    return "not known" if math.isnan(accuracy) else "yes" if accuracy >= ENOUGH else "no"
