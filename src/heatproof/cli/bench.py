"""heatproof bench: run the sections of heatproof.bench and print what they measured."""

from __future__ import annotations

import csv
import importlib
import inspect
import pkgutil
import platform
import re
from dataclasses import asdict, fields
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from heatproof import __version__
from heatproof import bench as sections_of
from heatproof.cli._console import PATH, console, errors, new_table
from heatproof.cli._files import make_folder
from heatproof.errors import InputError, UnknownNameError
from heatproof.lazy import torch

if TYPE_CHECKING:
    from heatproof.bench.common import Row


SHARED = {"busy", "common", "packages"}


@click.command("bench")
@click.option("--section", "-s", multiple=True, help="Only this one; may be repeated. All by default.")
@click.option("--quick", is_flag=True, help="Smaller and fewer measurements, rougher numbers.")
@click.option("--device", default="cpu", help="cpu or cuda; cuda uses the device's own timers.")
@click.option("--pictures", type=click.IntRange(1), help="Of the audit: 200 on a GPU, 4 on a CPU by default.")
@click.option("--csv", "table", type=PATH, help="Also write the rows to this file.")
def bench_command(
    section: tuple[str, ...], quick: bool, device: str, pictures: int | None, table: Path | None
) -> None:
    """Measure heatproof against bare forward passes and against other packages that are installed.

    Contenders take turns in one process, medians are compared. A ratio means what its line says; "over" is a
    ratio outside its limit on this machine.

    \b
    Examples:
      heatproof bench --quick
      heatproof bench --section explain --device cuda --csv speed.csv
      heatproof bench --section audit --device cuda --pictures 60
    """
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise InputError("there is no CUDA device here; leave out --device")
    known = section_names()
    for name in section:
        if name not in known:
            raise UnknownNameError("section", name, known)
    measured: list[dict[str, object]] = []
    if table:
        make_folder(table.parent)
        write_table(table, measured)
    console.print(machine(device))
    for name in section or known:
        measured += run_section(name, quick, device, pictures)
        if table:  # after each section, so that a run cut off keeps what it measured
            write_table(table, measured)


def section_names() -> list[str]:
    """Files of heatproof.bench with measurements of their own; the others hold what they share."""
    names = [module.name for module in pkgutil.iter_modules(sections_of.__path__)]
    return sorted(set(names) - SHARED)


def run_section(name: str, quick: bool, device: str, pictures: int | None = None) -> list[dict[str, object]]:
    """What was measured, each row with its machine and day, so that no table joins two machines unseen."""
    try:
        section = importlib.import_module(f"{sections_of.__name__}.{name}")
        rows = section.rows
        takes_device = "device" in inspect.signature(rows).parameters
        options: dict[str, Any] = {"device": device} if takes_device else {}
        if "pictures" in inspect.signature(rows).parameters:
            options["pictures"] = pictures
        with console.status(f"measuring {name}"):
            found: list[Row] = rows(quick=quick, **options)
    except ImportError as error:  # also a missing extra; its message holds the install line
        errors.print(f"{name}: not measured: {error}", style="yellow", soft_wrap=True)
        return []
    if absent := getattr(section, "missing", str)():
        errors.print(f"{name}: {absent}", style="yellow", soft_wrap=True)
    console.print(row_table(name if takes_device else f"{name} (on the CPU)", found))
    on = machine(device if takes_device else "cpu").replace("\n", "; ")
    known = {"machine": on, "heatproof": __version__, "date": date.today(), "quick": quick}
    return [{"section": name, **asdict(row), **known} for row in found]


def write_table(path: Path, measured: list[dict[str, object]]) -> None:
    from heatproof.bench.common import Row
    from heatproof.store.scores import csv_cell

    columns = ["section", *(field.name for field in fields(Row)), "machine", "heatproof", "date", "quick"]
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows({name: csv_cell(cell) for name, cell in row.items()} for row in measured)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error


def row_table(title: str, rows: list[Row]) -> Table:
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
        kept = within(row.ratio, row.limit)
        told, style = {True: ("ok", None), False: ("over", "red"), None: ("", None)}[kept]
        table.add_row(row.what, ours, row.other, other, ratio, row.limit, told, row.note, style=style)
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
