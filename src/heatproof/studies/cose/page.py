"""The page of a COSE study: Table 1 with the published values beside ours, splits, checkpoints, examples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from heatproof.disk import valid_unicode
from heatproof.errors import MissingExtraError, need
from heatproof.explain.api import explain
from heatproof.explain.floors import is_floor
from heatproof.images import Failure, batches
from heatproof.images.transforms import TRANSFORMS
from heatproof.metrics.stability import comparable, overall
from heatproof.registry import explainers, parse_call
from heatproof.report import figures
from heatproof.report.figures import Line, Panel, line_style
from heatproof.report.markdown_report import MarkdownReport
from heatproof.report.panels import Tile, sheet
from heatproof.report.tables import Cell, Table, Value
from heatproof.run.study import ResolvedStudy
from heatproof.show import as_pictures, eight_bit, overlay
from heatproof.studies.common import TableFile, mean_value
from heatproof.studies.cose.results import CHANGES, CHECKPOINT, KINDS, CoseResults
from heatproof.studies.cose.settings import PAPER_METHODS, SIMILARITIES, CoseSettings

TABLES = TableFile("heatproof.studies.cose")
MAX_METHODS = 4  # on a sheet of examples
ENOUGH = 0.75  # accuracy that the paper requires
# Table 1 of the paper: each model's mean over its five data sets, and the row "Overall"; see PAPER_METHODS.
PUBLISHED = {
    "ConvNext": (59.28, 63.82, 63.43, 55.68, 61.36, 59.59, 56.52),
    "ResNet50": (60.66, 58.47, 42.87, 50.60, 54.25, 57.97, 53.71),
    "Swin-T": (65.57, 66.64, 55.25, 52.63, 63.43, 61.93, 58.96),
    "ViT-B/16": (65.98, 68.72, 58.63, 58.41, 65.56, 61.07, 61.31),
    "Overall": (63.23, 64.66, 54.59, 54.73, 61.33, 60.11, 57.94),
}
PUBLISHED_WINS = (0.225, 0.65, 0.05, 0.025, 0.05, 0.0, 0.0)  # of 40 settings, section 4.2
HALVES = {"consistency": "consistency", "sensitivity": "sensitivity", "value": "COSE, %"}


def write_page(
    settings: CoseSettings, opened: ResolvedStudy, results: CoseResults, others: Sequence[CoseResults],
    failed: Sequence[Failure], skipped: Mapping[str, str],
) -> Path:  # fmt: skip
    """Write summary.md in the study's folder, with its tables and figures."""
    studies, ranked, order = [results, *others], results.ranked, list(results.ranked)
    tables = [
        score_table(results), first_table(studies), training_table(studies), group_table(studies),
        split_table(results), transform_table(results), final_table(results) if results.earlier else None,
    ]  # fmt: skip
    drawn, missing = {}, ""
    try:
        drawn = draw_figures(results, studies) if settings.figures and need("matplotlib", "plots") else {}
    except MissingExtraError as error:
        missing = f"No figures: {error}."
    panels = example_sheets(settings, opened, results) if settings.figures and settings.examples else {}
    inputs = (results.pairs.transform != CHECKPOINT) & (results.pairs.method == results.methods[0])
    return MarkdownReport(settings.out).write(
        "studies/cose/page.md", tables, drawn, settings=settings, results=results, failed=failed,
        skipped=skipped, panels=panels, missing=missing, accuracy=results.accuracy[results.final],
        versions=int(inputs.sum()) // max(1, results.images), ranked=order,
        lead=results.ahead(order[0], order[1]) if len(order) > 1 else None,
        reasons=dict.fromkeys(score.reason for score in results.scores.values() if score.reason),
        consistent=max(ranked, key=lambda m: ranked[m].consistency, default=""),
        sensitive=max(ranked, key=lambda m: ranked[m].sensitivity, default=""),
    )  # fmt: skip


