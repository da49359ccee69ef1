"""Methods that are not ours, by a prefix: of captum, grad-cam and zennit, a user's function, stored maps.

    captum:IntegratedGradients(n_steps=20)    a class of captum.attr
    grad-cam:GradCAMPlusPlus                  a class of pytorch_grad_cam
    zennit:EpsilonPlus                        a composite or an attributor of zennit
    mine.py:saliency                          a function (model, images, targets) -> maps in a file
    files:maps/{id}.npy                       maps that are there already

Nothing of a package is imported before one of its methods is run or given options, so what is known of each
stands here. A plug-in adds a prefix with a Provider under the entry points "heatproof.providers".
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from heatproof.errors import MissingExtraError, UnknownNameError
from heatproof.registry import Card, Explainer, key_of

HERE = "heatproof.explain.providers"


@dataclass(frozen=True)
class Provider:
    """Methods of another package, as PREFIX:NAME.

    Args:
        prefix: in front of the names.
        package: as it is imported; "" where nothing need be installed.
        make: the method of a name.
        offers: all names; any name where there are none.
        install: what pip calls the package, where that is not the prefix.
    """

    prefix: str
    package: str
    make: Callable[[str], Explainer]
    offers: tuple[str, ...] = ()
    install: str = ""

    @property
    def installed(self) -> bool:
        return not self.package or find_spec(self.package) is not None

    def entry(self, name: str) -> Explainer:
        """The method of that name; case, hyphens and underscores do not matter."""
        if not self.installed:
            raise MissingExtraError(
                f"{self.prefix}:{name} needs {self.prefix}, which is not installed; "
                f"run: pip install {self.install or self.prefix}"
            )
        known = {key_of(offer): offer for offer in self.offers}
        if known and key_of(name) not in known:
            raise UnknownNameError(f"method of {self.prefix}", name, self.offers)
        return self.make(known.get(key_of(name), name))


@dataclass(frozen=True)
class Foreign(Explainer):
    """A method of another package; its options are read off the package when they are asked for."""

    adapter: str = ""  # the file beside this one that calls it

    @cached_property
    def options(self) -> dict[str, Any]:
        found: Mapping[str, Any] = _adapter(self.adapter).options(self.name.partition(":")[2])
        return dict(found)


def _adapter(name: str) -> Any:
    return importlib.import_module(f"{HERE}.{name}")


OF_PIXELS = Card(
    relu="none",
    sign="absolute values summed over channels; the plain sum is kept as the signed map",
    resize="none: already at the image's size",
)
SUMMED = replace(OF_PIXELS, sign="summed over channels; negatives are clipped when the map is normalised")
AT_A_LAYER = Card(relu="none", sign=SUMMED.sign)
THEIR_OWN = Card(
    sign="the package's own map, between 0 and 1",
    resize="the package's own",
    normalisation="the package's own",
)


@dataclass(frozen=True)
class Offer:
    """What must be known of a method before its package is imported."""

    card: Card
    layer: bool = False  # whether it is told a layer
    forward_only: bool = False  # whether forward passes are all it needs


def _named(offer: Offer, names: str) -> dict[str, Offer]:
    return dict.fromkeys(names.split(), offer)


CAPTUM = {
    **_named(
        Offer(OF_PIXELS),
        "IntegratedGradients Saliency InputXGradient DeepLift DeepLiftShap GradientShap GuidedBackprop "
        "Deconvolution",
    ),
    **_named(Offer(OF_PIXELS, layer=True), "GuidedGradCam"),
    **_named(Offer(SUMMED), "LRP"),
    **_named(
        Offer(SUMMED, forward_only=True),
        "Occlusion FeatureAblation Lime KernelShap ShapleyValueSampling ShapleyValues",
    ),
    **_named(
        Offer(AT_A_LAYER, layer=True),
        "LayerGradCam LayerGradientXActivation LayerActivation LayerConductance LayerIntegratedGradients "
        "LayerDeepLift LayerDeepLiftShap LayerGradientShap InternalInfluence",
    ),
}
GRAD_CAM = {
    **_named(
        Offer(THEIR_OWN, layer=True),
        "GradCAM GradCAMPlusPlus HiResCAM XGradCAM LayerCAM EigenCAM EigenGradCAM ScoreCAM AblationCAM "
        "GradCAMElementWise KPCA_CAM SegEigenCAM ShapleyCAM FEM RandomCAM",
    ),
    **_named(Offer(THEIR_OWN), "FullGrad"),
}
ZENNIT = {
    **_named(
        Offer(SUMMED),
        "EpsilonPlus EpsilonPlusFlat EpsilonAlpha2Beta1 EpsilonAlpha2Beta1Flat EpsilonGammaBox "
        "ExcitationBackprop",
    ),
    **_named(Offer(OF_PIXELS), "GuidedBackprop DeconvNet BetaSmooth Gradient SmoothGrad IntegratedGradients"),
}


def _make(prefix: str, adapter: str, offers: Mapping[str, Offer], name: str) -> Explainer:
    """An entry that calls the package when it is run."""
    offer = offers[name]

    def function(trace: Any, **options: Any) -> Any:
        return _adapter(adapter).maps(name, offer, trace, options)

    function.__doc__ = f"{name} of {prefix}, as that package computes it."
    needs = ("activations",) if offer.layer else ()
    return Foreign(
        f"{prefix}:{name}", function, needs, card=offer.card, cost="its own passes",
        forward_only=offer.forward_only, adapter=adapter,
    )  # fmt: skip


def _package(prefix: str, package: str, adapter: str, offers: Mapping[str, Offer]) -> Provider:
    return Provider(prefix, package, partial(_make, prefix, adapter, offers), tuple(offers))


PROVIDERS = {
    "captum": _package("captum", "captum", "captum", CAPTUM),
    "grad-cam": _package("grad-cam", "pytorch_grad_cam", "grad_cam", GRAD_CAM),
    "zennit": _package("zennit", "zennit", "zennit", ZENNIT),
}
FILES = "files"


def all_providers() -> dict[str, Provider]:
    """By prefix: packages that we know and those of plug-ins."""
    return PROVIDERS | {one.name: one.load() for one in entry_points(group="heatproof.providers")}


def provided(name: str, folder: Path = Path(), order: Callable[[], Sequence[str]] | None = None) -> Explainer:
    """The method that a name with a colon means; nothing is imported or run yet.

    folder: what a path is relative to; order: names of all pictures, for an array of maps without names.
    """
    prefix, _, rest = name.partition(":")
    if is_path(name):
        made: Explainer = _adapter("files" if prefix == FILES else "function").from_path(name, folder, order)
        return made
    known = all_providers()
    for one, provider in known.items():
        if key_of(one) == key_of(prefix):
            return provider.entry(rest.strip())
    raise UnknownNameError("package of methods", prefix, [*known, FILES])


def is_path(name: str) -> bool:
    """Whether the name says where something lies: FILE.py:FUNCTION or files:PATH."""
    return name.startswith(f"{FILES}:") or name.rpartition(":")[0].endswith(".py")
