"""Metrics of the maps of a batch, and the rows of a unit, for everything that writes a run folder.

Metrics read maps as the store returns them (half precision, see store/maps.py), also in the unit that
computes the maps: a metric that is added later then gets the same number to the last bit.

The rows of a unit of images are followed by those of group units: about all images of a checkpoint, and about
several checkpoints, from the stored maps and predictions. docs/runs.md lists them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from heatproof.disk import valid_unicode
from heatproof.errors import HeatproofError, InputError
from heatproof.explain.api import is_stored
from heatproof.explain.masking import uncertainty
from heatproof.images import Failure
from heatproof.metrics.agreement import REASONS
from heatproof.metrics.evidence_record import EvidenceRecord, evidence_file
from heatproof.metrics.kit import BatchContext, Cause, CheckpointContext, ImagePool, PerImage, blanked, finite
from heatproof.metrics.results import PerClass, mean_interval
from heatproof.metrics.stability import checkpoint_pairs
from heatproof.models import predicted, probabilities
from heatproof.models.dense_heads import Dense
from heatproof.models.model import Model
from heatproof.registry import explainers, parse_call
from heatproof.run import plan
from heatproof.run.config import MetricRequest, read_metrics
from heatproof.run.study import ALL_CLASSES_UP_TO
from heatproof.store import MapStore, RunFolder
from heatproof.store.maps import halved, restored
from heatproof.store.scores import StoredPredictions, anchor_probabilities, read_predictions
from heatproof.timeline import span
from heatproof.types import Batch, Maps, Score

NO_ANSWER = "the network's output is NaN or infinite for this image"
NO_MAP = "there is no map: the model's output or the map has NaN or infinite values"
NOT_FINITE = "the map has NaN or infinite values"
NOT_DEFINED = "the metric is not defined here"
TOO_FEW = "too few draws to estimate the error of the map"
NONE_ABOVE = "no label reaches its threshold"
NONE_PREDICTED = -1.0
READ = "the method's maps are read from files, and this metric runs the method again"
NO_IMAGE = "no image of this checkpoint could be used"
NO_COMMON_IMAGE = "no image has a map of every method"
NO_STORED_MAP = "no map of this method could be stored"
NO_PAIR = "no image has a map at both checkpoints"
PART = 256  # images compared at a time, so that memory does not grow with the run
Cell = tuple[int | None, str, float, str]  # label, metric, value, reason


def as_stored(maps: Maps) -> Maps:
    """The maps as the store returns them."""
    signed = None if maps.signed_values is None else restored(*halved(maps.signed_values))
    return replace(maps, values=restored(*halved(maps.values)), signed_values=signed)


def only_finite(maps: Maps) -> Maps:
    """The maps without those that cannot be stored because they are not finite."""
    good = finite(maps)
    return maps if good.all() else maps.take(good)


class MetricResults(NamedTuple):
    """Values of one metric, or of a part of it, for the maps of one method, image by image."""

    method: str
    metric: str
    values: list[float]
    reasons: list[str]


def measure(
    metrics: Sequence[str], context: BatchContext, unanswered: Tensor | None = None
) -> list[MetricResults]:
    """Compute every metric of the context's maps; a map that is not finite has the value NaN.

    unanswered: "b" bool, images whose output is not finite.
    """
    lost = [False] * len(context.batch.ids) if unanswered is None else unanswered.tolist()
    why = [
        NO_ANSWER if none else NO_MAP if target < 0 else NOT_FINITE
        for none, target in zip(lost, context.targets.tolist(), strict=True)
    ]
    # One NaN map must not fail the batch: it is scored as a blank map, and its values become NaN at the end.
    bad = {method: ~finite(maps) for method, maps in context.maps.items()}
    context = replace(context, maps={method: blanked(maps) for method, maps in context.maps.items()})
    requests = read_metrics([text for text in metrics if text not in plan.BUILT_IN])
    # Boxes and masks are in CPU memory, so metrics that do not run the network are computed there.
    if any("model" not in request.entry.needs for request in requests):
        on_host = replace(context, maps={method: maps.to("cpu") for method, maps in context.maps.items()})
    computed: dict[tuple[Any, ...], Mapping[str, PerImage]] = {}
    # Metrics of one function or of one bundle share a call.
    keys = [((r.entry.bundle and r.entry.call) or r.entry.function, r.options) for r in requests]
    for key, request in zip(keys, requests, strict=True):
        if key not in computed:
            with span("metric", request.entry.bundle or request.text):
                computed[key] = compute(request, context if "model" in request.entry.needs else on_host)
    results: list[MetricResults] = []  # read back after all calls, so that the GPU queue never runs empty
    if plan.PER_MAP[0] in metrics:
        with span("metric", plan.PER_MAP[0]):
            results += [part for method, maps in context.maps.items() for part in _map_results(method, maps)]
    fetched = {key: {m: _on_host(scores) for m, scores in own.items()} for key, own in computed.items()}
    results += [
        MetricResults(method, name, scores[part].double().tolist(), scores.reasons(part))
        for key, request in zip(keys, requests, strict=True)
        for method, scores in fetched[key].items()
        for name, part in _parts(request, scores)
    ]
    not_finite = {method: where.tolist() for method, where in bad.items()}
    for method, _, values, reasons in results:
        for i, value in enumerate(values):
            if not_finite[method][i]:
                values[i], reasons[i] = math.nan, why[i]
            elif math.isnan(value):
                reasons[i] = reasons[i] or NOT_DEFINED
    return results


def compute(request: MetricRequest, context: BatchContext) -> Mapping[str, PerImage]:
    """By method: the scores of every map."""
    entry, options = request.entry, dict(request.options)
    methods = runnable(request, list(context.maps))
    # The other methods are scored although one of them cannot be run again.
    if len(methods) < len(context.maps):
        own = replace(context, maps={method: context.maps[method] for method in methods})
        scores = compute(request, own) if methods else {}
        count = len(context.batch.ids)
        nothing = dict.fromkeys(entry.parts or (entry.name,), torch.full((count,), torch.nan))
        read = PerImage(nothing, [Cause(READ, torch.ones(count, dtype=torch.bool))])
        return {method: scores.get(method, read) for method in context.maps}
    if entry.call:
        called: Mapping[str, PerImage] = entry.call(entry.function, context, options)
        return called
    truth = context.batch.truth
    offered = {
        "model": context.model, "images": context.batch.images, "labels": context.batch.labels,
        "boxes": truth and truth.boxes, "masks": truth and truth.masks,
        "probabilities": context.probabilities if "probabilities" in entry.needs else None,
    }  # fmt: skip
    by_method: dict[str, PerImage] = {}
    for method, maps in context.maps.items():
        given = {name: maps if name == "maps" else offered[name] for name in entry.needs}
        by_method[method] = result = entry.function(**given, **options)
        if not isinstance(result, PerImage):
            by_method[method] = PerImage({entry.name: torch.as_tensor(result)})
        if any(len(values) != len(maps) for values in by_method[method].values()):
            raise InputError(f"{entry.name} must return one number per image, {len(maps)} here")
    return by_method


def runnable(request: MetricRequest, methods: Sequence[str]) -> list[str]:
    """Methods that a metric can be computed for; maps from files cannot be computed again."""
    return [m for m in methods if not (request.entry.reruns and is_stored(m))]


def _on_host(scores: PerImage) -> PerImage:
    if all(values.is_cpu for values in scores.values()):
        return scores
    with span("waiting", "device"):
        causes = [cause._replace(where=cause.where.cpu()) for cause in scores.causes]
        return PerImage({name: values.cpu() for name, values in scores.items()}, causes)


def _map_results(method: str, maps: Maps) -> Iterator[MetricResults]:
    """Whether each map is blank and why; for sampling methods, its standard error."""
    blank = maps.degenerate.tolist()
    reasons = [""] * len(blank)
    if maps.dead is not None:
        relu = explainers.get(parse_call(method)[0]).card.relu != "none"
        nothing = (maps.values <= 0).flatten(1).all(1).tolist()
        for i, dead in enumerate(maps.dead.tolist()):
            if blank[i]:
                reasons[i] = plan.DEAD_LAYER if dead else plan.NO_EVIDENCE if nothing[i] and relu else ""
    yield MetricResults(method, plan.PER_MAP[0], list(map(float, blank)), reasons)
    if maps.error is not None and maps.passes is not None:
        yield MetricResults(method, "map_passes", maps.passes.double().tolist(), [""] * len(blank))
        errors = uncertainty(maps.values, maps.error.to(maps.values)).double().tolist()
        values = [value if math.isfinite(value) else math.nan for value in errors]
        yield MetricResults(method, "map_error", values, [TOO_FEW * math.isnan(v) for v in values])


def _parts(request: MetricRequest, scores: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The request's own number among those its function returns, or all of them, under longer names."""
    own = next((name for name in (request.entry.name, *request.entry.aliases) if name in scores), None)
    prefix = f"{own}_" if own else ""
    if own:
        yield request.text, own
    for part in scores:  # beside an own number, the curve behind an area, and how well it is known
        if not own or part.startswith((f"{prefix}at_", f"{prefix}error", f"{prefix}points")):
            yield request.named(part.removeprefix(prefix)), part


