"""Settings of a contrast study."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from heatproof.studies import settings as shared
from heatproof.studies.settings import PreprocessSettings, Settings, calls, numbers, option, words

SHARES = "strength is one share or several, such as 1,0.8,0.5,0.2"
METHODS = ("gradcam", "gradcam++", "layercam", "hirescam", "eigencam", "integrated-gradients")


@dataclass(frozen=True, kw_only=True)
class ContrastSettings(Settings):
    """Settings of a contrast study."""

    model: str = option(help="lite0, torchvision:NAME, timm:NAME, hf:FOLDER, FILE.py:FACTORY, ...", short="M")
    checkpoint: Path | None = option(None, "Weights: safetensors or torch.")
    images: Path = option(help="Folder with a folder of images for each class.")
    class_names: tuple[str, ...] = option(
        (), "Comma-separated, in the order of the model's classes; else its own.", read=words
    )
    limit: int | None = option(None, shared.LIMIT, least=1)
    token: str = option("tag", "What is planted: tag, tint, blur, texture, or an image file.")
    token_size: float | None = option(None, "Size of the token, as a share of the image's side.")
    positive: str | None = option(
        None, "The class that gets the token, by name or number; by default the largest."
    )
    strength: tuple[float, ...] = option(
        (1.0,),
        "Share of its images that get the token; several make a curve: 1,0.8,0.5,0.2.",
        read=partial(numbers, rule=SHARES),
    )
    methods: tuple[str, ...] = option(
        METHODS, 'Comma-separated, options in brackets: "gradcam,lime(samples=200)".', short="m", read=calls
    )
    epochs: int = option(40, "Maximum epochs of each training.", least=1)
    lr: float = option(3e-4, "Learning rate of the first epoch.")
    layer: str | None = option(None, shared.LAYER, short="l")
    head: str | None = option(None, shared.CLASS_HEAD)
    preprocess: PreprocessSettings = field(default_factory=PreprocessSettings)
    allow_pickle: bool = option(False, "Allow the checkpoint to run code. Only if you trust it.")
    device: str | None = option(None, shared.DEVICE)
    seed: int = option(0, "Of all random numbers.", least=0)
    out: Path = option(Path("runs/contrast"), "Folder.", short="o")
