"""Agreement between methods and between metrics, beside scipy and scikit-image."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import kendalltau, rankdata, spearmanr
from skimage.metrics import structural_similarity

from conftest import small_cnn
from heatproof.errors import InputError
from heatproof.metrics import cose_map, insertion_deletion, localise
from heatproof.metrics.agreement import average_ranks, map_similarity, method_agreement, metric_agreement
from heatproof.metrics.kit import PIXELS_AT_ONCE
from heatproof.metrics.on_parts import structure
from heatproof.types import Maps, constant

SETTINGS = settings(max_examples=40, deadline=None)
LEVELS = st.sampled_from([-1.0, 0.0, 0.5, 1.0]) | st.floats(-2, 2, width=32)


def random_maps(count: int = 3, images: int = 4, size: int = 12) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {f"m{i}": rng.normal(size=(images, size, size)).round(1).astype(np.float32) for i in range(count)}


@SETTINGS
@given(arrays(np.float32, (2, 15), elements=LEVELS))
def test_ranks_are_scipys(values: np.ndarray) -> None:
    assert np.array_equal(average_ranks(torch.from_numpy(values)).numpy(), rankdata(values, axis=1))


def twin(a: np.ndarray, b: np.ndarray, budget: float) -> dict[str, float]:
    """The three measures of one pair of maps, as their definitions read."""
    a, b = np.maximum(a, 0), np.maximum(b, 0)
    count = int(budget * a.size)
    tops = [set(np.argsort(-m.ravel(), kind="stable")[:count]) for m in (a, b)]
    scaled = [(m - m.min()) / (m.max() - m.min()) for m in (a.astype(float), b.astype(float))]
    return {
        "spearman": spearmanr(a.ravel(), b.ravel()).statistic,
        "ssim": structural_similarity(*scaled, win_size=5, data_range=1.0),
        "overlap": len(tops[0] & tops[1]) / count,
    }


@pytest.mark.parametrize("images_at_once", [1, 100])
def test_methods_agree_as_their_definitions_say(monkeypatch: Any, images_at_once: int) -> None:
    monkeypatch.setitem(PIXELS_AT_ONCE, "cpu", images_at_once * 3 * 144)
    maps = random_maps()
    result = method_agreement(maps, budget=0.25)
    pairs = list(combinations(maps, 2))
    for kind in ("spearman", "ssim", "overlap"):
        table = np.array([[twin(maps[a][i], maps[b][i], 0.25)[kind] for a, b in pairs] for i in range(4)])
        matrix = getattr(result, kind)
        assert np.allclose([matrix[pair] for pair in pairs], table.mean(0), atol=1e-6)
        assert np.allclose(result.images[kind], table.mean(1), atol=1e-6)
        assert torch.equal(matrix.values, matrix.values.T) and (matrix.values.diagonal() == 1).all()
        assert (matrix.n + 4 * torch.eye(3) == 4).all() and not matrix.reasons


def test_maps_of_other_sizes_are_compared_at_image_size() -> None:
    explained = torch.zeros(2, dtype=torch.long)
    coarse, fine = (Maps("m", torch.rand(2, n, n), (16, 16), explained) for n in (4, 16))
    result = method_agreement({"coarse": coarse, "fine": fine, "coarse again": coarse})
    assert result.spearman["coarse", "coarse again"] == pytest.approx(1)
    expected = [
        spearmanr(a.ravel(), b.ravel()).statistic
        for a, b in zip(coarse.upsample().numpy(), fine.upsample().numpy(), strict=True)
    ]
    assert result.spearman["coarse", "fine"] == pytest.approx(np.mean(expected), abs=1e-4)


def test_constant_maps_are_left_out_with_a_reason() -> None:
    maps = random_maps(2)
    maps["m0"][1] = 0.7
    maps["m2"] = -np.ones_like(maps["m0"])
    result = method_agreement(maps)
    assert result.spearman.n[0, 1] == 3 and not math.isnan(result.spearman["m0", "m1"])
    assert math.isnan(result.overlap["m1", "m2"]) and result.overlap.n[1, 2] == 0
    assert "not constant" in result.overlap.reasons["m1", "m2"]
    assert result.images["ssim"].isnan().tolist() == [False, True, False, False]
    assert "fewer than two" in result.images.reasons("ssim")[1]


@SETTINGS
@given(arrays(np.float32, (2, 3, 6, 6), elements=LEVELS))
def test_similarity_is_symmetric_bounded_and_1_for_the_same(values: np.ndarray) -> None:
    a, b = values
    there, back = map_similarity(a, b), map_similarity(b, a)
    for kind in ("ssim", "spearman"):
        defined = ~there[kind].isnan()
        assert torch.allclose(there[kind], back[kind], equal_nan=True, atol=1e-6)
        assert (there[kind][defined].abs() <= 1 + 1e-6).all()
        assert all(
            bool(reason) == bool(gap) for reason, gap in zip(there.reasons(kind), ~defined, strict=True)
        )
    same = map_similarity(a, 2 * a)
    assert all(torch.allclose(v.nan_to_num(1.0), torch.ones(3), atol=1e-5) for v in same.values())


@pytest.mark.parametrize(
    ("maps", "sentence"),
    [
        ({"a": torch.rand(2, 6, 6)}, "at least two methods"),
        ({"a": torch.rand(2, 6, 6), "b": torch.rand(3, 6, 6)}, "b has 3 entries but a has 2"),
        ({"a": torch.rand(2, 6, 6), "b": torch.rand(2, 7, 7)}, "images of 7x7 but a for 6x6"),
        ({"a": torch.rand(0, 6, 6), "b": torch.rand(0, 6, 6)}, "no maps"),
    ],
)
def test_bad_maps_raise_a_clear_error(maps: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        method_agreement(maps)


def test_zeros_that_fill_no_budget_are_no_agreement() -> None:
    first, other = torch.zeros(2, 1, 20, 20)
    first[0, 10, 10] = other[0, 15, 5] = 1
    result = method_agreement({"one": first, "other": other, "same": first})
    assert result.overlap["one", "other"] == 0 and result.overlap["one", "same"] == 1


def test_metrics_agree_as_scipy_says_with_directions_turned() -> None:
    rng = np.random.default_rng(1)
    methods = [f"m{i}" for i in range(6)]
    table = {
        name: dict(zip(methods, rng.random(6).round(1), strict=True))
        for name in ("insertion", "deletion", "mine")
    }
    result = metric_agreement(table, higher_is_better={"mine": True})
    columns = {name: np.array(list(column.values())) for name, column in table.items()}
    columns["deletion"] = -columns["deletion"]
    for pair in combinations(table, 2):
        sides = [columns[name] for name in pair]
        assert result.spearman[pair] == pytest.approx(spearmanr(*sides).statistic)
        assert result.kendall[pair] == pytest.approx(kendalltau(*sides).statistic)
    assert result.kendall.n[0, 1] == 6


def test_metric_agreement_needs_three_methods_with_both_scores() -> None:
    table = {
        "insertion": {"a": 0.1, "b": torch.tensor([0.2, 0.4]), "c": 0.5, "d": 0.6},
        "deletion": {"a": 0.1, "b": math.nan, "c": 0.5},
        "pointing": dict.fromkeys("abcd", 1.0),
    }
    result = metric_agreement(table)  # type: ignore[arg-type]
    assert math.isnan(result.spearman["insertion", "deletion"]) and result.spearman.n[0, 1] == 2
    assert "fewer than three" in result.spearman.reasons["insertion", "deletion"]
    assert "pointing is the same everywhere" in result.kendall.reasons["insertion", "pointing"]
    with pytest.raises(InputError, match="whether more of 'mine' is better is not known"):
        metric_agreement({"mine": {"a": 1.0}, "insertion": {"a": 1.0}})
    with pytest.raises(InputError, match="at least two metrics"):
        metric_agreement({"insertion": {"a": 1.0}})


@pytest.mark.parametrize(("low", "high"), [(0.0, 1e39), (0.0, 1e-50), (1.0, 1.0 + 1e-9)])
def test_every_metric_sees_the_contrast_that_float32_would_lose(low: float, high: float) -> None:
    values = torch.full((1, 6, 6), low, dtype=torch.float64)
    values[0, 2, 3] = high
    mask = values[0] == high
    assert map_similarity(values, values)["ssim"].tolist() == pytest.approx([1.0])
    # Epsilon of eq. 3 is added to the map's own range: it outweighs a range of 1e-50.
    fmr = structure(values, mask, ~mask, mask)["fmr"].tolist()
    assert fmr == pytest.approx([1.0 if high - low > 1e-20 else math.nan], abs=2e-3, nan_ok=True)
    result = insertion_deletion(values, model=small_cnn(), images=torch.rand(1, 3, 6, 6))
    assert not constant(values).any() and result.scores.reasons("insertion") == [""]
    assert localise(values, masks=mask, budget=0.05)["inside"].tolist() == [1.0]
    assert cose_map(values)[0, 2, 3] == 1
