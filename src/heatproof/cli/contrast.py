"""heatproof contrast: which maps show what a network uses, on the user's own network and images."""

from __future__ import annotations

from typing import Any

import click

from heatproof.cli._console import console, errors, say, steps
from heatproof.cli._study import PlacedCommand, finish_study, terminal_table
from heatproof.studies.contrast.settings import ContrastSettings


@click.command("contrast", cls=PlacedCommand, settings=ContrastSettings)
@click.pass_context
def contrast_command(ctx: click.Context, given: dict[str, Any]) -> None:
    """Test with planted evidence which heatmaps show what MODEL uses on IMAGES.

    A token (a small tag) is planted in images of one class. Two copies of the network are trained further: A
    learns to use the token, B sees the same images without it. To check this, the token is pasted into other
    images: it must change A's prediction in at least 90 % of them and B's in at most 10 %. Then both explain
    the same new images. A method follows the network if its maps mark the token under A and not under B: AUC
    near 1. Control maps (random, edges, centre) have AUC 0.5.

    IMAGES is a folder with a folder of images for each class, at least 20 of the class with the token and 20
    of others. Your model and images are not changed. A small network takes minutes on a CPU.

    \b
    Written to the folder --out; the same command resumes a stopped test:
      page.html       answers, scores with intervals, images with their maps under A and B
      contrast.json   the same for programs; contrast.csv
      strength-100/   both trained copies, scores per image, maps of the images shown

    \b
    Examples:
      heatproof contrast net.py:make pictures --checkpoint best.pt --positive pneumonia
      heatproof contrast torchvision:resnet50 pictures --checkpoint best.pt --token tint --device cuda
      heatproof contrast net.py:make pictures --strength 1,0.8,0.5,0.2 --methods "gradcam,lime(samples=300)"
      heatproof contrast net.py:make pictures --token sticker.png --token-size 0.2

    The exit code is 1 if planting failed at every strength, so that no method is judged. With settings in a
    file: heatproof study contrast FILE.toml.
    """
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
