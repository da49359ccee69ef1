"""Methods of other packages, of users and from files, by a prefix.

    captum:IntegratedGradients(n_steps=20)    a class of captum.attr
    grad-cam:GradCAMPlusPlus                  a class of pytorch_grad_cam
    zennit:EpsilonPlus                        a composite or an attributor of zennit
    mine.py:saliency                          a function (model, images, targets) -> maps in a file
    files:maps/{id}.npy                       maps that are stored already

A package is imported when one of its methods is run or given options. Options are the arguments of its class
and of the call. A plug-in adds a prefix with a Provider under the entry points "heatproof.providers".
"""

from __future__ import annotations

import inspect
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import entry_points
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from heatproof.errors import (
    HeatproofError,
    InputError,
    LayerError,
    MissingExtraError,
    ModelError,
    UnknownNameError,
    did_you_mean,
    need,
)
from heatproof.explain.baselines import STARTS, baseline_images
from heatproof.explain.gradients import GRADIENT_CARD, over_channels
from heatproof.explain.providers import files, function
from heatproof.explain.segments import segments_of
from heatproof.models.checkpoints import first_line
from heatproof.models.layers import find_module, layout_of, picture_layers
from heatproof.models.model import Model
from heatproof.models.running import is_out_of_memory, watched
from heatproof.registry import REQUIRED, Card, Explainer, key_of
from heatproof.types import Signed, Trace

MODULE_STATE = (  # dicts of a module that a package may change, and leave changed when it fails
    "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called",
)  # fmt: skip
OPTION_TYPES = (type(None), bool, int, float, str, tuple)
BOX = {"low": 0.0, "high": 1.0}  # defaults of zennit's EpsilonGammaBox, before the image is normalised
SUMMED = replace(GRADIENT_CARD, sign="summed over channels; negatives are clipped when the map is normalised")
AT_A_LAYER = Card(relu="none", sign=SUMMED.sign)
THEIR_OWN = Card(
    sign="the package's own map, between 0 and 1",
    resize="the package's own",
    normalisation="the package's own",
)


@dataclass(frozen=True)
class Provider:
    """Methods of another package, as PREFIX:NAME.

    Args:
        prefix: in front of the names.
        package: its import name; "" if nothing need be installed.
        make: returns the method of a name.
        offers: all names; any name is passed on if there are none.
        install: its name for pip, if that is not the prefix.
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
class Offer:
    """Facts of a method that are needed before its package is imported."""

    card: Card
    layer: bool = False  # whether it takes a layer
    forward_only: bool = False


@dataclass(frozen=True)
class Package:
    """Where the classes of a package are and how they are called.

    Args:
        prefix: of the names, and the name for pip.
        modules: that hold the classes.
        calls: methods of a class whose arguments are options.
        reserved: arguments that are no options, since heatproof sets them.
        maps: (class, offer, trace, options, network, images) -> maps.
    """

    prefix: str
    modules: tuple[str, ...]
    calls: tuple[str, ...]
    reserved: tuple[str, ...]
    offers: Mapping[str, Offer]
    maps: Callable[..., Tensor | Signed]

    def kind(self, name: str) -> Any:
        for module in (need(module, "references") for module in self.modules):
            if hasattr(module, name):
                return getattr(module, name)
        raise InputError(
            f"the {self.prefix} that is installed has no {name}; update it: pip install -U {self.prefix}"
        )

    def options(self, name: str) -> dict[str, Any]:
        """Arguments with a plain default, and those that must be given."""
        options: dict[str, Any] = {}
        for call in self.calls:
            for argument in inspect.signature(getattr(self.kind(name), call)).parameters.values():
                reserved = (
                    argument.kind in (argument.VAR_KEYWORD, argument.VAR_POSITIONAL)
                    or argument.name in self.reserved
                )
                if not reserved and (
                    argument.default is REQUIRED or isinstance(argument.default, OPTION_TYPES)
                ):
                    options.setdefault(argument.name, None if argument.name in BOX else argument.default)
        return options

    def make(self, name: str) -> Explainer:
        """An entry that imports and calls the package when it is run."""
        offer = self.offers[name]

        def compute(trace: Trace, **options: Any) -> Tensor | Signed:
            kind = self.kind(name)
            with calling(f"{self.prefix}:{name}", trace) as (network, images):
                return self.maps(kind, offer, trace, options, network, images)

        compute.__doc__ = f"{name} of {self.prefix}, as that package computes it."
        return PackageMethod(
            f"{self.prefix}:{name}", compute, ("activations",) if offer.layer else (), card=offer.card,
            cost="its own passes", forward_only=offer.forward_only, package=self,
        )  # fmt: skip

    @property
    def provider(self) -> Provider:
        return Provider(self.prefix, self.modules[0].partition(".")[0], self.make, tuple(self.offers))


@dataclass(frozen=True)
class PackageMethod(Explainer):
    """A method of another package; its options are read from the package on demand."""

    package: Package = field(default=None)  # type: ignore[assignment]

    @cached_property
    def options(self) -> dict[str, Any]:
        return self.package.options(self.name.partition(":")[2])


class LogitsModule(nn.Module):
    """The network as a module that returns "b k" logits, with a column for each class."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.network = model.module
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        logits = self.model.forward(images)
        binary = self.model.head.targets(logits.shape[1]) > logits.shape[1]  # one logit for two classes
        return torch.cat([-logits, logits], 1) if binary else logits

    def train(self, mode: bool = True) -> LogitsModule:
        """Does nothing: the network stays in evaluation mode."""
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: the user's gradients stay."""


