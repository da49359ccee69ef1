"""Grad-CAM++ at several depths, averaged: coarse meaning and fine edges in one map."""

from __future__ import annotations

import torch
from torch import Tensor

from heatproof.explain.cams import gradcam_plus_plus_map
from heatproof.registry import Card, explainer
from heatproof.types import Trace, normalise, upsample


@explainer(
    "ms-gradcam++",
    needs=("scales",),
    cite="elangovan2026cscore",
    aliases=("multiscale-gradcam++", "msgradcampp"),
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
