"""What a run would cost, before it is started: counted from the plan, timed on its first pictures."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

from heatproof.errors import StoreError
from heatproof.images import batches
from heatproof.run.engine import Prepared, Worker, fixed_threads
from heatproof.run.plan import FREE, GROWING, Task, make_plan
from heatproof.run.progress import spell
from heatproof.store import Manifest, RunFolder

FEW = 4  # pictures


def estimate(prepared: Prepared, shard: tuple[int, int] = (0, 1)) -> Iterator[tuple[str, str]]:
    """Lines of a table: what, and how much."""
    manifest, done = _existing(prepared)
    source, study = prepared.opened.source, prepared.opened.study
    plan = make_plan(manifest, len(source))
    pending = [task for block in plan.shard(*shard) for task in block.tasks if task.unit.hash not in done]
    groups = [task for task in plan.groups if task.unit.hash not in done]
    yield "images", f"{len(source)} ({study.images.kind}), {len(source.classes) or 'no'} classes"
    yield "checkpoints", ", ".join(plan.checkpoints())
    yield "methods", ", ".join(study.methods)
    yield "metrics", ", ".join(request.text for request in prepared.opened.metrics) or "none"
    yield "explained class", prepared.opened.targets
    yield "run folder", str(prepared.path)
    finished = len(plan.units) - len([u for u in plan.units if u.hash not in done])
    yield "units", f"{len(plan.units)} of up to {study.run.batch_size} images, {finished} done"
    yield "to do", f"{len(pending)} units in this shard, then {len(groups)} about whole checkpoints"
    if pending:
        yield from _timed(prepared, pending)


def _existing(prepared: Prepared) -> tuple[Manifest, set[str]]:
    """The manifest the run would have, and what is done of it; nothing is written."""
    if not (prepared.path / "run.json").exists():
        return prepared.manifest, set()
    folder = RunFolder.open(prepared.path)
    changes = folder.manifest.changes(prepared.manifest, GROWING, FREE)
    if refused := [change.sentence for change in changes if not change.addition]:
        raise StoreError(f"{prepared.path} was started with other settings: {'; '.join(refused)}")
    manifest = prepared.manifest.grown_from(folder.manifest) if changes else folder.manifest
    return manifest, folder.done()


def _timed(prepared: Prepared, pending: list[Task]) -> Iterator[tuple[str, str]]:
    """seconds = a + b images for each kind of unit, from a single picture and from a few."""
    opened = prepared.opened
    worker = Worker(opened, RunFolder(prepared.path, prepared.manifest))
    seconds, inputs = 0.0, 0.0
    kinds: dict[tuple[str, tuple[str, ...]], list[Task]] = {}
    for task in pending:
        if task.kind == "explain":
            kinds.setdefault((task.unit.checkpoint, task.unit.methods), []).append(task)
    for (checkpoint, _), tasks in kinds.items():
        one, few = (_try(worker, tasks[0], checkpoint, count) for count in (1, FEW))
        if one is None or few is None:
            yield "estimated time", f"unknown: the first {FEW} pictures cannot be read"
            return
        images = sum(task.unit.images[1] - task.unit.images[0] for task in tasks)
        each = max(few.seconds - one.seconds, 0.0) / max(few.images - one.images, 1)
        seconds += images * each + len(tasks) * max(one.seconds - each, 0.0)
        inputs += images * few.inputs / few.images
    later = any(task.kind == "score" for task in pending)
    note = "; metrics added to stored maps come on top" if later else ""
    yield "forward passes", f"about {inputs:,.0f} inputs through the network{note}"
    basis = f"from {FEW} pictures on {opened.device}, metrics over whole checkpoints not counted"
    yield "estimated time", f"about {spell(seconds)}, {basis}"


class _Trial(NamedTuple):
    images: int
    seconds: float  # decoding included
    inputs: int


def _try(worker: Worker, task: Task, checkpoint: str, count: int) -> _Trial | None:
    """Decode and compute the first pictures twice; the second time counts, as the first one warms up."""
    source, model = worker.opened.source, worker.opened.model(checkpoint)
    for _ in range(2):
        start = time.perf_counter()
        indices = range(min(count, len(source)))
        loaded = next(iter(batches(source, model.preprocess, count, indices, 0)))
        if not loaded.batch.ids:
            return None
        with fixed_threads(worker.opened.threads), _counting(model.module) as passed:
            worker.compute(task, loaded)
        trial = _Trial(len(loaded.batch.ids), time.perf_counter() - start, sum(passed))
    return trial


@contextmanager
def _counting(module: nn.Module) -> Iterator[list[int]]:
    """The size of every batch that goes through the module."""
    passed: list[int] = []

    def seen(_module: nn.Module, inputs: tuple[Any, ...], _output: Any) -> None:
        passed.append(len(inputs[0]))

    handle = module.register_forward_hook(seen)
    try:
        yield passed
    finally:
        handle.remove()
