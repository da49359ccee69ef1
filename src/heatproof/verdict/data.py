"""A run folder as one structure for the page, the live page and the verdict.

Everything is about one model. Means are over images at one checkpoint (the last by default), with 95 %
bootstrap intervals over images; values of whole classes or checkpoints have the interval that was stored with
them, if there is one. A number that is not defined is NaN, and n counts those that are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from heatproof.disk import valid_unicode
from heatproof.errors import InputError, StoreError, did_you_mean
from heatproof.images.duplicates import near_duplicates
from heatproof.images.findings import entry_id, finding_name
from heatproof.metrics.evidence_record import FOLDER, EvidenceRecord, evidence_file
from heatproof.metrics.results import PerClass, above_floors, mean_interval
from heatproof.registry import parse_call
from heatproof.store.folder import RunFolder
from heatproof.store.ledger import known_record
from heatproof.store.manifest import Facts, Manifest, MetricFacts
from heatproof.verdict.alarms import Alarm, find_alarms
from heatproof.verdict.trajectory import NAN, Trajectory, class_names, ordered

SMALLEST = 0.0005  # a smaller difference is printed as 0.000
PAIR = " ~ "  # between two methods, in the rows of method_agreement
ANSWERS = ("image", "probability", "predicted")
ABSENT = -1  # predicted: the image does not have the label
FAMILIES = (  # in the order of the table; those of plug-ins follow
    "Maps", "Structure", "Localisation", "Faithfulness", "Consistency", "Consistency and sensitivity",
    "Sanity", "Robustness", "Causes", "Agreement", "Classifier",
)  # fmt: skip
REGISTRY = Facts()  # of all registered metrics
BESIDE = re.compile(r"_(n|low|high|degenerate|error|points|at_\d+)$")  # parts that only complete their metric
BLANK = MetricFacts(  # a row that every run has, of no registered metric
    "degenerate", higher_is_better=False, bounds=(0.0, 1.0), family="Maps", floors=(), title="blank maps",
    summary="The share of maps that are constant.",
)  # fmt: skip
Select = Callable[..., list[dict[str, Any]]]  # columns and conditions -> rows of one checkpoint


@dataclass(frozen=True)
class Measure:
    """A metric as rows name it: a registered name, maybe with options, or a part of one ("cscore_low").

    Names that are not registered are printed as they are, without a direction.
    """

    name: str  # with its options, as in the rows
    base: str  # without them
    facts: MetricFacts

    @property
    def is_registered(self) -> bool:
        return bool(self.facts.module)

    @property
    def higher_is_better(self) -> bool | None:
        return self.facts.higher_is_better

    @property
    def plain(self) -> str:
        return self.facts.titles.get(self.base, self.base.replace("_", " "))

    @property
    def short(self) -> str:
        """Name for use within a sentence."""
        return self.plain.partition(":")[0]

    @property
    def options(self) -> str:
        return self.name.partition("(")[2].removesuffix(")")

    @property
    def arrow(self) -> str:
        return {True: "↑", False: "↓", None: ""}[self.higher_is_better]

    @property
    def direction(self) -> str:
        words = {True: "higher is better", False: "lower is better", None: "no better direction"}
        return words[self.higher_is_better]

    @property
    def has_floor(self) -> bool:
        """Whether a method that reads the network should score better than one that does not."""
        return bool(self.facts.floors) and self.higher_is_better is not None


def measure(name: str, facts: Facts = REGISTRY) -> Measure:
    """The metric of a row, by the facts of its run.

    >>> metric = measure("randomisation_ssim(depths=3)")
    >>> metric.base, metric.facts.name, metric.arrow, metric.options
    ('randomisation_ssim', 'randomisation', '↓', 'depths=3')
    """
    try:
        base, _ = parse_call(name)
    except InputError:
        base = name
    return Measure(name, base, BLANK if base == BLANK.name else facts.metric_of(base) or MetricFacts(base))


def stands_beside(name: str, facts: Facts = REGISTRY) -> bool:
    """Whether a row only completes another metric's: its count, its interval, a point of its curve.

    >>> [stands_beside(name) for name in ("cscore_low", "insertion_at_40(steps=20)", "cscore", "my_n")]
    [True, True, False, False]
    """
    return bool(BESIDE.search(name.partition("(")[0])) and measure(name, facts).is_registered


def part(name: str, suffix: str) -> str:
    """The name of a part of a metric; options stay last.

    >>> part("cscore(alpha=1)", "low")
    'cscore_low(alpha=1)'
    """
    base, bracket, rest = name.partition("(")
    return f"{base}_{suffix}{bracket}{rest}"


def in_order(names: list[str], facts: Facts = REGISTRY) -> list[Measure]:
    """In the order of the table: by family, then as registered, those without a direction last."""
    words = [word for metric in facts.every_metric for word in metric.titles]
    families = {family: i for i, family in enumerate(FAMILIES)}

    def place(of: Measure) -> tuple[int, str, bool, int, str]:
        family, known = of.facts.family, of.base in words
        undirected = of.higher_is_better is None or not known
        at = words.index(of.base) if known else len(words)
        return families.get(family, len(families)), family, undirected, at, of.name

    return sorted((measure(name, facts) for name in names), key=place)


@dataclass(frozen=True)
class Cell:
    """One method's mean on one metric, with its interval if it is known."""

    value: float
    low: float = NAN
    high: float = NAN
    n: int | None = None  # images; None for a number about a whole checkpoint
    reason: str = ""
    margins: Mapping[str, PerClass] = field(default_factory=dict)  # by floor, over the same images

    @property
    def failed(self) -> list[str]:
        """Floors that this method does not beat: the interval of the difference reaches zero."""
        return [f for f, margin in self.margins.items() if margin.n and not margin.interval[0] >= SMALLEST]

    @property
    def defined(self) -> float:
        """The value; NaN if it is about no image, such as the C-Score of an empty gold list, stored as 0."""
        return NAN if self.n == 0 else self.value


