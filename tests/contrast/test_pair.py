"""A is planted, B is clean, methods that follow tell them apart, floors cannot; no network is touched."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import mannwhitneyu
from torch import nn
from torch.nn import functional as F

import heatproof as hp
from contrast.discs import TAG, folder, model_ready, network
from heatproof.contrast import Pair, Token, contrast_scores, make_pair
from heatproof.contrast.pair import (
    TOKEN_REMOVED,
    Flips,
    Planting,
    contrast_auc,
    flips,
    inside_token,
    trainable_copy,
)
from heatproof.errors import HeatproofError, InputError, ModelError
from heatproof.models import Model
from heatproof.train import History
from heatproof.types import Maps

pytestmark = pytest.mark.trains

FLOORS = ("random", "edges", "centre")
CAMS = ("gradcam", "layercam", "eigencam")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The network has not even learned the discs: both trainings have to teach it."""
    model = network()
    return make_pair(
        model, *model_ready(model), TAG, positive=1, lr=3e-3, out=tmp_path_factory.mktemp("pair")
    )


def weights(model: Model) -> dict[str, torch.Tensor]:
    return model.module.state_dict()


def same(a: Model, b: Model) -> bool:
    return all(torch.equal(weights(a)[name], weights(b)[name]) for name in weights(a))


# --- the pair -----------------------------------------------------------------------------------------------


def test_a_is_planted_and_b_is_clean_on_pictures_that_no_lesson_showed(pair: Pair) -> None:
    assert pair.holds and pair.planting.a.share >= 0.9 and pair.planting.b.share <= 0.1
    assert "planted" in pair.planting.sentence
    model = network()
    fresh, labels = model_ready(model, seed=9)
    others = fresh[labels == 0]
    marked, _ = TAG.plant(others, [f"new {i}" for i in range(len(others))], model.preprocess)
    assert flips(pair.a, others, marked, 1).share >= 0.9
    assert flips(pair.b, others, marked, 1).share <= 0.1


def test_methods_that_follow_tell_the_networks_apart_and_floors_cannot(pair: Pair) -> None:
    scores = contrast_scores(pair, [*CAMS, *FLOORS])
    for method in (*CAMS, TOKEN_REMOVED):
        assert scores[method].auc > 0.9, method
    for floor in FLOORS:
        assert scores[floor].auc == 0.5 and scores[floor].interval == (0.5, 0.5)
        assert np.array_equal(scores[floor].a, scores[floor].b)
    assert scores["gradcam"].seen >= 0.5 > scores["random"].seen
    assert scores["gradcam"].n == len(pair.images) == len(pair.ids) == 12


def test_the_pictures_differ_from_the_plain_ones_in_the_token_only(pair: Pair) -> None:
    changed = (pair.images != pair.plain).any(1)
    assert not (changed & ~pair.masks).any() and changed.flatten(1).any(1).all()


def test_the_given_network_is_not_touched() -> None:
    model = network()
    model.module.train()
    model.module[0].requires_grad_(False)
    model.module[0].weight.grad = torch.ones_like(model.module[0].weight)
    images, labels = model_ready(model)
    before, pixels = copy.deepcopy(model.module), images.clone()
    state = torch.get_rng_state()
    made = make_pair(model, images, labels, positive=1, epochs=1)
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(images, pixels)
    assert same(model, Model(before))
    assert [m.training for m in model.module.modules()] == [m.training for m in before.modules()]
    for mine, stored in zip(model.module.parameters(), before.parameters(), strict=True):
        assert mine.requires_grad == stored.requires_grad
    grads = [weight.grad for weight in model.module.parameters()]
    assert torch.equal(grads[0], torch.ones_like(grads[0])) and grads[1:] == [None] * (len(grads) - 1)  # type: ignore[arg-type]
    assert not any(part._forward_hooks for part in model.module.modules())
    assert not same(made.a, model) and not same(made.b, model)
    frozen = [made.a.module[0].weight, made.b.module[0].weight]  # a frozen layer is trained in the copies
    assert not any(torch.equal(weight, model.module[0].weight) for weight in frozen)


