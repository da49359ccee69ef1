"""Methods of other packages, of users and from files, by a prefix.

    captum:IntegratedGradients(n_steps=20)    a class of captum.attr
    grad-cam:GradCAMPlusPlus                  a class of pytorch_grad_cam
    zennit:EpsilonPlus                        a composite or an attributor of zennit
    lime:LimeImageExplainer(num_samples=200)  the weights of segments by lime
    mine.py:saliency                          a function (model, images, targets) -> maps in a file
    files:maps/{id}.npy                       maps that are stored already

A package is imported when one of its methods is run or given options. Options are the arguments of its class
and of the call.
"""

from __future__ import annotations

import ast
import inspect
import random
import tomllib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import cached_property
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
    first_line,
    need,
)
from heatproof.explain import CARDS, read_card
from heatproof.explain.baselines import STARTS, baseline_images, pictures_of, segments_of
from heatproof.explain.gradients import over_channels
from heatproof.explain.providers import files
from heatproof.models.layers import find_module, layout_of, picture_layers
from heatproof.models.model import Model
from heatproof.models.running import function_in, is_out_of_memory, same_randomness, watched
from heatproof.registry import REQUIRED, Card, Explainer, explainers, key_of
from heatproof.types import Signed, Trace

MODULE_STATE = (  # dicts of a module that a package may change, and leave changed when it fails
    "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
    "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called",
)  # fmt: skip
OPTION_TYPES = (type(None), bool, int, float, str, tuple)
BOX = {"low": 0.0, "high": 1.0}  # defaults of zennit's EpsilonGammaBox, before the image is normalised
OWN = Card(*["defined by its author"] * 3)
LEADING = 3  # arguments of a user's function before its options
FILES = "files"
PACKAGES = tomllib.loads(Path(__file__).with_name("packages.toml").read_text(encoding="utf-8"))
Method = str | Callable[..., Any]
Methods = Method | Sequence[Method] | Mapping[str, Callable[..., Any]]


def offered(prefix: str) -> dict[str, dict[str, Any]]:
    """Facts of the methods of a package in packages.toml, by name."""
    return {name: offer for offer in PACKAGES[prefix]["offers"] for name in offer["names"]}


def is_installed(prefix: str) -> bool:
    """Whether a package in packages.toml is installed; it is not imported."""
    return find_spec(PACKAGES[prefix]["modules"][0].partition(".")[0]) is not None


@dataclass(frozen=True)
class PackageMethod(Explainer):
    """A method of a package in packages.toml, which is imported when it is run or given options."""

    @property
    def kind(self) -> Any:
        """Its class."""
        prefix, _, name = self.name.partition(":")
        for module in (need(module, "references") for module in PACKAGES[prefix]["modules"]):
            if hasattr(module, name):
                return getattr(module, name)
        raise InputError(f"the {prefix} that is installed has no {name}; update it: pip install -U {prefix}")

    @cached_property
    def options(self) -> dict[str, Any]:
        """Arguments with a plain default, and those that must be given."""
        options: dict[str, Any] = {}
        package = PACKAGES[self.name.partition(":")[0]]
        for call in package["calls"]:
            for argument in inspect.signature(getattr(self.kind, call)).parameters.values():
                plain = argument.default is REQUIRED or isinstance(argument.default, OPTION_TYPES)
                rest = argument.kind in (argument.VAR_KEYWORD, argument.VAR_POSITIONAL)
                if plain and not rest and argument.name not in package["reserved"]:
                    options.setdefault(argument.name, None if argument.name in BOX else argument.default)
        return options