def score_table(results: CoseResults) -> Table:
    scores = ((m, results.scores[m], results.by_equation[m]) for m in results.methods)
    rows = [
        (
            method, Value(score.consistency, score.consistency_interval),
            Value(score.sensitivity, score.sensitivity_interval), Value(score.value, score.interval),
            Value(by_equation.value, by_equation.interval), score.n_same, score.n_changed, score.n_undefined,
            float(results.degenerate.get(method, math.nan)),
        )
        for method, score, by_equation in scores
    ]  # fmt: skip
    by = SIMILARITIES[results.similarity]
    compared = "" if results.similarity == "local5" else f" Maps are compared by {by}."
    return TABLES.fill("cose", rows, model=results.model, dataset=results.dataset, compared=compared)


def first_table(studies: Sequence[CoseResults]) -> Table:
    """Methods down, a column per data set and model; the paper's values last."""
    methods = _methods(studies)
    winners = [next(iter(study.ranked), None) for study in studies]

    def published(values: Sequence[float], method: str) -> Cell:
        """The paper's value, for the method without options or else its only form in the studies."""
        name, options = parse_call(method)
        entry = explainers.get(name).name
        known = entry in PAPER_METHODS and (not options or name not in methods)
        return values[PAPER_METHODS.index(entry)] if known else None

    rows: list[list[Cell]] = []
    for method in methods:
        ours = [s.scores[method].value if method in s.scores else math.nan for s in studies]
        row: list[Cell] = [method, *ours]
        if len(studies) > 1:
            row += [overall(ours, [1] * len(studies)), winners.count(method) / len(studies)]
        rows.append([*row, *(published(of, method) for of in (*PUBLISHED.values(), PUBLISHED_WINS))])
    return TABLES.fill(
        "table1", rows, studies=[f"{s.dataset}, {s.model}" for s in studies], paper=list(PUBLISHED),
        overall=["overall"] * (len(studies) > 1), leads=["best in"] * (len(studies) > 1),
    )  # fmt: skip


def group_table(studies: Sequence[CoseResults]) -> Table | None:
    """Mean COSE by kind of network and by pre-training; None if there is nothing to compare."""
    groups: dict[str, list[CoseResults]] = {}
    for study in studies:
        for group in filter(None, (study.family, study.pretraining)):
            groups.setdefault(group, []).append(study)
    if len(groups) < 2:
        return None
    rows = [
        (m, *(mean_value(s.scores[m].value for s in of if m in s.scores) for of in groups.values()))
        for m in _methods(studies)
    ]
    return TABLES.fill("groups", rows, groups=[f"{group}, {len(of)} studies" for group, of in groups.items()])


def training_table(studies: Sequence[CoseResults]) -> Table:
    """Which networks meet the conditions of the paper: trained with the transforms, 75 % accuracy."""
    rows = []
    for study in studies:
        accuracy = study.accuracy[study.final]
        enough = "not known" if math.isnan(accuracy) else "yes" if accuracy >= ENOUGH else "no"
        pretraining = study.pretraining or "not said"
        rows.append((f"{study.dataset}, {study.model}", study.trained_with, accuracy, enough, pretraining))
    return TABLES.fill("networks", rows)


def split_table(results: CoseResults) -> Table:
    kinds = [k for k in KINDS if (results.pairs.kind == k).any()]
    split = {method: results.split(method, "kind", KINDS) for method in results.methods}
    rows = [
        (method, *(getattr(scores.get(kind), half, None) for kind in kinds for half in HALVES))
        for method, scores in split.items()
    ]
    return TABLES.fill("splits", rows, kinds=kinds)


def transform_table(results: CoseResults) -> Table:
    split = [results.split(m, "transform", CHANGES) for m in results.methods]
    rows = []
    for name in CHANGES:
        stayed = results.pairs.same[results.pairs.transform == name]
        if len(stayed):
            scores = (getattr(scores.get(name), "consistency", None) for scores in split)
            rows.append((name, *scores, float(stayed.mean())))
    return TABLES.fill("transforms", rows, methods=list(results.methods))


