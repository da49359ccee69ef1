"""CAMs against vectors computed by hand, and against slow float64 twins written as the papers write them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from heatproof.errors import ModelError
from heatproof.explain.api import explain
from heatproof.explain.cams import (
    eigencam,
    eigengradcam,
    gradcam,
    gradcam_plus_plus_map,
    hirescam,
    layercam,
    leading_direction,
    ms_gradcam_plus_plus,
    xgradcam,
)
from heatproof.types import Maps, Trace, normalise


def trace_of(activation: torch.Tensor, gradient: torch.Tensor) -> Trace:
    nothing = torch.zeros(len(activation), 1)
    maps: dict[str, Any] = {"activations": {"layer": activation}, "gradients": {"layer": gradient}}
    return Trace(None, nothing, nothing, nothing, layer="layer", **maps)  # type: ignore[arg-type]


@pytest.fixture
def by_hand(papers: dict[str, Any]) -> dict[str, Any]:
    return papers["synthetic"]["cams"]


@pytest.fixture
def trace(by_hand: dict[str, Any]) -> Any:
    return trace_of(*(torch.tensor([by_hand[name]], dtype=torch.float64) for name in ("A", "g")))


def close(ours: torch.Tensor, expected: Any, atol: float = 1e-6) -> None:
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(ours[0].double(), expected, atol=atol, rtol=0)


def test_gradcam(trace: Any, by_hand: dict[str, Any]) -> None:
    close(trace.gradient.mean((2, 3)), by_hand["gradcam_w"])
    close(gradcam(trace), by_hand["gradcam_map"])


def test_gradcam_plus_plus_has_no_epsilon(trace: Any, by_hand: dict[str, Any]) -> None:
    weights = torch.tensor(by_hand["gcpp_w_exact"], dtype=torch.float64)
    expected = torch.einsum("c,chw->hw", weights, trace.activation[0]).relu()
    close(gradcam_plus_plus_map(trace.activation, trace.gradient), expected, atol=1e-7)
    with_epsilon = torch.tensor(by_hand["gcpp_w_lib"], dtype=torch.float64)
    assert (weights - with_epsilon).abs().max() > 5e-7


def test_layercam(trace: Any, by_hand: dict[str, Any]) -> None:
    close(layercam(trace), by_hand["layercam"])


def test_xgradcam(trace: Any, by_hand: dict[str, Any]) -> None:
    weights = torch.tensor(by_hand["xgrad_w"], dtype=torch.float64)
    close(xgradcam(trace), torch.einsum("c,chw->hw", weights, trace.activation[0]).relu())


def test_eigencam(trace: Any, by_hand: dict[str, Any]) -> None:
    close(eigencam(trace).flatten(1), by_hand["eigencam_uncentered_v1"])
    projection = eigencam(trace, centred=True).flatten(1)
    expected = torch.tensor(by_hand["eigen_centered_proj_up_to_sign"])
    close(projection * torch.sign(projection[0, 0] * expected[0]), expected)


@pytest.mark.parametrize(("channels", "height", "width"), [(40, 5, 7), (35, 5, 7), (9, 5, 7), (3, 20, 20)])
def test_eigen_maps_equal_numpy_s_svd(channels: int, height: int, width: int) -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(3, channels, height, width))
    trace = trace_of(torch.from_numpy(features), torch.ones(features.shape).double())
    for centred in (False, True):
        vectors, values = leading_direction(trace.activation, centred)
        for i in range(3):
            rows = features[i].reshape(channels, -1).T
            rows = rows - rows.mean(0) if centred else rows
            left, singular, _ = np.linalg.svd(rows, full_matrices=False)
            ours = vectors[i].flatten().numpy()
            assert np.abs(ours * np.sign(ours @ left[:, 0]) - left[:, 0]).max() < 1e-8
            assert values[i].item() == pytest.approx(singular[0])
    maps = eigengradcam(trace)
    assert (maps.flatten(1).amax(1) >= -maps.flatten(1).amin(1)).all()


@pytest.mark.parametrize(("second", "squarings"), [(0.3, 6), (0.9, 10), (0.9999, 18)])
def test_squaring_ends_when_one_direction_is_left(second: float, squarings: int) -> None:
    """After k squarings the second eigenvalue is second ** (2 ** (k + 1)) of the first."""
    rng = np.random.default_rng(0)
    left, _ = np.linalg.qr(rng.normal(size=(20, 20)))
    features = torch.from_numpy((left[:, :2] * [1, second] @ rng.permutation(np.eye(30))[:2]).T[None])
    with FlopCounterMode(display=False) as counter:
        (vector,), (value,) = leading_direction(features.view(1, 30, 4, 5), centred=False)
    assert np.abs(np.abs(vector.flatten().numpy()) - np.abs(left[:, 0])).max() < 1e-8
    assert value.item() == pytest.approx(1.0)
    assert counter.get_total_flops() < 2 * 20**2 * 30 + 2 * 20**3 * (squarings + 1)


@pytest.mark.parametrize("method", [eigencam, eigengradcam])
def test_eigen_maps_of_an_early_layer_cost_little(method: Any) -> None:
    features = torch.rand(1, 16, 20, 20)
    with FlopCounterMode(display=False) as counter:
        result = method(trace_of(features, features))
    assert torch.isfinite(result).all()
    assert counter.get_total_flops() < 100 * features.numel() * 16  # 400 x 400 squared twenty times: 2.6e9


def plain_gradcam_plus_plus(activations: np.ndarray, gradients: np.ndarray) -> np.ndarray:
    """Equation 19 with loops."""
    channels, height, width = activations.shape
    out = np.zeros((height, width))
    for k in range(channels):
        weight = 0.0
        for i in range(height):
            for j in range(width):
                g = gradients[k, i, j]
                denominator = 2 * g**2 + activations[k].sum() * g**3
                weight += (g**2 / denominator if denominator != 0 else 0.0) * max(g, 0.0)
        out += weight * activations[k]
    return np.maximum(out, 0)


def test_gradcam_plus_plus_equals_its_equation() -> None:
    rng = np.random.default_rng(1)
    activations, gradients = rng.random((6, 3, 4)), rng.normal(size=(6, 3, 4))
    gradients[2] = 0
    ours = gradcam_plus_plus_map(*(torch.from_numpy(x)[None] for x in (activations, gradients)))
    np.testing.assert_allclose(ours[0].numpy(), plain_gradcam_plus_plus(activations, gradients), rtol=1e-12)


def test_a_dead_layer_gives_zeros_not_nan() -> None:
    dead = trace_of(torch.zeros(1, 4, 3, 3), torch.zeros(1, 4, 3, 3))
    for method in (gradcam, layercam, xgradcam, hirescam, eigencam, eigengradcam):
        assert torch.equal(method(dead), torch.zeros(1, 3, 3))
    assert torch.equal(gradcam_plus_plus_map(dead.activation, dead.gradient), torch.zeros(1, 3, 3))


def test_maps_normalise_upsample_and_know_when_they_say_nothing() -> None:
    values = torch.stack([torch.arange(4.0).view(2, 2) - 1, torch.full((2, 2), 3.0), -torch.rand(2, 2)])
    maps = Maps("m", values, (8, 8), torch.zeros(3, dtype=torch.long))
    assert maps.degenerate.tolist() == [False, True, True]
    assert torch.equal(maps.normalised()[0], torch.tensor([[0.0, 0.0], [0.5, 1.0]]))
    pixels = maps.upsample()
    assert pixels.shape == (3, 8, 8) and (pixels.amin(), pixels.amax()) == (0, 1)
    assert torch.equal(normalise(7 * values), maps.normalised())


@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "eq. 7"])
def test_multi_scale_maps_equal_a_slow_mean(scaled: bool) -> None:
    """Eq. 7 is the mean of the layers' maps as they are; the default brings each to [0, 1] first."""
    generator, sizes = torch.Generator().manual_seed(2), {"early": (8, 8), "middle": (4, 4), "late": (2, 2)}

    def drawn(scale: float) -> dict[str, torch.Tensor]:
        return {
            name: scale * 3**k * torch.rand(2, 3, *size, generator=generator).double()
            for k, (name, size) in enumerate(sizes.items())
        }

    images, nothing = torch.zeros(2, 3, 16, 16), torch.zeros(2, 1)
    activations, gradients = drawn(1.0), drawn(0.1)
    maps: dict[str, Any] = {"activations": activations, "gradients": gradients, "scales": tuple(sizes)}
    trace = Trace(None, images, nothing, nothing, layer="late", **maps)  # type: ignore[arg-type]
    ours = ms_gradcam_plus_plus(trace, scaled=scaled)
    slow = np.zeros((2, 16, 16))
    for name, (height, _) in sizes.items():
        for i in range(2):
            a, g = activations[name][i].numpy(), gradients[name][i].numpy()
            own = np.zeros(a.shape[1:])
            for k in range(3):
                alpha = g[k] ** 2 / (2 * g[k] ** 2 + a[k].sum() * g[k] ** 3)
                own += (alpha * np.maximum(g[k], 0)).sum() * a[k]
            own = np.maximum(own, 0)
            own = (own - own.min()) / (own.max() - own.min()) if scaled else own
            at = np.clip((np.arange(16) + 0.5) * height / 16 - 0.5, 0, None)  # bilinear, by hand
            low = at.astype(int)
            high, part = np.minimum(low + 1, height - 1), at - low
            rows = own[low] * (1 - part)[:, None] + own[high] * part[:, None]
            slow[i] += (rows[:, low] * (1 - part) + rows[:, high] * part) / 3
    close(ours, slow[0], atol=1e-5)
    assert not np.allclose(slow[0], ms_gradcam_plus_plus(trace, scaled=not scaled)[0].numpy(), atol=1e-2)


