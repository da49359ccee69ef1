"""Results of a COSE study: scores of its stored pairs, and the page with its tables, figures and examples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from scipy.stats import wilcoxon
from torch import Tensor

from heatproof.disk import valid_unicode
from heatproof.errors import InputError, MissingExtraError, need
from heatproof.explain import CARDS
from heatproof.explain.api import explain, read_methods
from heatproof.explain.baselines import is_floor
from heatproof.images import Failure, batches
from heatproof.images.findings import entry_id, finding_name
from heatproof.images.transforms import STEPS, TRANSFORMS, draw
from heatproof.metrics.agreement import Correlation
from heatproof.metrics.results import Interval, PerClass, percentile_interval, resample
from heatproof.metrics.stability import by_image, comparable, cose, cose_split, harmonic, ssim_to_final
from heatproof.models import Model
from heatproof.models.model import with_head
from heatproof.registry import explainers, parse_call
from heatproof.report import figures
from heatproof.report.figures import Line, Panel, line_style
from heatproof.report.panels import Tile, sheet
from heatproof.report.tables import Value
from heatproof.run.study import ResolvedStudy
from heatproof.show import as_pictures, eight_bit, overlay
from heatproof.store import RunFolder
from heatproof.studies.common import MarkdownReport, TableFile, mean_value, write_page
from heatproof.studies.settings import COSE_METHODS, SIMILARITIES, CoseSettings
from heatproof.types import Maps, upsample

MAX_METHODS = 4  # on a sheet of examples
HALVES = {"consistency": "consistency", "sensitivity": "sensitivity", "value": "COSE, %"}
CHECKPOINT = "checkpoint"
KINDS = GEOMETRIC, PHOTOMETRIC, MODELS = "geometric", "photometric", "checkpoints"
CHANGES = (*TRANSFORMS, CHECKPOINT)
BAND = 5  # steps of magnitude that are shown as one point
ALPHA = 0.05  # level of significance
CNN, TRANSFORMER = "CNN", "transformer"
QUERY = r"""
    select image, explained, method, checkpoint, starts_with(metric, 'cose_same(') as same, value as ssim,
        regexp_extract(metric, '\(([\w-]+),', 1) as transform,
        if(transform = 'checkpoint', 'nan', regexp_extract(metric, ',([^)]*)\)$', 1))::double as magnitude
    from scores where starts_with(metric, 'cose_same(') or starts_with(metric, 'cose_changed(')
    order by image, method, checkpoint, metric, value"""


@dataclass(frozen=True)
class CoseResults:
    """A finished study: one model on one set of images."""

    model: str
    dataset: str
    family: str
    final: str
    folder: RunFolder
    methods: tuple[str, ...]
    checkpoints: tuple[str, ...]  # in order of training, the final one last
    images: int
    pairs: np.recarray  # the columns of QUERY, with kind and step
    accuracy: Mapping[str, float]  # by checkpoint; NaN without labels
    degenerate: Mapping[str, float]  # share of empty maps of the final model, by method
    pretraining: str | None = None
    trained_with: str = "unknown"  # whether the transforms were part of the training
    similarity: str = "local5"
    labels: tuple[str, ...] = ()  # of a multi-label network

    @cached_property
    def scores(self) -> dict[str, PerClass]:
        """COSE of each method: consistency over transformed inputs (eq. 4), sensitivity over all (eq. 7)."""
        return {m: _score(self.counted(m)) for m in self.methods}

    @cached_property
    def pooled(self) -> dict[str, PerClass]:
        """The same with checkpoints that predict the same among the pairs of consistency."""
        return {m: _score(self.of(m)) for m in self.methods}

    @cached_property
    def ranked(self) -> dict[str, PerClass]:
        """The methods that have a COSE, floors left out, the best first."""
        known = {m: s for m, s in self.scores.items() if not is_floor(m) and not math.isnan(s.value)}
        return dict(sorted(known.items(), key=lambda item: -item[1].value))

    @property
    def final_accuracy(self) -> float:
        return self.accuracy[self.final]

    @property
    def earlier(self) -> tuple[str, ...]:
        """Checkpoints before the final one."""
        return self.checkpoints[:-1]

    def of(self, method: str) -> np.recarray:
        """The pairs of a method."""
        pairs: np.recarray = self.pairs[self.pairs.method == method]
        return pairs

    def counted(self, method: str) -> np.recarray:
        """The pairs of eqs. 4 and 7: without checkpoints that predict the same."""
        pairs = self.of(method)
        counted: np.recarray = pairs[~pairs.same | (pairs.transform != CHECKPOINT)]
        return counted

    def by_label(self, method: str) -> dict[str, PerClass]:
        """COSE of each label of a multi-label network."""
        pairs, names = self.counted(method), np.array(self.labels, dtype=object)
        return _split(pairs, names[pairs.explained.astype(int)], self.labels) if self.labels else {}

    def split(self, method: str, by: str, order: Iterable[str]) -> dict[str, PerClass]:
        """COSE without intervals of each kind ("kind") or change ("transform"), in this order."""
        pairs = self.of(method)
        return _split(pairs, pairs[by], order)

    def by_magnitude(self, method: str, kind: str | None = None) -> dict[float, PerClass]:
        """COSE in bands of magnitude, as a share of the largest, over signed transforms."""
        pairs = self.of(method)
        pairs = pairs[(pairs.step > 0) & ((pairs.kind == kind) if kind else True)]
        bands = _split(pairs, (pairs.step - 1) // BAND, range(STEPS))
        return {(band + 0.5) * BAND / STEPS: score for band, score in bands.items()}

    def image_sums(self, method: str, images: Sequence[str]) -> np.ndarray:
        """Array "2 2 n": sums of SSIM or of 1 - SSIM, and counts, for same and changed predictions."""
        pairs = self.counted(method)
        same, changed = pairs[pairs.same], pairs[~pairs.same]
        return np.stack(by_image(same.ssim, 1 - changed.ssim, same.image, changed.image, images), 1)

    def ahead(self, first: str, second: str) -> tuple[float, Interval]:
        """By how much the first method's COSE is above the second's, with its 95 % interval.

        Both are taken on the same resampled images, so that images which are hard for both do not count.
        """
        names = sorted({*self.of(first).image, *self.of(second).image})
        drawn = [np.arange(len(names)), *resample(len(names))]
        sums = [self.image_sums(method, names) for method in (first, second)]
        totals = np.array([[of[:, :, rows].sum(-1) for rows in drawn] for of in sums])  # "2 r 2 2"
        with np.errstate(invalid="ignore"):
            halves = totals[..., 0] / totals[..., 1]
        scores = harmonic(halves[..., 0], halves[..., 1])
        apart = scores[0] - scores[1]
        return float(apart[0]), percentile_interval(apart[1:])

    def per_image(self, method: str, same: bool) -> np.ndarray:
        """Each image's mean SSIM over pairs with the same (or 1 - SSIM with another) prediction."""
        sums, counts = self.image_sums(method, sorted({*self.counted(method).image}))[0 if same else 1]
        return np.asarray(sums[counts > 0] / counts[counts > 0])

    def to_final(self, method: str) -> dict[str, float]:
        """Mean SSIM of each earlier checkpoint's maps to the final one's."""
        pairs = self.of(method)
        pairs = pairs[pairs.transform == CHECKPOINT]
        return {c: mean_value(pairs.ssim[pairs.checkpoint == c]).value for c in self.earlier}

    def correlation(self, method: str) -> Correlation:
        """Of SSIM to the final maps with accuracy, over checkpoints."""
        near = self.to_final(method)
        return ssim_to_final(list(near.values()), [self.accuracy[c] for c in near])


