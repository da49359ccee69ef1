"""SSIM against scikit-image and its formula, COSE against the paper's table."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import pearsonr
from skimage.metrics import structural_similarity
from torch.nn.functional import interpolate

from heatproof.errors import InputError
from heatproof.metrics.agreement import ssim, ssim_reasons
from heatproof.metrics.stability import cose, cose_map, cose_split, overall, ssim_to_final
from heatproof.types import Maps

ROW, COLUMN = np.mgrid[:16, :16]
A = (ROW + COLUMN) / 30
PATTERNS = {"A": A, "C": np.fliplr(A), "D": 0.5 * A + 0.1, "E": ((ROW // 4 + COLUMN // 4) % 2).astype(float)}
SETTINGS = settings(max_examples=40, deadline=None)


@pytest.mark.parametrize("pair", ["AC", "AD", "AE", "AA"])
def test_golden_vectors(papers: dict[str, Any], pair: str) -> None:
    golden = papers["synthetic"]["ssim_16x16"]
    first, second = (PATTERNS[name].copy() for name in pair)
    local, whole = (
        golden["skimage_win5_uniform_R1"][pair],
        golden["paper_eq2_global_C1=.01_C2=.03_popvar"][pair],
    )
    assert ssim(first, second).item() == pytest.approx(local, abs=1e-7)
    assert ssim(first, second, mode="eq2").item() == pytest.approx(whole, abs=1e-7)


def test_two_constant_maps(papers: dict[str, Any]) -> None:
    golden = papers["synthetic"]["ssim_16x16"]["const.2_vs_const.8"]
    low, high = np.full((16, 16), 0.2), np.full((16, 16), 0.8)
    assert ssim(low, high, data_range=1).item() == pytest.approx(golden["win5_R1"], abs=1e-7)
    assert ssim(low, high, "eq2").item() == pytest.approx(golden["eq2"], abs=1e-7)
    assert golden["win5_R0"] == "nan" and torch.isnan(ssim(low, high))
    assert "constant" in ssim_reasons(low, high)[0]
    assert ssim_reasons(low, high, "eq2") == [""]
    assert ssim(low, PATTERNS["E"]).item() == pytest.approx(scikit(low, PATTERNS["E"]), abs=1e-6)


def scikit(a: np.ndarray, b: np.ndarray) -> float:
    """In float64: scikit-image's float32 result is itself off by up to 1e-6."""
    reach = float(max(np.ptp(a), np.ptp(b)))
    return structural_similarity(a.astype(np.float64), b.astype(np.float64), win_size=5, data_range=reach)


