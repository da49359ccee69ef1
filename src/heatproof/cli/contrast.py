"""heatproof contrast: which maps show what a network uses, on the user's own network and images."""

from __future__ import annotations

from typing import Any

import click

from heatproof.cli._console import console, errors, say, steps
from heatproof.cli._study import PlacedCommand, finish_study, study_help, terminal_table
from heatproof.studies.contrast.settings import ContrastSettings


@click.command("contrast", cls=PlacedCommand, settings=ContrastSettings, help=study_help("contrast"))
@click.pass_context
def contrast_command(ctx: click.Context, given: dict[str, Any]) -> None:
    """Which heatmaps show planted evidence."""
    run_contrast(ctx, given)


def run_contrast(ctx: click.Context, given: dict[str, Any]) -> None:
    """Run the contrast test and print its answers."""
    settings = ContrastSettings(**given)  # before torch is imported
    from heatproof.studies.contrast.protocol import contrast_study

    with steps("training", 2 * len(settings.strength)) as bar:
        trained: list[tuple[float, str]] = []

        def training_done(strength: float, which: str) -> None:
            bar.done(f"{which} with the token in {strength:.0%} of the positives")

        def on_progress(strength: float, which: str, state: Any) -> None:
            if which not in ("A", "B"):
                return bar.inputs(state)
            if (strength, which) not in trained:
                if trained:
                    training_done(*trained[-1])
                trained.append((strength, which))
            return bar.now(f"{which}, {strength:.0%}, epoch {state.epoch} of at most {state.epochs}")

        outcome = contrast_study(settings, on_progress, say)
        if trained:
            training_done(*trained[-1])
    for failure in outcome.result.failures[:10]:
        errors.print(f"not used: {failure.id}: {failure.reason}", soft_wrap=True)
    for point in outcome.result.points:
        say(f"{point.strength:.0%}: {point.planting.sentence}")
    if outcome.table.rows:
        console.print(terminal_table(outcome.table))
    finish_study(ctx, outcome.page, failed=not outcome.table.rows)
