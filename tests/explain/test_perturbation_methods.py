"""LIME, RISE and the floors against the lime package, scikit-learn, scikit-image and slow twins."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
from lime import lime_image
from skimage.color import rgb2gray
from skimage.filters import sobel
from skimage.segmentation import quickshift, slic
from sklearn.linear_model import Ridge
from torch import Tensor, nn

from heatproof.errors import InputError
from heatproof.explain.api import explain
from heatproof.explain.baselines import gaussian_blur, pictures_of, segment_means, segments_of, top_segments
from heatproof.explain.masking import Masks, proximity, ridge, sample_rows
from heatproof.images.preprocess import Preprocess
from heatproof.models.model import Model, as_model
from heatproof.types import normalise

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "papers.json").read_text())["synthetic"]
PREPROCESS = Preprocess()


def small_net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5),
    ).eval()  # fmt: skip


def some_images(count: int = 2, size: tuple[int, int] = (40, 32), seed: int = 0) -> Tensor:
    """Smooth 8-bit pictures, as the models see them."""
    noise = torch.randn(count, 3, *size, generator=torch.Generator().manual_seed(seed))
    pixels = normalise(gaussian_blur(noise, 3.0).flatten(0, 1)).view_as(noise)
    return PREPROCESS.normalise((pixels * 255).round() / 255)


@contextmanager
def counted(module: nn.Module) -> Iterator[list[int]]:
    """The batch sizes of all forward passes made inside."""
    sizes: list[int] = []
    handle = module.register_forward_pre_hook(lambda _m, inputs: sizes.append(len(inputs[0])))
    try:
        yield sizes
    finally:
        handle.remove()


def checkerboard(size: Sequence[int]) -> Tensor:
    return 1.0 - 2.0 * ((torch.arange(size[0])[:, None] + torch.arange(size[1])) % 2)


class Corner(nn.Module):
    """Two classes; class 1 sees how much fine texture the upper left quarter has and nothing else."""

    def forward(self, images: Tensor) -> Tensor:
        height, width = images.shape[-2] // 2, images.shape[-1] // 2
        seen = (images * checkerboard(images.shape[-2:]))[..., :height, :width].mean((1, 2, 3))
        return torch.stack([torch.zeros_like(seen), 10 * seen], 1)


def textured_images() -> Tensor:
    """Texture too fine for segmentation to follow; a mean fill and a dark mask both remove it."""
    images = some_images()
    return images + 0.1 * checkerboard(images.shape[-2:])


# Segments


def test_segments_are_those_of_the_8_bit_picture() -> None:
    model, images = as_model(small_net()), some_images()
    pictures = (PREPROCESS.restore(images) * 255).round().byte().permute(0, 2, 3, 1).numpy()
    for picture, segments in zip(pictures, segments_of(model, images), strict=True):
        np.testing.assert_array_equal(segments, slic(picture, n_segments=100, compactness=10, start_label=0))
    for picture, segments in zip(pictures, segments_of(model, images, "quickshift", seed=3), strict=True):
        np.testing.assert_array_equal(
            segments, quickshift(picture, kernel_size=4, max_dist=200, ratio=0.2, rng=3)
        )


def test_one_channel_and_foreign_channel_counts_are_cut_too() -> None:
    for channels in (1, 4):
        model = Model(nn.Conv2d(channels, 2, 3), preprocess=PREPROCESS)
        images = some_images(2)[:, :1].repeat(1, channels, 1, 1)
        for kind in ("slic", "quickshift"):
            segments = segments_of(model, images, kind)
            assert segments.shape == (2, 40, 32)
            for cut in segments:  # quickshift may find one segment only in so small a picture
                assert cut.unique().tolist() == list(range(int(cut.max()) + 1))
                assert kind == "quickshift" or cut.max() > 10
        low, high = pictures_of(model, images).aminmax()
        assert (low, high) == (0, 1)


def test_segment_means_are_means() -> None:
    values, segments = torch.rand(2, 3, 6, 5), torch.randint(0, 4, (2, 6, 5))
    means = segment_means(values, segments)
    for b in range(2):
        for s in segments[b].unique():
            torch.testing.assert_close(means[b, :, s], values[b][:, segments[b] == s].mean(1))


# LIME


@pytest.mark.parametrize("share", GOLDEN["lime_kernel"])
def test_lime_kernel(share: str) -> None:
    on, of = map(int, share.split("/"))
    rows = torch.zeros(1, 2, of + 7, dtype=torch.bool)  # seven numbers that this image does not use
    rows[0, 0, :of] = True
    rows[0, 1, :on] = True
    assert proximity(rows)[0].tolist() == pytest.approx([1.0, GOLDEN["lime_kernel"][share]], abs=5e-9)


def test_a_row_with_nothing_on_is_at_distance_one() -> None:
    rows = torch.tensor([[[True, True], [False, False]]])
    assert proximity(rows)[0, 1].item() == pytest.approx(math.sqrt(math.exp(-1 / 0.25**2)))


def test_ridge_is_scikit_learns_for_every_image_of_a_padded_batch() -> None:
    counts = [12, 5]
    rows = sample_rows([c - 1 for c in counts], 60, seed=2)
    scores = torch.rand(2, 60, generator=torch.Generator().manual_seed(0))
    weights = proximity(rows)
    coefficients, _ = ridge(rows, scores, weights)
    for i, count in enumerate(counts):
        reference = Ridge(alpha=1, fit_intercept=True)
        reference.fit(
            rows[i, :, :count].double().numpy(), scores[i].double().numpy(), sample_weight=weights[i].numpy()
        )
        np.testing.assert_allclose(coefficients[i, :count], reference.coef_, atol=1e-10)
        assert not coefficients[i, count:].any()


def test_rows_start_with_everything_on_and_are_fair_coins_after() -> None:
    rows = sample_rows([99], 1000, seed=0)
    assert rows[0, 0].all()
    assert rows[0, 1:].float().mean().item() == pytest.approx(0.5, abs=0.01)


class FixedRows:
    """Stands where the lime package draws its samples, so that both see the same."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows.numpy().astype(int)

    def randint(self, low: int, high: int, size: int) -> np.ndarray:
        assert (low, high, size) == (0, 2, self.rows.size)
        return self.rows.flatten()


