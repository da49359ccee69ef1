"""A run from start to end: open the study and its folder, plan, hand blocks to an engine, then the groups.

The numbers depend on neither engine, shards nor workers: a unit is one batch, decoded, explained and scored
by itself, with the number of torch threads the run began with. (On a CPU the order in which torch adds up
follows the number of threads, so it is part of the run; on a GPU, bits also depend on the kind of GPU.)
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from heatproof.disk import valid_unicode
from heatproof.errors import InputError, did_you_mean
from heatproof.images import Loaded, batches
from heatproof.run.across import across_rows
from heatproof.run.group import group_rows
from heatproof.run.plan import Block, Plan, Task, make_plan
from heatproof.run.process import asking_to_stop, fixed_threads, usual_threads
from heatproof.run.progress import Progress
from heatproof.run.provenance import BY_MTIME, FREE, GROWING, Origin, code_hashes, filled
from heatproof.run.resume import broken_images, enough_memory, forget_broken, mend, say_makers
from heatproof.run.score import Rows, Scene, as_stored, blanked, explain_batch, finite, is_first, storable
from heatproof.run.study import Opened, check_study, open_study
from heatproof.show import pixels
from heatproof.store import Manifest, RunFolder
from heatproof.store.folder import Stopped
from heatproof.store.maps import MapStore
from heatproof.types import Batch, Maps, Score

ENGINES = ("local", "ray")
PAUSES = 0.5, 2.0  # seconds before a picture that could not be read is tried again
MANY = 1000  # pictures whose hashing one may notice
FRUITLESS = 3  # pauses in a row that helped nothing; then there are no more


@dataclass
class Worker:
    """Computes tasks and writes them. One per process."""

    opened: Opened
    folder: RunFolder
    passed: Callable[[int], object] | None = None  # told the number of inputs behind each batch
    fruitless: int = 0

    @cached_property
    def stored(self) -> MapStore:
        return self.folder.maps()  # which reads each index once

    def run(self, tasks: Sequence[Task], loaded: Loaded) -> None:
        """Compute the tasks of one block on its decoded pictures, and write each."""
        if not tasks:
            return
        span, origin = tasks[0].unit.images, self.opened.origin
        loaded = self.patiently(tasks[0], loaded)
        if origin is not None:
            origin.check(self.opened.source, span, loaded)
        for task in tasks:
            scores, maps = self.compute(task, loaded)
            keep = self.opened.study.run.pictures and is_first(task)
            pictures = self.pictures(task, loaded.batch) if keep else None
            self.folder.write_unit(task.unit, scores, maps, pictures)

    def patiently(self, task: Task, loaded: Loaded) -> Loaded:
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

    def pictures(self, task: Task, batch: Batch) -> dict[str, np.ndarray]:
        """The pictures of a block as the model sees them, 8 bits, those that are not kept yet."""
        missing = set(self.folder.unkept(batch.ids))
        rows = [i for i, name in enumerate(batch.ids) if name in missing]
        if not rows:
            return {}
        shown = pixels(batch.images[rows], self.opened.model(task.unit.checkpoint).preprocess)
        return {batch.ids[i]: shown[k] for k, i in enumerate(rows)}

    def compute(self, task: Task, loaded: Loaded) -> tuple[list[Score], dict[str, Maps]]:
        """Rows and new maps of one block task."""
        batch, study = loaded.batch, self.opened.study
        model, unit = self.opened.model(task.unit.checkpoint), task.unit
        rows = Rows(self.opened.model_name, unit)
        scores: list[Score] = []
        if is_first(task):
            labels = {s.id: s.label for s in self.opened.source.samples[slice(*unit.images)]}
            scores += rows.broken(loaded.failures, labels)
        if not batch.ids:
            return scores, {}
        targets = batch.labels if self.opened.targets == "label" else None
        size = study.run.batch_size
        if task.kind == "explain":
            made, logits = explain_batch(
                model, batch, unit.methods, targets, study.model.layer, size, unit.seed, self.passed
            )
            if is_first(task):
                scores += rows.answers(batch, logits)
        else:
            made = {name: _stored_maps(self.stored, unit.checkpoint, name, batch) for name in unit.methods}
        bad = {name: (~finite(maps)).tolist() for name, maps in made.items()}
        seen = {name: blanked(maps) for name, maps in made.items()}
        if task.kind == "explain":
            seen = {name: as_stored(maps) for name, maps in seen.items()}
        explained = torch.stack([maps.explained for maps in made.values()]).amax(0)
        scene = Scene(model, batch, seen, explained, study.model.layer, size, unit.seed, self.passed)
        scores += rows.scores(scene, bad)
        return scores, {name: storable(maps) for name, maps in made.items()} if task.kind == "explain" else {}

    def group(self, task: Task) -> None:
        if task.among:
            self.folder.write_unit(task.unit, across_rows(self.folder, task, self.opened.model_name))
            return
        ids = tuple(sample.id for sample in self.opened.source.samples)
        rows = group_rows(self.folder, task, ids, self.opened.model_name, self.opened.device)
        self.folder.write_unit(task.unit, rows)


def _stored_maps(store: MapStore, checkpoint: str, method: str, batch: Batch) -> Maps:
    """A method's maps of these images; one that could not be stored is NaN, and explains nobody (-1)."""
    names = [valid_unicode(name) for name in batch.ids]
    rows = [i for i, known in enumerate(store.known(checkpoint, method, names)) if known]
    size = int(batch.images.shape[-2]), int(batch.images.shape[-1])
    values, signed = torch.full((len(names), 1, 1), torch.nan), None
    explained = torch.full((len(names),), -1)
    if rows:
        found = store.read(checkpoint, method, [names[i] for i in rows])
        values = torch.full((len(names), *found.values.shape[1:]), torch.nan)
        values[rows], explained[rows], size = found.values, found.explained, found.image_size
        if found.signed_values is not None:
            signed = torch.zeros(len(names), *found.signed_values.shape[1:])
            signed[rows] = found.signed_values
    return Maps(method, values, size, explained, batch.ids, signed)


