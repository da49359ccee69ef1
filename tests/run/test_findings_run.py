"""Runs over pictures with several findings: each finding comes out as if it had been scored alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import findings_networks as made
from heatproof.errors import InputError
from heatproof.run.engine import Result, run_study
from heatproof.store import RunFolder
from heatproof.verdict.data import read_run
from heatproof.verdict.gate import check
from heatproof.verdict.judge import judge
from heatproof.verdict.trajectory import Trajectory

pytestmark = pytest.mark.trains

COUNT = 84
# The cross is as the square; the tag of the dot gives it away.
NAMES = [pytest.param(name, marks=[pytest.mark.seeds] * (name == "cross")) for name in made.NAMES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("findings")
    made.write(path, COUNT)
    torch.save(made.train(range(3), epochs=4).state_dict(), path / "weights.pt")  # not perfect
    return path


@pytest.fixture(scope="module")
def together(folder: Path) -> RunFolder:
    return finished(run_study(made.study(folder), folder / "together"))


@pytest.fixture(scope="module")
def alone(folder: Path) -> Callable[[str], RunFolder]:
    """The same network with the one logit of a finding, on pictures labelled 0 and 1."""
    return cache(lambda name: finished(run_study(made.study(folder, name), folder / name)))


def finished(result: Result) -> RunFolder:
    assert result.done == result.units and not result.broken
    return result.folder


def rows(folder: RunFolder, where: str) -> list[dict[str, Any]]:
    return folder.scores().sql(f"select * exclude (unit, model) from scores where {where} order by all")


def test_every_finding_of_a_picture_is_a_row_of_its_own(together: RunFolder) -> None:
    _, truth, _ = made.scenes(COUNT, 2)
    pointing = rows(together, "metric = 'pointing' and method = 'gradcam'")
    expected = {
        f"{i:03d}.png#{name}": c for i in range(COUNT) for c, name in enumerate(made.NAMES) if truth[i, c]
    }
    assert {row["image"]: row["label"] for row in pointing} == expected
    assert all(row["explained"] == row["label"] for row in pointing)
    assert set(together.maps().ids("weights", "gradcam")) == set(expected)
    answers = rows(together, "metric = 'probability'")
    assert len(answers) == COUNT * 3  # also of pictures without a finding
    there = {(int(row["image"][:3]), row["explained"]) for row in answers if row["label"] is not None}
    assert there == {(i, c) for i, c in np.argwhere(truth).tolist()}


@pytest.mark.parametrize("name", NAMES)
def test_scores_of_a_finding_are_those_it_has_alone_bit_for_bit(
    together: RunFolder, alone: Callable[[str], RunFolder], name: str
) -> None:
    c = made.NAMES.index(name)
    ours = rows(together, f"image <> '' and method <> '' and label = {c}")
    theirs = rows(alone(name), "image <> '' and method <> '' and label = 1")
    assert len(ours) == len(theirs) > 500

    def key(row: dict[str, Any]) -> tuple[str, str, str]:
        return row["image"].removesuffix(f"#{name}"), row["method"], row["metric"]

    actual = {key(row): (row["value"], row["reason"]) for row in ours}
    expected = {key(row): (row["value"], row["reason"]) for row in theirs}
    assert actual.keys() == expected.keys()
    # What runs the network again does so in batches of its own, whose last bits may differ.
    passes = {k for k in expected if k[2].startswith("specificity")}
    assert not {k for k in expected.keys() - passes if repr(actual[k]) != repr(expected[k])}
    for k in passes:
        assert actual[k] == (pytest.approx(expected[k][0], abs=1e-5, nan_ok=True), expected[k][1])
    metrics = {row["metric"] for row in ours if not math.isnan(row["value"])}
    assert {"pointing", "mask_iou", "inside", "specificity_weights", "degenerate"} <= metrics


@pytest.mark.parametrize("name", NAMES)
def test_c_score_auc_and_recall_of_a_finding_are_those_it_has_alone(
    together: RunFolder, alone: Callable[[str], RunFolder], name: str
) -> None:
    names = "('cscore', 'cscore_n', 'cscore_degenerate', 'auc', 'recall')"
    where = f"image = '' and metric in {names} and label ="
    ours = rows(together, f"{where} {made.NAMES.index(name)}")
    theirs = rows(alone(name), f"{where} 1")
    assert len(ours) == 8
    assert [(r["method"], r["metric"], r["value"]) for r in ours] == [
        (r["method"], r["metric"], r["value"]) for r in theirs
    ]


@pytest.mark.parametrize("name", NAMES)
def test_calibrated_weights_of_a_finding_are_those_it_has_alone(
    together: RunFolder, alone: Callable[[str], RunFolder], name: str
) -> None:
    """Its sigmoid gets a temperature of its own, fitted on the pictures with it and without it."""

    def values_of(folder: RunFolder, label: int, metric: str) -> list[float]:
        named = metric.replace("'", "''")
        condition = f"image = '' and metric = '{named}' and label = {label} and method <> ''"
        return [row["value"] for row in rows(folder, condition)]

    c = made.NAMES.index(name)
    ours, theirs = values_of(together, c, made.CALIBRATED), values_of(alone(name), 1, made.CALIBRATED)
    assert ours == pytest.approx(theirs, abs=1e-6) and len(ours) == 2
    assert ours != pytest.approx(values_of(together, c, "cscore"), abs=1e-6), "it changes something"


def test_the_verdict_by_finding_is_that_of_each_alone(
    together: RunFolder, alone: Callable[[str], RunFolder]
) -> None:
    verdict = judge(read_run(together))
    assert not verdict.notes
    assert {m.method: m.follows for m in verdict.methods} == {"gradcam": "yes"}
    for name in ("square", "dot"):
        other = judge(read_run(alone(name)))
        assert {m.method: m.follows for m in other.methods} == {m.method: m.follows for m in verdict.methods}


@pytest.mark.parametrize(
    "name", ["square", *(pytest.param(n, marks=pytest.mark.seeds) for n in ("cross", "dot"))]
)
def test_a_network_trained_for_one_label_gets_the_same_verdict(folder: Path, name: str) -> None:
    c = made.NAMES.index(name)
    torch.save(made.train([c], seed=c + 1).state_dict(), folder / f"{name}-alone.pt")
    study = made.study(folder, name, weights=f"{name}-alone.pt")
    study["model"] |= {"spec": str(folder / "net.py") + ":alone", "options": {}}
    study |= {"methods": ["gradcam", "random"], "metrics": ["pointing", "specificity"]}
    verdict = judge(read_run(finished(run_study(study, folder / f"{name}-trained-alone"))))
    assert {m.method: m.follows for m in verdict.methods} == {"gradcam": "yes"}


@pytest.mark.parametrize("name", [None, pytest.param("dot", marks=pytest.mark.seeds)])
def test_a_tag_that_gives_one_finding_away_is_found(folder: Path, name: str | None) -> None:
    """By the network of all findings, and by that of the finding alone."""
    study = made.study(folder, name) | {"methods": ["gradcam"], "metrics": ["evidence"]}
    run = finished(run_study(study, folder / f"evidence-{name}"))
    answers = {c.name: c.answer for c in judge(read_run(run)).network.classes}
    assert answers.pop("dot") == "no" and (name or set(answers) == {"square", "cross"}), answers
    assert name or "no" not in answers.values(), answers
    checked = check(run, ["looks-there dot", "no-shortcut"])[1:]
    assert not any(rule.holds for rule in checked) and all(rule.n for rule in checked)


def test_the_gate_asks_by_finding(together: RunFolder) -> None:
    rules = {
        "follows gradcam": True, "looks-there dot": False, "cscore.gradcam.dot >= 0.5": True,
        "cscore.gradcam.square >= 0.5": False, "auc.cross >= 0.9": True, "pointing.gradcam.dot >= 0.5": False,
        "pointing.gradcam.cross >= 0.5": True, "no-alarms(1)": False,  # one checkpoint
    }  # fmt: skip
    whole, *checked = check(together, list(rules))
    assert whole.holds and {check_.rule: check_.holds for check_ in checked} == rules


def test_alarms_see_each_finding_by_its_own_auc(together: RunFolder) -> None:
    _, truth, _ = made.scenes(COUNT, 2)
    (state,) = Trajectory.from_run(together)
    assert {c: counts.total for c, counts in state.classes.items()} == dict(enumerate(truth.sum(0).tolist()))
    assert {c: counts.absent.total for c, counts in state.labels.items()} == dict(
        enumerate((~truth).sum(0).tolist())
    )
    stored = {r["label"]: r["value"] for r in rows(together, "metric = 'auc'")}
    assert 0.75 < stored[1] < 1  # else the numbers would agree for want of anything to tell them apart
    assert {c: state.of(c).auc for c in range(3)} == {c: stored[c] for c in range(3)}
    assert state.auc == stored[None]


def small(folder: Path, **run: Any) -> dict[str, Any]:
    study = made.study(folder)
    study |= {"methods": ["gradcam", "random"], "metrics": ["localise", "cscore", "auc", "recall"]}
    study["images"] |= {"limit": 30}
    study["run"] |= {"batch_size": 8, **run}
    return study


def test_a_run_that_was_cut_off_and_one_in_two_shards_give_the_same_rows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = finished(run_study(small(folder), folder / "whole")).scores().digest()
    for shard in (1, 0):
        run_study(small(folder), folder / "shards", shard=(shard, 2))
    shards = RunFolder.open(folder / "shards")
    assert shards.status().complete and shards.scores().digest() == whole
    written, write = [], RunFolder.write_unit

    def cut_off(self: RunFolder, unit: Any, *rest: Any, **more: Any) -> None:
        if len(written) == 2:
            raise MemoryError("the machine stops")
        written.append(unit.hash)
        write(self, unit, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "write_unit", cut_off)
        with pytest.raises(Exception, match="memory"):
            run_study(small(folder), folder / "cut")
    cut = RunFolder.open(folder / "cut")
    assert not cut.status().complete and len(cut.done()) == 2
    assert finished(run_study(small(folder), folder / "cut")).scores().digest() == whole


def test_metrics_that_are_added_later_get_the_same_numbers(folder: Path) -> None:
    whole = finished(run_study(small(folder), folder / "at-once")).scores().digest()
    first = small(folder) | {"metrics": ["cscore", "auc"], "methods": ["gradcam"]}
    run_study(first, folder / "later")
    run_study(first | {"metrics": ["cscore", "auc", "localise"]}, folder / "later")
    grown = small(folder) | {"metrics": ["cscore", "auc", "localise", "recall"]}
    assert finished(run_study(grown, folder / "later")).scores().digest() == whole


def test_predicted_findings_are_those_above_their_thresholds(folder: Path) -> None:
    study = small(folder, targets="predicted") | {"metrics": ["pointing", "recall", "cscore"]}
    study["model"] |= {"thresholds": {"dot": 0.999999}}
    run = finished(run_study(study, folder / "predicted"))
    explained = rows(run, "metric = 'degenerate' and method = 'gradcam'")
    chances = {(r["image"], r["explained"]): r["value"] for r in rows(run, "metric = 'probability'")}
    limits = (0.5, 0.5, 0.999999)
    above = {f"{image}#{made.NAMES[c]}" for (image, c), p in chances.items() if p >= limits[c]}
    assert {row["image"] for row in explained} == above and above
    predicted = rows(run, "metric = 'predicted'")
    none = {row["image"] for row in predicted if row["value"] == -1}
    assert none and all(
        row["reason"] == "no label reaches its threshold" for row in predicted if row["value"] < 0
    )
    assert not {name for name in none if any(entry.startswith(f"{name}#") for entry in above)}
    assert run.manifest.config["model"]["thresholds"] == [0.5, 0.5, 0.999999]
    _, truth, _ = made.scenes(COUNT, 2)
    real = {(image, c) for image, c in chances if truth[int(image[:3]), c]}
    dots = [chances[key] >= limits[2] for key in real if key[1] == 2]
    (recall,) = rows(run, "metric = 'recall' and label = 2")
    assert recall["value"] == pytest.approx(np.mean(dots))
    (listed,) = rows(run, "metric = 'cscore_n' and method = 'gradcam' and label = 2")
    assert listed["value"] == sum(dots)


def test_a_network_without_an_answer_is_said_to_have_none(folder: Path) -> None:
    weights = torch.load(folder / "weights.pt", weights_only=True)
    weights["head.bias"][:] = torch.nan
    torch.save(weights, folder / "nothing.pt")
    study = small(folder) | {"metrics": ["pointing", "auc", "specificity"]}
    study["model"]["checkpoints"] = str(folder / "nothing.pt")
    result = run_study(study, folder / "nothing")
    assert result.unanswered == 30 and not result.broken
    data = read_run(result.folder)
    assert data.images.ids and not any(c in (0, 1, 2) for c in data.images.predicted)
    assert any("NaN or infinite" in note for note in judge(data).notes)


def test_a_network_that_ends_in_sigmoids_is_known_by_itself(folder: Path) -> None:
    study = small(folder)
    del study["model"]["head"]
    study["model"]["options"] = {"sigmoids": True}
    run = finished(run_study(study, folder / "sigmoids"))
    assert run.manifest.is_multilabel and len(rows(run, "metric = 'auc'")) == 4


def test_pictures_and_network_that_do_not_agree_are_refused(folder: Path) -> None:
    study = small(folder)
    del study["model"]["head"]
    with pytest.raises(InputError, match="multi-label, but the network's output is read as logits"):
        run_study(study, folder / "refused")
    study = made.study(folder, "dot")
    study["model"] = made.study(folder)["model"]
    with pytest.raises(InputError, match=r"multi-label .* but each image has one label"):
        run_study(study, folder / "refused")
    study = small(folder)
    study["model"] |= {"thresholds": {"dott": 0.3}}
    with pytest.raises(InputError, match="dott"):
        run_study(study, folder / "refused")
    study = small(folder) | {"metrics": ["cose"]}
    study["run"] |= {"targets": "predicted"}
    torch.save(torch.load(folder / "weights.pt", weights_only=True), folder / "other.pt")
    study["model"]["checkpoints"] = [str(folder / "weights.pt"), str(folder / "other.pt")]
    with pytest.raises(InputError, match="cose needs the predicted class"):
        run_study(study, folder / "refused")
