"""Where a CAM looks by default: behind the activation (never the normalisation in front of it)."""

from __future__ import annotations

import pytest
import timm
import torch
import torchvision
import transformers
from click.testing import CliRunner
from torch import Tensor, nn
from torch.nn import functional as F

import heatproof as hp
from heatproof.cli import main
from heatproof.models import as_model, default_layer
from heatproof.models.capture import capture
from heatproof.models.layers import RECTIFIERS, find_module, first_tensor, picture_layers
from heatproof.models.model import Model
from heatproof.models.running import frozen_eval

TORCHVISION = [
    "alexnet", "vgg11", "vgg11_bn", "resnet18", "densenet121", "inception_v3", "googlenet", "squeezenet1_1",
    "mobilenet_v2", "mobilenet_v3_small", "shufflenet_v2_x0_5", "mnasnet0_5", "efficientnet_b0",
    "regnet_y_400mf", "convnext_tiny", "swin_t", "maxvit_t",
]  # fmt: skip
TIMM = [
    "resnet18", "resnetv2_50", "densenet121", "inception_v4", "legacy_xception", "mobilenetv2_050",
    "mobilenetv3_small_050", "efficientnet_lite0", "ghostnet_050", "hrnet_w18_small", "regnety_002",
    "nf_resnet50", "cspdarknet53", "mobilevit_xxs", "repvgg_a0", "convnext_atto", "vit_tiny_patch16_224",
    "twins_pcpvt_small", "mixer_s32_224", "convit_tiny",
]  # fmt: skip
ONE_SIZE = ("vit_tiny_patch16_224", "mixer_s32_224", "convit_tiny", "twins_pcpvt_small")
KERAS = ["ResNet50V2", "MobileNetV2", "DenseNet121"]
# Families whose default changed with this rule, and where it is now.
CHANGED = {
    "lite0": "_swish",
    "torchvision:densenet121": "features.norm5+relu",
    "timm:densenet121": "features.norm5",
    "timm:resnetv2_50": "norm",
    "timm:nf_resnet50": "final_act",
    "timm:legacy_xception": "act4",
    "timm:cspdarknet53": "stages.4",
    "timm:mobilevit_xxs": "final_conv.bn",
    "timm:twins_pcpvt_small": "blocks.3.2.norm1",
    "timm:mixer_s32_224": "blocks.7.norm1",
    "timm:convit_tiny": "blocks.11.norm1",
    "keras:ResNet50V2": "post_relu",
}


def chosen_layer(model: Model, image: Tensor) -> str:
    with frozen_eval(model.module):
        layer = capture(model, image, needs=frozenset({"activations"})).layer
    assert layer is not None
    return layer


def check(name: str, model: Model, size: int) -> None:
    """Watch one pass without heatproof's search: does something rectify the layer's shape after the layer?"""
    image = torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(0))
    layer = chosen_layer(model, image)
    outputs: list[Tensor] = []
    rectified: list[tuple[int, ...]] = []  # shapes, since the layer last ran

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            output = func(*args, **(kwargs or {}))
            if func in RECTIFIERS or func is F.hardtanh:
                rectified.append(tuple(output.shape))
            return output

    def keep(_m: nn.Module, _i: object, output: object) -> None:
        rectified.clear()
        tensor = first_tensor(output)
        assert tensor is not None
        outputs.append(tensor.clone())

    handle = find_module(model.module, layer).register_forward_hook(keep)
    with frozen_eval(model.module), torch.no_grad(), Watch():
        model.forward(model.ready(image))
    handle.remove()
    in_front = float(outputs[-1].min()) < 0 and tuple(outputs[-1].shape) in rectified
    assert in_front == ("+" in layer), f"{name}: {layer} is in front of a ReLU"
    if name in CHANGED:
        assert layer == CHANGED[name]


@pytest.mark.parametrize("name", TORCHVISION)
def test_torchvision(name: str) -> None:
    options = {"init_weights": False} if name in ("inception_v3", "googlenet", "vgg11", "vgg11_bn") else {}
    module = torchvision.models.get_model(name, weights=None, **options)
    check(f"torchvision:{name}", as_model(module), 128 if name != "maxvit_t" else 224)


@pytest.mark.parametrize("name", TIMM)
def test_timm(name: str) -> None:
    check(f"timm:{name}", as_model(timm.create_model(name)), 224 if name in ONE_SIZE else 128)


@pytest.mark.parametrize("name", KERAS)
def test_keras(name: str) -> None:
    check(f"keras:{name}", hp.load_model(f"keras:{name}"), 224)


@pytest.mark.parametrize("name", ["Bit", "ResNet", "ConvNext", "MobileNetV1"])
def test_hugging_face(name: str) -> None:
    options = {} if name == "MobileNetV1" else {"depths": [1, 1, 1, 1]}
    config = getattr(transformers, f"{name}Config")(**options)
    module = transformers.AutoModelForImageClassification.from_config(config)
    model = as_model(module)
    check(f"hf:{name}", model, 128)
    if name == "Bit":
        assert default_layer(model) == "bit.norm"


def test_lite0_reads_its_last_relu6_and_its_maps_are_not_empty() -> None:
    model = hp.load_model("lite0")
    check("lite0", model, 224)
    image = torch.rand(1, 3, 224, 224, generator=torch.Generator().manual_seed(1)) - 0.5
    with frozen_eval(model.module):
        trace = capture(model, image)
    assert (
        trace.layer == "_swish" and float(trace.activation.min()) == 0 and trace.activation.shape[1] == 1280
    )


