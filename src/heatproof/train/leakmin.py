"""FT-LeakMin: cross-entropy plus a price on evidence outside the code (CAMBench-QR, eq. 2).

    L = CE + lambda E[ 1[y = 1] ( <C^, 1 - M_B> - alpha <C^, M_B> ) ]

C^ is the positive class's Grad-CAM at the layer CAMs read, enlarged to the picture and divided by its sum:

    C = ReLU(sum_k w_k A_k),  w_k = mean over places of d z_1 / d A_k,    C^ = C / sum C

It stays in the graph: the gradient is taken with create_graph, from the logit back to the layer and no
further, so the second derivative only touches what lies behind the layer. E is the mean over the batch, in
which pictures of other classes count as 0. Cite: chakraborty2025cambench, selvaraju2017gradcam.

Where the paper leaves room:
- A map without mass (every place clipped by the ReLU) has the term 0, and no gradient.
- C^ is not min-max normalised first: ReLU has set its floor. BL, as measured, subtracts the minimum too.
- BatchNorm behind the layer (DenseNet's last one), where it is in training mode, lets the pictures of a batch
  see each other, so w_k is then the gradient of the batch's summed logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from heatproof.errors import InputError, LayerError, ModelError
from heatproof.explain.cams import safe_ratio, weighted_sum
from heatproof.models.default_layers import default_layer
from heatproof.models.layers import find_module, layout_of, picture_layers, searched_scales
from heatproof.models.model import Model
from heatproof.train.data import Data
from heatproof.train.recipe import TrainedBatch


@dataclass(frozen=True)
class LeakMin:
    """The second term of eq. 2, for a phase's `penalty`."""

    lam: float = 0.25
    alpha: float = 0.25
    layer: str | None = None  # None: the one CAMs read
    part: str = "box"  # the mask inside which evidence belongs
    positive: int = 1  # the class that has this part

    def __post_init__(self) -> None:
        if not self.lam >= 0:
            raise InputError(f"lambda, the price of leakage, must be 0 or more; got {self.lam}")
        if not 0 <= self.alpha <= 1:
            raise InputError(f"alpha, the reward of evidence inside, must lie in [0, 1]; got {self.alpha}")

    def prepare(self, model: Model, image: Tensor, data: Data) -> tuple[str, ...]:
        if self.part not in data.masks:
            known = ", ".join(data.masks) or "none"
            raise InputError(f"leakage needs masks of {self.part!r} with the training data; it has: {known}")
        positives = data.labels == self.positive
        empty = int((~data.masks[self.part][positives].flatten(1).any(1)).sum())
        if empty:
            raise InputError(
                f"{empty} training pictures of class {self.positive} have an empty mask of {self.part!r}"
            )
        return (cam_layer(model, image, self.layer),)

    def __call__(self, step: TrainedBatch) -> Tensor:
        (activations,) = step.outputs.values()
        positive = step.labels == self.positive
        if not positive.any():
            return step.logits.new_zeros(())
        share = unit_mass(soft_gradcam(step, activations, positive))
        mask = step.masks[self.part][positive]
        inside, outside = (share * mask).sum((1, 2)), (share * ~mask).sum((1, 2))
        return self.lam * (outside - self.alpha * inside).sum() / len(step.labels)


def soft_gradcam(step: TrainedBatch, activations: Tensor, positive: Tensor) -> Tensor:
    """ "p H W" Grad-CAM of each chosen picture's own class, at the picture's size, with its graph."""
    layout = layout_of(activations, step.images, step.model.module)
    assert layout is not None  # prepare() has seen it
    score = step.model.scores(step.logits, step.labels)[positive].sum()
    (gradient,) = torch.autograd.grad(score, activations, create_graph=True, allow_unused=True)
    if gradient is None:
        raise ModelError("the layer does not lead to the output; name one that does")
    weights = layout.picture(gradient)[positive].mean((2, 3))
    cam = weighted_sum(weights, layout.picture(activations)[positive])
    # types.upsample would do, but makes float32 of a float64 network's maps.
    return F.interpolate(cam[:, None], step.images.shape[-2:], mode="bilinear", align_corners=False)[:, 0]


def unit_mass(maps: Tensor) -> Tensor:
    """Each map "h w" divided by its sum; one without mass stays 0.

    >>> unit_mass(torch.tensor([[[1.0, 3.0]], [[0.0, 0.0]]])).tolist()
    [[[0.25, 0.75]], [[0.0, 0.0]]]
    """
    return safe_ratio(maps, maps.sum((1, 2), keepdim=True))


def cam_layer(model: Model, image: Tensor, layer: str | None = None) -> str:
    """The layer that CAMs read, by its full name, after a look whether it is a picture."""
    pictures = [name for name, _, _ in picture_layers(model, image)]
    if layer is not None:
        part = find_module(model.module, layer)
        full: str = next(name for name, other in model.module.named_modules() if other is part)
        if full not in pictures:
            some = ", ".join(pictures[-5:]) or "none"
            raise LayerError(f"the output of {layer!r} is not a picture; layers that would do: {some}")
        return full
    guess = default_layer(model, image)
    return guess if guess and guess.partition("+")[0] in pictures else searched_scales(model, image)[-1]
