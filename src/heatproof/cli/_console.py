"""Shared parts of commands: consoles, tables, and progress with or without a terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from heatproof.errors import counted, visible
from heatproof.run.progress import Bar

if TYPE_CHECKING:
    from heatproof.verdict.answers import Verdict

INTERRUPTED = 130  # what shells expect of a program stopped by Ctrl-C
RESUMED = ("run", "audit", "score", "study", "demo", "contrast", "calibrate")  # continue where they stopped
COMMAND_LINE = "heatproof.command_line"
PATH = click.Path(path_type=Path)  # for options and arguments
BROKEN_SHOWN = 10
PIPED_WIDTH = 120  # rich assumes 80 columns where there is no terminal, which folds every table


class PlainConsole(Console):
    """Prints any name as it is: a file or a class may be called "\\x1b[2J", "[red]" or ":cat:"."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(visible(text), **options)


def _console(stderr: bool = False) -> Console:
    piped = not (sys.stderr if stderr else sys.stdout).isatty() and "COLUMNS" not in os.environ
    width = PIPED_WIDTH if piped else None
    return PlainConsole(stderr=stderr, width=width, markup=False, emoji=False, highlight=False)


console = _console()
errors = _console(stderr=True)


def say(text: object, style: str | None = None) -> None:
    """Print a line, which the terminal may fold."""
    console.print(text, style=style, soft_wrap=True)


def stopped(ctx: click.Context) -> NoReturn:
    """Exit after Ctrl-C, with the command to resume if there is one."""
    root = ctx.find_root()
    program = getattr(root.command, "program", "heatproof")
    again = f"; finished work is kept, to resume: {program} {root.meta[COMMAND_LINE]}"
    resumed = root.invoked_subcommand in RESUMED or root.command.name in RESUMED
    errors.print(f"stopped{again if resumed else ''}", soft_wrap=True)
    ctx.exit(INTERRUPTED)


def new_table(
    title: str,
    columns: Iterable[str] = (),
    rows: Iterable[Sequence[str]] = (),
    right: Container[str] = (),
) -> Table:
    """A table without a frame, readable on a screen and in a file. right: columns of numbers."""
    bare: dict[str, Any] = {"box": SIMPLE_HEAD, "pad_edge": False, "collapse_padding": True}
    table = Table(title=title, title_justify="left", title_style="bold", **bare)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def broken_table(broken: Sequence[Mapping[str, str]]) -> Table:
    """Images that could not be used, with the reasons."""
    more = f"; the first {BROKEN_SHOWN}" if len(broken) > BROKEN_SHOWN else ""
    rows = [(row["image"], row["reason"]) for row in broken[:BROKEN_SHOWN]]
    return new_table(f"{counted(len(broken), 'image')} could not be used{more}", ("image", "reason"), rows)


def say_verdict(verdict: Verdict) -> None:
    """The headline, the sentence, notes and warnings."""
    say(verdict.headline, style="bold")
    for line in (verdict.sentence, *(f"note: {note}" for note in (*verdict.notes, *verdict.warnings))):
        say(line)


def has_screen() -> bool:
    """Whether there is a desktop; without it, a text browser would take over the terminal."""
    return sys.platform in ("darwin", "win32") or bool({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys())


class Steps:
    """Counts finished steps and the inputs passed through the network meanwhile."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.finished, self.passed = what, total, 0, 0
        self.started = time.perf_counter()
        self.detail = ""
        self.bar = Bar(console, what, total, self._line)

    def _line(self) -> str | None:
        """The state of the current step, printed if there is no bar."""
        return f"[{self.finished}/{self.total}] {self.what}: {self.detail}" if self.detail else None

    def inputs(self, count: int) -> None:
        """Count inputs passed through the network; the callback of explain()."""
        self.passed += count
        self.now(f"{self.passed:,} inputs")

    def now(self, detail: str) -> None:
        """Set the state of the current step."""
        self.detail = detail
        self.bar.move(self.finished, detail)

    def done(self, what: str | None, steps: int = 1) -> None:
        """Count finished steps; prints a line without a terminal, unless `what` is None."""
        self.finished, self.detail = self.finished + steps, ""
        self.bar.move(self.finished)
        if what is not None and not console.is_terminal:
            say(f"[{self.finished}/{self.total}] {what} ({time.perf_counter() - self.started:.1f} s)")


@contextmanager
def steps(what: str, total: int) -> Iterator[Steps]:
    """A progress bar on a terminal, a line per finished step elsewhere."""
    progress = Steps(what, total)
    try:
        yield progress
    finally:
        progress.bar.close()