class HeadOutput(NamedTuple):
    """Explained scalars of a head without classes, image by image."""

    values: Tensor  # "b"
    chances: Tensor | None  # "b", where there is a probability

    @staticmethod
    def of(model: Model, logits: Tensor, explained: Tensor) -> HeadOutput | None:
        """None for heads that predict classes, whose rows come from the logits, or without logits."""
        head = model.head
        if head.names_classes or not len(logits):
            return None
        columns = explained.clamp(min=0).to(logits.device)
        if isinstance(head, Dense):
            columns = head.columns(columns, logits.device).numbers
        chances = head.measured(logits, columns).cpu() if head.chance else None
        return HeadOutput(head.scores(logits, columns).cpu(), chances)


@dataclass(frozen=True)
class RowMaker:
    """Makes rows about one checkpoint of a model: of a run, of a monitor, of compared checkpoints."""

    model: str
    checkpoint: str

    def row(
        self, image: str, label: int | None, explained: int | None, method: str, metric: str, value: float,
        reason: str = "",
    ) -> Score:  # fmt: skip
        return Score(self.model, self.checkpoint, image, label, explained, method, metric, value, reason)

    def about(self, method: str, label: int | None, metric: str, value: float, reason: str = "") -> Score:
        """A row about a class, or about all images where the label is None."""
        return self.row("", label, label, method, metric, float(value), reason)

    def broken(self, failures: Sequence[Failure], labels: Mapping[str, int | None]) -> Iterator[Score]:
        for failure in failures:
            yield self.row(failure.id, labels.get(failure.id), None, "", "image", math.nan, failure.reason)

    def predictions(self, batch: Batch, logits: Tensor) -> Iterator[Score]:
        chances, guesses = probabilities(logits).double().tolist(), predicted(logits).tolist()
        for i, (name, label) in enumerate(zip(batch.ids, labels_of(batch), strict=True)):
            guess = None if any(map(math.isnan, chances[i])) else int(guesses[i])
            every = range(len(chances[i]))
            named = sorted(c for c in {label, guess} if c is not None)
            for c in every if len(every) <= ALL_CLASSES_UP_TO else named:
                reason = NO_ANSWER if math.isnan(chances[i][c]) else ""
                yield self.row(name, label, c, "", "probability", chances[i][c], reason)
            value, reason = (math.nan, NO_ANSWER) if guess is None else (float(guess), "")
            yield self.row(name, label, guess, "", "predicted", value, reason)

    def label_predictions(self, batch: Batch, logits: Tensor, positive: Tensor) -> Iterator[Score]:
        """Multi-label predictions. positive: "b k" bool, the labels that reach their thresholds."""
        chances = logits.sigmoid().double().tolist()
        truth = torch.zeros_like(positive) if batch.findings is None else batch.findings
        for i, name in enumerate(batch.ids):
            own: list[int | None] = [c if there else None for c, there in enumerate(truth[i].tolist())]
            own += [None] * (len(chances[i]) - len(own))  # the images' list may name fewer than the network
            for c, chance in enumerate(chances[i]):
                reason = NO_ANSWER if math.isnan(chance) else ""
                yield self.row(name, own[c], c, "", "probability", chance, reason)
            if any(map(math.isnan, chances[i])):
                yield self.row(name, None, None, "", "predicted", math.nan, NO_ANSWER)
                continue
            for c in positive[i].nonzero().flatten().tolist():
                yield self.row(name, own[c], c, "", "predicted", float(c))
            if not positive[i].any():
                yield self.row(name, None, None, "", "predicted", NONE_PREDICTED, NONE_ABOVE)

    def values(self, batch: Batch, output: HeadOutput, explained: Tensor) -> Iterator[Score]:
        """Predictions of a head without classes."""
        columns = zip(batch.ids, labels_of(batch), explained.tolist(), output.values.tolist(), strict=True)
        for i, (name, label, target, value) in enumerate(columns):
            c, reason = target if target >= 0 else None, "" if math.isfinite(value) else NO_ANSWER
            yield self.row(name, label, c, "", "value", math.nan if reason else value, reason)
            if output.chances is not None:
                yield self.row(name, label, c, "", "probability", float(output.chances[i]), reason)
            guess = math.nan if reason else float(target)
            yield self.row(name, label, None if reason else c, "", "predicted", guess, reason)

    def metrics(self, results: Sequence[MetricResults], batch: Batch, targets: Tensor) -> Iterator[Score]:
        labels, explained = labels_of(batch), [c if c >= 0 else None for c in targets.tolist()]
        for method, metric, values, reasons in results:
            for i, (value, reason) in enumerate(zip(values, reasons, strict=True)):
                yield self.row(batch.ids[i], labels[i], explained[i], method, metric, value, reason)


