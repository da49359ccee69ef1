"""A monitored training as a run folder, so that report, gate and serve work on it during training.

Rows, units and names are those of a run (see run/plan.py): a checkpoint, epoch-NNN, belongs to the weights it
was measured with, and one that comes again with other weights is stored beside the first as
attempt2-epoch-NNN. Maps are stored in half precision; the C-Score rows are those of the full maps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heatproof.errors import InputError
from heatproof.metrics.classifier import ListRule
from heatproof.metrics.cscores import gold_list
from heatproof.metrics.kit import BatchContext
from heatproof.models import Model
from heatproof.monitor.measure import Answers, Measured, ValidationSet, undisturbed
from heatproof.run.config import read_metrics
from heatproof.run.engine import UnitGroup, UnitRows, compute_units
from heatproof.run.plan import PlannedUnit, make_plan
from heatproof.run.progress import Progress
from heatproof.run.score import RowMaker, cells, measure, only_finite
from heatproof.run.study import Checkpoint, weights_hash
from heatproof.show import Sheet, middle, pixels
from heatproof.store import Manifest, RunFolder
from heatproof.store.manifest import SEVERAL
from heatproof.store.scores import read_predictions, stored_limits
from heatproof.train.recipe import GradientNorm
from heatproof.types import Batch, Score, size_of
from heatproof.verdict.answers import Verdict
from heatproof.verdict.judge import MONITOR, conclude
from heatproof.verdict.trajectory import Trajectory, write_gradients

KNOWN = {"maps", "model", "images", "labels", "probabilities"}
FREE = ("model.spec", "run.device", "run.threads")  # may change when a run is resumed


class Recorder:
    """Writes the checkpoints of one training."""

    def __init__(
        self, path: str | PathLike[str], images: ValidationSet, methods: Sequence[str], *, batch_size: int,
        seed: int, rule: ListRule, layer: Any, metrics: Sequence[str] = (),
    ) -> None:  # fmt: skip
        for request in read_metrics(metrics):
            if request.group or not set(request.entry.needs) <= KNOWN:
                raise InputError(
                    f"a monitor cannot measure {request.text}; name metrics per image without boxes or masks"
                )
        self.path, self.images, self.layer, self.seed = Path(path), images, layer, seed
        config = {
            "kind": MONITOR,
            "methods": list(methods),
            "metrics": [rule.text, "accuracy", "recall", "f1", "auc", *metrics],
            "run": {"seed": seed, "batch_size": batch_size, "targets": "label"},
            "model": {"spec": "", "layer": layer if layer is None or isinstance(layer, str) else list(layer)},
            "images": {"kind": "memory", "count": len(images)},
        }
        if images.is_multilabel:
            limits = None if isinstance(rule.tau, str) else rule.tau
            config["model"] |= {"head": SEVERAL, "thresholds": limits}  # type: ignore[operator]
        self.manifest = Manifest.collect(config, seed=seed, data=images.hash, classes=images.classes)
        if (self.path / "run.json").exists():  # checked now rather than after the first epoch
            old = RunFolder.open(self.path).manifest
            RunFolder.resume(self.path, replace(self.manifest, models=old.models), free=FREE)
            self.manifest = replace(self.manifest, models=old.models)

    def trajectory(self) -> Trajectory | None:
        """The stored checkpoints; of an epoch that was measured twice, the later attempt."""
        if not self.manifest.models:
            return None
        folder = RunFolder.open(self.path)
        units, done = make_plan(folder.manifest, len(self.images)).units, folder.done()
        whole = self.manifest.models.keys() - {unit.checkpoint for unit in units if unit.hash not in done}
        if not whole:
            return None
        stored = Trajectory.from_run(folder)
        return replace(stored, checkpoints=tuple({c.epoch: c for c in stored if c.name in whole}.values()))

    def anchored(self, rule: ListRule) -> dict[str, Any] | None:
        """The gold list of the first stored checkpoint, by image."""
        first = next(iter(self.manifest.models), None)
        if first is None:
            return None
        stored = read_predictions(RunFolder.open(self.path), first)
        gold = gold_list(stored.labels, stored.probabilities, rule.tau)
        return dict(zip(stored.ids, gold.tolist(), strict=True))

    def write(
        self, model: Model, epoch: int, rows: Sequence[int], answers: Answers, measured: Measured,
        norms: Mapping[str, GradientNorm],
    ) -> str:  # fmt: skip
        """Store one checkpoint of the images in `rows`, and return its name."""
        weights, name, attempt = weights_hash(Checkpoint(""), model), f"epoch-{epoch:03d}", 1
        while self.manifest.models.get(name, weights) != weights:
            attempt += 1
            name = f"attempt{attempt}-epoch-{epoch:03d}"
        config: dict[str, Any] = dict(self.manifest.config)
        config["model"] = {**config["model"], "spec": model.name}
        config["run"] = {**config["run"], "device": str(model.device), "threads": torch.get_num_threads()}
        self.manifest = replace(self.manifest, config=config, models={**self.manifest.models, name: weights})
        folder = RunFolder.resume(self.path, self.manifest, free=FREE)
        plan = make_plan(folder.manifest, len(self.images))
        planned = len(rows) + len(self.images.failures)  # the images of a smaller subset are all there are
        folder.plan([unit.hash for unit in plan.units], planned, plan.checkpoints())
        units = [unit for unit in plan.units if unit.checkpoint == name]
        computed = partial(self._computed, RowMaker(model.name, name), model, rows, answers, measured)
        group = UnitGroup(units, lambda missing: map(computed, missing))
        compute_units(folder, [group], plan.checkpoints(), Progress(quiet=True), planned)
        if norms:
            write_gradients(self.path, name, norms)
        return name

    def judged(self, say: Callable[[str], object]) -> Verdict | None:
        """The verdict by the stored tests, also written to the folder."""
        try:
            return conclude(RunFolder.open(self.path))
        except Exception as error:  # training continues, and the scores are valid
            say(f"there is no verdict: {error}")
            return None

    def _computed(
        self, maker: RowMaker, model: Model, rows: Sequence[int], answers: Answers, measured: Measured,
        unit: PlannedUnit,
    ) -> UnitRows:  # fmt: skip
        """A unit of the scored images: all of them, unless the subset was reduced."""
        if unit.kind == "group":
            return unit, list(_group_rows(maker, unit, measured)), {}
        first, last = unit.images
        at = [k for k, row in enumerate(rows) if first <= row < last]
        part = self.images.take([rows[k] for k in at])
        scores = list(maker.broken(self.images.failures, {})) if first == 0 else []
        if at and unit.has_predictions:
            scores += self._predictions(maker, part, answers.logits[at])
        if not at or not part.explained.batch.ids:
            return unit, scores, {}
        batch, targets, rows_of = part.explained
        own = torch.isin(self.images.take(rows).explained.rows, torch.tensor(at))
        maps = {name: answers.maps[name].take(own).to("cpu") for name in unit.methods}
        context = BatchContext(model, batch, maps, targets, self.layer, seed=self.seed)
        with undisturbed(model):
            scores += maker.metrics(measure(unit.metrics, context), batch, targets)
        pictures: Any = pixels(part.images, part.preprocess)[rows_of.numpy()]
        if part.images.ndim > 4:  # volumes, with the planes that are shown
            pictures = [Sheet(planes, middle(size_of(part.images))) for planes in pictures]
        stored = {name: only_finite(made) for name, made in maps.items()}
        return unit, scores, stored, dict(zip(batch.ids, pictures, strict=True))

    def _predictions(self, maker: RowMaker, part: ValidationSet, logits: Tensor) -> Iterator[Score]:
        if not part.is_multilabel:
            return maker.predictions(Batch(part.ids, part.images, part.labels), logits)
        limits = stored_limits(self.manifest, logits.shape[1])
        batch = Batch(part.ids, part.images, findings=part.labels)
        return maker.label_predictions(batch, logits, logits.sigmoid() >= torch.tensor(limits))


def _group_rows(maker: RowMaker, unit: PlannedUnit, measured: Measured) -> Iterator[Score]:
    for request in read_metrics(unit.metrics):
        for method in unit.methods or ("",):
            result = measured.scores[method] if method else measured.classifier[request.entry.name]
            yield from (maker.about(method, *cell) for cell in cells(request, result))