def final_table(results: CoseResults) -> Table:
    near = [results.to_final(method) for method in results.methods]
    fits = [results.correlation(method) for method in results.methods]
    rows: list[tuple[Cell, ...]] = [
        (c, results.accuracy[c], *(of[c] for of in near)) for c in results.earlier
    ]
    rows += [
        (f"{results.final} (final)", results.accuracy[results.final], *(1.0 for _ in near)),
        ("r with accuracy", None, *(fit.r for fit in fits)),
        ("p", None, *(fit.p for fit in fits)),
    ]
    reasons = dict.fromkeys(f" A dash: {fit.reason}." for fit in fits if fit.reason)
    return TABLES.fill("to_final", rows, methods=list(results.methods), reasons="".join(reasons))


def _methods(studies: Sequence[CoseResults]) -> list[str]:
    return list(dict.fromkeys(method for study in studies for method in study.methods))


def draw_figures(results: CoseResults, studies: Sequence[CoseResults]) -> dict[str, Any]:
    """The figures of the page by name."""
    methods = list(results.methods)

    def by_group(group: str) -> dict[str, dict[str, np.ndarray]]:
        """Group -> method -> the COSE of each study of that family or data set."""
        values: dict[str, dict[str, np.ndarray]] = {}
        for name in dict.fromkeys(getattr(study, group) for study in studies):
            own = [study.scores for study in studies if getattr(study, group) == name]
            values[name] = {m: np.array([scores[m].value for scores in own if m in scores]) for m in methods}
        return values

    spreads = {
        title: {"": {m: results.per_image(m, same) for m in methods}}
        for title, same in (("consistency", True), ("sensitivity", False))
    }
    drawn: dict[str, Any] = {"violins": figures.violins(spreads, methods)}
    if len(studies) > 1:
        drawn["families"] = figures.violins({"COSE, %": by_group("family")}, methods)
        if len(datasets := by_group("dataset")) > 1:
            means = {d: [mean_value(v).value for v in of.values()] for d, of in datasets.items()}
            drawn["datasets"] = figures.bars(means, [*map(figures.short, methods)], "COSE, %")
    if (results.pairs.step > 0).any():
        drawn["magnitudes"] = magnitude_figure(results)
    if results.earlier and not math.isnan(results.accuracy[results.final]):
        drawn["to_final"] = final_figure(results)
    return drawn


def magnitude_figure(results: CoseResults) -> Any:
    """Columns: all, geometric, photometric; rows: consistency, sensitivity, COSE; a line per method."""
    kinds = [None, *(kind for kind in KINDS[:2] if (results.pairs.kind == kind).any())]
    curves = {kind: {m: results.by_magnitude(m, kind) for m in results.methods} for kind in kinds}

    def panel(half: str, kind: str | None) -> Panel:
        lines = [
            Line(list(of), [getattr(s, half) for s in of.values()], figures.short(m), line_style(k))
            for k, (m, of) in enumerate(curves[kind].items())
        ]
        title = {"title": kind or "all"} if half == "consistency" else {}
        last = {"xlabel": "magnitude / largest"} if half == "value" else {}
        return Panel(lines, title | last | ({} if kind else {"ylabel": HALVES[half]}))

    grid = [[panel(half, kind) for kind in kinds] for half in HALVES]
    return figures.lines(grid, 3.1 * len(kinds), 6.6, "right center", sharex=True, sharey="row")