def package_method(prefix: str, name: str) -> Explainer:
    """The method of a name in packages.toml; case, hyphens and underscores do not matter."""
    if not is_installed(prefix):
        raise MissingExtraError(
            f"{prefix}:{name} needs {prefix}, which is not installed; run: pip install {prefix}"
        )
    known = {key_of(offer): offer for offer in offered(prefix)}
    if key_of(name) not in known:
        raise UnknownNameError(f"method of {prefix}", name, offered(prefix))
    name = known[key_of(name)]
    facts = offered(prefix)[name]

    def compute(trace: Trace, **options: Any) -> Tensor | Signed:
        with calling(entry.name, trace) as (network, images):
            return MAPS[prefix](entry, trace, options, network, images)

    compute.__doc__ = f"{name} of {prefix}, as that package computes it."
    entry = PackageMethod(
        f"{prefix}:{name}", compute, facts.get("needs", ()), card=read_card(**facts["card"]),
        cost="its own passes", forward_only=facts.get("forward_only", False),
    )  # fmt: skip
    return entry


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
    try:
        with (
            torch.inference_mode(False), torch.enable_grad(), warnings.catch_warnings(),
            redirect_stderr(StringIO()), same_randomness(),
        ):  # fmt: skip
            warnings.simplefilter("ignore")
            torch.manual_seed(trace.seed)
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
            f"{method} reads modules, and the layer of {model.name}, {trace.layer!r}, is the output of "
            f"a function; name a module, such as layer={name!r}"
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
            f"{method} reads a module that runs once, and {name!r} runs {runs[name]} times in "
            f"{model.name}; name another" + f", such as layer={alike[-1]!r}" * bool(alike)
        )
    return find_module(model.module, name)


def over_places(entry: PackageMethod, attributions: Tensor) -> Tensor | Signed:
    """Turn "b c h w" into "b h w", by the convention on the method's card."""
    values = attributions.detach()
    return over_channels(values) if entry.card == CARDS["gradient"] else values.sum(1)


