"""C-Score's training protocol: first the head alone, then everything, gently.

    phase 1  backbone frozen, head trained     20 epochs  Adam 1e-4, cosine
    phase 2  all layers                        10 epochs  Adam 1e-5, label smoothing 0.1, gradient norm <= 1.0

on four fifths of the pictures, stratified (data.stratified_split), with weights kept at epochs 1, 5, .. 30.
Cite: elangovan2026cscore.

The paper does not say which optimiser phase 2 has, nor whether its rate decays: here it is Adam at a constant
rate. It gives no batch size and no augmentation: 32 and none. "Frozen" here includes the backbone's BatchNorm
statistics and dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from heatproof.models.model import Model
from heatproof.train.data import Data
from heatproof.train.loop import Place, TrainProgress, fit
from heatproof.train.recipe import History, Phase, Recipe

CHECKPOINTS = (1, 5, 10, 15, 20, 25, 30)
TRANSFER, FINE_TUNING = "transfer", "fine-tuning"


def two_phase_recipe(
    head_epochs: int = 20,
    full_epochs: int = 10,
    head_lr: float = 1e-4,
    full_lr: float = 1e-5,
    head_schedule: str = "cosine",
    full_schedule: str = "constant",
    label_smoothing: float = 0.1,
    clip: float | None = 1.0,
    optimiser: str = "adam",
    weight_decay: float = 0.0,
    first_depth: str = "head",
    class_weights: tuple[float, ...] | str | None = None,
    **batches: Any,
) -> Recipe:
    """The paper's two phases; every number may be set. batches: batch_size, flip, amp of the Recipe.

    first_depth: what phase 1 trains; "all" for a backbone that has no weights worth freezing.
    """
    shared: dict[str, Any] = {
        "optimiser": optimiser, "weight_decay": weight_decay, "class_weights": class_weights,
    }  # fmt: skip
    first = Phase(head_epochs, head_lr, first_depth, TRANSFER, schedule=head_schedule, **shared)
    gentle = {"label_smoothing": label_smoothing, "clip": clip, **shared}
    second = Phase(full_epochs, full_lr, "all", FINE_TUNING, schedule=full_schedule, **gentle)
    return Recipe((first, second), **batches)


def two_phase(
    model: Model,
    train: Data,
    valid: Data,
    out: Place = None,
    seed: int = 0,
    keep: Sequence[int] | None = None,
    progress: Callable[[TrainProgress], object] | None = None,
    **settings: Any,
) -> History:
    """Train by the paper's protocol; settings as two_phase_recipe takes them.

    keep: epochs whose weights are written to `out`; by default the paper's, as far as there are so many.
    """
    recipe = two_phase_recipe(**settings)
    if keep is None:
        keep = sorted({epoch for epoch in CHECKPOINTS if epoch <= recipe.epochs} | {recipe.epochs})
    return fit(model, train, valid, recipe, out, seed, keep, progress)
