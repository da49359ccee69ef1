"""python -m benchmarks: run the benchmark sections and print what they measured."""

from __future__ import annotations

import importlib
import inspect
import platform
import re
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import click
import torch
from rich.table import Table

from benchmarks.sections import SECTIONS, BenchOptions
from benchmarks.table import MeasuredRows
from heatproof import __version__
from heatproof.cli import HandledErrors
from heatproof.cli._console import PATH, console, errors, new_table, say
from heatproof.disk import clear_failure
from heatproof.errors import InputError, UnknownNameError
from heatproof.models.running import check_precision

if TYPE_CHECKING:
    from benchmarks.common import Part, Row

Cells = Mapping[str, object]


@click.command("benchmarks", cls=HandledErrors)
@click.option("--section", "-s", multiple=True, help="Only this one; may be repeated. See above.")
@click.option("--quick", is_flag=True, help="Smaller and fewer measurements, rougher numbers.")
@click.option("--device", default="cpu", help="cpu or cuda; cuda uses the device's own timers.")
@click.option("--network", help="Of audit, passes: which, with commas between them.")
@click.option("--precision", help="Of audit, precision: fp32, tf32, bf16, with commas between them.")
@click.option("--pictures", type=click.IntRange(1), help="Of audit, packages, precision: how many.")
@click.option("--data", type=PATH, help="Of passes, precision: a folder with trained networks.")
@click.option(
    "--csv", "table", type=PATH,
    help="Also write the rows to this file. One that exists keeps its rows, but for those of parts "
    "that are measured again. Of passes and precision: a folder, for their tables.",
)  # fmt: skip
def bench_command(
    section: tuple[str, ...],
    quick: bool,
    device: str,
    network: str | None,
    precision: str | None,
    pictures: int | None,
    data: Path | None,
    table: Path | None,
) -> None:
    """Measure heatproof against bare forward passes and against other packages that are installed.

    Contenders take turns in one process, medians are compared. A ratio means what its line says; "over" is a
    ratio outside its limit on this machine. Ctrl-C ends it, and what is measured by then is in the file.

    \b
    Examples:
      python -m benchmarks --quick
      python -m benchmarks --section explain --device cuda --csv speed.csv
      python -m benchmarks --section audit --device cuda --network resnet50 --precision bf16 --pictures 60
      python -m benchmarks --section precision --data DATA --csv docs/results/precision
    """
    names = chosen(section)
    options = BenchOptions(quick, device, pictures, words(network), words(precision), data)
    refuse_unused_options(names, options)
    if options.gpu and not torch.cuda.is_available():
        raise InputError("there is no CUDA device here; leave out --device")
    measured = open_table(table, names)
    console.print(machine(device))
    began, command = time.perf_counter(), command_line(section, options)
    for name in names:
        run_section(name, options, command, began, measured, table)


def chosen(section: Sequence[str]) -> list[str]:
    for name in section:
        if name not in SECTIONS:
            raise UnknownNameError("section", name, SECTIONS)
    return list(dict.fromkeys(section)) or [name for name, entry in SECTIONS.items() if entry.usual]


def words(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip()) if text else ()


def refuse_unused_options(names: Sequence[str], options: BenchOptions) -> None:
    for option in ("network", "precision", "pictures", "data"):
        takers = [name for name, entry in SECTIONS.items() if option in entry.takes]
        if getattr(options, option) and not set(takers) & set(names):
            raise InputError(f"--{option} is for {', '.join(takers)}; add --section {takers[0]}")
    for precision in options.precision:
        check_precision(precision)


def open_table(table: Path | None, names: Sequence[str]) -> MeasuredRows:
    """Before anything is measured: the file can be read and written, and one file is enough."""
    measured = MeasuredRows()
    folders = [name for name in names if SECTIONS[name].tables]
    if table and folders and len(names) > 1:
        raise InputError(f"--csv is a folder for {folders[0]}, a file for others; one --section at a time")
    if table:
        with clear_failure(table):
            (table if folders else table.parent).mkdir(parents=True, exist_ok=True)
    if table and not folders:
        measured.open(table)
    return measured


def command_line(section: Sequence[str], options: BenchOptions) -> str:
    """What to type for the same measurement, without the places of files."""
    given = [word for name in section for word in ("--section", name)]
    given += ["--quick"] if options.quick else []
    given += ["--device", options.device] if options.gpu else []
    given += ["--network", ",".join(options.network)] if options.network else []
    given += ["--precision", ",".join(options.precision)] if options.precision else []
    given += ["--pictures", str(options.pictures)] if options.pictures else []
    given += ["--data", "DATA"] if options.data else []
    return shlex.join(["python", "-m", "benchmarks", *given])


