"""The computation of units, and the engines that run them: in this process, or on a Ray cluster.

Also the threads and signals of a process that runs them.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from heatproof.disk import valid_unicode
from heatproof.errors import HeatproofError, InputError, ModelError, need
from heatproof.explain.api import begin_ahead, is_stored, read_methods, shared_pass
from heatproof.explain.baselines import is_floor
from heatproof.images import Loaded, batches
from heatproof.images.duplicates import SIDE
from heatproof.images.loader import available_cpus, entries
from heatproof.images.source import draw
from heatproof.metrics.kit import BatchContext, ImagePool
from heatproof.models import Model
from heatproof.models.accel import Accelerator, in_parts, limited_memory
from heatproof.models.heads import Multilabel
from heatproof.models.model import all_logits, bind_targets
from heatproof.rows import of_prediction
from heatproof.run.config import read_metrics, repetitions
from heatproof.run.plan import BUILT_IN, Block, PlannedUnit, RunPlan
from heatproof.run.progress import Progress
from heatproof.run.score import (
    HeadOutput,
    MetricResults,
    RowMaker,
    as_stored,
    group_rows,
    measure,
    only_finite,
)
from heatproof.run.study import ResolvedStudy
from heatproof.show import Sheet, hottest, middle, pixels
from heatproof.store import MapStore, RunFolder
from heatproof.store.folder import SeenImages, StopRequested
from heatproof.timeline import FRAME, span
from heatproof.types import Batch, Maps, Score, Unit, per_map, size_of

PAUSES = 0.5, 2.0  # seconds before an image that could not be read is tried again
FRUITLESS = 3  # pauses in a row that helped nothing; then there are no more
RETRIES = 5  # of a Ray task whose worker died; an error in the task itself is not tried again
WAIT = 0.5  # seconds between looks at Ctrl-C
STOPPING = (signal.SIGINT, signal.SIGTERM)
ANSWER = "stopping after the current unit; Ctrl-C again stops at once and loses only that unit"
REPEATED, SIMILAR = 3, 1.1  # timed calls for each number of threads, and the ratio of similar times
WAITING_UNITS = 2  # that may be in memory until they are written
Item = TypeVar("Item")
Result = TypeVar("Result")

_workers: dict[str, Worker] = {}  # of a Ray process, by run: a model stays loaded from task to task


@dataclass(frozen=True)
class Computed:
    """Everything that the rows and files of a unit are made from, in CPU memory."""

    loaded: Loaded
    maps: dict[str, Maps] = field(default_factory=dict)  # new ones
    prediction_maps: dict[str, Maps] = field(default_factory=dict)  # of wrong predictions, if requested
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    explained: Tensor = field(default_factory=lambda: torch.empty(0))
    results: Sequence[MetricResults] | None = None  # None where no image could be read
    entries: Batch | None = None  # multi-label: one entry per label that is explained
    positive: Tensor = field(default_factory=lambda: torch.empty(0))  # multi-label: predicted, "b k" bool
    output: HeadOutput | None = None  # of a head without classes

    @property
    def explained_batch(self) -> Batch:
        return self.loaded.batch if self.entries is None else self.entries


@dataclass
class Worker:
    """Computes units and writes them. One per process."""

    opened: ResolvedStudy
    folder: RunFolder
    passed: Callable[[int], object] | None = None  # called with the number of inputs after each pass
    fruitless: int = 0  # pauses in a row after which no more images could be read

    @cached_property
    def stored(self) -> MapStore:
        return self.folder.maps()  # which reads each index once

    def load(
        self, checkpoint: str, indices: Sequence[int], fail_fast: bool = False
    ) -> Generator[Loaded, None, None]:
        """Decode images for a checkpoint, batch by batch."""
        source, settings = self.opened.source, self.opened.study.run
        preprocess, size = self.opened.model(checkpoint).preprocess, settings.batch_size
        return batches(source, preprocess, size, indices, settings.workers, fail_fast)

    def run(self, block: Block, loaded: Loaded, writing: WriteQueue) -> None:
        """Compute the units of a block on its decoded images; rows and files are made in the write queue."""
        if not block:
            return
        loaded = self.retry_transient_reads(block[0], loaded)
        if self.opened.origin is not None:
            # Files may change during a long run; rows must come from the images whose hashes are recorded.
            self.opened.origin.check(self.opened.source, block[0].images, loaded)
        for unit in block:
            if unit.kind == "score":
                writing.finish()  # its maps may be those of the unit before
            with span(FRAME, unit.hash[:8]):
                parts = self.compute_parts(unit, loaded)
            writing.do(partial(self.write, unit, loaded.batch, parts))

    def compute_parts(self, unit: PlannedUnit, loaded: Loaded) -> list[Computed]:
        """Results of `compute` for all images, or for each half of them if memory runs out."""
        count = len(loaded.batch.ids)

        def compute(start: int, stop: int) -> Computed:
            if stop - start == count:
                return self.compute(unit, loaded)
            part = Loaded(loaded.batch.take(slice(start, stop)), loaded.failures if start == 0 else [])
            return self.compute(unit, part)

        return [part for part, _ in self._in_parts(count, compute)]

    def _in_parts(self, count: int, compute: Callable[[int, int], Result]) -> Iterator[tuple[Result, int]]:
        return in_parts(torch.device(self.opened.device), self.opened.model_name, count, compute)

    def write(self, unit: PlannedUnit, batch: Batch, parts: Sequence[Computed]) -> None:
        """Write the rows, maps and images of a batch, which was computed in one or several parts."""
        with span("rows"):
            scores = [row for part in parts for row in self._rows(unit, part)]
            maps = _joined([part.maps for part in parts])
            pictures: dict[str, np.ndarray | Sheet] = {}
            for part in parts if self.opened.study.run.pictures and unit.has_predictions else ():
                pictures |= self.pictures(unit, part.explained_batch, maps)
        with span("writing"):
            others = _joined([part.prediction_maps for part in parts])
            maps |= {of_prediction(method): own for method, own in others.items()}
            seen = self.seen(unit, batch) if unit.has_predictions else None
            self.folder.write_unit(unit, scores, maps, pictures, seen)

    def begin(self, unit: PlannedUnit, loaded: Loaded) -> None:
        """Start segmentation in threads for the methods of a unit, before the network is free."""
        if unit.kind == "explain" and loaded.batch.ids:
            begin_ahead(unit.methods, self.opened.model(unit.checkpoint), loaded.batch.images, unit.seed)

    def retry_transient_reads(self, unit: Unit, loaded: Loaded) -> Loaded:
        """Read images again whose file was missing or whose disk failed, before that is recorded as a row."""
        indices = range(*unit.images)
        for pause in PAUSES:
            if not any(f.transient for f in loaded.failures) or self.fruitless >= FRUITLESS:
                break
            time.sleep(pause)
            preprocess = self.opened.model(unit.checkpoint).preprocess
            (again,) = batches(self.opened.source, preprocess, len(indices), indices, 0)
            helped = len(again.failures) < len(loaded.failures)
            loaded, self.fruitless = again, 0 if helped else self.fruitless + 1
        return loaded

    def pictures(self, unit: Unit, batch: Batch, maps: Mapping[str, Maps]) -> dict[str, np.ndarray | Sheet]:
        """Images as the model sees them, 8 bits, those that are not stored yet; of volumes, three planes."""
        missing = set(self.folder.unstored(batch.ids))
        rows = [i for i, name in enumerate(batch.ids) if name in missing]
        if not rows:
            return {}
        preprocess, images = self.opened.model(unit.checkpoint).preprocess, batch.images[rows]
        names = [batch.ids[i] for i in rows]
        if images.ndim == 4:
            return dict(zip(names, pixels(images, preprocess), strict=True))
        planes = []  # with the largest sums in the mean of the maps, without floors; else the middle
        for name in names:
            of = [own for method, own in maps.items() if name in own.ids and not is_floor(method)]
            heat = [own.take([own.ids.index(name)]).upsample()[0] for own in of]
            planes.append(hottest(torch.stack(heat).mean(0)) if heat else middle(size_of(images)))
        return dict(zip(names, map(Sheet, pixels(images, preprocess, planes), planes), strict=True))

    def seen(self, unit: Unit, batch: Batch) -> SeenImages | None:
        """Thumbnails and sizes of images, to count distinct ones; None for volumes."""
        if not batch.ids or batch.images.ndim != 4:
            return None
        preprocess = self.opened.model(unit.checkpoint).preprocess
        restored = preprocess.restore(batch.images)
        grey = restored if restored.shape[1] in (1, 3) else restored.mean(1, keepdim=True)
        small = torch.nn.functional.adaptive_avg_pool2d(grey, SIDE)
        thumbnails = (small * 255).round().to(torch.uint8).movedim(1, 3).cpu().numpy()
        return SeenImages(
            batch.ids, thumbnails, np.array([(side, min(preprocess.size)) for side in batch.sides])
        )

    def compute(self, unit: PlannedUnit, loaded: Loaded) -> Computed:
        """New maps of a unit and the results of its metrics."""
        batch, model = loaded.batch, self.opened.model(unit.checkpoint)
        if not batch.ids:
            return Computed(loaded)
        if not self.opened.is_multilabel:
            targets = batch.labels if self.opened.targets == "label" else None
            if not self.opened.predicts_classes:  # labels are not what it predicts
                loaded = loaded._replace(batch=replace(batch, labels=None))
            return self._explained(unit, Computed(loaded), loaded.batch, targets)
        # Images without a label get predictions too: AUC and thresholds need negatives.
        logits = all_logits(model, batch.images, progress=self.passed).cpu()
        head = model.head if isinstance(model.head, Multilabel) else Multilabel()
        positive = head.positive(logits)
        by_label = self.opened.targets == "label" and batch.findings is not None
        explained = batch.findings if by_label and batch.findings is not None else positive
        own, targets = entries(batch, explained, self.opened.source.classes)
        known = Computed(loaded, logits=logits, entries=own, positive=positive)
        return self._explained(unit, known, own, targets) if own.ids else known

    def _explained(
        self, unit: PlannedUnit, known: Computed, batch: Batch, targets: Tensor | None
    ) -> Computed:
        """Add maps of this batch and the results of metrics."""
        layer = self.opened.study.model.layer
        # Bound to the regions or boxes of this batch, if the head is dense.
        model, _ = bind_targets(self.opened.model(unit.checkpoint), batch.images, targets)
        new: dict[str, Maps] = {}
        others: dict[str, Maps] = {}
        logits = torch.empty(0)
        if unit.kind == "explain":
            new, logits = self._explain(model, batch, unit.methods, targets, unit.seed)
            if self.opened.study.run.both_classes and known.entries is None and targets is not None:
                others = self._explain_wrong_predictions(model, batch, unit, targets, logits)
            maps = {name: as_stored(made) for name, made in new.items()}
        else:
            maps = {name: self._stored_maps(unit.checkpoint, name, batch) for name in unit.methods}
        explained = torch.stack([own.explained for own in maps.values()]).amax(0).cpu()
        context = BatchContext(model, batch, maps, explained, layer, unit.seed, self.passed, as_stored)
        unanswered = model.head.unanswered(logits) if len(logits) else None
        results = measure(unit.metrics, context, unanswered)
        return replace(
            known, maps={name: own.to("cpu") for name, own in new.items()}, prediction_maps=others,
            logits=logits.cpu() if known.entries is None else known.logits, explained=explained,
            results=results, output=HeadOutput.of(model, logits, explained),
        )  # fmt: skip

    def _rows(self, unit: PlannedUnit, computed: Computed) -> Iterator[Score]:
        rows, (batch, failures) = RowMaker(self.opened.model_name, unit.checkpoint), computed.loaded
        if unit.has_predictions:
            labels = {s.id: s.label for s in self.opened.source.samples[slice(*unit.images)]}
            yield from rows.broken(failures, labels)
            if computed.entries is not None:
                yield from rows.label_predictions(batch, computed.logits, computed.positive)
            elif computed.output is not None:
                yield from rows.values(batch, computed.output, computed.explained)
            elif computed.results is not None:
                yield from rows.predictions(batch, computed.logits)
        if computed.results is not None:
            yield from rows.metrics(computed.results, computed.explained_batch, computed.explained)

    def _explain(
        self, model: Model, batch: Batch, methods: Sequence[str], targets: Tensor | None, seed: int
    ) -> tuple[dict[str, Maps], Tensor]:
        """Returns what hp.explain returns, and the logits "b k" of the same pass."""
        maps, logits = shared_pass(
            model, model.check_images(batch.images), read_methods(methods), ids=batch.ids, targets=targets,
            layer=self.opened.study.model.layer, seed=seed, progress=self.passed,
        )  # fmt: skip
        lost = model.head.unanswered(logits)
        for name, own in maps.items():
            explained = own.explained.masked_fill(lost, -1) if targets is None else own.explained
            values = own.values.masked_fill(per_map(lost, own.values), torch.nan)
            maps[name] = replace(own, values=values, explained=explained)
        return maps, logits

    def _explain_wrong_predictions(
        self, model: Model, batch: Batch, unit: Unit, targets: Tensor, logits: Tensor
    ) -> dict[str, Maps]:
        """Maps of the predicted class for images whose label is another one, for the report."""
        answers, lost = model.head.predicted(logits).cpu(), model.head.unanswered(logits).cpu()
        wrong = ((answers != targets.cpu()) & ~lost).nonzero()[:, 0].tolist()
        methods = [method for method in unit.methods if not (is_floor(method) or is_stored(method))]
        if not wrong or not methods:
            return {}
        own = Batch(tuple(batch.ids[i] for i in wrong), batch.images[wrong])
        return self._explain(model, own, methods, answers[wrong], unit.seed)[0]

    def _stored_maps(self, checkpoint: str, method: str, batch: Batch) -> Maps:
        """A method's maps of these images; one that could not be stored is NaN with class -1."""
        names = [valid_unicode(name) for name in batch.ids]
        rows = [i for i, known in enumerate(self.stored.known(checkpoint, method, names)) if known]
        size = size_of(batch.images)
        values, signed = torch.full((len(names), *[1] * len(size)), torch.nan), None
        explained = torch.full((len(names),), -1)
        if rows:
            read = self.stored.read(checkpoint, method, [names[i] for i in rows])
            values = torch.full((len(names), *read.values.shape[1:]), torch.nan)
            values[rows], explained[rows], size = read.values, read.explained, read.image_size
            if read.signed_values is not None:
                signed = torch.zeros(len(names), *read.signed_values.shape[1:])
                signed[rows] = read.signed_values
        return Maps(method, values, size, explained, batch.ids, signed)

    def image_pool(self, unit: Unit) -> ImagePool:
        """The network of a checkpoint, and images to run it on; those that cannot be read are left out."""
        source = self.opened.source

        def pictures(count: int) -> Batch:
            """Images of exactly one class."""
            single = [i for i, s in enumerate(source.samples) if s.findings is None or len(s.findings) == 1]
            if not single:
                raise InputError("no image has exactly one label, so none is of one class alone")
            own = [next(iter(source.samples[i].stated), None) for i in single]
            chosen = [single[k] for k in draw(own, count, unit.seed)]
            parts = [loaded.batch for loaded in self.load(unit.checkpoint, chosen) if loaded.batch.ids]
            known = [p.labels if p.findings is None else p.findings.long().argmax(1) for p in parts]
            labels = [own for own in known if own is not None and self.opened.targets == "label"]
            ids = tuple(name for part in parts for name in part.ids)
            images = torch.cat([part.images for part in parts])
            return Batch(ids, images, torch.cat(labels) if labels else None)

        def annotated(count: int) -> list[Batch]:
            """Images with all their labels and annotations."""
            chosen = draw([next(iter(s.stated), None) for s in source.samples], count, unit.seed)
            return [loaded.batch for loaded in self.load(unit.checkpoint, chosen) if loaded.batch.ids]

        model, layer = self.opened.model(unit.checkpoint), self.opened.study.model.layer
        passes = {"seed": unit.seed, "progress": self.passed}
        methods = unit.methods or tuple(self.opened.study.methods)
        return ImagePool(model, methods, pictures, layer, passes, annotated, source.classes)

    def group(self, unit: PlannedUnit) -> None:
        """Compute and write a unit about all images of a checkpoint, or about several checkpoints."""
        opened, pool = self.opened, partial(self.image_pool, unit)
        ids = tuple(sample.id for sample in opened.source.samples)
        records: dict[Path, Mapping[str, Any]] = {}

        def compute(start: int, stop: int) -> list[Score]:
            return group_rows(self.folder, unit, ids, opened.model_name, opened.device, pool, records)

        ((rows, _),) = self._in_parts(1, compute)  # recordings are dropped first if memory runs out
        self.folder.write_unit(unit, rows, records=records)


