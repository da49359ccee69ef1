"""What a C-Score study is told. Numbers of the training are the paper's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heatproof.errors import InputError
from heatproof.studies.settings import DEVICE, LAYER, LIMIT, THREADS, Settings, calls, option
from heatproof.train.recipe import CHECKPOINTS

METHODS = ("gradcam", "gradcam++", "layercam", "eigencam", "scorecam(channels=32)", "ms-gradcam++")


def _epochs(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--keep is a list of epochs such as 1,5,10; got {text!r}") from None


@dataclass(frozen=True, kw_only=True)
class CscoreSettings(Settings):
    """What a C-Score study is told."""

    images: tuple[Path, ...] = option(
        (), "Folder with a folder per class; may be repeated, then all are pooled.", short="i"
    )
    kind: str = option("folder", "How the pictures are listed.", choices=("folder", "csv"))
    model: str = option(
        "lite0", "lite0, torchvision:NAME, timm:NAME, keras:NAME, FILE.py:FACTORY, ...", short="M"
    )
    checkpoints: tuple[str, ...] = option(
        (), "Weights that exist, or a pattern; then nothing is trained. May be repeated.", short="c"
    )
    pretrained: bool = option(False, "Begin with the library's own weights.")
    methods: tuple[str, ...] = option(
        METHODS, "Comma-separated; the paper's six by default.", short="m", read=calls, shown=""
    )
    held_out: float = option(0.2, "Share that is not trained on.")
    head_epochs: int = option(20, "Of phase 1.", least=0)
    full_epochs: int = option(10, "Of phase 2.", least=0)
    head_lr: float = option(1e-4, "Learning rate of phase 1.")
    full_lr: float = option(1e-5, "Learning rate of phase 2.")
    label_smoothing: float = option(0.1, "In phase 2.")
    clip: float = option(1.0, "Gradient norm in phase 2.")
    train_batch: int = option(32, "Pictures per step of training.", least=1)
    first_phase: str = option(
        "head", "What phase 1 trains: all, where the backbone has no weights worth freezing.",
        choices=("head", "all"),
    )  # fmt: skip
    class_weights: bool = option(False, "Weigh classes by their inverse frequency.")
    keep: tuple[int, ...] = option(CHECKPOINTS, "Epochs that are scored.", read=_epochs)
    layer: str | None = option(None, LAYER, short="l")
    sweep: bool = option(True, "C-Score at every depth, too.")
    limit: int | None = option(None, LIMIT, least=1)
    out: Path = option(Path("runs/cscore"), "Folder.", short="o")
    batch_size: int = option(32, "Pictures per unit of the run.", least=1)
    device: str | None = option(None, DEVICE)
    threads: int | None = option(None, THREADS, least=1)
    amp: bool = option(False, "Train in bfloat16 where it is safe.")
    seed: int = option(0, "Repeats the study exactly.")
    options: Mapping[str, Any] = field(default_factory=dict)  # for the network's builder

    @property
    def last_epoch(self) -> int:
        return self.head_epochs + self.full_epochs
