"""Sanity of maps: randomised weights, shifted inputs, small noise, and the distance to the floors."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from skimage.metrics import structural_similarity
from torch import Tensor, nn

import heatproof as hp
from conftest import counting, small_cnn
from heatproof.errors import InputError, ModelError
from heatproof.metrics.results import above_floors
from heatproof.metrics.sanity import (
    KINDS,
    _shifted_copy,
    fragility,
    input_shift,
    model_edit,
    parameter_randomisation,
    randomisation,
)
from heatproof.models import derived
from heatproof.models.derived import copy_of, reinitialise, untrained_copy
from heatproof.models.heads import Multilabel
from heatproof.models.model import Model

HEAD_FIRST = ["11", "7", "4", "1", "0"]  # modules of small_cnn with weights


@pytest.fixture
def images() -> Tensor:
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def test_edges_stay_and_gradcam_falls_when_weights_are_random(cnn: nn.Sequential, images: Tensor) -> None:
    result = parameter_randomisation(["gradcam", "gradient", "edges"], model=cnn, images=images)
    assert all(curve.x == HEAD_FIRST and curve.randomised == [1, 2, 3, 4, 5] for curve in result.values())
    assert all(torch.allclose(score, torch.ones(3, 5)) for score in result["edges"].values.values())
    assert torch.allclose(result["edges"].scores["spearman"], torch.ones(3))
    for method in ("gradcam", "gradient"):
        assert (result[method].scores["ssim"] < 0.5).all() and result[method].spearman[:, -1].mean() < 0.5
    means = randomisation(["gradcam", "gradient", "edges"], model=cnn, images=images)
    assert all(means[m][k].equal(result[m].scores[k]) for m in result for k in KINDS)


def test_a_cached_twin_equals_a_new_twin_and_is_drawn_once(
    cnn: nn.Sequential, images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []

    def counted(module: nn.Module, names: list[str], seed: int) -> None:
        drawn.append(seed)
        reinitialise(module, names, seed)

    monkeypatch.setattr(derived, "reinitialise", counted)
    wrapped, before = Model(cnn), copy.deepcopy(cnn.state_dict())
    wrapped.facts.keeps_twin = True
    for _ in range(2):
        for seed in (3, 4):
            result, expected = (
                parameter_randomisation("gradient", 1, model=model, images=images, seed=seed)
                for model in (wrapped, Model(cnn))
            )
            assert all(result["gradient"].values[k].equal(expected["gradient"].values[k]) for k in KINDS)
            logits = [untrained_copy(model, images, seed).logits(images) for model in (wrapped, Model(cnn))]
            assert logits[0].equal(logits[1]) and not logits[0].allclose(Model(cnn).logits(images))
    assert sorted(drawn) == [3] * 5 + [4] * 5, "four times each anew, and once for the kept one"
    assert all(weight.equal(before[name]) for name, weight in cnn.state_dict().items())
    gone = weakref.ref(wrapped)
    gc.disable()
    try:
        del wrapped
        assert gone() is None, "its twin keeps the network alive"
    finally:
        gc.enable()


def test_the_cascade_equals_its_slow_twin(cnn: nn.Sequential, images: Tensor) -> None:
    """Modules are reset one after the other on a copy, and each map is compared by other people's code."""
    result = parameter_randomisation("gradient", 2, model=cnn, images=images, seed=7)
    before = hp.explain(cnn, images, "gradient", 2)["gradient"].upsample().double().numpy()
    random = copy.deepcopy(cnn)
    with torch.random.fork_rng():
        torch.manual_seed(7)
        for depth, name in enumerate(HEAD_FIRST):
            random.get_submodule(name).reset_parameters()
            after = hp.explain(random, images, "gradient", 2)["gradient"].upsample().double().numpy()
            pairs = list(zip(before, after, strict=True))
            ssim = [structural_similarity(a, b, win_size=5, data_range=1.0) for a, b in pairs]
            rho = [spearmanr(a.ravel(), b.ravel()).statistic for a, b in pairs]
            assert np.allclose(result["gradient"].ssim[:, depth], ssim, atol=1e-5)
            assert np.allclose(result["gradient"].spearman[:, depth], rho, atol=1e-4)