def _joined(parts: Sequence[Mapping[str, Maps]]) -> dict[str, Maps]:
    """By method, the maps of all parts that can be stored, on the host."""
    methods = dict.fromkeys(method for part in parts for method in part)
    own = {method: [part[method].to("cpu") for part in parts if method in part] for method in methods}
    return {method: only_finite(Maps.concatenate(maps)) for method, maps in own.items()}


class PendingUnits(NamedTuple):
    """The units that an engine has to compute, and their context."""

    opened: ResolvedStudy
    folder: RunFolder
    plan: RunPlan
    blocks: Sequence[Block]  # of this shard, without the units that are done
    progress: Progress
    stop: threading.Event
    fail_fast: bool = False

    def ready_groups(self) -> list[PlannedUnit]:
        """Group units whose blocks are all done, by any process."""
        done = self.folder.done()

        def is_ready(unit: PlannedUnit) -> bool:
            return all(self.plan.hashes(of) <= done for of in unit.among or (unit.checkpoint, *unit.after))

        return [unit for unit in self.plan.groups if unit.hash not in done and is_ready(unit)]


def run_local(pending: PendingUnits) -> None:
    """Compute blocks checkpoint by checkpoint, with images decoded in threads, then group units of each."""
    worker = Worker(pending.opened, pending.folder, pending.progress.inputs)
    # By checkpoint, so that only one network is in memory and group metrics follow as early as possible.
    for checkpoint, blocks in groupby(pending.blocks, key=lambda block: block[0].checkpoint):
        _run_checkpoint(worker, pending, checkpoint, list(blocks))
        _run_groups(worker, pending)
    _run_groups(worker, pending)