@contextmanager
def calling(method: str, trace: Trace) -> Iterator[tuple[LogitsModule, Tensor]]:
    """Prepare network and images for a package: gradients on, generators seeded, warnings off.

    Hooks and attributes that it leaves on the network are removed, and its errors become a ModelError.
    """
    model = trace.model
    before = [
        (part, set(part.__dict__), {name: dict(getattr(part, name)) for name in MODULE_STATE})
        for part in model.module.modules()
    ]
    numbers, python = np.random.get_state(), random.getstate()  # noqa: NPY002 (their generators)
    try:
        with (
            torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings(),
            redirect_stderr(StringIO()),
        ):  # fmt: skip
            warnings.simplefilter("ignore")
            torch.manual_seed(trace.seed)  # `frozen_eval` restores the caller's generator
            np.random.seed(trace.seed)  # noqa: NPY002
            random.seed(trace.seed)
            images = trace.images.detach().to(model.device, model.dtype).clone()
            yield LogitsModule(model), images.requires_grad_()
    except HeatproofError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(
            f"{method} failed on {model.name}: {type(error).__name__}: {first_line(error)}"
        ) from error
    finally:
        np.random.set_state(numbers)  # noqa: NPY002
        random.setstate(python)
        for part, names, state in before:
            for name in part.__dict__.keys() - names:
                del part.__dict__[name]
            for name, content in state.items():
                now = getattr(part, name)
                if dict(now) != content:
                    now.clear()
                    now.update(content)


def layer_of(method: str, trace: Trace) -> nn.Module:
    """The module that a package reads."""
    assert trace.layer is not None
    model, (name, function, _) = trace.model, trace.layer.partition("+")
    if function:
        raise LayerError(
            f"{method} looks at modules, and {model.name} is explained behind a function, at "
            f"{trace.layer!r}; name a module, such as layer={name!r}"
        )
    if model.facts.part_runs is None:  # how often each module runs in a pass
        counts: Counter[str] = Counter()
        with torch.no_grad(), watched(model.module, lambda name, *_: counts.update([name])):
            model.forward(model.ready(trace.images[:1]))
        model.facts.part_runs = dict(counts)
    if (runs := model.facts.part_runs).get(name, 1) > 1:
        grid, layers = tuple(trace.activation.shape[2:]), picture_layers(model, trace.images)
        alike = [other for other, layout, _ in layers if runs[other] == 1 and layout.grid == grid]
        raise LayerError(
            f"{method} looks at a module that runs once, and {name!r} runs {runs[name]} times in "
            f"{model.name}; name another" + f", such as layer={alike[-1]!r}" * bool(alike)
        )
    return find_module(model.module, name)


