"""The engine that spreads blocks over a Ray cluster.

Each block is a Ray task; the worker that runs it writes its units itself, whole or not at all, so a worker
that dies loses nothing but the unit in hand, which Ray runs again. The driver writes only the manifest. A
cluster is joined where RAY_ADDRESS names one, else started on this machine for the length of the run. All
nodes must see the run folder, the images and the checkpoints under the same paths.
"""

from __future__ import annotations

import os
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any

from heatproof.errors import HeatproofError, InputError, ModelError, need
from heatproof.images import batches
from heatproof.run.background import WriteQueue
from heatproof.run.plan import Block, Task
from heatproof.run.process import fixed_threads
from heatproof.run.study import ResolvedStudy
from heatproof.run.worker import Work, Worker
from heatproof.store import RunFolder
from heatproof.store.folder import StopRequested

RETRIES = 5  # of a task whose worker died; an error in the task itself is not tried again
WAIT = 0.5  # seconds between looks at Ctrl-C

_workers: dict[str, Worker] = {}  # of this process, by run: a model stays loaded from task to task


def run_ray(work: Work) -> None:
    """All blocks, then the group tasks of checkpoints that are complete."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ray = need("ray", "ray")
    started = not ray.is_initialized()
    if started:
        ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        _drive(ray, work)
    finally:
        if started:
            ray.shutdown()


def _drive(ray: Any, work: Work) -> None:
    gpus = 1 if work.opened.device.startswith("cuda") else 0
    cpus = max(node["Resources"].get("CPU", 1) for node in ray.nodes() if node["Alive"])
    options = {"max_retries": RETRIES, "num_cpus": min(work.opened.threads, cpus), "num_gpus": gpus}
    remote_block, remote_group = (ray.remote(**options)(f) for f in (run_block, run_group))
    shared = ray.put(work.opened)
    path, run = str(work.folder.path.resolve()), uuid.uuid4().hex
    window = 2 * max(1, int(ray.cluster_resources().get("CPU", 1) // options["num_cpus"]))
    jobs = deque(work.jobs)
    flying: dict[Any, tuple[int, int]] = {}
    asked: set[str] = set()  # group tasks are sent once

    def send_more() -> None:
        if work.stop.is_set():
            return
        while jobs and len(flying) < window:
            job = jobs.popleft()
            reference = remote_block.remote(shared, path, run, job.block, work.fail_fast)
            flying[reference] = job.images, len(job.tasks)

    def send_groups() -> None:
        for task in [] if work.stop.is_set() else work.ready_groups():
            if task.unit.hash not in asked:
                asked.add(task.unit.hash)
                flying[remote_group.remote(shared, path, run, task)] = 0, 1

    send_groups()
    send_more()
    while flying:
        finished, _ = ray.wait(list(flying), num_returns=1, timeout=WAIT)
        for reference in finished:
            images, units = flying.pop(reference)
            _take(ray, reference)
            work.progress.advance(images, units)
        if finished:
            send_more()
            if not any(images for images, _ in flying.values()) or not jobs:
                send_groups()
    if work.stop.is_set():
        raise StopRequested


def _take(ray: Any, reference: Any) -> None:
    try:
        problem = ray.get(reference)
    except ray.exceptions.RayTaskError:
        raise  # a bug: its traceback is wanted
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"a Ray worker died {RETRIES + 1} times on one unit ({reason}); see Ray's logs, then run again"
        ) from error
    if problem is not None:
        raise InputError(problem)


def run_block(opened: ResolvedStudy, path: str, run: str, block: Block, fail_fast: bool) -> str | None:
    """What a worker does: the tasks of a block that are not done; a sentence where that is impossible."""

    def work(worker: Worker) -> None:
        done = worker.folder.done()
        tasks = [task for task in block.tasks if task.unit.hash not in done]
        source, settings = worker.opened.source, worker.opened.study.run
        preprocess, indices = worker.opened.model(block.checkpoint).preprocess, range(*block.images)
        loading = batches(source, preprocess, settings.batch_size, indices, settings.workers, fail_fast)
        with WriteQueue() as behind:
            for loaded in loading:
                worker.run(tasks, loaded, behind)

    return _tried(_worker(opened, path, run), work)


def run_group(opened: ResolvedStudy, path: str, run: str, task: Task) -> str | None:
    return _tried(_worker(opened, path, run), lambda worker: worker.group(task))


def _tried(worker: Worker, work: Callable[[Worker], None]) -> str | None:
    """The sentence of an error: not every exception survives the way back as it was."""
    try:
        with fixed_threads(worker.opened.threads):
            work(worker)
    except HeatproofError as error:
        return str(error)
    return None


def _worker(opened: ResolvedStudy, path: str, run: str) -> Worker:
    """The worker of this run: a process of a cluster outlives a run, and the next may have other settings."""
    if run not in _workers:
        _workers.clear()
        _workers[run] = Worker(opened, RunFolder.open(path))
    return _workers[run]
