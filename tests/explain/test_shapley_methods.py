"""Occlusion, gradient SHAP and kernel SHAP against captum, exact Shapley values and axioms."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from captum.attr import GradientShap, KernelShap, Occlusion, ShapleyValues
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from conftest import counting, small_cnn
from heatproof.errors import InputError
from heatproof.explain.api import explain
from heatproof.explain.baselines import segments_of
from heatproof.explain.masking import draw_sets, shapley
from heatproof.models.model import as_model


def curved(seed: int = 1) -> nn.Module:
    """Smooth, and far from linear: what is switched off matters in pairs."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, 2, 1), nn.Tanh(), nn.Conv2d(6, 6, 3, 2, 1), nn.Tanh(), nn.AdaptiveAvgPool2d(3),
        nn.Flatten(), nn.Linear(54, 12), nn.Tanh(), nn.Linear(12, 4),
    ).double().eval()  # fmt: skip


class Probabilities(nn.Module):
    """What our perturbing methods look at, for libraries that look at the output as it is."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, images: Tensor) -> Tensor:
        return self.module(images).softmax(1)


def pictures(count: int = 2, size: int = 24, seed: int = 0) -> Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize(("window", "stride", "side"), [(6, 3, 24), (7, 5, 24), (8, 8, 24), (5, 4, 23)])
def test_occlusion_as_captum_has_it(window: int, stride: int, side: int) -> None:
    module, images, targets = curved(), pictures(size=side), torch.tensor([0, 3])
    theirs = Occlusion(Probabilities(module)).attribute(
        images, (3, window, window), (3, stride, stride), baselines=0, target=targets
    )
    method = f"occlusion(window={window}, stride={stride})"
    result = explain(module, images, method, targets)[method].values
    torch.testing.assert_close(result, theirs[:, 0].float(), rtol=1e-5, atol=1e-8)


def test_occlusion_one_window_at_a_time() -> None:
    """Shares of the sides, a picture that is not square, a window that is cut off at the edge."""
    module, images = curved(), torch.randn(1, 3, 20, 27, generator=torch.Generator().manual_seed(3)).double()
    total, times = np.zeros((20, 27)), np.zeros((20, 27))
    with torch.no_grad():
        whole = module(images).softmax(1)[0, 2]
        for top, left in itertools.product(range(0, 17, 2), range(0, 22, 3)):
            hidden = images.clone()
            hidden[:, :, top : top + 5, left : left + 7] = 0
            total[top : top + 5, left : left + 7] += float(whole - module(hidden).softmax(1)[0, 2])
            times[top : top + 5, left : left + 7] += 1
    method = "occlusion(window=0.25, stride=0.1)"  # 5 and 2 of 20 pixels, 7 and 3 of 27
    result = explain(module, images, method, 2)[method].values[0].numpy()
    np.testing.assert_allclose(result, total / times, rtol=1e-4, atol=1e-8)


def test_occlusion_passes() -> None:
    module = curved()
    with counting(module) as passes:
        explain(module, pictures(), "occlusion(window=8, stride=8)", batch_size=6)
    assert passes.batches == [2, 6, 6, 6] and passes.backward == 0  # 2 pictures of 9 windows


def test_gradient_shap_as_captum_has_it() -> None:
    """Both draw; with many samples they meet, each within a few of its standard errors."""
    module, images, target = curved(), pictures(1), 2
    torch.manual_seed(0)
    baselines = torch.randn(4000, 3, 24, 24).double()
    inputs = images.clone().requires_grad_()
    theirs = GradientShap(module).attribute(inputs, baselines, n_samples=2000, stdevs=0.0, target=target)
    method = "gradient-shap(samples=2000)"
    result = explain(module, images, method, target)[method].signed
    expected = theirs.sum(1).float().detach()
    error = (result - expected).norm() / expected.norm()
    assert float(error) < 0.1
    other = explain(module, images, "gradient-shap(samples=20)", target)["gradient-shap(samples=20)"].signed
    assert float((other - expected).norm() / expected.norm()) > 2 * float(error)


def test_gradient_shap_from_one_image_is_integrated_gradients() -> None:
    module, images = curved(), pictures()
    methods = ["gradient-shap(samples=400, baseline=blur)", "integrated-gradients(baseline=blur)"]
    result, expected = (maps.signed for maps in explain(module, images, methods, 1).values())
    assert float((result - expected).abs().max() / expected.abs().max()) < 0.01


def test_gradient_shap_with_noise_still_sums_to_about_the_difference() -> None:
    module, images = curved(), pictures()
    method = "gradient-shap(samples=300, baseline=zero, noise=0.02)"
    with torch.no_grad():
        gap = (module(images) - module(torch.zeros_like(images)))[:, 1]
    total = explain(module, images, method, 1)[method].signed.sum((1, 2)).double()
    torch.testing.assert_close(total, gap, rtol=0.1, atol=0.02)


def exact_shapley(value: Any, count: int) -> np.ndarray:
    """The mean over all orders of what each player adds."""
    phi = np.zeros(count)
    for order in itertools.permutations(range(count)):
        present: tuple[int, ...] = ()
        for player in order:
            phi[player] += value((*present, player)) - value(present)
            present = (*present, player)
    return phi / math.factorial(count)


@settings(max_examples=15, deadline=None)
@given(st.integers(2, 5), st.integers(0, 10_000))
def test_all_sets_give_exact_shapley_values(count: int, seed: int) -> None:
    table = np.random.default_rng(seed).standard_normal(2**count)
    sets, weights = draw_sets(count, 2**count, 0)
    codes = (sets * 2 ** np.arange(count)).sum(1)
    gains = torch.from_numpy(table[codes] - table[0])[None]
    total = torch.tensor([table[-1] - table[0]])
    used = torch.ones(1, count, dtype=torch.bool)
    result = shapley(torch.from_numpy(sets)[None], gains, torch.from_numpy(weights)[None], total, used)[0]
    expected = exact_shapley(lambda who: table[sum(2**player for player in who)], count)
    np.testing.assert_allclose(result.numpy(), expected, atol=1e-6)


def test_kernel_shap_is_exact_where_all_sets_fit_as_captum_has_it() -> None:
    module, targets = curved(), torch.tensor([1, 2])
    images = nn.functional.interpolate(pictures(size=2, seed=5), 24) + 0.05 * pictures()  # four fields
    cut = segments_of(as_model(module), images, "slic", 4, 10.0, 0)
    assert (cut.flatten(1).amax(1) == 3).all()
    method = "kernel-shap(samples=200, segment_count=4)"
    result = explain(module, images, method, targets)[method].values
    for row in range(2):
        image, mask = images[row : row + 1], cut[row : row + 1, None].expand(1, 3, -1, -1).contiguous()
        forward = Probabilities(module)
        exact = ShapleyValues(forward).attribute(image, feature_mask=mask, target=int(targets[row]))
        torch.testing.assert_close(result[row], exact[0, 0].float(), rtol=1e-4, atol=1e-7)
        torch.manual_seed(0)
        kernel = KernelShap(forward).attribute(
            image, feature_mask=mask, target=int(targets[row]), n_samples=400, perturbations_per_eval=100
        )
        torch.testing.assert_close(result[row], kernel[0, 0].float(), rtol=0, atol=1e-4)


def test_drawn_sets_are_complements_with_even_sizes() -> None:
    sets, weights = draw_sets(20, 381, 7)
    assert len(sets) == 381 and not sets[0].any() and weights[0] == 0
    np.testing.assert_array_equal(sets[1::2] + sets[2::2], 1)
    sizes = np.bincount(sets[1::2].sum(1), minlength=21)
    assert sizes[0] == sizes[20] == 0 and sizes[1:20].min() == sizes[1:20].max() == 10
    on = sets[1:].sum(1)
    np.testing.assert_allclose(weights[1:], 1 / (on * (20 - on)))


def test_drawing_by_leverage_in_pairs_is_nearer_than_drawing_at_random() -> None:
    """Twelve players who matter in pairs, 200 samples; the exact values from all 4,094 sets."""
    random = np.random.default_rng(3)
    single, pairs = random.standard_normal(12), random.standard_normal((12, 12)) / 3

    def value(sets: np.ndarray) -> np.ndarray:
        return sets @ single + np.einsum("mi,ij,mj->m", sets, pairs, sets)

    def fitted(sets: np.ndarray, weights: np.ndarray) -> np.ndarray:
        full = float(value(np.ones((1, 12)))[0])
        arguments = (
            torch.from_numpy(value(sets))[None],
            torch.from_numpy(weights)[None],
            torch.tensor([full]),
        )
        used = torch.ones(1, 12, dtype=torch.bool)
        return shapley(torch.from_numpy(sets)[None], *arguments, used)[0].numpy()

    exact = fitted(*draw_sets(12, 5000, 0))
    errors: dict[str, list[float]] = {"ours": [], "plain": []}
    for seed in range(10):
        errors["ours"].append(float(np.abs(fitted(*draw_sets(12, 101, seed)) - exact).mean()))
        coin = np.random.default_rng(seed).integers(0, 2, (100, 12))
        on = coin.sum(1)
        kernel = [11 / (math.comb(12, k) * k * (12 - k)) * 2**12 if 0 < k < 12 else 0.0 for k in on]
        errors["plain"].append(float(np.abs(fitted(coin, np.array(kernel)) - exact).mean()))
    assert np.mean(errors["ours"]) < 0.5 * np.mean(errors["plain"])


def test_kernel_shap_sums_to_the_difference_whatever_is_drawn() -> None:
    module, images = curved(), pictures()
    method = "kernel-shap(samples=60, segment_count=16)"
    result = explain(module, images, method, 3)[method].values
    cut = segments_of(as_model(module), images, "slic", 16, 10.0, 0)
    with torch.no_grad():
        gap = (module(images).softmax(1) - module(torch.zeros_like(images)).softmax(1))[:, 3]
    for row in range(2):
        values = torch.stack([result[row][cut[row] == k][0] for k in range(int(cut[row].max()) + 1)])
        torch.testing.assert_close(values.double().sum(), gap[row], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        ("occlusion(window=40)", "no window above the image's 24 pixels"),
        ("occlusion(window=4, stride=6)", "stride <= window"),
        ("occlusion(window=0)", "stride <= window"),
        ("kernel-shap(samples=2)", "at least 3"),
        ("kernel-shap(baseline=mean)", "unknown baseline 'mean'"),
        ("gradient-shap(noise=-1)", "must not be negative"),
        ("gradient-shap(samples=0)", "at least 1"),
    ],
)
def test_bad_options_raise_a_clear_error(method: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as error:
        explain(small_cnn().double(), pictures(1), method)
    assert "\n" not in str(error.value)
