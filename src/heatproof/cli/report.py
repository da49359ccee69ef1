"""Commands that write pages about runs: report and compare."""

from __future__ import annotations

import json
import math
from pathlib import Path

import click

from heatproof.cli._console import PATH, console, new_table, say

DEFAULT = "-"  # the file's usual name, in the run's folder


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
