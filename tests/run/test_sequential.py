"""A sequential test: decided methods are tested on no further image, at known levels and with equal rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from heatproof.run.config import read_metrics
from heatproof.run.engine import run_study
from heatproof.run.plan import untested
from heatproof.run.progress import Progress
from heatproof.store import RunFolder
from heatproof.verdict.data import read_run
from heatproof.verdict.follow import FIRST_LOOK, LEVEL, FollowRule, Values, answers, looks, sequential_answers
from heatproof.verdict.judge import follow_answers, judge
from tiny_study import make_study, write_study

METHODS = ["gradcam", "gradient", "random"]
METRICS = ["specificity(steps=3)", "localise", "cscore"]
CURVES = "insertion(steps=3)"
CHECKPOINT = "epochs/epoch02.pt"
RULE = FollowRule(0.05, 0.2, 0.1)


class Counted(Progress):
    """Counts the inputs of a run."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.total = 0

    def inputs(self, count: int) -> None:
        self.total += count


def rows(folder: Path, metric: str) -> dict[tuple[str, str], float]:
    found = (
        RunFolder.open(folder)
        .scores()
        .sql("select image, method, value from scores where metric = ?", [metric])
    )
    return {(row["image"], row["method"]): row["value"] for row in found}


def test_tests_end_where_the_study_says_and_the_other_rows_are_the_same(tmp_path: Path) -> None:
    metrics = [METRICS[0], CURVES, METRICS[2]]
    study = make_study(tmp_path, 16, METHODS, metrics, CHECKPOINT)
    whole, stopped = Counted(), Counted()
    run_study(study, tmp_path / "whole", progress=whole)
    tested = 'tested = [[4, ["gradcam", "random"]], [8, ["gradcam"]]]'
    run_study(
        write_study(tmp_path, METHODS, metrics, CHECKPOINT, run=tested), tmp_path / "out", progress=stopped
    )
    for metric in ("specificity_weights(steps=3)", CURVES):
        everything, part = rows(tmp_path / "whole", metric), rows(tmp_path / "out", metric)
        counts = {method: sum(m == method for _, m in part) for method in METHODS}
        assert counts == {"gradcam": 8, "gradient": 16, "random": 4}  # the one that is not named: all images
        np.testing.assert_equal(part, {key: everything[key] for key in part})
    assert rows(tmp_path / "out", "degenerate") == rows(tmp_path / "whole", "degenerate")
    # Per image and method 2 inner points of 2 curves for the map, its rotation and 3 controls, and as many of
    # the curves beside it; a random map has no control of its own. One further pass for methods apart.
    each, floor = 2 * 2 * (5 + 1), 2 * 2 * (2 + 1)
    saved = whole.total - stopped.total
    assert 0.9 < saved / (8 * each + 12 * floor) < 1.3


def test_a_test_that_goes_on_computes_only_what_is_new(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for steps in ('[[4, ["gradcam", "gradient"]]]', '[[4, ["gradcam", "gradient"]], [12, ["gradient"]]]'):
        study = make_study(tmp_path, 16, METHODS[:2], METRICS[:1], CHECKPOINT, run=f"tested = {steps}")
        before = set(RunFolder.open(out).done()) if out.exists() else set()
        result = run_study(study, out)
        assert before < set(result.folder.done()) and result.folder.status().state == "complete"
    counts = [m for _, m in rows(out, "specificity_place(steps=3)")]
    assert counts.count("gradcam") == 4 and counts.count("gradient") == 12
    everything = make_study(tmp_path, 16, METHODS[:2], METRICS[:1], CHECKPOINT)
    run_study(everything, tmp_path / "whole")
    own, whole = (rows(f, "specificity_place(steps=3)") for f in (out, tmp_path / "whole"))
    np.testing.assert_equal(own, {key: whole[key] for key in own})
    config = RunFolder.open(out).manifest.config
    assert [untested(config, start) for start in (0, 4, 12)] == [set(), {"gradcam"}, {"gradcam", "gradient"}]
    requests = read_metrics(["specificity", "insertion", "pointing", "cscore"])
    assert [request.tests_maps for request in requests] == [True, True, False, False]


@pytest.mark.parametrize("images", [1, 39, 40, 41, 79, 80, 104, 1000, 10**6])
def test_all_looks_together_spend_less_than_the_level(images: int) -> None:
    numbers, levels = zip(*looks(images), strict=True)
    assert (
        numbers[-1] == images and list(numbers) == sorted({*numbers}) and all(level > 0 for level in levels)
    )
    assert sum(levels) < LEVEL and (images > FIRST_LOOK) == (len(levels) > 1)


def test_the_first_answer_stands() -> None:
    rng = np.random.default_rng(0)
    best = rng.normal(0.8, 0.2, (2, 160))
    turned = np.where(np.arange(160) < 40, rng.normal(0.8, 0.2, (2, 160)), -1)  # good on the first 40 alone
    slow = rng.normal(0.28, 0.5, (2, 160))  # just above the limit: decided by more images

    def values(first: int) -> Values:
        every = {"best": best, "turned": turned, "slow": slow}
        return {name: (own[0, :first], own[1, :first]) for name, own in every.items()}

    result = sequential_answers(values, 160, RULE)
    assert result["best"] == result["turned"] == "yes" and answers(values(160), RULE)["turned"] == "no"
    assert sequential_answers(values, 40, RULE)["slow"] == "undecided"


def test_wrong_answers_stay_rare_whatever_the_number_of_looks() -> None:
    """Maps exactly at the limit: either answer is an error, and 5 % are allowed for each."""
    rng, wrong, repeats = np.random.default_rng(0), {"yes": 0, "no": 0, "undecided": 0}, 1500
    for _ in range(repeats):
        edge = rng.normal(0.2, 0.3, 320)

        def values(first: int, edge: np.ndarray = edge) -> Values:
            full = np.full(first, 1.0)
            return {"best": (full, full), "edge": (edge[:first], full)}

        wrong[sequential_answers(values, 320, RULE)["edge"]] += 1
    assert wrong["yes"] / repeats < 0.05 + 3 * np.sqrt(0.05 * 0.95 / repeats)


def test_the_verdict_of_a_run_with_tests_that_end_is_the_sequential_one(tmp_path: Path) -> None:
    tested = 'tested = [[16, ["gradcam", "gradient"]]]'
    study = make_study(tmp_path, 16, METHODS, METRICS[:1], CHECKPOINT, run=tested)
    data = read_run(run_study(study, tmp_path / "out").folder)
    assert follow_answers(data) == {"gradcam": "undecided", "gradient": "undecided"}
    assert {answer.method: answer.follows for answer in judge(data).methods} == follow_answers(data)
