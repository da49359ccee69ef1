"""A run of many images, written in seconds: small maps and pictures, three methods, two checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

from heatproof.disk import digest
from heatproof.store import Manifest, RunFolder
from heatproof.store.maps import encode, file_stem
from heatproof.types import Maps, Score, Unit

METHODS = ("gradcam", "layercam", "random")
METRICS = ("insertion", "deletion", "inside")
CLASSES = ("code", 'no code <b>"at all"</b>')
FIRST, LAST = "epoch01", "epoch02"
DRAWINGS = 20
EARLY = 400  # images that were scored at the first checkpoint too


def make_large(folder: Path, images: int = 10_000, block: int = 500) -> RunFolder:
    """Image i has class i % 2 and is wrong where i % 10 == 0; the scores are drawn by a seed."""
    config = {"methods": list(METHODS), "images": {"kind": "folder"}}
    models = {FIRST: "abc", LAST: "def"}
    run = RunFolder.resume(folder, Manifest.collect(config, models=models, classes=CLASSES, command=["make"]))
    for checkpoint, count in ((FIRST, EARLY), (LAST, images)):
        for start in range(0, count, block):
            write_block(run, checkpoint, start, min(start + block, count))
    return run


def write_block(run: RunFolder, checkpoint: str, start: int, stop: int) -> None:
    random = np.random.default_rng([start, checkpoint == LAST])
    ids = tuple(f"shelf/{i:05d}.png" for i in range(start, stop))
    labels = np.arange(start, stop) % 2
    guesses = np.where(np.arange(start, stop) % 10 == 0, 1 - labels, labels)
    rows: list[Score] = []

    def add(method: str, metric: str, values: np.ndarray) -> None:
        rows.extend(
            Score("net", checkpoint, image, int(label), int(label), method, metric, value)
            for image, label, value in zip(ids, labels, values.tolist(), strict=True)
        )

    add("", "predicted", guesses.astype(float))
    add("", "probability", random.uniform(0.5, 1, len(ids)))
    for method in METHODS:
        for metric in METRICS:
            middle = 0.4 if (method == "random") == (metric != "deletion") else 0.6
            add(method, metric, random.normal(middle, 0.08, len(ids)).round(6))
    explained = torch.from_numpy(labels)
    maps = {
        method: Maps(method, bumps(random, len(ids), method == "random"), (32, 32), explained, ids)
        for method in METHODS
    }
    unit = Unit(checkpoint, (start, stop), METHODS, METRICS)
    run.write_unit(unit, rows, maps)
    seal = run.ledger.seals()[unit.hash]
    run.ledger.write(unit, {**seal.files, **keep_pictures(run, ids, start)}, seal.made, "")


def keep_pictures(run: RunFolder, ids: tuple[str, ...], start: int) -> dict[str, str]:
    """Not by write_unit, which waits for the disk at every picture: equal ones are one file of many names.

    Returns what the seal says of each file."""
    pictures, sealed = run.pictures(), {}
    pictures.root.mkdir(exist_ok=True)
    for number, name in enumerate(ids, start):
        first, path = pictures.root / f"drawing-{number % DRAWINGS}", pictures.root / f"{file_stem(name)}.png"
        if not first.exists():
            first.write_bytes(encode(drawing(number % DRAWINGS))[0])
        if not path.exists():
            os.link(first, path)
        sealed[f"pictures/{path.name}"] = digest(path)
    return sealed


def bumps(random: np.random.Generator, count: int, noise: bool) -> torch.Tensor:
    """ "b 7 7": one bump each, or noise."""
    if noise:
        return torch.from_numpy(random.uniform(0, 1, (count, 7, 7))).float()
    grid = np.indices((7, 7))
    place = random.integers(1, 6, (count, 2, 1, 1))
    return torch.from_numpy(np.exp(-((grid - place) ** 2).sum(1) / 4)).float()


def drawing(number: int) -> np.ndarray:
    """A checkerboard picture whose colours and tiles follow from the number."""
    size = 4 + number % 5
    board = (np.indices((32, 32)).sum(0) // size % 2).astype(bool)
    light = np.array([200 + number % 50, 210, 220], dtype=np.uint8)
    dark = np.array([30, 40 + number % 60, 60], dtype=np.uint8)
    return np.where(board[..., None], light, dark).astype(np.uint8)
