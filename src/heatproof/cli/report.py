"""heatproof report: one HTML file that says whether the maps of a run can be trusted; also on paper."""

from __future__ import annotations

from pathlib import Path

import click

from heatproof.cli._console import say

BESIDE = "-"  # the file's usual name, in the run's folder


@click.command("report")
@click.argument("run", type=click.Path(path_type=Path), required=False, metavar="RUN")
@click.option(
    "--out",
    "-o",
    type=click.Path(path_type=Path),
    help="The file; by default RUN/report.html, of an audit AUDIT/report.html.",
)
@click.option("--model", help="Which model, where the run holds several.")
@click.option("--checkpoint", help="Which checkpoint; the last by default.")
@click.option(
    "--gallery", default=48, show_default=True, type=click.IntRange(min=0), help="Pictures to embed, at most."
)
@click.option(
    "--jet", is_flag=True, help="Also offer the jet colour map, which shows steps that are not there."
)
@click.option(
    "--pdf",
    is_flag=False,
    flag_value=BESIDE,
    metavar="[FILE]",
    help="Also a PDF of at most six numbered pages; RUN/report.pdf by default. Chromium prints it where "
    "there is one, else Typst (the extra pdf) with a simpler layout.",
)
@click.option(
    "--model-card",
    "card",
    is_flag=False,
    flag_value=BESIDE,
    metavar="[FILE]",
    help="Also a Hugging Face model card with model-index results; RUN/model-card.md by default.",
)
def report_command(
    run: Path | None,
    out: Path | None,
    model: str | None,
    checkpoint: str | None,
    gallery: int,
    jet: bool,
    pdf: str | None,
    card: str | None,
) -> None:
    """Write what the folder RUN shows as one self-contained HTML file, with a verdict at the top.

    The file opens from disk and asks the network for nothing. With --pdf the same goes on paper, for somebody
    who audits; with --model-card into a model's documentation.

    \b
    Examples:
      heatproof report runs/first
      heatproof report runs/first --out audit.html --gallery 24
      heatproof report runs/first --checkpoint epoch05
      heatproof report runs/first --pdf audit.pdf
      heatproof report runs/first --model-card
    """
    if run is None:  # `report --pdf RUN` gives RUN to the option
        run, pdf, card = _taken(pdf, card)
    from heatproof.store import RunFolder

    folder = RunFolder.open(run)
    from heatproof.verdict.data import read_run  # needs duckdb and msgspec

    data = read_run(folder, model, checkpoint)  # before torch is imported, which takes its time
    from heatproof.report.page import write_page
    from heatproof.verdict.judge import keep

    path = out or folder.page
    verdict = write_page(data, path, most=gallery, jet=jet)
    told = [str(verdict), folder.status().sentence, keep(data, verdict), f"wrote {path}"]
    if pdf is not None:
        from heatproof.report.print_pdf import write_pdf

        paper = folder.path / "report.pdf" if pdf == BESIDE else Path(pdf)
        told.append(f"wrote {paper}, {write_pdf(data, verdict, paper)}")
    if card is not None:
        from heatproof.report.model_card import write_model_card

        path = folder.path / "model-card.md" if card == BESIDE else Path(card)
        told.append(f"wrote {write_model_card(data, verdict, path)}")
    for line in filter(None, told):
        say(line)


def _taken(pdf: str | None, card: str | None) -> tuple[Path, str | None, str | None]:
    """The run that an option took for its file, and the options without it."""
    if pdf not in (None, BESIDE) and Path(pdf or "").is_dir():
        return Path(pdf or ""), BESIDE, card
    if card not in (None, BESIDE) and Path(card or "").is_dir():
        return Path(card or ""), pdf, BESIDE
    raise click.UsageError("name the folder of a run, such as: heatproof report runs/first --pdf")
