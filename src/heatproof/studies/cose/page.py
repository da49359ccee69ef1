"""The page of a COSE study: Table 1 with the published values beside ours, splits, checkpoints, figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from heatproof.errors import MissingExtraError
from heatproof.images import Failure
from heatproof.metrics.stability import Cose
from heatproof.report.book import Book
from heatproof.report.figures import cose as figures
from heatproof.report.tables import Cell, Column, Table, Value
from heatproof.studies.cose.found import CHANGES, CHECKPOINT, GEOMETRIC, KINDS, PHOTOMETRIC, Found
from heatproof.studies.cose.settings import SIMILARITIES, CoseSettings
from heatproof.studies.cose.several import first_table, group_table, training_table
from heatproof.studies.skeleton import floor_rows, mean_value

SHOWN = 10  # images that could not be used


def write_page(
    settings: CoseSettings,
    found: Found,
    others: Sequence[Found],
    failed: Sequence[Failure],
    skipped: Mapping[str, str],
    examples: Sequence[tuple[str, Image.Image]] = (),
) -> Path:
    """summary.md in the study's folder, with its tables and figures."""
    book = Book(settings.out, f"COSE: {found.model} on {found.dataset}")
    studies = [found, *others]
    book.text(_opening(found, settings.draws))
    for name, why in skipped.items():
        book.text(f"The checkpoint {name} was left out: {why}.")
    if failed:
        named = "; ".join(f"{one.id}: {one.reason}" for one in failed[:SHOWN])
        book.text(f"{len(failed)} images could not be used: {named}{'; ...' if len(failed) > SHOWN else ''}.")
    book.text(_conclusion(found))
    book.table(score_table(found))
    if examples:
        _show(book, examples)
    book.heading("Table 1")
    book.table(first_table(studies))
    book.table(training_table(studies))
    groups = group_table(studies)
    if groups:
        book.table(groups)
    book.heading("Where the score comes from")
    book.table(split_table(found))
    book.table(transform_table(found))
    if len(found.checkpoints) > 1:
        book.heading("Do maps near the final ones as the model learns?")
        book.table(final_table(found))
    if settings.figures:
        try:
            draw_figures(book, found, studies)
        except MissingExtraError as error:
            book.text(f"No figures: {error}.")
    return book.write()


def _show(book: Book, examples: Sequence[tuple[str, Image.Image]]) -> None:
    folder = book.folder / "panels"
    folder.mkdir(parents=True, exist_ok=True)
    book.heading("Before and after")
    book.text("A change that kept the answer, where the map should stay, and one that did not.")
    for number, (image, drawn) in enumerate(examples, start=1):
        drawn.save(folder / f"pair-{number}.png")
        book.text(f"![Maps of {image} before and after](panels/pair-{number}.png)")


def score_table(found: Found) -> Table:
    columns = (
        Column("method"), Column("consistency", ".3f", True), Column("sensitivity", ".3f", True),
        Column("COSE, %", ".2f", True), Column("COSE by eq. 4, %", ".2f", True), Column("same"),
        Column("changed"), Column("undefined"), Column("empty maps", ".1%"),
    )  # fmt: skip
    rows = tuple(
        (
            method, Value(score.consistency, score.consistency_interval),
            Value(score.sensitivity, score.sensitivity_interval), _value(score),
            _value(found.by_equation[method]), score.n_same, score.n_changed, score.n_undefined,
            float(found.degenerate.get(method, math.nan)),
        )
        for method, score in found.scores.items()
    )  # fmt: skip
    note = (
        "Best in bold, second best slanted; floors, which know nothing of the model, do not compete. "
        "Brackets: 95 % over images. Same, changed: pairs whose prediction stayed or not. By eq. 4: "
        "checkpoints that predict the same do not count towards consistency."
    )
    if found.similarity != "local5":
        note += f" Maps are compared by {SIMILARITIES[found.similarity]}."
    title = f"COSE of {found.model} on {found.dataset}"
    return Table("cose", title, columns, rows, note, unranked=floor_rows(found.methods))


def split_table(found: Found) -> Table:
    kinds = [k for k in KINDS if (found.pairs.kind == k).any()]
    halves = {"consistency": ("consistency", ".3f"), "sensitivity": ("sensitivity", ".3f"),
              "value": ("COSE, %", ".2f")}  # fmt: skip
    heads = (Column(f"{k} {name}", form, True) for k in kinds for name, form in halves.values())
    rows = []
    for method in found.methods:
        apart = found.by_kind(method)
        cells = (getattr(apart[k], half) if k in apart else None for k in kinds for half in halves)
        rows.append((method, *cells))
    note = "A dash: no pair of that kind kept (or none changed) its prediction."
    title, floors = "Geometric, photometric and model changes apart", floor_rows(found.methods)
    return Table("splits", title, (Column("method"), *heads), tuple(rows), note, unranked=floors)


def transform_table(found: Found) -> Table:
    split = [found.by_transform(method) for method in found.methods]
    columns = (Column("change"), *map(Column, found.methods), Column("prediction stayed", ".1%"))
    rows = []
    for name in (n for n in CHANGES if (found.pairs.transform == n).any()):
        stayed = found.pairs.same[found.pairs.transform == name].mean()
        cells = (one[name].consistency if name in one else None for one in split)
        rows.append((name, *cells, float(stayed)))
    return Table("transforms", "Consistency of each change", columns, tuple(rows), marked=False)


