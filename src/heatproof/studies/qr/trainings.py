"""The images of a QR study and the networks that are trained on them.

    OUT/data/train, OUT/data/test    codes and hard negatives with exact masks, as files
    FOLDER/training/NAME             one training each, which resumes where it was stopped
    FOLDER/weights/NAME.safetensors  its last weights; base is the backbone before the regimes

A network without weights of its own first learns a proxy task, so that ZS does not read random features: to
distinguish the kinds of negatives (checkerboard, clutter, barcode, ...), on images of another seed. No code
is shown to it. Then its head is exchanged, and every training starts from there, with the same head.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from heatproof.disk import write_whole
from heatproof.images.codes import MANIFEST, QRSet, make_qr, negatives_of, write_codes
from heatproof.images.symbols import find_symbol
from heatproof.models import Model, load_model
from heatproof.models.names import placed_spec
from heatproof.studies.common import need_one_class
from heatproof.studies.settings import QrSettings
from heatproof.train import DEPTHS, Data, TrainProgress, ablation_grid, fit, new_head, regime_recipe
from heatproof.train.loop import weights_file
from heatproof.train.networks import seeded, trained_parts
from heatproof.train.protocols import cam_layer
from heatproof.train.recipe import History, Phase, Recipe

SMALL = "small"
BASE = "base"
CLASSES = ("none", "code")
OWN_WEIGHTS = ("lite0", "efficientnet-lite0", "efficientnet_lite0")
NETWORK = '''"""The small network of this study."""

from heatproof.train import small_net


def build(num_classes=2):
    return small_net(num_classes, size={size}, width={width}, seed={seed})
'''

ProgressCallback = Callable[[str, TrainProgress], object]  # the training's name, and how far it is


class Trained(NamedTuple):
    """Results of every training, and the share of the parameters that each depth trains."""

    histories: dict[str, History]
    shares: dict[str, float]


def make_pictures(settings: QrSettings) -> tuple[QRSet, QRSet]:
    """Training and test images from the seed; written to OUT/data, each set whole or not at all."""
    sets = draw(settings, 0, settings.train), draw(settings, 1, settings.test)
    for name, made in zip(("train", "test"), sets, strict=True):
        folder = settings.out / "data" / name
        if not (folder / MANIFEST).exists():
            unfinished = folder.with_name(f"{name}.partial")
            shutil.rmtree(unfinished, ignore_errors=True)
            write_codes(made, unfinished)
            os.replace(unfinished, folder)
    return sets


def draw(settings: QrSettings, use: int, negatives: int) -> QRSet:
    """Images to train on (0), test (1), for the proxy task (2) and its validation (3): no two share any.

    The first two have as many codes as negatives, the others none.
    """
    seed, codes = 4 * settings.seed + use, negatives if use < 2 else 0
    return make_qr(codes, negatives, settings.size, seed, symbol=settings.symbol, photos=settings.photos)


def as_data(made: QRSet, labels: np.ndarray | None = None) -> Data:
    pictures = torch.from_numpy(made.pictures).permute(0, 3, 1, 2).contiguous()
    masks = {part: torch.from_numpy(mask) for part, mask in made.masks.items()}
    return Data(pictures, torch.from_numpy(made.labels if labels is None else labels), masks)


def uses_proxy(settings: QrSettings) -> bool:
    """Whether the backbone must learn a proxy task first."""
    own = settings.model.lower() in OWN_WEIGHTS or settings.model.startswith("hf:")
    return settings.proxy > 0 and not settings.pretrained and not own


def network_spec(settings: QrSettings, folder: Path, seed: int) -> str:
    """How a study file in this folder names the network; the small one gets a file of its own."""
    if settings.model != SMALL:
        return placed_spec(settings.model, Path.cwd())
    write_whole({folder / "network.py": NETWORK.format(size=settings.size, width=settings.width, seed=seed)})
    return "network.py:build"


def build(settings: QrSettings, folder: Path, seed: int, classes: int) -> Model:
    """The network before any training."""
    spec = network_spec(settings, folder, seed)
    place = str(folder / spec) if settings.model == SMALL else spec
    with seeded(seed):
        model = load_model(
            place, num_classes=classes, pretrained=settings.pretrained, device=settings.device,
            head=settings.head,
        )  # fmt: skip
    pictures = replace(model.preprocess, size=(settings.size, settings.size), resize=settings.size)
    return replace(model, name=settings.model, preprocess=pictures)


def recipes(settings: QrSettings) -> dict[str, Recipe]:
    """Every training of the study by the name of its weights: regimes, deeper ones, the ablation."""
    shared: dict[str, Any] = {
        "batch_size": settings.train_batch, "amp": settings.amp, "schedule": settings.schedule,
    }  # fmt: skip
    tuned = shared | {"epochs": settings.epochs, "lr": settings.lr}
    tuned |= {"layer": settings.layer, "surrogate": settings.surrogate}
    made = {
        "zs": regime_recipe("zs", epochs=settings.head_epochs, lr=settings.head_lr, **shared),
        "ft-struct": regime_recipe("ft-struct", **tuned),
        "ft-leakmin": regime_recipe("ft-leakmin", lam=settings.lam, alpha=settings.alpha, **tuned),
    }
    if settings.depth_study:
        made |= {depth_name(depth): regime_recipe("ft-struct", depth, **tuned) for depth in DEPTHS[2:]}
    if settings.ablation:
        for lam, alpha in ablation_grid():
            name = cell_name(settings, lam, alpha)
            made.setdefault(name, regime_recipe("ft-leakmin", lam=lam, alpha=alpha, **tuned))
    return made


def depth_name(depth: str) -> str:
    """The weights of a depth: two of the four are regimes.

    >>> [depth_name(depth) for depth in DEPTHS]
    ['zs', 'ft-struct', 'depth-l3-l4', 'depth-all']
    """
    return {"head": "zs", "L4": "ft-struct"}.get(depth, f"depth-{depth.lower()}")


def cell_name(settings: QrSettings, lam: float, alpha: float) -> str:
    """The weights of a cell of the ablation: lambda 0 is FT-Struct, and one cell is FT-LeakMin itself."""
    if lam == 0:
        return "ft-struct"
    return "ft-leakmin" if (lam, alpha) == (settings.lam, settings.alpha) else f"lambda{lam:g}-alpha{alpha:g}"


def total_epochs(settings: QrSettings) -> int:
    proxy = settings.proxy_epochs if uses_proxy(settings) else 0
    return settings.seeds * (proxy + sum(recipe.epochs for recipe in recipes(settings).values()))


def check_network(settings: QrSettings) -> None:
    """Raise an error before any work if a network cannot be trained as the study requires."""
    model = build(settings, settings.out, settings.seed, len(CLASSES))
    need_one_class(model, "a QR study")
    blank = model.preprocess.blank
    cam_layer(model, blank, settings.layer)
    for recipe in recipes(settings).values():
        for phase in recipe.phases:
            trained_parts(model, blank, phase.trainable)


def train_all(
    settings: QrSettings, folder: Path, seed: int, sets: tuple[QRSet, QRSet],
    training: ProgressCallback | None = None,
) -> Trained:  # fmt: skip
    """Run or resume all trainings of one seed; accuracies are those on the test images."""
    histories: dict[str, History] = {}

    def learn(name: str, train: Data, valid: Data, recipe: Recipe) -> None:
        """Run one training; its last weights are copied to the checkpoint name of the rows."""
        where, target = folder / "training" / name, folder / "weights" / f"{name}.safetensors"
        listen = None if training is None else partial(training, name)
        histories[name] = fit(model, train, valid, recipe, where, seed, [recipe.epochs], listen)
        source = weights_file(where, recipe.epochs)
        if not target.exists() or target.read_bytes() != source.read_bytes():
            write_whole({target: partial(shutil.copyfile, source)})

    if uses_proxy(settings):
        kinds = {kind: label for label, kind in enumerate(negatives_of(find_symbol(settings.symbol)))}
        model = build(settings, folder, seed, len(kinds))
        counts = settings.proxy, max(settings.proxy // 5, 2 * len(kinds))
        drawn = [draw(settings, use, count) for use, count in enumerate(counts, 2)]
        data, valid = (as_data(made, np.array([kinds[k] for k in made.kinds.tolist()])) for made in drawn)
        phase = Phase(settings.proxy_epochs, settings.proxy_lr, "all", name="proxy")
        learn(BASE, data, valid, Recipe((phase,), settings.train_batch, amp=settings.amp))
        model = new_head(model, len(CLASSES), seed=seed)
    else:
        model = build(settings, folder, seed, len(CLASSES))
    beginning = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    data, valid = map(as_data, sets)
    for name, recipe in recipes(settings).items():
        model.module.load_state_dict(beginning)
        learn(name, data, valid, recipe)
    shares = {}
    if settings.depth_study:
        image = model.preprocess.from_bytes(data.images[:1]).to(model.device)
        sizes = {name: p.numel() for name, p in model.module.named_parameters()}
        chosen = {depth: trained_parts(model, image, depth).parameters for depth in DEPTHS}
        shares = {d: sum(sizes[name] for name in of) / sum(sizes.values()) for d, of in chosen.items()}
    return Trained(histories, shares)
