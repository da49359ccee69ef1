"""C-Score: the fast code against the paper's formulas written out slowly, and what must hold for any maps."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch.utils._python_dispatch import TorchDispatchMode

from heatproof.errors import InputError
from heatproof.metrics import cscores
from heatproof.metrics.classifier import thresholds
from heatproof.metrics.cscores import (
    BLANK,
    confidence_weights,
    cscore,
    cscore_by_class,
    global_cscore,
    gold_list,
    sampled_mean,
    soft_iou,
    soft_iou_matrix,
    temperature,
)
from heatproof.registry import metrics
from heatproof.types import Maps

maps_of = st.integers(2, 6).flatmap(
    lambda n: hnp.arrays(
        np.float32, (n, 4, 5), elements=st.floats(0, 100, width=32).filter(lambda v: v == 0 or v > 1e-3)
    )
)
quick = settings(max_examples=40, deadline=None)


# ---- slow twins, float64, pair by pair


def slow_normalise(h: np.ndarray) -> np.ndarray:
    h = np.maximum(h.astype(np.float64), 0)
    return np.zeros_like(h) if h.max() == h.min() else (h - h.min()) / (h.max() - h.min())


def slow_siou(a: np.ndarray, b: np.ndarray) -> float:
    union = np.maximum(a, b).sum()
    return float(np.minimum(a, b).sum() / union) if union > 0 else 0.0


def slow_cscore(maps: np.ndarray, p: np.ndarray, alpha: float = 2.0) -> float:
    h = [slow_normalise(m) ** alpha for m in maps]
    w = np.asarray(p, dtype=np.float64) / np.sum(p)
    top = bottom = 0.0
    for i in range(len(h)):
        for j in range(i + 1, len(h)):
            top += (w[i] + w[j]) * slow_siou(h[i], h[j])
            bottom += w[i] + w[j]
    return top / bottom


def random_maps(n: int, size: int = 9, seed: int = 0) -> torch.Tensor:
    return torch.rand(n, size, size, generator=torch.Generator().manual_seed(seed))


def confidences(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.5, 1, n)


# ---- the formula


@quick
@given(maps_of, st.integers(0, 99), st.sampled_from([1.0, 2.0, 3.5]))
def test_equals_the_slow_twin(maps: np.ndarray, seed: int, alpha: float) -> None:
    p = confidences(len(maps), seed)
    assert cscore(maps, p, alpha=alpha, resamples=0).value == pytest.approx(
        slow_cscore(maps, p, alpha), abs=1e-6
    )


def test_maps_are_scored_at_image_size() -> None:
    native = random_maps(5, 4)
    maps = Maps("any", native, (20, 24), torch.zeros(5, dtype=torch.long))
    p = confidences(5)
    expected = slow_cscore(maps.upsample().numpy(), p)
    assert cscore(maps, p).value == pytest.approx(expected, abs=1e-6)
    assert cscore(native, p).value != pytest.approx(expected, abs=1e-3)


def test_by_class_equals_the_slow_twin_over_gold_lists() -> None:
    rng = np.random.default_rng(3)
    maps, y, probs = random_maps(40).numpy(), rng.integers(0, 3, 40), rng.dirichlet([0.6] * 3, 40)
    result = cscore_by_class(maps, y, probs)
    top = bottom = 0.0
    for c in range(3):
        gold = [i for i in range(40) if y[i] == c and probs[i, c] >= 0.5]
        assert result.classes[c].n == len(gold) >= 2
        expected = slow_cscore(maps[gold], probs[gold, c])
        assert result.classes[c].value == pytest.approx(expected, abs=1e-6)
        top, bottom = top + len(gold) * expected, bottom + len(gold)
    assert result.overall.value == pytest.approx(top / bottom, abs=1e-6)
    assert result.overall.n == bottom
    assert result.overall.interval[0] <= result.overall.value <= result.overall.interval[1]


def test_one_logit_probabilities_are_those_of_class_one() -> None:
    p, y, maps = np.array([0.1, 0.4, 0.6, 0.9, 0.8, 0.3]), [0, 0, 0, 1, 1, 1], random_maps(6)
    flat, column, two = (cscore_by_class(maps, y, q) for q in (p, p[:, None], np.stack([1 - p, p], 1)))
    assert flat == column == two
    assert [flat.classes[c].n for c in (0, 1)] == [2, 2]
    assert flat.classes[0].value == pytest.approx(slow_cscore(maps[:2].numpy(), 1 - p[:2]), abs=1e-6)


def test_soft_iou_of_single_maps_of_batches_and_of_maps() -> None:
    a, b = random_maps(4, seed=1), random_maps(4, seed=2)
    expected = [slow_siou(x, y) for x, y in zip(a.double().numpy(), b.double().numpy(), strict=True)]
    assert soft_iou(a, b).tolist() == pytest.approx(expected, abs=1e-12)
    assert soft_iou(a[0].numpy(), b[0].numpy()).item() == pytest.approx(expected[0], abs=1e-12)
    assert soft_iou(torch.zeros(2, 3, 3), torch.zeros(2, 3, 3)).tolist() == [0, 0]
    native = Maps("any", a, (18, 18), torch.zeros(4, dtype=torch.long))
    assert soft_iou(native, native.upsample()).tolist() == pytest.approx([1] * 4)


# ---- properties


@quick
@given(maps_of)
def test_bounds_symmetry_and_self(maps: np.ndarray) -> None:
    a, b = torch.tensor(maps), torch.tensor(maps[::-1].copy())
    scores = soft_iou(a, b)
    assert ((scores >= 0) & (scores <= 1)).all()
    assert torch.equal(scores, soft_iou(b, a))
    assert soft_iou(a, a).tolist() == [float(m.any()) for m in a]
    result = cscore(a, np.full(len(a), 0.7))
    assert 0 <= result.interval[0] <= result.interval[1] <= 1 and 0 <= result.value <= 1


@quick
@given(maps_of, st.randoms(use_true_random=False), st.floats(0.01, 100))
def test_order_and_positive_scale_do_not_matter(maps: np.ndarray, random, scale: float) -> None:
    p = confidences(len(maps))
    value = cscore(maps, p, resamples=0).value
    order = list(range(len(maps)))
    random.shuffle(order)
    assert cscore(maps[order], p[order], resamples=0).value == pytest.approx(value, abs=1e-12)
    maps = maps.copy()
    maps[0] *= np.float32(scale)
    assert cscore(maps, p, resamples=0).value == pytest.approx(value, abs=1e-5)


@quick
@given(maps_of.filter(lambda m: m[0].max() > m[0].min()))
def test_identical_maps_score_one(maps: np.ndarray) -> None:
    same = np.repeat(maps[:1], 4, 0)
    result = cscore(same, confidences(4))
    assert result.value == pytest.approx(1, abs=1e-12)
    assert result.interval == pytest.approx((1, 1), abs=1e-12)


@quick
@given(maps_of, st.integers(1, 25))
def test_block_size_does_not_matter(maps: np.ndarray, block: int) -> None:
    pixels = torch.tensor(maps).flatten(1)
    assert torch.allclose(soft_iou_matrix(pixels, block), soft_iou_matrix(pixels), atol=1e-6)


# ---- the exact engine


@pytest.mark.parametrize("kind", ["uniform", "sparse", "constant", "tiny"])
def test_engine_is_exact_to_a_millionth_at_image_size(kind: str) -> None:
    n, p = 7, 224 * 224
    generator = torch.Generator().manual_seed(0)
    pixels = torch.rand(n, p, generator=generator)
    if kind == "sparse":
        pixels[torch.rand(n, p, generator=generator) < 0.99] = 0
    if kind == "constant":  # the worst case for float32 sums: every rounding goes the same way
        pixels = pixels[:, :1].expand(n, p).contiguous()
    if kind == "tiny":
        pixels = pixels**8 * 1e-6
    matrix = soft_iou_matrix(pixels)
    for i in range(n):
        for j in range(n):
            assert matrix[i, j].item() == pytest.approx(slow_siou(*pixels[[i, j]].double().numpy()), abs=1e-6)
    assert torch.equal(matrix, matrix.T)


def test_memory_is_the_maps_and_the_scores_never_pairs_of_maps() -> None:
    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, torch.Tensor):
                    self.numel = max(self.numel, tensor.numel())
            return out

    for n, side in ((40, 32), (10, 64)):
        maps = random_maps(n, side)
        with Largest() as seen:
            cscore(maps, confidences(n), resamples=10)
        assert 0 < seen.numel <= max(n * side**2, n * n)


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    maps, p, threads = random_maps(30, 32), confidences(30), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = cscore(maps, p)
        torch.set_num_threads(2)
        assert cscore(maps, p) == alone
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_gives_the_same() -> None:
    maps, p = random_maps(50, 64), torch.tensor(confidences(50))
    here, there = cscore(maps, p), cscore(maps.cuda(), p.cuda())
    assert there.value == pytest.approx(here.value, abs=1e-6)
    assert there.interval == pytest.approx(here.interval, abs=1e-6)
    assert soft_iou_matrix(maps.cuda().flatten(1)).is_cuda
    y, probs = torch.arange(50) % 2, torch.tensor(confidences(50))
    by_class = [cscore_by_class(m, y.to(d), probs.to(d)) for m, d in ((maps, "cpu"), (maps.cuda(), "cuda"))]
    assert by_class[0].overall.value == pytest.approx(by_class[1].overall.value, abs=1e-6)
    sampled = [cscore(m, p, exact_up_to=10) for m in (maps, maps.cuda())]
    assert sampled[0].value == pytest.approx(sampled[1].value, abs=1e-6)


# ---- intervals


def test_bootstrap_equals_resampling_by_hand() -> None:
    """Resample image by image, score all pairs of different images, take the quantiles."""
    n, resamples = 7, 300
    maps, p = random_maps(n), confidences(n)
    h = [slow_normalise(m) ** 2 for m in maps.numpy()]
    s = [[slow_siou(a, b) for b in h] for a in h]
    drawn = np.random.default_rng((5,)).integers(0, n, size=(resamples, n))
    values = []
    for copies in drawn:
        pairs = [(i, j) for a, i in enumerate(copies) for j in copies[a + 1 :] if i != j]
        if pairs:
            weight = [p[i] + p[j] for i, j in pairs]
            values.append(np.average([s[i][j] for i, j in pairs], weights=weight))
    expected = np.quantile(values, [0.025, 0.975])
    result = cscore(maps, p, resamples=resamples, seed=5)
    assert result.interval == pytest.approx(tuple(expected), abs=1e-6)
    assert cscore(maps, p, seed=5) == cscore(maps, p, seed=5)
    assert cscore(maps, p, seed=6).interval != cscore(maps, p, seed=5).interval


# ---- the sampled engine


def test_sampling_is_unbiased_by_enumeration() -> None:
    """The probability of each ordered pair times its score adds up to C, whatever the weights."""
    maps, p = random_maps(6).numpy(), np.array([0.99, 0.5, 0.51, 0.9, 0.6, 0.7])
    h, w = [slow_normalise(m) ** 2 for m in maps], p / p.sum()
    chance = {(i, j): w[i] / 5 for i in range(6) for j in range(6) if i != j}
    assert sum(chance.values()) == pytest.approx(1)
    mean = sum(q * slow_siou(h[i], h[j]) for (i, j), q in chance.items())
    assert mean == pytest.approx(slow_cscore(maps, p), abs=1e-12)


def test_pairs_are_drawn_with_those_chances() -> None:
    class Log:
        def __init__(self) -> None:
            self.seen: list[tuple[int, int]] = []

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: torch.Tensor) -> torch.Tensor:
            first, second = index.chunk(2)
            self.seen += zip(first.tolist(), second.tolist(), strict=True)
            return torch.ones(len(index), 1)

    log, w = Log(), np.array([0.5, 0.3, 0.15, 0.05])
    rng = np.random.default_rng(0)
    cscores._draw(log, w, 40_000, rng)  # type: ignore[arg-type]
    for i in range(4):
        for j in range(4):
            share = log.seen.count((i, j)) / len(log.seen)
            assert share == pytest.approx(0 if i == j else w[i] / 3, abs=0.01)


def test_sampled_intervals_cover_the_exact_value() -> None:
    maps, p = random_maps(60, 5), confidences(60)
    exact = cscore(maps, p)
    assert not exact.sampled
    inside = 0
    for seed in range(40):
        result = cscore(maps, p, exact_up_to=10, half_width=0.01, resamples=0, seed=seed)
        assert result.sampled and result.n == 60
        inside += result.interval[0] <= exact.value <= result.interval[1]
    assert inside >= 34  # 95 % of 40 is 38; fewer than 34 has a chance below 1 %


@pytest.mark.parametrize("spread", ["narrow", "widest"])
def test_ten_thousand_maps_reach_the_half_width(spread: str) -> None:
    n = 10_000
    values = random_maps(n, 7)
    if spread == "widest":  # two places, half of the maps each: scores are 0 or 1
        values = torch.zeros(n, 7, 7)
        values[::2, 1, 1] = values[1::2, 5, 5] = 1
    maps = Maps("any", values, (14, 14), torch.zeros(n, dtype=torch.long))
    result = cscore(maps, confidences(n))
    assert result.sampled
    assert result.interval[1] - result.interval[0] < 2 * 0.005


def test_sampled_pairs_adapt_and_stop_at_the_cap() -> None:
    pixels = torch.eye(3).repeat(20, 1)
    w = np.full(60, 1 / 60)
    coarse, fine = (sampled_mean(pixels, w, half_width=h) for h in (0.03, 0.01))
    assert coarse[2] < fine[2] and fine[1] < 0.01
    _, reach, pairs = sampled_mean(pixels, w, half_width=1e-4, max_pairs=2000)
    assert pairs == 2000 and reach > 1e-4


def test_sampled_classes_mix_with_exact_ones() -> None:
    maps, y = random_maps(90, 5), [0] * 60 + [1] * 30
    result = cscore_by_class(maps, y, np.eye(2)[y], exact_up_to=40)
    assert result.classes[0].sampled and not result.classes[1].sampled and result.overall.sampled
    exact = cscore_by_class(maps, y, np.eye(2)[y])
    assert result.overall.value == pytest.approx(exact.overall.value, abs=0.01)
    assert result.overall.interval[0] < result.overall.value < result.overall.interval[1]


# ---- what is not defined


def test_empty_single_and_all_empty_lists() -> None:
    maps = random_maps(5)
    result = cscore_by_class(maps, [0, 0, 0, 1, 2], [[0.9, 0.1, 0]] * 3 + [[0, 1, 0], [0.5, 0.2, 0.3]])
    full, single, empty = (result.classes[c] for c in range(3))
    assert full.n == 3 and not full.reason
    assert math.isnan(single.value) and single.n == 1 and single.reason == "a single image has no pair"
    assert empty.value == 0 and empty.n == 0 and empty.reason == "the gold list is empty"
    assert result.overall.value == full.value and result.overall.n == 3
    assert result.overall.reason == "class 1 left out: a single image has no pair"

    several = cscore_by_class(maps, [0, 0, 1, 2, 3], torch.eye(4)[[0, 0, 1, 2, 3]])
    assert several.overall.reason == "class 1, 2, 3 left out: a single image has no pair"
    nothing = cscore_by_class(maps, [0] * 5, [0.9] * 5)
    assert math.isnan(nothing.overall.value) and nothing.overall.reason == "every gold list is empty"
    assert [nothing.classes[c].value for c in (0, 1)] == [0, 0]
    only_singles = cscore_by_class(maps[:2], [0, 1], [0.1, 0.9]).overall
    assert math.isnan(only_singles.value) and "class 0, 1 left out" in only_singles.reason


def test_degenerate_maps_are_counted_and_score_zero() -> None:
    maps = random_maps(4)
    maps[0], maps[1] = 0, 3.0  # a constant map says nothing either
    result = cscore(maps, [0.9] * 4)
    assert result.degenerate == 0.5
    assert result.value == pytest.approx(slow_cscore(maps.numpy(), np.full(4, 0.9)), abs=1e-6)
    blank = cscore(torch.zeros(3, 4, 4), [0.9] * 3)
    assert (blank.value, blank.degenerate, blank.interval) == (0, 1, (0, 0))
    assert blank.reason == BLANK and not result.reason
    sampled = cscore(torch.zeros(4, 3, 3), [0.5] * 4, exact_up_to=3)
    assert sampled.sampled and sampled.reason == BLANK
    maps, probs = (
        torch.cat([torch.zeros(2, 3, 3), torch.eye(3).expand(2, 3, 3)]),
        torch.eye(2).repeat_interleave(2, 0),
    )
    both = cscore_by_class(maps, [0, 0, 1, 1], probs)
    assert (both.classes[0].reason, both.classes[1].reason) == (BLANK, "")
    assert both.overall.value == pytest.approx(0.5) and both.overall.reason == f"class 0 counts as 0: {BLANK}"


def test_zero_confidence_is_not_a_score() -> None:
    result = cscore(random_maps(3), [0.0, 0.0, 0.0])
    assert math.isnan(result.value) and result.reason == "every confidence is zero"


def test_global_leaves_out_nan_and_weighs_empty_classes_nothing() -> None:
    assert global_cscore([0.5, float("nan"), 0.0], [4, 1, 0]) == 0.5
    assert math.isnan(global_cscore([0.0, 0.0], [0, 0]))


# ---- gold lists


def test_anchor_replaces_the_gold_list_but_not_the_confidence() -> None:
    maps, y = random_maps(8), np.array([0] * 4 + [1] * 4)
    now, last = np.full(8, 0.9), np.array([0.1, 0.2, 0.3, 0.9, 0.9, 0.8, 0.2, 0.7])
    anchor = gold_list(y, last)
    assert anchor.tolist() == [True, True, True, False, True, True, False, True]
    result = cscore_by_class(maps, y, now, anchor=anchor)
    assert [result.classes[c].n for c in (0, 1)] == [3, 3]
    assert result.classes[1].value == pytest.approx(
        slow_cscore(maps[[4, 5, 7]].numpy(), now[[4, 5, 7]]), abs=1e-6
    )
    same = cscore_by_class(maps, y, now, anchor=[0, 1, 2, 4, 5, 7])
    assert (same.classes, same.overall) == (result.classes, result.overall)


def test_adaptive_threshold_survives_a_shift_and_follows_the_ranking() -> None:
    y = np.array([0] * 5 + [1] * 5)
    ranked = np.array([0.1, 0.15, 0.2, 0.3, 0.6, 0.5, 0.7, 0.8, 0.9, 0.95])
    shifted = 0.9 + ranked / 20  # every image now counts as class 1
    assert gold_list(y, shifted).tolist() == [False] * 5 + [True] * 5
    adaptive = gold_list(y, shifted, "adaptive")
    assert torch.equal(adaptive, gold_list(y, ranked, "adaptive"))
    assert adaptive.tolist() == [True] * 4 + [False] * 2 + [True] * 4
    for c in (0, 1):  # each class is predicted as often as it occurs
        p = np.stack([1 - ranked, ranked], 1)[:, c]
        assert (p >= thresholds(y, ranked, "adaptive")[c].item()).sum() == 5
    assert not gold_list(y, 1 - ranked, "adaptive").numpy()[[0, 1, 2, 7, 8, 9]].any()
    assert cscore_by_class(random_maps(10), y, shifted, tau="adaptive").classes[0].n == 4


def slow_calibrated(y: np.ndarray, p: np.ndarray) -> np.ndarray:
    """Image by image: its fold by its place among its class, the temperature of the other fold."""
    both = np.stack([1 - p, p], 1) if p.ndim == 1 else p
    own = both[np.arange(len(y)), y]
    fold = np.empty(len(y), int)
    for c in set(y.tolist()):
        members = [i for i in range(len(y)) if y[i] == c]
        for place, i in enumerate(sorted(members, key=lambda i: own[i])):
            fold[i] = place % 2
    probabilities = []
    for i in range(len(y)):
        others = [j for j in range(len(y)) if fold[j] != fold[i]]
        t = temperature(y[others], both[others])
        powers = both[i] ** (1 / t)
        probabilities.append(powers[y[i]] / powers.sum())
    return np.array(probabilities)


@given(st.integers(0, 10_000), st.integers(2, 4), st.integers(4, 30))
@settings(max_examples=25, deadline=None)
def test_no_image_is_weighed_with_a_temperature_fitted_on_it(seed: int, classes: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    y, p = rng.integers(0, classes, n), rng.dirichlet(np.ones(classes), n)
    weights = confidence_weights(y, p, "calibrated")
    assert weights.numpy() == pytest.approx(slow_calibrated(y, p), rel=1e-4)
    order = rng.permutation(n)
    assert confidence_weights(y[order], p[order], "calibrated").numpy() == pytest.approx(
        weights[order].numpy(), rel=1e-4
    )
    given_t = confidence_weights(y, p, "calibrated", 1.0).numpy()
    assert given_t == pytest.approx(p[np.arange(n), y], rel=1e-12)


def test_weights_change_the_weights_only() -> None:
    maps, y = random_maps(30), np.arange(30) % 2
    p = np.where(y == 1, confidences(30), 1 - confidences(30))
    plain, flat, calibrated = (
        cscore_by_class(maps, y, p, weights=w) for w in ("confidence", "uniform", "calibrated")
    )
    assert [s.n for s in flat.classes.values()] == [s.n for s in calibrated.classes.values()] == [15, 15]
    ones = maps[y == 1].numpy()
    assert flat.classes[1].value == pytest.approx(slow_cscore(ones, np.ones(15)), abs=1e-6)
    q = slow_calibrated(y, p)[y == 1]
    assert calibrated.classes[1].value == pytest.approx(slow_cscore(ones, q), abs=1e-6)
    assert len({s.classes[1].value for s in (plain, flat, calibrated)}) == 3


# ---- bad input


Y, P = [0, 1, 1], [0.9, 0.8, 0.7]


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda m: cscore(m, P[:2]), "confidence has 2 entries but maps has 3"),
        (lambda m: cscore(m, [0.9, 0.8, 1.1]), "confidence must be 'b' probabilities in [0, 1]"),
        (lambda m: cscore(m, [0.9, 0.8, math.nan]), "confidence must be 'b' probabilities in [0, 1]"),
        (lambda m: cscore(m, P, alpha=0), "alpha must be a positive number"),
        (lambda m: cscore(m[0], P), "maps must be 'b h w'"),
        (lambda m: cscore(m / 0, P), "NaN or infinite"),
        (lambda m: cscore_by_class(m, Y[:2], P), "labels has 2 entries but maps has 3"),
        (lambda m: cscore_by_class(m, Y, P[:2]), "probs has 2 entries but maps has 3"),
        (lambda m: cscore_by_class(m, [0, 1, 2], P), "label 2 is outside the 2 classes"),
        (lambda m: cscore_by_class(m, [0, 1, -1], P), "label -1 is outside"),
        (lambda m: cscore_by_class(m, [0, 1, 0.5], P), "labels must be 'b' whole numbers"),
        (lambda m: cscore_by_class(m, Y, [0.9, 2.0, 0.1]), "probabilities must lie in [0, 1]"),
        (lambda m: cscore_by_class(m, Y, [0.9, math.nan, 0.1]), "probabilities must lie in [0, 1]"),
        (lambda m: cscore_by_class(m, Y, np.zeros((3, 2, 2))), "probabilities must be 'b k'"),
        (lambda m: cscore_by_class(m, Y, P, tau=1.5), "tau must be a number in [0, 1]"),
        (lambda m: cscore_by_class(m, Y, P, tau="auto"), "tau must be a number in [0, 1]"),  # type: ignore[arg-type]
        (lambda m: cscore_by_class(m, Y, P, anchor=[True]), "anchor has 1 entries"),
        (lambda m: cscore_by_class(m, Y, P, anchor=[3]), "anchor must hold image indices from 0 to 2"),
        (lambda m: cscore_by_class(m, Y, P, anchor=[0.5]), "anchor must be a boolean mask"),
        (lambda m: cscore_by_class(m, Y, P, weights="none"), "weights must be 'confidence'"),  # type: ignore[arg-type]
        (lambda m: cscore_by_class(m, Y, P, temperature=0), "a temperature is a positive number"),
        (lambda m: soft_iou(m, m[:2]), "two maps 'h w' or 'b h w' of one shape"),
        (lambda m: soft_iou(m, -m), "without negative values"),
        (lambda m: global_cscore([0.5], [1, 2]), "sizes has 2 entries but values has 1"),
        (lambda m: global_cscore([0.5], [-1]), "must not be negative"),
    ],
)
def test_bad_input_raises_a_clear_error(call, sentence: str) -> None:
    with pytest.raises(InputError) as error:
        call(random_maps(3))
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_it_is_registered() -> None:
    entry = metrics.get("C-Score")
    assert entry.function is cscore_by_class and entry.level == "class" and entry.bounds == (0, 1)
    assert entry.higher_is_better and entry.needs == {"maps", "labels", "probabilities"}
    assert {"tau", "alpha", "anchor", "weights", "exact_up_to", "seed"} <= entry.options.keys()


FAR = {  # what float32 cannot hold
    "huge": torch.tensor([[0.0, 1e39], [5e38, 0.0]], dtype=torch.float64),
    "tiny": torch.tensor([[0.0, 1e-50], [5e-51, 0.0]], dtype=torch.float64),
    "small contrast": torch.tensor([[1.0, 1.0 + 1e-9], [1.0, 1.0]], dtype=torch.float64),
}


@pytest.mark.parametrize("kind", FAR)
@pytest.mark.parametrize("size", [(2, 2), (7, 9)])
def test_maps_are_normalised_in_their_own_precision(kind: str, size: tuple[int, int]) -> None:
    maps = Maps("m", FAR[kind].expand(3, 2, 2), size, torch.zeros(3))
    result = cscore(maps, [0.9, 0.6, 0.75])
    assert (result.value, result.degenerate, result.reason) == (pytest.approx(1.0), 0.0, "")
    assert not maps.degenerate.any()
    assert maps.upsample().dtype == torch.float32 and maps.upsample().amax() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_constant_map_is_all_zeros_at_every_image_size(dtype: torch.dtype) -> None:
    values = torch.tensor([0.1, 0.7, 3.3], dtype=dtype)[:, None, None].expand(3, 7, 7)
    for side in (50, 100, 225, 299):  # where bilinear weights do not add up to 1 exactly
        maps = Maps("m", values, (side, side), torch.zeros(3))
        assert not maps.upsample().any()
        assert (cscore(maps, [1.0, 1.0, 1.0]).value, cscore(maps, [1.0, 1.0, 1.0]).degenerate) == (0.0, 1.0)
