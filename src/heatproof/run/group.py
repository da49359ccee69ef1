"""Rows about all images of a checkpoint, and about several checkpoints, from the stored maps and predictions.

cscore            image '', label c: the class; label NULL: all classes together. With it come cscore_n (size
                  of the gold list), cscore_low and cscore_high (95 % interval), cscore_degenerate
accuracy, recall, auc    label NULL: all images; label c, where there is one: the class
method_agreement  method "a ~ b", mean over images: method_agreement_spearman, _ssim and _overlap
grid_pointing, disconnected_grid    means over mosaics of some of the images, each with its n, low and high;
                  these run the network again
cose              at the last checkpoint; with it cose_consistency, cose_sensitivity, cose_same and
                  cose_changed (numbers of pairs), cose_low and cose_high (95 % interval)
cose_to(LAST)     at each earlier checkpoint: mean SSIM of its maps with those of LAST. These must explain the
                  predicted class, so run.targets is "predicted"
any other         a plug-in's: label c for level "class", NULL for level "checkpoint"
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heatproof.disk import valid_unicode
from heatproof.errors import HeatproofError, InputError
from heatproof.metrics.results import PerClass, PerImage
from heatproof.metrics.scene import CheckpointContext, ImagePool
from heatproof.metrics.similarity import REASONS
from heatproof.metrics.stability import checkpoint_pairs
from heatproof.metrics.stats import mean_interval
from heatproof.run.metrics import MetricRequest, read_metrics
from heatproof.run.plan import PlannedUnit
from heatproof.run.predictions import StoredPredictions, anchor_of, anchor_probabilities, read_predictions
from heatproof.run.score import NOT_DEFINED, READ, RowMaker, runnable
from heatproof.store import MapStore, RunFolder
from heatproof.types import Maps, Score

NO_IMAGE = "no image of this checkpoint could be used"
NO_COMMON_IMAGE = "no image has a map of every method"
NO_MAP = "no map of this method could be stored"
NO_PAIR = "no image has a map at both checkpoints"
PART = 256  # images compared at a time, so that memory does not grow with the run
Cell = tuple[int | None, str, float, str]  # label, metric, value, reason


def group_rows(
    folder: RunFolder, unit: PlannedUnit, ids: Sequence[str], model: str, device: str = "cpu",
    image_pool: Callable[[], ImagePool] | None = None,
) -> list[Score]:  # fmt: skip
    """The rows of a group unit.

    Args:
        ids: of all images, in the source's order.
        model: its name in the rows.
        device: where pairs of maps are compared.
        image_pool: for metrics that run the network.
    """
    if unit.among:
        return list(_checkpoint_comparison(folder, unit, model, device))
    predictions = read_predictions(folder, unit.checkpoint, tuple(map(valid_unicode, ids)))
    group = _StoredGroup(folder, unit, predictions, folder.maps(), device, image_pool)
    rows = RowMaker(model, unit.checkpoint)
    requests = read_metrics(unit.metrics)
    return [rows.about(method, *cell) for request in requests for method, cell in group.cells(request)]


def _checkpoint_comparison(folder: RunFolder, unit: PlannedUnit, model: str, device: str) -> Iterator[Score]:
    """Rows of a metric that compares each checkpoint with the last one, on the images that both have."""
    (method,), (request,), maps = unit.methods, read_metrics(unit.metrics), folder.maps()
    *earlier, last = unit.among
    if "labels" in request.entry.needs:
        yield from _class_comparison(folder, unit, request, model, device)
        return
    ssims: list[float] = []
    is_same: list[bool] = []
    names: list[str] = []
    for checkpoint in earlier:
        shared = maps.shared([(checkpoint, method), (last, method)])
        before = len(ssims)
        for start in range(0, len(shared), PART):
            part = shared[start : start + PART]
            first, second = (maps.read(c, method, part).to(device) for c in (checkpoint, last))
            pairs = checkpoint_pairs(first, second)
            ssims += pairs.ssim.tolist()
            is_same += pairs.same.tolist()
        names += shared
        defined = [value for value in ssims[before:] if not math.isnan(value)]
        value = float(np.mean(defined)) if defined else math.nan
        reason = NO_PAIR if not shared else "" if defined else f"on every image {REASONS[1]}"
        yield RowMaker(model, checkpoint).about(method, None, f"cose_to({last})", value, reason)
    images, same, values = np.array(names, dtype=object), np.array(is_same, bool), np.array(ssims, np.float64)
    result = request.entry.function(
        values[same], values[~same], images[same], images[~same], seed=unit.seed, **dict(request.options)
    )
    rows = RowMaker(model, last)
    yield from (rows.about(method, *cell) for cell in cells(request, result))


def _class_comparison(
    folder: RunFolder, unit: PlannedUnit, request: MetricRequest, model: str, device: str
) -> Iterator[Score]:
    """At each earlier checkpoint: a metric of its maps, those of the last one, and the images' classes."""
    (method,), (*earlier, last) = unit.methods, unit.among
    maps, predictions = folder.maps(), read_predictions(folder, last)
    known = predictions.places
    for checkpoint in earlier:
        rows = RowMaker(model, checkpoint)
        shared = [name for name in maps.shared([(checkpoint, method), (last, method)]) if name in known]
        if not shared:
            yield rows.about(method, None, request.text, math.nan, NO_PAIR)
            continue
        both = [maps.read(c, method, shared).to(device) for c in (checkpoint, last)]
        labels = both[1].explained.cpu()
        if predictions.limits is None:
            labels = torch.from_numpy(predictions.labels[[known[name] for name in shared]])
        result = request.entry.function(*both, labels, **dict(request.options))
        yield from (rows.about(method, *cell) for cell in cells(request, result))