def _score(pairs: np.recarray) -> PerClass:
    sides = pairs[pairs.same], pairs[~pairs.same]
    return cose(*(side.ssim for side in sides), *(side.image for side in sides))


def _split(pairs: np.recarray, groups: np.ndarray, order: Iterable[Any]) -> dict[Any, PerClass]:
    scores = cose_split(pairs.ssim, pairs.same, list(groups), list(pairs.image), resamples=1)
    return {group: scores[group] for group in order if group in scores}


def read_pairs(folder: RunFolder, require_correct: bool = False) -> CoseResults:
    """Read the folder of a COSE study. require_correct: only images that the final model gets right."""
    config = folder.manifest.config
    if config.get("protocol") != "cose":
        raise InputError(f"{folder.path} is not a COSE study; name a folder that heatproof study cose wrote")
    scores, final = folder.scores(), config["final"]
    answers = scores.sql("select checkpoint, image, value from scores where metric = 'correct' order by all")
    answered = {row["image"]: row["value"] for row in answers if row["checkpoint"] == final}
    columns, labels = scores.columns(QUERY), tuple(config.get("labels", ()))
    if labels:  # rows are about IMAGE#LABEL; intervals draw images
        ends = (entry_id("", finding_name(labels, int(k))) for k in columns["explained"])
        images = [name.removesuffix(end) for name, end in zip(columns["image"], ends, strict=True)]
        columns["image"] = np.array(images, dtype=object)
    pairs = _with_kind_and_step(columns)
    if require_correct:
        if 1 not in answered.values():
            raise InputError(f"require_correct: {final} classifies no image of {folder.path} correctly, "
                             "or the images have no labels; leave it out")  # fmt: skip
        pairs = pairs[np.array([answered[image] == 1 for image in pairs.image], dtype=bool)]
    order = (*(c for c in folder.manifest.models if c != final), final)
    empty = scores.sql(
        "select method, avg(value order by value) as share from scores "
        "where metric = 'degenerate' and checkpoint = ? group by method",
        [final],
    )
    return CoseResults(
        config["name"], config["dataset"], config["family"], final, folder, tuple(config["methods"]), order,
        len(answered), pairs,
        accuracy={c: mean_value(r["value"] for r in answers if r["checkpoint"] == c).value for c in order},
        degenerate={row["method"]: row["share"] for row in empty},
        pretraining=config.get("pretraining"),
        trained_with=config.get("trained_with", "unknown"),
        similarity=config.get("similarity", "local5"),
        labels=labels,
    )  # fmt: skip


