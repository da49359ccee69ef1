"""python -m research.evidence: networks with known shortcuts, and what the verdict says about them."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import click

from heatproof.cli import HandledErrors
from heatproof.cli._console import PATH, console, new_table, say
from heatproof.disk import write_whole
from heatproof.models.load import best_device
from heatproof.verdict.uses import Effects
from research.evidence import rates as counting
from research.evidence.measure import METHODS, describe, measure, networks_of
from research.evidence.networks import NETWORKS
from research.evidence.plan import halves, select
from research.evidence.prepare import prepare
from research.evidence.real import REAL, examine, open_real
from research.evidence.sources import NEEDS_DATA
from research.jobs import Place, job_options, join, prepare_options, read_results, run_all


class EvidenceCommand(HandledErrors):
    """Prints expected errors in a sentence."""

    program = "python -m research.evidence"


networks_option = click.option(
    "--network", "networks", multiple=True, type=click.Choice(list(NETWORKS)), help="Only these; repeatable."
)
without_option = click.option(
    "--without", multiple=True, type=click.Choice(list(NETWORKS)), help="Not these; repeatable."
)


@click.group()
def main() -> None:
    """Measure what the verdict says about networks that use a known shortcut, and about clean ones."""


@main.command("plan", cls=EvidenceCommand)
@networks_option
@without_option
def plan_command(networks: tuple[str, ...], without: tuple[str, ...]) -> None:
    """List the pairs in their order, with the half of each."""
    half = halves()
    for member in select(networks, without):
        say(f"{member.name}  {half[member.name]}")


@main.command("prepare", cls=EvidenceCommand)
@prepare_options
@networks_option
@without_option
def prepare_command(
    data: Path, out: Path, wheels: tuple[Path, ...], networks: tuple[str, ...], without: tuple[str, ...]
) -> None:
    """Pack what these networks need into a small folder.

    \b
    Example:
      pip download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux2014_x86_64 \\
        --dest wheels msgspec
      python -m research.evidence prepare --data DATA --out device-data --without resnet50 \\
        --wheel wheels/msgspec*.whl
    """
    sizes = prepare(data, out, select(networks, without), wheels)
    for name, size in sizes.items():
        say(f"{name:10} {size / 2**20:6.2f} MiB")
    say(f"{'all':10} {sum(sizes.values()) / 2**20:6.2f} MiB in {out}")


@main.command("measure", cls=EvidenceCommand)
@job_options
@click.option("--at-most", type=click.IntRange(1), help="So many pairs, from the start of the plan.")
@click.option("--only-train", is_flag=True, help="Train and test the networks without measuring evidence.")
@networks_option
@without_option
def measure_command(
    place: Place, processes: int, at_most: int | None, only_train: bool, networks: tuple[str, ...],
    without: tuple[str, ...],
) -> None:  # fmt: skip
    """Train and measure the pairs of the plan that are missing.

    Without --data, pairs with generated images are measured, as far as their networks need no weights.
    """
    members = [
        m
        for m in select(networks, without)
        if place.data is not None or not (m.source in NEEDS_DATA or NETWORKS[m.network].weights)
    ]
    own = partial(measure, with_evidence=not only_train)
    threads = max(1, (os.cpu_count() or 1) // processes)
    run_all(networks_of(members[:at_most]), own, place, processes, say, describe, threads)


@main.command("join", cls=EvidenceCommand)
@click.argument("out", type=PATH)
@click.option("--joined", type=PATH, required=True, help="File for all results together.")
def join_command(out: Path, joined: Path) -> None:
    """Join the results in the folder of a `measure` that was stopped."""
    say(f"{join(out, joined)} networks in {joined}")


@main.command("real", cls=EvidenceCommand)
@click.argument("names", nargs=-1, type=click.Choice(REAL))
@click.option("--data", type=PATH, required=True, help="Folder of real images and weights.")
@click.option("--package", type=PATH, help="The .keras file of the PyPI package pneumonia-model-package.")
@click.option("--out", type=PATH, required=True, help="Folder for CSV files and pictures.")
@click.option("--method", default=METHODS[0], show_default=True, help="Whose maps choose the patches.")
@click.option("--device", help="cuda, cpu, ...; the fastest available by default.")
def real_command(
    names: tuple[str, ...], data: Path, package: Path | None, out: Path, method: str, device: str | None
) -> None:
    """Examine real networks: what do they use?"""
    for name in names or REAL:
        say(examine(name, open_real(name, data, package, best_device(device)), out, [method]))


@main.command("rates", cls=EvidenceCommand)
@click.argument("results", type=PATH, nargs=-1, required=True)
@click.option("--table", type=PATH, help="Write a CSV file with a row for each network.")
@click.option("--write", "target", type=PATH, help="Write effects and rates into this rates.json.")
@click.option(
    "--rule", type=PATH, help="Take form and effects from this rates.json instead of choosing them."
)
def rates_command(
    results: tuple[Path, ...], table: Path | None, target: Path | None, rule: Path | None
) -> None:
    """Choose form and effect sizes on one half of the networks and count wrong answers on the other.

    RESULTS are joined files; of a network in several, the last counts.
    """
    records = read_results(*results)
    some = counting.networks(records)
    say(f"{len(records)} networks, {len(some)} do what they were trained for")
    for name, count in sorted(counting.left_out(records).items()):
        say(f"  left out: {count} of {name}")
    if rule:
        known = json.loads(rule.read_text("utf-8"))["network"]
        form, effects = counting.Form.read(known["form"]), Effects(**known["effects"])
    else:
        form, effects = counting.choose_form(records)
    some = counting.networks(records, form)
    say(f"{form}\n{effects}")
    by_kind = counting.rates_by_kind(some, effects)
    columns = ("", "cheating called fine", "clean accused", "shortcut stated", "undecided")
    rows = [[name, *by_kind[name].row] for name in by_kind]
    console.print(new_table("the half that chose nothing", columns, rows))
    if table:
        counting.write_table(some, effects, table)
    if target:
        content = json.loads(target.read_text("utf-8"))
        content["network"] = counting.as_json(some, effects, "python -m research.evidence measure; rates")
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        write_whole({target: text})


if __name__ == "__main__":
    main(prog_name=EvidenceCommand.program)