class Functional(nn.Module):
    """The most common way to write a small network: activations are functions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, 2, 1), nn.Conv2d(8, 16, 3, 2, 1)
        self.bn2, self.fc = nn.BatchNorm2d(16), nn.Linear(16, 4)

    def features(self, images: Tensor) -> Tensor:
        return F.relu(self.bn2(self.conv2(F.relu(self.conv1(images)))), inplace=True)

    def forward(self, images: Tensor) -> Tensor:
        return self.fc(self.features(images).mean((2, 3)))


def test_a_function_s_output_and_its_gradient_are_read() -> None:
    module = Functional().eval()
    module.bn2.running_mean.normal_(generator=torch.Generator().manual_seed(0))
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    maps = hp.explain(module, images, ["gradcam", "layercam", "ablationcam"], targets=[0, 1, 2])
    activations = module.features(images).detach()
    # The head is a mean and a linear layer: the gradient at every place is the class's weight over 64 places.
    weights = module.fc.weight[torch.tensor([0, 1, 2])].detach() / 64
    by_hand = (weights[:, :, None, None] * activations).sum(1).relu()
    torch.testing.assert_close(maps["gradcam"].values, by_hand, rtol=1e-5, atol=1e-6)
    positive = (weights.relu()[:, :, None, None] * activations).sum(1)
    torch.testing.assert_close(maps["layercam"].values, positive, rtol=1e-5, atol=1e-6)
    assert default_layer(as_model(module), images) == "bn2+relu"
    logits = module(images).detach()[torch.arange(3), torch.tensor([0, 1, 2])]
    lost = weights * 64 * activations.mean((2, 3)) / logits[:, None]
    ablated = (lost[:, :, None, None] * activations).sum(1).relu()
    torch.testing.assert_close(maps["ablationcam"].values, ablated, rtol=1e-4, atol=1e-5)


class Shared(Functional):
    """One activation module that runs twice, as in EfficientNet-Lite."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()

    def features(self, images: Tensor) -> Tensor:
        return self.act(self.bn2(self.conv2(self.act(self.conv1(images)))))


def test_of_a_module_that_runs_twice_the_last_run_is_read_and_rerun() -> None:
    functional, shared = Functional().eval(), Shared().eval()
    shared.load_state_dict(functional.state_dict())
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    methods = ["gradcam", "gradcam++", "layercam", "scorecam", "ablationcam", "ms-gradcam++"]
    expected, result = (hp.explain(m, images, methods, targets=1) for m in (functional, shared))
    assert default_layer(as_model(shared), images) == "act"
    for method in methods[:-1]:
        torch.testing.assert_close(result[method].values, expected[method].values, rtol=1e-5, atol=1e-6)


class SharedWithHead(Functional):
    """One activation module for the convolutions and for the head, as many small networks have it."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.hidden = nn.ReLU(), nn.Linear(16, 16)

    def forward(self, images: Tensor) -> Tensor:
        features = self.act(self.bn2(self.conv2(self.act(self.conv1(images)))))
        return self.fc(self.act(self.hidden(features.mean((2, 3)))))


def test_an_activation_that_runs_again_in_the_head_is_read_where_it_follows_the_layer() -> None:
    module = SharedWithHead().eval()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    model = as_model(module)
    assert chosen_layer(model, images) == "bn2+relu"
    assert "act" not in {name for name, _, _ in picture_layers(model, images)}, "its last output is a vector"
    maps = hp.explain(model, images, ["gradcam", "ablationcam", "ms-gradcam++"], targets=1)
    features = (
        module.act(module.bn2(module.conv2(module.act(module.conv1(images))))).detach().requires_grad_()
    )
    logits = module.fc(module.act(module.hidden(features.mean((2, 3)))))
    (gradient,) = torch.autograd.grad(logits[:, 1].sum(), features)
    by_hand = (gradient.mean((2, 3), keepdim=True) * features.detach()).sum(1).relu()
    torch.testing.assert_close(maps["gradcam"].values, by_hand, rtol=1e-5, atol=1e-7)


def test_the_step_behind_costs_one_pass_of_one_image_once() -> None:
    module = Shared().eval()
    sizes: list[int] = []
    module.register_forward_pre_hook(lambda _m, inputs: sizes.append(len(inputs[0])))
    model = as_model(module)
    for _ in range(2):
        hp.explain(model, torch.randn(5, 3, 32, 32), "gradcam")
    assert sizes == [1, 5, 5]


@pytest.mark.parametrize(
    ("name", "layer", "reason"),
    [
        ("lite0", "_swish", "behind its activation, which _bn1 is not"),
        ("torchvision:densenet121", "features.norm5+relu", "its output behind the function relu"),
        ("torchvision:resnet18", "layer4", "end of the last stage"),
    ],
)
def test_the_list_of_layers_says_which_is_the_default_and_why(name: str, layer: str, reason: str) -> None:
    lines = CliRunner().invoke(main, ["list", "layers", name]).output.splitlines()
    first = next(i for i, line in enumerate(lines) if "default:" in line)
    assert lines[first].split()[0] == layer
    note = lines[first].index("default:")  # a narrow terminal folds the note
    assert reason in " ".join(line[note:].strip() for line in lines[first : first + 4])
