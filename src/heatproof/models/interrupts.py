"""Ctrl-C waits while a user's model is changed: it is answered before the next pass, or when all is done.

Only the main thread hears signals; elsewhere nothing is held back. A handler that is there already (a run's,
an event loop's) is called at once, only what it raises waits. A second Ctrl-C does not wait.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class _Deferring:
    """One scope for the process, entered as often as wanted; the outermost one counts."""

    def __init__(self) -> None:
        self.depth = 0
        self.waiting: BaseException | None = None
        self.before: Any = None

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        if self.depth == 0:
            self.waiting, self.before = None, signal.getsignal(signal.SIGINT)
            if callable(self.before):
                signal.signal(signal.SIGINT, self.asked)
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self.depth -= 1
        if self.depth == 0:
            if signal.getsignal(signal.SIGINT) == self.asked:
                signal.signal(signal.SIGINT, self.before)
            self.answer()

    def asked(self, number: int, frame: FrameType | None) -> None:
        try:
            self.before(number, frame)
        except BaseException as error:
            if self.waiting is not None:
                raise
            self.waiting = error

    def answer(self) -> None:
        """Raise what waits: to be called where nothing is half done."""
        if self.waiting is not None and threading.current_thread() is threading.main_thread():
            error, self.waiting = self.waiting, None
            raise error


deferring = _Deferring()
