"""The command line. Each command is one file beside this one; the work itself is done by the rooms they call.

Exit codes: 0 all went well; 1 the command finished, but some images could not be used or a rule of the gate
does not hold; 2 it could not start.
"""

from __future__ import annotations

import click

from heatproof import __version__
from heatproof.cli._console import errors
from heatproof.cli.bench import bench_command
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
from heatproof.errors import HeatproofError


class Commands(click.Group):
    """Shows what heatproof raises on purpose as one sentence instead of a traceback."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except HeatproofError as error:
            if ctx.params.get("debug"):
                raise
            errors.print(f"error: {error}", style="red", soft_wrap=True)
            ctx.exit(2)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="heatproof")
@click.option("--debug", is_flag=True, help="Show the whole traceback when something goes wrong.")
def main(debug: bool) -> None:
    """Can this heatmap be trusted? Explain image classifiers and score the explanations.

    \b
    Start here:
      heatproof demo                                  a whole audit on QR codes, ending with a report
      heatproof explain lite0 cat.png                 heatmaps of a real ImageNet classifier, offline
      heatproof list methods                          what can be computed, and what it costs

    Every command explains itself: heatproof COMMAND --help
    """


for _command in (
    demo_command,
    explain_command,
    run_command,
    study_group,
    report_command,
    serve_command,
    gate_command,
    sql_command,
    export_command,
    qr_group,
    list_group,
    bench_command,
):
    main.add_command(_command)
