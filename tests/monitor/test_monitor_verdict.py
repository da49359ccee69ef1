"""The monitor's run folder has the verdict of any run: by the tests that there are, and which are missing."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from contrast.discs import model_ready, network
from heatproof.errors import InputError, UnknownNameError
from heatproof.monitor import Monitor
from heatproof.store.ledger import known_record
from heatproof.verdict import follow
from heatproof.verdict.answers import HEADLINES, UNDECIDED
from heatproof.verdict.gate import check
from heatproof.verdict.judge import FILE
from verdict.test_verdict import heatproof

pytestmark = pytest.mark.trains

VOTER = follow.follow_metric().name


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    """A network that knows green discs from blue ones."""
    model = network()
    images, labels = model_ready(model, 60)
    optimiser = torch.optim.Adam(model.module.parameters(), 3e-3)
    for _ in range(60):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model.module(images), labels).backward()
        optimiser.step()
    return model.module


def watch(out: Path, **options: Any) -> Monitor:
    images, labels = model_ready(network(), 24, seed=5)
    return Monitor(images, labels, ["gradcam"], class_names=["green", "blue"], out=out, **options)


def stored(out: Path) -> dict[str, Any]:
    return known_record(out / FILE) or {}


def test_without_the_test_that_votes_the_verdict_says_so(trained: nn.Module, tmp_path: Path) -> None:
    report = watch(tmp_path / "run").step(trained, 1)
    result = stored(tmp_path / "run")
    assert report is not None and report.verdict is not None and report.verdict.as_json() == result
    assert result["headline"] == UNDECIDED and result["checkpoint"] == "epoch-001"
    (gradcam,) = result["methods"]
    assert gradcam["follows"] == "undecided"
    assert f"Monitor(metrics=['{VOTER}'])" in gradcam["note"]


def test_with_it_every_reader_gets_the_same_verdict(trained: nn.Module, tmp_path: Path) -> None:
    out = tmp_path / "run"
    monitor = watch(out, metrics=[f"{VOTER}(draws=1, steps=5)"])
    before, random = copy.deepcopy(trained.state_dict()), torch.get_rng_state()
    gradients = [p.grad.clone() for p in trained.parameters() if p.grad is not None]
    report = monitor.step(trained, 1)
    assert report is not None and not report.problem and report.verdict is not None
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(item, before[name]) for name, item in trained.state_dict().items())
    assert all(
        torch.equal(a, p.grad)
        for a, p in zip(gradients, trained.parameters(), strict=True)
        if p.grad is not None
    )
    result = stored(out)
    assert result == report.verdict.as_json()
    assert (
        result["headline"] == f"{HEADLINES['yes', 'undecided']}; what it uses was not tested"
        and result["methods"][0]["follows"] == "yes"
    )
    assert json.loads(heatproof("verdict", out, "--json").output) == result
    assert check(out, ["follows gradcam"])[1].holds
    assert heatproof("report", out, "-o", tmp_path / "page.html").exit_code == 0
    assert result["headline"] in (tmp_path / "page.html").read_text(encoding="utf-8")
    spoilt = copy.deepcopy(trained)
    with torch.no_grad():
        spoilt[-1].bias.copy_(torch.tensor([100.0, 0.0]))
    monitor.step(spoilt, 2)
    later = stored(out)
    assert later["checkpoint"] == "epoch-002" and later["headline"] == UNDECIDED
    assert "not surely better than chance" in later["notes"][0]


def test_what_a_monitor_cannot_measure_is_refused(tmp_path: Path) -> None:
    for metrics, why in (
        (["pointing"], "cannot measure pointing; "),
        (["grid_pointing"], "cannot measure grid_pointing; "),
        (["cose"], "cannot measure cose; "),
    ):
        with pytest.raises(InputError, match=why):
            watch(tmp_path / "run", metrics=metrics)
    with pytest.raises(UnknownNameError, match="did you mean"):
        watch(tmp_path / "run", metrics=["specifity"])
    images, labels = model_ready(network(), 4)
    with pytest.raises(InputError, match="name one with out="):
        Monitor(images, labels, metrics=[VOTER])
    assert not (tmp_path / "run").exists()


def test_a_verdict_that_fails_costs_no_numbers(
    trained: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / FILE).mkdir()  # no file can be put there
    report = watch(tmp_path / "run").step(trained, 1)
    assert report is not None and not report.problem and report.verdict is not None
    broken = ValueError("broken")
    monkeypatch.setattr("heatproof.monitor.record.conclude", lambda folder: (_ for _ in ()).throw(broken))
    report = watch(tmp_path / "other").step(trained, 1)
    assert report is not None and not report.problem and report.verdict is None
    assert "there is no verdict: broken" in caplog.text
