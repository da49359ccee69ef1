"""A sequential test: decided methods are tested on no further image, at known levels and with equal rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from heatproof.errors import InputError
from heatproof.run.config import read_metrics
from heatproof.run.engine import run_study
from heatproof.run.plan import untested
from heatproof.run.progress import Progress
from heatproof.store import RunFolder
from heatproof.verdict.data import read_run
from heatproof.verdict.follow import (
    LEVEL,
    FollowRule,
    Values,
    answers,
    growth_needed,
    limits,
    looks,
    sequential_answers,
)
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


def test_a_control_may_begin_without_tests(tmp_path: Path) -> None:
    out, place = tmp_path / "out", "specificity_place(steps=3)"
    first = 'tested = [[0, ["random"]], [8, ["gradcam"]]]'
    result = run_study(make_study(tmp_path, 8, METHODS[::2], METRICS[:1], CHECKPOINT, run=first), out)
    assert result.folder.status().state == "complete" and METHODS[::2] == ["gradcam", "random"]
    assert {m for _, m in rows(out, place)} == {"gradcam"} and len(rows(out, "degenerate")) == 2 * 8
    later = first.replace("]]]", ']], [4, ["random"]]]')
    metrics = [METRICS[0], CURVES]
    run_study(make_study(tmp_path, 8, METHODS[::2], metrics, CHECKPOINT, run=later), out)
    run_study(make_study(tmp_path, 8, METHODS[::2], metrics, CHECKPOINT), tmp_path / "whole")
    for metric in (place, CURVES):
        own, whole = (rows(folder, metric) for folder in (out, tmp_path / "whole"))
        assert sum(m == "random" for _, m in own) == 4 and sum(m == "gradcam" for _, m in own) == 8
        np.testing.assert_equal(own, {key: whole[key] for key in own})


@pytest.mark.parametrize("numbers", [[1], [32, 40], [40, 80, 104, 208], [80, 40], range(1, 2000), [10**6]])
def test_all_looks_together_spend_less_than_the_level(numbers: Sequence[int]) -> None:
    levels = looks(numbers)
    assert list(levels) == sorted(numbers) and all(level > 0 for level in levels.values())
    assert sum(levels.values()) < LEVEL
    further = looks([*numbers, 10**7])  # later looks leave the levels of earlier ones
    assert all(further[n] == level for n, level in levels.items())


def test_looks_of_other_methods_spend_nothing() -> None:
    """A method that was decided stays decided when other methods are tested further."""
    turns = 0.4 * (-1.0) ** np.arange(320)
    every = {"best": 1 + turns, "slow": (0.2838 + turns)[:208], "other": 0.2 + turns}

    def values(first: int) -> Values:
        return {m: (own[:first], own[:first]) for m, own in every.items()}

    tested = {"best": [40], "slow": [40, 80, 104, 208], "other": [40]}
    further = tested | {"other": [40, 80, 160, 320]}
    for looked in (tested, further):
        assert sequential_answers(values, looked, RULE) == {
            "best": "yes",
            "slow": "yes",
            "other": "undecided",
        }
    for numbers in ([40, 80, 104], [40, 80, 104, 160, 208]):  # another look takes a part of the level
        assert sequential_answers(values, tested | {"slow": numbers}, RULE)["slow"] == "undecided"


def test_the_first_answer_stands() -> None:
    rng = np.random.default_rng(0)
    best = rng.normal(0.8, 0.2, (2, 160))
    turned = np.where(np.arange(160) < 40, rng.normal(0.8, 0.2, (2, 160)), -1)  # good on the first 40 alone
    slow = rng.normal(0.28, 0.5, (2, 160))  # just above the limit: decided by more images

    def values(first: int) -> Values:
        every = {"best": best, "turned": turned, "slow": slow}
        return {name: (own[0, :first], own[1, :first]) for name, own in every.items()}

    result = sequential_answers(values, {m: [40, 80, 160] for m in values(0)}, RULE)
    assert result["best"] == result["turned"] == "yes" and answers(values(160), RULE)["turned"] == "no"
    assert sequential_answers(values, {m: [40] for m in values(0)}, RULE)["slow"] == "undecided"


@pytest.mark.parametrize(("mean", "answer"), [(0.25, "yes"), (0.3, "yes"), (0.04, "no"), (-0.03, "no")])
def test_as_many_images_as_are_needed_decide(mean: float, answer: str) -> None:
    turns = 0.8 * (-1.0) ** np.arange(10_000)  # of the same mean and spread after any even number

    def values(first: int) -> Values:
        return {"best": (1 + turns[:first],) * 2, "slow": (mean + turns[:first],) * 2}

    level = LEVEL if answer == "yes" else LEVEL / 2  # Holm: another method follows more surely, none less
    needed = 60 * growth_needed(values(60)["slow"], limits(values(60), RULE), level)
    assert needed > 60 and answers(values(60), RULE)["slow"] == "undecided"
    assert answers(values(2 * round(0.55 * needed)), RULE)["slow"] == answer
    assert answers(values(2 * round(0.45 * needed)), RULE)["slow"] == "undecided"


def test_between_the_limits_no_number_of_images_decides() -> None:
    turns = 0.4 * (-1.0) ** np.arange(10_000)
    many: Values = {"best": (1 + turns,) * 2, "between": (0.15 + turns,) * 2}
    assert growth_needed(many["between"], limits(many, RULE), LEVEL) == np.inf
    assert growth_needed(many["between"], None, LEVEL) == np.inf
    assert answers(many, RULE)["between"] == "undecided"
    few = [column[:20] for column in many["between"]]  # which are not judged, whatever their mean
    assert growth_needed(few, None, LEVEL) == 1.5


def test_wrong_answers_stay_rare_whatever_the_number_of_looks() -> None:
    """Maps exactly at the limit: either answer is an error, and 5 % are allowed for each."""
    rng, wrong, repeats = np.random.default_rng(0), {"yes": 0, "no": 0, "undecided": 0}, 1500
    for _ in range(repeats):
        edge = rng.normal(0.2, 0.3, 320)

        def values(first: int, edge: np.ndarray = edge) -> Values:
            full = np.full(first, 1.0)
            return {"best": (full, full), "edge": (edge[:first], full)}

        tested = {m: [40, 80, 104, 160, 208, 320] for m in ("best", "edge")}
        wrong[sequential_answers(values, tested, RULE)["edge"]] += 1
    assert wrong["yes"] / repeats < 0.05 + 3 * np.sqrt(0.05 * 0.95 / repeats)


def test_the_verdict_of_a_run_with_tests_that_end_is_the_sequential_one(tmp_path: Path) -> None:
    tested = 'tested = [[16, ["gradcam", "gradient"]]]'
    study = make_study(tmp_path, 16, METHODS, METRICS[:1], CHECKPOINT, run=tested)
    data = read_run(run_study(study, tmp_path / "out").folder)
    assert follow_answers(data) == {"gradcam": "undecided", "gradient": "undecided"}
    assert {answer.method: answer.follows for answer in judge(data).methods} == follow_answers(data)


def test_a_step_names_methods_of_the_study(tmp_path: Path) -> None:
    study = make_study(tmp_path, 16, METHODS, METRICS[:1], CHECKPOINT, run='tested = [[4, ["gradcma"]]]')
    with pytest.raises(InputError, match=r"run\.tested names 'gradcma', which is not in methods.*gradcam"):
        run_study(study, tmp_path / "out")
