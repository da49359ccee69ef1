"""heatproof demo: run the small audit and print what it found."""

from __future__ import annotations

import time
from pathlib import Path

import click
from rich.table import Table

from heatproof import demo as audit
from heatproof.cli._console import console, new_table, steps
from heatproof.cli._files import make_folder

COLUMNS = {"fmr": "on finders", "tmr": "on timing lines", "bl": "outside the code", "dts": "distance"}


@click.command("demo")
@click.option(
    "--out", "-o", type=click.Path(path_type=Path), default=Path("demo"), show_default=True, help="Folder."
)
@click.option("--quick", is_flag=True, help="Less data: faster, and a weaker network.")
@click.option("--seed", type=int, default=0, show_default=True, help="Everything follows from it.")
def demo_command(out: Path, quick: bool, seed: int) -> None:
    """Make QR pictures, train a small network on them, explain it, and score whether the maps can be trusted.

    Needs no data, no download and no GPU. Every number is computed while you watch.

    \b
    Examples:
      heatproof demo
      heatproof demo --quick --out first-look
    """
    make_folder(out)
    started = time.perf_counter()
    sizes = audit.QUICK if quick else audit.FULL
    console.print(
        f"{2 * sizes.train} training and {2 * sizes.test} test pictures, {sizes.pixels}x{sizes.pixels}: "
        "QR codes and hard negatives"
    )
    result = audit.run(out, steps, sizes, seed)
    kinds = ", ".join(f"{kind} {share:.0%}" for kind, share in result.recall_by_kind.items())
    console.print(f"test accuracy {result.accuracy:.1%} ({kinds})")
    console.print(score_table(result))
    above, others = audit.above_floor(result.lines)
    total = len(above) + len(others)
    console.print(
        f"{len(above)} of {total} methods put clearly more mass on the finders than an edge detector "
        "that knows nothing of the network" + (f"; not {', '.join(others)}." if others else ".")
    )
    if result.recall_by_kind["finderless"] < 0.5:
        console.print(
            "This network takes most finderless codes for QR codes, so it does not rest on the finders: mass "
            "elsewhere is then no fault of the maps."
        )
    console.print(
        f"heatmaps: {result.picture} ({time.perf_counter() - started:.0f} s in all)", soft_wrap=True
    )


def score_table(result: audit.Result) -> Table:
    table = new_table(
        "mass of the maps of the class 'QR code', and its mean distance to finders and timing lines:\n"
        "mean over n test codes (95 % interval); flat: how many maps are constant"
    )
    table.add_column("method", no_wrap=True)
    for name in audit.SCORES:
        table.add_column(COLUMNS[name], justify="right", no_wrap=True)
    table.add_column("n", justify="right")
    table.add_column("flat", justify="right")
    for line in result.lines:
        cells = [f"{mean:.3f} ({low:.3f}-{high:.3f})" for mean, (low, high) in line.scores.values()]
        floor = line.method in audit.FLOORS
        table.add_row(
            line.method, *cells, str(line.count), str(line.degenerate), style="dim" if floor else None
        )
    shares = [f"{result.chance[name]:.3f}" if name in result.chance else "" for name in audit.SCORES]
    table.add_row("share of the area", *shares, "", "", style="dim")
    return table
