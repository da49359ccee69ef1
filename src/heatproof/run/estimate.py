"""What a run would cost, before it is started: counted from the plan, timed on two of its pictures."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from heatproof.errors import StoreError
from heatproof.images import Loaded, batches
from heatproof.run.engine import Prepared, Worker, fixed_threads
from heatproof.run.plan import FREE, GROWING, Plan, Task, make_plan
from heatproof.run.progress import spell
from heatproof.store import Manifest, RunFolder

TRIED = 2  # pictures


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
        yield from _timed(prepared, plan, pending)


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


def _timed(prepared: Prepared, plan: Plan, pending: list[Task]) -> Iterator[tuple[str, str]]:
    """Time and inputs of each kind of unit on a few pictures, times the number of pictures."""
    opened = prepared.opened
    worker = Worker(opened, RunFolder(prepared.path, prepared.manifest))
    kinds = {(task.unit.checkpoint, task.kind, task.unit.methods): task for task in pending}
    seconds = inputs = 0.0
    later = False
    for (checkpoint, kind, methods), task in kinds.items():
        alike = [
            t for t in pending if (t.unit.checkpoint, t.kind, t.unit.methods) == (checkpoint, kind, methods)
        ]
        if kind == "score":
            later = True
            continue
        pictures, decoding = _some(prepared, checkpoint)
        if not pictures.batch.ids:
            yield "estimated time", "unknown: the first pictures cannot be read"
            return
        model = opened.model(checkpoint)
        with fixed_threads(opened.threads), _counting(model.module) as passed:
            start = time.perf_counter()
            worker.compute(task, pictures)
            spent = time.perf_counter() - start
        count = sum(t.unit.images[1] - t.unit.images[0] for t in alike)
        seconds += count * (spent + decoding) / len(pictures.batch.ids)
        inputs += count * sum(passed) / len(pictures.batch.ids)
    note = "; metrics added to stored maps come on top" if later else ""
    yield "forward passes", f"about {inputs:,.0f} inputs through the network{note}"
    basis = f"from {TRIED} pictures on {opened.device}, metrics over whole checkpoints not counted"
    yield "estimated time", f"about {spell(seconds)}, {basis}"


def _some(prepared: Prepared, checkpoint: str) -> tuple[Loaded, float]:
    """The first readable pictures, and the seconds it took to decode them."""
    source, preprocess = prepared.opened.source, prepared.opened.model(checkpoint).preprocess
    start = time.perf_counter()
    indices = range(min(TRIED, len(source)))
    loaded = next(iter(batches(source, preprocess, TRIED, indices, 0)))
    return loaded, time.perf_counter() - start


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