def some_pairs(kind: str, n: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    if kind == "upsampled":  # flat windows, where float32 would lose the variance
        a, b = rand(n, 1, 7, 7), rand(n, 1, 7, 7)
        size = (224, 224)
        return tuple(interpolate(m, size=size, mode="bilinear")[:, 0] for m in (a, a + 0.1 * b))  # type: ignore
    a, b = rand(n, 61, 84), rand(n, 61, 84)
    if kind == "sparse":
        return (a > 0.99).float(), 7 * (b > 0.98).float()
    if kind == "offset":
        return a + 100, a + 0.01 * b + 100
    if kind == "opposite":
        return a, 1 - a
    return a, b


@pytest.mark.parametrize("kind", ["noise", "upsampled", "sparse", "offset", "opposite"])
def test_equals_scikit_image(kind: str) -> None:
    first, second = some_pairs(kind)
    expected = [scikit(a, b) for a, b in zip(first.numpy(), second.numpy(), strict=True)]
    assert ssim(first, second).tolist() == pytest.approx(expected, abs=1e-6)
    assert kind != "opposite" or max(expected) < 0


def twin(x: np.ndarray, y: np.ndarray, c1: float, c2: float, sample: bool) -> float:
    """Eq. 2 of one window, in float64."""
    x, y = x.astype(np.float64).ravel(), y.astype(np.float64).ravel()
    n = len(x) - 1 if sample else len(x)
    variances = ((x - x.mean()) ** 2).sum() / n, ((y - y.mean()) ** 2).sum() / n
    covariance = ((x - x.mean()) * (y - y.mean())).sum() / n
    top = (2 * x.mean() * y.mean() + c1) * (2 * covariance + c2)
    return top / ((x.mean() ** 2 + y.mean() ** 2 + c1) * (sum(variances) + c2))


def test_masked_ssim_equals_the_slow_twin() -> None:
    first, second = (m[0, :12, :14].numpy() for m in some_pairs("noise"))
    mask = np.zeros((12, 14), bool)
    mask[:7, 3:9] = True
    reach = max(np.ptp(first), np.ptp(second))
    windows = [
        twin(first[i - 2 : i + 3, j - 2 : j + 3], second[i - 2 : i + 3, j - 2 : j + 3], *constants, True)
        for i, j in np.argwhere(mask)
        if 2 <= i < 10 and 2 <= j < 12
        for constants in [((0.01 * reach) ** 2, (0.03 * reach) ** 2)]
    ]
    assert ssim(first, second, mask=mask).item() == pytest.approx(np.mean(windows), abs=1e-7)
    whole = twin(first[mask], second[mask], 0.01, 0.03, False)
    assert ssim(first, second, "eq2", mask=mask).item() == pytest.approx(whole, abs=1e-7)


@pytest.mark.parametrize("mode", ["local5", "eq2"])
def test_a_full_mask_changes_nothing_and_an_empty_one_is_undefined(mode: str) -> None:
    first, second = some_pairs("noise")
    masks = torch.ones(4, 61, 84, dtype=torch.bool)
    assert torch.allclose(ssim(first, second, mode, masks), ssim(first, second, mode), atol=1e-7)
    masks[2] = False
    scores = ssim(first, second, mode, masks)
    assert torch.isnan(scores).tolist() == [False, False, True, False]
    reasons = ssim_reasons(first, second, mode, masks)
    assert "mask" in reasons[2] and reasons[:2] == ["", ""]


PAIRS = arrays(np.float32, (2, 3, 6, 7), elements=st.floats(0, 1, width=32))


@SETTINGS
@given(PAIRS, st.sampled_from(["local5", "eq2"]), st.permutations(range(3)))
def test_bounds_symmetry_order_and_batch(pair: np.ndarray, mode: str, order: list[int]) -> None:
    a, b = torch.from_numpy(pair)
    score = ssim(a, b, mode)
    defined = score[~torch.isnan(score)]
    assert (defined.abs() <= 1 + 1e-6).all()
    assert torch.equal(torch.isnan(score), torch.tensor([bool(r) for r in ssim_reasons(a, b, mode)]))
    close: dict[str, Any] = {"atol": 1e-6, "equal_nan": True}
    assert torch.allclose(ssim(b, a, mode), score, **close)
    assert torch.allclose(ssim(a[order], b[order], mode), score[order], **close)
    assert torch.allclose(torch.stack([ssim(x, y, mode) for x, y in zip(a, b, strict=True)]), score, **close)
    assert torch.allclose(torch.nan_to_num(ssim(a, a, mode), 1), torch.ones(3), atol=1e-6)


@SETTINGS
@given(PAIRS, st.integers(-20, 20))
def test_local5_does_not_depend_on_scale(pair: np.ndarray, exponent: int) -> None:
    a, b = torch.from_numpy(np.round(pair, 3))
    assert torch.allclose(ssim(2.0**exponent * a, 2.0**exponent * b), ssim(a, b), atol=1e-6, equal_nan=True)


def test_one_map_against_many_and_native_maps() -> None:
    first, second = some_pairs("noise")
    expected = torch.stack([ssim(first[0], other) for other in second])
    assert torch.allclose(ssim(first[0], second), expected)
    assert torch.allclose(ssim(second, first[0]), expected)
    native = Maps("m", torch.rand(2, 7, 7), (28, 28), torch.zeros(2))
    assert torch.allclose(ssim(native, native), torch.ones(2))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((torch.rand(6, 6), torch.rand(6, 7)), "maps of one shape"),
        ((torch.rand(2, 6, 6), torch.rand(3, 6, 6)), "maps of one shape"),
        ((torch.rand(4, 9), torch.rand(4, 9)), "at least 5x5"),
        ((torch.rand(6, 6), torch.rand(6, 6), "local7"), "unknown mode"),
        ((torch.rand(6, 6), torch.full((6, 6), torch.nan)), "NaN or infinite"),
        ((torch.full((6, 6), torch.inf), torch.rand(6, 6)), "NaN or infinite"),
        ((torch.rand(2, 6, 6), torch.rand(2, 6, 6), "local5", torch.ones(3, 6, 6)), "mask must be one mask"),
        ((torch.rand(6), torch.rand(6)), "'h w' or 'b h w'"),
    ],
)
def test_bad_maps_raise_a_clear_error(arguments: tuple[Any, ...], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as error:
        ssim(*arguments)
    assert "\n" not in str(error.value)


def test_cose_is_the_harmonic_mean(papers: dict[str, Any]) -> None:
    score = cose([0.6, 0.8], [0.3, 0.5])
    assert (score.consistency, score.sensitivity) == pytest.approx((0.7, 0.6))
    assert score.value == pytest.approx(papers["synthetic"]["cose"]["c.7_s.6"]["harmonic"], abs=1e-6)
    assert (score.n_same, score.n_changed, score.reason) == (2, 2, "")
    assert cose(torch.tensor([1.0]), torch.tensor([0.0])).value == pytest.approx(100)


def test_published_overall_row(papers: dict[str, Any]) -> None:
    table = papers["cose"]
    columns = list(zip(*(values for _, _, values in table["rows"]), strict=True))
    variants = [table["weights"][model] for _, model, _ in table["rows"]]
    weighted = [round(overall(column, variants), 2) for column in columns]
    plain = [round(overall(column, np.ones(len(column))), 2) for column in columns]
    published = table["overall_pub"]
    assert sum(a == b for a, b in zip(weighted, published, strict=True)) == 7
    assert sum(a == b for a, b in zip(plain, published, strict=True)) == 0


def test_undefined_cose() -> None:
    assert math.isnan(cose([], [0.5]).value) and "the same" in cose([], [0.5]).reason
    assert math.isnan(cose([0.5], []).value) and "another" in cose([0.5], []).reason
    both = cose([math.nan], [])
    assert math.isnan(both.value) and both.n_undefined == 1 and "and none with" in both.reason
    assert all(
        math.isnan(v) for v in (*both.interval, *both.consistency_interval, *both.sensitivity_interval)
    )
    assert cose([-0.5], [0.9]).value == 0  # c + s = -0.4
    assert cose([-0.5], [0.2]).value < 0
    skipped = cose([0.5, math.nan, 0.7], [0.2, math.nan])
    assert (skipped.n_same, skipped.n_changed, skipped.n_undefined) == (2, 1, 2)
    assert skipped.consistency == pytest.approx(0.6)


def test_cose_intervals_hold_the_value_and_follow_the_images() -> None:
    rng = np.random.default_rng(0)
    images = np.repeat(np.arange(30), 20)
    same, changed = rng.random(30)[images], rng.random(30)[images]  # an image's pairs are all alike
    pairs, clustered = cose(same, changed), cose(same, changed, images.tolist(), images.tolist())
    for score in (pairs, clustered):
        low, high = score.interval
        assert low < score.value < high
        assert score.consistency_interval[0] < score.consistency < score.consistency_interval[1]
    width = [score.interval[1] - score.interval[0] for score in (pairs, clustered)]
    assert width[1] > 3 * width[0]  # sqrt(20) = 4.5
    assert cose(same, changed, seed=0) == pairs and cose(same, changed, seed=1).interval != pairs.interval


def test_cose_split() -> None:
    ssims, same = [0.9, 0.2, 0.6, 0.4, 0.5], [True, False, True, False, False]
    groups = ["geometric", "geometric", "photometric", "photometric", "model"]
    split = cose_split(ssims, torch.tensor(same), groups, images=["a", "a", "b", "b", "a"])
    assert list(split) == ["geometric", "photometric", "model"]
    assert split["geometric"].value == cose([0.9], [0.2]).value
    assert split["photometric"].value == cose([0.6], [0.4]).value
    assert math.isnan(split["model"].value) and split["model"].sensitivity == 0.5


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: cose([1.5], [0.1]), r"SSIM values in \[-1, 1\]"),
        (lambda: cose([0.5], [0.1], same_images=["a"]), "both sets or of neither"),
        (lambda: cose([0.5], [0.1], ["a", "b"], ["a"]), "same_images has 2 entries"),
        (lambda: cose_split([0.5], [True], ["a", "b"]), "groups has 2 entries"),
        (lambda: ssim_to_final([0.5], [0.1, 0.2]), "accuracies has 2 entries"),
        (lambda: cose_map(torch.rand(4, 4)), "'b h w' or 'b c h w'"),
        (lambda: cose_map(torch.full((1, 4, 4), torch.nan)), "NaN or infinite"),
    ],
)
def test_bad_cose_input_raises_a_clear_error(call: Any, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as error:
        call()
    assert "\n" not in str(error.value)


def test_ssim_to_final_is_pearsons_r() -> None:
    ssims, accuracies = [0.2, 0.5, 0.4, 0.9, math.nan], [0.1, 0.5, 0.6, 0.8, 0.9]
    result, expected = ssim_to_final(ssims, accuracies), pearsonr(ssims[:4], accuracies[:4])
    assert (result.r, result.p, result.n) == pytest.approx((expected.statistic, expected.pvalue, 4))
    flat = ssim_to_final([0.3, 0.1 + 0.2, 0.3], [0.1, 0.2, 0.3])
    assert math.isnan(flat.r) and math.isnan(flat.p) and "SSIM is the same" in flat.reason
    assert "fewer than three" in ssim_to_final([0.1, 0.2], [0.1, 0.2]).reason


@pytest.mark.parametrize("size", [(10, 10), (31, 17), (101, 1)])
def test_cose_map_equals_numpy_percentiles(size: tuple[int, int]) -> None:
    gradients = torch.randn(3, 4, *size, generator=torch.Generator().manual_seed(2))
    expected = np.abs(gradients.numpy()).sum(1)
    expected -= expected.min((1, 2), keepdims=True)
    expected /= np.percentile(expected, 99, axis=(1, 2), keepdims=True)
    result = cose_map(gradients)
    assert np.allclose(result.numpy(), expected.clip(max=1), atol=1e-5)
    assert torch.allclose(cose_map(gradients[:, 0]), cose_map(gradients[:, :1]))
    assert result.amin() == 0 and result.amax() == 1


def test_cose_map_of_a_constant_map_is_zero() -> None:
    sparse = torch.zeros(1, 20, 20)
    sparse[0, 0, 0] = 5  # its 99th percentile is its minimum
    assert not cose_map(torch.full((1, 3, 8, 8), -2.0)).any() and not cose_map(sparse).any()
