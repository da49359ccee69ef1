"""Commands that judge a run: verdict and gate."""

from __future__ import annotations

import json
import math
import re
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import click

from heatproof.cli._console import PATH, console, new_table, say, say_verdict
from heatproof.errors import HeatproofError
from heatproof.verdict.rules import MIN_N, MIN_USABLE

if TYPE_CHECKING:
    from rich.table import Table

    from heatproof.store.manifest import Facts
    from heatproof.verdict.answers import Verdict
    from heatproof.verdict.gate import RuleResult

FAILED, CRASHED = 1, 3  # exit codes: a rule does not hold; the gate itself failed
LINES_SHOWN = 5  # per rule in the table; files hold everything


@click.command("verdict")
@click.argument("run", type=PATH)
@click.option("--checkpoint", help="At this checkpoint; the last one where none is named.")
@click.option("--model", help="Of this model, where the run has several.")
@click.option("--json", "as_json", is_flag=True, help="Print verdict.json instead of a table.")
@click.option("--tests", is_flag=True, help="Also show the tests of maps that do not vote, as information.")
def verdict_command(run: Path, checkpoint: str | None, model: str | None, as_json: bool, tests: bool) -> None:
    """Judge which maps of the folder RUN follow the network, and what the network uses.

    A method FOLLOWS the network if its maps are significantly better than their control maps: the same
    method's maps of networks with random weights, and the map rotated by half a turn. The network USES THE
    OBJECT if its answers depend on the annotated boxes or masks, and if nothing else that is moved into other
    images turns their answers (metric evidence). "Undecided" comes with what would decide it: a missing
    metric, more images or annotations, or the contrast test. The verdict on the last checkpoint is stored as
    RUN/verdict.json.

    \b
    Examples:
      heatproof verdict runs/first
      heatproof verdict runs/first --tests
      heatproof verdict runs/first --json > verdict.json
      heatproof gate runs/first --rule "follows gradcam" --rule "looks-there pneumonia"
    """
    from heatproof.store import RunFolder
    from heatproof.verdict.answers import USES, WORDS
    from heatproof.verdict.data import read_run
    from heatproof.verdict.judge import judge, keep

    folder = RunFolder.open(run)
    data = read_run(folder, model, checkpoint)
    verdict = judge(data)
    stored = keep(data, verdict)
    if as_json:
        click.echo(verdict.json())
        return
    say_verdict(verdict)
    table = new_table(f"at {verdict.checkpoint}", ("", "answer", "why"))
    for answer in verdict.methods:
        votes = "; ".join(str(test) for test in answer.tests if test.votes)
        table.add_row(answer.method, WORDS[answer.follows], "; ".join(filter(None, (answer.note, votes))))
    for of in verdict.network.classes:
        table.add_row(of.name, USES[of.answer], str(of.test))
    console.print(table)
    if tests:
        console.print(_information(verdict, data.facts))
    alarms = [f"alarm at {alarm['checkpoint']}: {alarm['sentence']}" for alarm in verdict.alarms]
    for line in filter(None, (*alarms, verdict.measured, stored)):
        say(line)


def _information(verdict: Verdict, facts: Facts) -> Table:
    """Tests that do not vote as rows, methods as columns; means over images, or as in the title."""
    from heatproof.verdict.data import measure

    methods = [answer.method for answer in verdict.methods]
    values = {
        (m.method, test.name): test.value for m in verdict.methods for test in m.tests if not test.votes
    }
    titles = {test.name: test.title for m in verdict.methods for test in m.tests if not test.votes}
    rows = []
    for name, title in titles.items():
        cells = (values.get((method, name), math.nan) for method in methods)
        texts = ("" if math.isnan(value) else f"{value:.3f}" for value in cells)
        rows.append((f"{title} {measure(name, facts).arrow}".strip(), *texts))
    return new_table(
        "information: these do not vote; ↑ higher is better, ↓ lower", ("", *methods), rows, right=methods
    )


