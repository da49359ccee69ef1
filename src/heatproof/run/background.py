"""Work beside the passes: the next unit's pictures are fetched ahead, rows and files are made behind."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, TypeVar

from heatproof.timeline import span

Item = TypeVar("Item")
WAITING_UNITS = 2  # that may lie in memory until they are written


class WriteQueue:
    """Does jobs in their order, in one thread. What goes wrong there is raised here, at the next call.

    Leaving the context waits for all of them, also when it is left by an error: what was computed is written.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="heatproof-write")
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> WriteQueue:
        return self

    def do(self, job: Callable[[], None]) -> None:
        self._wait(WAITING_UNITS - 1)
        self._pending.append(self._pool.submit(job))

    def finish(self) -> None:
        """Wait until nothing is left to do."""
        self._wait(0)

    def _wait(self, left: int) -> None:
        with span("waiting", "writing"):
            while len(self._pending) > left:
                self._pending.popleft().result()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.finish()
        finally:
            self._pool.shutdown(wait=True)


class Prefetcher(Generic[Item]):
    """Fetches the next of some things in a thread while the caller works on this one, and prepares it.

    Their generator is closed when the context is left; an error in the thread is raised to the caller.
    """

    def __init__(self, items: Generator[Item, None, None], prepare: Callable[[Item], object]) -> None:
        self._items, self._prepare = items, prepare
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="heatproof-ahead")

    def __enter__(self) -> Iterator[Item]:
        return self._each()

    def _each(self) -> Iterator[Item]:
        coming = self._pool.submit(self._next)
        while True:
            with span("waiting", "pictures"):
                item = coming.result()
            if item is None:
                return
            coming = self._pool.submit(self._next)
            yield item

    def _next(self) -> Item | None:
        item = next(self._items, None)
        if item is not None:
            self._prepare(item)
        return item

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True)
        self._items.close()
