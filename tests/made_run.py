"""A run folder written by hand: two classes, two checkpoints, scores as a test wants them, evil names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from heatproof.metrics.evidence_record import (
    EvidenceItem,
    EvidenceRecord,
    Example,
    ExchangeTest,
    PatchTest,
    PropertyTest,
    RemovalTest,
    evidence_file,
)
from heatproof.run.config import read_metrics
from heatproof.run.score import cells
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
    evidence: EvidenceRecord | None = None,
) -> RunFolder:
    """Of images 0, 1, ... with names that try to break out of a page.

    wrong: share of wrong answers, unless predicted says the answer to each. blank: by method, how many of its
    first maps are constant. thumbnails: of each image; sides: of the images' files and of the input.
    evidence: record of the metric evidence at both checkpoints.
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
        records = {}
        if evidence is not None:
            (request,) = read_metrics(["evidence"])
            rows += [row("", c, "", name, v) for c, name, v, _ in cells(request, evidence.scores)]
            records[evidence_file(folder, checkpoint)] = evidence.as_json()
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
            run.write_unit(unit, rows, stored if maps else None, pictures if maps else None, seen, records)
    run.plan(run.ledger.seals(), images, CHECKPOINTS)
    return run


def drawn(images: int, seed: int) -> torch.Tensor:
    return torch.rand(images, 4, 6, generator=torch.Generator().manual_seed(seed))


def made_record(
    answers: Sequence[str] = ("yes", "yes"), each: int = 50, regions: bool = True, recurring: bool = False,
    classes: Sequence[str] = CLASSES, methods: Sequence[str] = ("gradcam",),
) -> EvidenceRecord:  # fmt: skip
    """What interventions find where the answer for each class is "yes", "no" or "undecided".

    "no": patches off the object turn every recipient, their controls none. "undecided": nothing turns a
    recipient, but the answer is kept without the object. recurring: a patch that recurs off the object.
    """
    label = tuple(c for c in range(len(answers)) for _ in range(each))
    wrong, kept = ([float(answers[c] == answer) for c in label] for answer in ("no", "undecided"))
    none = (0.0,) * len(label)
    patches = PatchTest(
        6, ((0, 0),) * len(label), tuple(wrong), tuple(wrong), none, none, none, none, none, none,
        (0,) * len(label), (-1,) * len(label),
    )  # fmt: skip
    found = range(len(answers)) if recurring else [c for c, answer in enumerate(answers) if answer == "no"]
    image = np.arange(12 * 12 * 3, dtype=np.uint8).reshape(12, 12, 3)
    example = Example("a.png", EVIL[0], image, image[::-1], classes[0], classes[1])
    items = [
        EvidenceItem("patch", "", c, each, each, 8 * each, 8 * each, 8 * each, 3, recurring,
                     0.0 if regions else None, each, each, 0, (image,), (example,), example)
        for c in found
    ]  # fmt: skip
    pairs = len(label)
    colour = PropertyTest(
        "colour", label, tuple(range(pairs)), tuple(range(pairs)), (False,) * pairs, (False,) * pairs
    )
    others = dict.fromkeys(range(len(answers)), (each, 0))
    above = tuple(0.3 + 0.01 * (i % 5) for i in range(pairs))
    return EvidenceRecord(
        tuple(f"{i:03d}.png" for i in range(pairs)), tuple(classes), tuple(methods), tuple(range(pairs)),
        label, regions, (patches,), (patches,), RemovalTest(tuple(kept), others) if regions else None,
        ExchangeTest(above, above) if regions else None, (colour,), (0.3,) * pairs if regions else (), (0.04,),
        tuple(items), 1000, pairs,
    )  # fmt: skip
