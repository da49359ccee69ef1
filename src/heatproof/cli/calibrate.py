"""heatproof calibrate: how often the verdict is wrong, measured on networks with planted evidence."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import click

from heatproof.cli._console import console, new_table


@click.command("calibrate")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder for what is measured.")
@click.option(
    "--data", type=click.Path(path_type=Path), help="Folder of real pictures; generated ones only without."
)
@click.option("--device", help="cuda, cpu, ...; the fastest there is where none is named.")
@click.option("--quick", is_flag=True, help="Small networks only.")
@click.option(
    "--shard", default="0/1", show_default=True, help="Which of how many processes this one is: 0/4."
)
@click.option("--only-judge", is_flag=True, help="Measure nothing more; judge what was measured.")
def calibrate_command(
    out: Path, data: Path | None, device: str | None, quick: bool, shard: str, only_judge: bool
) -> None:
    """Measure the verdict's own error rates on a population of networks.

    For every member (pictures x network x token) two networks are trained, one that uses a planted token and
    one that does not (see heatproof contrast). The contrast test says which methods follow; controls (maps of
    untrained networks, of other pictures, classes and networks, noise, edges, the middle) are known not to.
    The rule of the verdict is chosen on one half of the pairs and its false alarms and misses are counted on
    the other. Each member is a file, so this can be stopped, resumed, and shared out over processes.

    The folder of real pictures holds cifar10/, chestxray/, imagenet/ and weights/ (see the page
    docs/results/calibration.md). The file rates.json that is written can take the place of the one in the
    package.

    \b
    Examples:
      heatproof calibrate --out calibration --quick
      heatproof calibrate --out calibration --data data --device cuda --shard 0/8
      heatproof calibrate --out calibration --only-judge
    """
    from heatproof.disk import write_whole
    from heatproof.errors import InputError
    from heatproof.models.load import best_device
    from heatproof.studies.calibrate import thresholds
    from heatproof.studies.calibrate.protocol import measure_members
    from heatproof.verdict.follow import calibration

    which, _, count = shard.partition("/")
    if not (which.isdigit() and count.isdigit() and int(which) < int(count)):
        raise InputError(f"a shard is its number and how many there are, such as 0/4; got {shard!r}")
    if not only_judge:
        say = lambda text: console.print(text, soft_wrap=True, markup=False)  # noqa: E731
        measure_members(out, data, best_device(device), quick=quick, shard=(int(which), int(count)), say=say)
        if int(count) > 1:
            console.print(
                "measured; once all shards are, judge with --only-judge", soft_wrap=True, markup=False
            )
            return
    measured = thresholds.read_members(out)
    rule, chosen, published = thresholds.calibrate(measured)
    rows = [row for member in measured for row in thresholds.judged_rows(member, rule)]
    table = io.StringIO()
    writer = csv.DictWriter(table, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    made_by = f"heatproof calibrate{' --quick' * quick}{' --data DATA' * (data is not None)}"
    content = thresholds.as_rates(rule, chosen, published, measured, made_by, calibration()["network"])
    write_whole({
        out / "rates.json": json.dumps(content, indent=1) + "\n",
        out / "judged.csv": table.getvalue(),
    })  # fmt: skip
    shown = new_table(
        f"{len(measured)} pairs; informative {rule.informative:g}, yes {rule.yes:g}, no {rule.no:g}"
    )
    for name in ("", "where it was chosen", "on the other half"):
        shown.add_column(name)
    for kind in ("false_alarm", "miss", "undecided"):
        both = [getattr(rates, kind) for rates in (chosen, published)]
        cells = [f"{s.share:.1%} ({s.low:.1%} to {s.high:.1%}, n = {s.n})" for s in both]
        shown.add_row(kind.replace("_", " "), *cells)
    console.print(shown)
    console.print(f"written to {out / 'rates.json'} and judged.csv", soft_wrap=True, markup=False)
