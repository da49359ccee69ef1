"""Training protocols of two papers: C-Score's two phases, and CAMBench-QR's three regimes.

C-Score (elangovan2026cscore): first the head alone, then everything at a low rate.

    phase 1  backbone frozen, head trained     20 epochs  Adam 1e-4, cosine
    phase 2  all layers                        10 epochs  Adam 1e-5, label smoothing 0.1, gradient norm <= 1.0

on four fifths of the images, stratified (loop.stratified_split), with weights stored at epochs 1, 5, .. 30.
The paper gives neither the optimiser of phase 2 nor its schedule: here Adam at a constant rate. It gives no
batch size and no augmentation: 32 and none.

CAMBench-QR (chakraborty2025cambench): three ways to teach a network what a QR code is.

    zs          frozen backbone, trained linear head                     cross-entropy
    ft-struct   last stage and head                                      cross-entropy (eq. 1)
    ft-leakmin  the same parameters                                      cross-entropy + leakage (eq. 2)

The depth study (Table 5) is ft-struct at head / L4 / L3-L4 / all, which makes "head" the same as zs; the
ablation (Table 6) is ft-leakmin over lambda x alpha, in which lambda = 0 is ft-struct, bit for bit, whatever
alpha is. The paper gives no schedule. Here: 5 epochs of Adam, 1e-3 for a head alone and 1e-4 from the last
stage on, constant, batches of 32; all are settings.

Leakage (eq. 2) is a price on evidence outside the code:

    L = CE + lambda E[ 1[y = 1] ( <C^, 1 - M_B> - alpha <C^, M_B> ) ]

C^ is the positive class's map at the layer CAMs read, enlarged to the image and divided by its sum. The paper
uses Grad-CAM and names that as a limit; HiResCAM and LayerCAM are options (g_k = d z_1 / d A_k):

    gradcam    C = ReLU(sum_k w_k A_k),  w_k = mean over positions of g_k        C^ = C / sum C
    hirescam   C = ReLU(sum_k g_k A_k)
    layercam   C = ReLU(sum_k ReLU(g_k) A_k)

It stays in the graph: the gradient is taken with create_graph, from the logit back to the layer and no
further. E is the mean over the batch, in which images of other classes count as 0. Choices where the paper
leaves them open: a map without mass (every position clipped by the ReLU) has the term 0 and no gradient; C^
is not min-max normalised first, since ReLU has set its floor (BL, as measured, subtracts the minimum too);
BatchNorm behind the layer, in training mode, couples the images of a batch, so w_k is then the
gradient of the batch's summed logits. Cite: chakraborty2025cambench, selvaraju2017gradcam,
draelos2020hirescam, jiang2021layercam.

"Frozen" includes BatchNorm's statistics and dropout: what is not trained stays in evaluation mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from heatproof.errors import InputError, ModelError, did_you_mean
from heatproof.explain.cams import safe_ratio, weighted_sum
from heatproof.models.capture import capture
from heatproof.models.layers import layout_of
from heatproof.models.model import Model
from heatproof.models.running import frozen_eval
from heatproof.train.loop import Data, Place, ProgressCallback, fit
from heatproof.train.recipe import CHECKPOINTS, Depth, History, Phase, Recipe, TrainedBatch

TRANSFER, FINE_TUNING = "transfer", "fine-tuning"
REGIMES = ("zs", "ft-struct", "ft-leakmin")
SURROGATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # gradients and activations -> maps "p h w"
    "gradcam": lambda gradients, activations: weighted_sum(gradients.mean((2, 3)), activations),
    "hirescam": lambda gradients, activations: (gradients * activations).sum(1).relu(),
    "layercam": lambda gradients, activations: (gradients.relu() * activations).sum(1).relu(),
}
GRID = (0.0, 0.25, 0.5)  # of lambda and of alpha
HEAD_LR, STAGE_LR = 1e-3, 1e-4


def two_phase_recipe(
    head_epochs: int = 20, full_epochs: int = 10, head_lr: float = 1e-4, full_lr: float = 1e-5,
    head_schedule: str = "cosine", full_schedule: str = "constant", label_smoothing: float = 0.1,
    clip: float | None = 1.0, optimiser: str = "adam", weight_decay: float = 0.0, first_depth: str = "head",
    class_weights: tuple[float, ...] | str | None = None, **batches: Any,
) -> Recipe:  # fmt: skip
    """Recipe of the C-Score paper's two phases. batches: batch_size, flip, amp of the Recipe.

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
    model: Model, train: Data, valid: Data, out: Place = None, seed: int = 0,
    keep: Sequence[int] | None = None, progress: ProgressCallback | None = None, gradients: bool = False,
    **settings: Any,
) -> History:  # fmt: skip
    """Train by the C-Score paper's protocol; settings as for two_phase_recipe, other arguments as for fit.

    keep: by default the paper's epochs, and the last one.
    """
    recipe = two_phase_recipe(**settings)
    if keep is None:
        keep = sorted({epoch for epoch in CHECKPOINTS if epoch <= recipe.epochs} | {recipe.epochs})
    return fit(model, train, valid, recipe, out, seed, keep, progress, gradients)