def _run_checkpoint(worker: Worker, pending: PendingUnits, checkpoint: str, blocks: Sequence[Block]) -> None:
    # Every block but the last of a checkpoint is a full batch, so loader batches and blocks coincide.
    indices = [i for block in blocks for i in range(*block[0].images)]
    loading = worker.load(checkpoint, indices, pending.fail_fast)
    decoded = prefetched(loading, partial(worker.begin, blocks[0][0]))
    with closing(decoded), WriteQueue() as writing:
        for block, loaded in zip(blocks, decoded, strict=True):
            if pending.stop.is_set():
                raise StopRequested
            pending.progress.begin(block[0].image_count, sum(map(expected_inputs, block)))
            worker.run(block, loaded, writing)
            pending.progress.advance(block[0].image_count, len(block))
    for sentence in Accelerator(worker.opened.model(checkpoint)).describe():
        pending.progress.say(f"checkpoint {checkpoint}: {sentence}")


def expected_inputs(unit: PlannedUnit) -> int:
    """About how many inputs a unit sends through the network, from the options of its methods and metrics."""
    calls = read_methods(unit.methods)
    maps = sum(repetitions(call.entry.function, call.options) for call in calls) * (unit.kind == "explain")
    requests = read_metrics([text for text in unit.metrics if text not in BUILT_IN])
    return unit.image_count * (maps + len(calls) * sum(request.inputs for request in requests))


