"""The command line. Each command is one file beside this one; the work itself is done by the rooms they call.

Exit codes: 0 all went well; 1 the command finished, but some images could not be used or a rule of the gate
does not hold, or a run folder is not what was written; 2 it could not start or go on, and says why in one
sentence; 3 a bug, with its traceback; 130 it was stopped (Ctrl-C).
"""

from __future__ import annotations

import errno
import shlex
import traceback

import click

from heatproof import __version__
from heatproof.cli._console import COMMAND_LINE, errors, stopped
from heatproof.cli.bench import bench_command
from heatproof.cli.calibrate import calibrate_command
from heatproof.cli.contrast import contrast_command
from heatproof.cli.demo import demo_command
from heatproof.cli.explain import explain_command
from heatproof.cli.export import export_command
from heatproof.cli.gate import gate_command
from heatproof.cli.listing import list_group
from heatproof.cli.qr import qr_group
from heatproof.cli.report import report_command
from heatproof.cli.run import run_command
from heatproof.cli.serve import serve_command
from heatproof.cli.sql import sql_command
from heatproof.cli.study import study_group
from heatproof.cli.verdict import verdict_command
from heatproof.cli.verify import verify_command
from heatproof.errors import HeatproofError

CRASHED = 3


class Commands(click.Group):
    """Shows what heatproof raises on purpose, and Ctrl-C, as one sentence instead of a traceback."""

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


def _sentence(error: Exception) -> str | None:
    """What went wrong, where that is no bug."""
    if isinstance(error, HeatproofError):
        return str(error)
    if isinstance(error, MemoryError):
        return "there is not enough memory; close other programs, or take fewer images at a time"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"the disk is full ({error.filename}); free some space and run again"
    return None


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
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

    Every command explains itself: heatproof COMMAND --help

    Exit codes: 0 all went well; 1 some images could not be used, a rule of the gate does not hold, or a run
    folder is not what was written; 2 it could not start or go on; 3 a bug; 130 stopped by Ctrl-C, and run,
    study and demo go on with the same command.
    """


for _command in (
    demo_command,
    explain_command,
    contrast_command,
    run_command,
    study_group,
    report_command,
    verdict_command,
    serve_command,
    gate_command,
    sql_command,
    export_command,
    verify_command,
    qr_group,
    list_group,
    bench_command,
    calibrate_command,
):
    main.add_command(_command)
