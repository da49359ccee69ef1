"""How far a run is: a bar with rate and time left on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import os
import time
from typing import Any

SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Counts pictures and units. Lines and the bar go to a rich console; quiet: only counted."""

    def __init__(self, console: Any = None, quiet: bool = False) -> None:
        self.console, self.quiet = console, quiet or console is None
        self.images = self.units = self.total_images = self.total_units = 0
        self._bar: Any = None
        self._task: Any = None
        self._began = self._last_line = time.perf_counter()

    def start(self, images: int, units: int, done: int) -> None:
        """So many pictures to go; so many units in the whole run, of which some are done."""
        self.images = 0  # one Progress may serve several runs
        self.total_images, self.total_units, self.units = images, units, done
        self._began = self._last_line = time.perf_counter()
        if self.quiet:
            return
        if done:
            self.say(f"{done} of {units} units were done before")
        if self.console.is_terminal and images:
            self._bar = _bar(self.console)
            self._task = self._bar.add_task("images", total=images, rate="")
            self._bar.start()

    def advance(self, images: int, units: int) -> None:
        self.images += images
        self.units += units
        if self._bar is not None:
            self._bar.update(self._task, advance=images, rate=f"{self.rate:.1f}/s")
        elif not self.quiet and time.perf_counter() - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = time.perf_counter()
            self.say(self.line())

    def line(self) -> str:
        left = (self.total_images - self.images) / self.rate if self.images else float("inf")
        time_left = f"{spell(left)} left" if self.images else "time left unknown"
        return (
            f"{self.images}/{self.total_images} images, {self.units}/{self.total_units} units, "
            f"{self.rate:.1f} images/s, {time_left}"
        )

    def say(self, text: str) -> None:
        if not self.quiet:
            self.console.print(text, soft_wrap=True)

    def say_at_once(self, text: str) -> None:
        """From a signal handler, where a console may be in the middle of a line."""
        if not self.quiet:
            os.write(2, f"\n{text}\n".encode())

    def finish(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        if self.images:
            self.say(f"{self.images} images in {spell(self.seconds)}, {self.rate:.1f} images/s")

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    @property
    def rate(self) -> float:
        return self.images / max(self.seconds, 1e-9)


def spell(seconds: float) -> str:
    """A length of time as people say it.

    >>> spell(7), spell(200), spell(9000)
    ('7 s', '3 min 20 s', '2 h 30 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 1 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _bar(console: Any) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True)
