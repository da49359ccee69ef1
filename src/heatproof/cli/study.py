"""heatproof study: the protocols, each a command in its own file."""

from __future__ import annotations

import importlib

import click

PROTOCOLS = {
    "cscore": "does the model look at the same place for every image of a class, while it trains?",
    "qr": "on QR codes, where the truth is known, do the maps land on the patterns that matter?",
    "cose": "does the map stay when the prediction stays, and change when it changes?",
    "localise": "with the same pixel budget for every method, do the maps find the object?",
    "contrast": "with evidence planted in a copy of the network, do the maps show it?",
}


class Protocols(click.Group):
    """Imports a protocol when it is asked for: they need more than the rest of the command line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(PROTOCOLS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in PROTOCOLS:
            return None
        module = importlib.import_module(f"heatproof.cli.study_{cmd_name}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command


@click.group("study", cls=Protocols)
def study_group() -> None:
    """Run one of the protocols end to end: data, maps, scores, tables, figures, conclusions.

    Each takes its settings as options or from a TOML file, writes a folder that `heatproof report` reads,
    and goes on where it was stopped.

    \b
    Examples:
      heatproof study qr --out runs/qr
      heatproof study cose examples/cose.toml
    """
