"""The engine that distributes units over a Ray cluster.

Each block of units is a Ray task; the worker that runs it writes its units, whole or not at all, so a worker
that dies loses only the unit in hand, which Ray runs again. The driver writes only the manifest. A cluster is
joined where RAY_ADDRESS names one, else started on this machine for the length of the run. All nodes must see
the run folder, the images and the checkpoints under the same paths.
"""

from __future__ import annotations

import os
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any

from heatproof.errors import HeatproofError, InputError, ModelError, need
from heatproof.images import batches
from heatproof.run.plan import Block, PlannedUnit
from heatproof.run.process import WriteQueue, fixed_threads
from heatproof.run.study import ResolvedStudy
from heatproof.run.worker import PendingUnits, Worker
from heatproof.store import RunFolder
from heatproof.store.folder import StopRequested

RETRIES = 5  # of a task whose worker died; an error in the task itself is not tried again
WAIT = 0.5  # seconds between looks at Ctrl-C

_workers: dict[str, Worker] = {}  # of this process, by run: a model stays loaded from task to task


def run_ray(pending: PendingUnits) -> None:
    """Compute all blocks, then the group units of checkpoints that are complete."""
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
    cpus = max(node["Resources"].get("CPU", 1) for node in ray.nodes() if node["Alive"])
    options = {"max_retries": RETRIES, "num_cpus": min(pending.opened.threads, cpus), "num_gpus": gpus}
    remote_block, remote_group = (ray.remote(**options)(f) for f in (run_block, run_group))
    shared = ray.put(pending.opened)
    path, run = str(pending.folder.path.resolve()), uuid.uuid4().hex
    window = 2 * max(1, int(ray.cluster_resources().get("CPU", 1) // options["num_cpus"]))
    blocks = deque(pending.blocks)
    flying: dict[Any, tuple[int, int]] = {}  # images and units by reference
    sent: set[str] = set()  # hashes of group units

    def send_more() -> None:
        if pending.stop.is_set():
            return
        # A bounded number of tasks in flight, so that Ctrl-C waits for few and a large run needs little
        # memory.
        while blocks and len(flying) < window:
            block = blocks.popleft()
            reference = remote_block.remote(shared, path, run, block, pending.fail_fast)
            flying[reference] = block[0].image_count, len(block)

    def send_groups() -> None:
        for unit in [] if pending.stop.is_set() else pending.ready_groups():
            if unit.hash not in sent:
                sent.add(unit.hash)
                flying[remote_group.remote(shared, path, run, unit)] = 0, 1

    send_groups()
    send_more()
    while flying:
        finished, _ = ray.wait(list(flying), num_returns=1, timeout=WAIT)
        for reference in finished:
            images, units = flying.pop(reference)
            _take(ray, reference)
            pending.progress.advance(images, units)
        if finished:
            send_more()
            if not any(images for images, _ in flying.values()) or not blocks:
                send_groups()
    if pending.stop.is_set():
        raise StopRequested


def _take(ray: Any, reference: Any) -> None:
    try:
        problem = ray.get(reference)
    except ray.exceptions.RayTaskError:
        raise  # a bug: show its traceback
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(
            f"a Ray worker died {RETRIES + 1} times on one unit ({reason}); see Ray's logs, then run again"
        ) from error
    if problem is not None:
        raise InputError(problem)


def run_block(opened: ResolvedStudy, path: str, run: str, block: Block, fail_fast: bool) -> str | None:
    """Compute the missing units of a block in a worker; return the message of an error."""

    def compute(worker: Worker) -> None:
        done = worker.folder.done()
        left = tuple(unit for unit in block if unit.hash not in done)
        source, settings = worker.opened.source, worker.opened.study.run
        preprocess, indices = worker.opened.model(block[0].checkpoint).preprocess, range(*block[0].images)
        loading = batches(source, preprocess, settings.batch_size, indices, settings.workers, fail_fast)
        with WriteQueue() as writing:
            for loaded in loading:
                worker.run(left, loaded, writing)

    return _tried(_worker(opened, path, run), compute)


def run_group(opened: ResolvedStudy, path: str, run: str, unit: PlannedUnit) -> str | None:
    return _tried(_worker(opened, path, run), lambda worker: worker.group(unit))


def _tried(worker: Worker, compute: Callable[[Worker], None]) -> str | None:
    """Return the message of an error, since not every exception can be pickled."""
    try:
        with fixed_threads(worker.opened.threads):
            compute(worker)
    except HeatproofError as error:
        return str(error)
    return None


def _worker(opened: ResolvedStudy, path: str, run: str) -> Worker:
    """The worker of this run; a Ray process outlives a run, and the next may have other settings."""
    if run not in _workers:
        _workers.clear()
        _workers[run] = Worker(opened, RunFolder.open(path))
    return _workers[run]
