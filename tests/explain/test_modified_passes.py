"""Guided backprop, gradient x input, DeepLIFT, LRP and FullGrad against captum, grad-cam, zennit and axioms.

Networks are float64: at float32 a ReLU that flips by rounding moves a gradient by more than the tolerance.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
from captum.attr import LRP, DeepLift, GuidedBackprop, InputXGradient
from captum.attr._utils.lrp_rules import EpsilonRule
from pytorch_grad_cam import FullGrad, GuidedBackpropReLUModel
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.resnet import BasicBlock, ResNet

from conftest import counting, same, small_cnn, state_of
from heatproof.errors import InputError, ModelError
from heatproof.explain.api import explain
from heatproof.explain.baselines import baseline_images
from heatproof.explain.rules import carrying, contributions
from heatproof.models.capture import capture
from heatproof.models.model import as_model
from heatproof.models.running import frozen_eval

METHODS = ("guided-backprop", "gradient-x-input", "deeplift", "lrp", "fullgrad")
CLOSE: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-9}
HOOKED = pytest.mark.filterwarnings("ignore:Setting (forward, )?backward hooks")  # captum says so


def pictures(count: int = 2, size: int = 32, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed)).double()


def with_gradient(images: Tensor) -> Tensor:
    """As captum wants them: with a gradient."""
    return images.clone().requires_grad_()


def plain() -> nn.Sequential:
    """Convolutions with biases, ReLUs that are nobody else's and not in place: what captum can hook."""
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 16), nn.ReLU(), nn.Linear(16, 5),
    ).double().eval()  # fmt: skip


def trained_norms(module: nn.Module) -> nn.Module:
    """Statistics and scales of batch normalisation that matter."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, nn.BatchNorm2d):
                for tensor, low in ((part.running_mean, -0.3), (part.running_var, 0.5), (part.weight, -0.7)):
                    tensor.copy_(low + torch.rand(tensor.shape, generator=generator, dtype=torch.float64))
                part.bias.copy_(torch.rand(part.bias.shape, generator=generator, dtype=torch.float64) - 0.5)
    return module


class Functional(nn.Module):
    """The network of `plain`, written with functions, one shared module and activations in place."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = plain()
        self.shared = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.parts[0](x), inplace=True), 2)
        x = self.parts[5](self.shared(self.parts[3](x)))
        return self.parts[9](torch.relu_(self.parts[7](x.flatten(1))))


class Flattened(nn.Module):
    """The network of `plain` without a module that captum's LRP does not know."""

    def __init__(self) -> None:
        super().__init__()
        parts = plain()
        self.convolved, self.dense = parts[:6], parts[7:]

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(self.convolved(x).flatten(1))


class Gated(nn.Module):
    """A squeeze-and-excitation block behind a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.stem, self.side = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.gate, self.head = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.stem(x))
        x = x + F.gelu(self.side(x))
        x = x * torch.sigmoid(self.gate(x.mean((2, 3))))[:, :, None, None]
        return self.head(x.amax((2, 3)) if self.training else x.mean((2, 3)))


def signed(module: nn.Module, images: Tensor, method: str, targets: Any = None) -> Tensor:
    """A method's map with its signs, in float32 as maps are."""
    return explain(module, images, method, targets)[method].signed


@HOOKED
@pytest.mark.parametrize("build", [plain, lambda: trained_norms(small_cnn().double()).eval()])
def test_guided_backprop_as_captum_has_it(build: Any) -> None:
    module, images, targets = build(), pictures(), torch.tensor([1, 3])
    expected = GuidedBackprop(build()).attribute(with_gradient(images), target=targets)
    result = explain(module, images, "guided-backprop", targets)["guided-backprop"]
    torch.testing.assert_close(result.signed, expected.sum(1).float().detach(), **CLOSE)
    torch.testing.assert_close(result.values, expected.abs().sum(1).float().detach(), **CLOSE)


def test_guided_backprop_as_grad_cam_has_it() -> None:
    torch.manual_seed(2)
    module = torchvision.models.resnet18(num_classes=7).eval()
    image = pictures(1, 64).float()
    expected = GuidedBackpropReLUModel(module, "cpu")(image, target_category=2)
    result = signed(module, image, "guided-backprop", 2)
    torch.testing.assert_close(result[0], torch.from_numpy(expected.sum(2)), rtol=1e-4, atol=1e-5)


def test_gradient_x_input_as_captum_has_it() -> None:
    module, images, targets = plain(), pictures(), torch.tensor([0, 4])
    expected = InputXGradient(module).attribute(with_gradient(images), target=targets).sum(1).float().detach()
    torch.testing.assert_close(signed(module, images, "gradient-x-input", targets), expected, **CLOSE)


