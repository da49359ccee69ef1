"""The page of a COSE study: Table 1 with the published values beside ours, splits, checkpoints, examples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from heatproof.disk import valid_unicode
from heatproof.errors import MissingExtraError
from heatproof.explain.api import explain
from heatproof.explain.floors import is_floor
from heatproof.images import Failure, batches
from heatproof.images.transforms import TRANSFORMS
from heatproof.metrics.results import PerClass
from heatproof.metrics.stability import comparable, overall
from heatproof.registry import explainers, parse_call
from heatproof.report.figures import cose as figures
from heatproof.report.markdown_report import MarkdownReport
from heatproof.report.panels import Tile, sheet
from heatproof.report.tables import Cell, Column, Table, Value
from heatproof.run.study import ResolvedStudy
from heatproof.show import as_pictures, eight_bit, overlay
from heatproof.studies.common import mean_value
from heatproof.studies.cose.found import CHANGES, CHECKPOINT, GEOMETRIC, KINDS, PHOTOMETRIC, Found
from heatproof.studies.cose.settings import PAPER_METHODS, SIMILARITIES, CoseSettings
from heatproof.studies.tables import Field, more, study_table

SHOWN = 10  # images that could not be used
METHODS_SHOWN = 4  # on a sheet of examples
ENOUGH = 0.75  # accuracy that the paper asks for
# Table 1 of the paper: each model's mean over its five data sets, and the row "Overall"; see PAPER_METHODS.
PUBLISHED = {
    "ConvNext": (59.28, 63.82, 63.43, 55.68, 61.36, 59.59, 56.52),
    "ResNet50": (60.66, 58.47, 42.87, 50.60, 54.25, 57.97, 53.71),
    "Swin-T": (65.57, 66.64, 55.25, 52.63, 63.43, 61.93, 58.96),
    "ViT-B/16": (65.98, 68.72, 58.63, 58.41, 65.56, 61.07, 61.31),
    "Overall": (63.23, 64.66, 54.59, 54.73, 61.33, 60.11, 57.94),
}
PUBLISHED_WINS = (0.225, 0.65, 0.05, 0.025, 0.05, 0.0, 0.0)  # of 40 settings, section 4.2
METHOD: Field = (Column("method"), str)
HALVES = {"consistency": more("consistency"), "sensitivity": more("sensitivity"),
          "value": more("COSE, %", ".2f")}  # fmt: skip


def write_page(
    settings: CoseSettings, opened: ResolvedStudy, found: Found, others: Sequence[Found],
    failed: Sequence[Failure], skipped: Mapping[str, str],
) -> Path:  # fmt: skip
    """summary.md in the study's folder, with its tables and figures."""
    book = MarkdownReport(settings.out, f"COSE: {found.model} on {found.dataset}")
    studies = [found, *others]
    book.text(_opening(found, settings.draws))
    for name, why in skipped.items():
        book.text(f"The checkpoint {name} was left out: {why}.")
    if failed:
        named = "; ".join(f"{one.id}: {one.reason}" for one in failed[:SHOWN])
        book.text(f"{len(failed)} images could not be used: {named}{'; ...' if len(failed) > SHOWN else ''}.")
    book.text(_conclusion(found))
    book.table(score_table(found))
    if settings.figures and settings.examples:
        add_examples(book, settings, opened, found)
    book.heading("Table 1")
    for table in (first_table(studies), training_table(studies), group_table(studies)):
        if table is not None:
            book.table(table)
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


def score_table(found: Found) -> Table:
    def value(half: str, interval: str, scores: Mapping[str, PerClass], method: str) -> Value:
        return Value(getattr(scores[method], half), getattr(scores[method], interval))

    fields: list[Field] = [METHOD]
    for half, interval in (("consistency", "consistency_interval"), ("sensitivity", "sensitivity_interval"),
                           ("value", "interval")):  # fmt: skip
        fields.append((HALVES[half], partial(value, half, interval, found.scores)))
    fields += [
        (more("COSE by eq. 4, %", ".2f"), partial(value, "value", "interval", found.by_equation)),
        (Column("same"), lambda m: found.scores[m].n_same),
        (Column("changed"), lambda m: found.scores[m].n_changed),
        (Column("undefined"), lambda m: found.scores[m].n_undefined),
        (Column("empty maps", ".1%"), lambda m: float(found.degenerate.get(m, math.nan))),
    ]
    note = (
        "Best in bold, second best in italics; floors, which do not use the model, are not ranked. "
        "Brackets: 95 % over images. Same, changed: pairs whose prediction stayed or not. By eq. 4: "
        "checkpoints that predict the same do not count towards consistency."
    )
    if found.similarity != "local5":
        note += f" Maps are compared by {SIMILARITIES[found.similarity]}."
    return study_table("cose", f"COSE of {found.model} on {found.dataset}", _rows(found), fields, note)


