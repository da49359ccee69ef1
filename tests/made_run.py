"""A run folder written by hand: two classes, two checkpoints, scores as a test wants them, evil names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from heatproof.store import Manifest, RunFolder
from heatproof.store.folder import SeenImages
from heatproof.types import Maps, Score, Unit

EVIL = (
    "<script>window.hacked=1</script>.png",
    '"><img src=x onerror="window.hacked=1">.png',
    "</script><script>window.hacked=1</script>.png",
    "emoji 🔥 'quoted' & more.png",
    "שלום עולם \u202eevil.png",
    "javascript:window.hacked=1",
)
CLASSES = ('cat <b>"bold"</b> 🐈', "كلب & dog's")
METHODS = ("gradcam", "layercam", "lime(samples=9)", "random", "edges")
CHECKPOINTS = ("epoch01", "epoch02")
Values = Callable[[str, str, np.random.Generator], np.ndarray]


def good(metric: str, method: str, random: np.random.Generator) -> np.ndarray:
    """Scores by which every method beats its floors."""
    base = 0.3 if method in ("random", "edges") else 0.7
    return (base if metric == "insertion" else 1 - base) + random.normal(0, 0.05, 100)


def make_run(
    folder: Path,
    values: Values = good,
    images: int = 60,
    methods: Sequence[str] = METHODS,
    cscores: Sequence[float] = (0.5, 0.6),
    extra: Sequence[tuple[str, str, float]] = (),
    metrics: Sequence[str] = ("insertion", "deletion"),
    maps: bool = True,
    wrong: float = 0.2,
    confidence: float = 0.9,
    agreement: Callable[[str, str], float] = lambda a, b: 0.4,
    gold: int | None = None,
    labels: Callable[[int], int] = lambda i: i % 2,
    predicted: Callable[[int], int] | None = None,
    blank: Mapping[str, int] | None = None,
    classes: Sequence[str] = CLASSES,
    thumbnails: np.ndarray | None = None,
    sides: tuple[int, int] = (64, 64),
) -> RunFolder:
    """Of images 0, 1, ... with names that try to break out of a page.

    wrong: share of wrong answers, unless predicted says the answer to each. blank: by method, how many of its
    first maps are constant. thumbnails: of each image; sides: of the images' files and of the input.
    """
    manifest = Manifest.collect(
        {"methods": list(methods), "images": {"kind": "folder"}}, models=dict.fromkeys(CHECKPOINTS, "abc"),
        classes=tuple(classes), command=["heatproof", "run", "<study>.toml"],
    )  # fmt: skip
    run = RunFolder.resume(folder, manifest)
    ids = [EVIL[i] if i < len(EVIL) else f"{i:03d}.png" for i in range(images)]
    for k, checkpoint in enumerate(CHECKPOINTS):
        random = np.random.default_rng(k)

        def row(
            image: str, label: int | None, method: str, metric: str, value: float, at: str = checkpoint
        ) -> Score:
            why = "not defined" if np.isnan(value) else ""
            return Score("net <1>", at, image, label, label, method, metric, float(value), why)

        rows = []
        for i, image in enumerate(ids):
            label = labels(i)
            guess = predicted(i) if predicted else 1 - label if i % 10 < 10 * wrong else label
            rows += [row(image, label, "", "predicted", guess)]
            rows += [row(image, label, "", "probability", confidence)]
        for method in methods:
            for metric in metrics:
                rows += [
                    row(image, labels(i), method, metric, v)
                    for i, (image, v) in enumerate(zip(ids, values(metric, method, random), strict=False))
                ]
            empty = (blank or {}).get(method, 0)
            rows += [row(image, labels(i), method, "degenerate", i < empty) for i, image in enumerate(ids)]
            for label, value in ((None, cscores[k]), (0, cscores[k]), (1, cscores[k])):  # type: ignore[assignment]
                n = images if label is None else images // 2
                n = gold if label == 1 and gold is not None else n
                value = value if n else 0.0
                rows += [row("", label, method, "cscore", value), row("", label, method, "cscore_n", n)]
                rows += [row("", label, method, "cscore_degenerate", 0)]
                rows += [row("", label, method, f"cscore_{end}", value) for end in ("low", "high")]
            for percent in range(0, 101, 10):
                rows += [row(i, None, method, f"insertion_at_{percent}", percent / 100) for i in ids[:3]]
        rows += [row("", None, "", "auc", 0.95), row("", None, "", "accuracy", 0.8)]
        rows += [row("", None, method, metric, value) for metric, method, value in extra]
        for a, b in ((a, b) for j, b in enumerate(methods) for a in methods[:j]):
            rows.append(row("", None, f"{a} ~ {b}", "method_agreement_spearman", agreement(a, b)))
        explained = torch.tensor([labels(i) for i in range(images)])
        stored = {
            method: Maps(method, drawn(images, m), (24, 24), explained, tuple(ids))
            for m, method in enumerate(methods)
        }
        pictures = {
            image: random.integers(0, 256, (24, 24, 3), dtype=np.uint8) for image in ids[: images - 1]
        }
        unit = Unit(checkpoint, (0, images), tuple(methods), tuple(metrics))
        seen = None if thumbnails is None else SeenImages(ids, thumbnails, np.array([sides] * images))
        with run.lock():
            run.write_unit(unit, rows, stored if maps else None, pictures if maps else None, seen)
    run.plan(run.ledger.seals(), images, CHECKPOINTS)
    return run


def drawn(images: int, seed: int) -> torch.Tensor:
    return torch.rand(images, 4, 6, generator=torch.Generator().manual_seed(seed))