def run_section(
    name: str, options: BenchOptions, command: str, began: float, measured: MeasuredRows, table: Path | None
) -> None:
    """Part by part; the rows of each are kept before the next one begins."""
    results: list[tuple[Part, Sequence[Row] | Sequence[Cells]]] = []
    try:
        section = importlib.import_module(f"benchmarks.{name}")
        for part in section.parts(options):
            say(f"{time.perf_counter() - began:7.1f} s  {name}: {part.name}")
            with console.status("measuring"):
                rows = part.measure()
            results.append((part, rows))
            if table:
                path = table / f"{part.table}.csv" if part.table else table
                measured.put(path, [_told(name, part, row, command, options.quick) for row in rows])
        if absent := getattr(section, "missing", str)():
            errors.print(f"{name}: {absent}", style="yellow", soft_wrap=True)
    except ImportError as error:  # also a missing extra; its message holds the install line
        errors.print(f"{name}: not measured: {error}", style="yellow", soft_wrap=True)
    finally:  # also where it was stopped
        for kind in dict.fromkeys(part.table for part, _ in results):
            selected = [row for part, rows in results for row in rows if part.table == kind]
            console.print(any_table(f"{name}: {kind}" if kind else name, selected))


def _told(section: str, part: Part, row: Row | Cells, command: str, quick: bool) -> Cells:
    """A row with its machine and day, so that no table joins two machines unseen."""
    cells = row if isinstance(row, Mapping) else asdict(row)
    on = machine(part.device).replace("\n", "; ")
    return {
        "section": section, "part": part.name, **cells, "device": part.device, "machine": on,
        "heatproof": __version__, "date": date.today(), "quick": quick, "command": command,
    }  # fmt: skip


def any_table(title: str, rows: Sequence[Row | Cells]) -> Table:
    cells = [row for row in rows if isinstance(row, Mapping)]
    if cells:
        return cell_table(title, cells)
    return row_table(title, [row for row in rows if not isinstance(row, Mapping)])


def row_table(title: str, rows: Iterable[Row]) -> Table:
    table = new_table(title)
    table.add_column("what", overflow="fold", ratio=3)
    table.add_column("ours ms", justify="right")
    table.add_column("other", overflow="fold", ratio=1)
    table.add_column("other ms", justify="right")
    table.add_column("ratio", justify="right")
    table.add_column("limit", justify="right", no_wrap=True)
    table.add_column("")
    table.add_column("note", overflow="fold", ratio=2)
    for row in rows:
        ours, other, ratio = f"{row.ours_ms:,.2f}", f"{row.other_ms:,.2f}", f"{row.ratio:.3g}"
        holds = within(row.ratio, row.limit)
        mark, style = {True: ("ok", None), False: ("over", "red"), None: ("", None)}[holds]
        table.add_row(row.what, ours, row.other, other, ratio, row.limit, mark, row.note, style=style)
    return table


def cell_table(title: str, rows: Sequence[Cells]) -> Table:
    table = new_table(title)
    for name in rows[0]:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row.values()))
    return table


def within(ratio: float, limit: str) -> bool | None:
    """Whether a ratio keeps its limit; None where there is no limit.

    >>> within(1.2, "<= 1.25"), within(19, ">= 20"), within(3, "")
    (True, False, None)
    """
    if not limit:
        return None
    match = re.fullmatch(r"(<=|>=)\s*([\d.]+)", limit.strip())
    if match is None:
        raise InputError(f"a limit reads '<= 1.25' or '>= 20', not {limit!r}")
    bound = float(match[2])
    return ratio <= bound if match[1] == "<=" else ratio >= bound


def machine(device: str) -> str:
    """What the numbers were measured on."""
    lines = [f"CPU: {cpu_name()}, {torch.get_num_threads()} threads; torch {torch.__version__}"]
    if device.startswith("cuda"):
        lines.append(f"GPU: {torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}")
    return "\n".join(lines)


def cpu_name() -> str:
    table = Path("/proc/cpuinfo")
    if table.exists() and (line := re.search(r"^model name\s*:\s*(.+)$", table.read_text(), re.MULTILINE)):
        return line[1]
    return platform.processor() or platform.machine()


def section_lines() -> str:
    """For the help: every section with what it measures and what it costs."""
    lines = []
    for name, entry in SECTIONS.items():
        named = "" if entry.usual else "; only where it is named"
        lines += [f"  {name:<13} {entry.what}", f"{'':<16}H200: {entry.gpu}; two cores: {entry.cpu}{named}"]
    return "\n".join(["\b", "Sections, and about how long they take (--quick: a minute each):", *lines])


bench_command.help = f"{inspect.cleandoc(bench_command.help or '')}\n\n{section_lines()}"

if __name__ == "__main__":
    bench_command(prog_name="python -m benchmarks")