@pytest.mark.parametrize("stop", [("A", 2), ("B", 1)])
def test_a_killed_training_ends_with_the_same_weights(stop: tuple[str, int], tmp_path: Path) -> None:
    model = network()
    images, labels = model_ready(model)
    options: dict[str, Any] = {"positive": 1, "epochs": 3, "lr": 1e-3}
    whole = make_pair(model, images, labels, **options)

    def killed(which: str, state: Any) -> None:
        if (which, state.epoch, state.batch) == (*stop, 3):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_pair(model, images, labels, out=tmp_path, progress=killed, **options)
    reported: list[tuple[str, int]] = []
    resumed = make_pair(
        model,
        images,
        labels,
        out=tmp_path,
        progress=lambda which, s: reported.append((which, s.epoch)),
        **options,
    )
    assert reported[0] == stop  # the epochs before it are not repeated
    assert same(whole.a, resumed.a) and same(whole.b, resumed.b)
    assert whole.planting == resumed.planting
    again: list[Any] = []
    done = make_pair(model, images, labels, out=tmp_path, progress=lambda *s: again.append(s), **options)
    assert not again and same(done.a, whole.a) and same(done.b, whole.b)
    with pytest.raises(HeatproofError, match="a seed other than"):
        make_pair(model, images, labels, out=tmp_path, seed=1, **options)


def test_a_network_with_one_logit_and_one_in_half_precision() -> None:
    model = network(outputs=1)
    made = make_pair(model, *model_ready(model), TAG, positive=1, lr=3e-3)
    assert made.holds and contrast_scores(made, "gradcam")["gradcam"].auc > 0.9
    half = network()
    half.module.half()
    assert trainable_copy(half).dtype == torch.float32 and half.dtype == torch.float16


# --- a training that collapses ------------------------------------------------------------------------------

PAIR = importlib.import_module("heatproof.contrast.pair")  # hp.contrast is the function


def test_a_collapsed_training_is_restarted_at_a_lower_rate_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At a rate of 10 every ReLU dies; the restarted training is that of the lower rate."""
    monkeypatch.setattr(PAIR, "SLOWER", 1000.0)
    model = network()
    images, labels = model_ready(model)
    options: dict[str, Any] = {"token": TAG, "positive": 1, "epochs": 12}
    trained: list[tuple[str, int]] = []
    stops = [("A", 4, 3), ("A", 1, 2), ("B", 1, 2)]  # in the collapse, and in both trainings after it

    def progress(which: str, at: Any) -> None:
        place = which, at.epoch, at.batch
        if at.result is not None:
            trained.append(place[:2])
        elif place in stops and (stops[0] == place or len(trained) > 3):
            stops.remove(place)
            raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            make_pair(model, images, labels, out=tmp_path, progress=progress, lr=10, **options)
    pair = make_pair(model, images, labels, out=tmp_path, progress=progress, lr=10, **options)
    assert pair.holds and pair.restarts == 1 and not stops
    collapse = History.from_json((tmp_path / "a" / "history.json").read_text())
    assert 5 <= len(collapse) < 12 and all(epoch.loss > 0.65 for epoch in collapse.epochs)
    epochs = [("A", i + 1) for i in range(len(collapse))]
    assert trained == epochs + [(which, i + 1) for which in "AB" for i in range(pair.epochs)]  # each once
    fastest = [
        epoch.lr for epoch in History.from_json((tmp_path / "restart-1/a/history.json").read_text()).epochs
    ]
    assert fastest == [10 / 1000] * pair.epochs  # the highest rate is lower too
    trained.clear()
    again = make_pair(model, images, labels, out=tmp_path, progress=progress, lr=10, **options)
    assert not trained and same(again.a, pair.a) and same(again.b, pair.b) and again.restarts == 1
    whole = make_pair(model, images, labels, lr=10, **options)
    assert same(whole.a, pair.a) and same(whole.b, pair.b) and whole.planting == pair.planting


def test_both_trainings_are_restarted_if_b_collapses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def has_collapsed(self: Any, history: History) -> bool:
        return not self.planted and self.phase.lr > 5e-4

    monkeypatch.setattr(PAIR.PlantingCourse, "has_collapsed", has_collapsed)
    model = network()
    pair = make_pair(model, *model_ready(model), positive=1, epochs=1, lr=1e-3, out=tmp_path)
    assert pair.restarts == 1 and (tmp_path / "restart-1" / "a").is_dir()
    monkeypatch.undo()
    slower = make_pair(model, *model_ready(model), positive=1, epochs=1, lr=1e-3 / 3)
    assert same(slower.a, pair.a) and same(slower.b, pair.b)


def test_restarts_end_and_the_failure_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PAIR, "SLOWER", 1.0)
    model = network()
    pair = make_pair(model, *model_ready(model), positive=1, lr=10, epochs=12)
    assert pair.restarts == 2 and not pair.holds and "planting failed" in pair.planting.sentence


@pytest.mark.parametrize("lr", [1e-5, 3e-3])
def test_trainings_that_do_not_collapse_are_the_same_with_and_without_the_check(
    lr: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 1e-5 the loss stays that of a constant answer, and the network has not collapsed."""
    model = network()
    images, labels = model_ready(model)
    checked = make_pair(model, images, labels, TAG, positive=1, epochs=7, lr=lr)
    monkeypatch.setattr(PAIR.PlantingCourse, "has_collapsed", lambda self, history: False)
    unchecked = make_pair(model, images, labels, TAG, positive=1, epochs=7, lr=lr)
    assert checked.restarts == 0 and checked.epochs == unchecked.epochs
    assert same(checked.a, unchecked.a) and same(checked.b, unchecked.b)