def labels_of(batch: Batch) -> list[int | None]:
    if batch.labels is None:
        return [None] * len(batch.ids)
    return [None if label < 0 else label for label in batch.labels.tolist()]


def group_rows(
    folder: RunFolder, unit: plan.PlannedUnit, ids: Sequence[str], model: str, device: str = "cpu",
    image_pool: Callable[[], ImagePool] | None = None, records: dict[Path, Mapping[str, Any]] | None = None,
) -> list[Score]:  # fmt: skip
    """The rows of a group unit.

    Args:
        ids: of all images, in the source's order.
        model: its name in the rows.
        device: where pairs of maps are compared.
        image_pool: for metrics that run the network.
        records: receives further files of the unit, by path.
    """
    if unit.among:
        return list(_checkpoint_comparison(folder, unit, model, device))
    predictions = read_predictions(folder, unit.checkpoint, tuple(map(valid_unicode, ids)))
    group = _StoredGroup(
        folder, unit, predictions, folder.maps(), device, image_pool, {} if records is None else records
    )
    rows, requests = RowMaker(model, unit.checkpoint), read_metrics(unit.metrics)
    return [rows.about(method, *cell) for request in requests for method, cell in group.cells(request)]


def _checkpoint_comparison(
    folder: RunFolder, unit: plan.PlannedUnit, model: str, device: str
) -> Iterator[Score]:
    """Rows of a metric that compares each checkpoint with the last one, on the images that both have."""
    (method,), (request,), maps = unit.methods, read_metrics(unit.metrics), folder.maps()
    *earlier, last = unit.among
    options, at_last = dict(request.options), RowMaker(model, last)

    def both(checkpoint: str, names: Sequence[str]) -> list[Maps]:
        return [maps.read(c, method, names).to(device) for c in (checkpoint, last)]

    shared = {checkpoint: maps.shared([(checkpoint, method), (last, method)]) for checkpoint in earlier}
    if "labels" in request.entry.needs:  # at each earlier checkpoint, from the images' classes
        predictions = read_predictions(folder, last)
        for checkpoint, names in shared.items():
            rows = RowMaker(model, checkpoint)
            names = [name for name in names if name in predictions.places]
            if not names:
                yield rows.about(method, None, request.text, math.nan, NO_PAIR)
                continue
            pair = both(checkpoint, names)
            labels = pair[1].explained.cpu()
            if predictions.limits is None:
                labels = torch.from_numpy(predictions.labels[[predictions.places[name] for name in names]])
            result = request.entry.function(*pair, labels, **options)
            yield from (rows.about(method, *cell) for cell in cells(request, result))
        return
    ssims: list[float] = []
    is_same: list[bool] = []
    for checkpoint, names in shared.items():
        before = len(ssims)
        for start in range(0, len(names), PART):
            first, second = both(checkpoint, names[start : start + PART])
            pairs = checkpoint_pairs(first, second)
            ssims += pairs.ssim.tolist()
            is_same += pairs.same.tolist()
        defined = [value for value in ssims[before:] if not math.isnan(value)]
        value = float(np.mean(defined)) if defined else math.nan
        reason = NO_PAIR if not names else "" if defined else f"on every image {REASONS[1]}"
        yield RowMaker(model, checkpoint).about(method, None, f"cose_to({last})", value, reason)
    same, values = np.array(is_same, bool), np.array(ssims, np.float64)
    images = np.array([name for names in shared.values() for name in names], dtype=object)
    of_pairs = values[same], values[~same], images[same], images[~same]
    result = request.entry.function(*of_pairs, seed=unit.seed, **options)
    yield from (at_last.about(method, *cell) for cell in cells(request, result))