@click.command("gate")
@click.argument("run", type=PATH)
@click.option("--rule", "rules", multiple=True, required=True, help="A rule; may be repeated.")
@click.option(
    "--min-n",
    default=MIN_N,
    type=click.IntRange(min=1),
    help="Rules on fewer images do not hold (C-Score: images of its gold list).",
)
@click.option(
    "--min-usable",
    default=100 * MIN_USABLE,
    type=click.FloatRange(0, 100),
    metavar="PERCENT",
    help="Least percentage of the planned images that could be used.",
)
@click.option("--junit", type=PATH, help="Also write JUnit XML for CI systems.")
@click.option("--json", "as_json", type=PATH, help="Also write JSON.")
@click.pass_context
def gate_command(
    ctx: click.Context, run: Path, rules: tuple[str, ...], min_n: int, min_usable: float, junit: Path | None,
    as_json: Path | None,
) -> None:  # fmt: skip
    """Check rules on the folder RUN.

    \b
    Exit codes:
      0   all rules hold
      1   a rule does not hold, and nothing else
      2   a rule or the folder cannot be read
      3   internal error
      130 Ctrl-C

    A rule on an undefined number, or on fewer than --min-n images, does not hold. One rule is always checked
    first: the run is complete, and --min-usable per cent of its images could be used.

    \b
    Rules:
      cscore >= 0.4                     every method but the controls, all classes, at the last checkpoint
      cscore.pneumonia >= 0.5           one class, by name or number
      cscore.gradcam.pneumonia >= 0.5   one method and class
      any(cscore.pneumonia >= 0.5)      one method is enough
      insertion.random <= 0.3           a control, checked only if it is named
      insertion.gradcam >= 0.3          any metric of the run: its mean over the images
      auc@epoch05 >= 0.9                at another checkpoint, by name or epoch; @all: at each of them
      no-alarms   no-alarms(1, 2)       no alarm at any checkpoint, or none of these mechanisms
      follows gradcam                   the verdict: its maps follow the network; follows: all methods
      looks-there pneumonia             the verdict: the network uses the annotated object for this class
      no-shortcut                       no evidence off the object turns answers, and none recurs

    \b
    Examples:
      heatproof gate runs/first --rule "cscore.pneumonia >= 0.5" --rule no-alarms
      heatproof gate runs/first --rule "auc >= 0.9" --junit gate.xml --json gate.json
    """
    from heatproof.disk import write_whole
    from heatproof.verdict.gate import check

    try:
        results = check(run, rules, min_n, min_usable / 100)
        for path, text in ((junit, junit_xml(results, run.name)), (as_json, json_text(results, run))):
            if path is not None:
                write_whole({path: text})
        table = new_table("", ("", "rule", "value", "n", "of", "why"), right=("value", "n"))
        for result in results:
            for k, line in enumerate(result.lines[:LINES_SHOWN]):
                head = ("ok" if result.holds else "FAIL", result.rule) if k == 0 else ("", "")
                table.add_row(*head, *line)
            if len(result.lines) > LINES_SHOWN:
                table.add_row("", "", "", "", f"and {len(result.lines) - LINES_SHOWN} more", "")
        console.print(table)
        say(f"{sum(result.holds for result in results)} of {len(results)} rules hold for {run}")
    except HeatproofError:
        raise
    except Exception:  # Python would exit with 1, which means that a rule does not hold
        traceback.print_exc()
        ctx.exit(CRASHED)
    if not all(result.holds for result in results):
        ctx.exit(FAILED)


def junit_xml(results: Sequence[RuleResult], name: str) -> str:
    """One test case per rule."""
    failures = sum(not result.holds for result in results)
    counts = {"tests": str(len(results)), "failures": str(failures), "errors": "0", "skipped": "0"}
    root = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(root, "testsuite", {"name": "heatproof gate", **counts})
    for result in results:
        names = {"classname": _xml(name), "name": _xml(result.rule), "time": "0"}
        case = ElementTree.SubElement(suite, "testcase", names)
        lines = [str(line) for line in result.lines]
        if not result.holds:
            failure = ElementTree.SubElement(case, "failure", {"type": "rule", "message": _xml(lines[0])})
            failure.text = _xml("\n".join(lines))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _xml(text: str) -> str:
    """Without the characters that XML cannot hold."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)


def json_text(results: Sequence[RuleResult], run: Path) -> str:
    """All rules with their values; what is not defined is null."""
    from heatproof.verdict.answers import without_nan

    rules = [
        asdict(result) | {"alarms": [asdict(alarm) | {"name": alarm.name} for alarm in result.alarms]}
        for result in results
    ]
    content = {"run": run.as_posix(), "holds": all(result.holds for result in results), "rules": rules}
    return json.dumps(without_nan(content), indent=2, allow_nan=False) + "\n"