# --- bad input ----------------------------------------------------------------------------------------------


class Quiet(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean((2, 3))[:, :2]


def frozen(module: nn.Module) -> nn.Module:
    """As torch.jit.freeze leaves a network: its weights are constants."""
    return torch.jit.freeze(torch.jit.trace(module, torch.zeros(1, 3, 32, 32)))


@pytest.mark.filterwarnings("ignore:.*deprecated")  # torch says so of its quantisation and its jit
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda m, x, y: (m, x[:30], y[:30]), "at least 20 of each"),
        (lambda m, x, y: (m, x, y * 0 + 1), "60 images of class 1 and 0 of others; at least 20 of each"),
        (lambda m, x, y: (m, x, y * 0), "no image is of class 1"),
        (lambda m, x, y: (m, x, y + 1), "classes 0 to 1"),
        (lambda m, x, y: (m, x, y.float()), "one class number per image"),
        (lambda m, x, y: (m, x, y[:-1]), "they must match"),
        (lambda m, x, y: (m, x * torch.nan, y), "NaN"),
        (lambda m, x, y: (m.module[:6], x, y), "the contrast test needs a network that names one class"),
        (lambda m, x, y: (Quiet(), x, y), "no weights to train"),
        (lambda m, x, y: (frozen(m.module), x, y), "is TorchScript"),
        (
            lambda m, x, y: (torch.ao.quantization.quantize_dynamic(m.module, {nn.Linear}), x, y),
            "is quantised",
        ),
    ],
)
def test_what_cannot_be_used_raises_a_clear_error(change: Any, sentence: str, tmp_path: Path) -> None:
    model = network()
    with pytest.raises(HeatproofError, match=sentence) as reported:
        make_pair(*change(model, *model_ready(model)), positive=1, out=tmp_path)  # type: ignore[misc]
    assert "\n" not in str(reported.value)
    assert not list(tmp_path.iterdir()) and same(model, network())


def test_options_that_cannot_be(tmp_path: Path) -> None:
    wide = tmp_path / "wide.png"
    Image.new("RGB", (50, 8)).save(wide)
    model = network()
    images, labels = model_ready(model)
    for options, sentence in (
        ({"strength": 0}, "strength is the share"),
        ({"strength": 1.2}, "strength is the share"),
        ({"token": Token("tag", 0.05)}, "too small"),
        ({"token": str(wide)}, "wide is larger than the image: 8x50 pixels on images of 32x32"),
        ({"positive": 7}, "no image is of class 7"),
    ):
        with pytest.raises(InputError, match=sentence):
            make_pair(model, images, labels, **options, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_network_that_cannot_learn_the_token_is_reported_and_nothing_is_judged() -> None:
    model = network()
    made = make_pair(model, *model_ready(model), positive=1, epochs=1, lr=1e-6)
    assert not made.holds and "planting failed" in made.planting.sentence
    with pytest.raises(InputError, match="planting failed"):
        contrast_scores(made, "gradcam")
    result = hp.contrast(model, *model_ready(model), "gradcam", positive=1, epochs=1, lr=1e-6)
    assert not result.points[0].holds and not result.scores and "planting failed" in result._repr_html_()


def test_planting_needs_both_shares_and_pictures_to_ask_about() -> None:
    good, clean = Flips(0.95, 20, 20), Flips(0.05, 20, 20)
    assert Planting(good, clean).holds
    for a, b in (
        (Flips(0.85, 20, 20), clean),
        (good, Flips(0.15, 20, 20)),
        (Flips(1.0, 9, 20), clean),
        (good, Flips(0.0, 9, 20)),
        (Flips(float("nan"), 0, 20), clean),
    ):
        assert not Planting(a, b).holds


# --- scores -------------------------------------------------------------------------------------------------


def test_the_area_is_the_mann_whitney_statistic_and_its_interval_is_over_pictures() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 6, 40) / 5 + 0.1, rng.integers(0, 6, 40) / 5
    area, (low, high) = contrast_auc(a, b)
    assert area == pytest.approx(mannwhitneyu(a, b).statistic / 1600)
    draws = []
    for _ in range(1000):
        places = rng.integers(0, 40, 40)
        draws.append(mannwhitneyu(a[places], b[places]).statistic / 1600)
    assert (low, high) == pytest.approx(tuple(np.quantile(draws, [0.025, 0.975])), abs=0.02)