@dataclass(frozen=True)
class _StoredGroup:
    """Stored maps and predictions that the metrics of a group unit read."""

    folder: RunFolder
    unit: plan.PlannedUnit
    predictions: StoredPredictions
    maps: MapStore
    device: str
    image_pool: Callable[[], ImagePool] | None = None
    records: dict[Path, Mapping[str, Any]] = field(default_factory=dict)  # further files of the unit

    def cells(self, request: MetricRequest) -> Iterator[tuple[str, Cell]]:
        """By method: the numbers of a metric, or NaN with the reason."""
        ids = self.predictions.ids
        if ids and request.entry.pairs:
            yield from self._pairs(request)
        elif ids and request.runs_network:
            yield from self._run(request)
        else:
            for method in self.unit.methods or ("",):
                names = self._stored(method) if method and ids else []
                if not ids or (method and not names):
                    yield method, (None, request.text, math.nan, NO_STORED_MAP if ids else NO_IMAGE)
                    continue
                maps = self.maps.read(self.unit.checkpoint, method, names) if names else None
                yield from ((method, cell) for cell in cells(request, self._call(request, maps)))

    def _call(self, request: MetricRequest, maps: Maps | None) -> Any:
        """The metric's result, by the entry's `call` or by its function with arguments by name."""
        entry, options, stored = request.entry, dict(request.options), self.predictions
        is_multilabel = stored.limits is not None
        if is_multilabel and maps is not None:  # of labels that the images have
            rows = [stored.places[name] for name in maps.ids]
            maps = maps.take(torch.from_numpy(stored.labels[rows, maps.explained.cpu().numpy()]))
        chosen = list(range(len(stored.ids))) if maps is None else [stored.places[name] for name in maps.ids]
        every = torch.from_numpy(stored.labels), torch.from_numpy(stored.probabilities)
        labels, probabilities = (table[chosen] for table in every)
        if is_multilabel and maps is not None:
            labels = maps.explained.cpu()
        if entry.call:

            def at(anchor: str) -> Tensor:
                """Probabilities of these images at another checkpoint."""
                return torch.from_numpy(anchor_probabilities(self.folder, anchor, stored.ids)[chosen])

            on_device, tables = (
                None if maps is None else maps.to(self.device),
                every if is_multilabel else None,
            )
            context = CheckpointContext(
                on_device, labels, probabilities, self.unit.seed, at, stored.limits, tables, chosen
            )
            return entry.call(entry.function, context, options)
        offered = {"maps": maps, "labels": labels, "probabilities": probabilities}
        return entry.function(**{name: offered[name] for name in entry.needs}, **options)

    def _run(self, request: MetricRequest) -> Iterator[tuple[str, Cell]]:
        """Run a metric that needs the network, for all methods at once; NaN if the images do not suffice."""
        assert self.image_pool is not None and request.entry.call is not None
        by_method: dict[str, PerImage] = {}
        why = ""
        # A unit about the network has no methods of its own.
        methods = runnable(request, self.unit.methods or self.folder.manifest.config["methods"])
        try:
            if methods or not request.per_method:
                pool = replace(self.image_pool(), methods=tuple(methods))
                by_method = request.entry.call(request.entry.function, pool, dict(request.options))
        except HeatproofError as error:
            why = str(error)
        if isinstance(by_method, EvidenceRecord):  # about the network, whichever maps chose its patches
            record = replace(by_method, checkpoint=self.unit.checkpoint)
            path = evidence_file(self.folder.path, record.checkpoint, request.text)
            self.records[path] = record.as_json()
            yield from (("", cell) for cell in cells(request, record.scores))
            return
        if not request.per_method:
            yield "", (None, request.text, math.nan, why or NOT_DEFINED)
            return
        for method in self.unit.methods:
            scores = by_method.get(method, PerImage({part: torch.empty(0) for part in request.entry.parts}))
            reason = why if method in methods else READ
            for part, values in scores.items():  # the mean of each part, its number and its interval
                defined = values[~values.isnan()].double().numpy()
                value = float(defined.mean()) if len(defined) else math.nan
                why_not = reason or next(filter(None, scores.reasons(part)), NOT_DEFINED)
                yield method, (None, request.named(part), value, "" if len(defined) else why_not)
                yield method, (None, request.named(f"{part}_n"), float(len(defined)), "")
                for end, bound in zip(("low", "high"), mean_interval(defined), strict=True):
                    unknown = "there is no interval" * math.isnan(bound)
                    yield method, (None, request.named(f"{part}_{end}"), bound, unknown)

    def _pairs(self, request: MetricRequest) -> Iterator[tuple[str, Cell]]:
        """Pairs of methods in which at least one is the unit's own."""
        names = (*self.unit.beside, *self.unit.methods)
        pairs = [(a, b) for k, b in enumerate(names) for a in names[:k] if b in self.unit.methods]
        if not pairs:
            yield names[0], (None, request.text, math.nan, "agreement needs the maps of at least two methods")
            return
        stored = [set(self._stored(name)) for name in names]
        shared = [name for name in self.predictions.places if all(name in ids for ids in stored)]
        if not shared:
            for a, b in pairs:
                yield f"{a} ~ {b}", (None, request.text, math.nan, NO_COMMON_IMAGE)
            return
        maps = {m: self.maps.read(self.unit.checkpoint, m, shared).to(self.device) for m in names}
        result = request.entry.function(maps, **dict(request.options))
        for a, b in pairs:
            for kind in request.entry.parts:
                value = getattr(result, kind)[a, b]
                reason = "on every image one of the two maps is constant" if math.isnan(value) else ""
                yield f"{a} ~ {b}", (None, request.named(kind), value, reason)

    def _stored(self, method: str) -> list[str]:
        """Images with a stored map of a method, in the source's order."""
        names = list(self.predictions.places)
        known = self.maps.known(self.unit.checkpoint, method, names)
        return [name for name, is_known in zip(names, known, strict=True) if is_known]