@dataclass(frozen=True)
class Result:
    """How a run went."""

    folder: RunFolder
    units: int  # of the whole run
    done: int  # of them, now
    computed: int  # pictures that went through this call, once for each checkpoint
    broken: list[dict[str, Any]]  # image and reason of every picture that could not be used
    stopped: bool = False

    @property
    def unanswered(self) -> int:
        """Pictures for which the network's output was NaN, at one checkpoint or more."""
        return self.folder.status().unanswered


@dataclass(frozen=True)
class Prepared:
    """A study that passed every check, and the manifest of the run it asks for."""

    opened: Opened
    manifest: Manifest
    path: Path

    @property
    def pictures(self) -> list[tuple[str, str]]:
        return self.opened.origin.pictures if self.opened.origin else []


def prepare(
    study: str | Path | Mapping[str, Any], out: str | Path | None = None, trust_mtime: bool = False,
    say: Callable[[str], object] = lambda text: None,
) -> Prepared:  # fmt: skip
    """Check everything that can be checked before work starts; nothing is written.

    trust_mtime: in a new run, sizes and times of files stand for their contents.
    """
    opened = open_study(study)
    chosen = opened.study.run.out
    path = (
        Path(out)
        if out
        else Path(os.path.normpath(opened.folder / chosen))
        if chosen
        else Path("runs") / ("study" if isinstance(study, Mapping) else Path(study).stem)
    )
    begun = RunFolder.open(path).manifest if (path / "run.json").exists() else None
    _settle(opened, begun)
    with enough_memory(opened.study.run.batch_size):
        hashes = check_study(opened)
    by_mtime = begun.pictures.startswith(BY_MTIME) if begun and begun.pictures else trust_mtime
    if begun is None and len(opened.source) >= MANY and not by_mtime:
        say(f"reading {len(opened.source):,} pictures to know them by their contents")
    opened.origin = Origin.of(opened.source, path, by_mtime)
    manifest = Manifest.collect(
        opened.config,
        seed=opened.study.run.seed,
        models=hashes,
        data=opened.source.hash,
        device=opened.device,
        classes=opened.source.classes,
        pictures=opened.origin.hash,
        code=code_hashes(opened.study.model.spec, opened.folder),
    )
    return Prepared(opened, manifest, path)