def _run_groups(worker: Worker, pending: PendingUnits) -> None:
    for unit in pending.ready_groups():
        if pending.stop.is_set():
            raise StopRequested
        metrics = ", ".join(unit.metrics)
        pending.progress.say(f"checkpoint {unit.checkpoint}: {metrics} over all images")
        with span("group", metrics):
            worker.group(unit)
        pending.progress.advance(0, 1)


def run_ray(pending: PendingUnits) -> None:
    """Compute all blocks on a Ray cluster, then the group units of checkpoints that are complete.

    Each block is a Ray task; the worker that runs it writes its units, whole or not at all, so a worker that
    dies loses only the unit in hand, which Ray runs again. A cluster is joined where RAY_ADDRESS names one,
    else started on this machine for the length of the run. All nodes must see the run folder, the images and
    the checkpoints under the same paths.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray = need("ray", "ray")
    started = not ray.is_initialized()
    if started:
        ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        _drive(ray, pending)
    finally:
        if started:
            ray.shutdown()


def _drive(ray: Any, pending: PendingUnits) -> None:
    gpus = 1 if pending.opened.device.startswith("cuda") else 0
    most = max(node["Resources"].get("CPU", 1) for node in ray.nodes() if node["Alive"])
    cpus = min(pending.opened.threads, most)
    remote = ray.remote(max_retries=RETRIES, num_cpus=cpus, num_gpus=gpus)(run_remote).remote
    shared = ray.put(pending.opened), str(pending.folder.path.resolve()), uuid.uuid4().hex, pending.fail_fast
    # A bounded number of tasks in flight, so that Ctrl-C waits for few and a large run needs little memory.
    window = 2 * max(1, int(ray.cluster_resources().get("CPU", 1) // cpus))
    blocks = deque(pending.blocks)
    flying: dict[Any, tuple[int, int]] = {}  # images and units by reference
    sent: set[str] = set()  # hashes of group units

    def send_groups() -> None:
        for unit in [] if pending.stop.is_set() else pending.ready_groups():
            if unit.hash not in sent:
                sent.add(unit.hash)
                flying[remote((unit,), *shared)] = 0, 1

    def send_blocks() -> None:
        while blocks and len(flying) < window and not pending.stop.is_set():
            block = blocks.popleft()
            flying[remote(block, *shared)] = block[0].image_count, len(block)

    send_groups()
    send_blocks()
    while flying:
        finished, _ = ray.wait(list(flying), num_returns=1, timeout=WAIT)
        for reference in finished:
            images, units = flying.pop(reference)
            try:
                problem = ray.get(reference)
            except ray.exceptions.RayTaskError:
                raise  # a bug: show its traceback
            except ray.exceptions.RayError as error:
                times = f"{RETRIES + 1} times on one unit ({str(error).strip().splitlines()[0]})"
                raise ModelError(f"a Ray worker died {times}; see Ray's logs, then run again") from error
            if problem is not None:
                raise InputError(problem)
            pending.progress.advance(images, units)
        if finished:
            send_blocks()
            if not any(images for images, _ in flying.values()) or not blocks:
                send_groups()
    if pending.stop.is_set():
        raise StopRequested


def run_remote(block: Block, opened: ResolvedStudy, path: str, run: str, fail_fast: bool) -> str | None:
    """Compute the missing units of a block, or a group unit, in a Ray worker.

    Returns the message of an error, since not every exception can be pickled.
    """
    if run not in _workers:  # a Ray process outlives a run, and the next may have other settings
        _workers.clear()
        _workers[run] = Worker(opened, RunFolder.open(path))
    worker = _workers[run]
    try:
        with fixed_threads(worker.opened.threads), limited_memory(worker.opened.device):
            if block[0].kind == "group":
                worker.group(block[0])
                return None
            done = worker.folder.done()
            left = tuple(unit for unit in block if unit.hash not in done)
            with WriteQueue() as writing:
                for loaded in worker.load(block[0].checkpoint, range(*block[0].images), fail_fast):
                    worker.run(left, loaded, writing)
    except HeatproofError as error:
        return str(error)
    return None


def usual_threads() -> int:
    """Threads of torch by default: OMP_NUM_THREADS, else one per CPU."""
    setting = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # one number per nested level
    return int(setting) if setting.isdecimal() and int(setting) else available_cpus()


def fastest_threads(
    work: Callable[[], object], most: int, clock: Callable[[], float] = time.perf_counter
) -> int:
    """Number of threads, `most` halved repeatedly, with which `work` is fastest; the fewest of similar ones.

    On a busy machine a thread without a CPU of its own delays the others. OMP_NUM_THREADS is not overruled.
    """
    if os.environ.get("OMP_NUM_THREADS", ""):
        return most
    seconds: dict[int, float] = {}
    for count in (most >> i for i in range(most.bit_length())):
        with fixed_threads(count):
            work()
            began = clock()
            for _ in range(REPEATED):
                work()
            seconds[count] = clock() - began
    return min(count for count, took in seconds.items() if took <= SIMILAR * min(seconds.values()))


@contextmanager
def fixed_threads(count: int) -> Iterator[None]:
    """Let torch use `count` threads in the calling thread, and one in threads that start meanwhile.

    If a thread that loads or writes has OpenMP threads of its own, there are more than CPUs, and those of a
    pass sleep after each layer instead of waiting actively, which makes passes slower.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    # The number of a running thread is its own; that of new threads is the last one set in any thread.
    other = threading.Thread(target=torch.set_num_threads, args=[1])
    other.start()
    other.join()
    try:
        yield
    finally:
        torch.set_num_threads(before)