@dataclass(frozen=True)
class Images:
    """The images of the checkpoint, in order of their ids, and their scores."""

    ids: list[str]
    labels: list[int | None]
    predicted: list[int | None]
    explained: list[int | None]
    confidence: list[float]  # probability of the predicted class, NaN if the network gives no number
    scores: Mapping[tuple[str, str], np.ndarray]  # (metric, method) -> "images", NaN if not defined
    group: np.ndarray | None = None  # "images": the first near-duplicate of the same class; None: all differ
    copies: frozenset[str] = frozenset()  # image files that are near-duplicates of an earlier one,
    distinct_files: int = 0  # and the number of the others
    sides: np.ndarray | None = None  # "images 2": shorter side of the file and of the network's input

    def distinct(self, column: np.ndarray) -> np.ndarray:
        """The column with each group's mean at its first image and NaN at its other near-duplicates."""
        if self.group is None:
            return column
        defined = np.isfinite(column)
        # Near-duplicates are not independent: as separate images they would make tests too sure.
        at, n = self.group[defined], len(column)
        counts, sums = np.bincount(at, minlength=n), np.bincount(at, column[defined], n)
        return np.where(counts > 0, sums / np.maximum(counts, 1), NAN)

    @cached_property
    def right(self) -> list[bool | None]:
        pairs = zip(self.labels, self.predicted, strict=True)
        return [None if a is None or b is None else a == b for a, b in pairs]


