"""Settings of a C-Score study. Numbers of the training are the paper's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from heatproof.errors import InputError
from heatproof.studies import settings as shared
from heatproof.studies.settings import Settings, calls, numbers, option, pixels
from heatproof.train.recipe import CHECKPOINTS

METHODS = ("gradcam", "gradcam++", "layercam", "eigencam", "scorecam(channels=32)", "ms-gradcam++")
RAW = {"ms-gradcam++": "ms-gradcam++(scaled=false)"}  # eq. 7 of the paper


def _tau(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text  # refused below, unless it is "adaptive"


def _whole(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--keep and --seeds are lists of numbers such as 1,5,10; got {text!r}") from None


def _window(text: str) -> tuple[float, ...] | str:
    return text if text == "range" else numbers(text)


@dataclass(frozen=True, kw_only=True)
class CscoreSettings(Settings):
    """Settings of a C-Score study."""

    images: tuple[Path, ...] = option(
        (), "Folder with a folder per class; may be repeated, then all are pooled.", short="i"
    )
    kind: str = option(
        "folder", "How the images are listed; nifti and arrays may be volumes (CT, MRI), also in a CSV.",
        choices=("folder", "csv", "nifti", "arrays"),
    )  # fmt: skip
    axes: str | None = option(None, "Of --kind arrays: what the axes of each array are, such as dhw or cdhw.")
    size: tuple[int, ...] = option(
        (), "Of volumes: depth,height,width, if it is not the network's own.",
        read=pixels, default_text="",
    )  # fmt: skip
    window: tuple[float, ...] | str = option(
        (), "Of scans: centre,width that become 0 to 1, or range: each scan's own.",
        read=_window, default_text="",
    )  # fmt: skip
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
    paper: bool = option(
        False,
        "As printed: ms-gradcam++ averages raw maps (eq. 7). By default each layer's map is scaled to [0, 1] "
        "first, since layers differ in size and one of them would decide.",
    )  # fmt: skip
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
    keep: tuple[int, ...] = option(CHECKPOINTS, "Epochs to score.", read=_whole)
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
    layer: str | None = option(None, shared.LAYER, short="l")
    head: str | None = option(None, shared.CLASS_HEAD)
    sweep: bool = option(True, "Also compute the C-Score of every CAM at every depth.")
    limit: int | None = option(None, shared.LIMIT, least=1)
    out: Path = option(Path("runs/cscore"), "Folder.", short="o")
    batch_size: int = option(32, "Images per unit of the run.", least=1)
    device: str | None = option(None, shared.DEVICE)
    threads: int | None = option(None, shared.THREADS, least=1)
    amp: bool = option(False, "Train in bfloat16.")
    seed: int = option(0, "Repeats the study exactly.")
    seeds: tuple[int, ...] = option(
        (), "Several trainings on one page, with the same images held out, for tests over seeds: 0,1,2.",
        read=_whole, default_text="",
    )  # fmt: skip
    options: Mapping[str, Any] = field(default_factory=dict)  # for the network's builder

    def __post_init__(self) -> None:
        from heatproof.metrics.classifier import ListRule  # which needs torch; a list of options does not

        super().__post_init__()
        ListRule(self.tau, self.weights)  # type: ignore[arg-type]  # refuses what is neither
        if len(self.size) not in (0, 3):
            raise InputError(f"size is depth,height,width of volumes; got {','.join(map(str, self.size))}")
        if self.seeds and self.checkpoints:
            raise InputError(
                "seeds are of trainings, and existing checkpoints are not trained; leave one out"
            )
        if len(set(self.seeds)) < len(self.seeds):
            raise InputError(f"seeds must differ; got {','.join(map(str, self.seeds))}")
        for name in ("checkpoints", "layer", "options"):
            if len(self.networks) > 1 and getattr(self, name):
                raise InputError(
                    f"{name} belong to one network; make a study of each, then one page: "
                    "heatproof study cscore RUN RUN"
                )

    @property
    def last_epoch(self) -> int:
        return self.head_epochs + self.full_epochs

    @property
    def runs(self) -> tuple[tuple[str, int], ...]:
        """Networks and seeds to train."""
        none = self.beside and not (self.networks or self.seeds)
        networks = () if none else self.networks or (self.model,)
        return tuple((spec, seed) for spec in networks for seed in self.seeds or (self.seed,))

    @property
    def preprocess(self) -> dict[str, Any]:
        """Parts of the preprocessing that replace the network's own."""
        window = self.window if isinstance(self.window, str) else list(self.window)
        return {key: value for key, value in {"size": list(self.size), "window": window}.items() if value}

    @property
    def split_seed(self) -> int:
        """Decides which images are held out, the same for all seeds."""
        return (*self.seeds, self.seed)[0]

    @property
    def explained(self) -> tuple[str, ...]:
        """The methods, in the paper's form if that is chosen."""
        return tuple(RAW.get(method, method) for method in self.methods) if self.paper else self.methods
