"""One training: at every epoch the probabilities of the validation images and the C-Score of six CAMs.

Alarms, falls of AUC and tables are computed from stored results (pages.py), on any machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from heatproof.errors import ModelError
from heatproof.explain.api import explain
from heatproof.images.preprocess import Preprocess
from heatproof.images.source import draw
from heatproof.metrics.cscores import cscore_by_class
from heatproof.metrics.results import PerClass
from heatproof.models.model import Model
from heatproof.train.loop import Data, TrainProgress, fit, stratified_split
from heatproof.train.networks import seeded, small_net
from research.calibration.population import CifarResNet
from research.evidence.networks import NETWORKS
from research.jobs import Place
from research.replication.population import Training

METHODS = ("gradcam", "gradcam++", "layercam", "eigencam", "scorecam(channels=32)", "ms-gradcam++")
XRAYS = {"NORMAL": 430, "PNEUMONIA": 1170}  # images of each class, every k-th of the pooled files
HELD_OUT = 0.375
SIDES = {"small": 96, "squeezenet": 128, "lite0": 160, "resnet50": 224, "resnet20": 32, "resnet56": 32}
EXPLAINED = {"warning": 160, "protocol": 300, "cifar": 400}  # validation images with maps
CIFAR = {"train": 500, "test": 100}  # images of each class
FROZEN_STATISTICS = ("lite0", "resnet50")  # BatchNorm in evaluation mode: small batches of few images


def xray_files(data: Path) -> list[tuple[Path, int]]:
    """Files and labels; both folders of the dataset are pooled, as in the paper."""
    files = []
    for label, (name, count) in enumerate(XRAYS.items()):
        pooled = sorted(
            p for split in ("train", "test") for p in (data / "chestxray" / split / name).glob("*.jp*g")
        )
        files += [(pooled[i * len(pooled) // count], label) for i in range(min(count, len(pooled)))]
    return files


@lru_cache(maxsize=4)
def xrays(data: Path, side: int) -> Data:
    files = xray_files(data)
    images = [
        np.asarray(Image.open(path).convert("RGB").resize((side, side), Image.Resampling.BICUBIC))
        for path, _ in files
    ]
    labels = torch.tensor([label for _, label in files])
    return Data(torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous(), labels)


@lru_cache(maxsize=1)
def cifar(data: Path) -> tuple[Data, Data]:
    stored = np.load(data / "cifar10" / "cifar10.npz")
    parts = []
    for split, count in CIFAR.items():
        labels = stored[f"{split}_labels"].astype(np.int64)
        chosen = np.concatenate([np.flatnonzero(labels == number)[:count] for number in range(10)])
        images = torch.from_numpy(stored[f"{split}_images"][chosen]).permute(0, 3, 1, 2).contiguous()
        parts.append(Data(images, torch.from_numpy(labels[chosen])))
    return parts[0], parts[1]


def read_split(training: Training, data: Path) -> tuple[Data, Data]:
    """Training and validation images, the same for every seed."""
    if training.study == "cifar":
        return cifar(data)
    images = xrays(data, SIDES[training.network])
    train, held_out = stratified_split(images.labels, HELD_OUT)
    return images.take(train), images.take(held_out)


def make_network(training: Training, data: Path) -> Model:
    side, classes = SIDES[training.network], 10 if training.study == "cifar" else 2
    if training.network == "small":
        return small_net(classes, side, 24, training.seed)
    if training.study == "cifar":
        with seeded(training.seed):
            module = CifarResNet({"resnet20": 3, "resnet56": 9}[training.network])
        return Model(module.eval(), training.network, Preprocess((side, side), side))
    made = NETWORKS[training.network].make(classes, training.seed, data)
    return Model(made.module, training.network, _sized(made.preprocess, side))


def _sized(preprocess: Preprocess, side: int) -> Preprocess:
    return Preprocess((side, side), side, preprocess.mean, preprocess.std)


class FixedStatistics(nn.Module):
    """A network whose BatchNorm layers stay in evaluation mode while it trains."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, images: Tensor) -> Tensor:
        for part in self.module.modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                part.eval()
        output: Tensor = self.module(images)
        return output


def run(training: Training, place: Place) -> dict[str, Any]:
    """Train a network and measure it after every epoch."""
    start = time.perf_counter()
    train, valid = (part.near(torch.device(place.device)) for part in read_split(training, place.real_data))
    model = make_network(training, place.real_data)
    if training.network in FROZEN_STATISTICS and training.schedule != "statistics":
        model = Model(FixedStatistics(model.module), model.name, model.preprocess)
    model.module.to(place.device)
    explained = torch.tensor(draw(valid.labels.tolist(), EXPLAINED[training.study], 0))
    ready = model.preprocess.from_bytes(valid.images)
    epochs: list[dict[str, Any]] = []

    def after_epoch(progress: TrainProgress) -> None:
        if progress.result is None:
            return
        row = {k: v for k, v in asdict(progress.result).items() if k not in ("gradients", "seconds")}
        norms = progress.result.gradients.values()
        row["gradient"] = math.sqrt(sum(norm.mean**2 for norm in norms))
        row["highest_gradient"] = math.sqrt(sum(norm.highest**2 for norm in norms))
        epochs.append(row | _measured(model, ready, valid.labels, explained))

    problem = ""
    try:
        fit(model, train, valid, training.recipe, seed=training.seed, progress=after_epoch, gradients=True)
    except ModelError as error:  # a loss that is not finite is a result
        problem = str(error)
    return {
        "name": training.name, "training": asdict(training), "epochs": epochs, "problem": problem,
        "labels": valid.labels.tolist(), "explained": explained.tolist(),
        "seconds": round(time.perf_counter() - start, 1), "device": place.device,
    }  # fmt: skip


def _measured(model: Model, images: Tensor, labels: Tensor, explained: Tensor) -> dict[str, Any]:
    logits = torch.cat([model.logits(images[i : i + 200]) for i in range(0, len(images), 200)]).float()
    loss = float(F.cross_entropy(logits, labels.to(logits.device)))
    probs = logits.softmax(1).double().cpu()
    maps = explain(model, images[explained], METHODS, targets=labels[explained].cpu(), batch_size=100)
    scores = {
        method: cscore_by_class(own, labels[explained].cpu(), probs[explained])
        for method, own in maps.items()
    }
    return {
        "validation_loss": loss, "probabilities": [[round(p, 5) for p in row] for row in probs.tolist()],
        "cscores": {method: _as_json(score) for method, score in scores.items()},
    }  # fmt: skip


def _as_json(score: PerClass) -> dict[str, Any]:
    own = score.overall
    numbers = {"value": own.value, "n": own.n, "interval": list(own.interval), "degenerate": own.degenerate}
    return {**numbers, "classes": {str(c): _as_json(s) for c, s in score.classes.items()}}


def describe(result: Mapping[str, Any]) -> str:
    """AUC at all epochs, and the problem if there was one."""
    aucs = " ".join(f"{row['auc']:.2f}" for row in result["epochs"])
    return f"AUC {aucs} {result['problem']}"
