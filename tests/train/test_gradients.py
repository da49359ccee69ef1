"""Gradient norms by layer: the numbers, and that a training with the log is the training without it."""

from __future__ import annotations

import copy
import gc
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

import heatproof as hp
from heatproof.errors import MissingExtraError
from heatproof.models import Model
from heatproof.models.keras_graph import import_keras
from heatproof.train import Data, History, Phase, Recipe, fit, loop, small_net, two_phase
from heatproof.train.loop import GradientLog


def network(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))


def step(module: nn.Module, images: Tensor) -> None:
    module.zero_grad(set_to_none=True)
    module(images).square().sum().backward()


def slow_norms(module: nn.Module) -> dict[str, float]:
    """Layer by layer from .grad, in float64."""
    result: dict[str, float] = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            layer = name.rpartition(".")[0]
            result[layer] = result.get(layer, 0.0) + float(parameter.grad.double().square().sum())
    return {layer: math.sqrt(total) for layer, total in result.items()}


@given(st.integers(0, 1000), st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_norms_are_those_of_the_gradients(seed: int, steps: int) -> None:
    module, generator = network(seed), torch.Generator().manual_seed(seed)
    log, expected = GradientLog(module), []
    for _ in range(steps):
        step(module, torch.randn(3, 5, generator=generator))
        expected.append(slow_norms(module))
    result = log.take()
    assert list(result) == ["0", "2"]
    for layer, norm in result.items():
        values = [each[layer] for each in expected]
        assert norm.mean == pytest.approx(np.mean(values), rel=1e-5)
        assert norm.highest == pytest.approx(max(values), rel=1e-5)
        assert norm.deviation == pytest.approx(np.std(values), abs=1e-3 * max(values))
    assert log.take() == {}, "what was told is not told again"
    log.close()


def test_frozen_layers_have_no_gradient_until_they_are_trained() -> None:
    module = network()
    module[0].requires_grad_(False)
    log = GradientLog(module)
    assert not any(p.requires_grad for p in module[0].parameters())
    step(module, torch.ones(2, 5))
    assert list(log.take()) == ["2"]
    module[0].requires_grad_(True)
    step(module, torch.ones(2, 5))
    assert list(log.take()) == ["0", "2"]


def test_the_network_is_left_as_it_was() -> None:
    module = network()
    log = GradientLog(module)
    assert torch.equal(copy.deepcopy(module)(torch.ones(1, 5)), module(torch.ones(1, 5)))
    log.close()
    assert not any(p._post_accumulate_grad_hooks for p in module.parameters())
    GradientLog(module)
    gc.collect()
    assert not any(p._post_accumulate_grad_hooks for p in module.parameters()), "a forgotten log stays on"


def shapes(n: int = 24) -> Data:
    images = np.random.default_rng(0).integers(0, 120, (n, 3, 16, 16)).astype(np.uint8)
    labels = np.arange(n) % 2
    images[labels == 1, :, :8] += 120
    return Data(torch.from_numpy(images), torch.from_numpy(labels))


def trained(gradients: bool, out: Path | None = None) -> tuple[Model, History]:
    model = small_net(2, size=16, width=4)
    recipe = Recipe((Phase(1, 1e-3, "head", "first"), Phase(2, 1e-3, "all", "second")), 8)
    return model, fit(model, shapes(), shapes(), recipe, out, gradients=gradients)


def test_a_training_with_the_log_is_the_training_without_it(tmp_path: Path) -> None:
    (with_log, history), (without, plain) = trained(True, tmp_path), trained(False)
    first, second = with_log.module.state_dict(), without.module.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert [e.loss for e in history.epochs] == [e.loss for e in plain.epochs]
    assert list(history.epochs[0].gradients) == ["fc"] and not plain.epochs[0].gradients
    assert {"layer1.0", "layer4.3", "fc"} <= set(history.epochs[1].gradients)
    assert all(0 < n.mean <= n.highest for e in history.epochs for n in e.gradients.values())
    stored = History.from_json((tmp_path / "history.json").read_text())
    assert stored == history, "what is read back is what was logged"


KERAS = [("DenseNet201", 32), ("InceptionV3", 75), ("ResNet50V2", 32)]  # the paper's own


@pytest.mark.parametrize(("name", "size"), [KERAS[2]], ids=["ResNet50V2"])
def test_networks_of_keras_are_trained_in_two_phases(tmp_path: Path, name: str, size: int) -> None:
    """Head first, its BatchNorm at rest; then all, with its statistics adapting and not as parameters."""
    try:
        import_keras()
    except MissingExtraError as missing:
        pytest.skip(str(missing))

    def built() -> Model:
        return hp.load_model(f"keras:{name}", num_classes=2, input_shape=(size, size, 3))

    pixels = np.random.default_rng(0).integers(0, 255, (4, 3, size, size)).astype(np.uint8)
    data = Data(torch.from_numpy(pixels), torch.tensor([0, 1, 0, 1]))
    model = built()
    start = {k: v.clone() for k, v in model.module.state_dict().items()}
    options = {"head_lr": 1e-2, "full_lr": 1e-3, "batch_size": 4, "keep": [1, 2], "gradients": True}
    history = two_phase(model, data, data, tmp_path, head_epochs=1, full_epochs=1, **options)  # type: ignore[arg-type]
    assert list(history.epochs[0].gradients) == ["predictions"] and len(history.epochs[1].gradients) > 50

    def moved(file: str) -> set[str]:
        stored = load_file(tmp_path / file)
        return {key for key, value in stored.items() if not torch.equal(value, start[key])}

    head = moved("epoch01.safetensors")
    assert head and all(key.startswith("predictions.") for key in head)
    everything = moved("epoch02.safetensors")
    statistics = {key for key in start if "moving_" in key}
    assert statistics and statistics <= everything and len(everything) > 0.9 * len(start)
    assert statistics == model.module.statistics
    again = hp.load_model(built(), tmp_path / "epoch02.safetensors")  # layers are named as the first time
    assert torch.equal(again.logits(torch.ones(1, 3, size, size)), model.logits(torch.ones(1, 3, size, size)))


def test_the_loss_over_batches_is_that_of_each_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean and deviation, from every batch's own loss; the rate is that of the schedule."""
    losses: list[float] = []
    own = loop.cross_entropy

    def spy(*given: Any) -> Tensor:
        loss = own(*given)
        losses.append(float(loss.detach()))
        return loss

    monkeypatch.setattr(loop, "cross_entropy", spy)
    _, history = trained(False)
    for epoch, part in zip(history.epochs, np.array(losses).reshape(3, -1), strict=True):
        assert epoch.loss == pytest.approx(part.mean()) and epoch.loss_deviation == pytest.approx(part.std())
    assert [e.lr for e in history.epochs] == pytest.approx([1e-3, 1e-3, 5e-4])
