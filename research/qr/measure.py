"""One training on QR codes, and the maps of its network.

    zs, ft-struct, ft-leakmin       the regimes of the paper, ResNet-50 and EfficientNet-Lite0 (Tables 2 to 4)
    depth-l3-l4, depth-all          cross-entropy, more layers trained, ResNet-50 (Table 5)
    lambda0.5-alpha0, ...           the cells of Table 6 that are no regime, ResNet-50

Names and recipes are those of heatproof.studies.qr. Differences: a seed draws its own training codes (the
test codes are the same for all), and BatchNorm keeps the statistics of ImageNet. Values of every code are
stored; tables are computed from them on any machine (pages.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache, lru_cache
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from heatproof.explain.api import explain
from heatproof.images.codes import QRSet, make_qr
from heatproof.images.distort import DISTORTIONS, SEVERITIES, distort
from heatproof.metrics.kit import pixel_maps
from heatproof.metrics.on_parts import part_occlusion, structure, structure_score
from heatproof.models.model import Model
from heatproof.studies.settings import QR_FLOORS, QrSettings
from heatproof.train.loop import Data, fit, validate
from heatproof.train.networks import trained_parts
from heatproof.train.protocols import REGIMES, ablation_grid, regime_recipe
from heatproof.train.recipe import Recipe
from heatproof.types import Maps
from research.evidence.networks import NETWORKS
from research.jobs import Place

BACKBONES = ("resnet50", "lite0")
DEEP = "resnet50"  # of Tables 5 and 6
PAPER = ("layercam", "eigengradcam", "xgradcam")
METHODS = (*PAPER, "gradcam", "gradcam++", "eigencam")
SEEDS, MORE_SEEDS = range(3), range(3, 5)
CODE = 1  # the class that is explained
MASSES = ("bl", "fmr", "tmr")
UNIT = 1e5  # values are stored as whole numbers of 1 / UNIT


@dataclass(frozen=True)
class Size:
    """Numbers of codes; as many negatives to train on and to test."""

    train: int = 600
    test: int = 300
    robust: int = 100
    causal: int = 200
    head_epochs: int = 12
    epochs: int = 8

    def settings(self, network: str) -> QrSettings:
        """What the study of heatproof would be called with."""
        return QrSettings(
            model=network, size=NETWORKS[network].side, train=self.train, test=self.test, proxy=0,
            robust=self.robust, causal=self.causal, head_epochs=self.head_epochs, head_lr=3e-3,
            epochs=self.epochs, lr=1e-4, train_batch=32, methods=METHODS, amp=True,
        )  # fmt: skip


FULL, SMALL = Size(), Size(16, 10, 3, 10, 1, 1)


@dataclass(frozen=True)
class Training:
    """One training: a network, the name of its weights in a study, a seed."""

    network: str
    regime: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.network}-{self.regime}-{self.seed}"

    @property
    def main(self) -> bool:
        return self.regime in REGIMES


def recipes(settings: QrSettings) -> dict[str, Recipe]:
    """Every training of a study by its name; those of heatproof.studies.qr.trainings, which needs Jinja."""
    shared: dict[str, Any] = {
        "batch_size": settings.train_batch, "amp": settings.amp, "schedule": settings.schedule,
    }  # fmt: skip
    tuned = shared | {"epochs": settings.epochs, "lr": settings.lr}
    made = {
        "zs": regime_recipe("zs", epochs=settings.head_epochs, lr=settings.head_lr, **shared),
        "ft-struct": regime_recipe("ft-struct", **tuned),
        "ft-leakmin": regime_recipe("ft-leakmin", lam=settings.lam, alpha=settings.alpha, **tuned),
        "depth-l3-l4": regime_recipe("ft-struct", "L3-L4", **tuned),
        "depth-all": regime_recipe("ft-struct", "all", **tuned),
    }
    for lam, alpha in ablation_grid():
        if lam and (lam, alpha) != (settings.lam, settings.alpha):
            name = f"lambda{lam:g}-alpha{alpha:g}"
            made[name] = regime_recipe("ft-leakmin", lam=lam, alpha=alpha, **tuned)
    return made


def plan() -> list[Training]:
    """All trainings; seeds first, so that what is cut short has all networks and regimes."""
    names = [*recipes(FULL.settings(DEEP))]
    depths, cells = names[3:5], names[5:]
    main = [Training(n, r, s) for s, n, r in product(SEEDS, BACKBONES, REGIMES)]
    deep = [Training(DEEP, r, s) for own in (depths, cells) for s, r in product(SEEDS, own)]
    return [*main, *deep, *(Training(n, r, s) for s, n, r in product(MORE_SEEDS, BACKBONES, REGIMES))]


def inputs(training: Training, size: Size = FULL) -> dict[str, int]:
    """Passes of images through the network, with gradients and without, for an estimate of the time."""
    epochs = size.head_epochs if training.regime == "zs" else size.epochs
    probes = size.robust * (1 + len(DISTORTIONS) * (len(SEVERITIES) - 1)) + 3 * size.causal
    return {
        "training": 2 * size.train * epochs,
        "explained": size.test + (probes if training.main else 0),
        "validation": 2 * size.test + epochs * size.test // 2,
    }


@lru_cache(maxsize=4)
def codes(count: int, side: int, seed: int) -> QRSet:
    return make_qr(count, count, side, seed)


def test_codes(size: Size, side: int, count: int) -> QRSet:
    """The first codes of the test set, which begins with its codes."""
    return codes(size.test, side, 1).take(slice(count))


@cache
def distorted(size: Size, side: int, kind: str, level: float) -> tuple[np.ndarray, Mapping[str, np.ndarray]]:
    test = test_codes(size, side, size.robust)
    if not level:
        return test.pictures, test.masks
    images, masks = distort(test.pictures, kind, level, 0, test.masks)
    return images, masks or {}


def as_data(made: QRSet) -> Data:
    masks = {part: torch.from_numpy(mask) for part, mask in made.masks.items()}
    images = torch.from_numpy(made.pictures).permute(0, 3, 1, 2).contiguous()
    return Data(images, torch.from_numpy(made.labels), masks)


def ready(model: Model, images: np.ndarray) -> Tensor:
    pixels = torch.from_numpy(np.ascontiguousarray(images)).to(model.device)
    return model.preprocess.from_bytes(pixels.permute(0, 3, 1, 2))


def keep_statistics(module: nn.Module, _: Any) -> None:
    """A hook: BatchNorm layers stay in evaluation mode while the network trains."""
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm):
            part.eval()


def measure(training: Training, place: Place, size: Size = FULL) -> dict[str, Any]:
    """Train a network, and score its maps of every test code."""
    clock = [time.perf_counter()]
    settings = size.settings(training.network)
    # bfloat16 is slow on most CPUs.
    recipe = replace(recipes(settings)[training.regime], amp=place.device.startswith("cuda"))
    side = settings.size
    train, test = codes(size.train, side, 4 * training.seed), codes(size.test, side, 1)
    model = NETWORKS[training.network].make(2, training.seed, place.real_data)
    model.module.to(place.device)
    data, every = as_data(train), as_data(test)
    few = every.take(torch.arange(0, len(every), 4))
    clock.append(time.perf_counter())
    hook = model.module.register_forward_pre_hook(keep_statistics)
    history = fit(model, data, few, recipe, seed=training.seed)
    hook.remove()
    clock.append(time.perf_counter())
    accuracy, auc = validate(model, every)
    trained = trained_parts(model, model.preprocess.from_bytes(data.images[:1]), recipe.phases[0].trainable)
    sizes = {name: p.numel() for name, p in model.module.named_parameters()}
    columns: dict[str, dict[str, list[int | None]]] = {}
    for method, name, values in probes(model, training, size, side):
        columns.setdefault(method, {})[name] = stored(values)
    clock.append(time.perf_counter())
    device = torch.cuda.get_device_name() if str(model.device).startswith("cuda") else "CPU"
    return {
        "training": asdict(training), "accuracy": accuracy, "auc": auc,
        "losses": [round(epoch.loss, 5) for epoch in history.epochs],
        "parameters": sum(sizes[name] for name in trained.parameters) / sum(sizes.values()),
        "columns": columns, "seconds": [round(b - a, 1) for a, b in pairwise(clock)],
        "made": {"device": device, "date": f"{datetime.now(UTC):%Y-%m-%d}"},
    }  # fmt: skip


def probes(model: Model, training: Training, size: Size, side: int) -> Iterator[tuple[str, str, Tensor]]:
    """Method ("": the network), name of a column and a value of each code."""
    test = test_codes(size, side, size.test)
    yield "", "size", torch.from_numpy(test.masks["box"].mean((1, 2)))
    for method, maps in explained(model, test.pictures, training.seed).items():
        yield from ((method, name, values) for name, values in scores(maps, test.masks).items())
    if not training.main:
        return
    for kind, level in [("clean", 0.0), *product(DISTORTIONS, SEVERITIES[1:])]:
        images, masks = distorted(size, side, kind, level)
        for method, maps in explained(model, images, training.seed).items():
            own = masses(maps, masks)
            yield from ((method, f"{mass}({kind}={level:g})", values) for mass, values in own.items())
    few = test_codes(size, side, size.causal)
    masks = {part: few.masks[part] for part in ("finder", "timing")}
    drops = part_occlusion(masks, CODE, model=model, images=ready(model, few.pictures))
    yield from (("", name, values) for name, values in drops.items())


def explained(model: Model, images: np.ndarray, seed: int) -> dict[str, Maps]:
    return explain(model, ready(model, images), [*METHODS, *QR_FLOORS], CODE, seed=seed)


def masses(maps: Maps, masks: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """BL, FMR and TMR as of `structure`, without its distances and coverages, which take the CPU longer."""
    heat = pixel_maps(maps).double()
    total = heat.sum((1, 2))
    total = torch.where(total > 0, total, torch.nan)
    areas = dict(zip(MASSES, (~masks["box"], masks["finder"], masks["timing"]), strict=True))
    return {
        name: (heat * torch.from_numpy(area).to(heat.device)).sum((1, 2)) / total
        for name, area in areas.items()
    }


def scores(maps: Maps, masks: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """Every score of the paper's section 3.3, and whether a map is empty."""
    own = dict(structure(maps, masks["finder"], masks["timing"], masks["box"]))
    own["structure_score"] = own.pop("score")
    own["mass_score"] = structure_score(own["fmr"], own["tmr"], own["bl"], own["dts"])
    return own | {"empty": own["bl"].isnan().double()}


def stored(values: Tensor) -> list[int | None]:
    return [None if math.isnan(v) else round(v * UNIT) for v in values.double().tolist()]


def restored(values: Sequence[int | None]) -> np.ndarray:
    return np.array([math.nan if v is None else v / UNIT for v in values])


def describe(result: Mapping[str, Any]) -> str:
    """The accuracy and the leakage of two methods, for the line of a training."""
    leaks = {m: np.nanmean(restored(result["columns"][m]["bl"])) for m in ("eigengradcam", "gradcam")}
    words = ", ".join(f"BL {m} {leak:.3f}" for m, leak in leaks.items())
    return f"accuracy {result['accuracy']:.3f}, {words}; {result['seconds']} s"
