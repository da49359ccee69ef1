"""python -m research.replication: trainings for the replication, and tables made from them."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from heatproof.cli import HandledErrors
from heatproof.cli._console import PATH, say
from heatproof.models.load import best_device
from research.jobs import Place, job_options, read_results, run_all
from research.replication.population import CIFAR_NETWORKS, PROTOCOL_NETWORKS, RATES, STUDIES, select
from research.replication.train import describe, run, xray_files


class ReplicationCommand(HandledErrors):
    """Prints expected errors in a sentence."""

    program = "python -m research.replication"


study_option = click.option("--study", "studies", multiple=True, type=click.Choice(STUDIES))
network_option = click.option(
    "--network", "networks", multiple=True,
    type=click.Choice(sorted({*RATES, *PROTOCOL_NETWORKS, *CIFAR_NETWORKS})),
)  # fmt: skip


@click.group()
def main() -> None:
    """Train a population of networks and test claims of the papers on it."""


@main.command("prepare", cls=ReplicationCommand)
@click.option("--data", type=PATH, required=True, help="Folder of real images.")
@click.option("--out", type=PATH, required=True, help="Folder to add the images of the trainings to.")
@study_option
def prepare_command(data: Path, out: Path, studies: tuple[str, ...]) -> None:
    """Copy the images of the trainings, for another machine; `research.evidence prepare` packs weights."""
    files = [data / "cifar10" / "cifar10.npz"] if "cifar" in (studies or STUDIES) else []
    if studies != ("cifar",):
        files += [path for path, _ in xray_files(data)]
    for path in files:
        target = out / path.relative_to(data)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


@main.command("train", cls=ReplicationCommand)
@job_options
@study_option
@network_option
def train_command(place: Place, processes: int, studies: tuple[str, ...], networks: tuple[str, ...]) -> None:
    """Run the trainings that are missing; a command that was stopped continues where it was."""
    run_all(select(studies, networks), run, place, processes, say, describe)


@main.command("tables", cls=ReplicationCommand)
@click.argument("results", type=PATH)
def tables_command(results: Path) -> None:
    """Compute the CSV files of docs/results/replication from RESULTS, a joined file of trainings."""
    from research.replication.pages import write_tables  # needs packages that training does not

    write_tables(read_results(results))


@main.command("pages", cls=ReplicationCommand)
def pages_command() -> None:
    """Write docs/results/index.md and early-warning.md from the CSV files."""
    from research.replication.pages import write_pages

    write_pages()


@main.command("rank", cls=ReplicationCommand)
@click.option("--data", type=PATH, required=True, help="Folder of real images and weights.")
@click.option(
    "--out", type=PATH, required=True, help="Folder for the results, one file per pair of networks."
)
@click.option("--device", help="cuda, cpu, ...; the fastest available by default.")
@click.option("--network", "networks", multiple=True, default=("mini",), show_default=True,
              help="Of the calibration's population; repeatable.")  # fmt: skip
def rank_command(data: Path, out: Path, device: str | None, networks: tuple[str, ...]) -> None:
    """Compare how metrics rank methods, with the truth of planted evidence beside them."""
    from research.replication.rankings import measure_all, write_rankings

    measure_all(networks, data, out, best_device(device), say)
    write_rankings(out)


if __name__ == "__main__":
    main(prog_name=ReplicationCommand.program)
