"""A monitor of images that may have several findings: the numbers of a run, and of each finding alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import findings_networks as made
from heatproof.errors import InputError
from heatproof.images import Preprocess, open_source
from heatproof.models import load_model
from heatproof.monitor import Monitor
from heatproof.store import RunFolder
from heatproof.verdict.alarms import find_alarms
from heatproof.verdict.trajectory import Trajectory

pytestmark = pytest.mark.trains

COUNT = 40


class OneLogit(nn.Module):
    def __init__(self, network: nn.Module, finding: int) -> None:
        super().__init__()
        self.network, self.finding = network, finding

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.network(images)[:, self.finding : self.finding + 1]


@pytest.fixture(scope="module")
def network() -> nn.Module:
    return made.train(range(3), epochs=4)


def held_out() -> tuple[torch.Tensor, torch.Tensor]:
    pictures, truth, _ = made.scenes(COUNT, 3)
    return made.ready(pictures), torch.from_numpy(truth)


@pytest.mark.parametrize("weights", ["confidence", "calibrated"])
def test_numbers_by_finding_are_those_of_each_alone(network: nn.Module, weights: Any) -> None:
    images, truth = held_out()
    options: Any = {"layer": "body.5", "batch_size": COUNT, "weights": weights}
    report = Monitor(images, truth.float(), ["gradcam"], class_names=made.NAMES, **options).step(network, 1)
    assert report is not None and report.measured is not None and not report.problem
    for c, name in enumerate(made.NAMES):
        own_layer = options | {"layer": "network.body.5"}
        alone = Monitor(images, truth[:, c].long(), ["gradcam"], **own_layer)
        other = alone.step(OneLogit(network, c), 1)
        assert other is not None and other.measured is not None
        assert report.measured.classifier["auc"].classes[c] == other.auc
        assert report.recall[name] == other.measured.classifier["recall"].classes[1]
        own, same = report.by_class["gradcam"][name], other.measured.scores["gradcam"].classes[1]
        assert (own.n, own.degenerate) == (same.n, same.degenerate)
        assert own.value == pytest.approx(same.value, abs=1e-6, nan_ok=True)
    assert report.picture() is not None and report.pictures is not None and len(report.pictures) == 3
    assert "heatproof/recall/dot" in report.scalars()


def test_the_run_folder_reads_back_as_it_was_measured(network: nn.Module, tmp_path: Path) -> None:
    images, truth = held_out()
    tau = [0.5, 0.4, 0.6]
    monitor = Monitor(
        images, truth, ["gradcam"], class_names=made.NAMES, out=tmp_path / "run", tau=tau, batch_size=16
    )
    first, second = monitor.step(network, 1), monitor.step(made.train(range(3), epochs=5), 2)
    assert first is not None and second is not None and not first.problem and not second.problem
    folder = RunFolder.open(tmp_path / "run")
    assert folder.manifest.is_multilabel and folder.status().complete
    read = Trajectory.from_run(folder)
    assert [c.auc for c in read] == [c.auc for c in monitor.trajectory]
    assert [dict(c.classes) for c in read] == [dict(c.classes) for c in monitor.trajectory]
    for stored, known in zip(read, monitor.trajectory, strict=True):
        assert {c: (f.auc, f.absent) for c, f in stored.labels.items()} == {
            c: (f.auc, f.absent) for c, f in known.labels.items()
        }
    assert find_alarms(read) == find_alarms(monitor.trajectory)
    maps = folder.maps().ids("epoch-001", "gradcam")
    assert len(maps) == int(truth.sum()) and all("#" in name for name in maps)
    assert Monitor(images, truth, ["gradcam"], class_names=made.NAMES, out=tmp_path / "run", tau=tau,
                   batch_size=16).trajectory.checkpoints[0].auc == first.auc  # fmt: skip


def test_a_finding_whose_threshold_is_lost_raises_its_own_alarm(network: nn.Module) -> None:
    images, truth = held_out()
    monitor = Monitor(images, truth, ["gradcam"], class_names=made.NAMES)
    good = made.train(range(3))
    first = monitor.step(good, 1), monitor.step(good, 2)  # one epoch alone raises none
    assert first[0] is not None and first[0].alarms == () and first[1] is not None
    with torch.no_grad():
        good.head.bias[1] -= 60.0  # its ranking stays
    report = monitor.step(good, 3)
    assert report is not None
    assert {(alarm.mechanism, alarm.class_name) for alarm in report.new_alarms} == {(1, "cross")}
    assert report.new_alarms[0].evidence["auc"] == report.measured.classifier["auc"].classes[1]


def test_a_source_with_findings_brings_them(network: nn.Module) -> None:
    pictures, truth, _ = made.scenes(COUNT, 3)
    source = open_source("memory", pictures, labels=truth, class_names=made.NAMES)
    ready = Preprocess((48, 48), 48, (made.MEAN,) * 3, (made.STD,) * 3)
    report = Monitor(source, methods=["gradcam"], preprocess=ready, limit=30).step(network, 1)
    assert report is not None and not report.problem and set(report.recall) == set(made.NAMES)


def test_labels_and_heads_that_do_not_agree_raise_a_clear_error(network: nn.Module) -> None:
    images, truth = held_out()
    monitor = Monitor(images, truth[:, 0].long(), ["gradcam"])
    with pytest.raises(InputError, match="give labels as a table of 0 and 1"):
        monitor.check(load_model(network, head="multilabel"))
    several = Monitor(images, truth, ["gradcam"])
    with pytest.raises(InputError, match="labels are multi-label, but the model's head"):
        several.check(load_model(network, head="softmax"))
    with pytest.raises(InputError, match="a table of 0 and 1"):
        Monitor(images, truth.long() * 2, ["gradcam"])