def first_table(studies: Sequence[Found]) -> Table:
    """Methods down, a column per data set and model; the paper's values last."""
    methods = list(dict.fromkeys(m for study in studies for m in study.methods))
    winners = [next(iter(study.ranked), None) for study in studies]

    def ours(study: Found, method: str) -> float:
        return study.scores[method].value if method in study.scores else math.nan

    def theirs(values: Sequence[float], method: str) -> Cell:
        """Beside the plain call of a method, or else the only one."""
        name, options = parse_call(method)
        entry = explainers.get(name).name
        here = entry in PAPER_METHODS and (not options or name not in methods)
        return values[PAPER_METHODS.index(entry)] if here else None

    fields = [METHOD]
    fields += [(more(f"{s.dataset}, {s.model}", ".2f"), partial(ours, s)) for s in studies]
    if len(studies) > 1:
        fields += [
            (more("overall", ".2f"), lambda m: overall([ours(s, m) for s in studies], [1] * len(studies))),
            (more("best in", ".0%"), lambda m: winners.count(m) / len(studies)),
        ]
    fields += [(Column(f"published: {name}", ".2f"), partial(theirs, row)) for name, row in PUBLISHED.items()]
    fields.append((Column("published: best in", ".1%"), partial(theirs, PUBLISHED_WINS)))
    note = (
        "COSE in %. Overall: every study counts the same, as every variant of a network does in the paper. "
        "Best in: share of the studies that the method leads. Published: Table 1 of daroya2023cose, each "
        "model's mean over five data sets, other weights and images than ours: a reference, not a target."
    )
    return study_table("table1", "COSE by data set and model", [(m,) for m in methods], fields, note)


def group_table(studies: Sequence[Found]) -> Table | None:
    """Mean COSE by kind of network and by pre-training; None where there is nothing to compare."""
    groups: dict[str, list[Found]] = {}
    for study in studies:
        for group in filter(None, (study.family, study.pretraining)):
            groups.setdefault(group, []).append(study)
    if len(groups) < 2:
        return None

    def mean(members: Sequence[Found], method: str) -> Value:
        return mean_value(s.scores[method].value for s in members if method in s.scores)

    fields = [METHOD]
    fields += [(more(f"{g}, {len(of)} studies", ".2f"), partial(mean, of)) for g, of in groups.items()]
    rows = [(m,) for m in dict.fromkeys(m for study in studies for m in study.methods)]
    note = "Means over few studies with different networks and images: a rough comparison."
    return study_table("groups", "By kind of network and pre-training", rows, fields, note, marked=False)


def training_table(studies: Sequence[Found]) -> Table:
    """Which networks meet the conditions of the paper: trained with the transforms, 75 % accuracy."""

    def enough(study: Found) -> str:
        accuracy = study.accuracy[study.final]
        return "not known" if math.isnan(accuracy) else "yes" if accuracy >= ENOUGH else "no"

    fields: list[Field] = [
        (Column("network"), lambda s: f"{s.dataset}, {s.model}"),
        (Column("trained with the transforms"), lambda s: s.trained_with),
        (Column("accuracy on these images", ".1%"), lambda s: s.accuracy[s.final]),
        (Column("at least 75 %"), enough),
        (Column("pre-training"), lambda s: s.pretraining or "not said"),
    ]
    note = (
        "The paper trains its networks with these transforms and requires 75 % accuracy, so that a changed "
        "prediction is the exception. The prediction of a network that never saw them changes more often."
    )
    rows = [(study,) for study in studies]
    return study_table("networks", "What the paper asks of a network", rows, fields, note, marked=False)


def split_table(found: Found) -> Table:
    kinds = [k for k in KINDS if (found.pairs.kind == k).any()]
    split = {method: found.split(method, "kind", KINDS) for method in found.methods}

    def cell(kind: str, half: str, method: str) -> Cell:
        return getattr(split[method].get(kind), half, None)

    fields = [METHOD]
    for kind in kinds:
        fields += [
            (more(f"{kind} {c.name}", c.form), partial(cell, kind, half)) for half, c in HALVES.items()
        ]
    note = "A dash: no pair of that kind kept (or none changed) its prediction."
    title = "Geometric, photometric and model changes apart"
    return study_table("splits", title, _rows(found), fields, note)


