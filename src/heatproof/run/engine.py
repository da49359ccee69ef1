"""A run from start to end: open the study and its folder, plan, hand blocks to an engine, then the groups.

The numbers depend on neither engine, shards nor workers: a unit is one batch, decoded, explained and scored
by itself, with the number of torch threads the run began with. (On a CPU the order in which torch adds up
follows the number of threads, so it is part of the run; on a GPU, bits also depend on the kind of GPU.)
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from heatproof.errors import InputError, did_you_mean
from heatproof.images import Loaded
from heatproof.images.loader import available_cpus
from heatproof.run.across import across_rows
from heatproof.run.group import group_rows
from heatproof.run.plan import FREE, GROWING, Block, Plan, Task, make_plan
from heatproof.run.progress import Progress
from heatproof.run.score import Rows, Scene, as_stored, blanked, explain_batch, finite, is_first, storable
from heatproof.run.study import Opened, check_study, open_study
from heatproof.store import Manifest, RunFolder
from heatproof.store._files import storable as stored_name
from heatproof.store.maps import MapStore
from heatproof.types import Batch, Maps, Score

ENGINES = ("local", "ray")


class Stopped(Exception):
    """Somebody asked the run to stop; everything finished is on disk."""


@dataclass
class Worker:
    """Computes tasks and writes them. One per process."""

    opened: Opened
    folder: RunFolder

    @cached_property
    def stored(self) -> MapStore:
        return self.folder.maps()  # which reads each index once

    def run(self, tasks: Sequence[Task], loaded: Loaded) -> None:
        """Compute the tasks of one block on its decoded pictures, and write each."""
        for task in tasks:
            scores, maps = self.compute(task, loaded)
            keep = self.opened.study.run.pictures and is_first(task)
            pictures = self.pictures(task, loaded.batch) if keep else None
            self.folder.write_unit(task.unit, scores, maps, pictures)

    def pictures(self, task: Task, batch: Batch) -> dict[str, np.ndarray]:
        """The pictures of a block as the model sees them, 8 bits, those that are not kept yet."""
        missing = set(self.folder.pictures().missing(batch.ids))
        rows = [i for i, name in enumerate(batch.ids) if name in missing]
        if not rows:
            return {}
        shown = self.opened.model(task.unit.checkpoint).preprocess.restore(batch.images[rows])
        if shown.shape[1] == 1:
            shown = shown.expand(-1, 3, -1, -1)
        pixels = shown.mul(255).round().clamp(0, 255).byte().permute(0, 2, 3, 1).cpu().numpy()
        return {batch.ids[i]: pixels[k] for k, i in enumerate(rows)}

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
                model, batch, unit.methods, targets, study.model.layer, size, unit.seed
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
        scene = Scene(model, batch, seen, explained, study.model.layer, size, unit.seed)
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
    names = [stored_name(name) for name in batch.ids]
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


@dataclass(frozen=True)
class Prepared:
    """A study that passed every check, and the manifest of the run it asks for."""

    opened: Opened
    manifest: Manifest
    path: Path


def prepare(study: str | Path, out: str | Path | None = None) -> Prepared:
    """Check everything that can be checked before work starts; nothing is written."""
    opened = open_study(study)
    chosen = opened.study.run.out
    path = (
        Path(out)
        if out
        else Path(os.path.normpath(opened.folder / chosen))
        if chosen
        else Path("runs") / Path(study).stem
    )
    _settle(opened, path)
    hashes = check_study(opened)
    manifest = Manifest.collect(
        opened.config,
        seed=opened.study.run.seed,
        models=hashes,
        data=opened.source.hash,
        device=opened.device,
        classes=opened.source.classes,
    )
    return Prepared(opened, manifest, path)


def _settle(opened: Opened, path: Path) -> None:
    """Device and threads: as the study says, else as the run began, else what this machine has."""
    begun = RunFolder.open(path).manifest.config.get("run", {}) if (path / "run.json").exists() else {}
    fastest = "cuda" if torch.cuda.is_available() else "cpu"
    opened.device = opened.study.run.device or begun.get("device") or fastest
    opened.threads = opened.study.run.threads or begun.get("threads") or available_cpus()


def run_study(
    study: str | Path,
    out: str | Path | None = None,
    *,
    engine: str = "local",
    shard: tuple[int, int] = (0, 1),
    fail_fast: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Run a study, or go on with it: units that are done are left alone.

    shard: which of how many; each takes every n-th block, and the last to finish adds the group metrics.
    fail_fast: stop at the first picture that cannot be used, instead of reporting it as a row.
    """
    if engine not in ENGINES:
        raise InputError(f"there is no engine {engine!r}; {did_you_mean(engine, ENGINES)}")
    prepared = prepare(study, out)
    opened = prepared.opened
    folder = RunFolder.resume(prepared.path, prepared.manifest, growing=GROWING, free=FREE)
    plan = make_plan(folder.manifest, len(opened.source))
    progress = progress or Progress(quiet=True)
    with (
        folder.lock(f"{shard[0]}/{shard[1]}"),
        asking_to_stop(progress) as stop,
        fixed_threads(opened.threads),
    ):
        done = folder.done()
        jobs = [
            Job(b, t)
            for b in plan.shard(*shard)
            if (t := tuple(t for t in b.tasks if t.unit.hash not in done))
        ]
        progress.start(sum(job.images for job in jobs), len(plan.units), len(done))
        work = Work(opened, folder, plan, jobs, progress, stop, fail_fast)
        stopped = False
        try:
            _engine(engine)(work)
        except Stopped:
            stopped = True
        finally:
            progress.finish()
    hashes = {unit.hash for unit in plan.units}
    broken = folder.scores().sql(
        "select distinct image, reason from scores where metric = 'image' order by all"
    )
    return Result(folder, len(hashes), len(folder.done() & hashes), progress.images, broken, stopped)


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


@contextmanager
def fixed_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def asking_to_stop(progress: Progress) -> Iterator[threading.Event]:
    """Ctrl-C (or a cluster's SIGTERM) asks to stop after the unit in hand; a second one stops at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def asked(_number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        progress.say_at_once("stopping after the units in hand; Ctrl-C again stops at once")

    before = {number: signal.signal(number, asked) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
