"""Metrics of the maps of a batch, and the rows of a unit, for everything that writes a run folder.

Metrics read maps as the store returns them (half precision, see store/maps.py), also in the unit that
computes the maps: a metric that is added later then gets the same number to the last bit.

Rows beside the metrics, each about one image:
    image         NaN with the reason, for an image that could not be read; it has no other row
    probability   of class `explained`: every class up to 100 of them, else the true and the predicted one;
                  multi-label: of every label, which `label` repeats where the image has it
    predicted     the predicted class; NaN with the reason where the model's output is NaN;
                  multi-label: one for each label that reaches its threshold, else -1 and a sentence
    value         of a head without classes (models/heads.py): the explained scalar, such as a regression's
                  value, a similarity, the sum of logits in a region, a box's score; `probability` where the
                  head has one, `predicted` the number of the value, reference or class
    degenerate    1 where the map is constant, else 0; for each method, so its mean is the share of such maps.
                  For maps that are read from a layer, the reason says which of the two a constant one means:
                  no positive evidence for the explained class, or a layer that is the same everywhere
    map_passes    inputs that the map took, and
    map_error     the standard error of its strongest fifth as a share of that part's height above the map's
                  mean: both for methods that draw, such as rise and lime
    insertion_at_0 .. insertion_at_100, deletion_at_...   the curve behind an area, by per cent of the pixels;
                  where its points were chosen as it went, insertion_points, how many of both curves' were
                  visited, and insertion_error, how far the area may be off

Multi-label rows about maps have the image IMAGE#LABEL: every label of an image is a row of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from heatproof.errors import InputError
from heatproof.explain.api import is_stored
from heatproof.explain.masking import uncertainty
from heatproof.images import Failure
from heatproof.metrics.kit import Cause, PerImage, blanked, finite
from heatproof.metrics.scene import BatchContext
from heatproof.models import predicted, probabilities
from heatproof.models.dense_heads import Dense
from heatproof.models.model import Model
from heatproof.registry import explainers, parse_call
from heatproof.run.metrics import MetricRequest, read_metrics
from heatproof.run.plan import ANSWERS, DEAD_LAYER, NO_EVIDENCE, PER_MAP
from heatproof.run.study import ALL_CLASSES_UP_TO
from heatproof.store.maps import halved, restored
from heatproof.timeline import span
from heatproof.types import Batch, Maps, Score

NO_ANSWER = "the network's output is NaN or infinite for this image"
NO_MAP = "there is no map: the model's output or the map has NaN or infinite values"
NOT_FINITE = "the map has NaN or infinite values"
NOT_DEFINED = "the metric is not defined here"
TOO_FEW = "too few draws to say how far the map may be off"
NONE_ABOVE = "no finding reaches its threshold"
NONE_PREDICTED = -1.0
READ = "the method's maps are read from files, and this metric runs the method again"


def as_stored(maps: Maps) -> Maps:
    """The maps as the store returns them."""

    def round_trip(values: Tensor) -> Tensor:
        return restored(*halved(values))

    signed = None if maps.signed_values is None else round_trip(maps.signed_values)
    return replace(maps, values=round_trip(maps.values), signed_values=signed)


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
    requests = read_metrics([text for text in metrics if text not in (*ANSWERS, *PER_MAP)])
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
    if PER_MAP[0] in metrics:
        with span("metric", PER_MAP[0]):
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
        return {m: scores.get(m) or _not_runnable(request, len(maps)) for m, maps in context.maps.items()}
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


def _not_runnable(request: MetricRequest, count: int) -> PerImage:
    parts = tuple(request.entry.parts) or (request.entry.name,)
    nothing = torch.full((count,), torch.nan)
    return PerImage(dict.fromkeys(parts, nothing), [Cause(READ, torch.ones(count, dtype=torch.bool))])


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
                reasons[i] = DEAD_LAYER if dead else NO_EVIDENCE if nothing[i] and relu else ""
    yield MetricResults(method, PER_MAP[0], list(map(float, blank)), reasons)
    if maps.error is not None and maps.passes is not None:
        error = uncertainty(maps.values, maps.error.to(maps.values)).double().tolist()
        known = [math.isfinite(value) for value in error]
        yield MetricResults(method, "map_passes", maps.passes.double().tolist(), [""] * len(blank))
        values = [value if ok else math.nan for value, ok in zip(error, known, strict=True)]
        yield MetricResults(method, "map_error", values, ["" if ok else TOO_FEW for ok in known])


def _parts(request: MetricRequest, scores: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The request's own number among those its function returns, or all of them, under longer names."""
    own = next((name for name in (request.entry.name, *request.entry.aliases) if name in scores), None)
    if own:
        yield request.text, own
        for part in scores:  # the curve behind an area, and how well it is known
            if part.startswith(tuple(f"{own}_{end}" for end in ("at_", "error", "points"))):
                yield request.named(part.removeprefix(f"{own}_")), part
    else:
        for part in scores:
            yield request.named(part), part


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
