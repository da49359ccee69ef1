"""Methods of zennit: relevance by a composite, or an attributor such as SmoothGrad, from a one-hot output.

Relevance is summed over channels as it is; what gradients give (attributors, GuidedBackprop, DeconvNet,
BetaSmooth) as absolute values, beside the plain sum as the signed map.

Options are the arguments of the class. canonizers is a name of zennit's own, such as "ResNetCanonizer" or
"SequentialMergeBatchNorm". EpsilonGammaBox's low and high are numbers, or what black and white become for the
network.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from heatproof.errors import InputError, did_you_mean, need
from heatproof.explain.providers import Offer
from heatproof.explain.providers.kit import calling, options_of, pixels
from heatproof.registry import REQUIRED
from heatproof.types import Signed, Trace

NOT_OURS = (
    "self", "model", "composite", "attr_output", "create_graph", "retain_graph", "layer_map", "first_map",
    "zero_params", "baseline_fn",
)  # fmt: skip
BOX = {"low": 0.0, "high": 1.0}  # of a picture before it is normalised


def options(name: str) -> dict[str, Any]:
    found = options_of(_kind(name).__init__, without=NOT_OURS)
    return {option: None if usual is REQUIRED else usual for option, usual in found.items()}


def maps(name: str, offer: Offer, trace: Trace, given: Mapping[str, Any]) -> Tensor | Signed:
    kind, attribution = _kind(name), need("zennit.attribution", "references")
    with calling(f"zennit:{name}", trace) as (network, images):
        asked = {**given}
        if "low" in options(name):
            asked |= {limit: _limit(given.get(limit), limit, trace, images) for limit in BOX}
        if given.get("canonizers"):
            asked["canonizers"] = [_canonizer(given["canonizers"])]
        if issubclass(kind, attribution.Attributor):
            attributor = kind(network, **asked)
        else:
            attributor = attribution.Gradient(network, kind(**asked))

        def one_hot(output: Tensor) -> Tensor:
            return torch.eye(output.shape[1], device=output.device, dtype=output.dtype)[trace.targets]

        _, found = attributor(images, one_hot)
    return pixels(offer, found)


def _kind(name: str) -> Any:
    for module in ("composites", "attribution"):
        if hasattr(found := need(f"zennit.{module}", "references"), name):
            return getattr(found, name)
    raise InputError(f"the zennit that is installed has no {name}; update it: pip install -U zennit")


def _limit(given: Any, limit: str, trace: Trace, images: Tensor) -> Tensor:
    if given is not None:
        return torch.full_like(images.detach(), given)
    ready = trace.model.preprocess
    if ready.channels != images.shape[1]:
        raise InputError(f"zennit:EpsilonGammaBox needs {limit}, the {limit}est value a pixel can have")
    return ready.normalise(torch.full_like(images.detach(), BOX[limit]))


def _canonizer(name: str) -> Any:
    modules = [need(f"zennit.{module}", "references") for module in ("torchvision", "canonizers")]
    known = [one for module in modules for one in vars(module) if one.endswith(("Canonizer", "BatchNorm"))]
    if name not in known:
        raise InputError(f"zennit has no canonizer {name!r}; {did_you_mean(name, known)}")
    return next(getattr(module, name) for module in modules if hasattr(module, name))()