def pooled_network(classes: int) -> nn.Sequential:
    """A CNN that ends with global average pooling and one linear layer."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, classes),
    ).eval()  # fmt: skip


@pytest.mark.parametrize("classes", [1, 4])
def test_cam_is_the_classifier_at_every_position(classes: int) -> None:
    """The sum over positions is the logit without its bias times their number."""
    network, images, targets = pooled_network(classes), torch.randn(2, 3, 8, 8), [0, 1]
    maps = explain(network, images, ["cam", "gradcam"], targets)
    features = network[:4](images).detach()
    for i, target in enumerate(targets):
        weights = (
            network[6].weight.detach()[target]
            if classes > 1
            else (2 * target - 1) * network[6].weight[0].detach()
        )
        expected = sum(weights[k] * features[i, k] for k in range(6))
        torch.testing.assert_close(maps["cam"].values[i], expected)
    torch.testing.assert_close(maps["cam"].values.relu(), maps["gradcam"].values * 64, rtol=1e-4, atol=1e-5)


def test_cam_restores_the_network_and_does_not_depend_on_the_batch() -> None:
    network, images = pooled_network(4).train(), torch.randn(4, 3, 8, 8)
    together, one_by_one = (
        explain(network, images, "cam", targets=2, batch_size=size)["cam"].values for size in (4, 1)
    )
    torch.testing.assert_close(together, one_by_one)
    assert network.training and all(p.requires_grad and p.grad is None for p in network.parameters())
    assert not any(part._forward_hooks for part in network.modules())


def test_cam_ignores_hidden_layers_with_fewer_outputs_than_classes() -> None:
    narrow = [nn.Conv2d(6, 2, 1), nn.ReLU(), nn.Conv2d(2, 6, 1), nn.ReLU()]
    network = nn.Sequential(*pooled_network(4)[:4], *narrow, *pooled_network(4)[4:]).eval()
    images = torch.randn(1, 3, 8, 8)
    expected = torch.einsum("c,bchw->bhw", network[-1].weight[3], network[:8](images)).detach()
    torch.testing.assert_close(explain(network, images, "cam", 3)["cam"].values, expected)


def test_cam_refuses_another_head_in_one_sentence() -> None:
    deep = nn.Sequential(*pooled_network(6), nn.ReLU(), nn.Linear(6, 3)).eval()
    with pytest.raises(
        ModelError, match=r"needs global average pooling and one linear layer.*; use gradcam instead"
    ):
        explain(deep, torch.randn(1, 3, 8, 8), "cam")


def test_smooth_gradcam_plus_plus_averages_the_powers_of_noisy_gradients() -> None:
    network, images = pooled_network(3).double(), torch.randn(2, 3, 8, 8).double()
    network = nn.Sequential(*network[:4], nn.Flatten(), nn.Linear(384, 3)).double().eval()
    result = explain(network, images, "smooth-gradcam++(samples=4, noise=0.2)", [2, 0], seed=5)
    for i, target in enumerate((2, 0)):
        image = images[i]
        deviation = 0.2 * (image.max() - image.min())
        powers = torch.zeros(3, 6, 8, 8, dtype=torch.float64)
        for sample in range(4):
            noise = np.random.default_rng((5, sample)).standard_normal(image.shape, dtype=np.float32)
            features = (
                network[:4]((image + deviation * torch.from_numpy(noise))[None]).detach().requires_grad_()
            )
            (slope,) = torch.autograd.grad(network[4:](features)[0, target], features)
            for p in range(3):
                powers[p] += slope[0] ** (p + 1) / 4
        features = network[:4](image[None])[0].detach()
        expected = torch.zeros(8, 8, dtype=torch.float64)
        for k in range(6):
            first, second, third = powers[:, k]
            below = 2 * second + features[k].sum() * third
            alpha = torch.where(below == 0, 0.0, second / torch.where(below == 0, 1.0, below))
            expected += (alpha * first.clamp(min=0)).sum() * features[k]
        got = result["smooth-gradcam++(samples=4, noise=0.2)"].values[i]
        torch.testing.assert_close(got, expected.clamp(min=0).float(), rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_integrated_scorecam_averages_over_growing_masks() -> None:
    network, images = pooled_network(3), torch.randn(2, 3, 8, 8)
    call = "scorecam(channels=6, integrate=4)"
    result = explain(network, images, [call, "scorecam(channels=6)"], [1, 2])
    features = network[:4](images).detach()
    for i, target in enumerate((1, 2)):
        blank = network(torch.zeros(1, 3, 8, 8)).softmax(1)[0, target]
        expected = torch.zeros(8, 8)
        for k in range(6):
            mask = features[i, k]
            mask = (mask - mask.min()) / (mask.max() - mask.min())
            gains = [
                network(images[i : i + 1] * mask * n / 4).softmax(1)[0, target] - blank for n in (1, 2, 3, 4)
            ]
            expected += float(sum(gains) / 4) * features[i, k]
        torch.testing.assert_close(result[call].values[i], expected.relu(), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(result[call].values, result["scorecam(channels=6)"].values)