@HOOKED
@pytest.mark.parametrize("baseline", ["zero", "noise"])
def test_deeplift_as_captum_has_it(baseline: str) -> None:
    """Without max pooling, where ties are broken otherwise; the next test is about it."""

    def build() -> nn.Sequential:
        module = plain()
        module[2] = nn.AvgPool2d(2)
        return module

    images, targets = pictures(), torch.tensor([1, 2])
    reference = baseline_images(as_model(build()), images, baseline, 0, (baseline,))
    expected = (
        DeepLift(build()).attribute(with_gradient(images), reference, target=targets).sum(1).float().detach()
    )
    result = signed(build(), images, f"deeplift(baseline={baseline})", targets)
    torch.testing.assert_close(result, expected, **CLOSE)


def test_deeplift_of_max_pooling_window_by_window() -> None:
    """The difference goes to the place of the larger one of the two maxima."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(48, 5)).double().eval()
    images = pictures(1, 8)
    reference = baseline_images(as_model(module), images, "noise")
    weight, expected = module[2].weight.detach()[1].view(3, 4, 4), torch.zeros(3, 8, 8, dtype=torch.float64)
    for c, i, j in itertools.product(range(3), range(4), range(4)):
        place = (c, slice(2 * i, 2 * i + 2), slice(2 * j, 2 * j + 2))
        window, other = images[0][place], reference[0][place]
        larger = window if window.max() >= other.max() else other
        at = divmod(int(larger.argmax()), 2)
        expected[c, 2 * i + at[0], 2 * j + at[1]] = (window.max() - other.max()) * weight[c, i, j]
    result = signed(module, images, "deeplift(baseline=noise)", 1)[0]
    torch.testing.assert_close(result, expected.sum(0).float(), **CLOSE)


@pytest.mark.parametrize("build", [plain, Functional, lambda: Gated().double(), lambda: small_cnn().double()])
def test_deeplift_sums_to_the_difference_of_outputs(build: Any) -> None:
    module, images = trained_norms(build()).eval(), pictures()
    with torch.no_grad():
        gap = module(images) - module(torch.zeros_like(images))
    for target in (0, 2):
        total = signed(module, images, "deeplift", target).double().sum((1, 2))
        torch.testing.assert_close(total, gap[:, target], rtol=1e-4, atol=1e-6)


def zennit_map(module: nn.Module, images: Tensor, target: int, composite: Any) -> Tensor:
    attribution = pytest.importorskip("zennit.attribution", reason="zennit is not installed")
    with attribution.Gradient(model=module, composite=composite) as attributor:
        _, relevance = attributor(
            images, lambda output: output * F.one_hot(torch.tensor(target), output.shape[1])
        )
    return relevance.sum(1).float()


@pytest.mark.parametrize("rule", ["z+", "gamma", "epsilon"])
@pytest.mark.parametrize("network", ["plain", "merged", "residual"])
def test_lrp_as_zennit_has_it(rule: str, network: str) -> None:
    """Batch normalisation merged by its canonisers, and its averages and sums left without a stabiliser."""
    composites = pytest.importorskip("zennit.composites", reason="zennit is not installed")
    from zennit import canonizers, rules, types
    from zennit.torchvision import ResNetCanonizer

    torch.manual_seed(1)
    networks: dict[str, Any] = {
        "plain": (plain(), []),
        "merged": (small_cnn().double(), [canonizers.SequentialMergeBatchNorm()]),
        "residual": (ResNet(BasicBlock, [1, 1, 1, 1], num_classes=5).double(), [ResNetCanonizer()]),
    }
    module, canonisers = networks[network]
    trained_norms(module).eval()
    hook = {"z+": rules.ZPlus(), "gamma": rules.Gamma(0.25), "epsilon": rules.Epsilon()}[rule]
    layers = [
        *composites.layer_map_base(1e-12), (types.Convolution, hook), (nn.Linear, rules.Epsilon())
    ]  # fmt: skip
    images = pictures(1)
    result = signed(module, images, f"lrp(rule='{rule}')", 1)
    expected = zennit_map(module, images, 1, composites.LayerMapComposite(layers, canonizers=canonisers))
    scale = float(expected.abs().max())
    torch.testing.assert_close(result / scale, expected / scale, rtol=0, atol=5e-5)


def test_lrp_as_captum_has_it() -> None:
    """The epsilon rule; gamma and z+ are compared with zennit."""
    module, images, targets = plain(), pictures(), torch.tensor([1, 2])
    theirs = Flattened()
    for part in theirs.modules():
        if isinstance(part, nn.Linear | nn.AdaptiveAvgPool2d | nn.Conv2d):
            part.rule = EpsilonRule(1e-6)
    expected = LRP(theirs).attribute(with_gradient(images), target=targets).sum(1).float().detach()
    result = signed(module, images, "lrp(rule=epsilon)", targets)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-3 * float(expected.abs().max()))


def test_relevance_sums_to_the_logit_where_nothing_absorbs_it() -> None:
    module = plain()
    for part in module:
        if getattr(part, "bias", None) is not None:
            nn.init.zeros_(part.bias)  # type: ignore[arg-type]
    images = pictures()
    with torch.no_grad():
        logits = module(images)
    for rule in ("z+", "gamma", "epsilon"):
        total = signed(module, images, f"lrp(rule='{rule}')", 3).double().sum((1, 2))
        torch.testing.assert_close(total, logits[:, 3], rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_functions_shared_modules_and_in_place_activations_are_one_network(method: str) -> None:
    images, targets = pictures(), torch.tensor([1, 3])
    expected = explain(plain(), images, method, targets)[method].values
    result = explain(Functional().eval(), images, method, targets)[method].values
    torch.testing.assert_close(result, expected, **CLOSE)


@pytest.mark.parametrize(
    "build", [plain, lambda: trained_norms(ResNet(BasicBlock, [1, 1, 1, 1], num_classes=5).double())]
)
def test_full_gradients_are_the_whole_logit(build: Any) -> None:
    torch.manual_seed(6)
    module, images = build().eval(), pictures()
    total = torch.zeros(2, dtype=torch.float64)

    def add(start: int, stop: int, contribution: Tensor | None) -> None:
        if contribution is not None:
            total[start:stop] += contribution.sum((1, 2, 3))

    model = as_model(module)
    with frozen_eval(module):
        trace = capture(model, images, torch.tensor([1, 2]), frozenset())
        contributions(trace, add)
    dense = [part for part in module.modules() if isinstance(part, nn.Linear)]
    absorbed = _dense_biases(module, dense, images, trace.targets)
    chosen = trace.logits[torch.arange(2), trace.targets]
    torch.testing.assert_close(total + absorbed, chosen.double(), rtol=1e-8, atol=1e-8)


def _dense_biases(module: nn.Module, dense: list[nn.Linear], images: Tensor, targets: Tensor) -> Tensor:
    """What the biases of dense layers, which have no place, add to the logits."""
    outputs: list[Tensor] = []
    handles = [part.register_forward_hook(lambda _m, _i, output: outputs.append(output)) for part in dense]
    logits = module(images)
    for handle in handles:
        handle.remove()
    gradients = torch.autograd.grad(logits[torch.arange(len(images)), targets].sum(), outputs)
    pairs = zip(gradients, dense, strict=True)
    return sum((g * part.bias).sum(1) for g, part in pairs).detach()


def test_fullgrad_as_grad_cam_has_it() -> None:
    module, image = trained_norms(small_cnn().double()).float().eval(), pictures(1).float()
    for part in module:  # type: ignore[attr-defined]
        if isinstance(part, nn.ReLU):
            part.inplace = False
    with torch.no_grad():
        module[-1].weight.mul_(1e4)  # its scaling adds 1e-7, which is not small beside small gradients
    with FullGrad(model=module, target_layers=[]) as cam:
        expected = cam(input_tensor=image, targets=[ClassifierOutputTarget(2)])
    method = "fullgrad(rescale=channel)"
    result = explain(module, image, method, 2)[method].normalised().numpy()
    np.testing.assert_allclose(result, expected, atol=2e-4)


@pytest.mark.parametrize(
    ("method", "network", "sentence"),
    [
        ("guided-backprop", "vit", "has none; use smoothgrad instead"),
        ("deeplift", "vit", "has no rule for layer_norm"),
        ("lrp", "vit", "use attnlrp instead"),
        ("fullgrad", "vit", "use attnlrp instead"),
        ("lrp", "torchvision", "use attnlrp instead"),
        ("lrp(rule=zb)", "cnn", "rule must be"),
        ("fullgrad(rescale=no)", "cnn", "rescale must be"),
    ],
)
def test_what_cannot_be_explained_raises_a_clear_error(method: str, network: str, sentence: str) -> None:
    sizes: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
    module = {
        "vit": lambda: timm.create_model("vit_tiny_patch16_224", num_classes=7, **sizes),
        "torchvision": lambda: torchvision.models.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=3),
        "cnn": plain,
    }[network]()
    before = state_of(module)
    with pytest.raises((ModelError, InputError), match=sentence) as error:
        explain(module, pictures(1).to(next(module.parameters()).dtype), method)
    assert "\n" not in str(error.value) and same(before, state_of(module))


@pytest.mark.parametrize(
    ("method", "inputs"), [("guided-backprop", 2), ("lrp", 2), ("fullgrad", 2), ("deeplift", 4)]
)
def test_one_pass_of_their_own(method: str, inputs: int) -> None:
    module = plain()
    with counting(module) as passes:
        explain(module, pictures(), method)
    assert (
        passes.batches == [2, inputs] and passes.backward == 1
    )  # the shared pass, without a gradient, first


def test_gradient_x_input_shares_the_pass_of_the_gradient() -> None:
    module = plain()
    with counting(module) as passes:
        explain(module, pictures(), ["gradient", "gradient-x-input"])
    assert passes.batches == [2] and passes.backward == 1


def test_a_carried_value_is_exactly_itself() -> None:
    values, carrier = torch.randn(64), torch.randn(64, requires_grad=True)
    result = carrying(values, (carrier, None))
    assert torch.equal(result, values) and result.requires_grad