def _settle(opened: Opened, manifest: Manifest | None) -> None:
    """Device and threads: as the study says, else as the run began, else what this machine has."""
    begun = manifest.config.get("run", {}) if manifest else {}
    fastest = "cuda" if torch.cuda.is_available() else "cpu"
    opened.device = opened.study.run.device or begun.get("device") or fastest
    opened.threads = opened.study.run.threads or begun.get("threads") or usual_threads()


def run_study(
    study: str | Path | Mapping[str, Any],
    out: str | Path | None = None,
    *,
    engine: str = "local",
    shard: tuple[int, int] = (0, 1),
    fail_fast: bool = False,
    progress: Progress | None = None,
    retry_broken: bool = False,
    trust_mtime: bool = False,
) -> Result:
    """Run a study, or go on with it: units that are done are left alone.

    shard: which of how many; each takes every n-th block, and the last to finish adds the group metrics.
    fail_fast: stop at the first picture that cannot be used, instead of reporting it as a row.
    retry_broken: try pictures again that could not be used; their files may have changed meanwhile.
    trust_mtime: in a new run, know pictures by size and time of change instead of by their contents.
    """
    if engine not in ENGINES:
        raise InputError(f"there is no engine {engine!r}; {did_you_mean(engine, ENGINES)}")
    progress = progress or Progress(quiet=True)
    prepared = prepare(study, out, trust_mtime, progress.say)
    opened = prepared.opened
    folder = RunFolder.resume(
        prepared.path, prepared.manifest, GROWING, FREE, prepared.pictures,
        forgiven=forget_broken(prepared.path, prepared.pictures) if retry_broken else (), filled=filled,
    )  # fmt: skip
    if opened.origin:
        opened.origin.remember(folder.path)
    plan = make_plan(folder.manifest, len(opened.source), prepared.pictures)
    progress.say(f"the network's output: {opened.head}")
    folder.plan([unit.hash for unit in plan.units], len(opened.source), plan.checkpoints())
    stopped = False
    try:
        with (
            folder.lock(f"{shard[0]}/{shard[1]}"),
            asking_to_stop(progress.say_at_once) as stop,
            fixed_threads(opened.threads),
            enough_memory(opened.study.run.batch_size),
        ):
            done = folder.done()
            blocks = plan.shard(*shard)
            own = {task.unit.hash for block in blocks for task in block.tasks}
            mend(folder, own | {task.unit.hash for task in plan.groups}, progress.say)
            say_makers(folder, opened.device, progress.say)
            jobs = [Job(b, t) for b in blocks if (t := tuple(t for t in b.tasks if t.unit.hash not in done))]
            progress.start(sum(job.images for job in jobs), len(plan.units), len(done))
            try:
                _engine(engine)(Work(opened, folder, plan, jobs, progress, stop, fail_fast))
            finally:
                progress.finish()
    except Stopped:
        stopped = True
    hashes = {unit.hash for unit in plan.units}
    done = folder.done() & hashes
    return Result(folder, len(hashes), len(done), progress.images, broken_images(folder), stopped)


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

    opened: Opened
    folder: RunFolder
    plan: Plan
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
            and all(self.plan.hashes(of) <= done for of in task.among or (task.unit.checkpoint,))
        ]


def _engine(name: str) -> Callable[[Work], None]:
    if name == "ray":
        from heatproof.run.ray_engine import run_ray  # an extra

        return run_ray
    from heatproof.run.local import run_local  # which builds on this file

    return run_local
