"""heatproof study: the protocols, each a command in its own file."""

from __future__ import annotations

import click

from heatproof.cli._late import LateGroup

PROTOCOLS = {
    "cscore": "Does the model look at the same place for every image of a class, while it trains?",
    "qr": "On QR codes, where the truth is known, do the maps land on the patterns that matter?",
    "cose": "Does the map stay when the prediction stays, and change when it changes?",
    "localise": "With the same pixel budget for every method, do the maps find the object?",
    "contrast": "With evidence planted in a copy of the network, do the maps show it?",
}


@click.group("study", cls=LateGroup, sections={"Protocols": PROTOCOLS}, modules="heatproof.cli.study_{}")
def study_group() -> None:
    """Run one of the protocols end to end: data, maps, scores, tables, figures, conclusions.

    Each takes its settings as options or from a TOML file, writes a folder that `heatproof report` reads,
    and goes on where it was stopped.

    \b
    Examples:
      heatproof study qr --out runs/qr
      heatproof study cose examples/cose.toml
    """