def explained_by_the_lime_package(
    net: nn.Module, image: Tensor, segments: Tensor, rows: Tensor, target: int
) -> Any:
    @torch.no_grad()
    def classify(pixels: np.ndarray) -> np.ndarray:
        return net(torch.from_numpy(pixels).permute(0, 3, 1, 2).float()).softmax(1).numpy()

    package = lime_image.LimeImageExplainer(feature_selection="none", random_state=0)
    package.random_state = FixedRows(rows)
    return package.explain_instance(
        image.permute(1, 2, 0).double().numpy(),
        classify,
        labels=(target,),
        top_labels=None,
        num_samples=len(rows),
        batch_size=50,
        segmentation_fn=lambda _: segments.numpy(),
        random_seed=0,
    )


def tiny_vit() -> nn.Module:
    sizes: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
    return timm.create_model("vit_tiny_patch16_224", num_classes=5, **sizes)


@pytest.mark.parametrize("name", ["cnn", "resnet18", "vit"])
@pytest.mark.parametrize("kind", ["slic", "quickshift"])
def test_lime_is_the_lime_package(name: str, kind: str) -> None:
    torch.manual_seed(2)
    builders = {
        "cnn": small_net,
        "resnet18": lambda: torchvision.models.resnet18(num_classes=5),
        "vit": tiny_vit,
    }
    net, target, samples = builders[name]().eval(), 3, 60
    images = some_images(2, (32, 32))
    method = f"lime(samples={samples}, segments='{kind}', form='published')"
    maps = explain(net, images, [method], targets=target, seed=4)[method]
    cut = segments_of(as_model(net), images, kind, seed=4)
    for i, image in enumerate(images):
        rows = sample_rows([int(cut[i].max())], samples, seed=4)[0]
        reference = explained_by_the_lime_package(net, image, cut[i], rows, target)
        weights = dict(reference.local_exp[target])
        painted = torch.tensor([weights[s] for s in range(len(weights))])[cut[i]]
        torch.testing.assert_close(maps.normalised()[i], normalise(painted[None])[0], atol=1e-4, rtol=0)
        largest = float(painted.abs().max())
        torch.testing.assert_close(maps.signed[i] / largest, (painted / largest).float(), atol=1e-4, rtol=0)
        for signed, count in ((False, 5), (True, 10)):
            _, expected = reference.get_image_and_mask(target, positive_only=not signed, num_features=count)
            top = top_segments(maps.signed[i : i + 1], cut[i : i + 1], count, signed)[0]
            np.testing.assert_array_equal(top, expected)


