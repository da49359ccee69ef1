"""The command line. Each command is one file beside this one; the work itself is done by the rooms they call.

Exit codes: 0 all went well; 1 the command finished, but some images could not be used or a rule of the gate
does not hold, or a run folder is not what was written; 2 it could not start or go on, and says why in one
sentence; 3 a bug, with its traceback; 130 it was stopped (Ctrl-C).
"""

from __future__ import annotations

import shlex
import traceback

import click

from heatproof import __version__
from heatproof.cli._console import COMMAND_LINE, errors, stopped
from heatproof.cli._late import LateGroup
from heatproof.disk import is_full
from heatproof.errors import HeatproofError

CRASHED = 3
SECTIONS = {
    "Look around": {
        "demo": "A whole audit on made-up pictures, in minutes, without data or downloads.",
        "explain": "Heatmaps of a network for some pictures.",
        "list": "Methods, metrics, and the layers of a network.",
    },
    "Measure": {
        "audit": "Which maps of your network can be trusted on your pictures? In about five minutes.",
        "init": "Write a commented study for a folder of pictures.",
        "run": "Explain and score what STUDY.toml describes: your network, your pictures.",
        "score": "Maps that you have already, from any program: how good are they?",
        "contrast": "Which heatmaps show what a network uses? Tried with planted evidence.",
        "study": "The protocols of four papers, and the contrast test, from data to conclusions.",
    },
    "Read a run": {
        "verdict": "Which maps follow the network, and whether it looks where it should.",
        "report": "One HTML file with everything.",
        "compare": "Runs side by side: what became better or worse, whose maps changed.",
        "serve": "The same as a live page, also while the run is going.",
        "sql": "Ask the scores anything.",
        "export": "The scores as CSV, Parquet or LaTeX.",
    },
    "Keep watch": {
        "gate": "Fail a build when a run breaks a rule.",
        "verify": "Is a run folder still what was written into it?",
    },
    "Beside that": {
        "qr": "Pictures of codes with exact masks of their parts.",
    },
}


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
    """What went wrong, where that is no bug."""
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
    renamed={"list": "listing"},
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
    Then your own network and pictures, in one line:
      heatproof audit timm:resnet18 pictures --checkpoint best.pt     about five minutes, then a page

    \b
    Or described in a file:
      heatproof init pictures                         a commented study.toml to fill in
      heatproof run study.toml --dry-run              check the file; heatproof run --help says more
      heatproof run study.toml --out runs/first       maps and scores; the same command goes on after a stop
      heatproof verdict runs/first                    which maps to believe, and what the network looks at
      heatproof report runs/first                     all of it as one page

    Every command explains itself: heatproof COMMAND --help

    Exit codes: 0 all went well; 1 some images could not be used, a rule of the gate does not hold, or a run
    folder is not what was written; 2 it could not start or go on; 3 a bug; 130 stopped by Ctrl-C, and run,
    audit, study and demo go on with the same command.
    """