def accepted(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a function takes."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in known}


def captum_maps(
    entry: PackageMethod, trace: Trace, options: dict[str, Any], network: nn.Module, images: Tensor
) -> Tensor | Signed:
    """Attributions of captum, of pixels or of a layer, summed over channels.

    Two options may be words: baselines="blur" (zero, black, blur, noise; a number is an image of that value)
    and feature_mask="slic" (or quickshift).
    """
    kind, given = entry.kind, images.detach()
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

    layer = (layer_of(entry.name, trace),) if entry.needs else ()
    options = {option: read(option, value) for option, value in options.items()}
    attribution = kind(network, *layer, **accepted(kind.__init__, options))
    maps = attribution.attribute(images, **accepted(kind.attribute, options | {"target": trace.targets}))
    maps = maps[0] if isinstance(maps, tuple) else maps
    if maps.shape[-2:] != images.shape[-2:] or maps.ndim != 4:
        layout = layout_of(maps, images, trace.model.module)
        if layout is None:
            gave = f"{entry.name} returned {tuple(maps.shape)} at {trace.layer!r}"
            raise LayerError(f"{gave}, which has no positions of the image; name another layer")
        maps = layout.picture(maps)
    return over_places(entry, maps)


def grad_cam_maps(
    entry: PackageMethod, trace: Trace, options: dict[str, Any], network: nn.Module, images: Tensor
) -> Tensor:
    """Maps of grad-cam as it returns them, at the image's size and between 0 and 1."""
    kind = entry.kind
    target = need("pytorch_grad_cam.utils.model_targets", "references").ClassifierOutputTarget

    def as_grid(output: Tensor) -> Tensor:
        layout = layout_of(output, images, trace.model.module)
        return output if layout is None else layout.picture(output)

    layers = [layer_of(entry.name, trace)] if entry.needs else []
    cam = kind(network, layers, reshape_transform=as_grid, **accepted(kind.__init__, options))
    try:
        maps = cam(images, list(map(target, trace.targets.tolist())), **accepted(kind.__call__, options))
    finally:
        cam.activations_and_grads.release()
    return torch.from_numpy(np.asarray(maps, dtype=np.float32)).to(trace.images.device)


def lime_maps(
    entry: PackageMethod, trace: Trace, options: dict[str, Any], network: LogitsModule, images: Tensor
) -> Tensor:
    """Weights of the segments by lime, which gets images in [0, 1]; samples and segments follow the seed."""
    model, kind, maps = trace.model, entry.kind, []

    @torch.no_grad()
    def predict(pictures: np.ndarray) -> np.ndarray:
        inputs = model.preprocess.normalise(torch.from_numpy(pictures).movedim(-1, 1).to(images))
        return np.asarray(model.probabilities(model.forward(inputs)).double().cpu().numpy())

    pictures = pictures_of(model, images.detach()).movedim(1, -1).double().cpu().numpy()
    options = {"random_state": trace.seed, "random_seed": trace.seed} | options | {"top_labels": None}
    for picture, target in zip(pictures, trace.targets.tolist(), strict=True):
        explainer = kind(**accepted(kind.__init__, options))
        given = accepted(kind.explain_instance, options | {"labels": (target,)})
        explained = explainer.explain_instance(picture, predict, **given)
        weights = np.zeros(explained.segments.max() + 1)  # 0 for segments that lime did not select
        for segment, weight in explained.local_exp[target]:
            weights[segment] = weight
        maps.append(weights[explained.segments])
    return torch.from_numpy(np.stack(maps)).to(images)


def zennit_maps(
    entry: PackageMethod, trace: Trace, options: dict[str, Any], network: nn.Module, images: Tensor
) -> Tensor | Signed:
    """Relevance by a composite of zennit, or an attributor such as SmoothGrad, from a one-hot output.

    canonizers is a name of zennit's own, such as "ResNetCanonizer"; EpsilonGammaBox's low and high are
    numbers, by default those that black and white become for the network.
    """
    kind, preprocess = entry.kind, trace.model.preprocess
    attribution = need("zennit.attribution", "references")
    if "low" in inspect.signature(kind.__init__).parameters:
        for limit, value in BOX.items():
            given = options.get(limit)
            if given is None and preprocess.channels != images.shape[1]:
                raise InputError(f"{entry.name} needs {limit}, the {limit}est value a pixel can have")
            full = torch.full_like(images.detach(), value if given is None else given)
            options[limit] = preprocess.normalise(full) if given is None else full
    if name := options.get("canonizers"):
        modules = [need(f"zennit.{module}", "references") for module in ("torchvision", "canonizers")]
        both = {**vars(modules[1]), **vars(modules[0])}
        known = {title: both[title] for title in both if title.endswith(("Canonizer", "BatchNorm"))}
        if name not in known:
            raise InputError(f"zennit has no canonizer {name!r}; {did_you_mean(name, known)}")
        options["canonizers"] = [known[name]()]
    if issubclass(kind, attribution.Attributor):
        attributor = kind(network, **options)
    else:
        attributor = attribution.Gradient(network, kind(**options))

    def one_hot(output: Tensor) -> Tensor:
        return torch.eye(output.shape[1], device=output.device, dtype=output.dtype)[trace.targets]

    return over_places(entry, attributor(images, one_hot)[1])


MAPS = {"captum": captum_maps, "grad-cam": grad_cam_maps, "lime": lime_maps, "zennit": zennit_maps}


def provided(name: str, folder: Path = Path(), order: Callable[[], Sequence[str]] | None = None) -> Explainer:
    """The method of a name with a colon; its package is not imported yet.

    folder: that paths are relative to; order: returns the names of all images, for an array without names.
    """
    prefix, _, rest = name.partition(":")
    if prefix == FILES:
        return files.from_path(name, folder, order)
    if is_path(name):
        return from_file(name, folder)
    for known in PACKAGES:
        if key_of(known) == key_of(prefix):
            return package_method(known, rest.strip())
    raise UnknownNameError("package of methods", prefix, [*PACKAGES, FILES])


def is_path(name: str) -> bool:
    """Whether a name is a path: FILE.py:FUNCTION or files:PATH."""
    return name.startswith(f"{FILES}:") or name.rpartition(":")[0].endswith(".py")


def named(methods: Methods) -> list[str]:
    """Names of methods; functions among them are registered in this process under their own names."""
    if isinstance(methods, str) or callable(methods):
        methods = [methods]
    table = dict(methods) if isinstance(methods, Mapping) else None
    by_name: dict[str, Method] = {}
    for given in methods:
        name = given if isinstance(given, str) else getattr(given, "__name__", type(given).__name__)
        method = given if table is None else table[name]
        if callable(method):
            if by_name.get(name, method) is not method:
                raise InputError(f"two methods are called {name!r}; name them: {{'one': f, 'other': g}}")
            explainers.add_local(of_function(name, method))
        elif table is not None:
            raise InputError(f"methods[{name!r}] is a string; a table of methods holds functions")
        by_name[name] = method
    return list(by_name)


def of_function(name: str, function: Callable[..., Any]) -> Explainer:
    """The entry of a function."""
    if "(" in name or ":" in name:
        raise InputError(
            f"{name!r} is not a valid method name: brackets hold options, colons follow package names"
        )

    def compute(trace: Trace, **options: Any) -> Tensor | Signed:
        with torch.inference_mode(False), torch.enable_grad():
            images = trace.images.detach().clone()
            return _as_maps(name, function(trace.model.module, images, trace.targets, **options), trace)

    try:
        parameters = list(inspect.signature(function).parameters.values())[LEADING:]
    except (TypeError, ValueError):
        parameters = []
    options = [p.replace(kind=p.KEYWORD_ONLY) for p in parameters if p.default is not p.empty]
    compute.__doc__ = inspect.getdoc(function) or f"{name}, a user-defined function."
    compute.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return Explainer(name, compute, card=OWN, forward_only=True, volumes=True, cost="its own passes")


def _as_maps(name: str, result: Any, trace: Trace) -> Tensor | Signed:
    if isinstance(result, Signed):
        return Signed(*(_as_maps(name, part, trace) for part in result))  # type: ignore[arg-type]
    try:
        maps = torch.as_tensor(result).to(trace.images.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name} returned {type(result).__name__}, not maps 'b h w'") from error
    if maps.ndim == trace.images.ndim and maps.shape[1] == 1:
        return maps[:, 0]
    if maps.ndim == trace.images.ndim:
        raise InputError(f"{name} returned shape {tuple(maps.shape)}, not 'b h w'; sum over its channels")
    return maps


@dataclass(frozen=True)
class FromFile(Explainer):
    """A function in a file, which is imported when the method is run."""

    path: Path = Path()

    @cached_property
    def options(self) -> dict[str, Any]:
        """Defaults as written in the file, which is parsed but not run."""
        name = self.name.rpartition(":")[2]
        try:
            statements = ast.parse(self.path.read_text(encoding="utf-8")).body
        except (OSError, SyntaxError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read {self.path}: {error}") from error
        for statement in statements:
            if isinstance(statement, ast.FunctionDef) and statement.name == name:
                return _written_defaults(statement.args)
        return {}


def _written_defaults(arguments: ast.arguments) -> dict[str, Any]:
    """Defaults by option; None for those that are not literals."""
    plain = [*arguments.posonlyargs, *arguments.args]
    values: list[ast.expr | None] = [None] * (len(plain) - len(arguments.defaults)) + arguments.defaults
    pairs = zip(plain + arguments.kwonlyargs, values + arguments.kw_defaults, strict=True)
    defaults = {}
    for argument, default in list(pairs)[LEADING:]:
        if default is not None:
            try:
                defaults[argument.arg] = ast.literal_eval(default)
            except ValueError:
                defaults[argument.arg] = None
    return defaults


def from_file(name: str, folder: Path) -> Explainer:
    """FILE.py:FUNCTION, the file relative to a folder."""
    file, _, function = name.rpartition(":")
    path = folder / Path(file).expanduser()

    def compute(trace: Trace, **options: Any) -> Any:
        with function_in(path, function) as own:
            return of_function(function, own).function(trace, **options)

    compute.__doc__ = f"The function {function} of {file}."
    return FromFile(
        name, compute, card=OWN, forward_only=True, volumes=True, cost="its own passes", path=path
    )
