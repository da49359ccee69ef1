"""heatproof verdict: which maps of a run to believe, and whether the network looks where it should."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

from heatproof.cli._console import console, new_table, say

if TYPE_CHECKING:
    from rich.table import Table

    from heatproof.store.facts import Facts
    from heatproof.verdict.answers import Verdict


@click.command("verdict")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--checkpoint", help="At this checkpoint; the last one where none is named.")
@click.option("--model", help="Of this model, where the run has several.")
@click.option("--json", "as_json", is_flag=True, help="Print verdict.json instead of a table.")
@click.option("--tests", is_flag=True, help="Also show the tests of maps that do not vote, as information.")
@click.option("--album", is_flag=True, help="Also make the evidence album, which the report then shows.")
@click.option(
    "--study",
    type=click.Path(path_type=Path),
    help="With --album: the study's TOML file, to build its network from.",
)
def verdict_command(
    run: Path, checkpoint: str | None, model: str | None, as_json: bool, tests: bool, album: bool,
    study: Path | None,
) -> None:  # fmt: skip
    """Say which maps of the folder RUN follow the network, and whether it looks where it should.

    Two questions, never mixed. A method FOLLOWS the network where its maps are surely better than their own
    shadows: the same method's maps of untrained networks, and the map itself turned by half a turn. The
    network LOOKS THERE where maps that follow it lie on the boxes or parts that were given, surely more often
    than chance. "Undecided" is an answer too, and says what would decide it: a metric that the run lacks,
    more pictures, or the contrast test. The verdict on the last checkpoint is kept as RUN/verdict.json.

    --album builds the network again, cuts out what lies under the strongest maps of the methods that follow,
    and groups the crops by what they look like to the network. A network that comes as code is built only
    where --study names the file that says so.

    \b
    Examples:
      heatproof verdict runs/first
      heatproof verdict runs/first --album --study study.toml && heatproof report runs/first
      heatproof verdict runs/first --tests
      heatproof verdict runs/first --json > verdict.json
      heatproof gate runs/first --rule "follows gradcam" --rule "looks-there pneumonia"
    """
    from heatproof.store import RunFolder
    from heatproof.verdict.answers import LOOKS, WORDS
    from heatproof.verdict.data import read_run
    from heatproof.verdict.judge import judge, keep

    folder = RunFolder.open(run)
    data = read_run(folder, model, checkpoint)
    verdict = judge(data)
    kept = keep(data, verdict)
    if album:
        from heatproof.verdict.kept_album import write_album

        following = [one.method for one in verdict.methods if one.follows == "yes"]
        made = write_album(folder, following or None, checkpoint=checkpoint, study=study)
        kept = f"{kept}; the album to {made}, heatproof report shows it"
    if as_json:
        click.echo(verdict.json())
        return
    say(verdict.headline, style="bold")
    for line in (verdict.sentence, *(f"note: {note}" for note in (*verdict.notes, *verdict.warnings))):
        say(line)
    table = new_table(f"at {verdict.checkpoint}")
    for name in ("", "answer", "why"):
        table.add_column(name, overflow="fold")
    for one in verdict.methods:
        votes = "; ".join(str(test) for test in one.tests if test.votes)
        table.add_row(one.method, WORDS[one.follows], "; ".join(filter(None, (one.note, votes))))
    for of in verdict.network.classes:
        table.add_row(of.name, LOOKS[of.looks_there], str(of.test))
    console.print(table)
    if tests:
        console.print(_information(verdict, data.facts))
    alarms = [f"alarm at {alarm['checkpoint']}: {alarm['sentence']}" for alarm in verdict.alarms]
    for line in filter(None, (*alarms, verdict.measured, kept)):
        say(line)


def _information(verdict: Verdict, facts: Facts) -> Table:
    """Tests that do not vote down, methods across; means over pictures, or over what the title says."""
    from heatproof.verdict.measures import measure

    table = new_table("information: these do not vote; ↑ higher is better, ↓ lower")
    for name in ("", *(one.method for one in verdict.methods)):
        table.add_column(name, justify="left" if not name else "right", overflow="fold")
    found = {(one.method, test.name): test for one in verdict.methods for test in one.tests if not test.votes}
    titles = {test.name: test.title for test in found.values()}
    for name, title in titles.items():
        values = (found.get((one.method, name)) for one in verdict.methods)
        shown = ("" if test is None or math.isnan(test.value) else f"{test.value:.3f}" for test in values)
        table.add_row(f"{title} {measure(name, facts).arrow}".strip(), *shown)
    return table
