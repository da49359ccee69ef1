"""One epoch loop for every recipe: seeded, resumable, on the device the model is on.

Each epoch draws its random numbers (order of the pictures, flips, dropout) from the seed and its own number,
so a training that was killed and started again ends with the same weights, bit for bit on a CPU. n pictures
make ceil(n / batch_size) batches of nearly equal size: a last batch of one picture would upset BatchNorm.

The network is trained in place. Its modes and requires_grad flags, and the caller's random state, come back.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from heatproof.errors import InputError, ModelError
from heatproof.images.transforms import vary
from heatproof.metrics.classifier import accuracy, auc
from heatproof.models.checkpoints import write_weights
from heatproof.models.model import Model
from heatproof.models.queue import Queue
from heatproof.models.running import frozen_eval, restore_flags
from heatproof.models.tap import tap
from heatproof.train import folder
from heatproof.train.data import Data
from heatproof.train.gradients import GradientLog
from heatproof.train.networks import seeded
from heatproof.train.parts import Parts, trained_parts
from heatproof.train.recipe import Epoch, History, Phase, Recipe, TrainedBatch

Place = str | PathLike[str] | None  # a training's folder; None: nothing is written


class TrainProgress(NamedTuple):
    """Where a training is: told after every batch, and with the epoch's result once it is validated."""

    epoch: int  # from 1 on
    epochs: int
    batch: int
    batches: int
    result: Epoch | None = None


def fit(
    model: Model,
    train: Data,
    valid: Data,
    recipe: Recipe,
    out: Place = None,
    seed: int = 0,
    keep: Sequence[int] = (),
    progress: Callable[[TrainProgress], object] | None = None,
    gradients: bool = False,
) -> History:
    """Train the network in place; what every epoch came to.

    out: folder for the weights of the epochs in `keep`, and for what is needed to go on after a stop. Where
        it holds the same training, that one is continued, or its result loaded if it is complete.
    gradients: log the norm of each layer's gradients, see gradients.py.
    """
    plans = _prepare(model, train, valid, recipe, keep)
    where = None if out is None else Path(out)
    fingerprint = {} if where is None else _fingerprint(model, train, recipe, seed)
    saved = None if where is None else folder.load(where, fingerprint)
    history = History() if saved is None else saved.history
    if saved is not None:
        write_weights(model.module, saved.weights, str(where))
    train, valid = train.near(model.device), valid.near(model.device)
    optimiser: torch.optim.Optimizer | None = None
    logged = closing(GradientLog(model.module)) if gradients else nullcontext()
    with restore_flags(model.module), logged as log:
        for epoch in range(len(history) + 1, recipe.epochs + 1):
            number, own = recipe.at(epoch)
            plan, phase = plans[number], recipe.phases[number]
            start = time.perf_counter()
            chosen = plan.parts.apply(model.module)
            if own == 0 or optimiser is None:
                optimiser = phase.make_optimiser(chosen)
                if own > 0 and saved is not None:
                    optimiser.load_state_dict(saved.optimiser)
            for group in optimiser.param_groups:
                group["lr"] = phase.rate(own)
            mark = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
            with seeded(int.from_bytes(mark[:7])):
                loss = _epoch(model, train, recipe, plan, optimiser, epoch, progress)
            if not math.isfinite(loss):
                raise ModelError(
                    f"the loss is not finite in epoch {epoch} ({phase.name}); lower its lr or set clip"
                )
            scores = validate(model, valid, recipe.amp)
            seconds = time.perf_counter() - start
            norms = {} if log is None else log.take()
            result = Epoch(epoch, phase.name, loss, *scores, phase.rate(own), round(seconds, 3), norms)
            history = History((*history.epochs, result))
            if where is not None:
                folder.save(where, model.module, optimiser, history, fingerprint, epoch in keep, recipe)
            if progress:
                batches = len(_sizes(len(train), recipe.batch_size))
                progress(TrainProgress(epoch, recipe.epochs, batches, batches, result))
    return history


class PhasePlan(NamedTuple):
    """What a phase means for this network and this data, settled before the first epoch."""

    phase: Phase
    parts: Parts
    layers: tuple[str, ...]  # whose outputs the penalty needs
    weights: Tensor | None  # "k", of the classes


def _prepare(model: Model, train: Data, valid: Data, recipe: Recipe, keep: Sequence[int]) -> list[PhasePlan]:
    """Refuse what cannot work before anything is trained."""
    wanted = (model.preprocess.channels, *train.images.shape[2:])
    for name, data in (("training", train), ("validation", valid)):
        if tuple(data.images.shape[1:]) != wanted:
            got = "x".join(map(str, data.images.shape[1:]))
            takes = "x".join(map(str, wanted))
            raise InputError(f"{name} pictures are {got}; {model.name} is trained on {takes}")
        if len(data.labels.unique()) < 2:
            raise InputError(
                f"all {len(data)} {name} pictures are of class {int(data.labels[0])}; at least two are needed"
            )
    if wrong := [epoch for epoch in keep if not 1 <= epoch <= recipe.epochs]:
        raise InputError(f"there is no epoch {wrong[0]} to keep; the recipe has epochs 1 to {recipe.epochs}")
    image = model.preprocess.from_bytes(train.images[:1])
    classes = max(2, model.logits(image).shape[1])
    model.head.need_one_class("training")
    for name, data in (("training", train), ("validation", valid)):
        if (highest := int(data.labels.max())) >= classes:
            raise InputError(
                f"a {name} picture has the label {highest}, but {model.name} has classes 0 to {classes - 1}; "
                "give it a new head"
            )
    plans = []
    for phase in recipe.phases:
        weights = phase.weights(train.labels, classes)
        layers = () if phase.penalty is None else phase.penalty.prepare(model, image, train)
        parts = trained_parts(model, image, phase.trainable)
        plans.append(PhasePlan(phase, parts, layers, None if weights is None else weights.to(model.device)))
    return plans