@dataclass(frozen=True)
class RunData:
    """One model of a run."""

    folder: RunFolder
    model: str
    models: list[str]
    checkpoint: str
    checkpoints: list[str]  # in order of training
    methods: list[str]  # floors last
    images: Images
    classes: Mapping[int, str]
    whole: Mapping[tuple[str, str], Cell]  # (metric, method) -> numbers about the whole checkpoint
    paths: Mapping[tuple[str, str], list[float]]  # (metric, method) -> mean at each checkpoint
    by_class: Mapping[tuple[str, str, int], Cell]  # (metric, method, class) -> numbers about that class
    agreement: Mapping[str, Mapping[tuple[str, str], float]]  # kind -> (method, method) -> mean
    curves: Mapping[str, Mapping[str, list[tuple[int, float]]]]  # method -> metric -> (percent, mean)
    blank_reasons: Mapping[tuple[str, str], int]  # (method, why) -> number of blank maps
    alarms: list[Alarm]  # of methods that are not floors, at any checkpoint
    broken: list[tuple[str, str]]  # images that could not be used, and why

    @property
    def manifest(self) -> Manifest:
        return self.folder.manifest

    @property
    def facts(self) -> Facts:
        return self.folder.manifest.facts

    @property
    def real(self) -> list[str]:
        """Methods that are not floors."""
        return [method for method in self.methods if not self.facts.is_floor(method)]

    @property
    def floors(self) -> list[str]:
        return [method for method in self.methods if self.facts.is_floor(method)]

    @cached_property
    def measures(self) -> list[Measure]:
        """All metrics of methods, in the order of the table."""
        of_images = {name for name, method in self.images.scores if method in self.methods}
        return in_order(sorted(of_images | {name for name, method in self.whole if method}), self.facts)

    @cached_property
    def cells(self) -> Mapping[tuple[str, str], Cell]:
        """(metric, method) -> mean and interval; resampling many images takes seconds."""
        return _image_cells(self.images, self.methods, self.facts) | dict(self.whole)

    @cached_property
    def headline(self) -> Measure | None:
        """The metric that images are ranked by: a headline metric if one was scored."""
        known = [m for m in self.measures if any((m.name, x) in self.images.scores for x in self.real)]
        headlines = [m for m in known if m.facts.headline and m.base == m.facts.name]
        others = [m for m in known if m.is_registered and m.higher_is_better is not None]
        return next(iter([*headlines, *others]), None)

    @cached_property
    def evidence(self) -> EvidenceRecord | None:
        """The interventions at this checkpoint; None if there were none."""
        return read_evidence(self.folder, self.checkpoint)

    @property
    def evidence_missing(self) -> str:
        """Why the metric evidence left no record; "" if the run does not have it."""
        cells = [c for (name, m), c in self.whole.items() if not m and name.partition("(")[0] == FOLDER]
        return next((cell.reason or "its file is missing; run the study again" for cell in cells), "")

    def class_name(self, label: int | None) -> str:
        other = f"class {label}" if label is None or label >= 0 else "not there"
        return "" if label is None else self.classes.get(label, other)

    @property
    def explains(self) -> str:
        """Which classes the maps of this checkpoint explain, as a sentence."""
        images = self.images
        known = [i for i, c in enumerate(images.explained) if c is not None]
        same = [
            word
            for word, of in (("true label", images.labels), ("prediction", images.predicted))
            if known and all(images.explained[i] == of[i] for i in known)
        ]
        if not same:
            return "Each map explains the class named beside it." if known else ""
        text = f"Every map explains the {' and '.join(same)} of its image"
        if same == ["true label"]:
            instead = "does not predict it" if self.manifest.is_multilabel else "predicts another class"
            text += f"; for {images.right.count(False):,} of {len(known):,} the network {instead}"
        return f"{text}."

    def classifier(self, base: str) -> list[float]:
        """AUC or accuracy at each checkpoint; empty if it was not computed."""
        paths = (v for (name, m), v in self.paths.items() if not m and name.partition("(")[0] == base)
        return next(paths, [])


def read_run(folder: RunFolder, model: str | None = None, checkpoint: str | None = None) -> RunData:
    """Read one model of a run at one checkpoint.

    Args:
        folder: of the run.
        model: by default the one with the most rows.
        checkpoint: by default the last one with rows.
    """
    scores, facts = folder.scores(), folder.manifest.facts
    models = [
        row["model"] for row in scores.sql("select model from scores group by 1 order by count(*) desc, 1")
    ]
    if not models:
        raise StoreError(f"{folder.path} has no finished unit yet; run the study first")
    model = _known("model", model, models, models[0])
    rows = scores.sql("select distinct checkpoint, method from scores where model = ?", [model])
    with_rows, methods = ({row[column] for row in rows} for column in ("checkpoint", "method"))
    checkpoints = [name for name in ordered(folder, model) if name in with_rows]
    checkpoint = _known("checkpoint", checkpoint, checkpoints, checkpoints[-1])

    def select(columns: str, rest: str, *parameters: str) -> list[dict[str, Any]]:
        query = f"select {columns} from scores where model = ? and checkpoint = ? and {rest}"
        return scores.sql(query, [model, checkpoint, *parameters])

    broken = select("image, min(reason) as reason", "metric = 'image' group by 1 order by 1")
    blank = select(
        "method, reason, count(*) as n",
        "metric = ? and value > 0 and reason <> '' group by 1, 2 order by 1, 2",
        BLANK.name,
    )
    groups = _group_cells(select, facts)
    names = class_names(folder)
    try:
        alarms = find_alarms(Trajectory.from_run(folder, model))
    except InputError:  # the run has no C-Score
        alarms = []
    return RunData(
        folder=folder,
        model=model,
        models=models,
        checkpoint=checkpoint,
        checkpoints=checkpoints,
        methods=order_methods([m for m in methods if m and PAIR not in m], folder.manifest),
        images=_with_groups(
            folder, checkpoint, _images(select, facts, names if folder.manifest.is_multilabel else None)
        ),
        classes=dict(enumerate(names)),
        whole={(name, m): c for (name, m, label), c in groups.items() if label is None},
        paths=_paths(folder, model, checkpoints),
        by_class={(name, m, label): c for (name, m, label), c in groups.items() if label is not None},
        agreement=_agreement(select),
        curves=_curves(select),
        blank_reasons={(row["method"], row["reason"]): row["n"] for row in blank},
        alarms=[alarm for alarm in alarms if not facts.is_floor(alarm.method or "")],
        broken=[(row["image"], row["reason"]) for row in broken],
    )


