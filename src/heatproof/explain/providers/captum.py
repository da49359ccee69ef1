"""Methods of captum: attributions of pixels or of a layer, brought to one number per place.

Attributions of pixels are summed over channels: as absolute values, beside the plain sum as the signed map,
where they come from gradients; as they are where they are relevance or what is lost when something is hidden.
Those of a layer are summed over channels as they are.

Options are the arguments of the class and of its attribute(). Three may also be words:
    baselines="blur"      zero, black, blur or noise; a number stands for an image of that value
    feature_mask="slic"   superpixels, slic or quickshift, for methods that hide features
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from heatproof.errors import InputError, LayerError, need
from heatproof.explain.baselines import STARTS, baseline_images
from heatproof.explain.providers import Offer
from heatproof.explain.providers.kit import calling, layer_of, options_of, pixels, taken
from heatproof.explain.segments import segments_of
from heatproof.models.layers import layout_of
from heatproof.registry import REQUIRED
from heatproof.types import Signed, Trace

NOT_OURS = (
    "self", "model", "forward_func", "layer", "inputs", "target", "additional_forward_args", "device_ids",
    "return_convergence_delta", "return_input_shape", "show_progress", "custom_attribution_func",
    "grad_kwargs", "interpretable_model", "similarity_func", "perturb_func", "verbose",
)  # fmt: skip


def options(name: str) -> dict[str, Any]:
    kind = _kind(name)
    return options_of(kind.__init__, kind.attribute, without=NOT_OURS)


def maps(name: str, offer: Offer, trace: Trace, given: Mapping[str, Any]) -> Tensor | Signed:
    kind, method = _kind(name), f"captum:{name}"
    with calling(method, trace) as (network, images):
        at = (layer_of(method, trace),) if offer.layer else ()
        asked = {option: _read(option, value, name, trace, images) for option, value in given.items()}
        explainer = kind(network, *at, **taken(kind.__init__, asked))
        asked = taken(kind.attribute, asked) | taken(kind.attribute, {"target": trace.targets})
        found = explainer.attribute(images, **asked)
        found = found[0] if isinstance(found, tuple) else found
        if found.shape[-2:] != images.shape[-2:] or found.ndim != 4:
            layout = layout_of(found, images, trace.model.module)
            if layout is None:
                raise LayerError(
                    f"{method} gave {tuple(found.shape)} at {trace.layer!r}, which is no picture; "
                    "name another layer"
                )
            found = layout.picture(found)
    return pixels(offer, found)


def _kind(name: str) -> Any:
    attr = need("captum.attr", "references")
    if not hasattr(attr, name):
        raise InputError(f"the captum that is installed has no {name}; update it: pip install -U captum")
    return getattr(attr, name)


def _read(option: str, value: Any, name: str, trace: Trace, images: Tensor) -> Any:
    """A word as what it stands for; a number where captum wants images."""
    if option == "baselines" and isinstance(value, str):
        return baseline_images(trace.model, images.detach(), value, trace.seed, STARTS)
    if option == "baselines" and options(name)["baselines"] is REQUIRED and isinstance(value, int | float):
        return torch.full_like(images.detach(), value)
    if option == "feature_mask" and isinstance(value, str):
        return segments_of(trace.model, images.detach(), value, seed=trace.seed)[:, None]
    return value