def _with_kind_and_step(columns: dict[str, np.ndarray]) -> np.recarray:
    """One record per pair. step: of the 30 from magnitude zero, 0 where there is no magnitude."""
    kinds = {name: GEOMETRIC if t.geometric else PHOTOMETRIC for name, t in TRANSFORMS.items()}
    names = columns["transform"]
    kind = np.array([kinds.get(name, MODELS) for name in names], dtype=object)
    reach = np.array([TRANSFORMS[n].reach if n in TRANSFORMS else 0.0 for n in names], dtype=np.float64)
    part = np.divide(np.abs(columns["magnitude"]), reach, out=np.zeros_like(reach), where=reach > 0)
    made = columns | {"kind": kind, "step": np.rint(part * STEPS).astype(int)}
    pairs: np.recarray = np.rec.fromarrays(list(made.values()), names=list(made))  # type: ignore[call-overload]
    return pairs


def mean_score(studies: Iterable[CoseResults], method: str) -> Value:
    return mean_value(study.scores[method].value for study in studies if method in study.scores)


class FamilyTest(NamedTuple):
    """Transformers against convolutional networks, paired by data set and method."""

    rows: list[tuple[str, str, float, float]]  # data set, method, mean COSE of CNNs and of transformers
    ahead: int  # pairs in which transformers have the higher COSE
    median: float  # of transformers minus CNNs
    p: float  # of Wilcoxon's signed-rank test, two-sided


def paired_families(values: Mapping[tuple[str, str, str], Sequence[float]]) -> FamilyTest | None:
    """Compare both families by (data set, family, method) -> COSE of each network; None without a pair."""
    rows = []
    for dataset, family, method in values:
        own, other = (mean_value(values.get((dataset, f, method), ())).value for f in (CNN, TRANSFORMER))
        if family == CNN and not math.isnan(own + other):
            rows.append((dataset, method, own, other))
    if not rows:
        return None
    apart = np.array([other - own for _, _, own, other in rows])
    p = float(wilcoxon(apart).pvalue) if apart.any() else 1.0
    return FamilyTest(rows, int((apart > 0).sum()), float(np.median(apart)), p)


def significance(fits: Mapping[str, Correlation]) -> str:
    """Which correlations differ from 0 at the paper's level of 0.05, as a sentence."""
    kinds: dict[str, list[str]] = {}
    for method, fit in fits.items():
        kind = "have no correlation" if math.isnan(fit.p) else "are not significant"
        if fit.p < ALPHA:
            kind = "rise with accuracy" if fit.r > 0 else "fall with accuracy"
        kinds.setdefault(kind, []).append(method)
    parts = (f"{', '.join(of)} {kind}" for kind, of in kinds.items())
    return f"At {ALPHA:g}, not corrected for several methods, as in the paper: {'; '.join(parts)}."


def published(values: Sequence[float], method: str, methods: Sequence[str]) -> float | None:
    """The paper's value, for the method without options or else its only form in the studies."""
    name, options = parse_call(method)
    entry = explainers.get(name).name
    known = entry in COSE_METHODS and (not options or name not in methods)
    return values[COSE_METHODS.index(entry)] if known else None


TABLES = TableFile("heatproof.studies.cose", value=Value, nan=math.nan, mean=mean_score, published=published)