def read_evidence(folder: RunFolder, checkpoint: str) -> EvidenceRecord | None:
    """The record of the metric evidence at a checkpoint, without options if possible; None without one."""
    path = evidence_file(folder.path, checkpoint)
    variants = sorted(path.parent.glob(f"{evidence_file(folder.path, checkpoint, f'{FOLDER}(').stem}*.json"))
    path = path if path.exists() or not variants else variants[0]
    record = known_record(path)
    try:
        return None if record is None else EvidenceRecord.from_json(record)
    except ValueError as error:
        raise StoreError(f"cannot read {path}: {error}; run the study again") from error


def order_methods(names: Sequence[str], manifest: Manifest) -> list[str]:
    """As the study lists them, floors last."""
    listed = {name: i for i, name in enumerate(manifest.config.get("methods", ()))}
    return sorted(
        names, key=lambda name: (manifest.facts.is_floor(name), listed.get(name, len(listed)), name)
    )


def mean_over_methods(columns: np.ndarray) -> np.ndarray:
    """Turn "m n" into "n": the mean over the defined values; NaN if none is."""
    known = np.isfinite(columns)
    total = np.where(known, columns, 0).sum(0)
    return np.where(known.any(0), total / np.maximum(known.sum(0), 1), np.nan)


def _known(kind: str, name: str | None, known: Sequence[str], default: str) -> str:
    if name is not None and name not in known:
        raise InputError(f"the run has no {kind} {name!r}; {did_you_mean(name, known)}")
    return default if name is None else name


def _images(select: Select, facts: Facts, labels: Sequence[str] | None = None) -> Images:
    """All scores of images at a checkpoint. labels: names, if an image may have several."""
    rows = select(
        """image, min(label) as label,
           max(value) filter (metric = 'predicted' and not isnan(value)) as predicted,
           min(explained) filter (method <> '') as explained,
           max(value) filter (metric = 'probability' and not isnan(value)) as confidence""",
        "image <> '' and metric <> 'image' group by 1 order by 1",
    )
    if labels is not None:
        rows = _label_rows(rows, select, labels)
    ids = [row["image"] for row in rows]
    place = {name: i for i, name in enumerate(ids)}
    arrays: dict[tuple[str, str], np.ndarray] = {}
    groups = select(
        "metric, method, list(image) as images, list(value) as values_",
        "image <> '' and method <> '' group by 1, 2 order by 1, 2",
    )
    for group in groups:
        if not stands_beside(group["metric"], facts):
            arrays[group["metric"], group["method"]] = column = np.full(len(ids), NAN)
            column[[place[image] for image in group["images"]]] = group["values_"]
    return Images(
        ids=ids,
        labels=[row["label"] for row in rows],
        predicted=[None if row["predicted"] is None else int(row["predicted"]) for row in rows],
        explained=[row["explained"] for row in rows],
        confidence=[NAN if row["confidence"] is None else row["confidence"] for row in rows],
        scores=arrays,
    )


