"""The command line. A command is imported when it is called; the library does the work."""

from __future__ import annotations

import importlib
import shlex
import traceback
from collections.abc import Mapping
from typing import Any

import click

from heatproof import __version__
from heatproof.cli._console import COMMAND_LINE, errors, stopped
from heatproof.disk import is_full
from heatproof.errors import HeatproofError, did_you_mean

CRASHED = 3
SECTIONS = {
    "Start": {
        "demo": "Run a complete audit on generated images, in minutes, without data or downloads.",
        "explain": "Compute heatmaps of a network for images.",
        "list": "List methods, metrics and the layers of a network.",
    },
    "Measure": {
        "audit": "Test which maps of your network can be trusted on your images, in about five minutes.",
        "evidence": "Find out what a network uses, by moving it into other images.",
        "init": "Write a commented study for a folder of images.",
        "run": "Run the study in STUDY.toml: explain images and score the maps.",
        "score": "Score existing maps from any program.",
        "contrast": "Test with planted evidence which heatmaps show what a network uses.",
        "study": "Run the protocols of four papers, or the contrast test, from data to conclusions.",
    },
    "Read a run": {
        "verdict": "Judge which maps follow the network, and what the network uses.",
        "report": "Write the report, one HTML file.",
        "compare": "Compare runs: which scores and maps changed.",
        "drift": "Test whether maps of live images differ from those of a reference run.",
        "serve": "Show the report as a live page, also during the run.",
        "sql": "Query the scores with SQL.",
        "export": "Export the scores as CSV, Parquet or LaTeX, or the result as JSON.",
        "board": "Write one sortable page of many results.",
    },
    "Check": {
        "gate": "Check rules on a run, for CI.",
        "verify": "Check the files of a run folder.",
    },
    "Other": {"qr": "Generate images of codes with exact masks of their parts."},
}
MODULES = {  # of commands that share a module or have another name than it
    "list": "listing", "init": "run", "score": "audit", "evidence": "audit",
    "contrast": "study:placed_contrast",
    **dict.fromkeys((*SECTIONS["Read a run"], *SECTIONS["Check"]), "read"),
}  # fmt: skip
PROTOCOLS = {
    "cscore": "Are the maps of a class consistent over training?",
    "qr": "Do the maps mark the functional patterns of QR codes?",
    "cose": "Do the maps change if, and only if, the prediction changes?",
    "localise": "Do the maps mark the object, with the same pixel budget for every method?",
    "contrast": "Do the maps show evidence that is planted in a copy of the network?",
}


class LateGroup(click.Group):
    """A group of commands that are imported when they are called; its help imports none of them.

    sections: a line about each command, by heading and name. renamed: commands in a module of another name,
    with their name in it after a colon if it differs.
    """

    def __init__(
        self,
        *args: Any,
        sections: Mapping[str, Mapping[str, str]],
        renamed: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.sections, self.renamed = sections, renamed or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        late = [name for lines in self.sections.values() for name in lines]
        return [*late, *(name for name in super().list_commands(ctx) if name not in late)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.commands or cmd_name not in self.list_commands(ctx):
            return super().get_command(ctx, cmd_name)
        module, _, name = self.renamed.get(cmd_name, cmd_name).partition(":")
        imported = importlib.import_module(f"heatproof.cli.{module}")
        command: click.Command = getattr(imported, f"{name or cmd_name}_command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None and args[0][:1] != "-":
            ctx.fail(f"No such command {args[0]!r}; {did_you_mean(args[0], self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        widest = max(map(len, self.list_commands(ctx)))
        for heading, lines in self.sections.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(widest), line) for name, line in lines.items()])


class HandledErrors(click.Command):
    """Prints expected errors and Ctrl-C as one sentence instead of a traceback."""

    program = "heatproof"

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[COMMAND_LINE] = shlex.join(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            stopped(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except Exception as error:
            sentence = _sentence(error)
            if sentence is None:
                errors.print(traceback.format_exc(), soft_wrap=True)
                errors.print("a bug in heatproof or in the model's code; please report it", soft_wrap=True)
                ctx.exit(CRASHED)
            if ctx.params.get("debug"):
                errors.print(traceback.format_exc(), soft_wrap=True)
            errors.print(f"error: {sentence}", style="red", soft_wrap=True)
            ctx.exit(2)


class Commands(HandledErrors, LateGroup):
    """The command group `heatproof`."""


def _sentence(error: Exception) -> str | None:
    """A sentence about an expected error; None for a bug."""
    if isinstance(error, HeatproofError):
        return str(error)
    if isinstance(error, MemoryError):
        return "there is not enough memory; close other programs, or take fewer images at a time"
    if isinstance(error, OSError) and is_full(error):
        place = f" ({error.filename})" if error.filename else ""
        return f"the disk is full{place}; free some space and run again"
    return None


@click.group(
    cls=Commands,
    sections=SECTIONS,
    renamed=MODULES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
    epilog='Tab completion: eval "$(_HEATPROOF_COMPLETE=bash_source heatproof)"; zsh_source, fish_source.',
)
@click.version_option(__version__, prog_name="heatproof")
@click.option("--debug", is_flag=True, help="Show the whole traceback when something goes wrong.")
def main(debug: bool) -> None:
    """Can this heatmap be trusted? Explain image classifiers and score the explanations.

    \b
    Start here:
      heatproof demo                                  a whole audit on QR codes, ending with a report
      heatproof explain lite0 example:cat             heatmaps of a real ImageNet classifier, offline
      heatproof list methods                          what can be computed, and what it costs

    \b
    Then your own network and images, in one line:
      heatproof audit timm:resnet18 pictures --checkpoint best.pt     about five minutes, then a page

    \b
    Or described in a file:
      heatproof init pictures                         a commented study.toml to fill in
      heatproof run study.toml --dry-run              check the file; see heatproof run --help
      heatproof run study.toml --out runs/first       maps and scores; the same command resumes
      heatproof verdict runs/first                    which maps follow the network, and what it uses
      heatproof report runs/first                     all of it as one page

    Options and examples: heatproof COMMAND --help

    Exit codes: 0 success; 1 some images could not be used, a rule of the gate does not hold, or a run
    folder is not what was written; 2 it could not start or continue; 3 a bug; 130 stopped by Ctrl-C; run,
    audit, study and demo resume with the same command.
    """


@main.group(
    "study", cls=LateGroup, sections={"Protocols": PROTOCOLS}, renamed=dict.fromkeys(PROTOCOLS, "study")
)
def study_group() -> None:
    """Run one of the protocols end to end: data, maps, scores, tables, figures, conclusions.

    Each takes its settings as options or from a TOML file, writes a folder that `heatproof report` reads,
    and resumes where it was stopped.

    \b
    Examples:
      heatproof study qr --out runs/qr
      heatproof study cose examples/cose.toml
    """
