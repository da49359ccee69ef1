"""Progress of a run: a bar with rate and time left on a terminal, a plain line every few seconds elsewhere.

A console has one live display, which all bars share: rich 13 refuses a second one, and two would draw over
each other.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from heatproof.errors import counted

SECONDS_TO_FIRST_LINE = 2.0
SECONDS_BETWEEN_LINES = 10.0
ALMOST = 0.99  # of the images in hand, however many inputs they take

_displays: dict[Any, Any] = {}  # by console, those that are open


class Bar:
    """One line of the display, from its first update on; without a terminal, `line` every few seconds."""

    def __init__(self, console: Any, what: str, total: int, line: Callable[[], str | None]) -> None:
        self._console, self._line, self._over = console, line, threading.Event()
        self._open = ExitStack()
        self._display: Any = None
        if console.is_terminal:
            self._display = self._open.enter_context(_display(console))
            self._task = self._display.add_task(what, total=total, detail="", visible=False)
            self._open.callback(self._display.remove_task, self._task)
        else:  # a thread, since what is waited for may be one long call
            thread = threading.Thread(target=self._print_lines, name="heatproof-progress", daemon=True)
            thread.start()
            self._open.callback(thread.join)
            self._open.callback(self._over.set)

    def move(self, completed: float, detail: str = "") -> None:
        if self._display is not None:
            self._display.update(self._task, completed=completed, detail=detail, visible=True)

    def close(self) -> None:
        self._open.close()

    def _print_lines(self) -> None:
        wait = SECONDS_TO_FIRST_LINE
        while not self._over.wait(wait):
            wait = SECONDS_BETWEEN_LINES
            if text := self._line():
                self._console.print(text, soft_wrap=True)


@contextmanager
def _display(console: Any) -> Iterator[Any]:
    """The console's live display, opened and closed by the first bar."""
    if console in _displays:
        yield _displays[console]
        return
    from rich import progress as rich

    columns = (
        rich.SpinnerColumn(), rich.TextColumn("{task.description}"), rich.BarColumn(),
        rich.MofNCompleteColumn(), rich.TextColumn("{task.fields[detail]}"), rich.TimeElapsedColumn(),
    )  # fmt: skip
    with rich.Progress(*columns, console=console, transient=True) as display:
        _displays[console] = display
        try:
            yield display
        finally:
            del _displays[console]


class Progress:
    """Counts images, units and inputs. Lines and the bar go to a rich console; quiet: only counts."""

    def __init__(self, console: Any = None, quiet: bool = False) -> None:
        self.console, self.quiet = console, quiet or console is None
        self.images = self.units = self.total_images = self.total_units = 0
        self._passed = self._before = self._expected = 0  # inputs; of finished images; expected of those
        self._in_hand = 0, 0  # images, and their expected inputs
        self._bar: Bar | None = None
        self._lines: set[str] = set()
        self._began = time.perf_counter()

    def start(self, images: int, units: int, done: int) -> None:
        """Start with the images to go, the units of the whole run, and how many of them are done."""
        self.images = self._passed = self._before = self._expected = 0  # one Progress may serve several runs
        self._in_hand = 0, 0
        self.total_images, self.total_units, self.units = images, units, done
        self._began = time.perf_counter()
        if self.quiet:
            return
        if done:
            self.say(f"{done} of {units} units are complete already")
        if images:
            self._bar = Bar(self.console, "images", images, self.line)
            self._show()

    def begin(self, images: int, inputs: int) -> None:
        """Begin with so many images, which are expected to take so many inputs."""
        self._in_hand = images, inputs

    def inputs(self, count: int) -> None:
        """Count inputs that went through the network, for images that are not finished yet."""
        self._passed += count
        self._show()

    def advance(self, images: int, units: int) -> None:
        self.images += images
        self.units += units
        self._before = self._passed
        self._expected += self._in_hand[1]
        self._in_hand = 0, 0
        self._show()

    def _show(self) -> None:
        if self._bar is not None:
            self._bar.move(self.so_far, self._detail())

    @property
    def so_far(self) -> float:
        """Number of images, with a share of those in hand, by their inputs so far."""
        images, inputs = self._in_hand
        # What finished images took, relative to what was expected, corrects the expectation.
        expected = inputs * (self._before / self._expected if self._before and self._expected else 1.0)
        share = min((self._passed - self._before) / expected, ALMOST) if expected else 0.0
        return min(self.images + images * share, self.total_images)

    def _detail(self, spent: str = "") -> str:
        inputs, left = f"{self._passed:,} inputs, " if self._passed else "", "time left unknown"
        if self.so_far > 0:
            left = f"{spell(self.seconds * (self.total_images / self.so_far - 1))} left"
        return f"{inputs}{spent}{left}"

    def line(self) -> str:
        so_far = f"{self.so_far:.3g}" if self.so_far < 100 else f"{self.so_far:.0f}"
        counts = f"{so_far}/{self.total_images} images, {self.units}/{self.total_units} units"
        return f"{counts}, {self._detail(f'{spell(self.seconds)}, ')}"

    def say(self, text: str) -> None:
        """Print a line, unless it was printed before, as in repeated steps of an audit."""
        if not self.quiet and text not in self._lines:
            self._lines.add(text)
            self.console.print(text, soft_wrap=True)

    def say_at_once(self, text: str) -> None:
        """Print a line even if the console is in the middle of another one."""
        if not self.quiet:
            os.write(2, f"\n{text}\n".encode())

    def finish(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self.images:
            rate = self.images / max(self.seconds, 1e-9)
            self.say(f"{counted(self.images, 'image')} in {spell(self.seconds)}, {rate:.1f} images/s")

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began


def spell(seconds: float) -> str:
    """A duration in words.

    >>> spell(7), spell(200), spell(9000)
    ('7 s', '3 min 20 s', '2 h 30 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 1 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