def test_one_shared_pass_per_depth_and_the_model_stays(images: Tensor) -> None:
    net = small_cnn().train()
    before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    with counting(net) as passes:  # the copies take the counter along
        result = parameter_randomisation(
            ["gradcam", "layercam", "edges"], model=net, images=images, depths=3, batch_size=2
        )
    assert result["layercam"].randomised == [1, 3, 5]
    assert (
        passes.batches == [2, 1] + [1] + 3 * [2, 1] and passes.backward == 4 * 2
    )  # [1]: the order of modules
    with counting(net) as passes:
        input_shift(["gradcam", "gradient"], model=net, images=images)
        fragility(["gradcam", "gradient"], model=net, images=images, draws=2)
    assert torch.equal(state, torch.get_rng_state()) and all(part.training for part in net.modules())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert not net._forward_hooks and all(weight.requires_grad for weight in net.parameters())


def test_a_check_need_not_make_the_maps_that_another_made_of_the_network_as_it_is(images: Tensor) -> None:
    net, methods = small_cnn(seed=5), ["gradcam", "smoothgrad(samples=4)"]
    known: dict[Any, Any] = {}
    inputs: dict[str, Any] = {"model": net, "images": images}
    for targets in (torch.zeros(len(images)).long(), torch.ones(len(images)).long()):
        with counting(net) as passes:
            alone = input_shift(methods, targets, **inputs)
        needed = sum(passes.batches)
        parameter_randomisation(methods, targets, depths=1, known=known, **inputs)
        with counting(net) as passes:
            result = input_shift(methods, targets, known=known, **inputs)
        assert sum(passes.batches) == needed - 5 * len(images)  # a shared pass and four samples
        for method in methods:
            assert torch.equal(result[method]["ssim"], alone[method]["ssim"])
    assert len(known) == 2


def test_the_seed_decides(cnn: nn.Sequential, images: Tensor) -> None:
    first, again, other = (
        randomisation("gradcam", model=cnn, images=images, depths=1, seed=seed)["gradcam"]["ssim"]
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, again) and not torch.allclose(first, other)