def regime_recipe(
    name: str, depth: Depth | None = None, lam: float = 0.25, alpha: float = 0.25, epochs: int = 5,
    lr: float | None = None, schedule: str = "constant", layer: str | None = None, batch_size: int = 32,
    flip: bool = False, amp: bool = False, surrogate: str = "gradcam", **phase: Any,
) -> Recipe:  # fmt: skip
    """Recipe of a regime. layer, surrogate: of LeakMin's map; phase: other settings of the Phase."""
    if name not in REGIMES:
        raise InputError(f"unknown regime {name!r}; {did_you_mean(name, REGIMES)}")
    if name == "zs" and depth not in (None, "head"):
        raise InputError(f"zs trains the head alone; for depth {depth!r} take ft-struct")
    depth = depth or ("head" if name == "zs" else "L4")
    leakage = LeakMin(lam, alpha, layer, surrogate=surrogate) if name == "ft-leakmin" else None
    penalty = leakage if lam > 0 else None
    # Not the regime's name: with lambda 0 both are the same training.
    title = "cross-entropy" if penalty is None else "leakage"
    rate = lr or (HEAD_LR if depth == "head" else STAGE_LR)
    training = Phase(epochs, rate, depth, title, schedule=schedule, penalty=penalty, **phase)
    return Recipe((training,), batch_size, flip, amp)


def ablation_grid(values: Sequence[float] = GRID) -> Iterator[tuple[float, float]]:
    """(lambda, alpha) of Table 6, row by row: alpha down, lambda across."""
    return ((lam, alpha) for alpha, lam in product(values, values))


@dataclass(frozen=True)
class LeakMin:
    """Leakage penalty of CAMBench-QR: the second term of eq. 2, for a phase's `penalty`."""

    lam: float = 0.25
    alpha: float = 0.25
    layer: str | None = None  # None: the one CAMs read
    part: str = "box"  # the mask inside which evidence belongs
    positive: int = 1  # the class that has this part
    surrogate: str = "gradcam"  # the map that is penalised

    def __post_init__(self) -> None:
        if self.surrogate not in SURROGATES:
            hint = did_you_mean(self.surrogate, SURROGATES)
            raise InputError(f"unknown surrogate {self.surrogate!r} of the leakage penalty; {hint}")
        if not self.lam >= 0:
            raise InputError(f"lambda, the price of leakage, must be 0 or more; got {self.lam}")
        if not 0 <= self.alpha <= 1:
            raise InputError(f"alpha, the reward of evidence inside, must lie in [0, 1]; got {self.alpha}")

    def prepare(self, model: Model, image: Tensor, data: Data) -> tuple[str, ...]:
        if self.part not in data.masks:
            known = ", ".join(data.masks) or "none"
            raise InputError(f"leakage needs masks of {self.part!r} with the training data; it has: {known}")
        empty = int((~data.masks[self.part][data.labels == self.positive].flatten(1).any(1)).sum())
        if empty:
            what = f"an empty mask of {self.part!r}"
            raise InputError(f"{empty} training images of class {self.positive} have {what}")
        return (cam_layer(model, image, self.layer),)

    def __call__(self, step: TrainedBatch) -> Tensor:
        (activations,) = step.outputs.values()
        positive = step.labels == self.positive
        if not positive.any():
            return step.logits.new_zeros(())
        share = unit_mass(soft_cam(step, activations, positive, self.surrogate))
        mask = step.masks[self.part][positive]
        inside, outside = (share * mask).sum((1, 2)), (share * ~mask).sum((1, 2))
        return self.lam * (outside - self.alpha * inside).sum() / len(step.labels)


def soft_cam(step: TrainedBatch, activations: Tensor, positive: Tensor, surrogate: str = "gradcam") -> Tensor:
    """Map "p H W" of each chosen image's own class, at the image's size, with its graph."""
    layout = layout_of(activations, step.images, step.model.module)
    assert layout is not None  # checked by prepare()
    score = step.model.scores(step.logits, step.labels)[positive].sum()
    (gradient,) = torch.autograd.grad(score, activations, create_graph=True, allow_unused=True)
    if gradient is None:
        raise ModelError("the layer does not lead to the output; name one that does")
    cam = SURROGATES[surrogate](layout.picture(gradient)[positive], layout.picture(activations)[positive])
    # types.upsample would do, but makes float32 of a float64 network's maps.
    return F.interpolate(cam[:, None], step.images.shape[-2:], mode="bilinear", align_corners=False)[:, 0]


def unit_mass(maps: Tensor) -> Tensor:
    """Each map "h w" divided by its sum; one without mass stays 0."""
    return safe_ratio(maps, maps.sum((1, 2), keepdim=True))


def cam_layer(model: Model, image: Tensor, layer: str | None = None) -> str:
    """The layer that CAMs read; raises LayerError if its output is no feature map."""
    with frozen_eval(model.module):
        name = capture(model, image, needs=frozenset({"activations"}), layer=layer).layer
    assert name is not None  # since activations are needed
    return name
