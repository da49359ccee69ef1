"""CAMs of one layer: a weighted sum of its activations A with the gradients g of the class's logit.

All of them read the same activations and gradients, so together they cost one forward and one partial
backward pass. They differ only in how a channel, or a place in a channel, is weighted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from heatproof.registry import Card, explainer
from heatproof.types import Trace, normalise, spatial_dims, upsample

NEEDS = ("activations", "gradients")


@dataclass(frozen=True)
class Read:
    """What several CAMs read of a trace, formed once and only where it is asked for, like its `product`."""

    activation: Tensor
    gradient: Tensor

    @cached_property
    def rectified(self) -> Tensor:
        """ "b c h w": the positive part of the gradient."""
        return self.gradient.relu()

    @cached_property
    def total(self) -> Tensor:
        """ "b c": the sum of each channel's activations."""
        return self.activation.sum(spatial_dims(self.activation, 2))

    @staticmethod
    def of(trace: Trace) -> Read:
        # Of tensors, not of the trace: a circle would keep both, and the network's activations, until the
        # garbage collector comes by.
        read: Read = trace.__dict__.setdefault("read", Read(trace.activation, trace.gradient))
        return read


def weighted_sum(weights: Tensor, activations: Tensor) -> Tensor:
    """ReLU of sum_k w_k A_k: "b c" and "b c h w" -> "b h w"."""
    return torch.einsum("bc,bc...->b...", weights, activations).relu()


def safe_ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator, and 0 where the denominator is 0: no epsilon shifts the other values."""
    return numerator / denominator.masked_fill(denominator == 0, torch.inf)


@explainer("gradcam", needs=NEEDS, cite="selvaraju2017gradcam", volumes=True, trace_only=True)
def gradcam(trace: Trace) -> Tensor:
    """Channels weighted by their mean gradient.

    ReLU(sum_k w_k A_k), w_k = mean_ij g_kij.
    """
    return weighted_sum(trace.gradient.mean(spatial_dims(trace.gradient, 2)), trace.activation)


def gradcam_plus_plus_map(
    activations: Tensor, gradients: Tensor, rectified: Tensor | None = None, total: Tensor | None = None
) -> Tensor:
    """ "b c h w" twice -> "b h w". rectified, total: ReLU(g) and sum_ij A "b c", where they are there."""
    positive = gradients.relu() if rectified is None else rectified
    summed = activations.sum(spatial_dims(activations, 2)) if total is None else total
    # alpha * ReLU(g) with g^2 divided out: a third of the work, and small gradients do not underflow. Where g
    # is not positive the numerator is 0, so ReLU(g) may stand below too.
    below = (summed.view(*summed.shape, *[1] * (positive.ndim - 2)) * positive).add_(2)
    weights = (positive / below.masked_fill_(below == 0, torch.inf)).sum(spatial_dims(positive, 2))
    return weighted_sum(weights, activations)


@explainer(
    "gradcam++", needs=NEEDS, cite="chattopadhay2018gradcampp", aliases=("gradcamplusplus", "gradcampp"),
    volumes=True, trace_only=True,
)  # fmt: skip
def gradcam_plus_plus(trace: Trace) -> Tensor:
    """Channels weighted by positive gradients, each place by its share in the class (eq. 19).

    w_k = sum_ij alpha_kij ReLU(g_kij), alpha_kij = g_kij^2 / (2 g_kij^2 + (sum_ab A_kab) g_kij^3).
    alpha is 0 where its denominator is 0; no epsilon is added. The factor exp(S) of the paper is the same
    for every weight of an image and drops out when the map is normalised.
    """
    read = Read.of(trace)
    return gradcam_plus_plus_map(trace.activation, trace.gradient, read.rectified, read.total)


@explainer(
    "layercam", needs=NEEDS, cite="jiang2021layercam", card=Card(relu="on the gradient, before the product"),
    volumes=True, trace_only=True,
)  # fmt: skip
def layercam(trace: Trace) -> Tensor:
    """Every place weighted by its own positive gradient.

    sum_k ReLU(g_k) * A_k. The paper's outer ReLU acts when the map is normalised; activations that are
    never negative make it idle.
    """
    return (Read.of(trace).rectified * trace.activation).sum(1)


@explainer("xgradcam", needs=NEEDS, cite="fu2020xgradcam", volumes=True, trace_only=True)
def xgradcam(trace: Trace) -> Tensor:
    """Channels weighted by the share of the logit their activation explains.

    w_k = sum_ij g_kij A_kij / sum_ij A_kij, and 0 for a channel whose activations sum to 0.
    """
    share = safe_ratio(trace.product.sum(spatial_dims(trace.product, 2)), Read.of(trace).total)
    return weighted_sum(share, trace.activation)


@explainer("hirescam", needs=NEEDS, cite="draelos2020hirescam", volumes=True, trace_only=True)
def hirescam(trace: Trace) -> Tensor:
    """Every place weighted by its own gradient, sign included.

    ReLU(sum_k g_k * A_k).
    """
    return trace.product.sum(1).relu()


@explainer(
    "ms-gradcam++",
    needs=("scales",),
    trace_only=True,
    cite="elangovan2026cscore",
    aliases=("multiscale-gradcam++", "msgradcampp"),
    volumes=True,
    card=Card(
        resize="each layer to the image's size, before the mean",
        normalisation="min-max per layer, then per map",
    ),
)
def ms_gradcam_plus_plus(trace: Trace) -> Tensor:
    """Mean over three depths of Grad-CAM++ maps, each scaled to [0, 1].

    The layers are the ends of the last three stages (DenseNet201: conv3_block12, pool4, conv5_block32;
    InceptionV3: mixed2, mixed7, mixed10; ResNet50V2: stages 3, 4, 5, and their twins), or those named.
    """
    maps = [gradcam_plus_plus_map(trace.activations[n], trace.gradients[n]) for n in trace.scales]
    return torch.stack([upsample(normalise(m), trace.image_size) for m in maps]).mean(0)
