"""Rows about all images of a checkpoint, and about several checkpoints, from the store: no model pass.

cscore            image '', label c: the class; label NULL: all classes together. With it come cscore_n (size
                  of the gold list), cscore_low and cscore_high (95 % interval), cscore_degenerate
accuracy, recall, auc    label NULL: all images; label c, where there is one: the class
method_agreement  method "a ~ b", mean over images: method_agreement_spearman, _ssim and _overlap
grid_pointing, disconnected_grid    means over mosaics of some of the pictures, each with its n, low and high;
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
from heatproof.run.answers import StoredAnswers, anchor_answers, anchor_of, read_answers
from heatproof.run.external_methods import READ, runnable
from heatproof.run.metrics import MetricRequest, read_metrics
from heatproof.run.plan import Task
from heatproof.run.score import NOT_DEFINED, RowMaker
from heatproof.store import MapStore, RunFolder
from heatproof.types import Maps, Score

NO_IMAGE = "no image of this checkpoint could be used"
NO_COMMON_IMAGE = "no image has a map of every method"
NO_MAP = "no map of this method could be stored"
NO_PAIR = "no image has a map at both checkpoints"
PART = 256  # images compared at a time, so that memory does not grow with the run
Cell = tuple[int | None, str, float, str]  # label, metric, value, reason


def group_rows(
    folder: RunFolder, task: Task, ids: Sequence[str], model: str, device: str = "cpu",
    gallery: Callable[[], ImagePool] | None = None,
) -> list[Score]:  # fmt: skip
    """The rows of one group task; pairs of maps are compared on the device. gallery: for metrics that ask."""
    answers = read_answers(folder, task.unit.checkpoint, tuple(map(valid_unicode, ids)))
    group = _Stored(folder, task, answers, folder.maps(), device, gallery)
    rows = RowMaker(model, task.unit.checkpoint)
    requests = read_metrics(task.unit.metrics)
    return [rows.about(method, *cell) for request in requests for method, cell in group.cells(request)]


def across_rows(folder: RunFolder, task: Task, model: str, device: str = "cpu") -> list[Score]:
    """The rows of one group task that compares checkpoints: one pair per image, with the last checkpoint."""
    (method,), (request,) = task.unit.methods, read_metrics(task.unit.metrics)
    *earlier, last = task.among
    maps, rows = folder.maps(), []
    if "labels" in request.entry.needs:
        return _by_class_across(folder, task, request, model, device)
    ssims: list[float] = []
    same: list[bool] = []
    names: list[str] = []
    for checkpoint in earlier:
        shared = maps.shared([(checkpoint, method), (last, method)])
        before = len(ssims)
        for start in range(0, len(shared), PART):
            part = shared[start : start + PART]
            first, second = (maps.read(one, method, part).to(device) for one in (checkpoint, last))
            pairs = checkpoint_pairs(first, second)
            ssims += pairs.ssim.tolist()
            same += pairs.same.tolist()
        names += shared
        defined = [value for value in ssims[before:] if not math.isnan(value)]
        value = float(np.mean(defined)) if defined else math.nan
        reason = NO_PAIR if not shared else "" if defined else f"on every image {REASONS[1]}"
        rows.append(RowMaker(model, checkpoint).about(method, None, f"cose_to({last})", value, reason))
    images, kept, values = np.array(names, dtype=object), np.array(same, bool), np.array(ssims, np.float64)
    found = request.entry.function(
        values[kept], values[~kept], images[kept], images[~kept], seed=task.unit.seed, **dict(request.options)
    )
    end = RowMaker(model, last)
    return [*rows, *(end.about(method, *cell) for cell in cells(request, found))]


def _by_class_across(
    folder: RunFolder, task: Task, request: MetricRequest, model: str, device: str
) -> list[Score]:
    """At each earlier checkpoint: its maps and those of the last one, with the images' classes."""
    (method,), (*earlier, last) = task.unit.methods, task.among
    maps, answers = folder.maps(), read_answers(folder, last)
    known, rows = answers.places, []
    for checkpoint in earlier:
        of = RowMaker(model, checkpoint)
        shared = [name for name in maps.shared([(checkpoint, method), (last, method)]) if name in known]
        if not shared:
            rows.append(of.about(method, None, request.text, math.nan, NO_PAIR))
            continue
        both = [maps.read(one, method, shared).to(device) for one in (checkpoint, last)]
        labels = both[1].explained.cpu()
        if answers.limits is None:
            labels = torch.from_numpy(answers.labels[[known[name] for name in shared]])
        found = request.entry.function(*both, labels, **dict(request.options))
        rows += [of.about(method, *cell) for cell in cells(request, found)]
    return rows


