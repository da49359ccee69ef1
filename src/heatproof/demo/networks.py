"""The demo's images and networks: a healthy and a harmful training of a small CNN, and a twin that cheats.

    epochs     1 .. 8          9 .. 14
    healthy    both trainings  cross-entropy, label smoothing, smaller steps
    harmful    share these     the same, with the weights of the classes turned around (settings.py)

Phase 1 trains everything: this backbone has no weights worth freezing. The weights to explain are copied to
OUT/weights/NAME/epochNN.safetensors, numbered over both phases.

The twin and its rival are those of the contrast test (contrast/pair.py): A, taught to look at a tag, and B,
the healthy network trained for as many epochs without the tag. They learn from images of their own.
"""

from __future__ import annotations

import csv
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from heatproof.contrast.api import Contrast, ContrastPoint, Labelled, contrast
from heatproof.contrast.pair import TOKEN_REMOVED, Flips, make_pair
from heatproof.demo.settings import CLASSES, CODE, HARM, HARMFUL, HEALTHY, Sizes, audit_methods
from heatproof.disk import write_whole
from heatproof.explain.api import explain
from heatproof.explain.floors import is_floor
from heatproof.images.codes import make_codes, write_codes
from heatproof.models.checkpoints import load_checkpoint
from heatproof.studies.qr.trainings import NETWORK, as_data
from heatproof.train import (
    Data,
    Epoch,
    History,
    Phase,
    Recipe,
    TrainProgress,
    fit,
    small_net,
    two_phase_recipe,
)
from heatproof.train.loop import weights_file
from heatproof.verdict.album import ClassPages, make_album

FIRST, BATCH = "first", 16
USES = ("train", "test", "valid")  # of images; no two uses, and no two seeds of the demo, share any
FOLDER, TOKEN, ALBUM = "twin", "tag", "gradcam"
RATE = 1e-3  # learning rate of the twin's first epoch: it grows until the tag is learnt


def write_pictures(out: Path, sizes: Sizes, seed: int) -> Path:
    """Write the test images with their masks for the csv source, unless they are complete."""
    folder = out / "pictures"
    manifest = folder / "manifest.csv"
    rows = 0
    if manifest.is_file():
        with manifest.open(newline="", encoding="utf-8") as file:
            rows = sum(1 for _ in csv.DictReader(file))  # written after their images
    if rows != 2 * sizes.test:
        codes = make_codes("qr", sizes.test, sizes.test, sizes.pixels, len(USES) * seed + USES.index("test"))
        write_codes(codes, folder, overwrite=True)
    return manifest


def codes_to_learn(n: int, sizes: Sizes, seed: int, use: str) -> Data:
    """Images of n codes and of as many negatives."""
    return as_data(make_codes("qr", n, n, sizes.pixels, len(USES) * seed + USES.index(use)))


def train_twins(
    out: Path, sizes: Sizes, seed: int, on_epoch: Callable[[str, Epoch], object]
) -> dict[str, History]:
    """Run or resume both trainings; their histories over both phases.

    on_epoch: called after every new epoch with the training's name (first, healthy, harmful).
    """
    write_whole({out / "network.py": NETWORK.format(size=sizes.pixels, width=sizes.width, seed=seed)})
    train = codes_to_learn(sizes.train, sizes, seed, "train")
    valid = codes_to_learn(sizes.test, sizes, seed, "valid")
    first, second = two_phase_recipe(
        sizes.first_epochs, sizes.second_epochs, head_lr=3e-3, full_lr=1e-3, first_depth="all"
    ).phases

    def run(name: str, phase: Phase) -> tuple[Epoch, ...]:
        """A phase of a training; a second one starts from the last weights of the first."""
        model = small_net(2, sizes.pixels, sizes.width, seed)
        before = 0 if name == FIRST else sizes.first_epochs
        if before:
            load_checkpoint(model.module, weights_file(out / "training" / FIRST, before))
        epochs = {epoch - before for epoch in (*sizes.keep, sizes.first_epochs)}
        keep = sorted(epochs.intersection(range(1, phase.epochs + 1)))

        def listen(at: TrainProgress) -> None:
            if at.result is not None:
                on_epoch(name, replace(at.result, epoch=before + at.result.epoch))

        folder = out / "training" / name
        history = fit(model, train, valid, Recipe((phase,), BATCH), folder, seed, keep, listen)
        return tuple(replace(epoch, epoch=before + epoch.epoch) for epoch in history.epochs)

    shared = run(FIRST, first)
    phases = {HEALTHY: second, HARMFUL: replace(second, class_weights=HARM)}
    return {name: History((*shared, *run(name, phase))) for name, phase in phases.items()}


