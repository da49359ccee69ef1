"""Insertion, deletion and part occlusion: models whose answer is known, a slow twin, counted passes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import integrate
from scipy.ndimage import gaussian_filter
from scipy.stats import spearmanr
from torch import Tensor, nn

import heatproof as hp
from conftest import counting, small_cnn
from heatproof.errors import InputError, TargetError
from heatproof.explain.baselines import baseline_images, mixed
from heatproof.images.preprocess import Preprocess
from heatproof.metrics.faithfulness import (
    adaptive_plan,
    area,
    area_errors,
    change_steps,
    decided,
    insertion_deletion,
    next_points,
    straight_lines,
)
from heatproof.metrics.localisation import budget_masks
from heatproof.metrics.on_parts import occlusion_correlation, part_occlusion
from heatproof.models.model import Model
from heatproof.models.running import memory_format
from heatproof.registry import metrics

SETTINGS = settings(max_examples=30, deadline=None)
PLAIN = Preprocess((10, 10), 10, (0.0,), (1.0,))  # black is 0
KEYS = 20  # pixels that the constructed models look at: the first two rows of 10x10


class KeyShare(nn.Module):
    """p(class 1) = share of the key pixels that are there; "all": 1 where all are, "any": where one is."""

    def __init__(self, rule: str = "share") -> None:
        super().__init__()
        self.rule = rule

    def forward(self, images: Tensor) -> Tensor:
        seen = images[:, 0].flatten(1)[:, :KEYS]
        p = {"share": seen.mean(1), "all": seen.amin(1), "any": seen.amax(1)}[self.rule]
        return torch.stack([1 - p, p], 1).clamp(min=1e-30).log()


def key_model(rule: str) -> Model:
    return Model(KeyShare(rule), preprocess=PLAIN)


def key_map(first: bool = True) -> Tensor:
    """Key pixels first, or last; ties everywhere else."""
    values = torch.ones(1, 10, 10)
    values[0, :2] = 2.0 if first else 0.5
    return values


# By hand, with one pixel per step and K = 20 keys: a curve that is 1 up to step a and 0 from step b on, and
# straight in between, has the area (a + b) / 200.
PERFECT = {
    "share": (1 - KEYS / 200, KEYS / 200),  # straight from step 0 to step K
    "all": (1 - (2 * KEYS - 1) / 200, 1 / 200),  # inserted when the last key is back, deleted with the first
    "any": (1 - 1 / 200, (2 * KEYS - 1) / 200),
}


@pytest.mark.parametrize("rule", PERFECT)
def test_a_perfect_map_has_the_area_found_by_hand(rule: str) -> None:
    result = insertion_deletion(
        key_map(), 1, model=key_model(rule), images=torch.ones(1, 1, 10, 10), baseline="black"
    )
    insertion, deletion = PERFECT[rule]
    assert result.insertion_auc.item() == pytest.approx(insertion, abs=1e-6)
    assert result.deletion_auc.item() == pytest.approx(deletion, abs=1e-6)


@pytest.mark.parametrize("rule", PERFECT)
def test_a_reversed_map_has_the_areas_swapped(rule: str) -> None:
    result = insertion_deletion(
        key_map(False), 1, model=key_model(rule), images=torch.ones(1, 1, 10, 10), baseline="black"
    )
    insertion, deletion = PERFECT[{"share": "share", "all": "any", "any": "all"}[rule]]
    assert result.insertion_auc.item() == pytest.approx(1 - insertion, abs=1e-6)
    assert result.deletion_auc.item() == pytest.approx(1 - deletion, abs=1e-6)


def test_one_key_pixel_gives_deletion_0_and_insertion_1_up_to_half_a_step() -> None:
    class OnePixel(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return 1e4 * (images[:, 0, 4, 7:8] - 0.5)  # one logit

    values = torch.zeros(1, 10, 10)
    values[0, 4, 7] = 1
    model = Model(OnePixel(), preprocess=PLAIN)
    result = insertion_deletion(values, 1, model=model, images=torch.ones(1, 1, 10, 10), baseline="black")
    assert result.deletion[0].tolist() == [1.0] + [0.0] * 100
    assert result.insertion[0].tolist() == [0.0] + [1.0] * 100
    assert result.deletion_auc.item() == pytest.approx(
        0.005
    ) and result.insertion_auc.item() == pytest.approx(0.995)
    other = insertion_deletion(values, 0, model=model, images=torch.ones(1, 1, 10, 10), baseline="black")
    assert torch.allclose(other.insertion, 1 - result.insertion)


def twin(
    model: nn.Module, image: np.ndarray, values: np.ndarray, target: int, baseline: np.ndarray, steps: int
) -> tuple[list[float], list[float]]:
    """Both curves as one would write them down, one picture at a time, float64."""
    order = np.argsort(-np.maximum(values, 0).ravel(), kind="stable")
    curves: tuple[list[float], list[float]] = ([], [])
    for curve, (start, end) in zip(curves, ((baseline, image), (image, baseline)), strict=True):
        for k in range(steps + 1):
            changed = order[: k * values.size // steps]
            picture = start.reshape(len(start), -1).copy()
            picture[:, changed] = end.reshape(len(end), -1)[:, changed]
            logits = model(torch.from_numpy(picture.reshape(1, *image.shape))).detach().numpy()[0]
            weights = np.exp(logits - logits.max())
            curve.append(weights[target] / weights.sum())
    return curves


def twin_baseline(kind: str, image: np.ndarray, seed: int) -> np.ndarray:
    mean, std = (np.array(v)[:, None, None] for v in (Preprocess().mean, Preprocess().std))
    return {
        "blur": lambda: np.stack([gaussian_filter(channel, 10) for channel in image]),
        "black": lambda: np.broadcast_to((0 - mean) / std, image.shape),
        "mean": lambda: np.stack([np.full_like(channel, channel.mean()) for channel in image]),
        "noise": lambda: (
            np.random.default_rng(seed).standard_normal(image.shape, dtype=np.float32).astype(float)
        ),
    }[kind]()


@pytest.mark.parametrize("kind", ["blur", "black", "mean", "noise"])
def test_equals_the_slow_twin(kind: str) -> None:
    net = small_cnn(seed=3).double().eval()
    rng = np.random.default_rng(0)
    images = rng.normal(size=(2, 3, 9, 11))
    values = rng.integers(-2, 4, size=(2, 9, 11)).astype(np.float32)  # ties and negatives
    result = insertion_deletion(
        values, [1, 4], model=net, images=torch.from_numpy(images), baseline=kind, steps=14, seed=5
    )
    assert result.insertion.shape == result.deletion.shape == (2, 15) and result.baseline == kind
    for i, target in enumerate((1, 4)):
        expected = twin(net, images[i], values[i], target, twin_baseline(kind, images[i], 5), 14)
        for mine, theirs in zip((result.insertion[i], result.deletion[i]), expected, strict=True):
            assert np.allclose(mine.numpy(), theirs, atol=1e-6 if kind == "black" else 1e-9)
        areas = [integrate.trapezoid(curve, dx=1 / 14) for curve in expected]
        assert np.allclose([result.insertion_auc[i], result.deletion_auc[i]], areas, atol=1e-6)


@SETTINGS
@given(
    arrays(
        np.float32, (2, 5, 7), elements=st.sampled_from([-1.0, 0.0, 0.25, 1.0]) | st.floats(-2, 2, width=32)
    ),
    st.integers(1, 60),
)
def test_the_order_is_that_of_the_budget(values: np.ndarray, steps: int) -> None:
    changes = change_steps(torch.from_numpy(values), (5, 7), steps)
    assert changes.min() >= 1 and changes.max() == steps
    pixels = torch.from_numpy(values).clamp(min=0)
    marked = pixels > pixels.amin((1, 2), keepdim=True)  # a budget keeps no pixel at the minimum
    for k in range(1, steps + 1):
        changed = changes <= k
        assert (changed.flatten(1).sum(1) == k * 35 // steps).all()
        if k * 35 // steps:
            assert torch.equal(changed & marked, budget_masks(values, k / steps) & marked)


def tiny() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(3 * 16, 5)).eval()


def test_passes_are_counted() -> None:
    net, images = tiny(), torch.randn(3, 3, 16, 16)
    maps = {name: torch.rand(3, 16, 16) for name in "abc"}
    needed = 3 * 3 * 2 * 99 + 2 * 3
    for batch in (7, 64):
        with counting(net) as passes:
            result = insertion_deletion(maps, model=net, images=images, batch_size=batch)
        tried = passes.batches[0] == 1  # the folded network, once
        assert passes.forward - tried == math.ceil(needed / batch) and sum(passes.batches) - tried == needed
        assert max(passes.batches) == batch and passes.backward == 0
        assert all(curves.passes == 3 * 200 and not curves.adaptive for curves in result.values())
    with counting(net) as passes:
        result = insertion_deletion(maps, model=net, images=images, adaptive=True, batch_size=64)
    assert needed / 3 >= 3 * 3 * 64 + 2 * 3 >= sum(passes.batches) - 1
    assert all(curves.passes == 3 * 66 and curves.adaptive for curves in result.values())


def test_progress_counts_every_input() -> None:
    seen: list[int] = []
    result = insertion_deletion(
        torch.rand(2, 4, 4), model=tiny(), images=torch.randn(2, 3, 16, 16), progress=seen.append
    )
    assert sum(seen) == result.passes == 400


def test_end_points_are_the_image_and_the_baseline(cnn: nn.Sequential) -> None:
    images = torch.randn(4, 3, 32, 32)
    maps = hp.explain(cnn, images, ["gradcam", "random"])
    result = insertion_deletion(
        maps, torch.tensor([0, 1, 2, 3]), model=cnn, images=images, baseline="mean", steps=10
    )
    ends = [images, baseline_images(Model(cnn), images, "mean")]
    whole, empty = (cnn(end).softmax(1)[torch.arange(4), torch.arange(4)] for end in ends)
    for curves in result.values():
        assert torch.allclose(curves.deletion[:, 0], whole) and torch.allclose(curves.deletion[:, -1], empty)
        assert torch.equal(curves.insertion[:, -1], curves.deletion[:, 0])
        assert torch.equal(curves.insertion[:, 0], curves.deletion[:, -1])


@pytest.mark.parametrize("adaptive", [False, True])
def test_batch_size_order_and_company_do_not_matter(adaptive: bool) -> None:
    net = tiny().double()
    images = torch.randn(5, 3, 16, 16, dtype=torch.float64)
    maps = hp.explain(net, images, ["gradient", "edges"])
    options: dict[str, Any] = {"adaptive": adaptive, "targets": 2, "steps": 40}
    whole = insertion_deletion(maps, **options, model=net, images=images, batch_size=200)["edges"]
    small = insertion_deletion(maps, **options, model=net, images=images, batch_size=3)["edges"]
    alone = insertion_deletion(maps["edges"], **options, model=net, images=images)
    turned = insertion_deletion(maps["edges"].values.flip(0), **options, model=net, images=images.flip(0))
    for other in (small, alone):
        assert torch.allclose(whole.insertion, other.insertion, atol=1e-9)
        assert torch.allclose(whole.deletion_auc, other.deletion_auc, atol=1e-7)
    assert torch.allclose(whole.deletion, turned.deletion.flip(0), atol=1e-9)


def test_rescaling_a_map_changes_nothing(cnn: nn.Sequential) -> None:
    images, values = torch.randn(2, 3, 32, 32), torch.randn(2, 8, 8)
    first, second = (
        insertion_deletion(v, 0, model=cnn, images=images, steps=20) for v in (values, 4 * values)
    )
    assert torch.equal(first.insertion, second.insertion)


def test_targets_default_to_the_prediction(cnn: nn.Sequential) -> None:
    images, values = torch.randn(6, 3, 32, 32), torch.rand(6, 8, 8)
    predicted = cnn(images).argmax(1)
    result = insertion_deletion(values, model=cnn, images=images, steps=5, batch_size=4)
    named = insertion_deletion(values, predicted, model=cnn, images=images, steps=5)
    assert torch.equal(result.targets, predicted) and torch.allclose(
        result.insertion, named.insertion, atol=1e-6
    )


def test_a_constant_map_is_not_scored_and_costs_nothing(cnn: nn.Sequential) -> None:
    images, values = torch.randn(3, 3, 32, 32), torch.rand(3, 8, 8)
    values[1] = -0.3
    for adaptive in (False, True):
        with counting(cnn) as passes:
            result = insertion_deletion(values, 0, model=cnn, images=images, adaptive=adaptive)
        assert (
            result.insertion_auc.isnan().tolist()
            == result.deletion_auc.isnan().tolist()
            == [False, True, False]
        )
        assert result.insertion[1].isnan().all() and not result.deletion[[0, 2]].isnan().any()
        assert [bool(reason) for reason in result.scores.reasons("insertion")] == [False, True, False]
        assert result.flat.double().mean() == pytest.approx(1 / 3)
        assert result.passes == 2 * 2 * (32 if adaptive else 99) + 6
        assert 0 <= sum(passes.batches) - result.passes <= 2  # inputs that try the folded network


def test_the_model_is_left_as_it_was() -> None:
    net = small_cnn().train()
    net[4].weight.requires_grad_(False)
    images, values = torch.randn(2, 3, 32, 32), torch.rand(2, 4, 4)
    before, state = {k: v.clone() for k, v in net.state_dict().items()}, torch.get_rng_state()
    insertion_deletion(values, model=net, images=images, baseline="noise", steps=4)
    part_occlusion(torch.ones(32, 32), model=net, images=images)
    with pytest.raises(TargetError):
        insertion_deletion(values, 9, model=net, images=images, steps=4)
    assert torch.equal(state, torch.get_rng_state())
    assert all(part.training for part in net.modules())
    assert [weight.requires_grad for weight in net.parameters()].count(False) == 1
    assert not net._forward_hooks and all(p.grad is None for p in net.parameters())
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


def visit_adaptively(full: Tensor) -> Tensor:
    """What the adaptive mode makes of "2 m n+1" curves, when looking at a point is reading it off."""
    plan = adaptive_plan(full.shape[-1] - 1)
    curves = torch.full_like(full, torch.nan)
    curves[..., :: plan.stride] = full[..., :: plan.stride]
    curves[..., -1] = full[..., -1]
    for more in plan.rounds:
        points = next_points(curves, more)
        assert (points.sum((0, 2)) == more).all() and curves[points].isnan().all()
        curves = torch.where(points, full, curves)
    return curves


@SETTINGS
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0.0, 0.5), st.booleans()), min_size=2, max_size=2))
def test_adaptive_areas_of_rising_and_falling_curves(shapes: list[tuple[float, float, bool]]) -> None:
    x = torch.linspace(0, 1, 101, dtype=torch.float64)
    full = torch.stack(
        [torch.sigmoid((x - at) / (width / 6 + 1e-4) * (1 if up else -1)) for at, width, up in shapes]
    )
    curves = visit_adaptively(full[:, None])
    assert (~curves[..., 1:-1].isnan()).sum() == 64
    assert (area(straight_lines(curves)) - area(full[:, None])).abs().max() < 0.005


def test_adaptive_is_better_than_an_even_grid_of_as_many_points() -> None:
    """Noisy logits, so that the curves are jagged, as those of real networks are."""
    full = jagged(200)
    even = torch.full_like(full, torch.nan)
    places = torch.linspace(0, 100, 34).round().long()
    even[..., places] = full[..., places]
    errors = [(area(straight_lines(c)) - area(full)).abs() for c in (visit_adaptively(full), even)]
    missed = [(error > 0.005).double().mean() for error in errors]
    assert errors[0].mean() < 0.5 * errors[1].mean() and missed[0] < 0.25 * missed[1]


def jagged(count: int, seed: int = 0) -> Tensor:
    """ "2 count 101" curves of noisy logits."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.linspace(0, 1, 101, dtype=torch.float64)
    at, scale = (torch.rand(2, count, 1, generator=generator, dtype=torch.float64) for _ in range(2))
    noise = 0.3 * torch.randn(2, count, 101, generator=generator, dtype=torch.float64)
    return torch.sigmoid((x - at) / (0.01 + 0.1 * scale) + noise)


