"""Audits with a budget: time, decisions and inputs of a real one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import heatproof as hp
from benchmarks import budgets
from benchmarks.common import write_pictures
from benchmarks.sections import BenchOptions
from heatproof.errors import InputError, UnknownNameError


def test_an_audit_is_compared_with_its_budget_and_its_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pictures(tmp_path / "imagenet", 4)
    (tmp_path / "weights").mkdir()
    torch.manual_seed(0)
    weights = hp.load_model("torchvision:squeezenet1_1").module.state_dict()
    torch.save(weights, tmp_path / "weights" / "squeezenet1_1.pt")
    monkeypatch.setitem(budgets.BUDGETS, "squeezenet1_1", (0.01, 10))
    (part,) = budgets.parts(BenchOptions(quick=True, data=tmp_path, network=("squeezenet1_1",)))
    whole, estimate, *_ = part.measure()
    assert part.name == "squeezenet1_1, 0.01 min" and whole.other_ms == 600
    assert whole.ours_ms == estimate.other_ms > estimate.ours_ms > 0
    assert "0 of 1 methods decided" in whole.note and "4 images" in whole.note  # 30 are needed
    assert int(whole.note.split()[-2].replace(",", "")) > 4 * 3  # maps of the network and of two random ones


def test_the_first_version_of_resnet50_is_built(tmp_path: Path) -> None:
    (tmp_path / "network.py").write_text(budgets.FACTORY)
    model = hp.load_model(f"{tmp_path}/network.py:make")
    parts = dict(model.module.named_modules())
    assert parts["layer3.0.conv1"].stride == (2, 2) and parts["layer3.0.conv2"].stride == (1, 1)
    assert parts["layer4.2.bn3"].eps == 1e-3
    assert model.preprocess.std == (1 / 255,) * 3


def test_data_and_networks_that_are_missing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--data"):
        next(budgets.parts(BenchOptions()))
    (tmp_path / "imagenet").mkdir()
    with pytest.raises(UnknownNameError):
        next(budgets.parts(BenchOptions(data=tmp_path, network=("resnet51",))))
