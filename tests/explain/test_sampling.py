"""Fewer draws for RISE and LIME: pairs, designs, error bars that hold, a stop that each image finds alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import heatproof as hp
from conftest import counting
from heatproof.errors import InputError
from heatproof.explain.masking import Masks, sample_rows, uncertainty
from heatproof.types import Maps

CPU = torch.device("cpu")


def small_net() -> nn.Module:
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5),
    ).eval()  # fmt: skip
    for weight in net.parameters():
        weight.data *= 2  # unsure networks have flat maps
    return net


def sure_net() -> nn.Module:
    """The same with a class that is almost certain whatever is hidden."""
    net = small_net()
    net[-1].bias.data[2] += 4
    return net


def some_images(count: int = 3) -> Tensor:
    coarse = torch.randn(count, 3, 10, 8, generator=torch.Generator().manual_seed(4))
    return nn.functional.interpolate(coarse, scale_factor=4, mode="bilinear")


def explained(net: nn.Module, method: str, seed: int = 0, images: Tensor | None = None) -> Maps:
    (maps,) = hp.explain(
        net, some_images() if images is None else images, [method], targets=2, seed=seed
    ).values()
    return maps


# RISE


def test_pairs_of_masks_are_complements_and_cells_of_a_block_are_orthogonal() -> None:
    masks = Masks((30, 44), 512, 7, 0.5, seed=3, device=CPU, paired=True)
    torch.testing.assert_close(masks[:512][::2] + masks[:512][1::2], torch.ones(256, 30, 44))
    assert torch.equal(masks.shifts[:, ::2], masks.shifts[:, 1::2])
    cells = 2 * masks.grids.flatten(1) - 1
    for start in range(0, 512, 128):  # every two cells as often alike as not
        block = cells[start : start + 128]
        assert torch.equal(block.T @ block, 128 * torch.eye(49))
        assert len(masks.shifts[:, start : start + 128].unique(dim=1).T) == 1
    assert len({tuple(shift) for shift in masks.shifts.T.tolist()}) == 4


def test_fewer_masks_are_the_first_ones_of_more() -> None:
    few, many = (Masks((20, 20), n, 7, 0.5, 3, CPU, paired=True) for n in (200, 512))
    assert torch.equal(few[:200], many[:200])
    assert not torch.equal(Masks((20, 20), 200, 7, 0.5, 4, CPU, paired=True)[:200], few[:200])


def test_each_paired_mask_by_itself_is_drawn_as_in_the_paper() -> None:
    for p in (0.5, 0.3):
        grids = torch.stack([Masks((20, 20), 6, 7, p, seed, CPU, paired=True).grids for seed in range(400)])
        assert (grids.mean(0) - p).abs().max() < 0.12  # 400 draws of each cell: four and a half deviations
        assert grids.mean().item() == pytest.approx(p, abs=0.01)
        assert len(grids.flatten(2).unique(dim=0)) == 400


@pytest.mark.parametrize("form", ["centred", "paired"])
@pytest.mark.parametrize("p", [0.5, 0.4])
def test_rise_is_its_slow_twin(form: str, p: float) -> None:
    net, images = small_net(), some_images(2)
    maps = explained(net, f"rise(masks=150, p={p}, form='{form}')", 9, images)
    masks = Masks((40, 32), 150, 7, p, 9, CPU, form == "paired")[:150].double()
    net = net.double()
    for i, image in enumerate(images.double()):
        with torch.no_grad():
            scores = [net((image * mask)[None]).softmax(1)[0, 2] for mask in masks]
        mean = sum(scores) / 150
        total = sum((score - mean) * mask for score, mask in zip(scores, masks, strict=True))
        torch.testing.assert_close(maps.values[i].double(), mean + total / (150 * p), atol=1e-5, rtol=0)
    assert maps.passes is not None and maps.passes.tolist() == [150, 150]


def test_all_forms_mean_the_same_map_and_the_paired_one_gets_there_first() -> None:
    """A sure network: what is published is mostly how often each pixel happened to be shown."""
    net, images = sure_net(), some_images(2)
    exact = explained(net, "rise(masks=16384, form='paired')", 77, images).values
    assert exact.mean() > 0.9
    errors = {
        form: torch.stack(
            [explained(net, f"rise(masks={n}, form='{form}')", s, images).values for s in range(4)]
        )
        - exact
        for form, n in (("published", 1024), ("centred", 1024), ("paired", 256))
    }
    shape = {k: (e - e.mean((2, 3), keepdim=True)).square().mean().sqrt() for k, e in errors.items()}
    assert shape["paired"] < shape["centred"] < 0.1 * shape["published"]  # with a quarter of the masks
    lost = errors["published"].mean((0, 2, 3)).abs().max()
    assert lost < 0.01  # no other expectation, only more noise


# LIME


def test_designed_rows_are_pairs_of_orthogonal_columns() -> None:
    rows = sample_rows([59, 20], 257, seed=2, form="designed")
    assert rows[:, 0, :21].all() and rows[0, 0].all() and not rows[1, :, 21:].any()
    for i, segments in enumerate((60, 21)):
        block = rows[i, 1:129, :segments] if segments == 60 else rows[i, 1:65, :segments]
        signs = 2 * block.double() - 1
        assert torch.equal(signs[::2], -signs[1::2])
        assert torch.equal(signs.T @ signs, len(signs) * torch.eye(segments, dtype=torch.float64))


@pytest.mark.parametrize("form", ["designed", "paired", "published"])
def test_fewer_rows_are_the_first_ones_of_more(form: str) -> None:
    few, many = (sample_rows([30, 12], n, 5, form) for n in (90, 400))
    assert torch.equal(few, many[:, :90])
    assert many[0, 1:].float().mean().item() == pytest.approx(0.5, abs=0.02)


# Error bars


@pytest.mark.parametrize(
    "method", ["rise(masks=640, form='paired')", "rise(masks=640, form='published')",
               "lime(samples=200, segment_count=30, form='designed')",
               "lime(samples=200, segment_count=30, form='paired')",
               "lime(samples=200, segment_count=30, form='published')"],
)  # fmt: skip
def test_error_bars_are_as_wide_as_maps_of_other_seeds_differ(method: str) -> None:
    maps = [explained(small_net(), method, seed) for seed in range(16)]
    spread = torch.stack([map_.values for map_ in maps]).std(0)
    estimated = torch.stack([map_.error for map_ in maps if map_.error is not None]).square().mean(0).sqrt()
    assert estimated.shape == spread.shape == (3, 40, 32)
    assert 0.75 < (spread.square().mean() / estimated.square().mean()).sqrt().item() < 1.3


def test_too_few_draws_have_no_error_bar() -> None:
    for method in ("rise(masks=100, form='paired')", "lime(samples=10, segment_count=30)"):
        error = explained(small_net(), method).error
        assert error is not None and error.isinf().all()


# auto


AUTO = [
    "rise(masks='auto', form='paired')",
    "lime(samples='auto', segment_count=30, form='designed', bound=0.012)",
]


@pytest.mark.parametrize("method", AUTO)
def test_auto_stops_where_each_image_is_settled_and_is_the_map_of_that_many(method: str) -> None:
    net = small_net()
    with counting(net) as passes:
        maps = explained(net, method)
    assert maps.passes is not None and maps.error is not None
    assert len(maps.passes.unique()) > 1, "images that all stop together would prove less"
    extra = sum(passes.batches) - int(maps.passes.sum())  # an image that is done costs no more
    assert 3 <= extra <= 4  # the shared pass, and one input that tries the folded network
    bound = 0.012 if "bound" in method else 0.2
    assert (uncertainty(maps.values, maps.error) <= bound).all()
    for i, n in enumerate(maps.passes.tolist()):
        alone = explained(net, method, images=some_images()[i : i + 1])
        fixed = explained(net, method.replace("'auto'", str(n)), images=some_images()[i : i + 1])
        assert alone.passes is not None and alone.passes.tolist() == [n]
        for other in (alone, fixed):
            torch.testing.assert_close(other.values[0], maps.values[i], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "ceiling"),
    [("rise(masks='auto', bound=1e-4)", 4096), ("lime(samples='auto', bound=1e-9)", 1000)],
)
def test_auto_ends(method: str, ceiling: int) -> None:
    maps = explained(small_net(), method, images=some_images(1))
    assert maps.passes is not None and maps.passes.tolist() == [ceiling]


def test_a_map_in_which_nothing_changes_is_settled_at_once() -> None:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(3 * 40 * 32, 5))
    flat[1].weight.data.zero_()
    maps = explained(flat, "rise(masks='auto', form='paired')")
    assert maps.passes is not None and maps.passes.tolist() == [512] * 3


def test_uncertainty_is_the_error_of_the_top_beside_its_height() -> None:
    values, error = torch.rand(2, 10, 10), torch.rand(2, 10, 10)
    for map_, error_map, share in zip(values, error, uncertainty(values, error), strict=True):
        top = np.argsort(-map_.numpy().ravel())[:20]
        doubt = np.sqrt(np.mean(error_map.numpy().ravel()[top] ** 2))
        height = map_.numpy().ravel()[top].mean() - map_.numpy().mean()
        assert share.item() == pytest.approx(doubt / height, rel=1e-5)


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        ("rise(masks='many')", "at least 1 or 'auto'"),
        ("lime(samples=0)", "at least 1 or 'auto'"),
        ("rise(form='raw')", "'paired', 'centred' or 'published'"),
        ("lime(form='raw')", "'designed', 'paired' or 'published'"),
        ("lime(samples='auto', bound=0)", "bound must be above 0"),
    ],
)
def test_bad_options_raise_a_clear_error(method: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        explained(small_net(), method)


def test_error_and_passes_travel_with_the_maps(tmp_path: Path) -> None:
    maps = explained(small_net(), "rise(masks=300, form='paired')")
    assert maps.error is not None and maps.passes is not None
    taken = maps.take([2])
    assert taken.error is not None and torch.equal(taken.error[0], maps.error[2])
    both = Maps.concatenate([maps, taken])
    assert both.error is not None and len(both.error) == 4 and both.passes is not None
    maps.save(tmp_path / "maps.npz")
    with np.load(tmp_path / "maps.npz") as file:
        np.testing.assert_array_equal(file["error"], maps.error.numpy())
        assert file["passes"].tolist() == [300, 300, 300]
