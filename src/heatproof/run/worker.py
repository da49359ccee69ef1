"""Who computes: the tasks of a block and of a group, and the engine that needs nothing but this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from heatproof.disk import valid_unicode
from heatproof.errors import InputError
from heatproof.explain.api import begin_ahead, read_methods, shared_pass
from heatproof.explain.floors import is_floor
from heatproof.images import Loaded, batches
from heatproof.images.duplicates import SIDE
from heatproof.images.entries import entries
from heatproof.images.source import draw
from heatproof.metrics.scene import BatchContext, ImagePool
from heatproof.models import Model
from heatproof.models.asked import asked
from heatproof.models.model import is_out_of_memory
from heatproof.models.queue import all_logits, how_it_runs
from heatproof.rows import of_prediction
from heatproof.run.background import Prefetcher, WriteQueue
from heatproof.run.findings import answer_rows, said
from heatproof.run.group import across_rows, group_rows
from heatproof.run.measure import MetricResults, measure, on_host, only_finite
from heatproof.run.plan import Block, RunPlan, Task
from heatproof.run.progress import Progress
from heatproof.run.score import RowMaker, as_stored
from heatproof.run.study import ResolvedStudy
from heatproof.run.values import Told, told_by, value_rows
from heatproof.run.wrong_predictions import explain_wrong_predictions
from heatproof.show import Sheet, hottest, middle, pixels
from heatproof.store import MapStore, RunFolder
from heatproof.store.folder import SeenImages, StopRequested
from heatproof.timeline import FRAME, span
from heatproof.types import Batch, Maps, Score, Unit, per_map, size_of

PAUSES = 0.5, 2.0  # seconds before a picture that could not be read is tried again
FRUITLESS = 3  # pauses in a row that helped nothing; then there are no more


@dataclass(frozen=True)
class Computed:
    """All that the rows and files of a block task are made of, on the host."""

    loaded: Loaded
    maps: dict[str, Maps] = field(default_factory=dict)  # new ones
    others: dict[str, Maps] = field(default_factory=dict)  # of what the network says instead, where asked for
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    explained: Tensor = field(default_factory=lambda: torch.empty(0))
    findings: MetricResults | None = None  # None where no picture could be used
    entries: Batch | None = None  # where pictures may have several findings: what the maps are of
    said: Tensor = field(default_factory=lambda: torch.empty(0))  # the predicted ones, "b k" bool
    told: Told | None = None  # of a network that names no class
    unanswered: Tensor | None = None  # "b" bool: of explained_batch, images whose output is not finite

    @property
    def explained_batch(self) -> Batch:
        return self.loaded.batch if self.entries is None else self.entries


@dataclass
class Worker:
    """Computes tasks and writes them. One per process."""

    opened: ResolvedStudy
    folder: RunFolder
    passed: Callable[[int], object] | None = None  # told the number of inputs behind each batch
    fruitless: int = 0

    @cached_property
    def stored(self) -> MapStore:
        return self.folder.maps()  # which reads each index once

    def run(self, tasks: Sequence[Task], loaded: Loaded, behind: WriteQueue) -> None:
        """Compute the tasks of one block on its decoded pictures; rows and files are made behind."""
        if not tasks:
            return
        loaded = self.retry_transient_reads(tasks[0], loaded)
        if self.opened.origin is not None:
            self.opened.origin.check(self.opened.source, tasks[0].unit.images, loaded)
        for task in tasks:
            if task.kind == "score":
                behind.finish()  # its maps may be those of the task before
            with span(FRAME, task.unit.hash[:8]):
                parts = self.compute_parts(task, loaded)
            behind.do(partial(self.write, task, loaded.batch, parts))

    def compute_parts(self, task: Task, loaded: Loaded) -> list[Computed]:
        """What `compute` returns for the block, or for each half of its images if memory runs out."""
        count = len(loaded.batch.ids)
        try:
            return [self.compute(task, loaded)]
        except (MemoryError, RuntimeError) as error:
            if count < 2 or not is_out_of_memory(error):
                raise
        self.opened.model(task.unit.checkpoint).free_memory(count)  # outside: the error refers to tensors
        first, second = (loaded.batch.take(rows) for rows in (slice(count // 2), slice(count // 2, None)))
        halves = loaded._replace(batch=first), Loaded(second, [])
        return [part for half in halves for part in self.compute_parts(task, half)]

    def write(self, task: Task, batch: Batch, parts: Sequence[Computed]) -> None:
        """Write the rows, maps and images of a batch, which was computed in one or several parts."""
        with span("rows"):
            scores = [row for part in parts for row in self._rows(task, part)]
            maps = _joined([part.maps for part in parts])
            pictures: dict[str, np.ndarray | Sheet] | None = None
            if self.opened.study.run.pictures and task.with_answers:
                made = [self.pictures(task, part.explained_batch, maps) for part in parts]
                pictures = {name: picture for own in made for name, picture in own.items()}
        with span("writing"):
            others = {of_prediction(m): made for m, made in _joined([part.others for part in parts]).items()}
            seen = self.seen(task, batch) if task.with_answers else None
            self.folder.write_unit(task.unit, scores, maps | others, pictures, seen)

    def begin(self, job: Job, loaded: Loaded) -> None:
        """What threads can do for the methods of a job before the network has time: cut its pictures."""
        unit = job.tasks[0].unit
        if job.tasks[0].kind == "explain" and loaded.batch.ids:
            begin_ahead(unit.methods, self.opened.model(unit.checkpoint), loaded.batch.images, unit.seed)

    def retry_transient_reads(self, task: Task, loaded: Loaded) -> Loaded:
        """Read pictures again whose file was missing or whose disk failed, before that becomes a row."""
        indices = range(*task.unit.images)
        for pause in PAUSES:
            if not any(f.transient for f in loaded.failures) or self.fruitless >= FRUITLESS:
                break
            time.sleep(pause)
            preprocess = self.opened.model(task.unit.checkpoint).preprocess
            (again,) = batches(self.opened.source, preprocess, len(indices), indices, 0)
            helped = len(again.failures) < len(loaded.failures)
            loaded, self.fruitless = again, 0 if helped else self.fruitless + 1
        return loaded

    def pictures(self, task: Task, batch: Batch, maps: Mapping[str, Maps]) -> dict[str, np.ndarray | Sheet]:
        """The pictures of a block as the model sees them, 8 bits, those that are not kept yet.

        Of volumes, the planes with most heat in the mean of these maps.
        """
        missing = set(self.folder.unkept(batch.ids))
        rows = [i for i, name in enumerate(batch.ids) if name in missing]
        if not rows:
            return {}
        preprocess, images = self.opened.model(task.unit.checkpoint).preprocess, batch.images[rows]
        names = [batch.ids[i] for i in rows]
        if images.ndim == 4:
            return dict(zip(names, pixels(images, preprocess), strict=True))
        planes = [hottest_planes(maps, name, size_of(images)) for name in names]
        shown = zip(pixels(images, preprocess, planes), planes, strict=True)
        return {name: Sheet(*one) for name, one in zip(names, shown, strict=True)}

    def seen(self, task: Task, batch: Batch) -> SeenImages | None:
        """Thumbnails and sizes of a block's images, to count distinct ones; None for volumes."""
        if not batch.ids or batch.images.ndim != 4:
            return None
        preprocess = self.opened.model(task.unit.checkpoint).preprocess
        restored = preprocess.restore(batch.images)
        grey = restored if restored.shape[1] in (1, 3) else restored.mean(1, keepdim=True)
        small = torch.nn.functional.adaptive_avg_pool2d(grey, SIDE)
        thumbnails = (small * 255).round().to(torch.uint8).movedim(1, 3).cpu().numpy()
        return SeenImages(
            batch.ids, thumbnails, np.array([(side, min(preprocess.size)) for side in batch.sides])
        )

    def compute(self, task: Task, loaded: Loaded) -> Computed:
        """New maps of one block task and what metrics found, fetched from the device when all is there."""
        batch, model = loaded.batch, self.opened.model(task.unit.checkpoint)
        if not batch.ids:
            return Computed(loaded)
        if not self.opened.several:
            targets = batch.labels if self.opened.targets == "label" else None
            if not self.opened.classes:  # of which the pictures' labels say nothing
                loaded = loaded._replace(batch=replace(batch, labels=None))
            return self._explained(task, Computed(loaded), loaded.batch, targets)
        # Pictures without a finding are asked too: they are what the others are told from.
        logits = all_logits(model, batch.images, progress=self.passed).cpu()
        predicted = said(model, logits)
        by_label = self.opened.targets == "label" and batch.findings is not None
        asked = batch.findings if by_label and batch.findings is not None else predicted
        own, targets = entries(batch, asked, self.opened.source.classes)
        known = Computed(loaded, logits=logits, entries=own, said=predicted)
        return self._explained(task, known, own, targets) if own.ids else known

    def _explained(self, task: Task, known: Computed, batch: Batch, targets: Tensor | None) -> Computed:
        """With maps of this batch and what metrics say about them."""
        unit, layer = task.unit, self.opened.study.model.layer
        # Bound to the regions or boxes of this batch, where it has some.
        model, _ = asked(self.opened.model(unit.checkpoint), batch.images, targets)
        new: dict[str, Maps] = {}
        others: dict[str, Maps] = {}
        logits = torch.empty(0)
        if task.kind == "explain":
            new, logits = self._explain(model, batch, unit, targets)
            if self.opened.study.run.both_classes and known.entries is None and targets is not None:
                instead = explain_wrong_predictions(model, batch, unit, targets, logits)
                others = self._explain(model, *instead)[0] if instead else {}
            maps = {name: as_stored(made) for name, made in new.items()}
        else:
            maps = {name: self._stored_maps(unit.checkpoint, name, batch) for name in unit.methods}
        explained = torch.stack([one.explained for one in maps.values()]).amax(0).cpu()
        told = told_by(model, logits, explained)
        scene = BatchContext(model, batch, maps, explained, layer, unit.seed, self.passed, as_stored)
        findings = measure(unit.metrics, scene)
        logits, *fetched = on_host([logits, *findings.tensors()])
        at_hand = {name: one.to("cpu") for name, one in new.items()}
        return replace(
            known, maps=at_hand, others=others, logits=logits if known.entries is None else known.logits,
            explained=explained, findings=findings.fetched(iter(fetched)), told=told,
            unanswered=model.read.unanswered(logits) if len(logits) else None,
        )  # fmt: skip

    def _rows(self, task: Task, computed: Computed) -> Iterator[Score]:
        rows, (batch, failures) = RowMaker(self.opened.model_name, task.unit.checkpoint), computed.loaded
        if task.with_answers:
            labels = {s.id: s.label for s in self.opened.source.samples[slice(*task.unit.images)]}
            yield from rows.broken(failures, labels)
        if task.with_answers and computed.entries is not None:
            yield from answer_rows(rows, batch, computed.logits, computed.said)
        if computed.findings is None:
            return
        if task.with_answers and computed.told is not None:
            yield from value_rows(rows, batch, computed.told, computed.explained)
        elif task.with_answers and computed.entries is None:
            yield from rows.answers(batch, computed.logits)
        yield from rows.found(
            computed.findings, computed.explained_batch, computed.explained, computed.unanswered
        )

    def _explain(
        self, model: Model, batch: Batch, unit: Unit, targets: Tensor | None
    ) -> tuple[dict[str, Maps], Tensor]:
        """What hp.explain gives, and the logits "b k" of the same pass."""
        study, calls = self.opened.study, read_methods(unit.methods)
        maps, logits = shared_pass(
            model, model.check_images(batch.images), calls, ids=batch.ids, targets=targets,
            layer=study.model.layer, seed=unit.seed, progress=self.passed,
        )  # fmt: skip
        lost = model.read.unanswered(logits)
        for name, one in maps.items():
            explained = one.explained.masked_fill(lost, -1) if targets is None else one.explained
            values = one.values.masked_fill(per_map(lost, one.values), torch.nan)
            maps[name] = replace(one, values=values, explained=explained)
        return maps, logits

    def _stored_maps(self, checkpoint: str, method: str, batch: Batch) -> Maps:
        """A method's maps of these images; one that could not be stored is NaN, and explains nobody (-1)."""
        names = [valid_unicode(name) for name in batch.ids]
        rows = [i for i, known in enumerate(self.stored.known(checkpoint, method, names)) if known]
        size = size_of(batch.images)
        values, signed = torch.full((len(names), *[1] * len(size)), torch.nan), None
        explained = torch.full((len(names),), -1)
        if rows:
            found = self.stored.read(checkpoint, method, [names[i] for i in rows])
            values = torch.full((len(names), *found.values.shape[1:]), torch.nan)
            values[rows], explained[rows], size = found.values, found.explained, found.image_size
            if found.signed_values is not None:
                signed = torch.zeros(len(names), *found.signed_values.shape[1:])
                signed[rows] = found.signed_values
        return Maps(method, values, size, explained, batch.ids, signed)

    def gallery(self, task: Task) -> ImagePool:
        """The network of a checkpoint, and pictures to show to it; those that cannot be read are left out."""
        study, source, unit = self.opened.study, self.opened.source, task.unit
        model = self.opened.model(unit.checkpoint)

        def pictures(count: int) -> Batch:
            every = enumerate(source.samples)
            alone = [i for i, one in every if one.findings is None or len(one.findings) == 1]
            if not alone:
                raise InputError("no picture has exactly one finding, so none is of one class alone")
            own = [next(iter(source.samples[i].stated), None) for i in alone]
            chosen = [alone[k] for k in draw(own, count, unit.seed)]
            loading = batches(source, model.preprocess, study.run.batch_size, chosen, study.run.workers)
            lots = [loaded.batch for loaded in loading if loaded.batch.ids]
            ids, images = (
                tuple(name for one in lots for name in one.ids),
                torch.cat([one.images for one in lots]),
            )
            known = [
                one.labels if one.findings is None else one.findings.long().argmax(1)
                for one in lots
                if self.opened.targets == "label"
            ]
            labels = [one for one in known if one is not None]
            return Batch(ids, images, torch.cat(labels) if labels else None)

        passes = {"seed": unit.seed, "progress": self.passed}
        return ImagePool(model, unit.methods, pictures, study.model.layer, passes)

    def group(self, task: Task) -> None:
        """Compute and write what is about all images of a checkpoint, or about several checkpoints."""
        name = self.opened.model_name
        if task.among:
            rows = across_rows(self.folder, task, name, self.opened.device)
        else:
            ids = tuple(sample.id for sample in self.opened.source.samples)
            shown = partial(self.gallery, task)
            rows = group_rows(self.folder, task, ids, name, self.opened.device, shown)
        self.folder.write_unit(task.unit, rows)


