"""Settings of a QR study.

The defaults are the small configuration: a network of a few layers at 64 pixels, for minutes on a CPU. FULL
is the paper's size. The recipes are ours: the paper mentions short schedules but no rate, no number of
epochs and no batch size.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heatproof.studies import settings as shared
from heatproof.studies.settings import Settings, calls, option
from heatproof.train.recipe import SCHEDULES

FLOORS = ("random", "edges")
LIGHT = ("gradcam", "gradcam++", "layercam", "xgradcam", "hirescam", "eigencam", "eigengradcam")
MAIN = "eigengradcam"  # what the paper's Tables 5 and 6 and its Figure 4 show
HEAVY = ("ms-gradcam++", "gradient", "smoothgrad", "integrated-gradients", "scorecam", "lime")
# Settings that do not affect finished results.
MAY_CHANGE = ("out", "seeds", "depth_study", "ablation", "figures", "scenes", "edits", "curves", "beside")
SAME_CODES = ("symbol", "size", "test", "seed", "photos")  # settings that studies on one page share
MAY_GROW = ("methods", "heavy")


@dataclass(frozen=True, kw_only=True)
class QrSettings(Settings):
    """Settings of a QR study."""

    model: str = option("small", "small, lite0, torchvision:NAME, timm:NAME, FILE.py:FACTORY.", short="M")
    pretrained: bool = option(False, "Begin with the library's own weights; else a proxy task.")
    symbol: str = option("qr", "What is drawn: qr, datamatrix, aztec, barcode.")
    photos: Path | None = option(None, "A folder of photographs for backgrounds.")
    size: int = option(64, "Pixels along a side.")
    width: int = option(8, "Channels of the small network's first stage.", least=1)
    train: int = option(200, "Codes to train on, and as many negatives.", least=8)
    test: int = option(100, "Codes to test on, and as many negatives.", least=4)
    proxy: int = option(900, "Images of the proxy task; 0: use the backbone unchanged.", least=0)
    proxy_epochs: int = option(10, "Of the proxy task.", least=1)
    proxy_lr: float = option(3e-3, "Learning rate of the proxy task.")
    head_epochs: int = option(10, "Of ZS.", least=1)
    head_lr: float = option(1e-2, "Learning rate of ZS.")
    epochs: int = option(8, "Of every other training.", least=1)
    lr: float = option(1e-3, "Learning rate of every other training.")
    schedule: str = option("cosine", "Of the learning rate.", choices=SCHEDULES)
    train_batch: int = option(32, "Images per step of training.", least=2)
    lam: float = option(0.25, "FT-LeakMin's weight of leakage, lambda.")
    alpha: float = option(0.25, "FT-LeakMin's weight of mass inside the code.")
    surrogate: str = option(
        "gradcam", "The map that FT-LeakMin penalises.", choices=("gradcam", "hirescam", "layercam")
    )
    methods: tuple[str, ...] = option(
        LIGHT, 'Scored on every code: "gradcam,layercam".', short="m", read=calls, default_text="the CAMs"
    )
    heavy: tuple[str, ...] = option(
        (),
        'Scored on the subset only: "lime,rise(masks=500)"; all: all others.',
        read=calls,
        default_text="none",
    )
    subset: int = option(24, "Codes for insertion, deletion and --heavy.", least=2)
    curves: str = option(
        "subset", "Codes for insertion and deletion of --methods; all with --full.", choices=("subset", "all")
    )
    robust: int = option(32, "Codes that are distorted.", least=2)
    causal: int = option(100, "Codes whose parts are occluded.", least=3)
    scenes: int = option(24, "Images with two codes and a distractor.", least=0)
    edits: int = option(24, "Codes one finder of which is removed, moved and swapped.", least=0)
    depth_study: bool = option(True, "Table 5 and Figure 4.")
    ablation: bool = option(True, "Table 6.")
    figures: bool = option(True, "Draw the figures.")
    layer: str | None = option(None, shared.LAYER, short="l")
    head: str | None = option(None, shared.CLASS_HEAD)
    batch_size: int = option(50, "Codes per unit of a run.", least=1)
    device: str | None = option(None, shared.DEVICE)
    threads: int | None = option(None, shared.THREADS, least=1)
    amp: bool = option(False, "Train in bfloat16; on with --full.", both=True)
    seed: int = option(0, "Of all random numbers.", least=0)
    seeds: int = option(1, "Number of repetitions on the same data, for intervals over seeds.", least=1)
    out: Path = option(Path("runs/qr"), "Folder.", short="o")
    beside: tuple[Path, ...] = option((), "Folder of a QR study of another network, for the same page.")

    @property
    def every_method(self) -> tuple[str, ...]:
        """The light ones with the floors, as they are scored on all codes."""
        from heatproof.studies.common import with_floors  # imports torch: not for a list of options

        return with_floors(self.methods, FLOORS)

    @property
    def real(self) -> tuple[str, ...]:
        """The light methods that read the network."""
        from heatproof.explain.baselines import is_floor

        return tuple(method for method in self.methods if not is_floor(method))

    @property
    def listed(self) -> tuple[str, ...]:
        """As the tables list them: light, heavy, floors."""
        floors = (method for method in self.every_method if method not in self.real)
        return (*self.real, *self.heavy, *floors)

    @property
    def light(self) -> tuple[str, ...]:
        """Those that are scored on every code, floors last."""
        return tuple(method for method in self.listed if method not in self.heavy)

    @property
    def detailed(self) -> tuple[str, ...]:
        """Of the depth study and the ablation: the paper's method, and the one that the penalty is about."""
        main = MAIN if MAIN in self.real else self.real[0]
        return tuple(dict.fromkeys(method for method in (main, "gradcam") if method in self.real))


FULL: dict[str, Any] = {
    "model": "torchvision:resnet50", "size": 224, "train": 600, "test": 300,
    "proxy": 2400, "proxy_epochs": 20, "proxy_lr": 1e-3, "head_lr": 1e-3,
    "epochs": 10, "lr": 1e-4, "schedule": "constant", "amp": True,
    "heavy": HEAVY, "subset": 32, "curves": "all", "scenes": 100, "edits": 100, "robust": 100,
    "causal": 200, "batch_size": 128,
}  # fmt: skip
