"""Methods of grad-cam: its maps as it returns them, at the image's size and between 0 and 1.

It is told the layer that our CAMs look at, and how that layer's output is a picture. Options are the
arguments of the class, and aug_smooth and eigen_smooth of its call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from heatproof.errors import InputError, need
from heatproof.explain.providers import Offer
from heatproof.explain.providers.kit import calling, layer_of, options_of, taken
from heatproof.models.layers import layout_of
from heatproof.types import Trace

NOT_OURS = ("self", "model", "target_layers", "reshape_transform", "input_tensor", "targets")


def options(name: str) -> dict[str, Any]:
    kind = _kind(name)
    return options_of(kind.__init__, kind.__call__, without=NOT_OURS)


def maps(name: str, offer: Offer, trace: Trace, given: Mapping[str, Any]) -> Tensor:
    kind, method = _kind(name), f"grad-cam:{name}"
    classes = need("pytorch_grad_cam.utils.model_targets", "references").ClassifierOutputTarget
    with calling(method, trace) as (network, images):

        def picture(output: Tensor) -> Tensor:
            layout = layout_of(output, images, trace.model.module)
            return output if layout is None else layout.picture(output)

        at = [layer_of(method, trace)] if offer.layer else []
        cam = kind(network, at, reshape_transform=picture, **taken(kind.__init__, given))
        try:
            targets = [classes(target) for target in trace.targets.tolist()]
            found = cam(images, targets, **taken(kind.__call__, given))
        finally:
            cam.activations_and_grads.release()
    return torch.from_numpy(np.asarray(found, dtype=np.float32)).to(trace.images.device)


def _kind(name: str) -> Any:
    package = need("pytorch_grad_cam", "references")
    if not hasattr(package, name):
        raise InputError(f"the grad-cam that is installed has no {name}; update it: pip install -U grad-cam")
    return getattr(package, name)