def transform_table(found: Found) -> Table:
    def consistency(split: Mapping[str, PerClass], name: str) -> Cell:
        return getattr(split.get(name), "consistency", None)

    pairs = found.pairs
    fields: list[Field] = [(Column("change"), str)]
    fields += [(Column(m), partial(consistency, found.split(m, "transform", CHANGES))) for m in found.methods]
    fields.append(
        (Column("prediction stayed", ".1%"), lambda name: float(pairs.same[pairs.transform == name].mean()))
    )
    rows = [(name,) for name in CHANGES if (pairs.transform == name).any()]
    return study_table("transforms", "Consistency of each change", rows, fields, marked=False)


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
    note += "".join(f" A dash: {reason}." for reason in dict.fromkeys(f.reason for f in fits if f.reason))
    return Table("to_final", "SSIM to the final maps", columns, tuple(rows), note, marked=False)


def _rows(found: Found) -> list[tuple[str]]:
    return [(method,) for method in found.methods]


def draw_figures(book: MarkdownReport, found: Found, studies: Sequence[Found]) -> None:
    methods = list(found.methods)

    def by_group(group: str) -> dict[str, dict[str, np.ndarray]]:
        """Group -> method -> the COSE of each study of that family or data set."""
        return {
            name: {
                m: np.array(
                    [s.scores[m].value for s in studies if getattr(s, group) == name and m in s.scores]
                )
                for m in methods
            }
            for name in dict.fromkeys(getattr(study, group) for study in studies)
        }

    spreads = {
        title: {"": {m: found.per_image(m, same) for m in methods}}
        for title, same in (("consistency", True), ("sensitivity", False))
    }
    caption = "Mean SSIM (1 - SSIM) of each image over pairs that kept (changed) the prediction"
    with figures.violins(spreads, methods) as figure:
        book.figure(figure, "violins", caption)
    if len(studies) > 1:
        with figures.violins({"COSE, %": by_group("family")}, methods) as figure:
            book.figure(figure, "families", "COSE over models and data sets, by the kind of network")
        datasets = by_group("dataset")
        if len(datasets) > 1:
            means = {d: {m: mean_value(v).value for m, v in of.items()} for d, of in datasets.items()}
            with figures.bars(means, methods) as figure:
                book.figure(figure, "datasets", "Mean COSE of each method by data set")
    if (found.pairs.step > 0).any():
        curves = {
            kind or "all": {m: found.by_magnitude(m, kind) for m in methods}
            for kind in (None, GEOMETRIC, PHOTOMETRIC)
            if kind is None or (found.pairs.kind == kind).any()
        }
        with figures.magnitudes(curves) as figure:
            caption = "Consistency, sensitivity and COSE against the size of the change"
            book.figure(figure, "magnitudes", caption)
    if len(found.checkpoints) > 1 and not math.isnan(found.accuracy[found.final]):
        points = {m: {c: (found.accuracy[c], v) for c, v in found.to_final(m).items()} for m in methods}
        with figures.to_final(points, {m: found.correlation(m) for m in methods}) as figure:
            caption = "SSIM of each checkpoint's maps to the final ones against its accuracy"
            book.figure(figure, "to_final", caption)


def _opening(found: Found, draws: int) -> str:
    inputs = (found.pairs.transform != CHECKPOINT) & (found.pairs.method == found.methods[0])
    each, earlier = int(inputs.sum()) // max(1, found.images), len(found.checkpoints) - 1
    accuracy = found.accuracy[found.final]
    known = "" if math.isnan(accuracy) else f", accuracy {accuracy:.1%} on these images"
    return (
        f"{found.images} images; final model {found.final} ({found.family}{known}). Each image in {each} "
        f"transformed versions ({draws} magnitudes per signed transform) and under {earlier} earlier "
        f"{'checkpoint' if earlier == 1 else 'checkpoints'}. Every map explains the class its model predicts."
    )


def _conclusion(found: Found) -> str:
    ranked, order = found.ranked, list(found.ranked)
    if not order:
        reasons = dict.fromkeys(s.reason for s in found.scores.values() if s.reason)
        return f"No method has a COSE: {'; '.join(reasons) or 'no method was ranked'}."
    text = f"{order[0]} has the highest COSE, {ranked[order[0]].value:.2f} %"
    if len(order) > 1:
        first, second = order[:2]
        gap, (low, high) = found.ahead(first, second)
        sure = "surely ahead" if low > 0 else "not surely ahead: the interval holds 0"
        text += (
            f", then {second}, {ranked[second].value:.2f} %. The difference is {gap:.2f} points (95 % over "
            f"images: {low:.2f} to {high:.2f}), so {first} is {sure}"
        )
    steady = max(ranked, key=lambda m: ranked[m].consistency)
    lively = max(ranked, key=lambda m: ranked[m].sensitivity)
    return f"{text}. {steady} is the most consistent, {lively} the most sensitive."


