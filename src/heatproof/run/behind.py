"""Work that can wait, done in a thread while the next unit is computed: rows and files."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from heatproof.timeline import span

WAITING_UNITS = 2  # that may lie in memory until they are written


class Behind:
    """Does jobs in their order, in one thread. What goes wrong there is raised here, at the next call.

    Leaving the context waits for all of them, also when it is left by an error: what was computed is written.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="heatproof-write")
        self._pending: deque[Future[None]] = deque()

    def __enter__(self) -> Behind:
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