@dataclass(frozen=True)
class _StoredGroup:
    """Stored maps and predictions that the metrics of a group unit read."""

    folder: RunFolder
    unit: PlannedUnit
    predictions: StoredPredictions
    maps: MapStore
    device: str
    image_pool: Callable[[], ImagePool] | None = None

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
                    yield method, (None, request.text, math.nan, NO_MAP if ids else NO_IMAGE)
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
            on_device, seed = None if maps is None else maps.to(self.device), self.unit.seed
            at, tables = partial(self._probabilities_at, chosen), every if is_multilabel else None
            context = CheckpointContext(
                on_device, labels, probabilities, seed, at, stored.limits, tables, chosen
            )
            return entry.call(entry.function, context, options)
        offered = {"maps": maps, "labels": labels, "probabilities": probabilities}
        return entry.function(**{name: offered[name] for name in entry.needs}, **options)

    def _probabilities_at(self, rows: Sequence[int], anchor: str) -> Tensor:
        """Probabilities of these images at another checkpoint."""
        checkpoint = anchor_of(anchor, list(self.folder.manifest.models))
        return torch.from_numpy(
            anchor_probabilities(self.folder, checkpoint, self.predictions.ids)[list(rows)]
        )

    def _run(self, request: MetricRequest) -> Iterator[tuple[str, Cell]]:
        """Run a metric that needs the network, for all methods at once; NaN if the images do not suffice."""
        assert self.image_pool is not None and request.entry.call is not None
        by_method: dict[str, PerImage] = {}
        why = ""
        methods = runnable(request, self.unit.methods)
        try:
            if methods:
                pool = replace(self.image_pool(), methods=tuple(methods))
                by_method = request.entry.call(request.entry.function, pool, dict(request.options))
        except HeatproofError as error:
            why = str(error)
        for method in self.unit.methods:
            scores = by_method.get(method, PerImage({part: torch.empty(0) for part in request.entry.parts}))
            reason = why if method in methods else READ
            yield from ((method, cell) for cell in _mean_cells(request, scores, reason))

    def _pairs(self, request: MetricRequest) -> Iterator[tuple[str, Cell]]:
        """Pairs of methods in which at least one is the unit's own."""
        names = (*self.unit.beside, *self.unit.methods)
        pairs = [(a, b) for k, b in enumerate(names) for a in names[:k] if b in self.unit.methods]
        if not pairs:
            yield names[0], (None, request.text, math.nan, "a single method agrees with nobody")
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
                    reason = (score.reason or "there is no interval") * math.isnan(value)
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


def _mean_cells(request: MetricRequest, scores: PerImage, why: str) -> Iterator[Cell]:
    """The mean of each part, its number and its interval."""
    for part, values in scores.items():
        defined = values[~values.isnan()].double().numpy()
        value = float(defined.mean()) if len(defined) else math.nan
        reason = why or next(filter(None, scores.reasons(part)), NOT_DEFINED)
        yield None, request.named(part), value, "" if len(defined) else reason
        yield None, request.named(f"{part}_n"), float(len(defined)), ""
        for end, bound in zip(("low", "high"), mean_interval(defined), strict=True):
            yield None, request.named(f"{part}_{end}"), bound, "there is no interval" * math.isnan(bound)