class WriteQueue(ThreadPoolExecutor):
    """Call functions in order in one thread; an error is raised in the caller at the next call.

    Leaving the context waits for all of them, also after an error, so that computed units are written.
    """

    def __init__(self) -> None:
        super().__init__(1, thread_name_prefix="heatproof-write")
        self._pending: deque[Future[None]] = deque()

    def do(self, function: Callable[[], None]) -> None:
        # A bounded queue: if the disk is slower than the network, computed units must not fill the memory.
        self.finish(WAITING_UNITS - 1)
        self._pending.append(self.submit(function))

    def finish(self, left: int = 0) -> None:
        """Wait until at most this many calls are left in the queue."""
        with span("waiting", "writing"):
            while len(self._pending) > left:
                self._pending.popleft().result()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if error is None:
                self.finish()
        finally:
            self.shutdown(wait=True)


def prefetched(
    items: Generator[Item, None, None], prepare: Callable[[Item], object]
) -> Generator[Item, None, None]:
    """Yield items; the next one is fetched and prepared in a thread while the caller works on this one."""

    def fetch() -> Item | None:
        item = next(items, None)
        if item is not None:
            prepare(item)
        return item

    with closing(items), ThreadPoolExecutor(1, thread_name_prefix="heatproof-ahead") as pool:
        coming = pool.submit(fetch)
        while True:
            with span("waiting", "pictures"):
                item = coming.result()
            if item is None:
                return
            coming = pool.submit(fetch)
            yield item


@contextmanager
def stop_on_signal(say: Callable[[str], object]) -> Iterator[threading.Event]:
    """An event that Ctrl-C (or a cluster's SIGTERM) sets; a second one raises KeyboardInterrupt.

    Python runs a handler between two of its own instructions, so a long call into torch delays it, and two
    signals become one. Therefore the signal also writes a byte, which a thread reads and handles.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    handled = received = 0

    def handle(_number: int, _frame: FrameType | None) -> None:
        nonlocal handled
        handled += 1
        stop.set()
        if max(handled, received) > 1:
            raise KeyboardInterrupt

    def listen() -> None:
        nonlocal received
        while byte := reader.recv(1):
            if byte[0] in STOPPING:
                received += 1
                if received == 1:
                    stop.set()
                    say(ANSWER)

    reader, writer = socket.socketpair()
    writer.setblocking(False)
    listener = threading.Thread(target=listen, name="heatproof-ctrl-c", daemon=True)
    listener.start()
    before = {number: signal.signal(number, handle) for number in STOPPING}
    wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            signal.signal(number, handler)
        writer.close()  # which ends the listener
        listener.join()
        reader.close()
