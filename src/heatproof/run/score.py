"""Maps of one unit, and the one maker of rows, whoever writes them.

Metrics read maps as the store gives them back (half precision, see store/maps.py), also in the unit that
computes the maps: a metric that is added later then gets the same number to the last bit.

Rows beside the metrics, each about one image:
    image         NaN with the reason, for a picture that could not be used; it has no other row
    probability   of class `explained`: every class up to 100 of them, else the true and the predicted one
    predicted     the predicted class; NaN with the reason where the model's output is NaN
    degenerate    1 where the map is constant, else 0; for each method, so its mean is the share of such maps.
                  For maps that are read from a layer, the reason says which of the two a constant one means:
                  no positive evidence for the explained class, or a layer that says the same everywhere
    map_passes    inputs that the map took, and
    map_error     the standard error of its strongest fifth as a share of that part's height above the map's
                  mean: both for methods that draw, such as rise and lime
    insertion_at_0 .. insertion_at_100, deletion_at_...   the curve behind an area, by per cent of the pixels;
                  where its points were chosen as it went, insertion_points, how many of both curves' were
                  visited, and insertion_error, how far the area may be off
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from heatproof.images import Failure
from heatproof.metrics.scene import BatchContext
from heatproof.models import predicted, probabilities
from heatproof.registry import explainers, parse_call
from heatproof.run.measure import MetricResults, measure, on_host
from heatproof.run.metrics import MetricRequest
from heatproof.run.plan import DEAD_LAYER, NO_EVIDENCE, PER_MAP
from heatproof.run.study import ALL_CLASSES_UP_TO
from heatproof.store.maps import halved, restored
from heatproof.types import Batch, Maps, Score

NO_ANSWER = "the network's output is NaN or infinite for this image"
NO_MAP = "there is no map: the model's output or the map has NaN or infinite values"
NOT_FINITE = "the map has NaN or infinite values"
NOT_DEFINED = "the metric is not defined here"
TOO_FEW = "too few draws to say how far the map may be off"


def as_stored(maps: Maps) -> Maps:
    """The maps as they come back from the store."""

    def round_trip(values: Tensor) -> Tensor:
        return restored(*halved(values))

    signed = None if maps.signed_values is None else round_trip(maps.signed_values)
    return replace(maps, values=round_trip(maps.values), signed_values=signed)


@dataclass(frozen=True)
class RowMaker:
    """Makes every row about one checkpoint of a model: of a run, of a monitor, of checkpoints compared."""

    model: str
    checkpoint: str

    def broken(self, failures: Sequence[Failure], labels: Mapping[str, int | None]) -> Iterator[Score]:
        for failure in failures:
            yield self.row(failure.id, labels.get(failure.id), None, "", "image", math.nan, failure.reason)

    def answers(self, batch: Batch, logits: Tensor) -> Iterator[Score]:
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

    def scores(self, metrics: Sequence[str], scene: BatchContext) -> Iterator[Score]:
        """Metrics of the scene's maps, method by method; a map that is not finite is scored NaN."""
        findings = measure(metrics, scene)
        given = on_host([*findings.tensors()])
        return self.found(findings.fetched(iter(given)), scene.batch, scene.targets)

    def found(
        self, findings: MetricResults, batch: Batch, targets: Tensor, unanswered: Tensor | None = None
    ) -> Iterator[Score]:
        """The rows of findings that were fetched. unanswered: "b", images whose output is not finite."""
        lost = [False] * len(batch.ids) if unanswered is None else unanswered.tolist()
        bad = {method: where.tolist() for method, where in findings.bad.items()}
        labels, explained = labels_of(batch), [c if c >= 0 else None for c in targets.tolist()]
        for method, metric, values, reasons in _values(findings):
            for i, value in enumerate(values.double().tolist()):
                reason = reasons[i]
                if bad[method][i]:
                    other = NO_MAP if explained[i] is None else NOT_FINITE
                    value, reason = math.nan, NO_ANSWER if lost[i] else other
                elif math.isnan(value):
                    reason = reason or NOT_DEFINED
                yield self.row(batch.ids[i], labels[i], explained[i], method, metric, value, reason)

    def about(self, method: str, label: int | None, metric: str, value: float, reason: str = "") -> Score:
        """A row about a class, or about all images where the label is None."""
        return self.row("", label, label, method, metric, float(value), reason)

    def row(
        self, image: str, label: int | None, explained: int | None, method: str, metric: str, value: float,
        reason: str = "",
    ) -> Score:  # fmt: skip
        return Score(self.model, self.checkpoint, image, label, explained, method, metric, value, reason)


def _values(findings: MetricResults) -> Iterator[tuple[str, str, Tensor, Sequence[str]]]:
    for method, maps in findings.blank.items():
        yield method, PER_MAP[0], maps.degenerate, _why_blank(maps)
        if maps.error is not None and maps.passes is not None:
            told = maps.error.isfinite()
            yield method, "map_passes", maps.passes, [""] * len(maps)
            yield (
                method,
                "map_error",
                maps.error.where(told, math.nan),
                ["" if t else TOO_FEW for t in told.tolist()],
            )
    for request, method, scores in findings.found:
        for name, part in _parts(request, scores):
            yield method, name, scores[part], scores.reasons(part)


def _why_blank(maps: Maps) -> list[str]:
    """For each map that is constant, what the activations say; "" where they are not known or say neither."""
    if maps.dead is None:
        return [""] * len(maps)
    cut = explainers.get(parse_call(maps.method)[0]).card.relu != "none"
    nothing = (maps.values <= 0).flatten(1).all(1)
    lots = (one.tolist() for one in (maps.degenerate, maps.dead, nothing))
    return [
        "" if not blank else DEAD_LAYER if dead else NO_EVIDENCE if none and cut else ""
        for blank, dead, none in zip(*lots, strict=True)
    ]


def labels_of(batch: Batch) -> list[int | None]:
    if batch.labels is None:
        return [None] * len(batch.ids)
    return [None if label < 0 else label for label in batch.labels.tolist()]  # of a finding that is not there


def _parts(request: MetricRequest, found: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The request's own number among those its function returns, or all of them, under longer names."""
    own = next((name for name in (request.entry.name, *request.entry.aliases) if name in found), None)
    if own:
        yield request.text, own
        for part in found:  # the curve behind an area, and how well it is known
            if part.startswith(tuple(f"{own}_{end}" for end in ("at_", "error", "points"))):
                yield request.named(part.removeprefix(f"{own}_")), part
    else:
        for part in found:
            yield request.named(part), part