def over_places(offer: Offer, attributions: Tensor) -> Tensor | Signed:
    """Turn "b c h w" into "b h w", by the convention on the method's card."""
    values = attributions.detach()
    return over_channels(values) if offer.card == GRADIENT_CARD else values.sum(1)


def accepted(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a function takes."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in known}


def captum_maps(
    kind: Any, offer: Offer, trace: Trace, options: dict[str, Any], network: nn.Module, images: Tensor
) -> Tensor | Signed:
    """Attributions of captum, of pixels or of a layer, summed over channels.

    Two options may be words: baselines="blur" (zero, black, blur, noise; a number is an image of that value)
    and feature_mask="slic" (or quickshift).
    """
    method, given = f"captum:{kind.__name__}", images.detach()
    parameters = inspect.signature(kind.attribute).parameters
    needs_images = "baselines" in parameters and parameters["baselines"].default is REQUIRED

    def read(option: str, value: Any) -> Any:
        if option == "baselines" and isinstance(value, str):
            return baseline_images(trace.model, given, value, trace.seed, STARTS)
        if option == "baselines" and isinstance(value, int | float) and needs_images:
            return torch.full_like(given, value)
        if option == "feature_mask" and isinstance(value, str):
            return segments_of(trace.model, given, value, seed=trace.seed)[:, None]
        return value

    layer = (layer_of(method, trace),) if offer.layer else ()
    options = {option: read(option, value) for option, value in options.items()}
    attribution = kind(network, *layer, **accepted(kind.__init__, options))
    options = accepted(kind.attribute, options | {"target": trace.targets})
    maps = attribution.attribute(images, **options)
    maps = maps[0] if isinstance(maps, tuple) else maps
    if maps.shape[-2:] != images.shape[-2:] or maps.ndim != 4:
        layout = layout_of(maps, images, trace.model.module)
        if layout is None:
            raise LayerError(
                f"{method} gave {tuple(maps.shape)} at {trace.layer!r}, which is no image; name another layer"
            )
        maps = layout.picture(maps)
    return over_places(offer, maps)


def grad_cam_maps(
    kind: Any, offer: Offer, trace: Trace, options: dict[str, Any], network: nn.Module, images: Tensor
) -> Tensor:
    """Maps of grad-cam as it returns them, at the image's size and between 0 and 1."""
    target = need("pytorch_grad_cam.utils.model_targets", "references").ClassifierOutputTarget

    def as_grid(output: Tensor) -> Tensor:
        layout = layout_of(output, images, trace.model.module)
        return output if layout is None else layout.picture(output)

    layers = [layer_of(f"grad-cam:{kind.__name__}", trace)] if offer.layer else []
    cam = kind(network, layers, reshape_transform=as_grid, **accepted(kind.__init__, options))
    try:
        maps = cam(images, list(map(target, trace.targets.tolist())), **accepted(kind.__call__, options))
    finally:
        cam.activations_and_grads.release()
    return torch.from_numpy(np.asarray(maps, dtype=np.float32)).to(trace.images.device)


def zennit_maps(
    kind: Any, offer: Offer, trace: Trace, options: dict[str, Any], network: nn.Module, images: Tensor
) -> Tensor | Signed:
    """Relevance by a composite of zennit, or an attributor such as SmoothGrad, from a one-hot output.

    canonizers is a name of zennit's own, such as "ResNetCanonizer"; EpsilonGammaBox's low and high are
    numbers, by default those that black and white become for the network.
    """
    attribution = need("zennit.attribution", "references")
    preprocess = trace.model.preprocess
    if "low" in inspect.signature(kind.__init__).parameters:
        for limit, value in BOX.items():
            given = options.get(limit)
            if given is None and preprocess.channels != images.shape[1]:
                raise InputError(
                    f"zennit:{kind.__name__} needs {limit}, the {limit}est value a pixel can have"
                )
            full = torch.full_like(images.detach(), value if given is None else given)
            options[limit] = preprocess.normalise(full) if given is None else full
    if name := options.get("canonizers"):
        modules = [need(f"zennit.{module}", "references") for module in ("torchvision", "canonizers")]
        known = {
            title: getattr(module, title)
            for module in reversed(modules)
            for title in vars(module)
            if title.endswith(("Canonizer", "BatchNorm"))
        }
        if name not in known:
            raise InputError(f"zennit has no canonizer {name!r}; {did_you_mean(name, known)}")
        options["canonizers"] = [known[name]()]
    if issubclass(kind, attribution.Attributor):
        attributor = kind(network, **options)
    else:
        attributor = attribution.Gradient(network, kind(**options))

    def one_hot(output: Tensor) -> Tensor:
        return torch.eye(output.shape[1], device=output.device, dtype=output.dtype)[trace.targets]

    return over_places(offer, attributor(images, one_hot)[1])


def _named(offer: Offer, names: str) -> dict[str, Offer]:
    return dict.fromkeys(names.split(), offer)


CAPTUM = {
    **_named(
        Offer(GRADIENT_CARD),
        "IntegratedGradients Saliency InputXGradient DeepLift DeepLiftShap GradientShap GuidedBackprop "
        "Deconvolution",
    ),
    **_named(Offer(GRADIENT_CARD, layer=True), "GuidedGradCam"),
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
    **_named(
        Offer(GRADIENT_CARD), "GuidedBackprop DeconvNet BetaSmooth Gradient SmoothGrad IntegratedGradients"
    ),
}
PACKAGES = (
    Package(
        "captum", ("captum.attr",), ("__init__", "attribute"),
        (
            "self", "model", "forward_func", "layer", "inputs", "target", "additional_forward_args",
            "device_ids", "return_convergence_delta", "return_input_shape", "show_progress",
            "custom_attribution_func", "grad_kwargs", "interpretable_model", "similarity_func",
            "perturb_func", "verbose",
        ),
        CAPTUM, captum_maps,
    ),
    Package(
        "grad-cam", ("pytorch_grad_cam",), ("__init__", "__call__"),
        ("self", "model", "target_layers", "reshape_transform", "input_tensor", "targets"),
        GRAD_CAM, grad_cam_maps,
    ),
    Package(
        "zennit", ("zennit.composites", "zennit.attribution"), ("__init__",),
        (
            "self", "model", "composite", "attr_output", "create_graph", "retain_graph", "layer_map",
            "first_map", "zero_params", "baseline_fn",
        ),
        ZENNIT, zennit_maps,
    ),
)  # fmt: skip
PROVIDERS = {package.prefix: package.provider for package in PACKAGES}
FILES = "files"


def all_providers() -> dict[str, Provider]:
    """Providers by prefix: those above, and those of plug-ins."""
    return PROVIDERS | {plugin.name: plugin.load() for plugin in entry_points(group="heatproof.providers")}


def provided(name: str, folder: Path = Path(), order: Callable[[], Sequence[str]] | None = None) -> Explainer:
    """The method of a name with a colon; its package is not imported yet.

    folder: that paths are relative to; order: returns the names of all images, for an array without names.
    """
    prefix, _, rest = name.partition(":")
    if prefix == FILES:
        return files.from_path(name, folder, order)
    if is_path(name):
        return function.from_path(name, folder)
    known = all_providers()
    for own, provider in known.items():
        if key_of(own) == key_of(prefix):
            return provider.entry(rest.strip())
    raise UnknownNameError("package of methods", prefix, [*known, FILES])


def is_path(name: str) -> bool:
    """Whether a name is a path: FILE.py:FUNCTION or files:PATH."""
    return name.startswith(f"{FILES}:") or name.rpartition(":")[0].endswith(".py")
