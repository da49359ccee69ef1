"""What explanations cost beside a bare forward pass, and beside the libraries people use today."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from functools import partial
from importlib.util import find_spec
from io import StringIO
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import CAMS, GRAD_CAM, Part, Row, cost, network, side_by_side, speed
from benchmarks.sections import BenchOptions
from heatproof.errors import need
from heatproof.explain.api import explain
from heatproof.models.model import Model
from heatproof.models.running import frozen_eval

REFERENCES = {"ig": "captum, the same", "lime": "lime package, the same"}
SAMPLES = 64  # per image, for methods that take hundreds or thousands: the cost per pass is what is compared
QUICK_SAMPLES = 16
FASTER = "times faster"
PER_IMAGE = ("resnet50", "convnext_base")
LIMITS = {"fp32": {32: "<= 1.35", 256: "<= 1.08"}, "bf16": {32: "<= 1.35", 256: "<= 1.12"}}


def parts(options: BenchOptions) -> Iterator[Part]:
    """On a GPU also milliseconds per image over batch sizes and precisions."""
    quick, device = options.quick, options.device
    torch.manual_seed(0)
    model = network("resnet18" if quick else "resnet50", device)
    yield Part("seven CAMs", partial(_cams, model, 2 if quick else 16, device, 2 if quick else 3), device)
    samples = QUICK_SAMPLES if quick else SAMPLES
    yield Part("methods of many passes", partial(_perturbing, model, device, 2, samples), device)
    for name in PER_IMAGE if options.gpu else ():
        for precision in LIMITS:
            made = partial(_per_image, name, precision, device, (32,) if quick else (1, 32, 256))
            yield Part(f"per image, {name}, {precision}", made, device)


def _bare(model: Model, images: Tensor) -> Callable[[], Tensor]:
    """One forward pass as anyone would write it, in the memory format we use."""

    def forward() -> Tensor:
        with torch.inference_mode():
            logits: Tensor = model.module(images)
            return logits

    return forward


def _cams(model: Model, batch: int, device: str, repeat: int) -> list[Row]:
    images = torch.randn(batch, 3, 224, 224, device=device).contiguous(memory_format=torch.channels_last)
    contenders: dict[str, Callable[[], object]] = {
        "bare forward": _bare(model, images),
        "seven CAMs": lambda: explain(model, images, CAMS, batch_size=batch),
    }
    if find_spec("captum"):
        contenders["captum LayerGradCam"] = captum_gradcam(model, images)
    if find_spec("pytorch_grad_cam"):
        contenders |= {f"grad-cam {name}": grad_cam(model, images, name) for name in GRAD_CAM}
    ms = side_by_side(contenders, repeat, device)
    ours, bare = ms["seven CAMs"], ms["bare forward"]
    what = f"seven CAMs together, {model.name}, batch {batch}"
    rows = [cost(what, ours, "bare forward", bare, "<= 1.25")]
    if "captum LayerGradCam" in ms:
        rows.append(speed(what, ours, "captum, Grad-CAM alone", ms["captum LayerGradCam"], note=FASTER))
    theirs = {name: ms[f"grad-cam {name}"] for name in GRAD_CAM if f"grad-cam {name}" in ms}
    if theirs:
        total = sum(theirs.values())
        rows.append(speed(what, ours, "grad-cam, the same seven", total, ">= 20", FASTER))
        slowest = max(theirs, key=lambda name: theirs[name])
        note = f"{FASTER}; without its slowest, {slowest}"
        rows.append(speed(what, ours, "grad-cam, six of them", total - theirs[slowest], note=note))
    return rows


def captum_gradcam(
    model: Model, images: Tensor, predicts: bool = False, layer: str = "layer4"
) -> Callable[[], object]:
    captum = need("captum.attr", "references")
    attribution = captum.LayerGradCam(model.module, model.module.get_submodule(layer))
    bare = _bare(model, images)
    return lambda: attribution.attribute(images, target=bare().argmax(1) if predicts else 0)


def grad_cam(model: Model, images: Tensor, name: str, layer: str = "layer4") -> Callable[[], object]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = need("pytorch_grad_cam", "references")
        from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
    targets, layers = [ClassifierOutputTarget(0)] * len(images), [model.module.get_submodule(layer)]

    def run() -> object:
        with getattr(reference, name)(model=model.module, target_layers=layers) as cam:
            return cam(input_tensor=images, targets=targets)

    return run


def _perturbing(model: Model, device: str, repeat: int, samples: int) -> list[Row]:
    """Methods of many passes against the bare passes they need by definition, at the same batch size."""
    batch, count = (min(32, samples), 1) if device == "cpu" else (128, 8)
    images = torch.randn(count, 3, 224, 224, device=device)
    full = torch.randn(batch, 3, 224, 224, device=device).contiguous(memory_format=torch.channels_last)
    targets = torch.zeros(batch, dtype=torch.long, device=device)
    many, few = (samples, samples) if device == "cpu" else (1024, samples)  # on a GPU, near the defaults
    methods = {
        f"lime(samples={many})": (many, "forward"),
        f"rise(masks={many})": (many, "forward"),
        f"scorecam(channels={many})": (many, "forward"),
        f"ig(steps={few})": (few, "forward and backward"),
        f"smoothgrad(samples={few})": (few, "forward and backward"),
    }

    def gradient_pass() -> object:
        with frozen_eval(model.module):
            return model.input_gradient(full, targets)

    contenders: dict[str, Callable[[], object]] = {
        "forward": _bare(model, full),
        "forward and backward": gradient_pass,
        "shared pass": _bare(model, images),
    }
    contenders |= {m: partial(explain, model, images, m, targets=0, batch_size=batch) for m in methods}
    contenders |= _reference_perturbations(model, images, batch, samples)
    ms = side_by_side(contenders, repeat, device)
    rows = []
    for method, (variants, kind) in methods.items():
        # The shared pass over the images gives their classes, so it is part of what the method needs.
        least = ms[kind] * count * variants / batch + ms["shared pass"]
        what = f"{method}, {count} image{'s' if count > 1 else ''}"
        rows.append(cost(what, ms[method], f"bare {kind} passes", least, "<= 1.15"))
        name = method.partition("(")[0]
        if name in ms:
            rows.append(speed(what, ms[method], REFERENCES[name], ms[name], note=FASTER))
    return rows


def _reference_perturbations(
    model: Model, images: Tensor, batch: int, samples: int
) -> dict[str, Callable[[], object]]:
    calls: dict[str, Callable[[], object]] = {}
    if find_spec("captum"):
        ig = need("captum.attr", "references").IntegratedGradients(model.module)
        calls["ig"] = lambda: ig.attribute(images, target=0, n_steps=samples, internal_batch_size=batch)
    if find_spec("lime") and len(images) == 1:
        explainer = need("lime.lime_image", "references").LimeImageExplainer(random_state=0)
        picture = model.preprocess.restore(images)[0].permute(1, 2, 0).double().cpu().numpy()

        def classify(batch_of_pictures: Any) -> Any:
            pixels = torch.from_numpy(batch_of_pictures).permute(0, 3, 1, 2).float().to(model.device)
            with torch.inference_mode():
                return model.module(model.preprocess.normalise(pixels)).softmax(1).cpu().numpy()

        slic = need("skimage.segmentation", "references").slic
        segment = partial(slic, n_segments=100, compactness=10, start_label=0)
        options = {"num_samples": samples, "batch_size": batch, "segmentation_fn": segment}

        def run() -> object:
            with redirect_stderr(StringIO()):
                return explainer.explain_instance(picture, classify, **options)

        calls["lime"] = run
    return calls


def _per_image(name: str, precision: str, device: str, batches: Sequence[int]) -> list[Row]:
    """Milliseconds per image of the seven CAMs and of a bare forward, over batch size."""
    model, dtype = network(name, device), {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    model.module.to(dtype)
    limits = LIMITS[precision] if name == "resnet50" else {256: "<= 1.1"}
    rows = []
    for batch in batches:
        images = torch.randn(batch, 3, 224, 224, device=device, dtype=dtype)
        images = images.contiguous(memory_format=torch.channels_last)
        contenders: dict[str, Callable[[], object]] = {
            "seven CAMs": partial(explain, model, images, CAMS, batch_size=batch),
            "gradcam": partial(explain, model, images, "gradcam", batch_size=batch),
            "bare": _bare(model, images),
        }
        ms = {n: t / batch for n, t in side_by_side(contenders, 20, device, warmup=5).items()}
        what = f"per image, {name}, batch {batch}, {precision}"
        rows += [
            cost(f"{ours} {what}", ms[ours], "bare forward", ms["bare"], limits.get(batch, ""))
            for ours in ("seven CAMs", "gradcam")
        ]
        if batch == 1 and name == "resnet50":
            ours = ms["seven CAMs"]
            what = f"seven CAMs, {name}, one image, {precision}: milliseconds"
            rows.append(Row(what, ours, "bare forward", ms["bare"], ours, "<= 3"))
    return rows
