"""The work of an audit, part by part: ours beside grad-cam, captum, lime, torchcam and Quantus.

Each part asks both sides for the same: the same network, images, methods, samples and steps. Where a side
does less (Quantus deletes but does not insert), the row says so. No part includes decoding or writing. On a
GPU our side has turns before, after which it is recorded; both have one to warm up, then the median of three
is taken.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from io import StringIO
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import CAMS, GRAD_CAM, RECORDED, Part, Row, network, side_by_side, speed
from benchmarks.sections import BenchOptions
from heatproof.errors import need
from heatproof.explain.api import explain
from heatproof.metrics.agreement import method_agreement
from heatproof.metrics.faithfulness import insertion_deletion
from heatproof.metrics.sanity import fragility, parameter_randomisation
from heatproof.models.model import Model

PACKAGES = {  # by module
    "pytorch_grad_cam": "grad-cam", "captum": "captum", "lime": "lime", "torchcam": "torchcam",
    "quantus": "Quantus",
}  # fmt: skip
TORCHCAM = {"gradcam": "GradCAM", "gradcam++": "GradCAMpp", "layercam": "LayerCAM", "xgradcam": "XGradCAM"}
SAME_PASSES = "both are bound by the same passes"
Call = Callable[[], object]


@dataclass(frozen=True)
class Amount:
    """How much of each part both sides do."""

    images: int = 4
    samples: int = 64  # of LIME
    path: int = 16  # steps of integrated gradients
    steps: int = 16  # of deletion; Quantus wants them to divide the pixels
    draws: int = 3  # of noise


def missing() -> str:
    """What cannot be compared because it is not installed, and how to install it; "" where all are there."""
    absent = [name for module, name in PACKAGES.items() if not find_spec(module)]
    if not absent:
        return ""
    # Without their dependencies, which are here but for Quantus's own build of OpenCV: it clashes with ours.
    return f"not compared with {', '.join(absent)}; install: pip install --no-deps {' '.join(absent)}"


def parts(options: BenchOptions) -> Iterator[Part]:
    """A row for each part that another package can do, and one for all of them together."""
    torch.manual_seed(0)
    if options.gpu and not options.quick:
        amount, turns = Amount(options.pictures or 4, samples=256), 3
    elif options.quick:
        amount, turns = Amount(options.pictures or 1, samples=16, path=4, steps=4, draws=1), 1
    else:
        amount, turns = Amount(options.pictures or 2), 3
    model = network("resnet50" if options.gpu else "resnet18", options.device)
    work, totals = _Work(model, options.device, amount), [0.0, 0.0]

    def beside(part: _Part) -> list[Row]:
        contenders = {"ours": part.ours, "theirs": part.theirs}
        for _ in range(RECORDED if options.gpu else 0):
            part.ours()
        ms = side_by_side(contenders, turns, options.device, warmup=int(not options.quick))
        if part.counted:
            totals[0], totals[1] = totals[0] + ms["ours"], totals[1] + ms["theirs"]
        return [speed(part.what, ms["ours"], part.other, ms["theirs"], note=f"times faster{part.note}")]

    here = [part for part in work.parts() if find_spec(part.module)]
    names = dict.fromkeys(PACKAGES[part.module] for part in here if part.counted and part.module in PACKAGES)

    def together() -> list[Row]:
        what = f"all parts together, {model.name}, {amount.images} images"
        return [speed(what, totals[0], ", ".join(names), totals[1], note="times faster")]

    for part in here:
        yield Part(part.name, partial(beside, part), options.device)
    yield Part("all", together, options.device)


@dataclass(frozen=True)
class _Part:
    name: str
    what: str
    ours: Call
    module: str
    other: str
    theirs: Call
    note: str = ""
    counted: bool = True  # among all parts; not where two packages do the same


class _Work:
    def __init__(self, model: Model, device: str, amount: Amount) -> None:
        self.model, self.device, self.amount = model, device, amount
        generator = torch.Generator().manual_seed(0)
        images = torch.randn(amount.images, 3, 224, 224, generator=generator)
        self.images = images.to(device).contiguous(memory_format=torch.channels_last)
        self.layer = model.module.layer4
        self.maps = explain(model, self.images, CAMS, targets=0)
        self.on_pixels = {
            name: method_maps.upsample()[:, None].cpu().numpy() for name, method_maps in self.maps.items()
        }
        self.batch = images.numpy()
        self.labels = np.zeros(amount.images, dtype=np.int64)

    def parts(self) -> list[_Part]:
        n, a = self.amount.images, self.amount
        sanity: dict[str, Any] = {"model": self.model, "images": self.images}
        made = partial(explain, self.model, self.images, targets=0)
        pairs = len(CAMS) * (len(CAMS) - 1) // 2
        return [
            _Part(
                "seven CAMs", f"seven CAMs of {n} images", partial(made, CAMS),
                "pytorch_grad_cam", "grad-cam, one after the other", self._grad_cam,
            ),
            _Part(
                "four CAMs", f"four CAMs of {n} images", partial(made, list(TORCHCAM)),
                "torchcam", "torchcam, one after the other", self._torchcam, counted=False,
            ),
            _Part(
                "gradients", f"gradient and integrated gradients, {a.path} steps, of {n} images",
                partial(made, ["gradient", f"ig(steps={a.path})"]),
                "captum", "captum, the same", self._captum, f"; {SAME_PASSES}",
            ),
            _Part(
                "LIME", f"LIME, {a.samples} samples, of {n} images",
                partial(made, f"lime(samples={a.samples})"),
                "lime", "lime package, the same", self._lime, f"; {SAME_PASSES}",
            ),
            _Part(
                "insertion and deletion",
                f"insertion and deletion, {a.steps} steps, of seven CAMs of {n} images",
                partial(insertion_deletion, self.maps, 0, steps=a.steps, baseline="black", **sanity),
                "quantus", "Quantus, deletion alone", self._flipping,
                "; twice its passes on our side, since it has no insertion",
            ),
            _Part(
                "randomised weights", f"randomised weights, the whole network, seven CAMs of {n} images",
                partial(parameter_randomisation, CAMS, 0, depths=1, **sanity),
                "quantus", "Quantus with grad-cam, ranks alone", self._randomised,
            ),
            _Part(
                "noise", f"noise, {a.draws} draws, seven CAMs of {n} images",
                partial(fragility, CAMS, draws=a.draws, **sanity),
                "quantus", "Quantus with grad-cam", self._noise,
            ),
            _Part(
                "agreement", f"agreement of seven CAMs on {n} images: ranks and SSIM of {pairs} pairs",
                partial(method_agreement, self.maps), "skimage", "SciPy and scikit-image, pair by pair",
                self._pairs, "; top-K overlap on our side too",
            ),
        ]  # fmt: skip

    def _grad_cam(self) -> object:
        return {name: self._cam(name, self.model.module, self.images) for name in GRAD_CAM}

    def _cam(self, name: str, module: torch.nn.Module, images: Tensor) -> np.ndarray:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            reference = need("pytorch_grad_cam", "references")
            from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
        targets = [ClassifierOutputTarget(0)] * len(images)
        with getattr(reference, name)(model=module, target_layers=[module.layer4]) as cam:
            heat: np.ndarray = cam(input_tensor=images, targets=targets)
        return heat

    def _torchcam(self) -> object:
        methods = need("torchcam.methods", "references")
        heat = []
        for name in TORCHCAM.values():
            with getattr(methods, name)(self.model.module, self.layer) as cam:
                heat.append(cam([0] * len(self.images), self.model.module(self.images)))
        return heat

    def _captum(self) -> object:
        attr = need("captum.attr", "references")
        images = self.images.clone().requires_grad_()
        batch = 32 if self.device == "cpu" else 256
        gradients = attr.Saliency(self.model.module).attribute(images, target=0)
        path = attr.IntegratedGradients(self.model.module)
        options = {"target": 0, "n_steps": self.amount.path, "internal_batch_size": batch}
        return gradients, path.attribute(self.images, **options)

    def _lime(self) -> object:
        explainer = need("lime.lime_image", "references").LimeImageExplainer(random_state=0)
        slic = need("skimage.segmentation", "references").slic
        segment = partial(slic, n_segments=100, compactness=10, start_label=0)
        pictures = self.model.preprocess.restore(self.images).permute(0, 2, 3, 1).double().cpu().numpy()
        options: dict[str, Any] = {
            "num_samples": self.amount.samples, "batch_size": 32, "segmentation_fn": segment,
        }  # fmt: skip
        with redirect_stderr(StringIO()):
            return [explainer.explain_instance(picture, self._classify, **options) for picture in pictures]

    def _classify(self, pictures: np.ndarray) -> np.ndarray:
        pixels = torch.from_numpy(pictures).permute(0, 3, 1, 2).float().to(self.device)
        with torch.inference_mode():
            chances = self.model.module(self.model.preprocess.normalise(pixels)).softmax(1)
        return np.asarray(chances.cpu().numpy())

    def _flipping(self) -> object:
        per_step = 224 * 224 // self.amount.steps
        metric = self._quantus("PixelFlipping", features_in_step=per_step, perturb_baseline="black")
        return [metric(a_batch=maps, softmax=True) for maps in self.on_pixels.values()]

    def _randomised(self) -> object:
        metric = self._quantus("MPRT", skip_layers=True, seed=0)
        return [
            metric(explain_func=self._explained, explain_func_kwargs={"method": name}) for name in GRAD_CAM
        ]

    def _noise(self) -> object:
        metric = self._quantus("AvgSensitivity", nr_samples=self.amount.draws, lower_bound=2 / 255)
        return [
            metric(explain_func=self._explained, explain_func_kwargs={"method": name}) for name in GRAD_CAM
        ]

    def _quantus(self, name: str, **options: Any) -> Callable[..., object]:
        made = getattr(need("quantus", "references"), name)(disable_warnings=True, **options)
        inputs = {"model": self.model.module, "x_batch": self.batch, "y_batch": self.labels}

        def call(**named: Any) -> object:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return made(**inputs, channel_first=True, device=self.device, **named)

        return call

    def _explained(self, model: Any, inputs: Any, targets: Any, method: str, **_: Any) -> np.ndarray:
        module = getattr(model, "model", model)
        images = torch.as_tensor(np.asarray(inputs), dtype=torch.float32).to(self.device)
        return self._cam(method, module, images)[:, None]

    def _pairs(self) -> Mapping[tuple[str, str], list[tuple[float, float]]]:
        from scipy.stats import spearmanr
        from skimage.metrics import structural_similarity

        def alike(a: np.ndarray, b: np.ndarray) -> tuple[float, float]:
            ranks = float(spearmanr(a.ravel(), b.ravel()).statistic)
            return ranks, float(structural_similarity(a, b, win_size=5, data_range=1.0))

        return {
            (a, b): [alike(x[0], y[0]) for x, y in zip(self.on_pixels[a], self.on_pixels[b], strict=True)]
            for a, b in combinations(self.on_pixels, 2)
        }