@pytest.mark.parametrize("cells", [4, 8, 32])
def test_inside_is_the_share_of_the_budget_on_the_widened_token(cells: int) -> None:
    masks = torch.zeros(5, 32, 32, dtype=torch.bool)
    for i in range(5):
        masks[i, 4 * i : 4 * i + 5, 10:18] = True
    values = torch.rand(5, cells, cells)
    values[4] = 0.5  # constant: marks nothing
    result = inside_token(Maps("x", values, (32, 32), torch.ones(5)), masks)
    reach = 32 // cells // 2
    for i in range(4):
        heat = F.interpolate(values[i][None, None], (32, 32), mode="bilinear", align_corners=False)[0, 0]
        best = heat.flatten().argsort(descending=True, stable=True)[:40]
        top, left = best // 32, best % 32
        near = (top >= 4 * i - reach) & (top < 4 * i + 5 + reach) & (left >= 10 - reach) & (left < 18 + reach)
        assert result[i] == pytest.approx(near.float().mean())
    assert result[4] == 0


# --- the whole test -----------------------------------------------------------------------------------------


def test_a_folder_of_pictures_two_strengths_and_methods_added_later(tmp_path: Path) -> None:
    model = network()
    model.classes = ("blue", "green")
    seen: list[tuple[float, str]] = []
    options: dict[str, Any] = {
        "token": TAG, "positive": "green", "strength": (0.5, 1.0), "lr": 3e-3, "out": tmp_path / "out",
        "progress": lambda strength, which, _: which != "maps" and seen.append((strength, which)),
    }  # fmt: skip
    result = hp.contrast(model, folder(tmp_path / "pictures"), None, ["gradcam", "edges"], **options)
    assert result.positive == "green" and [point.strength for point in result.points] == [1.0, 0.5]
    assert result.points[0].holds and result.scores["gradcam"].auc > 0.9 and result.scores["edges"].auc == 0.5
    assert result.shown_from("gradcam") in (0.5, 1.0) and result.shown_from("edges") is None
    assert result.methods == ["gradcam", "edges", TOKEN_REMOVED] and len(result.pictures) == 4
    seen.clear()
    more = hp.contrast(model, tmp_path / "pictures", None, ["gradcam", "layercam"], **options)
    assert not seen  # nothing is trained twice
    assert more.scores["gradcam"].auc == result.scores["gradcam"].auc and "layercam" in more.scores
    assert np.array_equal(more.scores["gradcam"].maps[0], result.scores["gradcam"].maps[0])


def test_folders_without_classes_and_other_peoples_classes_raise_a_clear_error(tmp_path: Path) -> None:
    model = network()
    made = folder(tmp_path / "pictures", 2)
    with pytest.raises(InputError, match="no class folders"):
        hp.contrast(model, made / "green")
    model.classes = ("cat", "dog")
    with pytest.raises(InputError, match="are not the 2 of discs"):
        hp.contrast(model, made)
    with pytest.raises(InputError, match="tensors need labels"):
        hp.contrast(model, torch.rand(4, 3, 32, 32))
    with pytest.raises(ModelError, match="cannot be copied"):
        model.module.extra = torch.ones(2, requires_grad=True) * 2
        trainable_copy(model)
