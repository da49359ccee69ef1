"""Maps against their control maps: a slow twin, a network whose evidence is known, maps that know nothing."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import entropy as bits
from scipy.stats import spearmanr
from torch import Tensor, nn

import heatproof as hp
from conftest import counting, small_cnn
from heatproof.errors import InputError
from heatproof.explain.baselines import baseline_images
from heatproof.metrics.kit import BatchContext
from heatproof.metrics.specific import (
    BINS,
    BLANK,
    STAYS,
    entropy,
    gains,
    specificity,
    strongest_baseline,
    untrained,
)
from heatproof.models import Model
from heatproof.models.derived import untrained_copy
from heatproof.registry import metrics
from heatproof.run.score import as_stored
from heatproof.types import Batch, Maps

BOTH = (("specificity", specificity), ("untrained", untrained))
METHODS = ["gradcam", "gradient", "edges", "centre", "random"]
PARTS = ("weights", "place")
SIDE, PATCH, BRIGHT = 16, 4, 7.0


@pytest.fixture
def images() -> Tensor:
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def sure_cnn() -> nn.Sequential:
    """small_cnn with larger logits: painting a picture over changes its answer."""
    net = small_cnn(seed=3).eval()
    with torch.no_grad():
        net[-1].weight *= 30  # type: ignore[assignment]
    return net


def test_it_equals_its_slow_twin(images: Tensor) -> None:
    """Pixel by pixel and picture by picture in float64, as the module's first lines write it."""
    model, steps = hp.load_model(sure_cnn()), 4
    maps = hp.explain(model, images, ["gradcam", "gradient"], seed=3)
    result = specificity(maps, model=model, images=images, draws=2, steps=steps, seed=3)
    kinds = [baseline_images(model, images, kind, 3) for kind in ("blur", "mean", "noise", "black")]
    targets = maps["gradcam"].explained
    controls = [
        hp.explain(untrained_copy(model, images, seed), images, list(maps), targets, seed=3)
        for seed in (3, 4)
    ]

    def log_odds(picture: Tensor, target: int) -> float:
        logits = model.logits(picture[None])[0].double()
        others = torch.cat([logits[:target], logits[target + 1 :]])
        return float((logits[target] - others.logsumexp(0)).clamp(-np.log(1e6), np.log(1e6)))

    def walk(start: Tensor, end: Tensor, pixels: np.ndarray, target: int) -> float:
        """The area below the log-odds while one picture becomes another, the largest pixels first."""
        order = np.argsort(-np.clip(pixels, 0, None).ravel(), kind="stable")
        curve = []
        for k in range(steps + 1):
            mixed, chosen = start.clone().flatten(1), order[: k * order.size // steps].copy()
            mixed[:, chosen] = end.flatten(1)[:, chosen]
            curve.append(log_odds(mixed.view_as(start), target))
        return float(np.trapezoid(curve, dx=1 / steps))

    for i, picture in enumerate(images):
        target = int(targets[i])
        baseline = min((kind[i] for kind in kinds), key=lambda image: log_odds(image, target))
        fall = log_odds(picture, target) - log_odds(baseline, target)
        for method in maps:
            own, *others = (maps_of[method].upsample()[i].double().numpy() for maps_of in (maps, *controls))
            mine, turned, *theirs = (
                (walk(baseline, picture, pixels, target) - walk(picture, baseline, pixels, target)) / fall
                for pixels in (own, own[::-1, ::-1], *others)
            )
            assert float(result[method]["weights"][i]) == pytest.approx(mine - np.mean(theirs), abs=1e-4)
            assert float(result[method]["place"][i]) == pytest.approx(mine - turned, abs=1e-4)


@given(seed=st.integers(0, 1000), batch_size=st.integers(1, 9))
@settings(max_examples=8, deadline=None)
def test_maps_that_ignore_the_network_are_exactly_their_control_maps(seed: int, batch_size: int) -> None:
    pictures = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
    model = hp.load_model(sure_cnn())
    maps = hp.explain(model, pictures, ["edges", "centre", "random"], seed=seed)
    stored = {name: as_stored(values) for name, values in maps.items()}
    given: dict[str, Any] = {
        "model": model,
        "images": pictures,
        "steps": 3,
        "seed": seed,
        "batch_size": batch_size,
    }
    for result in (specificity(maps, **given), specificity(stored, then=as_stored, **given)):
        for scores in result.values():
            assert torch.equal(scores["weights"].nan_to_num(), torch.zeros(3))
    alike = untrained(maps, model=model, images=pictures, seed=seed)
    for scores in alike.values():
        assert torch.allclose(scores["spearman"], torch.ones(3)) and torch.allclose(
            scores["null"], torch.ones(3)
        )
        assert torch.equal(scores["excess"], torch.zeros(3)) and torch.equal(
            scores["entropy"], torch.zeros(3)
        )


def test_rounding_is_no_knowledge(images: Tensor) -> None:
    """Control maps are rounded as stored maps are: without it, `centre` differs from itself."""
    maps = {"centre": as_stored(hp.explain(sure_cnn(), images, "centre")["centre"])}
    apart = specificity(maps, model=sure_cnn(), images=images)["centre"]["weights"]
    alike = specificity(maps, model=sure_cnn(), images=images, then=as_stored)["centre"]["weights"]
    assert (apart != 0).any() and (alike == 0).all()


def test_a_control_map_that_is_the_map_costs_no_pass(images: Tensor) -> None:
    net, steps = sure_cnn(), 5
    model = hp.load_model(net)
    maps = hp.explain(model, images, ["edges"])
    other = {"edges": replace(maps["edges"], values=maps["edges"].values.flip(-1))}
    inputs = []
    for control in (maps, other):
        with counting(net) as passes:
            gains(maps, [control] * 3, model=model, images=images, steps=steps)
        inputs.append(sum(passes.batches))
    assert inputs[1] - inputs[0] == 3 * 2 * len(images) * (steps - 1)


def test_maps_of_untrained_networks_are_made_once_for_both_metrics(images: Tensor) -> None:
    net = sure_cnn()
    model = hp.load_model(net)
    batch = Batch(tuple("abcd"), images, torch.zeros(4, dtype=torch.long))
    maps = hp.explain(model, images, ["gradcam", "gradient"], 0)
    scene = BatchContext(model, batch, maps, batch.labels)  # type: ignore[arg-type]
    draws = []
    for scenes in ((scene, scene), (scene, replace(scene, caches={}))):
        scene.caches.clear()
        with pytest.MonkeyPatch.context() as patched:
            made: list[int] = []

            def spy(model: Model, images: Tensor, seed: int, made: list[int] = made) -> Model:
                made.append(seed)
                return untrained_copy(model, images, seed)

            patched.setattr(sys.modules[specificity.__module__], "untrained_copy", spy)
            computed = [
                metrics.get(name).call(each, scene, {})  # type: ignore[misc]
                for (name, each), scene in zip(BOTH, scenes, strict=True)
            ]
        draws.append((made, computed))
    assert draws[0][0] == [0, 1, 2] and draws[1][0] == [0, 1, 2, 0, 1]
    for once, twice in zip(draws[0][1], draws[1][1], strict=True):
        for method in maps:
            for part, values in once[method].items():
                assert torch.equal(values.nan_to_num(), twice[method][part].nan_to_num())


def test_batch_size_and_order_do_not_matter(images: Tensor) -> None:
    model = hp.load_model(sure_cnn())
    maps = hp.explain(model, images, METHODS)
    whole = specificity(maps, model=model, images=images, draws=2)
    backwards = {name: values.take([3, 2, 1, 0]) for name, values in maps.items()}
    turned = specificity(backwards, model=model, images=images.flip(0), draws=2)
    assert any(float(whole["gradcam"][part].abs().max()) > 0.05 for part in PARTS)
    for batch_size in (1, 3, 64):
        result = specificity(maps, model=model, images=images, draws=2, batch_size=batch_size)
        for method in METHODS:
            for part in PARTS:
                assert torch.allclose(result[method][part], whole[method][part], atol=1e-4, equal_nan=True)
                assert torch.allclose(turned[method][part].flip(0), whole[method][part], atol=1e-4)


class Colours(nn.Sequential):
    """Class 1 is red, class 0 green, where they are bright enough: its evidence is where the colour is."""

    def __init__(self, least: float) -> None:
        see, say = nn.Conv2d(3, 2, 1), nn.Linear(2, 2)
        with torch.no_grad():
            see.weight.copy_(torch.tensor([[-1.0, 1.0, 0.0], [1.0, -1.0, 0.0]])[..., None, None])
            see.bias.fill_(-least)
            say.weight.copy_(20 * torch.eye(2))
            say.bias.zero_()
        super().__init__(see, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), say)


