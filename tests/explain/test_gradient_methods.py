"""Gradient methods against captum, saliency, scipy and slow twins.

Networks are float64: at float32 a ReLU that flips by rounding moves a gradient by more than the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
from captum.attr import IntegratedGradients
from scipy import ndimage
from torch import Tensor, nn

from heatproof.errors import InputError
from heatproof.explain.api import explain
from heatproof.explain.baselines import blur_matrices, gaussian_blur
from heatproof.images.preprocess import Preprocess
from heatproof.models.model import Model
from heatproof.types import normalise

CLOSE: dict[str, Any] = {"atol": 1e-4, "rtol": 0.0}


def small_net(activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), activation(), nn.Conv2d(8, 8, 3, 2, 1), activation(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5),
    ).double().eval()  # fmt: skip


def some_images(count: int = 2, size: tuple[int, int] = (24, 20), seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, 3, *size, generator=generator, dtype=torch.float64)
    return gaussian_blur(noise, 1.5) * 4


def resnet() -> nn.Module:
    torch.manual_seed(2)
    return torchvision.models.resnet18(num_classes=7).double().eval()


def vit() -> nn.Module:
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
    return timm.create_model("vit_tiny_patch16_224", num_classes=7, **sizes).double().eval()


@contextmanager
def counted(module: nn.Module) -> Iterator[list[int]]:
    """The batch sizes of all forward passes made inside."""
    sizes: list[int] = []
    handle = module.register_forward_pre_hook(lambda _m, inputs: sizes.append(len(inputs[0])))
    try:
        yield sizes
    finally:
        handle.remove()


def gradient_at(net: nn.Module, image: Tensor, target: int) -> Tensor:
    point = image[None].clone().requires_grad_()
    return torch.autograd.grad(net(point)[0, target], point)[0][0]


def for_saliency(net: nn.Module) -> Callable[..., dict[str, np.ndarray]]:
    """The model as the saliency package calls it: pixels "b h w c" in, their gradients out."""

    def call(pixels: Any, call_model_args: Any = None, expected_keys: Any = None) -> dict[str, np.ndarray]:
        inputs = torch.tensor(np.asarray(pixels)).permute(0, 3, 1, 2).requires_grad_()
        (gradient,) = torch.autograd.grad(net(inputs)[:, call_model_args].sum(), inputs)
        return {"INPUT_OUTPUT_GRADIENTS": gradient.permute(0, 2, 3, 1).numpy()}

    return call


def assert_same_maps(maps: Any, attributions: Tensor) -> None:
    """Attributions "b c H W" of a reference, reduced as the spec says."""
    torch.testing.assert_close(maps.normalised(), normalise(attributions.abs().sum(1)), **CLOSE)
    largest = float(attributions.sum(1).abs().max())
    torch.testing.assert_close(maps.signed / largest, (attributions.sum(1) / largest).float(), **CLOSE)


# The blur


@pytest.mark.parametrize("sigma", [0.0, 0.1, 0.7, 3.0, 10.0, 50.0])
def test_blur_is_scipys(sigma: float) -> None:
    images = some_images(2, (17, 30))
    expected = ndimage.gaussian_filter(images.numpy(), (0, 0, sigma, sigma)) if sigma else images.numpy()
    np.testing.assert_allclose(gaussian_blur(images, sigma).numpy(), expected, atol=1e-12)
    single = gaussian_blur(images.float(), sigma)
    assert single.dtype == torch.float32
    np.testing.assert_allclose(single.numpy(), expected, atol=1e-5)
    matrix = blur_matrices(30, [sigma])[0].numpy()
    expected = ndimage.gaussian_filter1d(np.eye(30), sigma, mode="constant") if sigma else np.eye(30)
    np.testing.assert_allclose(matrix, expected, atol=1e-12)


def test_blur_refuses_what_it_cannot_do() -> None:
    with pytest.raises(InputError, match="sigma"):
        gaussian_blur(torch.zeros(1, 4, 4), -1.0)


# Gradient and SmoothGrad


def test_gradient_is_the_gradient() -> None:
    net, images = small_net(), some_images()
    expected = torch.stack([gradient_at(net, image, 2) for image in images])
    assert_same_maps(explain(net, images, "gradient", targets=2)["gradient"], expected)


def test_gradient_of_class_zero_of_a_one_logit_model_goes_through_minus_z() -> None:
    net = nn.Sequential(small_net(), nn.Linear(5, 1).double())
    images = some_images()
    down, up = (explain(net, images, "gradient", targets=t)["gradient"].signed for t in (0, 1))
    torch.testing.assert_close(down, -up)


@pytest.mark.parametrize("squared", [False, True])
def test_smoothgrad_is_its_slow_twin(squared: bool) -> None:
    net, images = small_net(), some_images()
    total = torch.zeros_like(images)
    for i, image in enumerate(images):
        deviation = 0.15 * float(image.max() - image.min())
        for sample in range(9):
            drawn = np.random.default_rng((4, sample)).standard_normal(image.shape, dtype=np.float32)
            gradient = gradient_at(net, image + deviation * torch.from_numpy(drawn).double(), 1)
            total[i] += (gradient**2 if squared else gradient) / 9
    method = f"smoothgrad(samples=9, squared={squared})"
    assert_same_maps(explain(net, images, method, targets=1, seed=4)[method], total)


# Integrated gradients


@pytest.mark.parametrize(("build", "size"), [(resnet, 32), (vit, 32)])
def test_integrated_gradients_are_captums(build: Callable[[], nn.Module], size: int) -> None:
    net, images = build(), some_images(2, (size, size))
    expected = IntegratedGradients(net).attribute(images, target=3, n_steps=10)
    assert_same_maps(explain(net, images, "ig(steps=10)", targets=3)["ig(steps=10)"], expected)


def test_default_integrated_gradients_are_captums_default() -> None:
    net, images = small_net(), some_images()
    assert_same_maps(
        explain(net, images, "ig", targets=3)["ig"], IntegratedGradients(net).attribute(images, target=3)
    )


@pytest.mark.parametrize("rule", ["left", "right", "middle", "trapezoid"])
def test_other_rules_are_captums(rule: str) -> None:
    net, images = small_net(), some_images()
    expected = IntegratedGradients(net).attribute(images, target=3, n_steps=12, method=f"riemann_{rule}")
    maps = explain(net, images, [f"ig(steps=12, rule='{rule}')"], targets=3)
    # captum's trapezoid sums to (n - 1) / n of the integral; ours to all of it.
    scale = 12 / 11 if rule == "trapezoid" else 1
    assert_same_maps(next(iter(maps.values())), expected * scale)


def test_integrated_gradients_hold_the_values_of_captums_own_test() -> None:
    class TwoPixels(nn.Module):
        """f(a, b) = relu(relu(a) - 1 - relu(b)); at (3, 1) the attributions are 1.5 and -0.5."""

        def forward(self, images: Tensor) -> Tensor:
            first, second = images.flatten(1).relu().unbind(1)
            return (first - 1 - second).relu()[:, None]

    image = torch.tensor([[[[3.0, 1.0]]]])
    maps = explain(TwoPixels(), image, ["ig(steps=1500, rule='middle')"], targets=1)
    (result,) = maps.values()
    torch.testing.assert_close(result.signed, torch.tensor([[[1.5, -0.5]]]), atol=1e-2, rtol=0)
    torch.testing.assert_close(result.values, torch.tensor([[[1.5, 0.5]]]), atol=1e-2, rtol=0)


def test_integrated_gradients_add_up_from_every_baseline() -> None:
    net, images, preprocess = (
        small_net(nn.Tanh),
        some_images(),
        Preprocess(mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4)),
    )
    noise = np.random.default_rng((6, 0)).standard_normal(images.shape[1:], dtype=np.float32)
    blurred = ndimage.gaussian_filter(images.numpy(), (0, 0, 10, 10), mode="reflect")
    baselines = {
        "zero": torch.zeros_like(images),
        "black": torch.tensor([-2.5, -0.4 / 0.3, -0.75], dtype=torch.float64)
        .view(1, 3, 1, 1)
        .expand_as(images),
        "blur": torch.from_numpy(blurred),
        "noise": torch.from_numpy(noise).double().expand_as(images),
    }
    model = Model(net, preprocess=preprocess)
    for name, baseline in baselines.items():
        method = f"ig(baseline='{name}')"
        signed = explain(model, images, [method], targets=1, seed=6)[method].signed
        with torch.no_grad():
            change = net(images)[:, 1] - net(baseline)[:, 1]
        torch.testing.assert_close(signed.sum((1, 2)), change.float(), atol=1e-5, rtol=1e-4)


# Blur IG and Guided IG


def test_blur_ig_is_saliencys() -> None:
    from saliency.core.blur_ig import BlurIG

    net, images = small_net(), some_images()
    references = [
        BlurIG().GetMask(image.permute(1, 2, 0).numpy(), for_saliency(net), 3, batch_size=25)
        for image in images
    ]
    expected = torch.from_numpy(np.stack(references)).permute(0, 3, 1, 2)
    assert_same_maps(explain(net, images, "blur-ig", targets=3)["blur-ig"], expected)


@pytest.fixture
def old_quantile(monkeypatch: pytest.MonkeyPatch) -> None:
    """saliency calls numpy.quantile by a keyword that NumPy 2 has renamed."""
    quantile = np.quantile

    def renamed(values: Any, q: float, interpolation: str = "linear") -> Any:
        return quantile(values, q, method=interpolation)  # type: ignore[call-overload]

    monkeypatch.setattr(np, "quantile", renamed)


@pytest.mark.parametrize(
    "options", [{}, {"fraction": 0.1, "max_dist": 0.3}, {"fraction": 1.0, "max_dist": 1.0}]
)
def test_guided_ig_is_saliencys(options: dict[str, float], old_quantile: None) -> None:
    from saliency.core.guided_ig import GuidedIG

    net, images = small_net(), some_images(2, (12, 10))
    images[1] = 0  # an image that is its own baseline has nothing to explain
    steps = 40 if options else 200
    references = [
        GuidedIG().GetMask(image.permute(1, 2, 0).numpy(), for_saliency(net), 3, x_steps=steps, **options)
        for image in images
    ]
    expected = torch.from_numpy(np.stack(references)).permute(0, 3, 1, 2)
    method = f"guided-ig({', '.join(f'{k}={v}' for k, v in {'steps': steps, **options}.items())})"
    maps = explain(net, images, [method], targets=3)[method]
    assert_same_maps(maps, expected)
    assert maps.degenerate.tolist() == [False, True]


def test_guided_ig_without_room_to_stray_is_integrated_gradients() -> None:
    net, images = small_net(), some_images()
    maps = explain(net, images, ["guided-ig(steps=8, max_dist=0.0)", "ig(steps=8, rule='left')"], targets=3)
    straight, reference = maps.values()
    torch.testing.assert_close(straight.signed, reference.signed, atol=1e-6, rtol=1e-5)


# What it costs, and what it must not depend on

PATHS = ["smoothgrad(samples=7)", "ig(steps=7)", "blur-ig(steps=7)"]
ALL = [
    "gradient",
    *PATHS,
    "guided-ig(steps=6)",
    "ig(steps=5, baseline='noise')",
    "ig(steps=5, baseline='blur')",
]


@pytest.mark.parametrize("method", PATHS)
def test_points_of_all_images_share_full_batches(method: str) -> None:
    net = small_net()
    with counted(net) as sizes:
        explain(net, some_images(3), [method], batch_size=4)
    assert len(sizes) == math.ceil(7 * 3 / 4) + 1
    assert max(sizes) == 4


def test_gradient_costs_the_shared_pass_and_guided_ig_one_pass_per_step() -> None:
    net = small_net()
    with counted(net) as sizes:
        explain(net, some_images(3), "gradient")
    assert sizes == [3]
    with counted(net) as sizes:
        explain(net, some_images(3), "guided-ig(steps=20)")
    assert sizes == [3] * 21


def test_neither_batch_size_nor_order_matters_and_seeds_repeat() -> None:
    net, images = small_net(), some_images(3, (12, 10))
    whole = explain(net, images, ALL, targets=1, seed=5)
    others = {
        "one by one": explain(net, images, ALL, targets=1, seed=5, batch_size=1),
        "in twos": explain(net, images, ALL, targets=1, seed=5, batch_size=2),
        "backwards": explain(net, images.flip(0), ALL, targets=1, seed=5),
        "again": explain(net, images, ALL, targets=1, seed=5),
    }
    for how, maps in others.items():
        for method in ALL:
            result = maps[method].signed.flip(0) if how == "backwards" else maps[method].signed
            torch.testing.assert_close(
                result, whole[method].signed, atol=1e-6, rtol=1e-5, msg=f"{method} {how}"
            )
    other = explain(net, images, ALL, targets=1, seed=6)
    changed = {m for m in ALL if not torch.equal(other[m].values, whole[m].values)}
    assert changed == {"smoothgrad(samples=7)", "ig(steps=5, baseline='noise')"}


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_methods_work_where_gradients_are_off(context: Callable[[], Any]) -> None:
    net, images = small_net().float(), some_images().float()
    expected = explain(net, images, ALL, targets=1)
    with context():
        repeated = explain(net, images.clone(), ALL, targets=1)
    for method in ALL:
        torch.testing.assert_close(repeated[method].values, expected[method].values)


@pytest.mark.parametrize(
    ("method", "word"),
    [
        ("smoothgrad(samples=0)", "samples"),
        ("ig(steps=2.5)", "steps"),
        ("ig(baseline='white')", "baseline"),
        ("ig(rule='simpson')", "rule"),
        ("blur-ig(sigma=0)", "sigma"),
        ("guided-ig(fraction=2)", "fraction"),
    ],
)
def test_bad_options_get_a_clear_error(method: str, word: str) -> None:
    with pytest.raises(InputError, match=word):
        explain(small_net(), some_images(), [method])


def test_black_needs_the_channels_of_the_preprocessing() -> None:
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(InputError, match="black"):
        explain(Model(net, preprocess=Preprocess()), torch.rand(1, 1, 8, 8), ["ig(baseline='black')"])