def final_table(found: Found) -> Table:
    near, fits = [found.to_final(m) for m in found.methods], [found.correlation(m) for m in found.methods]
    columns = (Column("checkpoint"), Column("accuracy"), *map(Column, found.methods))
    earlier = (c for c in found.checkpoints if c != found.final)
    rows: list[tuple[Cell, ...]] = [(c, found.accuracy[c], *(one[c] for one in near)) for c in earlier]
    rows += [
        (f"{found.final} (final)", found.accuracy[found.final], *(1.0 for _ in near)),
        ("r with accuracy", None, *(fit.r for fit in fits)),
        ("p", None, *(fit.p for fit in fits)),
    ]
    note = (
        "Mean SSIM of a checkpoint's maps to the final ones. r and p: Pearson, over the earlier checkpoints."
    )
    note += "".join(
        f" A dash: {reason}." for reason in dict.fromkeys(fit.reason for fit in fits if fit.reason)
    )
    return Table("to_final", "SSIM to the final maps", columns, tuple(rows), note, marked=False)


def draw_figures(book: Book, found: Found, studies: Sequence[Found]) -> None:
    methods = list(found.methods)
    spreads = {
        title: {"": {m: found.per_image(m, same) for m in methods}}
        for title, same in (("consistency", True), ("sensitivity", False))
    }
    caption = "Mean SSIM (1 - SSIM) of each image over pairs that kept (changed) the prediction"
    with figures.violins(spreads, methods) as figure:
        book.figure(figure, "violins", caption)
    if len(studies) > 1:
        families = {
            family: {
                m: np.array([s.scores[m].value for s in studies if s.family == family and m in s.scores])
                for m in methods
            }
            for family in dict.fromkeys(study.family for study in studies)
        }
        with figures.violins({"COSE, %": families}, methods) as figure:
            book.figure(figure, "families", "COSE over models and data sets, by the kind of network")
        datasets = dict.fromkeys(study.dataset for study in studies)
        if len(datasets) > 1:
            means = {
                name: {
                    m: mean_value(
                        s.scores[m].value for s in studies if s.dataset == name and m in s.scores
                    ).value
                    for m in methods
                }
                for name in datasets
            }
            with figures.bars(means, methods) as figure:
                book.figure(figure, "datasets", "Mean COSE of each method by data set")
    if (found.pairs.step > 0).any():
        curves = {
            title: {m: found.by_magnitude(m, kind) for m in methods}
            for title, kind in (("all", None), (GEOMETRIC, GEOMETRIC), (PHOTOMETRIC, PHOTOMETRIC))
            if kind is None or (found.pairs.kind == kind).any()
        }
        caption = "Consistency, sensitivity and COSE against the size of the change"
        with figures.magnitudes(curves) as figure:
            book.figure(figure, "magnitudes", caption)
    if len(found.checkpoints) > 1 and not math.isnan(found.accuracy[found.final]):
        points = {m: {c: (found.accuracy[c], v) for c, v in found.to_final(m).items()} for m in methods}
        caption = "SSIM of each checkpoint's maps to the final ones against its accuracy"
        with figures.to_final(points, {m: found.correlation(m) for m in methods}) as figure:
            book.figure(figure, "to_final", caption)


def _opening(found: Found, draws: int) -> str:
    one = (found.pairs.transform != CHECKPOINT) & (found.pairs.method == found.methods[0])
    each, earlier = int(one.sum()) // max(1, found.images), len(found.checkpoints) - 1
    accuracy = found.accuracy[found.final]
    said = "" if math.isnan(accuracy) else f", accuracy {accuracy:.1%} on these images"
    return (
        f"{found.images} images; final model {found.final} ({found.family}{said}). Each image in {each} "
        f"transformed versions ({draws} magnitudes per signed transform) and under {earlier} earlier "
        f"{'checkpoint' if earlier == 1 else 'checkpoints'}. Every map explains the class its model predicts."
    )


def _conclusion(found: Found) -> str:
    ranked, order = found.ranked, list(found.ranked)
    if not order:
        reasons = dict.fromkeys(s.reason for s in found.scores.values() if s.reason)
        return f"No method has a COSE: {'; '.join(reasons) or 'no method was ranked'}."
    text = f"{order[0]} has the highest COSE, {ranked[order[0]].value:.2f} %"
    text += _lead(found, *order[:2]) if len(order) > 1 else "."
    steady = max(ranked, key=lambda m: ranked[m].consistency)
    lively = max(ranked, key=lambda m: ranked[m].sensitivity)
    return f"{text} {steady} is the most consistent, {lively} the most sensitive."


def _lead(found: Found, first: str, second: str) -> str:
    gap, (low, high) = found.ahead(first, second)
    sure = "surely ahead" if low > 0 else "not surely ahead: the interval holds 0"
    return (
        f", then {second}, {found.scores[second].value:.2f} %. The difference is {gap:.2f} points (95 % over "
        f"images: {low:.2f} to {high:.2f}), so {first} is {sure}."
    )


def _value(score: Cose) -> Value:
    return Value(score.value, score.interval)
