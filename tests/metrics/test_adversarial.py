"""Adversarial fragility: the answer is held, the ball is kept, and the search finds more than noise does."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

import heatproof as hp
from conftest import randomise, same, state_of
from heatproof.errors import InputError
from heatproof.images.preprocess import Preprocess
from heatproof.metrics.sanity import _cam, _gradient, _layer, _search, adversarial_fragility, fragility
from heatproof.models.model import Model
from heatproof.run.engine import run_study
from heatproof.store import RunFolder
from tiny_study import make_study

pytestmark = pytest.mark.trains

METHODS = ["gradcam", "layercam", "gradient", "gradient-x-input"]
SIZE, EPSILON = 24, 0.05


def bars(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noise with one bright bar in it, upright (1) or lying (0)."""
    generator = torch.Generator().manual_seed(seed)
    images = 0.3 * torch.rand(count, 3, SIZE, SIZE, generator=generator)
    labels = torch.arange(count) % 2
    places = torch.randint(2, SIZE - 6, (count, 2), generator=generator).tolist()
    for image, label, (row, column) in zip(images, labels, places, strict=True):
        high, wide = (12, 3) if label else (3, 12)
        image[:, min(row, SIZE - high) :, min(column, SIZE - wide) :][:, :high, :wide] += 0.6
    return images, labels


@pytest.fixture(scope="module")
def trained() -> Model:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 12, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(12, 16, 3, padding=1),
        nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(144, 2),
    )  # fmt: skip
    images, labels = bars(128, 1)
    optimiser = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(60):
        optimiser.zero_grad()
        F.cross_entropy(net(images), labels).backward()
        optimiser.step()
    model = Model(net, preprocess=Preprocess(size=(SIZE, SIZE), resize=SIZE, mean=(0.0,) * 3, std=(1.0,) * 3))
    assert float((model.logits(bars(32, 2)[0]).argmax(1) == bars(32, 2)[1]).float().mean()) > 0.9
    return model


def test_the_search_finds_less_alike_maps_than_noise_of_the_same_size(trained: Model) -> None:
    images = bars(12, 3)[0]
    options: dict[str, Any] = {"model": trained, "images": images, "epsilon": EPSILON}
    random = fragility(METHODS, draws=3, **options)
    searched = adversarial_fragility(METHODS, steps=10, **options)
    for method in METHODS:
        for kind in ("ssim", "spearman"):
            assert float(searched[method][kind].nanmean()) < float(random[method][kind].nanmean()) - 0.02, (
                method
            )
        assert float(searched[method]["kept"].mean()) > 0.9


@pytest.mark.parametrize("layer", ["cam", None])
def test_every_found_picture_keeps_the_answer_and_the_ball(trained: Model, layer: str | None) -> None:
    images = bars(12, 4)[0]
    cam = partial(_cam, trained, _layer(trained, images, None))
    changed, succeeded = _search(
        trained, images, cam if layer else partial(_gradient, trained), EPSILON, 6, 0, {}
    )
    assert succeeded.all()
    assert torch.equal(trained.logits(changed).argmax(1), trained.logits(images).argmax(1))
    moved = (changed - images).abs()
    assert float(moved.max()) <= EPSILON * (1 + 1e-5) and float(moved.mean()) > EPSILON / 4


def test_a_network_whose_answer_always_changes_is_not_scored() -> None:
    class Flips(nn.Module):
        """Another class for every other picture but the two it knows."""

        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 2, 3, padding=1)
            self.register_buffer("known", torch.zeros(1, 3, 8, 8))

        def forward(self, x: Tensor) -> Tensor:
            changed = x.ne(self.known).any(dim=(1, 2, 3)).float()[:, None]  # type: ignore[arg-type]
            return self.conv(x).relu().mean((2, 3)) * 0.01 + torch.cat([1 - changed, changed], 1)

    torch.manual_seed(0)
    result = adversarial_fragility("gradient", model=Flips(), images=torch.zeros(1, 3, 8, 8))["gradient"]
    assert torch.isnan(result["ssim"]).all() and result["kept"].tolist() == [0.0]
    assert "changed the prediction" in result.reasons("ssim")[0]


def test_it_repeats_in_any_batch_and_leaves_the_network_alone(trained: Model) -> None:
    images = bars(3, 5)[0]
    before = state_of(trained.module)
    options: dict[str, Any] = {"model": trained, "images": images, "epsilon": EPSILON, "steps": 3}
    whole = adversarial_fragility(METHODS, **options)
    single = adversarial_fragility(METHODS, batch_size=1, **options)
    assert same(before, state_of(trained.module))
    for method in METHODS:
        torch.testing.assert_close(whole[method]["ssim"], single[method]["ssim"], rtol=0, atol=2e-2)


def test_a_transformer_is_searched_too() -> None:
    torch.manual_seed(0)
    net = randomise(
        VisionTransformer(img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=2, num_classes=3)
    )
    images = torch.rand(2, 3, 16, 16)
    result = adversarial_fragility(["gradcam", "gradient", "rollout"], model=net, images=images, steps=3)
    assert all(torch.isfinite(scores["spearman"]).all() for scores in result.values())


def test_in_a_run(tmp_path: Path) -> None:
    metrics = ["fragility(draws=1)", "adversarial_fragility(steps=2)"]
    study = make_study(
        tmp_path, images=4, methods=["gradcam", "edges"], metrics=metrics, checkpoints=["epochs/epoch01.pt"]
    )
    run_study(study, tmp_path / "run")
    rows = (
        RunFolder.open(tmp_path / "run")
        .scores()
        .sql("select method, metric, value from scores where metric like 'adversarial%' order by all")
    )
    assert {row["metric"] for row in rows} == {
        f"adversarial_fragility_{p}(steps=2)" for p in ("kept", "spearman", "ssim")
    }
    edges = [r["value"] for r in rows if r["method"] == "edges" and "ssim" in r["metric"]]
    assert len(edges) == 4 and min(edges) > 0.8  # it sees the picture alone, which barely changed


@pytest.mark.parametrize("options", [{"epsilon": 0.0}, {"steps": 0}, {"steps": 1.5}])
def test_bad_options_raise_a_clear_error(cnn: nn.Sequential, options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="epsilon > 0 and steps >= 1"):
        hp.metrics.adversarial_fragility("gradcam", model=cnn, images=torch.zeros(1, 3, 32, 32), **options)
