"""Settings of a COSE study."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heatproof.registry import explainers
from heatproof.studies.settings import DEVICE, HEAD, LAYER, LIMIT, Settings, calls, option, words

SIMILARITIES = {
    "local5": "SSIM", "eq2": "SSIM (eq. 2)", "pearson": "Pearson's r", "spearman": "Spearman's rho",
}  # fmt: skip
PAPER_METHODS = (
    "blur-ig", "gradcam", "gradcam++", "guided-ig", "integrated-gradients", "lime", "smoothgrad",
)  # fmt: skip


def _methods(text: str) -> tuple[str, ...]:
    if text == "all":
        return tuple(entry.name for entry in explainers if not entry.architecture)  # those for any network
    return PAPER_METHODS if text == "paper" else calls(text)


@dataclass(frozen=True, kw_only=True)
class CoseSettings(Settings):
    """Settings of a COSE study."""

    model: str = option(help="torchvision:NAME, timm:NAME, hf:FOLDER, FILE.py:FACTORY, lite0, ...", short="M")
    images: str | Path = option(help="Where the images are.")
    kind: str = option("folder", "folder, csv, imagenet, npz, hf or dicom.")
    checkpoints: tuple[str | Path, ...] = option(
        (), "Weight files of one training run, or a quoted pattern; may be given several times."
    )
    final: str | None = option(None, "Name of the trained checkpoint; the last one by default.")
    random_init: bool = option(True, "Also the untrained network.")
    pretrained: bool = option(False, "The library's weights are the final model.")
    methods: tuple[str, ...] = option(
        PAPER_METHODS, '"paper" (the seven of the paper), "all", or names: "gradcam,lime(samples=200)".',
        short="m", read=_methods, default_text="paper",
    )  # fmt: skip
    paper: bool = option(
        False,
        "As the authors ran it: integrated gradients in 25 steps from zero in normalised space (their code; "
        "the text has a black image); LIME as the signs of ten quickshift segments, 1,000 random samples, "
        "hidden segments 0; squared SmoothGrad; gradients of the probability, except CAMs; only images that "
        "the final model gets right.",
    )
    similarity: str = option(
        "local5",
        "SSIM in windows (the authors' code), over the whole map (eq. 2 of the paper), Pearson's r (its "
        "supplement) or Spearman's rho (as its related work, section 2.2).",
        choices=tuple(SIMILARITIES),
    )
    transforms: tuple[str, ...] = option(
        (), "Some of the thirteen, comma-separated; all by default.", read=words, default_text=""
    )
    draws: int = option(6, "Magnitudes per image and signed transform.", least=1, most=60)
    limit: int | None = option(None, LIMIT, least=1)
    num_classes: int | None = option(None, "Of a network built by name.", least=1)
    class_names: tuple[str, ...] = option(
        (), "Comma-separated, in the order of the model's classes (folder, imagenet).", read=words
    )
    label_columns: tuple[str, ...] = option(
        (), "Multi-label images of a CSV file: its columns of 0 and 1, comma-separated.", read=words
    )
    layer: str | None = option(None, LAYER, short="l")
    head: str | None = option(None, HEAD)
    name: str | None = option(None, "The model's name in tables.")
    dataset: str | None = option(None, "The images' name in tables; that of their folder by default.")
    pretraining: str | None = option(
        None, "How the network was pre-trained (supervised, dino, ...), to group studies by."
    )
    trained_with: str = option(
        "unknown",
        "Whether these transforms were part of the training; detected for trainings of heatproof.",
        choices=("yes", "no", "unknown"),
    )
    beside: tuple[Path, ...] = option((), "Folder of another COSE study, for the same Table 1.")
    figures: bool = option(True, "Draw the figures.")
    examples: int = option(2, "Images whose maps are shown before and after a change.", least=0)
    same_seed: bool = option(False, "Both sides of a pair draw the same random numbers.")
    require_correct: bool = option(False, "Only images that the final model classifies correctly.")
    allow_pickle: bool = option(False, "Allow checkpoints to run code. Only if you trust them.")
    out: Path = option(Path("runs/cose"), "Folder.", short="o")
    batch_size: int | None = option(None, "Inputs per pass; chosen automatically by default.", least=1)
    unit_images: int = option(8, "Images per unit, the most that an interruption loses.", least=1)
    device: str | None = option(None, DEVICE)
    threads: int | None = option(None, "Threads of torch; default: OMP_NUM_THREADS or automatic.", least=1)
    seed: int = option(0, "Repeats the study exactly.", least=0)
    image_options: Mapping[str, Any] = field(default_factory=dict)  # for the source of the images
    model_options: Mapping[str, Any] = field(default_factory=dict)  # for the network's builder
