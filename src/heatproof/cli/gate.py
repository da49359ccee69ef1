"""heatproof gate: fail a build when a run breaks a rule."""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import click

from heatproof.cli._console import console, new_table, say
from heatproof.errors import HeatproofError
from heatproof.verdict.rules import MIN_N, MIN_USABLE

if TYPE_CHECKING:
    from heatproof.verdict.gate import RuleResult

FAILED, CRASHED = 1, 3  # a rule; the gate itself
SHOWN = 5  # lines per rule in the table; files hold everything


@click.command("gate")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--rule", "rules", multiple=True, required=True, help="What must hold; give it several times.")
@click.option(
    "--min-n",
    default=MIN_N,
    show_default=True,
    type=click.IntRange(min=1),
    help="A number of fewer images keeps no rule (C-Score: of its gold list).",
)
@click.option(
    "--min-usable",
    default=100 * MIN_USABLE,
    show_default=True,
    type=click.FloatRange(0, 100),
    metavar="PERCENT",
    help="Images that must have been usable, of those planned.",
)
@click.option("--junit", type=click.Path(path_type=Path), help="Also write JUnit XML, which CI systems show.")
@click.option("--json", "as_json", type=click.Path(path_type=Path), help="Also write JSON.")
@click.pass_context
def gate_command(
    ctx: click.Context, run: Path, rules: tuple[str, ...], min_n: int, min_usable: float, junit: Path | None,
    as_json: Path | None,
) -> None:  # fmt: skip
    """Check the folder RUN against rules.

    \b
    Exit codes:
      0   all rules hold
      1   a rule does not hold, and nothing else
      2   a rule or the folder cannot be read
      3   the gate itself broke
      130 Ctrl-C

    A rule about a number that is not defined, or that stands on fewer than --min-n images, does not hold. One
    rule is always checked first: the run is complete, and --min-usable per cent of its images could be used.

    \b
    Rules:
      cscore >= 0.4                     every method but the floors, all classes, at the last checkpoint
      cscore.pneumonia >= 0.5           one class, by name or number
      cscore.gradcam.pneumonia >= 0.5   one method and class
      any(cscore.pneumonia >= 0.5)      one method is enough
      insertion.random <= 0.3           a floor is judged where it is named
      insertion.gradcam >= 0.3          any metric of the run: its mean over the images
      auc@epoch05 >= 0.9                at another checkpoint, by name or epoch; @all: at each of them
      no-alarms   no-alarms(1, 2)       at no checkpoint an explanation collapse, or none of these mechanisms
      follows gradcam                   the verdict: its maps follow the network; follows: all methods' do
      looks-there pneumonia             the verdict: the network looks where it should on this class

    \b
    Examples:
      heatproof gate runs/first --rule "cscore.pneumonia >= 0.5" --rule no-alarms
      heatproof gate runs/first --rule "auc >= 0.9" --junit gate.xml --json gate.json
    """
    from heatproof.disk import write_whole
    from heatproof.verdict.gate import check

    try:
        verdicts = check(run, rules, min_n, min_usable / 100)
        for path, text in ((junit, junit_xml(verdicts, run.name)), (as_json, json_text(verdicts, run))):
            if path is not None:
                write_whole({path: text})
        _print(verdicts, run)
    except HeatproofError:
        raise
    except Exception:  # Python would end with 1, which says that a rule does not hold
        traceback.print_exc()
        ctx.exit(CRASHED)
    if not all(verdict.holds for verdict in verdicts):
        ctx.exit(FAILED)


def _print(verdicts: Sequence[RuleResult], run: Path) -> None:
    held = sum(verdict.holds for verdict in verdicts)
    table = new_table("")
    for name in ("", "rule", "value", "n", "of", "why"):
        table.add_column(name, justify="right" if name in ("value", "n") else "left", overflow="fold")
    for verdict in verdicts:
        lines = verdict.lines
        for k, line in enumerate(lines[:SHOWN]):
            head = ("ok" if verdict.holds else "FAIL", verdict.rule) if k == 0 else ("", "")
            table.add_row(*head, *line)
        if len(lines) > SHOWN:
            table.add_row("", "", "", "", f"and {len(lines) - SHOWN} more", "")
    console.print(table)
    say(f"{held} of {len(verdicts)} rules hold for {run}")


def junit_xml(verdicts: Sequence[RuleResult], name: str) -> str:
    """One test case per rule."""
    failures = sum(not verdict.holds for verdict in verdicts)
    counts = {"tests": str(len(verdicts)), "failures": str(failures), "errors": "0", "skipped": "0"}
    root = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(root, "testsuite", {"name": "heatproof gate", **counts})
    for verdict in verdicts:
        names = {"classname": _xml(name), "name": _xml(verdict.rule), "time": "0"}
        case = ElementTree.SubElement(suite, "testcase", names)
        lines = [str(line) for line in verdict.lines]
        if not verdict.holds:
            failure = ElementTree.SubElement(case, "failure", {"type": "rule", "message": _xml(lines[0])})
            failure.text = _xml("\n".join(lines))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _xml(text: str) -> str:
    """Without the characters that XML has no way to write."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)


def json_text(verdicts: Sequence[RuleResult], run: Path) -> str:
    """Everything that was looked at; what is not defined is null."""
    from heatproof.verdict.answers import without_nan

    content = {
        "run": run.as_posix(),
        "holds": all(verdict.holds for verdict in verdicts),
        "rules": [
            {
                "rule": verdict.rule,
                "holds": verdict.holds,
                "n": verdict.n,
                "values": [asdict(value) for value in verdict.values],
                "alarms": [asdict(alarm) | {"name": alarm.name} for alarm in verdict.alarms],
                "reasons": list(verdict.reasons),
            }
            for verdict in verdicts
        ],
    }
    return json.dumps(without_nan(content), indent=2, allow_nan=False) + "\n"
