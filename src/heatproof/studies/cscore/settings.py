"""Settings of a C-Score study. Numbers of the training are the paper's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heatproof.errors import InputError
from heatproof.studies.settings import CLASS_HEAD, DEVICE, LAYER, LIMIT, THREADS, Settings, calls, option
from heatproof.train.recipe import CHECKPOINTS

METHODS = ("gradcam", "gradcam++", "layercam", "eigencam", "scorecam(channels=32)", "ms-gradcam++")


def _tau(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text  # refused below, unless it is "adaptive"


def _epochs(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--keep is a list of epochs such as 1,5,10; got {text!r}") from None


@dataclass(frozen=True, kw_only=True)
class CscoreSettings(Settings):
    """Settings of a C-Score study."""

    images: tuple[Path, ...] = option(
        (), "Folder with a folder per class; may be repeated, then all are pooled.", short="i"
    )
    kind: str = option("folder", "How the images are listed.", choices=("folder", "csv"))
    model: str = option(
        "lite0", "lite0, torchvision:NAME, timm:NAME, keras:NAME, FILE.py:FACTORY, ...", short="M"
    )
    networks: tuple[str, ...] = option(
        (), "Several networks, each as --model takes it, one after the other and on one page."
    )
    beside: tuple[Path, ...] = option((), "A finished study, on the same page; may be repeated.")
    checkpoints: tuple[str, ...] = option(
        (), "Existing weights, or a pattern; skips the training. May be repeated.", short="c"
    )
    pretrained: bool = option(False, "Begin with the library's own weights.")
    methods: tuple[str, ...] = option(
        METHODS, "Comma-separated; the paper's six by default.", short="m", read=calls, default_text=""
    )
    held_out: float = option(0.2, "Share of images held out from training.")
    head_epochs: int = option(20, "Of phase 1.", least=0)
    full_epochs: int = option(10, "Of phase 2.", least=0)
    head_lr: float = option(1e-4, "Learning rate of phase 1.")
    full_lr: float = option(1e-5, "Learning rate of phase 2.")
    label_smoothing: float = option(0.1, "In phase 2.")
    clip: float = option(1.0, "Gradient norm in phase 2.")
    train_batch: int = option(32, "Images per step of training.", least=1)
    first_phase: str = option(
        "head", "What phase 1 trains; all: for a backbone without pretrained weights.",
        choices=("head", "all"),
    )  # fmt: skip
    class_weights: bool = option(False, "Weigh classes by their inverse frequency.")
    transforms: bool = option(False, "Train with COSE's transforms, chosen at random.")
    keep: tuple[int, ...] = option(CHECKPOINTS, "Epochs to score.", read=_epochs)
    tau: float | str = option(
        0.5, "Gold lists: least probability of an image; or adaptive.",
        read=_tau, default_text="0.5",
    )  # fmt: skip
    weights: str = option(
        "confidence", "Weight of an image: its probability, that calibrated on the other half, or 1.",
        choices=("confidence", "calibrated", "uniform"),
    )  # fmt: skip
    anchor: str | None = option(
        None, "The lists of one checkpoint for all of them: first, last, or its name, such as epoch20."
    )
    gradients: bool = option(False, "Log each layer's gradients, and test whether they predict alarms.")
    layer: str | None = option(None, LAYER, short="l")
    head: str | None = option(None, CLASS_HEAD)
    sweep: bool = option(True, "Also compute the C-Score of every CAM at every depth.")
    limit: int | None = option(None, LIMIT, least=1)
    out: Path = option(Path("runs/cscore"), "Folder.", short="o")
    batch_size: int = option(32, "Images per unit of the run.", least=1)
    device: str | None = option(None, DEVICE)
    threads: int | None = option(None, THREADS, least=1)
    amp: bool = option(False, "Train in bfloat16.")
    seed: int = option(0, "Repeats the study exactly.")
    options: Mapping[str, Any] = field(default_factory=dict)  # for the network's builder

    def __post_init__(self) -> None:
        from heatproof.metrics.gold import ListRule  # which needs torch; a list of options does not

        super().__post_init__()
        ListRule(self.tau, self.weights)  # type: ignore[arg-type]  # refuses what is neither
        for name in ("checkpoints", "layer", "options"):
            if len(self.networks) > 1 and getattr(self, name):
                raise InputError(
                    f"{name} belong to one network; make a study of each, then one page: "
                    "heatproof study cscore RUN RUN"
                )

    @property
    def last_epoch(self) -> int:
        return self.head_epochs + self.full_epochs
