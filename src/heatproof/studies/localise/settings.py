"""Settings of a localisation study."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heatproof.errors import InputError
from heatproof.studies import settings as shared
from heatproof.studies.settings import Settings, calls, option, words

BASELINES = ("blur", "black", "mean", "noise")  # explain/baselines.py
FLOORS = ("random", "edges", "centre")  # always beside the methods
PREPROCESS: dict[str, dict[str, Any]] = {
    "own": {},
    "thesis": {"size": [224, 224], "resize": [256, 256]},
    "shorter-side": {"size": [224, 224], "resize": 256},
}


def counts(text: str) -> tuple[int, ...]:
    """Whole numbers between commas."""
    try:
        return tuple(int(word) for word in words(text))
    except ValueError:
        raise InputError(f"{text!r} is no list of whole numbers such as 30,100,200,300") from None


@dataclass(frozen=True, kw_only=True)
class FlagThresholds(Settings):
    """Thresholds of the flags; their rules are in tables.toml."""

    low_insertion: float = option(0.3, "Flag: unfaithful below.")
    high_insertion: float = option(0.6, "Flag: faithful from here.")
    off_object: float = option(0.5, "Flag: off-object below this share of what fits into the box.")
    confident: float = option(0.5, "Flag: confident above.")
    rise: float = option(0.1, "Flag: a deletion curve that rises by this.")
    overlap: float | None = option(None, "Flag: methods disagree up to here; the budget by default.")


@dataclass(frozen=True, kw_only=True)
class LocaliseSettings(Settings):
    """Settings of a localisation study."""

    model: str = option(help="lite0, torchvision:NAME, timm:NAME, hf:FOLDER, FILE.py:FACTORY, ...", short="M")
    checkpoint: Path | None = option(None, "Weights: safetensors or torch.")
    images: Path = option(help="Folder or CSV file of images with boxes.")
    kind: str = option("imagenet", "How the images are listed.", choices=("imagenet", "csv"))
    class_names: tuple[str, ...] = option(
        (), "Comma-separated, in the order of the model's classes; else its own.", read=words
    )
    methods: tuple[str, ...] = option(
        ("gradcam", "lime"), 'Comma-separated, options in brackets: "gradcam,lime(samples=200)".',
        short="m", read=calls,
    )  # fmt: skip
    budget: float = option(0.2, "Share of pixels that a map may mark.")
    target: str = option(
        "predicted",
        "Class to explain: the predicted one, as the text of the thesis describes it, or the true one, which "
        "its printed means fit.",
        choices=("predicted", "label"),
    )
    preprocess: str = option(
        "own",
        "The model's own; or, with its normalisation, stretched to 256 x 256 and cropped to 224 (thesis), or "
        "the shorter side resized to 256 and cropped.",
        choices=tuple(PREPROCESS),
    )
    exclude: str | None = option(
        None,
        "Left out: ambiguous (ImageNet's labels that mean the same), or a file, a class or image a line.",
    )
    groups: str | None = option(
        None,
        "Tables for groups of classes: imagenet, wordnet (the thesis's twelve subtrees), or a CSV file with "
        "the columns class and group.",
    )
    box_share: tuple[float, float] = option(
        (0.1, 0.8), "Least and largest share of the image that its box covers."
    )
    limit: int | None = option(None, shared.LIMIT, least=1)
    panels: int = option(12, "Case studies to draw, and as many confused images.", least=0)
    repeats: int = option(0, "Repetitions with other seeds on a subset, to test stability.", least=0)
    segment_counts: tuple[int, ...] = option(
        (), "LIME with other numbers of segments: 30,100,200,300.", read=counts, default_text="none"
    )
    segmentations: tuple[str, ...] = option(
        (), "LIME with other segmentations: slic,quickshift,felzenszwalb.", read=words, default_text="none"
    )
    sample_counts: tuple[int, ...] = option(
        (), "LIME with other numbers of samples: 100,300,1000.", read=counts, default_text="none"
    )
    cues: Path | None = option(
        None,
        "CSV file of images with conflicting cues: path, shape, texture (stylised images), or path and shape "
        "(silhouettes); a class or a group of --groups each. Measures shape bias.",
    )
    subset: int = option(12, "Images for repeats and variants of LIME.", least=1)
    steps: int = option(100, "Steps of insertion and deletion.", least=1)
    baseline: str = option("blur", "Replacement of deleted pixels.", choices=BASELINES)
    layer: str | None = option(None, f"{shared.LAYER} last_conv: as the thesis.", short="l")
    head: str | None = option(None, shared.CLASS_HEAD)
    thresholds: FlagThresholds = field(default_factory=FlagThresholds)
    out: Path = option(Path("runs/localise"), "Folder.", short="o")
    batch_size: int = option(16, "Images per unit.", least=1)
    device: str | None = option(None, shared.DEVICE)
    threads: int | None = option(None, shared.THREADS, least=1)
    seed: int = option(0, "Repeats the run exactly.")
