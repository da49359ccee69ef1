"""python -m research.localisation: the thesis's protocol with four networks, and its page."""

from __future__ import annotations

from pathlib import Path

import click

from heatproof.cli import HandledErrors
from heatproof.cli._console import PATH, say
from heatproof.errors import InputError
from research.jobs import Place, job_options, prepare_options, read_results, run_all
from research.localisation.measure import NETWORKS, PARTS, describe, inputs_of, measure_unit, plan


class LocalisationCommand(HandledErrors):
    """Prints expected errors in a sentence."""

    program = "python -m research.localisation"


networks_option = click.option(
    "--network", "networks", multiple=True, type=click.Choice(NETWORKS), help="Of these alone; repeatable."
)


@click.group()
def main() -> None:
    """Measure localisation and faithfulness on ImageNet photographs and test the claims of the thesis."""


@main.command("prepare", cls=LocalisationCommand)
@prepare_options
@networks_option
def prepare_command(data: Path, out: Path, wheels: tuple[Path, ...], networks: tuple[str, ...]) -> None:
    """Pack the photographs and the weights of these networks."""
    from research.evidence.prepare import pack_packages, pack_photographs, pack_weights, part_sizes

    if out.exists():
        raise InputError(f"{out} exists; remove it or name another folder")
    files = {"lite0": "lite0.safetensors", "resnet50": "resnet50.safetensors",
             "squeezenet": "squeezenet1_1.pt", "mobilenet": "mobilenet_v2.pt"}  # fmt: skip
    pack_photographs(data, out, quality=95)
    for name in networks or NETWORKS:
        pack_weights(data / "weights" / files[name], out / "weights" / files[name], head=True)
    pack_packages(out, wheels)
    sizes = part_sizes(out)
    for name, size in (*sizes.items(), ("all", sum(sizes.values()))):
        say(f"{name:10} {size / 2**20:6.2f} MiB")


@main.command("measure", cls=LocalisationCommand)
@job_options
@networks_option
@click.option("--part", "parts", multiple=True, type=click.Choice(tuple(PARTS)), help="Repeatable.")
@click.option("--small", is_flag=True, help="Two photographs of each part, to test a machine.")
def measure_command(
    place: Place, processes: int, networks: tuple[str, ...], parts: tuple[str, ...], small: bool
) -> None:
    """Measure the units that are missing; a command that was stopped continues where it was."""
    units = plan(place.real_data, networks, parts, small)
    for network in networks or NETWORKS:
        inputs = sum(inputs_of(unit) for unit in units if unit.network == network)
        say(f"{network}: at most {inputs:,} inputs")
    run_all(units, measure_unit, place, processes, say, describe)


@main.command("tables", cls=LocalisationCommand)
@click.argument("results", type=PATH, nargs=-1, required=True)
def tables_command(results: tuple[Path, ...]) -> None:
    """Write the CSV files of docs/results/replication/localise from joined RESULTS."""
    from research.localisation.pages import write_tables  # needs packages that measuring does not

    write_tables(read_results(*results))


@main.command("pages", cls=LocalisationCommand)
def pages_command() -> None:
    """Write docs/results/localise.md and its figures from the CSV files."""
    from research.localisation.pages import write_page

    write_page()


if __name__ == "__main__":
    main(prog_name=LocalisationCommand.program)
