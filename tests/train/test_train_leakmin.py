"""FT-LeakMin against eq. 2 written out slowly in float64, and the regimes around it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_train import bright_or_dark, same, tiny, weights
from torch import Tensor, nn
from torch.nn import functional as F

from heatproof import explain
from heatproof.errors import HeatproofError, LayerError
from heatproof.models import Model, as_model
from heatproof.models.capture import tap
from heatproof.train import Data, LeakMin, ablation_grid, fit, regime_recipe, small_net
from heatproof.train.protocols import SURROGATES, cam_layer, soft_cam, unit_mass
from heatproof.train.recipe import TrainedBatch

pytestmark = pytest.mark.trains

SEED = 7  # whose first maps have mass: those of many fresh networks are clipped to nothing


def regime(name: str, model: Model, train: Data, valid: Data, **settings: Any) -> None:
    fit(model, train, valid, regime_recipe(name, **settings))


def double(seed: int = SEED, head: nn.Module | None = None) -> Model:
    """A small network in float64 whose maps have mass, in training mode from the last stage on."""
    model = tiny(seed)
    if head is not None:
        model.module.fc = head
    model.module.double()
    model.module.layer4.train()
    return model


def step_of(model: Model, data: Data) -> TrainedBatch:
    images = model.ready(model.preprocess.normalise(data.images.double() / 255))
    with tap(model.module, ["layer4"]) as taken:
        logits = model.module(images)  # model.forward would do; the module shows that logits keep float64
    return TrainedBatch(model, images, data.labels, data.masks, logits, taken)


def eq2(model: Model, data: Data, lam: float, alpha: float) -> Tensor:
    """lambda E[1[y=1] (<C, 1-M> - alpha <C, M>)], one picture, one channel, one place after the other.

    The head is spelled out, so the gradient of its logit is known without autograd: for the mean and a linear
    layer, d z_1 / d A_kij = W_1k / (h w).
    """
    features = model.module
    images = model.preprocess.normalise(data.images.double() / 255)
    activations = features.layer4(features.layer3(features.layer2(features.layer1(images))))
    _, channels, h, w = activations.shape
    terms = []
    for i in range(len(data)):
        if data.labels[i] != 1:
            terms.append(torch.zeros((), dtype=torch.float64))
            continue
        cam = torch.zeros(h, w, dtype=torch.float64)
        for k in range(channels):
            cam = cam + features.fc.weight[1, k] / (h * w) * activations[i, k]
        cam = cam.clamp(min=0)
        big = F.interpolate(cam[None, None], data.images.shape[2:], mode="bilinear", align_corners=False)[
            0, 0
        ]
        if big.sum() == 0:
            terms.append(torch.zeros((), dtype=torch.float64))
            continue
        share = big / big.sum()
        mask = data.masks["box"][i]
        terms.append(share[~mask].sum() - alpha * share[mask].sum())
    return lam * torch.stack(terms).mean()


@pytest.mark.parametrize(("lam", "alpha"), [(0.25, 0.25), (0.5, 0.0), (1.0, 1.0)])
def test_value_and_gradient_are_those_of_equation_2(lam: float, alpha: float) -> None:
    data = bright_or_dark(8)
    model, twin = double(), double()
    value = LeakMin(lam, alpha)(step_of(model, data))
    slow = eq2(twin, data, lam, alpha)
    torch.testing.assert_close(value, slow.to(value.dtype), rtol=1e-6, atol=1e-7)
    value.backward()
    slow.backward()
    for (name, ours), theirs in zip(model.module.named_parameters(), twin.module.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-8, msg=name)
    assert model.module.fc.weight.grad.abs().sum() > 0 and model.module.layer4[0].weight.grad.abs().sum() > 0


def test_the_gradient_is_the_slope_of_finite_differences() -> None:
    """With a head whose gradient depends on the activations, so that the second derivative counts."""

    class Squared(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x**2 + x)

    data = bright_or_dark(6)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        head = Squared(32, 2)
        head.weight.data.abs_()  # so that no map is without mass
    model, penalty = double(head=head), LeakMin(1.0, 0.25)
    penalty(step_of(model, data)).backward()
    for parameter in (model.module.fc.weight, model.module.layer4[3].weight):
        size: Any = parameter.shape
        direction = torch.randn(size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        slope = float((parameter.grad * direction).sum())
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter += sign * 1e-6 * direction
            values.append(float(penalty(step_of(model, data)).detach()))
            with torch.no_grad():
                parameter -= sign * 1e-6 * direction
        assert slope == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-4)
        assert abs(slope) > 1e-6


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_it_is_the_map_that_explain_gives(surrogate: str) -> None:
    model, data = tiny(SEED), bright_or_dark(6)
    images = model.preprocess.normalise(data.images.float() / 255)
    with tap(model.module, ["layer4"]) as taken:
        logits = model.forward(model.ready(images))
    positive = data.labels == 1
    step = TrainedBatch(model, images, data.labels, data.masks, logits, taken)
    ours = soft_cam(step, taken["layer4"], positive, surrogate)
    maps = explain(model, images[positive], surrogate, targets=1)[surrogate]
    theirs = F.interpolate(maps.values[:, None], images.shape[2:], mode="bilinear")[:, 0]
    torch.testing.assert_close(ours, theirs)
    assert ours.requires_grad and theirs.sum() > 0


def test_unit_mass_and_no_mass() -> None:
    maps = torch.rand(3, 4, 5, dtype=torch.float64)
    maps[1] = 0
    maps.requires_grad_()
    share = unit_mass(maps)
    assert share.sum((1, 2)).tolist() == pytest.approx([1, 0, 1])
    share.square().sum().backward()
    assert torch.isfinite(maps.grad).all() and maps.grad[1].abs().sum() == 0  # type: ignore[arg-type]


def test_a_map_without_mass_costs_nothing() -> None:
    model, data = double(), bright_or_dark(6)
    with torch.no_grad():
        model.module.fc.weight[1].fill_(-1.0)  # behind a ReLU every place speaks against class 1
    value = LeakMin()(step_of(model, data))
    assert float(value.detach()) == 0.0
    value.backward()
    assert all(p.grad is None or (p.grad == 0).all() for p in model.module.parameters())


def test_only_positives_count_and_all_pictures_are_the_mean() -> None:
    """Evaluation mode, so that pictures do not see each other through BatchNorm."""
    data, penalty = bright_or_dark(8), LeakMin()
    model = double()
    model.module.eval()
    both = float(penalty(step_of(model, data)).detach())
    positives = data.take(data.labels == 1)
    assert both == pytest.approx(float(penalty(step_of(model, positives)).detach()) / 2)
    changed = Data(data.images, data.labels, {"box": data.masks["box"].clone()})
    changed.masks["box"][changed.labels == 0] = False
    assert float(penalty(step_of(model, changed)).detach()) == both
    assert float(penalty(step_of(model, data.take(data.labels == 0)))) == 0.0


def test_lambda_0_is_ft_struct_bit_for_bit() -> None:
    data = bright_or_dark()
    results = {}
    for name, settings in {"ft-struct": {}, "ft-leakmin": {"lam": 0.0, "alpha": 0.5}, "other": {}}.items():
        model = tiny(SEED)
        kind = "ft-leakmin" if name == "other" else name
        regime(kind, model, data, data, epochs=2, batch_size=8, **settings)
        results[name] = weights(model)
    assert same(results["ft-struct"], results["ft-leakmin"])
    assert not same(results["ft-struct"], results["other"])


def test_leakmin_trains_what_ft_struct_trains_and_lowers_its_own_term() -> None:
    """Evidence is wanted in the lower half, where there is none to tell the classes apart."""
    data = bright_or_dark(32)
    data = Data(data.images, data.labels, {"box": ~data.masks["box"]})
    leaked = {}
    for lam in (0.0, 1.0):
        model = tiny()
        before = weights(model)
        regime("ft-leakmin", model, data, data, epochs=12, batch_size=8, lr=3e-3, lam=lam, alpha=0.0)
        assert same(before, weights(model), ("layer1", "layer2", "layer3"))
        assert not same(before, weights(model), ("layer4",)) and not same(before, weights(model), ("fc",))
        positives = data.take(data.labels == 1)
        images = model.preprocess.normalise(positives.images.float() / 255)
        share = unit_mass(explain(model, images, "gradcam", targets=1)["gradcam"].upsample())
        leaked[lam] = float((share * ~positives.masks["box"]).sum((1, 2)).mean())
    assert leaked[1.0] < leaked[0.0] - 0.1


def test_regimes_are_what_the_paper_says() -> None:
    (zs,), (struct,), (leak,) = (regime_recipe(name).phases for name in ("zs", "ft-struct", "ft-leakmin"))
    assert (zs.trainable, zs.penalty) == ("head", None)
    assert (struct.trainable, struct.penalty) == ("L4", None)
    assert (leak.trainable, leak.penalty) == ("L4", LeakMin(0.25, 0.25))
    assert replace(leak, penalty=None, name=struct.name) == struct
    assert [regime_recipe("ft-struct", depth=d).phases[0].trainable for d in ("head", "L3-L4", "all")] == [
        "head", "L3-L4", "all",
    ]  # fmt: skip
    assert regime_recipe("ft-struct", depth="head") == regime_recipe("zs")
    assert len(set(ablation_grid())) == 9 and next(ablation_grid()) == (0.0, 0.0)


def test_the_layer_is_the_one_cams_read() -> None:
    model, image = small_net(size=32, width=4), torch.zeros(1, 3, 32, 32)
    assert cam_layer(model, image) == "layer4" and cam_layer(model, image, "layer3.3") == "layer3.3"
    with pytest.raises(LayerError, match="no grid of a 32x32 image"):
        cam_layer(model, image, "fc")
    plain = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    )
    assert cam_layer(as_model(plain), image) == "1"


@pytest.mark.parametrize("depth", ["head", "L3-L4", "all"])
def test_leakmin_works_at_every_depth(depth: str) -> None:
    data, model = bright_or_dark(), tiny()
    before = weights(model)
    regime("ft-leakmin", model, data, data, epochs=1, batch_size=8, depth=depth)
    assert not same(before, weights(model), ("fc",))


def no_box() -> Data:
    data = bright_or_dark()
    return Data(data.images, data.labels)


def empty_box() -> Data:
    data = bright_or_dark()
    return Data(data.images, data.labels, {"box": data.masks["box"] & False})


@pytest.mark.parametrize(
    ("settings", "data", "sentence"),
    [
        ({}, no_box, "needs masks of 'box'"),
        ({}, empty_box, "12 training images of class 1 have an empty mask"),
        ({"lam": -1.0}, bright_or_dark, "0 or more"),
        ({"alpha": 1.5}, bright_or_dark, r"\[0, 1\]"),
        ({"layer": "layr4"}, bright_or_dark, "did you mean"),
        ({"depth": "L5"}, bright_or_dark, "unknown depth"),
    ],
)
def test_bad_input_raises_a_clear_error(settings: dict, data: object, sentence: str) -> None:
    model = tiny()
    before = weights(model)
    with pytest.raises(HeatproofError, match=sentence):
        regime("ft-leakmin", model, data(), data(), **settings)
    assert same(before, weights(model))


def test_unknown_regimes_are_refused() -> None:
    with pytest.raises(HeatproofError, match="did you mean 'ft-struct'"):
        regime_recipe("ft-strukt")
    with pytest.raises(HeatproofError, match="take ft-struct"):
        regime_recipe("zs", depth="L4")


def test_a_transformer_can_be_trained_this_way() -> None:
    timm = pytest.importorskip("timm")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = timm.create_model(
            "vit_tiny_patch16_224",
            img_size=32,
            patch_size=8,
            depth=4,
            embed_dim=24,
            num_heads=2,
            num_classes=2,
        )
    model, data = as_model(module.eval()), bright_or_dark(8, size=32)
    before = weights(model)
    history = fit(model, data, data, regime_recipe("ft-leakmin", epochs=1, batch_size=8))
    after = weights(model)
    assert same(before, after, ("patch_embed", "blocks.0", "blocks.1", "blocks.2", "pos_embed"))
    assert not same(before, after, ("blocks.3",)) and history.epochs[0].loss > 0