def _joined(parts: Sequence[Mapping[str, Maps]]) -> dict[str, Maps]:
    """By method, the maps of all parts that can be stored, on the host."""
    methods = dict.fromkeys(method for part in parts for method in part)
    own = {method: [part[method].to("cpu") for part in parts if method in part] for method in methods}
    return {method: only_finite(Maps.concatenate(maps)) for method, maps in own.items()}


def hottest_planes(maps: Mapping[str, Maps], name: str, size: tuple[int, ...]) -> tuple[int, ...]:
    """Planes of a volume with most heat in the mean of its maps, floors left out; else the middle ones."""
    of = [one for method, one in maps.items() if name in one.ids and not is_floor(method)]
    heat = [one.take([one.ids.index(name)]).upsample()[0] for one in of]
    return hottest(torch.stack(heat).mean(0)) if heat else middle(size)


@dataclass(frozen=True)
class Job:
    """A block with the tasks that are not done yet."""

    block: Block
    tasks: tuple[Task, ...]

    @property
    def images(self) -> int:
        return self.block.images[1] - self.block.images[0]


@dataclass(frozen=True)
class Work:
    """What an engine is given."""

    opened: ResolvedStudy
    folder: RunFolder
    plan: RunPlan
    jobs: Sequence[Job]
    progress: Progress
    stop: threading.Event
    fail_fast: bool = False

    def ready_groups(self) -> list[Task]:
        """Group tasks whose blocks are all done, by whichever process."""
        done = self.folder.done()
        return [
            task
            for task in self.plan.groups
            if task.unit.hash not in done
            and all(self.plan.hashes(of) <= done for of in task.among or (task.unit.checkpoint, *task.after))
        ]