def test_the_error_of_an_area_is_as_large_as_it_says() -> None:
    full = jagged(300)
    even = torch.full_like(full, torch.nan)
    even[..., ::5] = full[..., ::5]
    off = area(straight_lines(even)) - area(full)
    assert 0.5 < (off.square().mean() / area_errors(even).square().mean()).sqrt() < 1.5
    assert area_errors(full).abs().max() == 0


def test_a_walk_is_decided_where_it_is_known_or_plainly_on_one_side_of_every_floor() -> None:
    errors = torch.tensor([0.004, 0.008, 0.008, 0.02, 0.008]).expand(2, 5)[..., None]
    areas = torch.tensor([0.50, 0.60, 0.52, 0.90, 0.50]).expand(2, 5)[..., None]
    floors = torch.tensor([False, False, False, False, True])
    # known; plain; too near the floor; plain but too rough; a floor itself
    assert decided(areas, errors, floors)[:, 0].tolist() == [True, True, False, False, False]
    none_blank = torch.zeros(5, dtype=torch.bool)
    assert decided(areas, errors, none_blank)[:, 0].tolist() == [True, False, False, False, False]


def test_a_decided_walk_takes_fewer_points_and_says_so(cnn: nn.Sequential) -> None:
    images = torch.randn(6, 3, 32, 32)
    maps = hp.explain(cnn, images, ["gradcam", "gradient", "random", "edges"], targets=1)
    third, short = (
        insertion_deletion(maps, 1, model=cnn, images=images, adaptive=how) for how in (True, "decided")
    )
    exact = insertion_deletion(maps, 1, model=cnn, images=images)
    for name, curves in short.items():
        assert curves.adaptive == "decided" and curves.passes < third[name].passes
        assert curves.passes == int((curves.points - 4).sum()) + 2 * 6 and (curves.points >= 22).all()
        assert (curves.insertion_auc - exact[name].insertion_auc).abs().max() < 0.02
        assert {"insertion_error", "deletion_points"} <= set(curves.scores)
        assert exact[name].insertion_error.abs().max() == 0 and "insertion_error" not in exact[name].scores
    alone = insertion_deletion(
        {name: method_maps.take([3]) for name, method_maps in maps.items()}, 1, model=cnn, images=images[3:4],
        adaptive="decided", batch_size=7,
    )  # fmt: skip
    for name, curves in alone.items():
        assert curves.points.item() == short[name].points[3].item()
        torch.testing.assert_close(curves.insertion[0], short[name].insertion[3], rtol=1e-4, atol=1e-5)


