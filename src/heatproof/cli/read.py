"""Commands that read a run folder: verdict, report, compare, serve, sql, export, board, gate and verify."""

from __future__ import annotations

import csv
import json
import math
import re
import sys
import threading
import traceback
import webbrowser
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from heatproof.cli._console import PATH, console, has_screen, new_table, say, say_verdict
from heatproof.errors import HeatproofError, InputError, counted, visible
from heatproof.rows import MIN_N, MIN_USABLE

if TYPE_CHECKING:
    from rich.table import Table

    from heatproof.store.manifest import Facts
    from heatproof.verdict.answers import Verdict
    from heatproof.verdict.gate import RuleResult

FAILED, CRASHED = 1, 3  # exit codes: a rule does not hold; the gate itself failed
LINES_SHOWN = 5  # per rule in the table; files hold everything
FINDINGS_SHOWN = 20
DEFAULT = "-"  # the usual name of a file in the run's folder


@click.command("verdict")
@click.argument("run", type=PATH)
@click.option("--checkpoint", help="Checkpoint to judge; the last by default.")
@click.option("--model", help="Model to judge, if the run contains several.")
@click.option("--json", "as_json", is_flag=True, help="Print verdict.json instead of a table.")
@click.option("--tests", is_flag=True, help="Also show the tests of maps that do not vote, as information.")
def verdict_command(run: Path, checkpoint: str | None, model: str | None, as_json: bool, tests: bool) -> None:
    """Judge which maps of the folder RUN follow the network, and what the network uses.

    A method FOLLOWS the network if its maps are significantly better than their control maps: the same
    method's maps of networks with random weights, and the map rotated by half a turn. The network USES THE
    OBJECT if its answers depend on the annotated boxes or masks, and if nothing else that is moved into other
    images turns their answers (metric evidence). "Undecided" names what would decide it: a missing
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

    data = read_run(RunFolder.open(run), model, checkpoint)
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
    tests = [(m.method, test) for m in verdict.methods for test in m.tests if not test.votes]
    values = {(method, test.name): test.value for method, test in tests}
    titles = {test.name: test.title for _, test in tests}
    rows = []
    for name, title in titles.items():
        cells = (values.get((method, name), math.nan) for method in methods)
        texts = ("" if math.isnan(value) else f"{value:.3f}" for value in cells)
        rows.append((f"{title} {measure(name, facts).arrow}".strip(), *texts))
    return new_table(
        "information: these do not vote; ↑ higher is better, ↓ lower", ("", *methods), rows, right=methods
    )


@click.command("report")
@click.argument("run", type=PATH, required=False, metavar="RUN")
@click.option(
    "--out", "-o", type=PATH, help="The file; by default RUN/report.html, of an audit AUDIT/report.html."
)
@click.option("--model", help="Which model, if the run contains several.")
@click.option("--checkpoint", help="Which checkpoint; the last by default.")
@click.option("--gallery", default=48, type=click.IntRange(min=0), help="Images to embed, at most.")
@click.option("--jet", is_flag=True, help="Also offer the jet colour map, which shows false edges.")
@click.option(
    "--pdf",
    is_flag=False,
    flag_value=DEFAULT,
    metavar="[FILE]",
    help="Also a PDF of at most six numbered pages; RUN/report.pdf by default. Printed by Chromium if "
    "installed, else by Typst (the extra pdf) with a simpler layout.",
)
@click.option(
    "--model-card",
    "card",
    is_flag=False,
    flag_value=DEFAULT,
    metavar="[FILE]",
    help="Also a Hugging Face model card with model-index results; RUN/model-card.md by default.",
)
def report_command(
    run: Path | None, out: Path | None, model: str | None, checkpoint: str | None, gallery: int, jet: bool,
    pdf: str | None, card: str | None,
) -> None:  # fmt: skip
    """Write the report of the folder RUN, one self-contained HTML file with the verdict at the top.

    The file opens from disk and loads nothing. --pdf also writes a PDF, --model-card a model card.

    \b
    Examples:
      heatproof report runs/first
      heatproof report runs/first --out audit.html --gallery 24
      heatproof report runs/first --checkpoint epoch05
      heatproof report runs/first --pdf audit.pdf
      heatproof report runs/first --model-card
    """
    if run is None:  # `report --pdf RUN` gives RUN to the option
        if pdf not in (None, DEFAULT) and Path(pdf).is_dir():
            run, pdf = Path(pdf), DEFAULT
        elif card not in (None, DEFAULT) and Path(card).is_dir():
            run, card = Path(card), DEFAULT
        else:
            raise click.UsageError("name the folder of a run, such as: heatproof report runs/first --pdf")
    from heatproof.report.page import write_page
    from heatproof.store import RunFolder
    from heatproof.verdict.data import read_run
    from heatproof.verdict.judge import keep

    folder = RunFolder.open(run)
    data = read_run(folder, model, checkpoint)
    path = out or folder.page
    verdict = write_page(data, path, most=gallery, jet=jet)
    lines = [str(verdict), folder.status().sentence, keep(data, verdict), f"wrote {path}"]
    if pdf is not None:
        from heatproof.report.print_pdf import write_pdf

        paper = folder.path / "report.pdf" if pdf == DEFAULT else Path(pdf)
        lines.append(f"wrote {paper}, {write_pdf(data, verdict, paper)}")
    if card is not None:
        from heatproof.report.model_card import write_model_card

        path = folder.path / "model-card.md" if card == DEFAULT else Path(card)
        lines.append(f"wrote {write_model_card(data, verdict, path)}")
    for line in filter(None, lines):
        say(line)


@click.command("compare")
@click.argument("runs", nargs=-1, required=True, metavar="RUN RUN...")
@click.option("--out", "-o", type=PATH, default=Path("compare.html"), help="The page.")
@click.option(
    "--pictures", default=12, type=click.IntRange(min=0), help="Images whose maps changed most, to show."
)
@click.option("--all", "everything", is_flag=True, help="Also print numbers without a significant change.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON; write no page.")
def compare_command(runs: tuple[str, ...], out: Path, pictures: int, everything: bool, as_json: bool) -> None:
    """Compare runs: which scores became better or worse, and which maps changed most.

    Each RUN is a folder, optionally with a checkpoint or a method behind @; the others are compared with the
    first. Compare networks, checkpoints of a training, or methods of a network. Shared images are compared in
    pairs, others as two samples, with 95 % intervals.

    \b
    Examples:
      heatproof compare runs/before runs/after
      heatproof compare runs/resnet runs/convnext runs/vit --out networks.html
      heatproof compare runs/training@epoch05 runs/training@epoch30
      heatproof compare runs/first@gradcam runs/first@layercam
      heatproof compare runs/before runs/after --json > changes.json
    """
    from heatproof.report.compare import compare_runs

    result = compare_runs(runs, pictures)
    if as_json:
        click.echo(json.dumps(result.as_json(), indent=1, ensure_ascii=False, allow_nan=False))
        return
    table = new_table(result.headline, ("run", "verdict", "methods that follow"))
    for side in result.sides:
        follow = [m.method for m in side.verdict.methods if m.follows == "yes"]
        table.add_row(side.name, side.headline, ", ".join(follow) or "none")
    console.print(table)
    columns = ("number", "method", "from", "to", "before", "after", "change", "95 % interval", "")
    changes = new_table("significant changes" if not everything else "all numbers", columns)
    for d in result.differences:
        if everything or d.answer != "unclear":
            interval = "" if math.isnan(d.low) else f"{d.low:+.3f} to {d.high:+.3f}"
            ends = (result.sides[k].name for k in d.sides)
            values = f"{d.before:.3f}", f"{d.after:.3f}", f"{d.change:+.3f}", interval, d.answer
            changes.add_row(f"{d.of.short} {d.of.arrow}", d.method, *ends, *values)
    if changes.rows:
        console.print(changes)
    for image in result.moved[:3]:
        say(f"largest change of maps: {image.image} (similarity {image.alike:.2f})")
    say(f"the page: {result.report(out)}")


@click.command("drift")
@click.argument("reference")
@click.argument("live")
@click.option("--out", type=PATH, help="Folder of the results; by default that of the live run.")
@click.option("--splits", default=1000, type=click.IntRange(100), help="Random splits of the images.")
@click.option("--seed", default=0, help="Random seed of the splits.")
@click.pass_context
def drift_command(
    ctx: click.Context, reference: str, live: str, out: Path | None, splits: int, seed: int
) -> None:
    """Test whether the maps of live images differ from those of the run REFERENCE, without labels.

    LIVE is a run, or a folder or CSV file of images; these are explained with the network, checkpoint and
    methods of the reference, in the folder --out. Both runs may have a checkpoint or a method behind @.
    Compared within predicted classes: place, spread and consistency of the maps, and recurring patches if the
    reference has tested evidence. The usual difference comes from random splits of the images of both.

    \b
    Examples:
      heatproof drift runs/reference runs/today
      heatproof drift runs/reference@layercam runs/today
      heatproof drift audit images/today --out runs/today

    Writes drift.json and drift.html. The exit code is 1 if there is drift.
    """
    from heatproof.report.drift import find_drift
    from heatproof.run.progress import Progress

    result = find_drift(reference, live, out, splits, seed, Progress(console))
    columns = ("statistic", "question", "reference", "live", "difference", "usual, up to", "p")
    numbers = [[f"{x:.3f}".replace("nan", "") for x in test[2:]] for test in result.tests]
    rows = [[*test[:2], *texts] for test, texts in zip(result.tests, numbers, strict=True)]
    console.print(new_table(result.headline, columns, rows, columns[2:]))
    for note in result.notes:
        say(f"note: {note}")
    say(f"the page: {Path(out or result.runs[1]['run']) / 'drift.html'}")
    ctx.exit(FAILED if result.drifted else 0)


@click.command("sql")
@click.argument("run", type=PATH)
@click.argument("query")
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "csv", "json"]),
    default="table",
    help="How to print the rows.",
)
@click.option("--files", is_flag=True, help="Allow the query to read and write files of this machine.")
def sql_command(run: Path, query: str, form: str, files: bool) -> None:
    """Run a DuckDB QUERY over the table `scores` of the folder RUN.

    Columns: model, checkpoint, image, label, explained, method, metric, value, reason, unit. Rows about a
    whole class or checkpoint have image ''. A running run shows what is finished. The query works on a
    copy of the rows in memory and cannot access files without --files. Ctrl-C ends it.

    \b
    Examples:
      heatproof sql runs/first "from scores limit 5"
      heatproof sql runs/first "select metric, method, avg(value), count(*) from scores
                                where image <> '' and not isnan(value) group by all order by all"
      heatproof sql runs/first "select image, reason from scores where metric = 'image'" --format csv
    """
    from heatproof.store import RunFolder
    from heatproof.store.scores import csv_cell

    rows = RunFolder.open(run).scores().ask(query, files)
    names = list(rows[0]) if rows else []
    if form == "json":
        click.echo(json.dumps(rows, default=str))
    elif form == "csv":
        writer = csv.DictWriter(sys.stdout, names, lineterminator="\n")
        writer.writeheader()
        text = visible if sys.stdout.isatty() else str
        for row in rows:
            writer.writerow({n: csv_cell(text(v)) if isinstance(v, str) else v for n, v in row.items()})
    elif not rows:
        console.print("no row")
    else:
        numeric = [n for n in names if all(isinstance(row[n], int | float | None) for row in rows)]
        cells = (["" if row[n] is None else row[n] for n in names] for row in rows)
        texts = ([f"{v:.6g}" if isinstance(v, float) else str(v) for v in own] for own in cells)
        console.print(new_table("", names, texts, numeric))


@click.command("export")
@click.argument("run", type=PATH)
@click.option("--csv", type=PATH, help="All rows, sorted.")
@click.option("--parquet", type=PATH, help="All rows, sorted.")
@click.option("--latex", type=PATH, help="Means with their n, metrics by methods.")
@click.option("--result", type=PATH, help="Both answers with network, data and versions, as JSON to share.")
def export_command(run: Path, **files: Path | None) -> None:
    """Write the scores of the folder RUN, or its result, to files.

    \b
    Examples:
      heatproof export runs/first --csv scores.csv
      heatproof export runs/first --result first.json
      heatproof export runs/first --parquet scores.parquet --latex table.tex
    """
    from heatproof.store import RunFolder

    wanted = {form: path for form, path in files.items() if path}
    if not wanted:
        raise InputError("nothing to export; name a file with --csv, --parquet, --latex or --result")
    folder = RunFolder.open(run)
    for form, path in wanted.items():
        if form == "result":
            from heatproof.report.model_card import write_result
            from heatproof.verdict.data import read_run
            from heatproof.verdict.judge import judge

            write_result(data := read_run(folder), judge(data), path)
        else:
            folder.scores().export(path, form)
        say(f"wrote {path}")


@click.command("board")
@click.argument("files", nargs=-1, required=True, type=PATH, metavar="FILE...")
@click.option("--out", "-o", type=PATH, default=Path("board.html"), help="The page.")
def board_command(files: tuple[Path, ...], out: Path) -> None:
    """Write one sortable page of the result files FILE..., each written by heatproof export RUN --result.

    \b
    Examples:
      heatproof board results/first.json results/second.json
      heatproof board results/first.json --out board.html
    """
    from heatproof.report.model_card import write_board

    say(f"wrote {write_board(files, out)}")


@click.command("serve")
@click.argument("run", type=PATH)
@click.option("--port", default=8080, type=click.IntRange(0, 65535), help="0: any.")
@click.option("--host", default="127.0.0.1", help="0.0.0.0: all, with a token.")
@click.option("--token", is_flag=True, help="Require a token on loopback too.")
@click.option(
    "--open/--no-open", "open_page", default=True, show_default=False, help="Open the page in a browser."
)
def serve_command(run: Path, port: int, host: str, token: bool, open_page: bool) -> None:
    """Show the folder RUN as a live page, also during the run; Ctrl-C ends it.

    The report with every image: filter, sort, search, compare two methods or checkpoints with a slider, and
    download what is shown. Only this machine can open it; with another --host, a token is required.

    \b
    Examples:
      heatproof serve runs/first
      heatproof serve runs/first --port 9000 --no-open
      heatproof serve runs/first --host 0.0.0.0
    """
    from heatproof.report.serve import Server

    with Server(run, host, port, token) as server:
        say(f"{server.live.path} is shown at {server.address}")
        if not server.live.state()["units"]:
            say("it has no finished unit yet; the page updates automatically")
        if server.token:
            say("this address contains the token; keep it secret")
        say("Ctrl-C ends it")
        threading.Thread(target=server.live.warm, daemon=True).start()
        if open_page and has_screen():
            threading.Thread(target=webbrowser.open, args=[server.address], daemon=True).start()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            say("\nended")


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
      no-drift                          heatproof drift detected no drift from the reference

    \b
    Examples:
      heatproof gate runs/first --rule "cscore.pneumonia >= 0.5" --rule no-alarms
      heatproof gate runs/first --rule "auc >= 0.9" --junit gate.xml --json gate.json
    """
    from heatproof.disk import write_whole
    from heatproof.verdict.gate import check

    try:
        results = check(run, rules, min_n, min_usable / 100)
        if junit is not None:
            write_whole({junit: junit_xml(results, run.name)})
        if as_json is not None:
            write_whole({as_json: json_text(results, run)})
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
    """One test case per rule, without the characters that XML cannot hold."""
    from heatproof.report.pieces import TEMPLATES

    text = TEMPLATES.get_template("cli/junit.xml").render(results=results, name=name)
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


