"""The page of a COSE study: Table 1 with the published values beside ours, splits, checkpoints, figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from heatproof.errors import MissingExtraError
from heatproof.images import Failure
from heatproof.images.transforms import TRANSFORMS
from heatproof.metrics.stability import Cose
from heatproof.registry import explainers, parse_call
from heatproof.report.book import Book
from heatproof.report.figures import cose as figures
from heatproof.report.tables import Cell, Column, Table, Value
from heatproof.studies.cose.found import CHECKPOINT, GEOMETRIC, MODELS, PHOTOMETRIC, Found

FLOORS = ("random", "edges", "centre")
# Table 1 of the paper: each model's mean over its five data sets, and the row "Overall", in this order.
PUBLISHED_METHODS = (
    "blur-ig", "gradcam", "gradcam++", "guided-ig", "integrated-gradients", "lime", "smoothgrad",
)  # fmt: skip
PUBLISHED = {
    "ConvNext": (59.28, 63.82, 63.43, 55.68, 61.36, 59.59, 56.52),
    "ResNet50": (60.66, 58.47, 42.87, 50.60, 54.25, 57.97, 53.71),
    "Swin-T": (65.57, 66.64, 55.25, 52.63, 63.43, 61.93, 58.96),
    "ViT-B/16": (65.98, 68.72, 58.63, 58.41, 65.56, 61.07, 61.31),
    "Overall": (63.23, 64.66, 54.59, 54.73, 61.33, 60.11, 57.94),
}
SHOWN = 10  # images that could not be used


def write_page(
    found: Found,
    others: Sequence[Found],
    folder: Path,
    *,
    failed: Sequence[Failure] = (),
    skipped: Mapping[str, str] | None = None,
    draws: int = 6,
    with_figures: bool = True,
) -> Path:
    """summary.md in the study's folder, with its tables and figures."""
    book = Book(folder, f"COSE: {found.model} on {found.dataset}")
    studies = [found, *others]
    book.text(_opening(found, draws))
    for name, why in (skipped or {}).items():
        book.text(f"The checkpoint {name} was left out: {why}.")
    if failed:
        named = "; ".join(f"{one.id}: {one.reason}" for one in failed[:SHOWN])
        book.text(f"{len(failed)} images could not be used: {named}{'; ...' if len(failed) > SHOWN else ''}.")
    book.text(_conclusion(found))
    book.table(score_table(found))
    book.heading("Table 1")
    book.table(first_table(studies))
    book.heading("Where the score comes from")
    book.table(split_table(found))
    book.table(transform_table(found))
    if len(found.checkpoints) > 1:
        book.heading("Do maps near the final ones as the model learns?")
        book.table(final_table(found))
    if with_figures:
        try:
            draw_figures(book, found, studies)
        except MissingExtraError as error:
            book.text(f"No figures: {error}.")
    return book.write()


def score_table(found: Found) -> Table:
    columns = (
        Column("method"), Column("consistency", higher_is_better=True),
        Column("sensitivity", higher_is_better=True), Column("COSE, %", ".2f", True),
        Column("COSE by eq. 4, %", ".2f", True), Column("same"), Column("changed"), Column("undefined"),
        Column("empty maps", ".1%"),
    )  # fmt: skip
    rows = []
    for method, score in found.scores.items():
        rows.append((
            method, Value(score.consistency, score.consistency_interval),
            Value(score.sensitivity, score.sensitivity_interval), _value(score),
            _value(found.by_equation[method]), score.n_same, score.n_changed, score.n_undefined,
            float(found.degenerate.get(method, math.nan)),
        ))  # fmt: skip
    note = (
        "Best in bold, second best slanted; floors, which know nothing of the model, do not compete. "
        "Brackets: 95 % over images. Same, changed: pairs whose prediction stayed or not. By eq. 4: "
        "checkpoints that predict the same do not count towards consistency."
    )
    return Table("cose", f"COSE of {found.model} on {found.dataset}", columns, tuple(rows), note,
                 unranked=_floors(found.methods))  # fmt: skip