def test_straight_lines_keep_what_is_known() -> None:
    nan = torch.nan
    assert straight_lines(torch.tensor([[0.0, nan, nan, 3.0, nan, 1.0]])).tolist() == [[0, 1, 2, 3, 2, 1]]
    assert straight_lines(torch.full((1, 3), nan)).isnan().all()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"maps": torch.rand(3, 4, 4)}, "maps has 3 entries but images has 2"),
        ({"maps": {"a": torch.rand(2, 4, 4), "b": torch.rand(1, 4, 4)}}, "maps of b has 1 entries"),
        ({"maps": {}}, "empty dict"),
        ({"maps": torch.rand(4, 4)}, "'b h w'"),
        ({"baseline": "blurr"}, "did you mean 'blur'"),
        ({"steps": 0}, "steps must be a whole number"),
        ({"steps": 9, "adaptive": True}, "too few"),
        ({"targets": 5}, "out of range"),
        ({"targets": [0, 1, 2]}, "one target or 2"),
        ({"batch_size": 0}, "batch_size"),
        ({"adaptive": "soon"}, "true, false or 'decided'"),
    ],
)
def test_bad_input_raises_a_clear_error(cnn: nn.Sequential, change: dict[str, Any], sentence: str) -> None:
    arguments = {"images": torch.randn(2, 3, 32, 32), "maps": torch.rand(2, 4, 4), **change}
    with pytest.raises(InputError, match=sentence):
        insertion_deletion(model=cnn, **arguments)