@click.command("verify")
@click.argument("run", type=PATH)
@click.option("--repair", is_flag=True, help="Remove damaged files and set unknown ones aside.")
@click.pass_context
def verify_command(ctx: click.Context, run: Path, repair: bool) -> None:
    """Check every file of the folder RUN against its checksum, and whether the run is complete.

    \b
    Examples:
      heatproof verify runs/first
      heatproof verify runs/first --repair     then `heatproof run` computes again what was removed

    The exit code is 1 if a file is damaged, missing or unknown, also if --repair removed it, and if it is
    unknown whether the run is complete.
    """
    from heatproof.store import RunFolder, folder
    from heatproof.store.folder import run_in

    path = run_in(run)
    findings = folder.inspect(path)
    if not findings:
        status = RunFolder.open(path).status()
        say(f"all files are intact; {status.sentence}")
        ctx.exit(1 if status.state == "unknown" else 0)
    first = f"; the first {FINDINGS_SHOWN}" * (len(findings) > FINDINGS_SHOWN)
    rows = [(finding.path, finding.problem) for finding in findings[:FINDINGS_SHOWN]]
    title = f"{counted(len(findings), 'problem')} in {path}{first}"
    console.print(new_table(title, ("file", "problem"), rows))
    if repair:
        dropped = f"dropped {counted(len(folder.repair(path, findings)), 'unit')}"
        say(f"{dropped}; made again by heatproof run STUDY --out {path}")
    else:
        say(f"to drop them: heatproof verify {path} --repair")
    ctx.exit(1)