def gather_weights(out: Path, name: str, sizes: Sizes) -> list[str]:
    """Copy a training's weights to the numbers of their epochs; paths relative to `out`, in order."""
    copies = {}
    for epoch in sizes.keep:
        part, own = (FIRST, epoch) if epoch <= sizes.first_epochs else (name, epoch - sizes.first_epochs)
        source = weights_file(out / "training" / part, own)
        copies[weights_file(out / "weights" / name, epoch)] = partial(shutil.copyfile, source)
    write_whole({path: copy for path, copy in copies.items() if not path.exists()})
    return [path.relative_to(out).as_posix() for path in copies]


@dataclass(frozen=True)
class Twin:
    """Results of the contrast test on the demo's network."""

    contrast: Contrast
    albums: Mapping[str, ClassPages]  # of A and B: what each uses in codes that have the tag

    @property
    def point(self) -> ContrastPoint:
        """The only strength: the tag is in all codes."""
        return self.contrast.points[0]

    @property
    def flips(self) -> str:
        """A sentence about the effect of the tag on both networks."""

        def times(flips: Flips) -> str:
            return f"{round(flips.share * flips.n) if flips.n else 0} of {flips.n}"

        a, b = self.point.planting
        return (
            f"in images without a code, the tag changes the prediction to “{CLASSES[CODE]}” in "
            f"{times(a)} for the cheating twin, and in {times(b)} for the healthy copy."
        )

    @property
    def methods(self) -> dict[str, list[str]]:
        """Methods that show the tag, that only distinguish the networks, and that do neither."""
        groups: dict[str, list[str]] = {"show": [], "tell": [], "neither": []}
        for method, score in self.contrast.scores.items():
            if method != TOKEN_REMOVED and not is_floor(method):
                group = "show" if score.shows else "tell" if score.interval[0] > 0.5 else "neither"
                groups[group].append(method)
        return groups


def cheating_twin(
    out: Path,
    sizes: Sizes,
    seed: int,
    weights: str,
    on_progress: Callable[[str, TrainProgress | int], object],
) -> Twin:
    """Run or resume both trainings and the maps of every method, in OUT/twin/strength-100.

    weights: of the healthy network, relative to `out`.
    on_progress: called with "A" or "B" and the state of its training, or "maps" and the inputs explained.
    """
    model = small_net(len(CLASSES), sizes.pixels, sizes.width, seed)
    load_checkpoint(model.module, out / weights)
    codes = codes_to_learn(sizes.twin, sizes, seed, "valid")
    ids = tuple(map(str, range(len(codes.labels))))
    images = Labelled(model.preprocess.from_bytes(codes.images), codes.labels, ids, dict(enumerate(CLASSES)))
    result = contrast(
        model, images, methods=audit_methods(sizes), token=TOKEN, positive=CODE, lr=RATE, seed=seed,
        out=out / FOLDER, progress=lambda _, which, at: on_progress(which, at),
    )  # fmt: skip
    if not result.points[0].holds:
        return Twin(result, {})
    pair = make_pair(
        model, images.images, images.labels, TOKEN, CODE, seed=seed, out=out / FOLDER / "strength-100",
        ids=images.ids, lr=RATE,
    )  # fmt: skip
    albums = {}
    for name, network in (("A", pair.a), ("B", pair.b)):
        maps = explain(network, pair.images, ALBUM, CODE, seed=pair.seed, ids=pair.ids)
        albums[name] = make_album(network, pair.images, maps, classes=CLASSES)[CODE]
    return Twin(result, albums)
