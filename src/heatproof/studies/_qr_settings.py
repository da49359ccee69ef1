"""What a QR study is told, and what is refused before any work starts.

The defaults are the small configuration: a network of a few layers at 64 pixels, for minutes on a CPU. FULL
is the paper's size. The recipes are ours: the paper speaks of short schedules and names no rate, no number of
epochs and no batch size.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from heatproof.errors import InputError, StoreError, did_you_mean
from heatproof.explain.api import read_methods
from heatproof.images.backgrounds import find_photos
from heatproof.images.codes import versions_that_fit
from heatproof.images.symbols import find_symbol
from heatproof.store._files import write_whole
from heatproof.store.manifest import compare_configs
from heatproof.train.recipe import SCHEDULES

FLOORS = ("random", "edges")
LIGHT = ("gradcam", "gradcam++", "layercam", "xgradcam", "hirescam", "eigencam", "eigengradcam")
HEAVY = ("ms-gradcam++", "gradient", "smoothgrad", "integrated-gradients", "scorecam", "lime")
MAY_CHANGE = ("out", "seeds", "depth_study", "ablation", "figures")  # what is finished stays true
MAY_GROW = ("methods", "heavy")


@dataclass(frozen=True)
class QrSettings:
    """Everything that a QR study may be told."""

    out: Path
    model: str = "small"
    pretrained: bool = False  # begin with the library's weights
    symbol: str = "qr"
    photos: Path | None = None  # for half of the backgrounds
    size: int = 64
    width: int = 8  # channels of the small network's first stage
    train: int = 200  # codes, and as many negatives
    test: int = 100  # likewise
    proxy: int = 900  # pictures of the proxy task; 0: the backbone is taken as it is
    proxy_epochs: int = 10
    proxy_lr: float = 3e-3
    head_epochs: int = 10
    head_lr: float = 1e-2
    epochs: int = 8
    lr: float = 1e-3
    schedule: str = "cosine"
    train_batch: int = 32
    lam: float = 0.25
    alpha: float = 0.25
    methods: tuple[str, ...] = LIGHT
    heavy: tuple[str, ...] = ()  # methods that are scored on the subset alone
    subset: int = 24  # codes for insertion, deletion and heavy methods
    robust: int = 32  # codes that are distorted
    causal: int = 100  # codes whose parts are occluded
    depth_study: bool = True
    ablation: bool = True
    figures: bool = True
    layer: str | None = None
    batch_size: int = 50
    device: str | None = None
    threads: int | None = None
    amp: bool = False
    seed: int = 0
    seeds: int = 1

    @property
    def every_method(self) -> tuple[str, ...]:
        """The light ones with the floors, as they are scored on all codes."""
        return with_floors(self.methods)


FULL: dict[str, Any] = {
    "model": "torchvision:resnet50", "size": 224, "train": 600, "test": 300,
    "proxy": 2400, "proxy_epochs": 20, "proxy_lr": 1e-3, "head_lr": 1e-3,
    "epochs": 10, "lr": 1e-4, "schedule": "constant", "amp": True,
    "heavy": HEAVY, "subset": 32, "robust": 100, "causal": 200, "batch_size": 128,
}  # fmt: skip


def with_floors(methods: tuple[str, ...]) -> tuple[str, ...]:
    """The methods, then the floors that are not among them."""
    names = {request.entry.name for request in read_methods(methods)}
    return (*methods, *(floor for floor in FLOORS if floor not in names))


def check(settings: QrSettings) -> QrSettings:
    """The settings with what follows from them filled in; what cannot work is refused."""
    asked = (*settings.methods, *settings.heavy)
    different = {(r.entry.name, repr(sorted(r.options.items()))) for r in read_methods(asked)}
    if len(different) < len(asked):
        raise InputError("a method is named twice among --methods and --heavy; leave one out")
    symbol = find_symbol(settings.symbol)
    versions_that_fit(symbol, None, (settings.size, settings.size))
    find_photos(settings.photos)
    least = {
        "train": 8, "test": 4, "subset": 2, "robust": 2, "causal": 3, "seeds": 1, "proxy": 0, "epochs": 1,
        "head_epochs": 1, "proxy_epochs": 1, "train_batch": 2, "batch_size": 1, "width": 1, "seed": 0,
    }  # fmt: skip
    for name, lowest in least.items():
        if (value := getattr(settings, name)) < lowest:
            raise InputError(f"{name.replace('_', '-')} is at least {lowest}; got {value}")
    if settings.schedule not in SCHEDULES:
        raise InputError(
            f"unknown schedule {settings.schedule!r}; {did_you_mean(settings.schedule, SCHEDULES)}"
        )
    counts = {name: min(getattr(settings, name), settings.test) for name in ("subset", "robust", "causal")}
    device = settings.device or ("cuda" if torch.cuda.is_available() else "cpu")
    return replace(settings, device=device, **counts)


def remember(settings: QrSettings) -> None:
    """Write the settings to OUT, or refuse those that do not go with what was begun there."""
    path = settings.out / "settings.json"
    now = json.loads(json.dumps(asdict(settings), default=str))
    if path.exists():
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StoreError(f"cannot read {path} ({error}); restore it, or choose another folder") from error
        changes = [c for c in compare_configs(before, now, MAY_GROW, MAY_CHANGE) if not c.addition]
        if changes:
            said = "; ".join(change.sentence for change in changes)
            raise StoreError(
                f"{settings.out} was begun otherwise: {said}; undo the change or choose another folder"
            )
    text = json.dumps(now, indent=1) + "\n"
    write_whole({path: lambda temporary: temporary.write_text(text, encoding="utf-8")})
