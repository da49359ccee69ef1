"""CAMs against code nobody here wrote: grad-cam and captum, on five of torchvision's architectures.

They are narrow and shallow, with random weights; their layers are of the kinds that the large ones have.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.resnet import Bottleneck

import heatproof as hp
from conftest import randomise
from heatproof.models import default_layer
from heatproof.models.capture import capture
from heatproof.models.layers import find_module, layout_of
from heatproof.models.model import as_model
from heatproof.models.running import frozen_eval
from heatproof.registry import explainers
from heatproof.types import Trace, normalise

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import captum.attr
    import pytorch_grad_cam as reference
    from pytorch_grad_cam.ablation_layer import AblationLayer, AblationLayerVit
    from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget

models = torchvision.models
BUILD: dict[str, Callable[[int], nn.Module]] = {  # by the size of its pictures
    "resnet": lambda size: models.ResNet(Bottleneck, [1, 1, 1, 1], 20, width_per_group=16),
    "densenet": lambda size: models.DenseNet(8, (2, 2, 2, 2), 16, num_classes=20),
    "convnext": lambda size: models.ConvNeXt(
        [CNBlockConfig(*sizes, 1) for sizes in ((16, 32), (32, 64), (64, 128), (128, None))], num_classes=20
    ),
    "vit": lambda size: models.VisionTransformer(size, 16, 3, 4, 64, 128, num_classes=20),
    "swin": lambda size: models.SwinTransformer(
        [4, 4], 24, [2, 2, 2, 2], [1, 2, 4, 8], [7, 7], num_classes=20
    ),
}
LAYERS = {  # the default where it is a module; DenseNet's is a function's output, which they cannot name
    "resnet": "layer4",
    "densenet": "features.denseblock4",
    "convnext": "features.7",
    "vit": "encoder.layers.encoder_layer_2.ln_1",
    "swin": "norm",
}
TARGETS = [3, 11]


@cache
def network(name: str, size: int = 224) -> nn.Module:
    torch.manual_seed(0)
    return randomise(BUILD[name](size))


@cache
def images(size: int = 224, count: int = 2) -> Tensor:
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(1)) * 2 - 1


def reshape_for(name: str, size: int):
    def reshape(tensor: Tensor) -> Tensor:
        return layout_of(tensor, tensor.new_empty(len(tensor), 3, size, size), network(name, size)).picture(
            tensor
        )

    return reshape if name in ("vit", "swin") else None


def reference_cam(method: str, name: str, size: int = 224, layer: str = "", **options):
    return getattr(reference, method)(
        model=network(name, size),
        target_layers=[find_module(network(name, size), layer or LAYERS[name])],
        reshape_transform=reshape_for(name, size),
        **options,
    )


@cache
def reference_pass(name: str) -> tuple[Tensor, Tensor]:
    """Activations and gradients as grad-cam captures them."""
    with reference_cam("GradCAM", name) as cam:
        outputs = cam.activations_and_grads(images())
        sum(o[t] for t, o in zip(TARGETS, outputs, strict=True)).backward()
        network(name).zero_grad(set_to_none=True)
        seen = cam.activations_and_grads
        return seen.activations[0].detach(), seen.gradients[0].detach()


@cache
def our_pass(name: str) -> Trace:
    model = as_model(network(name))
    with frozen_eval(model.module):
        return capture(model, images(), TARGETS, layer=LAYERS[name])


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(normalise(ours), normalise(theirs), atol=1e-4, rtol=0)


def test_the_default_layer_is_the_one_compared() -> None:
    layers = {name: default_layer(as_model(network(name))) for name in LAYERS}
    assert layers == LAYERS | {"densenet": "features.norm5+relu"}


@pytest.mark.parametrize("name", LAYERS)
def test_the_pass_captures_what_grad_cam_captures(name: str) -> None:
    ours = our_pass(name)
    for mine, other in zip((ours.activation, ours.gradient), reference_pass(name), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5 * float(other.abs().max()), rtol=0)


METHODS = {
    "gradcam": "GradCAM", "gradcam++": "GradCAMPlusPlus", "layercam": "LayerCAM", "xgradcam": "XGradCAM",
    "hirescam": "HiResCAM", "eigencam": "EigenCAM", "eigengradcam": "EigenGradCAM",
}  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("method", METHODS)
def test_the_map_equals_grad_cam_s(name: str, method: str) -> None:
    """Same activations and gradients in float64, at low resolution: rounding and resizing cannot blur this.

    They are scaled up because grad-cam adds small numbers to its denominators (1e-6 to Grad-CAM++'s, 1e-7
    to XGrad-CAM's), which the papers and we do not.
    """
    activations, gradients = (1e5 * tensor.double() for tensor in reference_pass(name))
    with reference_cam(METHODS[method], name) as cam:
        targets = [ClassifierOutputTarget(t) for t in TARGETS]
        tensors = activations.numpy(), gradients.numpy()
        low = cam.get_cam_image(images(), cam.target_layers[0], targets, *tensors, False)
    theirs = torch.from_numpy(np.ascontiguousarray(low))
    trace = replace(
        our_pass(name), activations={LAYERS[name]: activations}, gradients={LAYERS[name]: gradients}
    )
    entry = explainers.get(method)
    ours = entry.function(trace, **({"centred": True} if method == "eigencam" else {}))
    if method.startswith("eigen"):  # defined up to its sign
        theirs = theirs * torch.sign((theirs * ours).sum((1, 2), keepdim=True))
    assert_same(ours, theirs)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("method", ["gradcam", "layercam", "hirescam"])
def test_end_to_end_in_float32(name: str, method: str) -> None:
    activations, gradients = reference_pass(name)
    by_hand = {
        "gradcam": (gradients.mean((2, 3), keepdim=True) * activations).sum(1).relu(),
        "layercam": (gradients.relu() * activations).sum(1).relu(),
        "hirescam": (gradients * activations).sum(1).relu(),
    }
    maps = hp.explain(network(name), images(), method, targets=TARGETS, layer=LAYERS[name])[method]
    assert_same(maps.values, by_hand[method])


@pytest.mark.parametrize("name", ["resnet", "densenet", "convnext"])
def test_gradcam_equals_captum(name: str) -> None:
    """captum reads channels first only, so token grids and Swin's channels-last output are not its case."""
    module = network(name)
    layer = captum.attr.LayerGradCam(module, find_module(module, LAYERS[name]))
    theirs = layer.attribute(images(), target=TARGETS, relu_attributions=True)
    ours = hp.explain(module, images(), "gradcam", targets=TARGETS, layer=LAYERS[name])["gradcam"]
    assert_same(ours.values, theirs[:, 0].detach())


# grad-cam runs the whole network once per channel: small images, and a layer with few channels.
SMALL = {
    "resnet": (64, "layer1"),
    "densenet": (64, "features.transition1"),
    "convnext": (64, "features.1"),
    "vit": (32, "encoder.layers.encoder_layer_2.ln_1"),
    "swin": (64, "features.1"),
}


def perturbation_reference(method: str, name: str, **options) -> Tensor:
    size, layer = SMALL[name]
    with reference_cam(method, name, size, layer, **options) as cam:
        cam.batch_size = 64
        targets = [ClassifierOutputTarget(TARGETS[0])]
        if hasattr(cam, "ablation_layer"):
            cam.ablation_layer = (AblationLayerVit if name in ("vit", "swin") else AblationLayer)()
        with torch.no_grad():
            cam.outputs = cam.activations_and_grads(images(size, 1))
        activations = cam.activations_and_grads.activations[0].detach().numpy()
        low = cam.get_cam_image(images(size, 1), cam.target_layers[0], targets, activations, None, False)
    return torch.from_numpy(np.ascontiguousarray(low)).float()


@pytest.mark.parametrize("name", LAYERS)
def test_scorecam_equals_grad_cam_in_its_settings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # grad-cam enlarges its masks with align_corners=True; here and in the paper's resize it is False.
    bilinear = partial(nn.Upsample, mode="bilinear", align_corners=False)
    monkeypatch.setattr(nn, "UpsamplingBilinear2d", bilinear)
    size, layer = SMALL[name]
    method = "scorecam(channels=all, weights=softmax)"
    ours = hp.explain(network(name, size), images(size, 1), method, TARGETS[0], layer, batch_size=64)[method]
    assert_same(ours.values, perturbation_reference("ScoreCAM", name).relu())


@pytest.mark.parametrize("name", LAYERS)
def test_ablationcam_equals_grad_cam_in_its_settings(name: str) -> None:
    size, layer = SMALL[name]
    method = "ablationcam(fill=floor)"
    ours = hp.explain(network(name, size), images(size, 1), method, TARGETS[0], layer, batch_size=64)[method]
    assert_same(ours.values, perturbation_reference("AblationCAM", name).relu())
