"""python -m research.qr: trainings on QR codes with ImageNet backbones, their tables and their page."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click

from heatproof.cli import HandledErrors
from heatproof.cli._console import PATH, say
from research.jobs import Place, job_options, prepare_options, read_results, run_all
from research.qr.measure import BACKBONES, FULL, SMALL, describe, inputs, measure, plan


class QrCommand(HandledErrors):
    """Prints expected errors in a sentence."""

    program = "python -m research.qr"


class Needed(NamedTuple):
    """What research.evidence.prepare packs for a network: its weights; codes are generated."""

    network: str
    source: str = "codes"


@click.group()
def main() -> None:
    """Repeat CAMBench-QR with ImageNet backbones, several trainings each."""


@main.command("prepare", cls=QrCommand)
@prepare_options
def prepare_command(data: Path, out: Path, wheels: tuple[Path, ...]) -> None:
    """Pack weights and packages for another machine."""
    from research.evidence.prepare import prepare

    needed: list[Any] = [Needed(network) for network in BACKBONES]
    sizes = prepare(data, out, needed, wheels)
    say(", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in sizes.items()))


@main.command("measure", cls=QrCommand)
@click.option("--small", is_flag=True, help="Few codes and one epoch, to try the program.")
@click.option("--network", "networks", multiple=True, type=click.Choice(BACKBONES), help="Only these.")
@click.option("--seed", "seeds", type=int, multiple=True, help="Only these.")
@job_options
def measure_command(
    place: Place, processes: int, small: bool, networks: tuple[str, ...], seeds: tuple[int, ...]
) -> None:
    """Run the trainings that are missing; a command that was stopped continues where it was."""
    size = SMALL if small else FULL
    chosen = [t for t in plan() if t.network in (networks or BACKBONES) and (not seeds or t.seed in seeds)]
    passes: Counter[str] = sum((Counter(inputs(training, size)) for training in chosen), Counter())
    for network in BACKBONES:
        own = next((t for t in chosen if t.network == network), None)
        say(f"{network}: {inputs(own, size) if own else 'no training'}")
    say(f"inputs of {len(chosen)} trainings: {dict(passes)}")
    run_all(chosen, partial(measure, size=size), place, processes, describe=describe)


@main.command("tables", cls=QrCommand)
@click.argument("results", type=PATH)
@click.option("--out", type=PATH, help="Folder; docs/results/replication/qr by default.")
def tables_command(results: Path, out: Path | None) -> None:
    """Compute the CSV files and figures from RESULTS, the joined file."""
    from research.qr.pages import FOLDER, write_tables  # needs packages that training does not

    write_tables(read_results(results), out or FOLDER)


@main.command("page", cls=QrCommand)
@click.option("--tables", type=PATH, help="Folder of the CSV files; docs/results/replication/qr by default.")
@click.option("--out", type=PATH, help="File; docs/results/qr.md by default.")
def page_command(tables: Path | None, out: Path | None) -> None:
    """Write the page from the CSV files."""
    from research.qr.pages import FOLDER, PAGE, write_page

    write_page(tables or FOLDER, out or PAGE)


if __name__ == "__main__":
    main(prog_name=QrCommand.program)
