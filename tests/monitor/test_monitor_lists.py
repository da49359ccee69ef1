"""What a monitor may be told beyond the paper: anchored lists, calibrated weights, gradient norms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn

import heatproof as hp
from conftest import small_cnn
from heatproof.cli import main
from heatproof.errors import InputError
from heatproof.metrics import cscore_by_class
from heatproof.metrics.cscores import gold_list
from heatproof.models import probabilities
from heatproof.monitor.measure import StepResult
from heatproof.monitor.watch import Monitor
from heatproof.store import RunFolder
from heatproof.store.folder import inspect
from heatproof.verdict.trajectory import Trajectory

LABELS = torch.tensor([0, 1, 1] * 7 + [0])


def pictures() -> Tensor:
    return torch.randn(22, 3, 32, 32, generator=torch.Generator().manual_seed(3))


def watch(**options: Any) -> Monitor:
    return Monitor(pictures(), LABELS, "gradcam", **{"class_names": ["normal", "ill"], **options})


def measured(monitor: Monitor, model: nn.Module, epoch: int) -> StepResult:
    report = monitor.step(model, epoch)
    assert report is not None and not report.problem, report
    return report


def answers(net: nn.Module) -> Tensor:
    return probabilities(hp.load_model(net).logits(pictures())).double()


def test_lists_of_the_first_epoch_hold_for_all(tmp_path: Path) -> None:
    first, second = small_cnn(2), small_cnn(2)
    with torch.no_grad():
        for parameter in list(second.parameters())[-2:]:  # of the head: every answer is turned round
            parameter.neg_()
    listed, other = (gold_list(LABELS, answers(net)) for net in (first, second))
    assert not torch.equal(listed, other), "both list the same, so that this test shows nothing"
    monitor = watch(anchor="first", out=tmp_path / "run")
    measured(monitor, first, 1)
    resumed = watch(anchor="first", out=tmp_path / "run")  # which reads the list from the folder
    expected = cscore_by_class(
        hp.explain(second, pictures(), "gradcam", LABELS)["gradcam"], LABELS, answers(second), anchor=listed
    )
    for watcher in (monitor, resumed):
        report = measured(watcher, second, 2)
        assert report.cscore["gradcam"] == pytest.approx(expected.overall.value, abs=1e-6)
        for state in watcher.trajectory:
            assert [state.classes[c].gold for c in (0, 1)] == [int(listed[c == LABELS].sum()) for c in (0, 1)]
    stored = Trajectory.from_run(RunFolder.open(tmp_path / "run"))
    assert [c.classes for c in stored] == [c.classes for c in resumed.trajectory]
    with pytest.raises(InputError, match="'first' epoch or not at all"):
        watch(anchor="last")


def test_weights_may_be_calibrated() -> None:
    net = small_cnn(2)
    result = measured(watch(weights="calibrated"), net, 1).cscore["gradcam"]
    maps = hp.explain(net, pictures(), "gradcam", LABELS)["gradcam"]
    by_hand = cscore_by_class(maps, LABELS, answers(net), weights="calibrated")
    assert result == pytest.approx(by_hand.overall.value, abs=1e-6)
    with pytest.raises(InputError, match="weights must be"):
        watch(weights="much")


def step(net: nn.Module) -> None:
    net.zero_grad()
    nn.functional.cross_entropy(net(pictures()), LABELS).backward()


def test_gradient_norms_are_logged_beside_the_scores(tmp_path: Path) -> None:
    net = small_cnn(2)
    monitor = watch(gradients=True, out=tmp_path / "run")
    monitor.check(net)
    step(net)
    expected = {
        name.rpartition(".")[0]: sum(float(p.grad.square().sum()) for p in part.parameters()) ** 0.5
        for name, part in net.named_modules()
        for name in [f"{name}."]
        if list(part.parameters(recurse=False)) and all(p.grad is not None for p in part.parameters())
    }
    report = measured(monitor, net, 1)
    assert expected and {k: pytest.approx(v.mean, rel=1e-4) for k, v in report.gradients.items()} == expected
    layer = next(iter(expected))
    assert report.scalars()[f"heatproof/gradient/{layer}"] == pytest.approx(expected[layer], rel=1e-4)
    assert not measured(monitor, net, 2).gradients, "no backward pass was made since"
    stored = Trajectory.from_run(RunFolder.open(tmp_path / "run"))
    assert dict(stored.checkpoints[0].gradients) == dict(report.gradients)
    assert inspect(tmp_path / "run") == []
    page = tmp_path / "page.html"
    done = CliRunner().invoke(main, ["report", str(tmp_path / "run"), "--out", str(page)])
    assert done.exit_code == 0, done.output
    assert "Norm of the gradients by checkpoint" in page.read_text()


def test_gradients_are_not_looked_at_unless_asked() -> None:
    net = small_cnn(2)
    monitor = watch()
    monitor.check(net)
    step(net)
    assert not measured(monitor, net, 1).gradients
    assert not any(p._post_accumulate_grad_hooks for p in net.parameters())