class Tokens(nn.Module):
    """A parameter of its own, weights that run inside another module, a module that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)
        self.spare = nn.Linear(8, 3)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.patch = nn.Conv2d(3, 8, 8, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patch(images).flatten(2).mT
        tokens = torch.cat([self.token.expand(len(tokens), -1, -1), tokens], 1)
        return self.head(self.attention(tokens, tokens, tokens)[0][:, 0])


def test_every_weight_becomes_random_in_the_order_modules_run(images: Tensor) -> None:
    torch.manual_seed(0)
    net = Tokens().eval()
    result = parameter_randomisation("gradient", model=net, images=images, depths=None)
    names = result["gradient"].x
    assert names[:3] == ["head", "attention", "attention.out_proj"] and names[3] == "patch"
    assert set(names[4:]) == {"(top)", "spare"}
    assert (result["gradient"].spearman[:, -1] < 0.9).all()


def test_a_model_that_cannot_be_randomised_says_so(cnn: nn.Sequential, images: Tensor) -> None:
    with pytest.raises(ModelError, match="no parameters"):
        parameter_randomisation("edges", model=nn.Sequential(nn.AvgPool2d(8), nn.Flatten()), images=images)
    with pytest.raises(InputError, match="depths must be"):
        parameter_randomisation(model=cnn, images=images, depths=0)
    with pytest.raises(ModelError, match="leads to the original weights"):
        copy_of(Model(cnn, call=lambda batch: cnn(batch)))
    cnn.cached = cnn[0].weight * 2  # type: ignore[assignment]
    with pytest.raises(ModelError, match="cannot be copied"):
        copy_of(Model(cnn))


def test_gradients_do_not_see_a_shift_that_is_taken_back(cnn: nn.Sequential, images: Tensor) -> None:
    methods = ["gradcam", "gradient", "edges", "ig(baseline='black')", "ig"]
    result = input_shift(methods, model=cnn, images=images, shift=0.7)
    for method in methods[:4]:
        assert all(torch.allclose(score, torch.ones(3), atol=1e-3) for score in result[method].values()), (
            method
        )
    assert (result["ig"]["ssim"] < 0.9).all()  # its baseline stays at zero: the paper's own example


def test_the_shift_is_taken_back_at_padded_borders_too(cnn: nn.Sequential, images: Tensor) -> None:
    twin = _shifted_copy(Model(cnn), images, 2.0)
    assert torch.allclose(twin.logits(images + 2), cnn(images), atol=1e-4)
    assert not torch.allclose(twin.logits(images), cnn(images), atol=1e-2)


def test_without_padding_the_correction_is_the_bias_of_the_paper(images: Tensor) -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 5), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    ).eval()
    biased = copy.deepcopy(net)
    with torch.no_grad():
        biased[0].bias -= 0.5 * biased[0].weight.sum((1, 2, 3))
    twin = _shifted_copy(Model(net), images, 0.5)
    assert torch.allclose(twin.module[0](images + 0.5), biased[0](images + 0.5), atol=1e-5)


class Squared(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images.square())


def test_a_shift_that_no_bias_can_undo_is_not_scored(images: Tensor) -> None:
    result = input_shift(["gradient"], model=Squared(small_cnn().eval()), images=images)["gradient"]
    assert result["ssim"].isnan().all() and "no bias" in result.reasons("spearman")[0]


def test_fragility_is_1_without_and_less_with_noise(cnn: nn.Sequential, images: Tensor) -> None:
    calm = fragility(["gradcam", "gradient"], model=cnn, images=images, epsilon=1e-7)
    loud = fragility(["gradcam", "gradient"], model=cnn, images=images, epsilon=0.05)
    for method in calm:
        assert (calm[method]["ssim"] > 0.999).all() and (calm[method]["kept"] == 1).all()
        defined = ~loud[method]["ssim"].isnan()
        assert (loud[method]["ssim"][defined] < 0.99).all() and defined.any()


def test_a_changed_prediction_is_not_scored(images: Tensor) -> None:
    class Fickle(nn.Module):
        """Says 1 where the picture is one of those given, else 0."""

        def __init__(self) -> None:
            super().__init__()
            self.known = nn.Parameter(images.clone())

        def forward(self, batch: Tensor) -> Tensor:
            gap = (batch[:, None] - self.known).abs().flatten(2).sum(2).amin(1)
            return torch.stack([gap - 1e-3, 1e-3 - gap], 1)

    result = fragility(["gradient"], model=Fickle(), images=images, draws=2)["gradient"]
    assert result["spearman"].isnan().all() and (result["kept"] == 0).all()
    assert "changed the prediction" in result.reasons("ssim")[0] and result.reasons("kept") == [""] * 3
    with pytest.raises(InputError, match="epsilon > 0"):
        fragility(model=Fickle(), images=images, epsilon=0.0)


def test_noise_moves_every_pixel_by_epsilon(images: Tensor) -> None:
    seen: list[Tensor] = []
    net = small_cnn().eval()
    net.register_forward_pre_hook(lambda _module, args: seen.append(args[0].detach().clone()))
    model = hp.load_model(net)
    fragility(["gradcam"], model=model, images=images, epsilon=0.1, draws=1)
    moved = (seen[1] - seen[0]) * torch.tensor(model.preprocess.std)[:, None, None]
    assert (
        torch.allclose(moved.abs(), torch.full_like(moved, 0.1), atol=1e-5)
        and (moved > 0).any()
        and (moved < 0).any()
    )


@pytest.mark.parametrize("check", [randomisation, input_shift, fragility])
def test_batch_size_and_order_do_not_matter(cnn: nn.Sequential, images: Tensor, check: Any) -> None:
    def scores(batch: Tensor, batch_size: int) -> Tensor:
        result = check("gradcam", model=cnn, images=batch, batch_size=batch_size)
        return result["gradcam"]["ssim"]

    whole = scores(images, 3)
    assert torch.allclose(whole, scores(images, 2), atol=1e-4)
    assert torch.allclose(whole, scores(images.flip(0), 3).flip(0), atol=1e-4)


def test_methods_that_repeat_a_pass_do_so_less_often_where_they_are_compared_with_themselves(
    images: Tensor,
) -> None:
    net = small_cnn().eval()
    often = ["smoothgrad(samples=40)", "smoothgrad(samples=3)"]
    checks = {
        "randomisation": lambda **o: randomisation(often, model=net, images=images[:1], depths=1, **o),
        "fragility": lambda **o: fragility(often, model=net, images=images[:1], draws=1, **o),
        "input_shift": lambda **o: input_shift(often, model=net, images=images[:1], **o),
    }
    for name, check in checks.items():
        counts = {}
        for budget in ("enough", "full"):
            seen: list[int] = []
            result = check(budget=budget, progress=seen.append)
            assert list(result) == often
            counts[budget] = sum(seen)
        assert (counts["enough"], counts["full"]) == (2 * (1 + 25 + 3), 2 * (1 + 40 + 3)), name
    with pytest.raises(InputError, match="'enough' or 'full'"):
        fragility("gradcam", model=net, images=images, budget="half")


def test_margins_are_paired_and_bootstrapped() -> None:
    rng = np.random.default_rng(0)
    scores = {name: rng.normal(at, 1, 40) for name, at in (("gradcam", 1.0), ("edges", 0.2), ("random", 0.0))}
    scores["gradcam"][3] = math.nan
    result = above_floors(scores, resamples=200, seed=4)
    assert list(result) == ["gradcam"] and list(result["gradcam"]) == ["random", "edges"]
    for floor, margin in result["gradcam"].items():
        gaps = np.delete(scores["gradcam"] - scores[floor], 3)
        draws = np.random.default_rng(4)
        means = [gaps[draws.integers(0, 39, 39)].mean() for _ in range(200)]
        assert margin.mean == pytest.approx(gaps.mean()) and margin.n == 39
        assert margin.interval == pytest.approx(np.quantile(means, [0.025, 0.975]))
        assert margin.share == pytest.approx((gaps > 0).mean()) and margin.above == (margin.interval[0] > 0)
    turned = above_floors(scores, higher_is_better=False)["gradcam"]["random"]
    assert turned.mean == pytest.approx(-result["gradcam"]["random"].mean) and not turned.above


def test_margins_that_are_not_defined_say_why() -> None:
    result = above_floors({"gradcam": [math.nan, 0.4], "random": torch.tensor([0.1, math.nan])})
    margin = result["gradcam"]["random"]
    assert math.isnan(margin.mean) and margin.n == 0 and margin.reason and not margin.above
    with pytest.raises(InputError, match="no floor to compare with"):
        above_floors({"gradcam": [0.1]})
    with pytest.raises(InputError, match="they must match"):
        above_floors({"gradcam": [0.1], "random": [0.1, 0.2]})


def edited_by_hand(
    cnn: nn.Sequential, image: Tensor, own: int, rival: int, method: str
) -> tuple[float, float]:
    """Both scores of one image, from networks whose weights are edited one number at a time."""

    def map_of(network: nn.Module, target: int) -> np.ndarray:
        maps = hp.explain(network, image, method, [target])[method]
        return maps.upsample()[0].double().numpy().ravel()

    features = cnn[:9](image).detach().requires_grad_()
    rows = cnn[11].weight.shape[0]
    logits = cnn[9:](features)
    score = logits[0, own] if rows > 1 else (2 * own - 1) * logits[0, 0]
    (slopes,) = torch.autograd.grad(score, features)
    shares = [float((slopes[0, k] * features[0, k].detach()).sum()) for k in range(features.shape[1])]
    after = {}
    for edit, k in (("strong", int(np.argmax(shares))), ("weak", int(np.argmin(np.abs(shares))))):
        network = copy.deepcopy(cnn)
        with torch.no_grad():
            network[7].weight[k], network[7].bias[k] = 0.0, 0.0  # the ReLU behind it is the layer
        after[edit] = map_of(network, own)
    network = copy.deepcopy(cnn)
    with torch.no_grad():
        for name in ("weight", "bias"):
            table, old = getattr(network[11], name), getattr(cnn[11], name)
            if rows == 1:
                table[0] = -old[0]
            else:
                table[own], table[rival] = old[rival], old[own]
    swapped, mine, theirs = map_of(network, own), map_of(cnn, own), map_of(cnn, rival)
    zeroed = spearmanr(mine, after["weak"])[0] - spearmanr(mine, after["strong"])[0]
    return zeroed, spearmanr(theirs, swapped)[0] - spearmanr(mine, swapped)[0]


@pytest.mark.parametrize("classes", [1, 5])
def test_model_edit_equals_networks_edited_by_hand(classes: int, images: Tensor) -> None:
    cnn = small_cnn(classes).eval()
    methods = ["gradcam++", "gradient", "eigencam", "edges", "random"]
    before = [p.clone() for p in cnn.parameters()]
    result = model_edit(methods, model=cnn, images=images)
    assert all(torch.equal(a, b) for a, b in zip(before, cnn.parameters(), strict=True))
    with torch.no_grad():
        logits = cnn(images) if classes > 1 else torch.cat([-cnn(images), cnn(images)], 1)
    best = logits.topk(2, dim=1).indices.tolist()
    for method in methods[:3]:
        for i, (own, rival) in enumerate(best):
            zeroed, swapped = edited_by_hand(cnn, images[i : i + 1], own, rival, method)
            scores = [float(result[method][name][i]) for name in ("zeroed", "swapped")]
            assert scores == pytest.approx([zeroed, swapped], abs=2e-3, nan_ok=True)
    assert (result["gradient"]["zeroed"] > 0.01).all()
    followed = result["gradient"]["swapped"]  # |gradient| is the same for both classes of one logit
    assert (followed > 0.3).all() if classes > 1 else (followed == 0).all()
    assert (result["eigencam"]["swapped"] == 0).all()  # it does not depend on the class
    for control in ("edges", "random"):
        assert all((values == 0).all() for values in result[control].values())
    alone = model_edit(["gradient"], model=cnn, images=images[1:2])["gradient"]
    assert all(torch.allclose(alone[k], result["gradient"][k][1:2], atol=1e-4) for k in alone)


def test_model_edit_refuses_a_single_label(images: Tensor) -> None:
    model = Model(small_cnn(1).eval(), head=Multilabel())
    with pytest.raises(InputError, match=r"exchanges two labels, and .* has one"):
        model_edit("gradcam", model=model, images=images)


def test_model_edit_is_undefined_where_no_row_belongs_to_a_class(images: Tensor) -> None:
    class Reversed(nn.Module):
        """The last layer with weights has other classes than the output."""

        def __init__(self) -> None:
            super().__init__()
            self.network = small_cnn(8)

        def forward(self, images: Tensor) -> Tensor:
            eight: Tensor = self.network(images)
            return eight[:, :4] - eight[:, 4:] ** 2

    scores = model_edit("gradient", model=Reversed().eval(), images=images)["gradient"]
    assert scores["swapped"].isnan().all() and not scores["zeroed"].isnan().any()
    assert "exchange the classes' logits" in scores.reasons("swapped")[0]
