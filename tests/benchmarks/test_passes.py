"""Fewer passes: the audit's inputs are counted, and closeness means what it says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from benchmarks import passes
from benchmarks.sections import BenchOptions
from conftest import small_cnn
from heatproof.errors import UnknownNameError
from heatproof.models.model import Model
from heatproof.registry import explainers


def test_the_audit_needs_at_most_half_of_the_inputs_it_needed() -> None:
    counts: dict[str, dict[str, int]] = {"before": {}, "after": {}}
    for row in passes.audit_rows():
        counts[str(row["when"])][str(row["what"])] = int(str(row["inputs"]))
    before, after = counts["before"], counts["after"]
    assert before.keys() == after.keys() and {"maps", "insertion", "randomisation", "fragility"} <= set(after)
    assert sum(after.values()) <= sum(before.values()) / 2
    assert all(after[part] <= before[part] for part in before)
    # One shared pass, 50 steps of integrated gradients, the samples of lime; eleven times, and cut down.
    assert before["maps"] == after["maps"] == 1 + 50 + 1000
    assert (before["randomisation"], after["randomisation"]) == (11 * 1051, 11 * (1 + 13 + 375))
    assert (before["fragility"], after["fragility"]) == (4 * 1051, 4 * (1 + 13 + 375))
    # Maps of the network as it is are those that randomisation made.
    assert (before["input_shift"], after["input_shift"]) == (2 * 1051, 1 + 13 + 375)
    assert (before["insertion"], after["insertion"]) == (2 + 12 * 2 * 99, 2 + 12 * 64)


def test_new_forms_are_tried_at_a_quarter_against_sixteen_times_the_old() -> None:
    for name, new in passes.NEW.items():
        assert passes.inputs_of(new) <= passes.inputs_of(passes.OLD[name]) / 4
        assert passes.inputs_of(passes.LONG[name]) == passes.LONGER * passes.inputs_of(passes.OLD[name])
        usual = explainers.get(name).options
        assert f"={usual['form']!r})" in new and passes.inputs_of(passes.OLD[name]) in usual.values()


def test_closeness_is_spearman_and_a_distance_of_ranks() -> None:
    a, b = torch.rand(9, 7), torch.rand(9, 7)
    rank, rmse = passes.closeness(a, b)
    assert rank == pytest.approx(spearmanr(a.ravel(), b.ravel()).statistic)
    assert rmse == pytest.approx(np.sqrt((1 - rank) / 6), rel=0.02)  # of ranks without ties
    assert passes.closeness(a, 3 * a) == (pytest.approx(1.0), 0.0)
    assert np.isnan(passes.closeness(a, torch.ones(9, 7))).all()


def test_rows_of_a_small_subject(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = Model(small_cnn().eval(), "small"), torch.randn(2, 3, 32, 32)
    subject = passes.Subject(model, ["a", "b"], images)
    monkeypatch.setattr(passes, "OLD", {"rise": "rise(masks=20, form='published')"})
    monkeypatch.setattr(passes, "LONG", {"rise": "rise(masks=200, form='centred')"})
    monkeypatch.setattr(passes, "NEW", {"rise": "rise(masks=8, form='paired')"})
    monkeypatch.setattr(passes, "STEPS_TO_NEW", {"rise": ()})
    first, shorter = (list(passes.map_rows(subject, 0, "rise", by)) for by in (1, 2))
    assert [row["inputs"] for row in first] == [20, 8] and [row["inputs"] for row in shorter] == [10, 4]
    assert {row["longer"] for row in shorter} == {"rise(masks=100, form='centred')"}
    monkeypatch.setattr(passes, "CHECKED", ("gradcam", "smoothgrad(samples=40)"))
    cut = list(passes.reduced_rows(subject, 2))
    assert len(cut) == 2 * 2 * 2 * 2  # checks, kinds, methods, pictures
    for row in cut:  # 25 samples are enough of 40; gradcam repeats nothing
        assert (row["full"] == row["enough"]) == (row["method"] == "gradcam") or np.isnan(
            float(str(row["full"]))
        )
    curves = list(passes.curve_rows(subject))
    assert len(curves) == 2 * len(passes.CURVED) and all(row["of"] == 202 for row in curves)
    for row in curves:
        if row["method"] != "gradcam":  # which may be blank here
            assert float(str(row["insertion"])) == pytest.approx(
                float(str(row["insertion_walked"])), abs=0.02
            )


def test_parts_are_named_by_network_picture_and_method(monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.randn(2, 3, 32, 32)
    known = [passes.Subject(Model(small_cnn(), name), ["a", "b"], images) for name in ("resnet20", "lite0")]
    monkeypatch.setattr(passes, "subjects", lambda options: known)
    names = [part.name for part in passes.parts(BenchOptions())]
    assert len(names) == len(set(names)) == 1 + 2 * 2 + (6 + 2) + 6
    assert "maps, resnet20, b, lime" in names and "maps, lite0, a, scorecam" in names
    assert len(list(passes.parts(BenchOptions(quick=True)))) == 1 + 2 + 4 + 2


def test_a_network_that_is_not_there_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="lite0"):
        list(passes.subjects(BenchOptions(network=("resnet20",))))
