"""Gold lists as a study may choose them: adaptive, anchored, calibrated; in a run and in its alarms."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import heatproof as hp
from heatproof.errors import InputError, UnknownNameError
from heatproof.metrics.classifier import ListRule
from heatproof.metrics.cscores import gold_list
from heatproof.run.config import read_metrics
from heatproof.run.engine import run_study
from heatproof.store import RunFolder
from heatproof.store.scores import read_predictions
from heatproof.verdict.trajectory import Trajectory
from tiny_study import make_study


def finished(folder: Path, rule: ListRule) -> RunFolder:
    study = make_study(folder, methods=["gradcam"], metrics=[rule.text, "auc"])
    result = run_study(study, folder / "out")
    assert not result.broken
    return result.folder


@pytest.mark.parametrize(
    ("anchor", "checkpoint"), [("epoch02", "epoch02"), ("epoch01", "epoch01"), ("first", "epoch01")]
)
def test_an_anchored_list_is_that_of_the_named_checkpoint(
    tmp_path: Path, anchor: str, checkpoint: str
) -> None:
    folder = finished(tmp_path, ListRule(anchor=anchor))
    there = read_predictions(folder, checkpoint)
    expected = gold_list(there.labels, there.probabilities)
    run = Trajectory.from_run(folder)
    assert len(run) == 2
    own = set()
    for at in run:
        now = read_predictions(folder, at.name)
        own.add(tuple(gold_list(now.labels, now.probabilities).tolist()))
        maps = folder.maps().read(at.name, "gradcam", list(now.ids))
        result = hp.metrics.cscore_by_class(maps, now.labels, now.probabilities, anchor=expected)
        for c in (0, 1):
            size = int(expected[now.labels == c].sum())
            assert at.classes[c].gold == at.methods["gradcam"].classes[c].n == size
            assert at.methods["gradcam"].classes[c].value == pytest.approx(
                result.classes[c].value, nan_ok=True
            )
    assert len(own) == 2, "the checkpoints agree, so that this test shows nothing"


def test_a_run_weighs_by_calibrated_confidence(tmp_path: Path) -> None:
    folder = finished(tmp_path, ListRule("adaptive", "calibrated"))
    for at in Trajectory.from_run(folder):
        now = read_predictions(folder, at.name)
        maps = folder.maps().read(at.name, "gradcam", list(now.ids))
        options = {"tau": "adaptive", "weights": "calibrated"}
        result = hp.metrics.cscore_by_class(maps, now.labels, now.probabilities, **options)  # type: ignore[arg-type]
        assert at.methods["gradcam"].overall.value == pytest.approx(result.overall.value, nan_ok=True)
        listed = gold_list(now.labels, now.probabilities, "adaptive")
        assert sum(state.gold for state in at.classes.values()) == int(listed.sum())


def test_what_an_anchor_may_be_is_reported_before_any_work(tmp_path: Path) -> None:
    study = make_study(tmp_path, methods=["gradcam"], metrics=["cscore(anchor='epoch09')"])
    with pytest.raises(UnknownNameError, match="'epoch09'"):
        run_study(study, tmp_path / "out")
    assert not list((tmp_path / "out").glob("scores/*"))
    with pytest.raises(InputError, match="anchor is the name of a checkpoint"):
        read_metrics(["cscore(anchor=3)"])


def test_a_rule_says_only_what_is_not_the_default() -> None:
    assert ListRule().text == "cscore"
    assert ListRule(0.3, anchor="epoch30").text == "cscore(tau=0.3, anchor='epoch30')"
    assert read_metrics([ListRule("adaptive", "calibrated", "first").text])[0].anchor == "first"
    for wrong in ({"tau": 2}, {"tau": "auto"}, {"weights": "none"}):
        with pytest.raises(InputError):
            ListRule(**wrong)


def test_images_that_an_anchor_never_saw_are_in_no_list() -> None:
    assert not gold_list([0, 1], torch.zeros(2, 2)).any()
