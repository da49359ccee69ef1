"""What the commands share: where text goes, and progress that also works without a terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

PIPED_WIDTH = 120  # rich assumes 80 columns where there is no terminal, which folds every table


def _console(stderr: bool = False) -> Console:
    piped = not (sys.stderr if stderr else sys.stdout).isatty() and "COLUMNS" not in os.environ
    return Console(stderr=stderr, width=PIPED_WIDTH if piped else None, markup=False, highlight=False)


console = _console()
errors = _console(stderr=True)


def new_table(title: str) -> Table:
    """A table without a frame: as easy to read on a screen as in a file."""
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )


class Steps:
    """Counts finished steps and the inputs passed through the network meanwhile."""

    def __init__(self, what: str, total: int, bar: Progress | None) -> None:
        self.total, self.finished, self.passed = total, 0, 0
        self.started = time.perf_counter()
        self.bar = bar
        self.task = bar.add_task(what, total=total, inputs="") if bar else None

    def inputs(self, count: int) -> None:
        """Some inputs went through the network; the callback of explain()."""
        self.passed += count
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, inputs=f"{self.passed:,} inputs")

    def done(self, what: str | None, steps: int = 1) -> None:
        """Steps are finished: the bar moves, or a line is printed where there is no terminal.

        None: what happened is said elsewhere.
        """
        self.finished += steps
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, advance=steps)
        elif what is not None:
            seconds = time.perf_counter() - self.started
            console.print(f"[{self.finished}/{self.total}] {what} ({seconds:.1f} s)", soft_wrap=True)


@contextmanager
def steps(what: str, total: int) -> Iterator[Steps]:
    """A progress bar on a terminal, a line per finished step elsewhere."""
    if not console.is_terminal:
        yield Steps(what, total, None)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[inputs]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        yield Steps(what, total, bar)
