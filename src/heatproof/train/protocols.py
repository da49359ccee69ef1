"""How two papers train: C-Score's two phases, and CAMBench-QR's three regimes with the studies around them.

C-Score (elangovan2026cscore): first the head alone, then everything, gently.

    phase 1  backbone frozen, head trained     20 epochs  Adam 1e-4, cosine
    phase 2  all layers                        10 epochs  Adam 1e-5, label smoothing 0.1, gradient norm <= 1.0

on four fifths of the pictures, stratified (data.stratified_split), with weights kept at epochs 1, 5, .. 30.
The paper does not say which optimiser phase 2 has, nor whether its rate decays: here it is Adam at a constant
rate. It gives no batch size and no augmentation: 32 and none.

CAMBench-QR (chakraborty2025cambench): three ways to teach a network what a QR code is.

    zs          frozen backbone, trained linear head                     cross-entropy
    ft-struct   last stage and head                                      cross-entropy (eq. 1)
    ft-leakmin  the same parameters                                      cross-entropy + leakage (eq. 2)

The depth study (Table 5) is ft-struct at head / L4 / L3-L4 / all, which makes "head" the same as zs; the
ablation (Table 6) is ft-leakmin over lambda x alpha, in which lambda = 0 is ft-struct, bit for bit, whatever
alpha is. The paper speaks of short schedules and gives no number. Here: 5 epochs of Adam, 1e-3 for a head
alone and 1e-4 from the last stage on, constant, batches of 32; all are settings.

"Frozen" includes BatchNorm's statistics and dropout: what is not trained stays in evaluation mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

from heatproof.errors import InputError, did_you_mean
from heatproof.models.model import Model
from heatproof.train.data import Data
from heatproof.train.leakmin import LeakMin
from heatproof.train.loop import Place, TrainProgress, fit
from heatproof.train.parts import Depth
from heatproof.train.recipe import CHECKPOINTS, History, Phase, Recipe

TRANSFER, FINE_TUNING = "transfer", "fine-tuning"
REGIMES = ("zs", "ft-struct", "ft-leakmin")
GRID = (0.0, 0.25, 0.5)  # of lambda and of alpha
HEAD_LR, STAGE_LR = 1e-3, 1e-4


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
    gradients: bool = False,
    **settings: Any,
) -> History:
    """Train by the paper's protocol; settings as two_phase_recipe takes them.

    keep: epochs whose weights are written to `out`; by default the paper's, as far as there are so many.
    gradients: log the norm of each layer's gradients.
    """
    recipe = two_phase_recipe(**settings)
    if keep is None:
        keep = sorted({epoch for epoch in CHECKPOINTS if epoch <= recipe.epochs} | {recipe.epochs})
    return fit(model, train, valid, recipe, out, seed, keep, progress, gradients)


def regime_recipe(
    name: str,
    depth: Depth | None = None,
    lam: float = 0.25,
    alpha: float = 0.25,
    epochs: int = 5,
    lr: float | None = None,
    schedule: str = "constant",
    layer: str | None = None,
    batch_size: int = 32,
    flip: bool = False,
    amp: bool = False,
    **phase: Any,
) -> Recipe:
    """A regime as a recipe. layer: where LeakMin's Grad-CAM reads; phase: other settings of the Phase."""
    if name not in REGIMES:
        raise InputError(f"unknown regime {name!r}; {did_you_mean(name, REGIMES)}")
    if name == "zs" and depth not in (None, "head"):
        raise InputError(f"zs trains the head alone; for depth {depth!r} take ft-struct")
    depth = depth or ("head" if name == "zs" else "L4")
    leakage = LeakMin(lam, alpha, layer) if name == "ft-leakmin" else None
    # Not the regime's name: with lambda 0 the two are one and the same training.
    called = "cross-entropy" if leakage is None or lam == 0 else "leakage"
    rate = lr or (HEAD_LR if depth == "head" else STAGE_LR)
    penalty = leakage if lam > 0 else None
    only = Phase(epochs, rate, depth, called, schedule=schedule, penalty=penalty, **phase)
    return Recipe((only,), batch_size, flip, amp)


def regime(
    name: str, model: Model, train: Data, valid: Data, out: Place = None, seed: int = 0, **settings: Any
) -> History:
    """Train a network in place by one regime; settings as regime_recipe takes them (depth, lam, alpha, ...).

    keep: epochs whose weights are written to `out`; by default the last. progress: as `fit` takes it.
    """
    keep, progress = settings.pop("keep", None), settings.pop("progress", None)
    recipe = regime_recipe(name, **settings)
    return fit(model, train, valid, recipe, out, seed, [recipe.epochs] if keep is None else keep, progress)


def ablation_grid(values: Sequence[float] = GRID) -> Iterator[tuple[float, float]]:
    """(lambda, alpha) of Table 6, row by row: alpha down, lambda across."""
    return ((lam, alpha) for alpha, lam in product(values, values))
