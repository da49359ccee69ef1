"""The engine that needs nothing: this process, with pictures decoded in threads while the model works."""

from __future__ import annotations

from contextlib import closing
from itertools import groupby

from heatproof.images import batches
from heatproof.run.engine import Job, Stopped, Work, Worker


def run_local(work: Work) -> None:
    """Blocks checkpoint by checkpoint, then what can be said about all images of each."""
    worker = Worker(work.opened, work.folder, work.progress.inputs)
    for checkpoint, jobs in groupby(work.jobs, key=lambda job: job.block.checkpoint):
        _run_checkpoint(worker, work, checkpoint, list(jobs))
        run_groups(worker, work)
    run_groups(worker, work)


def _run_checkpoint(worker: Worker, work: Work, checkpoint: str, jobs: list[Job]) -> None:
    settings = work.opened.study.run
    # Every block but a checkpoint's last is a full batch, so the loader cuts its batches where blocks end.
    loaded = batches(
        work.opened.source,
        work.opened.model(checkpoint).preprocess,
        settings.batch_size,
        [i for job in jobs for i in range(*job.block.images)],
        settings.workers,
        work.fail_fast,
    )
    with closing(loaded):  # type: ignore[type-var]
        for job, pictures in zip(jobs, loaded, strict=True):
            if work.stop.is_set():
                raise Stopped
            worker.run(job.tasks, pictures)
            work.progress.advance(job.images, len(job.tasks))


def run_groups(worker: Worker, work: Work) -> None:
    for task in work.ready_groups():
        if work.stop.is_set():
            raise Stopped
        work.progress.say(f"{task.unit.checkpoint}: {', '.join(task.unit.metrics)} over all images")
        worker.group(task)
        work.progress.advance(0, 1)
