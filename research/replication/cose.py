"""COSE and C-Scores of trainings with COSE's transforms, measured at ten checkpoints.

A training stores the weights of its checkpoints in memory. Afterwards every test image of a sample is
explained by the final network, by the untrained one and by each earlier checkpoint, and its transformed
versions by the final network. The result has all SSIMs, so that every table follows from it; the trainings of
CIFAR-10 with residual networks also have C-Scores of each class at every checkpoint.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heatproof.errors import ModelError
from heatproof.explain.api import explain
from heatproof.images.source import draw as sample
from heatproof.images.transforms import draw
from heatproof.metrics.classifier import accuracy, auc
from heatproof.metrics.cscores import cscore_by_class
from heatproof.metrics.stability import checkpoint_pairs
from heatproof.models.model import Model, all_logits
from heatproof.studies.cose.protocol import input_pairs
from heatproof.train.loop import Data, TrainProgress, fit
from research.jobs import Place
from research.replication import train as population
from research.replication.population import Training
from research.replication.train import METHODS as CAMS
from research.replication.train import as_json, make_network, read_split

STUDIES = ("cifar", "cose")
# The order of the paper's Table 1; fewer samples and steps than usual (50 to 1,000).
PAPER = {
    "BlurIG": "blur-ig(steps=10)",
    "GradCAM": "gradcam",
    "GradCAM++": "gradcam++",
    "GuidedIG": "guided-ig(steps=10)",
    "IG": "ig(steps=10)",
    "LIME": "lime(samples=100,segment_count=50)",
    "SmoothGrad": "smoothgrad(samples=10)",
}
OTHERS, CONTROLS = ("gradient", "layercam"), ("random", "edges", "centre")
METHODS = (*PAPER.values(), *OTHERS, *CONTROLS)
IMAGES, DRAWS = 300, 1  # test images, and magnitudes of each signed transform
CSCORE_IMAGES = 400
CHECKPOINTS = {"cifar": (1, 2, 4, 7, 11, 16, 22, 28, 34, 40), "cose": (1, 2, 3, 4, 6, 8, 11, 14, 17, 20)}
BATCH = {"cifar": 600, "cose": 150}
PASSES = {"ig": 20, "blur": 20, "guided": 20, "smoothgrad": 20, "lime": 100, "others": 4}  # per input


def inputs() -> int:
    """Forward and backward passes for the COSE of one training."""
    variants = 7 * DRAWS + 6
    return IMAGES * (1 + variants + len(CHECKPOINTS["cifar"])) * sum(PASSES.values())


def measure(training: Training, place: Place) -> dict[str, Any]:
    """The result of any training of the plan."""
    return run(training, place) if training.study in STUDIES else population.run(training, place)


def run(training: Training, place: Place) -> dict[str, Any]:
    """Train a network, then measure it at its checkpoints."""
    start = time.perf_counter()
    train, test = (part.near(torch.device(place.device)) for part in read_split(training, place.real_data))
    model = make_network(training, place.real_data)
    model.module.to(place.device)
    chosen = torch.tensor(sample(test.labels.tolist(), CSCORE_IMAGES, 0))
    ready = model.preprocess.from_bytes(test.images)
    with_cscores = training.study == "cifar" and training.network != "vit"
    wanted = [e for e in CHECKPOINTS[training.study] if e <= training.recipe.epochs]
    weights, epochs = {0: _copied(model)}, [_classified(model, ready, test.labels, 0)]

    def after_epoch(progress: TrainProgress) -> None:
        if progress.result is None or progress.epoch not in wanted:
            return
        weights[progress.epoch] = _copied(model)
        row = _classified(model, ready, test.labels, progress.epoch)
        if with_cscores:
            row["cscores"] = _cscores(model, ready[chosen], test.labels[chosen].cpu())
        epochs.append(row)

    problem, measured = "", {}
    try:
        fit(model, train, test, training.recipe, seed=training.seed, progress=after_epoch)
    except ModelError as error:  # a loss that is not finite is a result
        problem = str(error)
    trained = time.perf_counter() - start
    if not problem:
        measured = _cose(training, model, test, weights)
    return {
        "name": training.name, "training": asdict(training), "epochs": epochs, "problem": problem,
        "cose": measured, "train_seconds": round(trained, 1),
        "seconds": round(time.perf_counter() - start, 1), "device": place.device,
    }  # fmt: skip


def _copied(model: Model) -> dict[str, Tensor]:
    return {name: values.detach().clone() for name, values in model.module.state_dict().items()}


def _classified(model: Model, images: Tensor, labels: Tensor, epoch: int) -> dict[str, Any]:
    """Accuracy and AUC of the test images, and the share of each class that is classified right."""
    logits = all_logits(model, images).float().cpu()
    truth, right = labels.cpu(), logits.argmax(1) == labels.cpu()
    recalls = [float(right[truth == c].float().mean()) for c in range(logits.shape[1])]
    return {
        "epoch": epoch, "accuracy": accuracy(truth, logits, logits=True).value,
        "auc": auc(truth, logits, logits=True).value, "recalls": [round(r, 5) for r in recalls],
    }  # fmt: skip


def _cscores(model: Model, images: Tensor, labels: Tensor) -> dict[str, Any]:
    probs = model.probabilities(all_logits(model, images)).double().cpu()
    maps = explain(model, images, CAMS, targets=labels, batch_size=len(images))
    return {method: as_json(cscore_by_class(own, labels, probs)) for method, own in maps.items()}


def _cose(training: Training, model: Model, test: Data, weights: dict[int, dict[str, Tensor]]) -> Any:
    """SSIMs of all pairs; NaN is written as null."""
    chosen = torch.tensor(sample(test.labels.tolist(), IMAGES, 0)).to(test.images.device)
    images, ids = test.images[chosen], [str(i) for i in chosen.tolist()]
    ready, batch = model.preprocess.from_bytes(images), BATCH[training.study]
    final = explain(model, ready, METHODS, seed=0, ids=ids, batch_size=batch)
    # The variants of an image and earlier checkpoints draw other random numbers than the image does.
    pairs = input_pairs(model, images, final, draw(0, ids, DRAWS), seed=0, batch_size=batch)
    last, checkpoints = max(weights), []
    for epoch, own in weights.items():
        if epoch == last:
            continue
        model.module.load_state_dict(own)
        maps = explain(model, ready, METHODS, seed=1, ids=ids, batch_size=batch)
        compared = {method: checkpoint_pairs(maps[method], final[method]) for method in METHODS}
        same = compared[METHODS[0]].same
        ssims = {method: _listed(own.ssim.cpu().numpy()) for method, own in compared.items()}
        checkpoints.append({"epoch": epoch, "same": same.int().tolist(), "ssim": ssims})
    model.module.load_state_dict(weights[last])
    return {
        "ids": ids, "draws": DRAWS, "same": pairs.same.astype(int).tolist(),
        "ssim": {method: _listed(values) for method, values in pairs.ssim.items()},
        "blank": {method: int(maps.degenerate.sum()) for method, maps in final.items()},
        "checkpoints": checkpoints,
    }  # fmt: skip


def _listed(values: np.ndarray) -> Any:
    """Nested lists with four digits, None for NaN."""
    if values.ndim == 1:
        return [None if math.isnan(v) else round(v, 4) for v in values.tolist()]
    return [_listed(row) for row in values]