def run_local(work: Work) -> None:
    """Blocks checkpoint by checkpoint, pictures decoded in threads, then what is about all images of each."""
    worker = Worker(work.opened, work.folder, work.progress.inputs)
    for checkpoint, jobs in groupby(work.jobs, key=lambda job: job.block.checkpoint):
        _run_checkpoint(worker, work, checkpoint, list(jobs))
        _run_groups(worker, work)
    _run_groups(worker, work)


def _run_checkpoint(worker: Worker, work: Work, checkpoint: str, jobs: list[Job]) -> None:
    opened, settings = work.opened, work.opened.study.run
    # Every block but a checkpoint's last is a full batch, so the loader cuts its batches where blocks end.
    indices = [i for job in jobs for i in range(*job.block.images)]
    size, threads, ready = settings.batch_size, settings.workers, opened.model(checkpoint).preprocess
    loaded = batches(opened.source, ready, size, indices, threads, work.fail_fast)
    with Prefetcher(loaded, partial(worker.begin, jobs[0])) as decoded, WriteQueue() as behind:
        for job, pictures in zip(jobs, decoded, strict=True):
            if work.stop.is_set():
                raise StopRequested
            worker.run(job.tasks, pictures, behind)
            work.progress.advance(job.images, len(job.tasks))
    for sentence in how_it_runs(opened.model(checkpoint)):
        work.progress.say(f"checkpoint {checkpoint}: {sentence}")


def _run_groups(worker: Worker, work: Work) -> None:
    for task in work.ready_groups():
        if work.stop.is_set():
            raise StopRequested
        work.progress.say(
            f"checkpoint {task.unit.checkpoint}: {', '.join(task.unit.metrics)} over all images"
        )
        with span("group", ", ".join(task.unit.metrics)):
            worker.group(task)
        work.progress.advance(0, 1)
