"""The demo's sizes, images and networks: two trainings of a small CNN, and a twin that cheats.

    epochs     1 .. 8          9 .. 14
    healthy    both trainings  cross-entropy, label smoothing, smaller steps
    harmful    share these     the same, with the weights of the classes turned around

The harm is one wrong setting of the second phase: the weights of the classes in the loss. A missed code costs
1/100 of a false alarm, as happens when weights meant for a rare class are given in the wrong order. Images,
labels, learning rate, seed and starting weights are those of the healthy training.

Phase 1 trains everything: this backbone has no weights worth freezing. The weights to explain are copied to
OUT/weights/NAME/epochNN.safetensors, numbered over both phases.

The twin and its rival are those of the contrast test (contrast/pair.py): A, trained to use a tag, and B,
the healthy network trained for as many epochs without the tag. They learn from images of their own.
"""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from heatproof.contrast.api import FLOORS, Contrast, ContrastPoint, contrast
from heatproof.contrast.pair import TOKEN_REMOVED, Flips, make_pair
from heatproof.disk import write_whole
from heatproof.errors import InputError
from heatproof.explain.baselines import is_floor
from heatproof.images.codes import QRSet, make_qr, write_codes
from heatproof.metrics.evidence_record import EvidenceRecord
from heatproof.metrics.interventions import evidence
from heatproof.models.checkpoints import load_checkpoint
from heatproof.run.config import read_toml, toml
from heatproof.studies.qr.trainings import NETWORK, as_data
from heatproof.train import (
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
from heatproof.verdict.follow import follow_metric

CLASSES = ("no code", "QR code")
CODE = 1
HEALTHY, HARMFUL = "healthy", "harmful"
HARM = (1.0, 0.01)  # weight of the classes in the harmful second phase
CAMS = ("gradcam", "gradcam++", "layercam", "hirescam", "eigencam", "ms-gradcam++")
LIGHT = (*CAMS, "gradient")
CLASSIFIER = ("auc", "accuracy", "recall")
FOLLOWED_METHODS = (*LIGHT, "random", "edges")
FOLLOWED = ("cscore", *CLASSIFIER, "structure_score", "fmr", "bl", "inside")  # at every checkpoint
FIRST, BATCH = "first", 16
USES = ("train", "test", "valid")  # of images; no two uses, and no two seeds of the demo, share any
FOLDER, TOKEN = "twin", "tag"
FINE = ("ms-gradcam++",)  # maps that choose patches; a position of gradcam is as wide as the tag
RATE = 1e-3  # learning rate of the twin's first epoch: it grows until the tag is learnt


@dataclass(frozen=True)
class Sizes:
    """Numbers of images, epochs and steps."""

    train: int = 300  # codes, and as many negatives
    test: int = 40  # likewise; 30 are the fewest that the verdict judges
    pixels: int = 64
    width: int = 8  # channels of the network's first stage
    first_epochs: int = 8
    second_epochs: int = 6
    keep: tuple[int, ...] = (2, 5, 8, 10, 12, 14)  # epochs whose weights are explained
    steps: int = 10  # of insertion and deletion
    lime: str = "lime(samples=60, segment_count=25)"
    depths: int = 3  # at which the network is randomised
    twin: int = 100  # codes that the cheating twin learns from and explains, and as many negatives
    cose_images: int = 40
    cose_draws: int = 1  # magnitudes per transform


FULL = Sizes()
QUICK = Sizes(
    train=160, test=36, pixels=48, first_epochs=7, second_epochs=4, keep=(3, 7, 9, 11), steps=4,
    lime="lime(samples=30, segment_count=16)", depths=1, twin=80,
    cose_images=6,
)  # fmt: skip


def audit_methods(sizes: Sizes) -> tuple[str, ...]:
    return (*LIGHT, sizes.lime, *FLOORS)


def audit_metrics(sizes: Sizes) -> tuple[str, ...]:
    """Consistency, structure, localisation under a budget, faithfulness, sanity, evidence, agreement."""
    steps = f"(steps={sizes.steps})"
    return (
        "cscore", *CLASSIFIER, "structure", "localise(budget=0.2)", f"insertion{steps}", f"deletion{steps}",
        f"randomisation(depths={sizes.depths})", follow_metric().name, "evidence", "method_agreement",
    )  # fmt: skip


def study(
    name: str, checkpoints: list[str], methods: tuple[str, ...], metrics: tuple[str, ...], seed: int
) -> dict[str, Any]:
    """The config of a study over the test images, in the form of run/config.py."""
    network = f"small CNN, {name} training" if name in (HEALTHY, HARMFUL) else "small CNN"
    return {
        "methods": list(methods),
        "metrics": list(metrics),
        "run": {
            "seed": seed, "out": name, "targets": "label", "both_classes": name not in (HEALTHY, HARMFUL),
            "device": "cpu", "threads": 1,
        },
        "model": {"spec": "network.py:build", "checkpoints": checkpoints, "name": network},
        "images": {"kind": "csv", "path": "pictures/manifest.csv", "options": {"class_names": list(CLASSES)}},
    }  # fmt: skip


def settle(out: Path, sizes: Sizes, seed: int) -> None:
    """Write the settings; raises InputError for a folder with another demo, or anything else."""
    path, wanted = out / "demo.toml", toml({"seed": seed, **asdict(sizes)})
    if not path.is_file():
        if out.is_file() or (out.is_dir() and any(out.iterdir())):
            raise InputError(f"{out} holds other files; name a new folder with --out")
        write_whole({path: wanted})
        return
    stored = read_toml(path)
    for key, value in tomllib.loads(wanted).items():
        if stored.get(key) != value:
            raise InputError(
                f"{out} holds a demo with {key} = {stored.get(key)}, not {value}; "
                "name another folder with --out, or remove that one"
            )


def write_pictures(out: Path, sizes: Sizes, seed: int) -> Path:
    """Write the test images with their masks for the csv source, unless they are complete."""
    folder = out / "pictures"
    manifest = folder / "manifest.csv"
    lines = manifest.read_text(encoding="utf-8").count("\n") if manifest.is_file() else 0
    if lines != 1 + 2 * sizes.test:  # rows are written after their images
        write_codes(draw_codes(sizes.test, sizes, seed, "test"), folder, overwrite=True)
    return manifest


def draw_codes(n: int, sizes: Sizes, seed: int, use: str) -> QRSet:
    """Images of n codes and of as many negatives."""
    return make_qr(n, n, sizes.pixels, len(USES) * seed + USES.index(use))


def train_twins(
    out: Path, sizes: Sizes, seed: int, on_epoch: Callable[[str, Epoch], object]
) -> dict[str, History]:
    """Run or resume both trainings; their histories over both phases.

    on_epoch: called after every new epoch with the training's name (first, healthy, harmful).
    """
    write_whole({out / "network.py": NETWORK.format(size=sizes.pixels, width=sizes.width, seed=seed)})
    train = as_data(draw_codes(sizes.train, sizes, seed, "train"))
    valid = as_data(draw_codes(sizes.test, sizes, seed, "valid"))
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
    records: Mapping[str, EvidenceRecord]  # of A and B: what each uses in codes that have the tag

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
    drawn = draw_codes(sizes.twin, sizes, seed, "valid")
    codes = as_data(drawn)
    images = model.preprocess.from_bytes(codes.images)
    planting: dict[str, Any] = {"positive": CODE, "lr": RATE, "seed": seed}
    result = contrast(
        model, images, codes.labels, audit_methods(sizes), token=TOKEN, out=out / FOLDER,
        progress=lambda _, which, at: on_progress(which, at), **planting,
    )  # fmt: skip
    if not result.points[0].holds:
        return Twin(result, {})
    pair = make_pair(model, images, codes.labels, TOKEN, out=out / FOLDER / "strength-100", **planting)
    regions = torch.zeros(len(images), *images.shape[2:], dtype=torch.bool)
    for region, spot in zip(regions, drawn.spots, strict=True):
        region[spot.rows, spot.columns] = True  # of the code, or of what resembles one
    chosen = [int(name) for name in pair.ids]
    others = (codes.labels != CODE).nonzero().flatten()[: len(chosen)].tolist()
    inputs, labels = torch.cat([pair.images, images[others]]), codes.labels[[*chosen, *others]]
    records = {
        name: evidence(
            labels, model=network, images=inputs, methods=FINE, regions=regions[[*chosen, *others]],
            classes=CLASSES, seed=pair.seed,
        )
        for name, network in (("A", pair.a), ("B", pair.b))
    }  # fmt: skip
    return Twin(result, records)
