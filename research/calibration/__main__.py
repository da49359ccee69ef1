"""python -m research.calibration: measure the verdict's error rates on networks with planted evidence."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import click

from heatproof.cli import HandledErrors
from heatproof.cli._console import PATH, console, errors, new_table, say, steps
from heatproof.disk import write_whole
from heatproof.explain.api import read_methods
from heatproof.models.load import best_device
from heatproof.verdict.follow import calibration
from research.calibration import thresholds
from research.calibration.collect import METHODS
from research.calibration.population import NETWORKS
from research.calibration.protocol import Measuring, left_out, measure_members
from research.calibration.thresholds import Calibration


class ResumableCommand(HandledErrors):
    """Names the command line that resumes a stopped calibration."""

    program = "python -m research.calibration"


@click.command("calibrate", cls=ResumableCommand)
@click.option("--out", type=PATH, required=True, help="Folder for what is measured.")
@click.option("--data", type=PATH, help="Folder of real pictures; generated ones only without.")
@click.option("--device", help="cuda, cpu, ...; the fastest there is where none is named.")
@click.option("--workers", type=int, default=1, show_default=True, help="Processes that share the networks.")
@click.option(
    "--network", "networks", multiple=True, type=click.Choice(list(NETWORKS)), help="Only these; repeatable."
)
@click.option("--quick", is_flag=True, help="Small networks only, of which a CPU measures a pair in minutes.")
@click.option(
    "--repeats", type=int, default=1, show_default=True, help="More pairs of each kind, other seeds."
)
@click.option(
    "--skip",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Leave out the first so many repeats, whose pairs chose the rule.",
)
@click.option(
    "--at-most", type=click.IntRange(1), help="Measure so many more pairs, the cheap ones, then judge."
)
@click.option("--methods", help="The ones to judge; eleven where none is named.")
@click.option("--only-voting", is_flag=True, help="Only the test that votes in the verdict.")
@click.option("--only-judge", is_flag=True, help="Measure nothing more; judge what was measured.")
@click.option(
    "--earlier",
    type=PATH,
    help="judged.csv of the calibration that chose the package's rule; these pairs choose nothing.",
)
def calibrate_command(
    out: Path,
    data: Path | None,
    device: str | None,
    workers: int,
    networks: tuple[str, ...],
    quick: bool,
    repeats: int,
    skip: int,
    at_most: int | None,
    methods: str | None,
    only_voting: bool,
    only_judge: bool,
    earlier: Path | None,
) -> None:
    """Measure the verdict's own error rates on a population of networks.

    For every member (pictures x network x token) two networks are trained, one that uses a planted token and
    one that does not (see heatproof contrast). The contrast test says which methods follow; controls (maps of
    untrained networks, of other pictures, classes and networks, noise, edges, the middle) are known not to.
    The rule of the verdict is chosen on one half of the pairs and its false alarms and misses are counted on
    the other.

    Each member is a file in OUT/members, with every number of every picture, so this can be stopped, resumed,
    and shared out: processes that have the same folder never measure the same member.

    The folder of real pictures holds cifar10/, chestxray/, imagenet/ and weights/ (see the page
    docs/results/calibration.md). The file rates.json that is written can take the place of the one in the
    package.

    \b
    Examples:
      python -m research.calibration --out calibration --quick --at-most 10
      python -m research.calibration --out calibration --data data --device cuda --workers 8
      python -m research.calibration --out calibration --quick --repeats 2 --methods gradcam --only-voting
      python -m research.calibration --out calibration --data data --network resnet20 --network resnet56
      python -m research.calibration --out calibration --only-judge
      python -m research.calibration --out calibration --data data --repeats 2 --skip 1 --earlier judged.csv
    """
    named = tuple(call.text for call in read_methods(methods)) if methods else METHODS
    wanted = Measuring(
        out, data, best_device(device), named, only_voting, quick, repeats, skip, at_most, networks
    )
    if not only_judge:
        if absent := left_out(wanted):
            errors.print(f"without --data there is nothing of {', '.join(absent)}", soft_wrap=True)
        missing = wanted.missing()
        with steps("pairs", len(missing)) as bar:

            def done(text: str) -> None:
                if console.is_terminal:
                    say(text)
                bar.done(text)

            measure_members(wanted, workers, done, bar.now)
    before = thresholds.read_judged(earlier) if earlier else None
    calibration = thresholds.calibrate(thresholds.read_members(out, fewest=1 if before else 4), before)
    _write(out, calibration)
    write_whole({out / "members.json.gz": thresholds.joined(thresholds.read_members(out, fewest=1))})
    _show(calibration)
    say(f"written to {out / 'rates.json'}, judged.csv and members.json.gz")


def _write(out: Path, judged: Calibration) -> None:
    rows = [{k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()} for row in judged.rows()]
    table = io.StringIO()
    writer = csv.DictWriter(table, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    content = judged.as_json(calibration())
    write_whole({
        out / "rates.json": json.dumps(content, indent=1) + "\n",
        out / "judged.csv": table.getvalue(),
    })  # fmt: skip


def _show(calibration: Calibration) -> None:
    by = calibration.rule
    numbers = f"informative {by.informative:g}, yes {by.yes:g}, no {by.no:g}"
    title = f"{len(calibration.measured)} pairs measured; {numbers}"
    table = new_table(title)
    for name in ("", *calibration.judged):
        table.add_column(name)
    every = [calibration.rates(group) for group in calibration.judged]
    for kind in ("false_alarm", "miss", "undecided"):
        shares = [getattr(rates, kind) for rates in every]
        table.add_row(kind.replace("_", " "), *(share.text for share in shares))
    console.print(table)


if __name__ == "__main__":
    calibrate_command(prog_name=ResumableCommand.program)