def first_table(studies: Sequence[Found]) -> Table:
    """Methods down, a column per data set and model; the paper's values last."""
    methods = list(dict.fromkeys(m for study in studies for m in study.methods))
    columns = [Column("method")]
    columns += [Column(f"{study.dataset}, {study.model}", ".2f", True) for study in studies]
    columns += [Column(f"published: {name}", ".2f") for name in PUBLISHED]
    rows: list[tuple[Cell, ...]] = []
    for method in methods:
        ours = [study.scores[method].value if method in study.scores else None for study in studies]
        name, options = parse_call(method)
        entry = explainers.get(name).name
        theirs: list[float | None] = [None] * len(PUBLISHED)
        if entry in PUBLISHED_METHODS and (not options or name not in methods):
            theirs = [row[PUBLISHED_METHODS.index(entry)] for row in PUBLISHED.values()]
        rows.append((method, *ours, *theirs))
    note = (
        "COSE in %. Published: Table 1 of daroya2023cose, each model's mean over five data sets, with other "
        "weights and images than ours: a reference, not a target."
    )
    return Table(
        "table1", "COSE by data set and model", tuple(columns), tuple(rows), note, unranked=_floors(methods)
    )


def split_table(found: Found) -> Table:
    kinds = [k for k in (GEOMETRIC, PHOTOMETRIC, MODELS) if (found.pairs.kind == k).any()]
    halves = (("consistency", ".3f"), ("sensitivity", ".3f"), ("value", ".2f"))
    columns = [Column("method")]
    columns += [
        Column(f"{k} {'COSE, %' if h == 'value' else h}", form, True) for k in kinds for h, form in halves
    ]
    rows = []
    for method in found.methods:
        splits = found.splits(method)
        cells = [getattr(splits[k], h) if k in splits else None for k in kinds for h, _ in halves]
        rows.append((method, *cells))
    note = "A dash: no pair of that kind kept (or none changed) its prediction."
    title = "Geometric, photometric and model changes apart"
    return Table("splits", title, tuple(columns), tuple(rows), note, unranked=_floors(found.methods))


def transform_table(found: Found) -> Table:
    names = [n for n in (*TRANSFORMS, CHECKPOINT) if (found.pairs.transform == n).any()]
    split = {method: found.by_transform(method) for method in found.methods}
    columns = (Column("change"), *(Column(m) for m in found.methods), Column("prediction stayed", ".1%"))
    rows = []
    for name in names:
        stayed = found.pairs.same[found.pairs.transform == name].mean()
        cells = [split[m][name].consistency if name in split[m] else None for m in found.methods]
        rows.append((name, *cells, float(stayed)))
    return Table("transforms", "Consistency of each change", columns, tuple(rows), marked=False)


def final_table(found: Found) -> Table:
    near = {method: found.to_final(method) for method in found.methods}
    columns = (Column("checkpoint"), Column("accuracy"), *(Column(m) for m in found.methods))
    rows: list[tuple[Cell, ...]] = [
        (c, found.accuracy[c].value, *(near[m][c].value for m in found.methods))
        for c in found.checkpoints
        if c != found.final
    ]
    rows.append((f"{found.final} (final)", found.accuracy[found.final].value, *(1.0 for _ in found.methods)))
    fits = {m: found.correlation(m) for m in found.methods}
    rows.append(("r with accuracy", None, *(fits[m].r for m in found.methods)))
    rows.append(("p", None, *(fits[m].p for m in found.methods)))
    reasons = dict.fromkeys(fit.reason for fit in fits.values() if fit.reason)
    note = (
        "Mean SSIM of a checkpoint's maps to the final ones. r and p: Pearson, over the earlier checkpoints."
    )
    note += "".join(f" A dash: {reason}." for reason in reasons)
    return Table("to_final", "SSIM to the final maps", columns, tuple(rows), note, marked=False)