def test_lime_finds_the_corner() -> None:
    (maps,) = explain(Corner(), textured_images(), ["lime(samples=400)"], targets=1).values()
    inside, outside = maps.signed[:, :16, :12], maps.signed[:, 26:, 20:]  # clear of segments on the border
    assert inside.mean() > 10 * outside.abs().mean()


# RISE


def test_rise_masks_are_the_papers() -> None:
    """Enlarge the whole grid by one cell more than the image, then crop; sizes that 7 does not divide."""
    masks = Masks((30, 44), 40, 7, 0.5, seed=3, device=torch.device("cpu"))
    random = np.random.default_rng(3)
    grids = random.random((40, 7, 7)) < 0.5
    down, across = random.integers(0, 6, 40), random.integers(0, 8, 40)
    for i in range(40):
        grid = torch.from_numpy(grids[i]).double()[None, None]
        wide = nn.functional.interpolate(grid, size=(8 * 5, 8 * 7), mode="bilinear", align_corners=False)[
            0, 0
        ]
        crop = wide[down[i] : down[i] + 30, across[i] : across[i] + 44]
        torch.testing.assert_close(masks[i : i + 1][0].double(), crop, atol=1e-6, rtol=0)
    torch.testing.assert_close(masks[:40], torch.cat([masks[:13], masks[13:40]]))


def test_rise_as_published_is_its_slow_twin() -> None:
    net, images = small_net(), some_images(2, (28, 21))
    (maps,) = explain(net, images, ["rise(masks=50, p=0.4, form='published')"], targets=2, seed=9).values()
    masks = Masks((28, 21), 50, 7, 0.4, seed=9, device=torch.device("cpu"))[:50].double()
    net = net.double()
    for i, image in enumerate(images.double()):
        total = torch.zeros(28, 21, dtype=torch.float64)
        for mask in masks:
            with torch.no_grad():
                total += net((image * mask)[None]).softmax(1)[0, 2] * mask
        torch.testing.assert_close(maps.values[i], (total / (50 * 0.4)).float(), atol=1e-5, rtol=0)
        torch.testing.assert_close(maps.normalised()[i], normalise(total[None])[0], atol=1e-4, rtol=0)


def test_rise_finds_the_corner() -> None:
    (maps,) = explain(Corner(), textured_images(), ["rise(masks=2000)"], targets=1).values()
    values = maps.normalised()
    assert values[:, :18, :14].mean() > 2 * values[:, 22:, 18:].mean()


# Floors


def test_random_depends_on_the_image_and_the_seed_alone() -> None:
    net, images = small_net(), some_images(3)
    whole = explain(net, images, "random", seed=1)["random"].values
    assert torch.equal(explain(net, images[1:2], "random", seed=1)["random"].values[0], whole[1])
    assert torch.equal(
        explain(net, images.flip(0), "random", seed=1, batch_size=2)["random"].values.flip(0), whole
    )
    assert not torch.equal(whole[0], whole[1])
    assert not torch.equal(explain(net, images, "random", seed=2)["random"].values, whole)
    assert whole.mean().item() == pytest.approx(0.5, abs=0.02)
    assert whole.min() >= 0 and whole.max() == 1