def table_content(studies: Sequence[CoseResults]) -> dict[str, Any]:
    """What the page of the first study, beside the others, and its tables name."""
    results, groups = studies[0], dict[str, list[CoseResults]]()
    for study in studies:
        for group in filter(None, (study.family, study.pretraining)):
            groups.setdefault(group, []).append(study)
    methods, pairs = list(results.methods), results.pairs
    same = {name: pairs.same[pairs.transform == name] for name in CHANGES}
    fits = [results.correlation(method) for method in methods]
    by, several = SIMILARITIES[results.similarity], len(studies) > 1
    values: dict[tuple[str, str, str], list[float]] = {}
    for study in studies:
        for method in (m for m in study.methods if not is_floor(m)):
            values.setdefault((study.dataset, study.family, method), []).append(study.scores[method].value)
    return {
        "results": results, "studies": list(studies), "methods": methods, "fits": fits,
        "every": list(dict.fromkeys(method for study in studies for method in study.methods)),
        "winners": [next(iter(study.ranked), None) for study in studies],
        "over": ["overall"] * several, "leads": ["best in"] * several,
        "paper": list(TABLES.content["table1"]["published"].items()),
        "wins": TABLES.content["table1"]["wins"],
        "groups": [(group, members, len(members)) for group, members in groups.items()],
        "compared": "" if results.similarity == "local5" else f" Maps are compared by {by}.",
        "kinds": [kind for kind in KINDS if (pairs.kind == kind).any()],
        "by_kind": {m: results.split(m, "kind", KINDS) for m in methods},
        "by_change": {m: results.split(m, "transform", CHANGES) for m in methods},
        "stayed": {name: float(of.mean()) for name, of in same.items() if len(of)},
        "near": {m: results.to_final(m) for m in methods},
        "significance": significance(dict(zip(methods, fits, strict=True))),
        "families": paired_families(values), "alpha": ALPHA,
        "labels": list(results.labels), "of_label": {m: results.by_label(m) for m in methods},
        "reasons": "".join(dict.fromkeys(f" A dash: {fit.reason}." for fit in fits if fit.reason)),
    }  # fmt: skip


def write_results(
    settings: CoseSettings, opened: ResolvedStudy, results: CoseResults, others: Sequence[CoseResults],
    failed: Sequence[Failure], skipped: Mapping[str, str],
) -> MarkdownReport:  # fmt: skip
    """Write summary.md in the study's folder, with its tables and figures."""
    studies, ranked, order = [results, *others], results.ranked, list(results.ranked)
    drawn, missing = {}, ""
    try:
        drawn = draw_figures(results, studies) if settings.figures and need("matplotlib", "plots") else {}
    except MissingExtraError as error:
        missing = f"No figures: {error}."
    return write_page(
        settings.out, "studies/cose/page.md", TABLES, drawn, **table_content(studies), settings=settings,
        failed=failed, skipped=skipped, missing=missing, ranked=order,
        panels=example_sheets(settings, opened, results) if settings.figures else {},
        beside=beside_sheets(settings, opened, studies) if settings.figures else {},
        versions=len(draw(0, [], settings.draws, settings.transforms).names),
        lead=results.ahead(order[0], order[1]) if len(order) > 1 else None,
        consistent=max(ranked, key=lambda m: ranked[m].consistency, default=""),
        sensitive=max(ranked, key=lambda m: ranked[m].sensitivity, default=""),
    )  # fmt: skip


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
    if results.earlier and not math.isnan(results.final_accuracy):
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


def maps_of(
    model: Model, inputs: Tensor, methods: Sequence[str], targets: Tensor | int | None = None, *,
    of_probability: bool = False, **options: Any,
) -> dict[str, Maps]:  # fmt: skip
    """Maps by method. of_probability: gradients with respect to pixels are those of the probability.

    CAMs read those of the logit in either case, as in the authors' code.
    """
    if not of_probability:
        return explain(model, inputs, methods, targets, **options)
    if not model.was_seen:
        model.logits(inputs[:1])  # determines the head
    kind = type(model.head)
    head = type(kind.__name__, (kind,), {"scores": kind.measured})(**vars(model.head) | {"by_itself": False})
    calls, maps = read_methods(methods), dict[str, Maps]()
    for network, own in ((model, False), (with_head(model, head), True)):
        texts = [call.text for call in calls if (call.entry.card == CARDS["gradient"]) is own]
        maps |= explain(network, inputs, texts, targets, **options) if texts else {}
    return {call.text: maps[call.text] for call in calls}


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
    pairs, files = results.of(methods[0]), {}
    first = dict(zip(pairs.image[::-1], pairs.explained[::-1], strict=True))
    if results.labels:  # one label of each image
        pairs = pairs[np.array([first[row.image] == row.explained for row in pairs])]
    for number, (image, changes) in enumerate(pick(pairs, settings.examples), start=1):
        target = int(first[image]) if results.labels else None
        drawn = _sheet(settings, opened, results, methods, places[image], changes, target)
        files[image] = _save(settings, drawn, f"pair-{number}.png")
    return files