@dataclass(frozen=True)
class _Stored:
    """What a group task reads."""

    folder: RunFolder
    task: Task
    answers: StoredAnswers
    maps: MapStore
    device: str
    gallery: Callable[[], ImagePool] | None = None

    def cells(self, request: MetricRequest) -> Iterator[tuple[str, Cell]]:
        """By method: what the metric says about its maps, or why it says nothing."""
        if self.answers.ids and request.entry.pairs:
            yield from self._pairs(request)
            return
        if self.answers.ids and request.shown:
            yield from self._shown(request)
            return
        for method in self.task.unit.methods or ("",):
            maps = self._read(method) if method and self.answers.ids else None
            if not self.answers.ids or (method and maps is None):
                yield method, (None, request.text, math.nan, NO_MAP if self.answers.ids else NO_IMAGE)
            else:
                yield from ((method, cell) for cell in cells(request, self._call(request, maps)))

    def _call(self, request: MetricRequest, maps: Maps | None) -> Any:
        """By name with what it needs, where its entry does not say how."""
        entry, options, answers = request.entry, dict(request.options), self.answers
        is_multilabel = answers.limits is not None
        if is_multilabel and maps is not None:  # of findings that are there
            rows = [answers.places[name] for name in maps.ids]
            maps = maps.take(torch.from_numpy(answers.labels[rows, maps.explained.cpu().numpy()]))
        chosen = (
            [answers.places[name] for name in maps.ids] if maps is not None else list(range(len(answers.ids)))
        )
        told = torch.from_numpy(answers.labels), torch.from_numpy(answers.probabilities)
        labels, probabilities = (one[chosen] for one in told)
        if is_multilabel and maps is not None:
            labels = maps.explained.cpu()
        if entry.call:
            there = None if maps is None else maps.to(self.device)
            at, seed = partial(self._at, chosen), self.task.unit.seed
            every = told if is_multilabel else None
            group = CheckpointContext(there, labels, probabilities, seed, at, answers.limits, every, chosen)
            return entry.call(entry.function, group, options)
        offered = {"maps": maps, "labels": labels, "probabilities": probabilities}
        return entry.function(**{name: offered[name] for name in entry.needs}, **options)

    def _at(self, rows: Sequence[int], anchor: str) -> Tensor:
        """What the network said about these images at another checkpoint."""
        checkpoint = anchor_of(anchor, list(self.folder.manifest.models))
        return torch.from_numpy(anchor_answers(self.folder, checkpoint, self.answers.ids)[list(rows)])

    def _shown(self, request: MetricRequest) -> Iterator[tuple[str, Cell]]:
        """Of all methods at once; what cannot be measured on these pictures is NaN, with the reason."""
        assert self.gallery is not None and request.entry.call is not None
        found: dict[str, PerImage] = {}
        why = ""
        methods = runnable(request, self.task.unit.methods)
        try:
            gallery = replace(self.gallery(), methods=tuple(methods))
            found = (
                request.entry.call(request.entry.function, gallery, dict(request.options)) if methods else {}
            )
        except HeatproofError as error:
            why = str(error)
        for method in self.task.unit.methods:
            scores = found.get(method, PerImage({part: torch.empty(0) for part in request.entry.parts}))
            reason = why if method in methods else READ
            yield from ((method, cell) for cell in _mean_cells(request, scores, reason))

    def _pairs(self, request: MetricRequest) -> Iterator[tuple[str, Cell]]:
        """Pairs in which at least one method is the task's own."""
        names = (*self.task.beside, *self.task.unit.methods)
        pairs = [(a, b) for k, b in enumerate(names) for a in names[:k] if b in self.task.unit.methods]
        if not pairs:
            yield names[0], (None, request.text, math.nan, "a single method agrees with nobody")
            return
        stored = [set(self._stored(name)) for name in names]
        shared = [name for name in self.answers.places if all(name in one for one in stored)]
        if not shared:
            for a, b in pairs:
                yield f"{a} ~ {b}", (None, request.text, math.nan, NO_COMMON_IMAGE)
            return
        read = {name: self.maps.read(self.task.unit.checkpoint, name, shared) for name in names}
        lots = {name: one.to(self.device) for name, one in read.items()}
        found = request.entry.function(lots, **dict(request.options))
        for a, b in pairs:
            for kind in request.entry.parts:
                value = getattr(found, kind)[a, b]
                reason = "on every image one of the two maps is constant" if math.isnan(value) else ""
                yield f"{a} ~ {b}", (None, request.named(kind), value, reason)

    def _read(self, method: str) -> Maps | None:
        """All stored maps of a method, in the source's order."""
        ids = self._stored(method)
        return self.maps.read(self.task.unit.checkpoint, method, ids) if ids else None

    def _stored(self, method: str) -> list[str]:
        names = list(self.answers.places)
        known = self.maps.known(self.task.unit.checkpoint, method, names)
        return [name for name, there in zip(names, known, strict=True) if there]


def cells(request: MetricRequest, found: Any) -> Iterator[Cell]:
    """What a metric found as numbers with their label: None is for all classes together."""
    if isinstance(found, PerClass):
        return _class_cells(request, found)
    by_class = request.entry.level == "class"
    try:
        values = dict(found) if by_class else {None: found}
        numbers = [(None if c is None else int(c), float(value)) for c, value in values.items()]
    except (TypeError, ValueError) as error:
        wanted = "a number for each class, such as {0: 0.5, 1: 0.7}" if by_class else "one number"
        raise InputError(f"{request.entry.name} must return {wanted}; got {found!r:.60}") from error
    return ((label, request.text, value, NOT_DEFINED * math.isnan(value)) for label, value in numbers)


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


def _class_cells(request: MetricRequest, result: PerClass) -> Iterator[Cell]:
    """The score over all images and by class, each with its parts that are floats."""
    for label, score in [(None, result), *result.classes.items()]:
        if not isinstance(score, PerClass):
            why = result.reason or "no image of this class, or none beside it"
            yield label, request.text, score, why * math.isnan(score)
            continue
        yield label, request.text, score.value, score.reason or NOT_DEFINED * math.isnan(score.value)
        for part, value in score.parts.items():
            if isinstance(value, float):
                why = score.reason or "there is no interval"
                yield label, request.named(part), value, why * math.isnan(value)
