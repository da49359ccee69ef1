"""The demo's pictures, and the small CNN trained on them: a first phase, a healthy and a harmful second one.

    epochs     1 .. 8          9 .. 14
    healthy    both trainings  cross-entropy, label smoothing, smaller steps
    harmful    share these     the same, with the weights of the classes turned around (settings.py)

Both are the protocol of train/protocols.py. Phase 1 trains everything: this backbone has no weights worth
freezing. The weights to explain are gathered as OUT/weights/NAME/epochNN.safetensors, numbered over both
phases.
"""

from __future__ import annotations

import csv
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from heatproof.demo.settings import HARM, HARMFUL, HEALTHY, Sizes
from heatproof.disk import write_whole
from heatproof.images.codes import make_codes, write_codes
from heatproof.models.checkpoints import load_checkpoint
from heatproof.studies.qr.trainings import NETWORK, as_data
from heatproof.train import Data, Epoch, History, Phase, Recipe, fit, small_net, two_phase_recipe
from heatproof.train.loop import TrainProgress, weights_file

FIRST = "first"
BATCH = 16
Told = Callable[[str, Epoch], object]  # the training's name, and what an epoch of it came to


def write_pictures(out: Path, sizes: Sizes, seed: int) -> Path:
    """The test pictures with their masks, as the csv source reads them; nothing where they are there."""
    folder = out / "pictures"
    manifest = folder / "manifest.csv"
    if not _complete(manifest, 2 * sizes.test):
        pictures = make_codes("qr", sizes.test, sizes.test, sizes.pixels, _seed(seed, "test"))
        write_codes(pictures, folder, overwrite=True)
    return manifest


def _seed(seed: int, use: str) -> int:
    """Of the pictures for one use: no two uses and no two demos share any."""
    uses = ("train", "test", "valid")
    return len(uses) * seed + uses.index(use)


def _complete(manifest: Path, count: int) -> bool:
    """Whether every row is there: rows follow their pictures."""
    if not manifest.is_file():
        return False
    with manifest.open(newline="", encoding="utf-8") as file:
        return sum(1 for _ in csv.DictReader(file)) == count


def codes_to_learn(n: int, sizes: Sizes, seed: int, use: str) -> Data:
    """So many codes and as many negatives."""
    return as_data(make_codes("qr", n, n, sizes.pixels, _seed(seed, use)))


def train_twins(out: Path, sizes: Sizes, seed: int, told: Told) -> dict[str, History]:
    """Both trainings, or what an earlier call left of them: epoch by epoch, over both phases.

    told: after every epoch of this call, with the training's name (first, healthy, harmful).
    """
    network = NETWORK.format(size=sizes.pixels, width=sizes.width, seed=seed)
    write_whole({out / "network.py": network})
    train, valid = (
        codes_to_learn(n, sizes, seed, use) for n, use in ((sizes.train, "train"), (sizes.test, "valid"))
    )
    first, second = two_phase_recipe(
        sizes.first_epochs, sizes.second_epochs, head_lr=3e-3, full_lr=1e-3, first_depth="all"
    ).phases
    begun = _fit(out, FIRST, first, train, valid, sizes, seed, told)
    phases = {HEALTHY: second, HARMFUL: replace(second, class_weights=HARM)}
    return {
        name: History((*begun.epochs, *_fit(out, name, phase, train, valid, sizes, seed, told).epochs))
        for name, phase in phases.items()
    }


def _fit(
    out: Path, name: str, phase: Phase, train: Data, valid: Data, sizes: Sizes, seed: int, told: Told
) -> History:
    """One phase of one training; a second one starts from the weights that the first one ended with."""
    model = small_net(2, sizes.pixels, sizes.width, seed)
    before = 0 if name == FIRST else sizes.first_epochs
    if before:
        load_checkpoint(model.module, weights_file(out / "training" / FIRST, before))
    kept = {epoch - before for epoch in (*sizes.keep, sizes.first_epochs)}
    keep = sorted(kept.intersection(range(1, phase.epochs + 1)))

    def listen(at: TrainProgress) -> None:
        if at.result is not None:
            told(name, replace(at.result, epoch=before + at.result.epoch))

    folder = out / "training" / name
    history = fit(model, train, valid, Recipe((phase,), BATCH), folder, seed, keep, listen)
    return History(tuple(replace(epoch, epoch=before + epoch.epoch) for epoch in history.epochs))


def gather_weights(out: Path, name: str, sizes: Sizes) -> list[str]:
    """A training's weights under the numbers of its epochs; their paths, relative to `out`, in order."""
    copies = {}
    for epoch in sizes.keep:
        part, own = (FIRST, epoch) if epoch <= sizes.first_epochs else (name, epoch - sizes.first_epochs)
        source = weights_file(out / "training" / part, own)
        copies[weights_file(out / "weights" / name, epoch)] = partial(shutil.copyfile, source)
    write_whole({path: copy for path, copy in copies.items() if not path.exists()})
    return [path.relative_to(out).as_posix() for path in copies]