class AppliedChange(NamedTuple):
    """A transform of an image, and whether the prediction stayed."""

    transform: str
    magnitude: float
    same: bool

    @property
    def title(self) -> str:
        size = f" {self.magnitude:+.3g}" if TRANSFORMS[self.transform].signed else ""
        return f"{self.transform}{size}: {'same answer' if self.same else 'another answer'}"


def pick(pairs: np.recarray, count: int) -> list[tuple[str, list[AppliedChange]]]:
    """By image: the largest change that kept the prediction and the smallest that changed it.

    Images that have both come first.
    """
    pairs = pairs[(pairs.transform != CHECKPOINT) & ~np.isnan(pairs.ssim)]
    picked: list[tuple[str, list[AppliedChange]]] = []
    for image in dict.fromkeys(pairs.image):
        mine = pairs[pairs.image == image]
        sides = ((mine[mine.same], np.argmax), (mine[~mine.same], np.argmin))
        rows = [
            side[list(AppliedChange._fields)][best(side.step)].item() for side, best in sides if len(side)
        ]
        picked.append((image, [AppliedChange(*row) for row in rows]))
    return sorted(picked, key=lambda one: -len(one[1]))[:count]


def add_examples(book: MarkdownReport, settings: CoseSettings, opened: ResolvedStudy, found: Found) -> None:
    """Sheets of maps before and after a change; maps of moved images are moved back."""
    methods = [m for m in found.methods if not is_floor(m)][:METHODS_SHOWN] or list(found.methods[:1])
    places = {valid_unicode(sample.id): i for i, sample in enumerate(opened.source.samples)}
    picked = pick(found.of(methods[0]), settings.examples)
    if not picked:
        return
    folder = book.folder / "panels"
    folder.mkdir(parents=True, exist_ok=True)
    book.heading("Before and after")
    book.text("A change that kept the answer, where the map should stay, and one that did not.")
    for number, (image, changes) in enumerate(picked, start=1):
        drawn = _sheet(settings, opened, found, methods, places[image], changes)
        drawn.save(folder / f"pair-{number}.png")
        book.text(f"![Maps of {image} before and after](panels/pair-{number}.png)")


def _sheet(
    settings: CoseSettings, opened: ResolvedStudy, found: Found, methods: Sequence[str], place: int,
    changes: Sequence[AppliedChange],
) -> Image.Image:  # fmt: skip
    model, names = opened.model(found.final), opened.source.classes
    (loaded,) = batches(opened.source, model.preprocess, 1, [place])
    image = valid_unicode(loaded.batch.ids[0])
    picture = eight_bit(model.preprocess.restore(loaded.batch.images.to(model.device)))
    sizes = [torch.tensor([one.magnitude], device=model.device) for one in changes]
    turned = [TRANSFORMS[c.transform].apply(picture, m) for c, m in zip(changes, sizes, strict=True)]
    versions = model.preprocess.from_bytes(torch.cat([picture, *turned]))
    maps = explain(model, versions, methods, layer=settings.layer, seed=settings.seed)
    classes = maps[methods[0]].explained.tolist()
    answers = [names[number] if number < len(names) else f"class {number}" for number in classes]
    titles = ["as it is", *(change.title for change in changes)]
    shown: Any = as_pictures(versions, model.preprocess)
    rows = [[Tile(p, t, f"answer: {a}") for p, t, a in zip(shown, titles, answers, strict=True)]]
    for method in methods:
        heat, pairs = comparable(maps[method]), found.of(method)
        pairs = pairs[pairs.image == image]
        row = [Tile(overlay(shown[0], heat[0].clamp(0, 1).cpu()), method, "")]
        for k, (change, size) in enumerate(zip(changes, sizes, strict=True), start=1):
            back = TRANSFORMS[change.transform].inverse_maps(heat[k : k + 1], size)[0]
            same = (pairs.transform == change.transform) & np.isclose(pairs.magnitude, change.magnitude)
            known = [value for value in pairs.ssim[same] if np.isfinite(value)][:1]
            note = f"{SIMILARITIES[found.similarity]} {known[0]:.2f}" if known else ""
            row.append(Tile(overlay(shown[0], back.clamp(0, 1).cpu()), method, note))
        rows.append(row)
    return sheet(rows, heading=f"{image}: maps laid over the picture as it is", cmap="inferno")