def _label_rows(rows: Sequence[dict[str, Any]], select: Select, names: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of maps (IMAGE#LABEL), each with the network's prediction of its label, from the image's rows."""
    predictions = {
        entry_id(row["image"], finding_name(names, row["explained"])): row
        for row in select(
            """image, explained,
               max(value) filter (metric = 'probability' and not isnan(value)) as confidence,
               count(*) filter (metric = 'predicted') as predicted""",
            "explained is not null and method = '' and metric in ('probability', 'predicted') group by 1, 2",
        )
    }
    joined = []
    for row in rows:
        if row["explained"] is not None and (prediction := predictions.get(row["image"])):
            confidence = prediction["confidence"]
            predicted = row["explained"] if prediction["predicted"] else ABSENT
            joined.append(
                row | {"predicted": None if confidence is None else predicted, "confidence": confidence}
            )
    return joined


def _with_groups(folder: RunFolder, checkpoint: str, images: Images) -> Images:
    """With the groups of near-duplicates, if the folder has thumbnails of all its images."""
    seen = folder.seen(checkpoint)
    if seen is None:
        return images
    place = {name: i for i, name in enumerate(seen.ids)}
    if folder.manifest.is_multilabel:
        names = class_names(folder)
        place |= {valid_unicode(entry_id(n, f)): i for n, i in list(place.items()) for f in names}
    if not set(images.ids) <= place.keys():
        return images
    at = [place[name] for name in images.ids]
    original = near_duplicates(seen.thumbnails)
    # Grouped per explained class, since copies with different labels are different questions.
    copies = frozenset(name for i, name in enumerate(seen.ids) if original[i] != i)
    first: dict[tuple[int, int | None], int] = {}
    keys = zip(original[at].tolist(), images.explained, strict=True)
    group = np.array([first.setdefault(key, i) for i, key in enumerate(keys)]) if copies else None
    others = len(seen.ids) - len(copies)
    return replace(images, group=group, copies=copies, distinct_files=others, sides=seen.sides[at])


def _image_cells(images: Images, methods: Sequence[str], facts: Facts) -> dict[tuple[str, str], Cell]:
    cells: dict[tuple[str, str], Cell] = {}
    for name in dict.fromkeys(metric for metric, _ in images.scores):
        of = measure(name, facts)
        columns = {m: images.distinct(images.scores[name, m]) for m in methods if (name, m) in images.scores}
        margins: Mapping[str, Mapping[str, PerClass]] = {}
        floors = [m for m in columns if facts.floor_name(m) in of.facts.floors]
        if of.has_floor and floors:
            judged = {m: c for m, c in columns.items() if not facts.is_floor(m) or m in floors}
            margins = above_floors(judged, bool(of.higher_is_better), floors=floors)
        for method, column in columns.items():
            defined = column[np.isfinite(column)]
            value = float(defined.mean()) if len(defined) else NAN
            above = margins.get(method, {})
            cells[name, method] = Cell(value, *mean_interval(defined), len(defined), margins=above)
    return cells


def _group_cells(select: Select, facts: Facts) -> dict[tuple[str, str, int | None], Cell]:
    """Numbers about a class, or with label None about the whole checkpoint, by metric, method and label.

    Their counts and intervals are rows of their own and go into the same cell.
    """
    rows = select(
        "metric, method, label, value, reason",
        "image = '' and not contains(method, ?) order by label, metric, method",
        PAIR,
    )
    values = {(row["metric"], row["method"], row["label"]): row["value"] for row in rows}
    cells = {}
    for row in rows:
        name, method, label = row["metric"], row["method"], row["label"]
        if not stands_beside(name, facts):
            parts = ((part(name, suffix), method, label) for suffix in ("low", "high", "n"))
            low, high, n = (values.get(key, NAN) for key in parts)
            count = None if math.isnan(n) else int(n)
            cells[name, method, label] = Cell(row["value"], low, high, count, row["reason"])
    return cells


def _paths(folder: RunFolder, model: str, checkpoints: Sequence[str]) -> dict[tuple[str, str], list[float]]:
    """Means by checkpoint, of images or of whole checkpoints."""
    rows = folder.scores().sql(
        """select metric, method, checkpoint, avg(value order by value) filter (not isnan(value)) as mean
           from scores where model = ? and not contains(method, ?) and (image <> '' or label is null)
           group by all order by all""",
        [model, PAIR],
    )
    paths: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if row["metric"] not in ANSWERS and not stands_beside(row["metric"], folder.manifest.facts):
            path = paths.setdefault((row["metric"], row["method"]), [NAN] * len(checkpoints))
            path[checkpoints.index(row["checkpoint"])] = NAN if row["mean"] is None else row["mean"]
    return paths


def _agreement(select: Select) -> dict[str, dict[tuple[str, str], float]]:
    means: dict[str, dict[tuple[str, str], float]] = {}
    for row in select("metric, method, value", "contains(method, ?) order by all", PAIR):
        first, _, second = row["method"].partition(PAIR)
        kind = row["metric"].partition("(")[0].removeprefix("method_agreement").strip("_") or "agreement"
        means.setdefault(kind, {})[first, second] = row["value"]
    return means


def _curves(select: Select) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Mean probability along insertion and deletion, if its points were stored."""
    rows = select(
        r"""method, regexp_extract(metric, '^(insertion|deletion)', 1) as kind,
            regexp_extract(metric, '_at_(\d+)', 1)::int as percent,
            avg(value order by value) filter (not isnan(value)) as mean""",
        r"regexp_matches(metric, '^(insertion|deletion)_at_\d+') group by all order by all",
    )
    curves: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for row in rows:
        if row["mean"] is not None:
            curve = curves.setdefault(row["method"], {}).setdefault(row["kind"], [])
            curve.append((row["percent"], row["mean"]))
    return curves
