"""heatproof study contrast: the contrast test with its settings in a file."""

from __future__ import annotations

from typing import Any

import click

from heatproof.cli._study import StudyCommand
from heatproof.cli.contrast import run_contrast
from heatproof.studies.contrast.settings import ContrastSettings


@click.command("contrast", cls=StudyCommand, settings=ContrastSettings)
@click.pass_context
def contrast_command(ctx: click.Context, given: dict[str, Any]) -> None:
    """Run the contrast test with settings in a file; see `heatproof contrast --help`.

    \b
    Examples:
      heatproof study contrast examples/contrast.toml
      heatproof study contrast --model net.py:make --images pictures --strength 1,0.5
    """
    run_contrast(ctx, given)