def final_figure(results: CoseResults) -> Any:
    """A panel per method: accuracy of each checkpoint, SSIM of its maps to the final ones, and a fit."""
    panels: list[Panel | None] = []
    for method in results.methods:
        near, fit = results.to_final(method), results.correlation(method)
        x, y = np.array([results.accuracy[c] for c in near]), np.array(list(near.values()))
        lines, text = [Line(x, y, style=line_style(0, linestyle=""))], "r not defined"
        if np.isfinite(fit.r):
            ends = np.array([np.nanmin(x), np.nanmax(x)])
            lines.append(Line(ends, np.polyval(np.polyfit(x, y, 1), ends), style={"linewidth": 1}))
            text = f"r = {fit.r:.2f}, p = {fit.p:.2g}"
        labels = {"xlabel": "accuracy", "ylabel": "SSIM to the final maps"}
        panels.append(Panel(lines, {"title": f"{figures.short(method)}\n{text}", **labels}))
    columns = min(4, len(panels))
    panels += [None] * (-len(panels) % columns)
    grid = [panels[i : i + columns] for i in range(0, len(panels), columns)]
    return figures.lines(grid, 2.4 * columns, 2.4 * len(grid), sharex=True, sharey=True)


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
        own = pairs[pairs.image == image]
        sides = ((own[own.same], np.argmax), (own[~own.same], np.argmin))
        rows = [
            side[list(AppliedChange._fields)][best(side.step)].item() for side, best in sides if len(side)
        ]
        picked.append((image, [AppliedChange(*row) for row in rows]))
    return sorted(picked, key=lambda pair: -len(pair[1]))[:count]


def example_sheets(settings: CoseSettings, opened: ResolvedStudy, results: CoseResults) -> dict[str, str]:
    """Draw maps before and after a change, moved back if the change moves pixels; the file by image."""
    methods = [m for m in results.methods if not is_floor(m)][:MAX_METHODS] or list(results.methods[:1])
    places = {valid_unicode(sample.id): i for i, sample in enumerate(opened.source.samples)}
    folder, files = settings.out / "panels", {}
    for number, (image, changes) in enumerate(pick(results.of(methods[0]), settings.examples), start=1):
        folder.mkdir(parents=True, exist_ok=True)
        files[image] = f"pair-{number}.png"
        drawn = _sheet(settings, opened, results, methods, places[image], changes)
        drawn.save(folder / files[image])
    return files


def _sheet(
    settings: CoseSettings, opened: ResolvedStudy, results: CoseResults, methods: Sequence[str], place: int,
    changes: Sequence[AppliedChange],
) -> Image.Image:  # fmt: skip
    model, names = opened.model(results.final), opened.source.classes
    (loaded,) = batches(opened.source, model.preprocess, 1, [place])
    image = valid_unicode(loaded.batch.ids[0])
    original = eight_bit(model.preprocess.restore(loaded.batch.images.to(model.device)))
    sizes = [torch.tensor([change.magnitude], device=model.device) for change in changes]
    changed = [TRANSFORMS[c.transform].apply(original, m) for c, m in zip(changes, sizes, strict=True)]
    versions = model.preprocess.from_bytes(torch.cat([original, *changed]))
    maps = explain(model, versions, methods, layer=settings.layer, seed=settings.seed)
    classes = maps[methods[0]].explained.tolist()
    answers = [names[number] if number < len(names) else f"class {number}" for number in classes]
    titles = ["as it is", *(change.title for change in changes)]
    images: Any = as_pictures(versions, model.preprocess)
    rows = [[Tile(p, t, f"answer: {a}") for p, t, a in zip(images, titles, answers, strict=True)]]
    for method in methods:
        heat, pairs = comparable(maps[method]), results.of(method)
        pairs = pairs[pairs.image == image]
        row = [Tile(overlay(images[0], heat[0].clamp(0, 1).cpu()), method, "")]
        for k, (change, size) in enumerate(zip(changes, sizes, strict=True), start=1):
            back = TRANSFORMS[change.transform].inverse_maps(heat[k : k + 1], size)[0]
            same = (pairs.transform == change.transform) & np.isclose(pairs.magnitude, change.magnitude)
            known = [value for value in pairs.ssim[same] if np.isfinite(value)][:1]
            note = f"{SIMILARITIES[results.similarity]} {known[0]:.2f}" if known else ""
            row.append(Tile(overlay(images[0], back.clamp(0, 1).cpu()), method, note))
        rows.append(row)
    return sheet(rows, heading=f"{image}: maps laid over the picture as it is", cmap="inferno")