def draw_figures(book: Book, found: Found, studies: Sequence[Found]) -> None:
    methods = list(found.methods)
    spreads = {
        title: {"": {m: found.per_image(m, same) for m in methods}}
        for title, same in (("consistency", True), ("sensitivity", False))
    }
    with figures.violins(spreads, methods) as figure:
        book.figure(
            figure,
            "violins",
            "Mean SSIM (1 - SSIM) of each image over pairs that kept (changed) the prediction",
        )
    families = {
        family: {
            m: np.array([s.scores[m].value for s in studies if s.family == family and m in s.scores])
            for m in methods
        }
        for family in dict.fromkeys(study.family for study in studies)
    }
    if len(studies) > 1:
        with figures.violins({"COSE, %": families}, methods) as figure:
            book.figure(figure, "families", "COSE over models and data sets, by the kind of network")
    kinds = {"all": None, GEOMETRIC: GEOMETRIC, PHOTOMETRIC: PHOTOMETRIC}
    curves = {
        title: {m: found.by_magnitude(m, kind) for m in methods}
        for title, kind in kinds.items()
        if kind is None or (found.pairs.kind == kind).any()
    }
    if (found.pairs.step > 0).any():
        with figures.magnitudes(curves) as figure:
            book.figure(
                figure, "magnitudes", "Consistency, sensitivity and COSE against the size of the change"
            )
    labelled = not math.isnan(found.accuracy[found.final].value)
    if len(found.checkpoints) > 1 and labelled:
        points = {
            m: {c: (found.accuracy[c].value, v.value) for c, v in found.to_final(m).items()} for m in methods
        }
        fits = {m: found.correlation(m) for m in methods}
        with figures.to_final(points, fits) as figure:
            book.figure(
                figure, "to_final", "SSIM of each checkpoint's maps to the final ones against its accuracy"
            )


def _opening(found: Found, draws: int) -> str:
    inputs = found.pairs.transform != CHECKPOINT
    one = found.pairs.method == found.methods[0]
    each = int((inputs & one).sum()) // max(1, found.images)
    earlier = len(found.checkpoints) - 1
    accuracy = found.accuracy[found.final].value
    said = "" if math.isnan(accuracy) else f", accuracy {accuracy:.1%} on these images"
    return (
        f"{found.images} images; final model {found.final} ({found.family}{said}). Each image in {each} "
        f"transformed versions ({draws} magnitudes per signed transform) and under {earlier} earlier "
        f"{'checkpoint' if earlier == 1 else 'checkpoints'}. Every map explains the class its model predicts."
    )


def _conclusion(found: Found) -> str:
    ranked = {
        m: s for m, s in found.scores.items() if parse_call(m)[0] not in FLOORS and not math.isnan(s.value)
    }
    order = sorted(ranked, key=lambda m: -ranked[m].value)
    if not order:
        reasons = dict.fromkeys(s.reason for s in found.scores.values() if s.reason)
        return f"No method has a COSE: {'; '.join(reasons) or 'no method was ranked'}."
    best = ranked[order[0]]
    text = f"{order[0]} has the highest COSE, {best.value:.2f} %"
    text += f", then {order[1]}, {ranked[order[1]].value:.2f} %." if len(order) > 1 else "."
    steady = max(ranked, key=lambda m: ranked[m].consistency)
    lively = max(ranked, key=lambda m: ranked[m].sensitivity)
    return f"{text} {steady} is the most consistent, {lively} the most sensitive."


def _value(score: Cose) -> Value:
    return Value(score.value, score.interval)


def _floors(methods: Sequence[str]) -> frozenset[int]:
    return frozenset(i for i, m in enumerate(methods) if explainers.get(parse_call(m)[0]).name in FLOORS)