def patches(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Grey pictures with one red or green patch off the middle, how near each pixel is to it, its class."""
    drawn = np.random.default_rng(0)
    pictures = torch.from_numpy(drawn.uniform(0.4, 0.6, (count, 1, SIDE, SIDE)).astype(np.float32))
    pictures, near = pictures.repeat(1, 3, 1, 1), torch.zeros(count, SIDE, SIDE)
    labels = torch.arange(count) % 2
    for i, label in enumerate(labels.tolist()):
        row, column = drawn.integers(0, SIDE // 2 - PATCH, 2)
        colour = BRIGHT * torch.eye(3)[1 - label][:, None, None]
        pictures[i, :, row : row + PATCH, column : column + PATCH] = colour
        down, across = ((torch.arange(SIDE) - at - (PATCH - 1) / 2).abs() for at in (row, column))
        near[i] = torch.exp(-torch.maximum(down[:, None], across))
    return pictures, near, labels


def test_true_evidence_beats_its_control_maps_and_its_turned_self_does_not() -> None:
    pictures, near, labels = patches(12)
    model = hp.load_model(Colours(least=BRIGHT - 3).eval())  # hardly any noise is as bright
    assert (model.logits(pictures).argmax(1) == labels).all()
    truth = Maps("truth", near, (SIDE, SIDE), labels, tuple(map(str, range(12))))
    turned = replace(truth, values=near.flip(-1, -2))
    controls = [
        hp.explain(untrained_copy(model, pictures, seed), pictures, "gradcam", labels)["gradcam"]
        for seed in range(3)
    ]
    maps = {"truth": truth, "turned": turned}
    measured = gains(
        maps, [dict.fromkeys(maps, control) for control in controls], model=model, images=pictures
    )
    results = {name: gain.scores for name, gain in measured.items()}
    for part, least in zip(PARTS, (-0.01, 0.5), strict=True):  # random weights may find the patch too
        assert (results["truth"][part] > least).all() and results["truth"][part].mean() > 0.05
        assert (results["turned"][part] < results["truth"][part]).all() and results["turned"][
            part
        ].mean() < -0.3
    assert torch.equal(results["truth"]["place"], -results["turned"]["place"])


def test_the_baseline_is_the_one_that_takes_the_class_away_best() -> None:
    pictures, _, labels = patches(6)
    model = hp.load_model(Colours(least=0.5).eval())  # noise has both colours, and more of one
    targets = torch.tensor([0, 1, 0, 1, 0, 1])
    targets[4:] = 1 - labels[4:]  # the class that the patch speaks against: another baseline serves
    baseline, fall = strongest_baseline(model, pictures, targets, seed=5, batch_size=4)
    kinds = [baseline_images(model, pictures, kind, 5) for kind in ("blur", "mean", "noise", "black")]
    chosen = set()
    for i, target in enumerate(targets.tolist()):
        chance = [
            float(model.logits(variant[i][None]).softmax(1)[0, target]) for variant in (pictures, *kinds)
        ]
        odds = np.log(chance) - np.log1p(-np.clip(chance, 1e-6, 1 - 1e-6))
        best = int(np.argmin(odds[1:]))
        chosen.add(best)
        assert torch.equal(baseline[i], kinds[best][i])
        assert float(fall[i]) == pytest.approx(odds[0] - odds[1 + best], abs=1e-3)
    assert len(chosen) > 1


class Standardises(nn.Module):
    """Divides each picture by its own contrast, so that one colour everywhere is 0 / 0."""

    def __init__(self) -> None:
        super().__init__()
        self.net = sure_cnn()

    def forward(self, x: Tensor) -> Tensor:
        sides = (1, 2, 3)
        output: Tensor = self.net((x - x.mean(sides, keepdim=True)) / x.std(sides, keepdim=True))
        return output


def test_a_network_that_standardises_its_input_is_judged_by_baselines_that_it_answers(images: Tensor) -> None:
    model = hp.load_model(Standardises().eval())
    flat = torch.full_like(images[:1], 0.3)
    assert model.logits(flat).isnan().all()
    grey = images.mean(1, keepdim=True).expand(-1, 3, -1, -1)  # one mean for all channels
    baseline, fall = strongest_baseline(model, grey, model.logits(grey).argmax(1))
    assert fall.isfinite().all() and model.logits(baseline).isfinite().all()


def test_where_nothing_takes_the_class_away_nothing_is_decided(images: Tensor) -> None:
    deaf = small_cnn().eval()
    with torch.no_grad():
        deaf[-1].weight.zero_()
    maps = hp.explain(deaf, images, ["gradient", "edges"])
    result = specificity({"edges": maps["edges"]}, model=deaf, images=images, draws=1)["edges"]
    for part in PARTS:
        assert result[part].isnan().all() and result.reasons(part) == [STAYS] * 4
    blank = {"gradient": maps["gradient"]}  # of a network that does not look at the picture
    result = specificity(blank, model=sure_cnn(), images=images, draws=1)["gradient"]
    assert result["weights"].isnan().all() and result.reasons("weights") == [BLANK] * 4


def test_maps_of_untrained_networks_by_other_people_s_code(images: Tensor) -> None:
    model = hp.load_model(small_cnn(seed=3).eval())
    maps = hp.explain(model, images, ["gradient", "integrated-gradients(steps=4)"], 2)
    result = untrained(maps, model=model, images=images, seed=1)
    first, second = (
        hp.explain(untrained_copy(model, images, seed), images, list(maps), 2, seed=1) for seed in (1, 2)
    )
    for method, own in maps.items():
        table = [maps_of.upsample().double().numpy() for maps_of in (own, first[method], second[method])]
        for i, (mine, first_map, other) in enumerate(zip(*table, strict=True)):
            rho, null = (
                spearmanr(a.ravel(), b.ravel()).statistic for a, b in ((mine, first_map), (first_map, other))
            )
            spread = [
                bits(np.bincount(np.rint(m.ravel() * (BINS - 1)).astype(int)), base=2)
                for m in (mine, first_map)
            ]
            expected = (rho, null, rho - null, spread[1] / spread[0] - 1)
            for part, value in zip(("spearman", "null", "excess", "entropy"), expected, strict=True):
                assert float(result[method][part][i]) == pytest.approx(value, abs=2e-3), part


def test_a_flat_histogram_has_six_bits_and_a_map_of_two_values_one() -> None:
    even = torch.arange(64.0).view(1, 8, 8)
    two = torch.cat([torch.zeros(1, 4, 8), torch.ones(1, 4, 8)], 1)
    maps = Maps("m", torch.cat([even, two]), (8, 8), torch.zeros(2, dtype=torch.long), ("a", "b"))
    assert entropy(maps).tolist() == pytest.approx([6.0, 1.0])


def test_the_model_stays_and_the_seed_decides(images: Tensor) -> None:
    net = sure_cnn().train()
    before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    maps = hp.explain(net, images, ["gradcam"])
    scores = [
        specificity(maps, model=net, images=images, draws=1, seed=seed)["gradcam"]["weights"]
        for seed in (0, 0, 1)
    ]
    untrained(maps, model=net, images=images)
    assert torch.equal(scores[0], scores[1]) and not torch.allclose(scores[0], scores[2])
    assert torch.equal(state, torch.get_rng_state()) and all(part.training for part in net.modules())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_what_cannot_be_asked_raises_a_clear_error(images: Tensor) -> None:
    maps = hp.explain(sure_cnn(), images, ["gradcam"])
    with pytest.raises(InputError, match="draws must be a whole number of at least 1, got 0"):
        specificity(maps, model=sure_cnn(), images=images, draws=0)
    with pytest.raises(InputError, match="steps must be"):
        specificity(maps, model=sure_cnn(), images=images, steps=0)