def cells(request: MetricRequest, result: Any) -> Iterator[Cell]:
    """The numbers of a metric's result with their labels; label None for all classes together."""
    if isinstance(result, PerClass):
        for label, score in [(None, result), *result.classes.items()]:
            if not isinstance(score, PerClass):
                reason = (result.reason or "no image of this class, or none beside it") * math.isnan(score)
                yield label, request.text, score, reason
                continue
            yield label, request.text, score.value, score.reason or NOT_DEFINED * math.isnan(score.value)
            for part, value in score.parts.items():
                if isinstance(value, float):
                    why = "there is no interval" if part in ("low", "high") else NOT_DEFINED
                    reason = (score.reason or why) * math.isnan(value)
                    yield label, request.named(part), value, reason
    else:
        by_class = request.entry.level == "class"
        try:
            values = dict(result) if by_class else {None: result}
            numbers = [(None if c is None else int(c), float(value)) for c, value in values.items()]
        except (TypeError, ValueError) as error:
            wanted = "a number for each class, such as {0: 0.5, 1: 0.7}" if by_class else "one number"
            raise InputError(f"{request.entry.name} must return {wanted}; got {result!r:.60}") from error
        yield from ((label, request.text, value, NOT_DEFINED * math.isnan(value)) for label, value in numbers)