def _epoch(
    model: Model,
    data: Data,
    recipe: Recipe,
    plan: PhasePlan,
    optimiser: torch.optim.Optimizer,
    epoch: int,
    progress: Callable[[TrainProgress], object] | None,
) -> float:
    """One pass over the pictures; the mean loss per picture."""
    sizes = _sizes(len(data), recipe.batch_size)
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    # On the CPU, whatever the device: the order does not depend on it.
    order = torch.randperm(len(data)).split(sizes)
    mirrored = (torch.rand(len(data)) < 0.5).split(sizes)
    total = torch.zeros((), dtype=torch.float64, device=model.device)
    for number, (chosen, flip) in enumerate(zip(order, mirrored, strict=True), start=1):
        images, labels, masks = _batch(model, data, chosen, flip if recipe.flip else None, recipe.transforms)
        loss = _loss(model, plan, images, labels, masks, recipe.amp)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        if plan.phase.clip is not None:
            nn.utils.clip_grad_norm_(parameters, plan.phase.clip)
        optimiser.step()
        total += loss.detach().double() * len(chosen)
        if progress:
            progress(TrainProgress(epoch, recipe.epochs, number, len(sizes)))
    optimiser.zero_grad(set_to_none=True)
    return float(total) / len(data)


def _batch(
    model: Model, data: Data, chosen: Tensor, flip: Tensor | None, varied: bool
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Model-ready pictures, labels and masks on the model's device."""
    chosen = chosen.to(data.images.device)
    images, labels = (t[chosen].to(model.device, non_blocking=True) for t in (data.images, data.labels))
    masks = {part: mask[chosen].to(model.device, non_blocking=True) for part, mask in data.masks.items()}
    if flip is not None:
        flip = flip.to(model.device)
        images = torch.where(flip[:, None, None, None], images.flip(-1), images)
        masks = {part: torch.where(flip[:, None, None], m.flip(-1), m) for part, m in masks.items()}
    if varied:
        images, masks = vary(images, masks)
    return model.ready(model.preprocess.from_bytes(images)), labels, masks


def _loss(
    model: Model, plan: PhasePlan, images: Tensor, labels: Tensor, masks: dict[str, Tensor], amp: bool
) -> Tensor:
    # A penalty differentiates gradients, which fused attention cannot.
    plain_attention = sdpa_kernel(SDPBackend.MATH) if plan.layers else nullcontext()
    with tap(model.module, plan.layers) as taken, _autocast(model, amp), plain_attention:
        logits = model.forward(images)
    loss = plan.phase.cross_entropy(logits, labels, plan.weights)
    if plan.phase.penalty is not None:
        loss = loss + plan.phase.penalty(TrainedBatch(model, images, labels, masks, logits, taken.outputs))
    return loss


def validate(model: Model, data: Data, amp: bool = False) -> tuple[float, float]:
    """Accuracy and AUC of the network as it is, in evaluation mode."""
    size = (int(data.images.shape[-2]), int(data.images.shape[-1]))

    def pictures(start: int, stop: int) -> Tensor:
        return model.preprocess.from_bytes(data.images[start:stop].to(model.device))

    with frozen_eval(model.module), _autocast(model, amp):
        logits = Queue(model, size).predict(len(data), pictures, lambda logits, *_: logits).cpu()
    if not torch.isfinite(logits).all():
        raise ModelError(
            f"{model.name} gives logits that are not finite; lower the learning rate or set clip"
        )
    labels = data.labels.cpu()
    return accuracy(labels, logits, logits=True).value, auc(labels, logits, logits=True).value


def _sizes(count: int, batch_size: int) -> list[int]:
    """
    >>> _sizes(65, 32)
    [22, 22, 21]
    """
    batches = math.ceil(count / batch_size)
    return [count // batches + (i < count % batches) for i in range(batches)]


def _autocast(model: Model, amp: bool) -> torch.autocast:
    return torch.autocast(model.device.type, dtype=torch.bfloat16, enabled=amp)


def _fingerprint(model: Model, train: Data, recipe: Recipe, seed: int) -> dict[str, str]:
    """What must be the same for a training to be continued, under the words an error would use."""
    return {
        "a recipe": recipe.described(),
        "a seed": str(seed),
        "pictures": train.digest(),
        "starting weights": folder.digest(model.module),
        "preprocessing": repr(model.preprocess),
    }