def _save(settings: CoseSettings, drawn: Image.Image, name: str) -> str:
    (settings.out / "panels").mkdir(parents=True, exist_ok=True)
    drawn.save(settings.out / "panels" / name)
    return name


def beside_sheets(
    settings: CoseSettings, opened: ResolvedStudy, studies: Sequence[CoseResults]
) -> dict[str, str]:
    """Draw the final maps of several studies on images that all have, a row for each network (Figure 4)."""
    methods = [m for m in studies[0].methods if all(m in s.methods for s in studies) and not is_floor(m)]
    if len(studies) < 2 or not methods:
        return {}
    stores = [study.folder.maps() for study in studies]
    known = [store.shared([(s.final, m) for m in methods]) for store, s in zip(stores, studies, strict=True)]
    shared, labels = set.intersection(*map(set, known)), studies[0].labels
    places = {  # by the names of maps: IMAGE, or IMAGE#LABEL of a multi-label network
        valid_unicode(name): i
        for i, sample in enumerate(opened.source.samples)
        for name in ([entry_id(sample.id, label) for label in labels] or [sample.id])
    }
    preprocess, files = opened.model(studies[0].final).preprocess, {}
    for number, name in enumerate(sorted(shared & set(places))[: settings.examples], start=1):
        (loaded,) = batches(opened.source, preprocess, 1, [places[name]])
        (picture,) = as_pictures(loaded.batch.images, preprocess)
        rows = []
        for study, store in zip(studies, stores, strict=True):
            heats = [comparable(store.read(study.final, m, [name])).clamp(0, 1) for m in methods]
            heats = [upsample(heat, (picture.height, picture.width))[0] for heat in heats]
            tiles = [Tile(overlay(picture, heat), m) for heat, m in zip(heats, methods, strict=True)]
            rows.append([Tile(picture, f"{study.model} ({study.family})"), *tiles])
        files[name] = _save(settings, sheet(rows, heading=name, cmap="inferno"), f"beside-{number}.png")
    return files


def _sheet(
    settings: CoseSettings, opened: ResolvedStudy, results: CoseResults, methods: Sequence[str], place: int,
    changes: Sequence[AppliedChange], target: int | None,
) -> Image.Image:  # fmt: skip
    model, names = opened.model(results.final), opened.source.classes
    (loaded,) = batches(opened.source, model.preprocess, 1, [place])
    image = valid_unicode(loaded.batch.ids[0])
    original = eight_bit(model.preprocess.restore(loaded.batch.images.to(model.device)))
    sizes = [torch.tensor([change.magnitude], device=model.device) for change in changes]
    changed = [TRANSFORMS[c.transform].apply(original, m) for c, m in zip(changes, sizes, strict=True)]
    versions = model.preprocess.from_bytes(torch.cat([original, *changed]))
    options: dict[str, Any] = {"layer": settings.layer, "seed": settings.seed}
    maps = maps_of(model, versions, methods, target, of_probability=settings.paper, **options)
    classes = maps[methods[0]].explained.tolist()
    answers = [names[number] if number < len(names) else f"class {number}" for number in classes]
    titles = ["as it is", *(change.title for change in changes)]
    images: Any = as_pictures(versions, model.preprocess)
    word = "answer" if target is None else "label"
    rows = [[Tile(p, t, f"{word}: {a}") for p, t, a in zip(images, titles, answers, strict=True)]]
    for method in methods:
        heat, pairs = comparable(maps[method]), results.of(method)
        pairs = pairs[(pairs.image == image) & ((pairs.explained == target) | (target is None))]
        row = [Tile(overlay(images[0], heat[0].clamp(0, 1).cpu()), method, "")]
        for k, (change, size) in enumerate(zip(changes, sizes, strict=True), start=1):
            back = TRANSFORMS[change.transform].inverse_maps(heat[k : k + 1], size)[0]
            same = (pairs.transform == change.transform) & np.isclose(pairs.magnitude, change.magnitude)
            known = [value for value in pairs.ssim[same] if np.isfinite(value)][:1]
            note = f"{SIMILARITIES[results.similarity]} {known[0]:.2f}" if known else ""
            row.append(Tile(overlay(images[0], back.clamp(0, 1).cpu()), method, note))
        rows.append(row)
    return sheet(rows, heading=f"{image}: maps laid over the image as it is", cmap="inferno")
