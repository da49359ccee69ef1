"""Batches from a source: decoded in threads, in order, a bounded number ahead, with broken images reported.

Threads, not processes: on two cores they decode a photograph in 12.8 ms against 11.1 ms, because Pillow
mostly works without Python's lock, but start at once, where processes that are safe beside torch and CUDA
import torch first (11 to 20 s and 610 MB each). They also work inside Ray or a notebook.

Which images share a batch, and all numbers in it, follow from the arguments alone, never from the timing of
the workers.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from heatproof.errors import InputError
from heatproof.images.findings import entry_id, finding_name
from heatproof.images.preprocess import Carried, Preprocess
from heatproof.images.source import Source
from heatproof.timeline import span
from heatproof.types import Batch, Truth

MOST_WORKERS = 16
TRANSIENT = (
    errno.ENOENT, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EAGAIN, errno.EMFILE,
)  # fmt: skip


class Failure(NamedTuple):
    """An image that could not be used, with the reason.

    Args:
        id, reason: name of the image, and one sentence.
        transient: whether a retry may succeed: the file is missing or the disk failed.

    Example:
        >>> Failure("scan7.png", "the file is empty").reason
        'the file is empty'
    """

    id: str
    reason: str
    transient: bool = False


class Loaded(NamedTuple):
    """A batch, and the images that failed. If all failed, the batch has no images.

    Args:
        batch, failures: the images that could be used, and the others.

    Example:
        >>> import torch
        >>> len(Loaded(Batch(("a.png",), torch.rand(1, 3, 8, 8)), [Failure("b.png", "it is empty")]).failures)
        1
    """

    batch: Batch
    failures: list[Failure]


class Known(NamedTuple):
    """Annotations of a decoded image, in the pixels of its crop."""

    boxes: Carried
    masks: dict[str, Tensor]
    by_finding: Mapping[int, Known] = {}
    side: int = 0  # the shorter side of the image


NOTHING = Known(Carried(()), {})


def batches(
    source: Source, preprocess: Preprocess, batch_size: int = 32, indices: Sequence[int] | None = None,
    workers: int | None = None, fail_fast: bool = False,
) -> Generator[Loaded, None, None]:  # fmt: skip
    """Load model-ready batches of a source's images, each with its failures.

    Args:
        source, preprocess: the images, and their preprocessing.
        batch_size: number of indices per batch; a batch is smaller by the images that failed.
        indices: of the images, in order; default: all.
        workers: threads that decode; default: one per CPU; 0: decode in the calling thread.
        fail_fast: raise at the first failure.

    Example:
        >>> from heatproof.images import open_source
        >>> source = open_source("memory", np.zeros((3, 8, 8), np.uint8))
        >>> [len(loaded.batch.ids) for loaded in batches(source, Preprocess((4, 4), 4), 2, workers=0)]
        [2, 1]
    """
    chosen = list(range(len(source)) if indices is None else indices)
    if batch_size < 1:
        raise InputError(f"a batch holds at least 1 image; got batch_size={batch_size}")
    if preprocess.channels not in (1, 3) and not source.deep:
        raise InputError(f"images have 1 or 3 channels, but the preprocessing has {preprocess.channels}")
    outside = [i for i in chosen if not 0 <= i < len(source)]
    if outside:
        raise InputError(f"there is no image {outside[0]}; the source has {len(source)}, counted from 0")
    threads = min(available_cpus(), MOST_WORKERS) if workers is None else max(workers, 0)

    def load() -> Generator[Loaded, None, None]:
        chunks = iter([chosen[start : start + batch_size] for start in range(0, len(chosen), batch_size)])
        pool = ThreadPoolExecutor(threads, thread_name_prefix="heatproof-decode") if threads > 0 else None
        pending: deque[tuple[list[int], Tensor, Sequence[Callable[[], Known | Failure]]]] = deque()

        def submit() -> None:
            if (chunk := next(chunks, None)) is not None:
                images = torch.empty(len(chunk), preprocess.channels, *preprocess.size)
                slots = zip(chunk, images.numpy(), strict=True)
                jobs = [partial(_load, source, preprocess, i, out) for i, out in slots]
                results = [pool.submit(job).result for job in jobs] if pool else jobs
                pending.append((chunk, images, results))

        try:
            for _ in range(batches_ahead(batch_size, threads)):
                submit()
            while pending:
                chunk, images, results = pending.popleft()
                known = [result() for result in results]
                submit()
                yield _collate(source, chunk, images, known, fail_fast)
        finally:  # also when the caller stops early
            if pool:
                pool.shutdown(wait=True, cancel_futures=True)

    return load()


def available_cpus() -> int:
    """CPUs this process may use, which can be fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def batches_ahead(batch_size: int, workers: int) -> int:
    """Number of batches in progress: one to finish, and enough after it to keep every worker busy."""
    return 1 + -(-2 * workers // batch_size)


def _load(source: Source, preprocess: Preprocess, i: int, out: np.ndarray) -> Known | Failure:
    """Fill `out`, "c H W", with the preprocessed image."""
    sample = source.sample(i)
    try:
        with span("decode"):
            image = source.read(sample)
            out[...] = preprocess.values(image)
            fitted = preprocess.fitted(image)
            known = Known(*source.truth(i, fitted, image.size), side=min(image.size))
            if sample.findings and (sample.boxes or sample.masks):
                own = {f: Known(*source.truth(i, fitted, image.size, f)) for f in sample.findings}
                known = known._replace(by_finding=own)
    except InputError as error:
        return Failure(sample.id, str(error), _transient(error))
    column = (-1, *[1] * (out.ndim - 1))
    out -= np.array(preprocess.mean, np.float32).reshape(column)
    out /= np.array(preprocess.std, np.float32).reshape(column)
    return known


def _transient(error: BaseException | None) -> bool:
    """Whether the cause of an error lies in the system rather than in the file."""
    while error is not None and getattr(error, "errno", None) not in TRANSIENT:
        error = error.__cause__ or error.__context__
    return error is not None


def _collate(
    source: Source, chunk: list[int], images: Tensor, results: Sequence[Known | Failure], fail_fast: bool
) -> Loaded:
    failures = [result for result in results if isinstance(result, Failure)]
    if failures and fail_fast:
        raise InputError(f"cannot use {failures[0].id}: {failures[0].reason}")
    known = {k: result for k, result in enumerate(results) if isinstance(result, Known)}
    samples = [source.sample(chunk[k]) for k in known]
    if failures:
        images = images[list(known)]
    ids, annotated = tuple(s.id for s in samples), source.boxed or source.parts
    sides = tuple(image.side for image in known.values())
    truth = _truth(source, list(known.values()), images) if annotated else None
    if not source.is_multilabel:
        labels = torch.tensor([s.label for s in samples], dtype=torch.int64) if source.labelled else None
        return Loaded(Batch(ids, images, labels, truth, sides=sides), failures)
    findings = torch.zeros(len(samples), len(source.classes), dtype=torch.bool)
    for row, sample in enumerate(samples):
        findings[row, list(sample.findings or ())] = True
    occur = findings.any(0).nonzero().flatten().tolist() if annotated else []
    own = {
        f: _truth(source, [image.by_finding.get(f, NOTHING) for image in known.values()], images)
        for f in occur
    }
    return Loaded(Batch(ids, images, None, truth, findings, own, sides), failures)


def _truth(source: Source, known: Sequence[Known], images: Tensor) -> Truth:
    """Boxes and masks of a batch; a part that an image lacks is an empty mask."""
    masks = {part: torch.zeros(len(known), *images.shape[2:], dtype=torch.bool) for part in source.parts}
    for row, image in enumerate(known):
        for part, mask in image.masks.items():
            masks[part][row] = mask
    if not source.boxed:
        return Truth(None, masks)
    return Truth(tuple(image.boxes.boxes for image in known), masks, tuple(i.boxes.lost for i in known))


def entries(batch: Batch, chosen: Tensor, names: Sequence[str]) -> tuple[Batch, Tensor]:
    """The chosen labels, "b k" bool, each as an image of its own, and "n", the label of each.

    An entry has the boxes and masks of its finding, and its label where the image has it, else -1.
    """
    rows, findings = chosen.cpu().nonzero().unbind(1)
    pairs = list(zip(rows.tolist(), findings.tolist(), strict=True))
    ids = tuple(entry_id(batch.ids[i], finding_name(names, f)) for i, f in pairs)
    labels = None
    if batch.findings is not None:
        labels = torch.where(batch.findings[rows, findings], findings, -1)
    truth = None
    if batch.truth is not None:
        of = [(batch.by_finding.get(f), i) for i, f in pairs]
        masks = {part: torch.zeros_like(masks[rows]) for part, masks in batch.truth.masks.items()}
        for entry, (known, i) in enumerate(of):
            for part, mask in known.masks.items() if known is not None else ():
                masks[part][entry] = mask[i]
        truth = Truth(None, masks)
        if batch.truth.boxes is not None:
            boxes = tuple(() if known is None or known.boxes is None else known.boxes[i] for known, i in of)
            truth = Truth(boxes, masks, tuple(() if known is None else known.lost[i] for known, i in of))
    return Batch(ids, batch.images[rows], labels, truth), findings
