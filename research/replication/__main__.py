"""python -m research.replication: trainings for the replication, and tables made from them."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from heatproof.cli import HandledErrors
from heatproof.cli._console import PATH, say
from research.jobs import Place, job_options, prepare_options, read_results, run_all
from research.replication.cose import inputs, measure
from research.replication.population import CIFAR_RATES, PROTOCOL_NETWORKS, RATES, STUDIES, select
from research.replication.train import describe, xray_files


class ReplicationCommand(HandledErrors):
    """Prints expected errors in a sentence."""

    program = "python -m research.replication"


study_option = click.option("--study", "studies", multiple=True, type=click.Choice(STUDIES))
network_option = click.option(
    "--network", "networks", multiple=True,
    type=click.Choice(sorted({*RATES, *PROTOCOL_NETWORKS, *CIFAR_RATES})),
)  # fmt: skip


@click.group()
def main() -> None:
    """Train a population of networks and test claims of the papers on it."""


@main.command("prepare", cls=ReplicationCommand)
@click.option("--data", type=PATH, required=True, help="Folder of real images.")
@click.option("--out", type=PATH, required=True, help="Folder to add the images of the trainings to.")
@study_option
def prepare_command(data: Path, out: Path, studies: tuple[str, ...]) -> None:
    """Copy the images of the trainings, for another machine; `research.evidence prepare` packs weights.

    The weights of the study `cose` are copied too.
    """
    files = [data / "cifar10" / "cifar10.npz"] if "cifar" in (studies or STUDIES) else []
    if studies != ("cifar",):
        files += [path for path, _ in xray_files(data)]
    if "cose" in studies:
        files.append(data / "weights" / "squeezenet1_1.pt")
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
    say(f"{inputs():,} forward and backward passes for the COSE of one training (cifar, cose)")
    run_all(select(studies, networks), measure, place, processes, say, describe)


@main.command("tables", cls=ReplicationCommand)
@click.argument("results", type=PATH)
def tables_command(results: Path) -> None:
    """Compute the CSV files of docs/results/replication from RESULTS, a joined file of trainings."""
    from research.replication.pages import write_tables  # needs packages that training does not

    write_tables(read_results(results))


@main.command("pages", cls=ReplicationCommand)
def pages_command() -> None:
    """Write the pages of docs/results that have CSV files in docs/results/replication."""
    from research.replication.pages import write_pages

    write_pages()


@main.command("rank-prepare", cls=ReplicationCommand)
@prepare_options
def rank_prepare_command(data: Path, out: Path, wheels: tuple[Path, ...]) -> None:
    """Pack the images and weights of the pairs of networks of `rank`, for another machine."""
    from research.replication.rankings_prepare import prepare

    say(f"{prepare(data, out, wheels) / 2**20:.1f} MiB in {out}")


@main.command("rank", cls=ReplicationCommand)
@job_options
@click.option("--network", "networks", multiple=True, help="Of the calibration's population; repeatable.")
@click.option("--at-most", type=click.IntRange(1), help="So many pairs, from the start of the plan.")
def rank_command(place: Place, processes: int, networks: tuple[str, ...], at_most: int | None) -> None:
    """Compare how metrics rank methods, with the truth of planted evidence beside them."""
    from research.replication import rankings

    units = rankings.plan(networks or rankings.NETWORKS)[:at_most]
    run_all(units, rankings.measure, place, processes, say, rankings.describe)


@main.command("rank-tables", cls=ReplicationCommand)
@click.argument("results", type=PATH, nargs=-1, required=True)
def rank_tables_command(results: tuple[Path, ...]) -> None:
    """Compute the CSV files and the figure of docs/results/replication/rankings from joined RESULTS."""
    from research.replication.rankings_page import write_tables

    write_tables(read_results(*results))


if __name__ == "__main__":
    main(prog_name=ReplicationCommand.program)
