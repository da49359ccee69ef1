"""A monitored training as a run folder, so that report, gate and serve work on it while training goes on.

Rows, units and names are those of a run (see run/plan.py, run/score.py, run/group.py): a checkpoint is named
epoch-NNN and belongs to the weights it was measured with. Maps are stored in half precision; the C-Score rows
are those of the full maps. When a training is taken up from an earlier epoch, an epoch that comes again with
other weights is stored beside the first as attempt2-epoch-NNN; nothing is overwritten. After each checkpoint
verdict.json is renewed: undecided about maps, unless the monitor was told to measure what that rests on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heatproof.errors import InputError
from heatproof.metrics.cscores import gold_list
from heatproof.metrics.gold import ListRule
from heatproof.metrics.scene import BatchContext
from heatproof.models import Model
from heatproof.monitor.held import HeldOut
from heatproof.monitor.measure import Answers, Measured, undisturbed
from heatproof.run.answers import read_answers, stored_limits
from heatproof.run.findings import answer_rows
from heatproof.run.group import cells
from heatproof.run.measure import only_finite
from heatproof.run.metrics import read_metrics
from heatproof.run.plan import Task, make_plan
from heatproof.run.score import RowMaker
from heatproof.run.weights import Checkpoint, weights_hash
from heatproof.show import Sheet, middle
from heatproof.store import Manifest, RunFolder
from heatproof.store.manifest import SEVERAL
from heatproof.train.recipe import GradientNorm
from heatproof.types import Batch, Score, size_of
from heatproof.verdict.answers import Verdict
from heatproof.verdict.epochs import write_gradients
from heatproof.verdict.judge import MONITOR, conclude
from heatproof.verdict.trajectory import Trajectory

KNOWN = {"maps", "model", "images", "labels", "probabilities"}
FREE = ("model.spec", "run.device", "run.threads")  # known when the model is; no reason to refuse a resume


class Recorder:
    """Writes the checkpoints of one training."""

    def __init__(
        self, path: str | PathLike[str], held: HeldOut, methods: Sequence[str], *, batch_size: int, seed: int,
        rule: ListRule, layer: Any, metrics: Sequence[str] = (),
    ) -> None:  # fmt: skip
        for request in read_metrics(metrics):
            if request.group or not set(request.entry.needs) <= KNOWN:
                raise InputError(
                    f"a monitor measures pictures, without boxes or masks; {request.text} is no such"
                )
        self.path, self.held, self.layer, self.seed = Path(path), held, layer, seed
        self.cscore = rule.text
        config = {
            "kind": MONITOR,
            "methods": list(methods),
            "metrics": [self.cscore, "accuracy", "recall", "auc", *metrics],
            "run": {"seed": seed, "batch_size": batch_size, "targets": "label"},
            "model": {"spec": "", "layer": layer if layer is None or isinstance(layer, str) else list(layer)},
            "images": {"kind": "memory", "count": len(held)},
        }
        if held.is_multilabel:
            limits = None if isinstance(rule.tau, str) else rule.tau
            config["model"] |= {"head": SEVERAL, "thresholds": limits}  # type: ignore[operator]
        self.manifest = Manifest.collect(config, seed=seed, data=held.hash, classes=held.classes)
        if (self.path / "run.json").exists():  # said now, not after the first epoch
            old = RunFolder.open(self.path).manifest
            RunFolder.resume(self.path, replace(self.manifest, models=old.models), free=FREE)
            self.manifest = replace(self.manifest, models=old.models)

    def trajectory(self) -> Trajectory | None:
        """What is in the folder; of an epoch that was measured twice, the later attempt."""
        if not self.manifest.models:
            return None
        folder = RunFolder.open(self.path)
        whole = [c for c in self.manifest.models if self._complete(folder, c)]
        if not whole:
            return None
        found = Trajectory.from_run(folder)
        by_epoch = {c.epoch: c for c in found if c.name in whole}
        return replace(found, checkpoints=tuple(by_epoch.values()))

    def anchored(self, rule: ListRule) -> dict[str, Any] | None:
        """The list that the first checkpoint in the folder made, by image."""
        first = next(iter(self.manifest.models), None)
        if first is None:
            return None
        found = read_answers(RunFolder.open(self.path), first)
        gold = gold_list(found.labels, found.probabilities, rule.tau)
        return dict(zip(found.ids, gold.tolist(), strict=True))

    def _complete(self, folder: RunFolder, checkpoint: str) -> bool:
        plan = make_plan(folder.manifest, len(self.held))
        groups = {task.unit.hash for task in plan.groups if task.unit.checkpoint == checkpoint}
        return (plan.hashes(checkpoint) | groups) <= folder.done()

    def place(self, model: Model, epoch: int) -> tuple[str, str]:
        """The checkpoint's name, and the hash of its weights."""
        weights = weights_hash(Checkpoint(""), model)
        name, attempt = f"epoch-{epoch:03d}", 1
        while self.manifest.models.get(name, weights) != weights:
            attempt += 1
            name = f"attempt{attempt}-epoch-{epoch:03d}"
        return name, weights

    def write(
        self, model: Model, epoch: int, rows: Sequence[int], found: Answers, measured: Measured,
        norms: Mapping[str, GradientNorm],
    ) -> str:  # fmt: skip
        """Store one checkpoint of the images in `rows`; its name."""
        name, weights = self.place(model, epoch)
        config: dict[str, Any] = dict(self.manifest.config)
        config["model"] = {**config["model"], "spec": model.name}
        config["run"] = {**config["run"], "device": str(model.device), "threads": torch.get_num_threads()}
        models = {**self.manifest.models, name: weights}
        self.manifest = replace(self.manifest, config=config, models=models)
        folder = RunFolder.resume(self.path, self.manifest, free=FREE)
        plan, done = make_plan(folder.manifest, len(self.held)), folder.done()
        planned = len(rows) + len(self.held.failures)  # the images of a smaller subset are all there are
        folder.plan([unit.hash for unit in plan.units], planned, plan.checkpoints())
        maker = RowMaker(model.name, name)
        with folder.lock():
            for task in [t for block in plan.blocks for t in block.tasks] + list(plan.groups):
                if task.unit.checkpoint != name or task.unit.hash in done:
                    continue
                if task.kind == "group":
                    folder.write_unit(task.unit, _group_rows(maker, task, measured))
                else:
                    self._write_block(folder, maker, task, model, rows, found)
        if norms:
            write_gradients(self.path, name, norms)
        return name

    def judged(self, say: Callable[[str], object]) -> Verdict | None:
        """The verdict by the tests that there are, kept in the folder."""
        try:
            return conclude(RunFolder.open(self.path))
        except Exception as error:  # training goes on, and what was measured is good
            say(f"there is no verdict: {error}")
            return None

    def _write_block(
        self, folder: RunFolder, maker: RowMaker, task: Task, model: Model, rows: Sequence[int],
        found: Answers,
    ) -> None:  # fmt: skip
        """The images of the block that were looked at; all of them, unless the subset was made smaller."""
        first, last = task.unit.images
        at = [k for k, row in enumerate(rows) if first <= row < last]
        part = self.held.take([rows[k] for k in at])
        scores = list(maker.broken(self.held.failures, {})) if first == 0 else []
        if not at:
            return folder.write_unit(task.unit, scores)
        if task.with_answers:
            scores += self._answers(maker, part, found.logits[at])
        batch, targets, rows_of = part.explained
        if not batch.ids:
            return folder.write_unit(task.unit, scores)
        places = self.held.take(rows).explained.rows
        own = torch.isin(places, torch.tensor(at))
        maps = {name: found.maps[name].take(own).to("cpu") for name in task.unit.methods}
        scene = BatchContext(model, batch, maps, targets, self.layer, seed=self.seed)
        with undisturbed(model):
            scores += maker.scores(task.unit.metrics, scene)
        pictures: Any = part.pixels[rows_of.numpy()]
        if part.images.ndim > 4:  # volumes, with what is shown of them
            pictures = [Sheet(one, middle(size_of(part.images))) for one in pictures]
        shown = dict(zip(batch.ids, pictures, strict=True))
        folder.write_unit(task.unit, scores, {name: only_finite(one) for name, one in maps.items()}, shown)

    def _answers(self, maker: RowMaker, part: HeldOut, logits: Tensor) -> Iterator[Score]:
        if not part.is_multilabel:
            return maker.answers(Batch(part.ids, part.images, part.labels), logits)
        limits = stored_limits(self.manifest, logits.shape[1])
        batch = Batch(part.ids, part.images, findings=part.labels)
        return answer_rows(maker, batch, logits, logits.sigmoid() >= torch.tensor(limits))


def _group_rows(maker: RowMaker, task: Task, measured: Measured) -> list[Score]:
    return [
        maker.about(method, *cell)
        for request in read_metrics(task.unit.metrics)
        for method in task.unit.methods or ("",)
        for cell in cells(
            request, measured.scores[method] if method else getattr(measured, request.entry.name)
        )
    ]