def test_edges_are_scikit_images_sobel() -> None:
    images = some_images()
    result = explain(small_net(), images, "edge-detector")["edge-detector"].values
    for image, map_ in zip(images, result, strict=True):
        grey = rgb2gray(PREPROCESS.restore(image).permute(1, 2, 0).double().numpy())
        np.testing.assert_allclose(map_, sobel(grey), atol=1e-6)


@pytest.mark.parametrize("size", [(8, 8), (9, 7), (40, 32), (224, 224)])
def test_centre_is_highest_exactly_in_the_centre(size: tuple[int, int]) -> None:
    maps = explain(small_net(), torch.zeros(2, 3, *size), "center")["center"]
    values = maps.upsample()
    for map_ in values:
        assert (map_ == 1).nonzero().tolist() == [[size[0] // 2, size[1] // 2]]
    assert not maps.degenerate.any()


def test_floors_know_no_class_and_cost_no_pass() -> None:
    net, images = small_net(), some_images()
    floors = ["random", "edges", "centre"]
    with counted(net) as sizes:
        first = explain(net, images, floors, targets=0)
    assert sizes == [2]
    other = explain(net, images, floors, targets=4)
    assert all(torch.equal(first[f].values, other[f].values) for f in floors)


# What it costs, and what it must not depend on

METHODS = ["lime(samples=23)", "lime(samples=23, segments='quickshift')", "rise(masks=23)"]


@pytest.mark.parametrize("method", METHODS)
def test_variants_of_all_images_share_full_batches(method: str) -> None:
    net = small_net()
    with counted(net) as sizes:
        explain(net, some_images(3), [method], batch_size=4)
    assert len(sizes) == math.ceil(23 * 3 / 4) + 1
    assert max(sizes) == 4


def test_neither_batch_size_nor_order_matters_and_seeds_repeat() -> None:
    net, images = small_net().double(), some_images(3)
    cut = segments_of(as_model(net), images)
    assert len(cut.flatten(1).amax(1).unique()) > 1, "images with equal segment counts would prove less"
    whole = explain(net, images, METHODS, targets=1, seed=5)
    others = {
        "one by one": explain(net, images, METHODS, targets=1, seed=5, batch_size=1),
        "in sevens": explain(net, images, METHODS, targets=1, seed=5, batch_size=7),
        "backwards": explain(net, images.flip(0), METHODS, targets=1, seed=5),
        "again": explain(net, images, METHODS, targets=1, seed=5),
    }
    for how, maps in others.items():
        for method in METHODS:
            result = maps[method].values.flip(0) if how == "backwards" else maps[method].values
            torch.testing.assert_close(
                result, whole[method].values, atol=1e-6, rtol=1e-5, msg=f"{method} {how}"
            )
    other = explain(net, images, METHODS, targets=1, seed=6)
    assert not any(torch.equal(other[m].values, whole[m].values) for m in METHODS)


def test_one_logit_models_explain_both_classes() -> None:
    net = nn.Sequential(small_net(), nn.Linear(5, 1))
    down, up = (
        explain(net, some_images(), "lime(samples=40)", targets=t)["lime(samples=40)"].signed for t in (0, 1)
    )
    torch.testing.assert_close(down, -up, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("method", "word"),
    [
        ("lime(samples=0)", "samples"),
        ("lime(segments='grid')", "segments"),
        ("lime(compactness=0)", "compactness"),
        ("rise(masks=1.5)", "masks"),
        ("rise(p=0)", "p must be"),
    ],
)
def test_bad_options_get_a_clear_error(method: str, word: str) -> None:
    with pytest.raises(InputError, match=word):
        explain(Model(small_net()), some_images(), [method])
