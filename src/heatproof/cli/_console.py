"""What the commands share: where text goes, and progress that also works without a terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from heatproof.errors import visible
from heatproof.run.progress import Bar

INTERRUPTED = 130  # what shells expect of a program stopped by Ctrl-C
RESUMED = ("run", "audit", "score", "study", "demo", "contrast", "calibrate")  # go on where they stopped
COMMAND_LINE = "heatproof.command_line"
PATH = click.Path(path_type=Path)  # for options and arguments
PIPED_WIDTH = 120  # rich assumes 80 columns where there is no terminal, which folds every table


class Shown(Console):
    """Shows any name as it is: a file or a class may be called "\\x1b[2J", "[red]" or ":cat:"."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)


def _console(stderr: bool = False) -> Console:
    piped = not (sys.stderr if stderr else sys.stdout).isatty() and "COLUMNS" not in os.environ
    width = PIPED_WIDTH if piped else None
    return Shown(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)


console = _console()
errors = _console(stderr=True)


def say(text: object, style: str | None = None) -> None:
    """A line, which the terminal may fold."""
    console.print(text, style=style, soft_wrap=True)


def stopped(ctx: click.Context) -> NoReturn:
    """Say how to go on, where the command can, and leave."""
    root = ctx.find_root()
    program = getattr(root.command, "program", "heatproof")
    again = f"; what is finished is kept, to resume: {program} {root.meta[COMMAND_LINE]}"
    resumed = root.invoked_subcommand in RESUMED or root.command.name in RESUMED
    errors.print(f"stopped{again if resumed else ''}", soft_wrap=True)
    ctx.exit(INTERRUPTED)


def new_table(title: str) -> Table:
    """A table without a frame: as easy to read on a screen as in a file."""
    bare: dict[str, Any] = {"box": SIMPLE_HEAD, "pad_edge": False, "collapse_padding": True}
    return Table(title=title, title_justify="left", title_style="bold", **bare)


class Steps:
    """Counts finished steps and the inputs passed through the network meanwhile."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.finished, self.passed = what, total, 0, 0
        self.started = time.perf_counter()
        self.detail = ""
        self.bar = Bar(console, what, total, self._line)

    def _line(self) -> str | None:
        """Where the step in hand is, for those who see no bar."""
        return f"[{self.finished}/{self.total}] {self.what}: {self.detail}" if self.detail else None

    def inputs(self, count: int) -> None:
        """Some inputs went through the network; the callback of explain()."""
        self.passed += count
        self.now(f"{self.passed:,} inputs")

    def now(self, detail: str) -> None:
        """What the step in hand has come to."""
        self.detail = detail
        self.bar.move(self.finished, detail)

    def done(self, what: str | None, steps: int = 1) -> None:
        """Steps are finished: the bar moves, or a line is printed where there is no terminal.

        None: what happened is said elsewhere.
        """
        self.finished, self.detail = self.finished + steps, ""
        self.bar.move(self.finished)
        if what is not None and not console.is_terminal:
            seconds = time.perf_counter() - self.started
            say(f"[{self.finished}/{self.total}] {what} ({seconds:.1f} s)")


@contextmanager
def steps(what: str, total: int) -> Iterator[Steps]:
    """A progress bar on a terminal, a line per finished step elsewhere."""
    shown = Steps(what, total)
    try:
        yield shown
    finally:
        shown.bar.close()