def test_black_needs_the_models_preprocessing() -> None:
    with pytest.raises(InputError, match="'black' needs"):
        baseline_images(Model(small_cnn()), torch.randn(1, 2, 32, 32), "black")


def test_metrics_are_registered_with_their_direction() -> None:
    assert metrics.get("insertion").higher_is_better and metrics.get("deletion").higher_is_better is False
    assert metrics.get("insertion_auc").bounds == (0.0, 1.0)


class Linear(nn.Module):
    """z_k = <w_k, x>: every drop is known."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(classes, 3, 8, 8))

    def forward(self, images: Tensor) -> Tensor:
        return torch.einsum("kchw,bchw->bk", self.weight, images)


@pytest.mark.parametrize("classes", [1, 3])
def test_occlusion_of_a_linear_model_is_exact(classes: int) -> None:
    net, images = Linear(classes), torch.randn(4, 3, 8, 8)
    masks = {"finder": torch.rand(4, 8, 8) < 0.3, "timing": torch.rand(8, 8) < 0.5}
    targets = torch.tensor([0, 1, 0, 1])
    with counting(net) as passes:
        drops = part_occlusion(masks, targets, model=net, images=images, fill="mean", batch_size=5)
    assert sum(passes.batches) == 12 and passes.forward == 3
    weight = torch.cat([-net.weight, net.weight]) if classes == 1 else net.weight
    gap = images - images.mean((2, 3), keepdim=True)
    for name, mask in masks.items():
        expected = (weight[targets] * gap * mask.expand(4, 8, 8)[:, None]).sum((1, 2, 3)).detach()
        assert torch.allclose(drops[f"drop_{name}"], expected, atol=1e-5)


def test_a_mask_without_pixels_has_no_drop(cnn: nn.Sequential) -> None:
    masks = torch.zeros(2, 32, 32)
    masks[0, :9] = 1
    drops = part_occlusion(masks, 1, model=cnn, images=torch.randn(2, 3, 32, 32))
    assert drops["drop"].isnan().tolist() == [False, True]
    assert drops.reasons("drop")[0] == "" and "no pixel" in drops.reasons("drop")[1]
    with pytest.raises(InputError, match="empty dict"):
        part_occlusion({}, model=cnn, images=torch.randn(2, 3, 32, 32))
    with pytest.raises(InputError, match="one mask 'H W' or one per map"):
        part_occlusion(torch.ones(3, 32, 32), model=cnn, images=torch.randn(2, 3, 32, 32))


@SETTINGS
@given(arrays(np.float64, (2, 12), elements=st.integers(0, 4).map(float)))
def test_occlusion_correlation_is_scipys_spearman(values: np.ndarray) -> None:
    mass, drop = values
    result = occlusion_correlation(torch.from_numpy(mass), drop)
    if np.ptp(mass) and np.ptp(drop):
        expected = spearmanr(mass, drop)
        assert result == (pytest.approx(expected.statistic), pytest.approx(expected.pvalue), 12, "")
    else:
        assert (
            math.isnan(result.rho)
            and math.isnan(result.p)
            and result.n == 12
            and "same everywhere" in result.reason
        )


def test_undefined_drops_are_left_out_and_counted() -> None:
    result = occlusion_correlation([0.1, 0.2, math.nan, 0.4, 0.3], [1.0, 2.0, 3.0, 4.0, math.nan])
    assert result.n == 3 and result.rho == pytest.approx(1)
    assert "fewer than three" in occlusion_correlation([0.1, 0.2], [1.0, math.nan]).reason
    with pytest.raises(InputError, match="they must match"):
        occlusion_correlation([0.1, 0.2], [1.0])


@pytest.mark.parametrize("size", [(6, 8), (4, 6, 8)])
def test_mixed_inputs_are_picked_pixel_by_pixel_to_the_bit_and_lie_as_networks_read_them(
    size: tuple[int, ...],
) -> None:
    generator = torch.Generator().manual_seed(0)
    images, others = torch.randn(2, 3, 3, *size, generator=generator)
    rows = torch.tensor([2, 0, 0, 1, 2])
    mask = torch.rand(5, *size, generator=generator) < 0.5
    for lying in (images, images.contiguous(memory_format=memory_format(images))):
        made = mixed(mask, lying, others, rows)
        assert torch.equal(made, torch.where(mask[:, None], images[rows], others[rows]))
        assert made.is_contiguous(memory_format=memory_format(images))
    segments = torch.randint(0, 4, (3, *size), generator=generator)
    on = torch.rand(5, 4, generator=generator) < 0.5
    mask = torch.stack([on[j][segments[row]] for j, row in enumerate(rows)])
    assert torch.equal(mixed(on, images, others, rows, segments), mixed(mask, images, others, rows))
