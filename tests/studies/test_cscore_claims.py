"""Statements of the C-Score paper as tests: fine-tuning and gradients, equivalence of methods, bands, DoM."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cscore_networks import PUBLISHED, table_of

from heatproof.metrics.classifier import reading
from heatproof.report.page import render
from heatproof.report.tables import Column, Table, Value
from heatproof.studies.cscore import claims
from heatproof.studies.cscore.claims import converged, mean_rise, rises, spread
from heatproof.studies.cscore.results import BANDS
from heatproof.verdict.data import read_run
from heatproof.verdict.judge import judge
from heatproof.verdict.trajectory import Trajectory
from made_run import make_run
from published_training import published

ARCHITECTURES = ("DenseNet201", "InceptionV3", "ResNet50V2")
LATE = [False] * 5 + [True] * 2  # E1 .. E20, then E25 and E30


def slow_p(trainings: list[tuple[np.ndarray, np.ndarray]]) -> float:
    """All assignments of all trainings, one after the other."""

    def rise(scores: np.ndarray, late: set[int]) -> float:
        inside = [v for k, v in enumerate(scores) if k in late]
        outside = [v for k, v in enumerate(scores) if k not in late]
        return float(np.mean(inside) - np.mean(outside))

    true = sum(rise(scores, set(np.flatnonzero(late))) for scores, late in trainings)
    ways = [[set(some) for some in combinations(range(len(late)), int(late.sum()))] for _, late in trainings]
    every = [
        sum(rise(s, late) for (s, _), late in zip(trainings, some, strict=True)) for some in product(*ways)
    ]
    return float(np.mean([value >= true - 1e-12 for value in every]))


@given(st.integers(0, 10_000), st.integers(1, 3))
@settings(max_examples=20, deadline=None)
def test_p_equals_a_count_of_all_assignments(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        n = int(rng.integers(3, 6))
        made.append((rng.random(n).round(1), np.arange(n) >= rng.integers(1, n)))
    value, p = mean_rise(made)
    assert p == pytest.approx(slow_p(made)) and 0 < p <= 1
    assert value == pytest.approx(np.mean([s[late].mean() - s[~late].mean() for s, late in made]))


def test_p_is_drawn_where_there_are_too_many_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    made = [(rng.random(7) + 0.3 * np.array(LATE), np.array(LATE)) for _ in range(2)]
    exact = mean_rise(made)[1]
    monkeypatch.setattr(claims, "MOST", 400)
    drawn = mean_rise(made)
    assert drawn == mean_rise(made), "the same seed draws the same"
    assert drawn[1] == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / 400) + 1 / 400)


def test_the_hypothesis_on_the_paper_s_own_numbers() -> None:
    """DenseNet201 alone: every gradient method starts below EigenCAM and rises; so does EigenCAM, by 0.24."""
    (dense,) = [rises([(published(name), LATE)]) for name in ARCHITECTURES[:1]]
    by_name = {each.method: each for each in dense}
    assert {m for m, each in by_name.items() if each.uses_gradients} == {
        "GradCAM", "GradCAM++", "LayerCAM", "MS-GradCAM++",
    }  # fmt: skip
    assert by_name["GradCAM"].start == 0.113 and by_name["GradCAM"].below == pytest.approx(0.113 - 0.635)
    late = np.array([0.908, 0.846])
    assert by_name["EigenCAM"].rise == pytest.approx(
        late.mean() - np.mean([0.635, 0.634, 0.635, 0.636, 0.635])
    )
    assert by_name["EigenCAM"].p == pytest.approx(6 / 21), (
        "1 / 21, the least of one training, times six methods"
    )
    assert math.isnan(by_name["EigenCAM"].beyond) and by_name["GradCAM"].beyond > 0.3
    every = {each.method: each for each in rises([(published(name), LATE) for name in ARCHITECTURES])}
    assert every["EigenCAM"].p <= 0.05 and every["EigenCAM"].expected == "no", (
        "over three networks it rises too"
    )
    assert all(each.expected == "yes" for each in every.values() if each.uses_gradients)
    assert {each.expected for each in dense if each.uses_gradients} == {"undecided"} and every[
        "ScoreCAM"
    ].expected == ""


def test_methods_that_some_training_lacks_are_left_out_and_no_training_gives_nothing() -> None:
    assert rises([]) == []
    few = Trajectory(tuple(published("DenseNet201").checkpoints[:1]))
    assert all(math.isnan(each.p) for each in rises([(few, [False])])), "one phase has nothing to compare"


def test_without_eigencam_gradient_methods_are_not_judged_against_it() -> None:
    dense = published("DenseNet201")
    states = [
        replace(c, methods={m: s for m, s in c.methods.items() if m != "EigenCAM"}) for c in dense.checkpoints
    ]
    alone = rises([(Trajectory(tuple(states)), LATE)])
    assert len(alone) == 5 and all(math.isnan(each.below) and math.isnan(each.beyond) for each in alone)
    assert {each.expected for each in alone if each.uses_gradients} == {"undecided"}


@pytest.mark.parametrize(
    ("method", "reads"),
    [("smoothgrad", True), ("smooth-gradcam++(samples=2)", True), ("scorecam", False), ("rollout", False)],
)
def test_methods_with_gradients_of_their_own_read_gradients(method: str, reads: bool) -> None:
    assert claims.uses_gradients(method) is reads


def test_methods_converge_where_the_paper_says_so() -> None:
    """Section 4.2.1: GradCAM++, LayerCAM and ScoreCAM converge to 0.870 to 0.880 at E30 of DenseNet201."""
    dense = published("DenseNet201")
    last = spread(dense.checkpoints[-1])
    assert set(last.group) == {"GradCAM++", "LayerCAM", "ScoreCAM", "EigenCAM"} and last.methods == 6
    scores = [s.value for s in dense.checkpoints[-1].methods.values()]
    assert last.width == pytest.approx(max(scores) - min(scores)) and last.deviation == pytest.approx(
        np.std(scores)
    )
    assert converged(dense) == "E25"
    assert [converged(published(name)) for name in ARCHITECTURES[1:]] == [None, None], (
        "three of six are no more than half"
    )


@pytest.mark.parametrize(
    ("score", "colour", "word"),
    [
        (0.0, "red", "none"), (0.0004, "red", "none"), (0.0005, "amber", "slight"),
        (0.299, "amber", "fair"),
        (0.3, "", "fair"), (0.79, "", "substantial"), (0.8, "green", "almost perfect"),
        (1.0, "green", "almost perfect"), (math.nan, "", ""),
    ],
)  # fmt: skip
def test_bands_and_words(score: float, colour: str, word: str) -> None:
    assert reading(score, "colours") == colour and reading(score) == word


def test_bands_are_drawn_in_every_form_of_a_table() -> None:
    table = table_of("overall", PUBLISHED[2])
    assert (
        "🟥 0.000" in table.markdown()
        and "🟧 0.014" in table.markdown()
        and "0.80 on, amber below 0.30" in BANDS
    )
    assert r"\cellcolor{red!25}0.000" in table.latex()
    assert "🟥" not in table.csv() and ",0.0,0.612" not in table.csv()
    assert table.csv().splitlines()[0].count(",") == len(table.columns) - 1, "a colour adds no column"
    both = Table("t", "", (Column("a"),), ((Value(0.9, (0.8, 1.0), 4, "green"),),))
    assert (
        "🟩 0.900 [0.800, 1.000]" in both.markdown() and both.csv() == "a,a low,a high,a n\n0.9,0.8,1.0,4\n"
    )


def test_bands_are_drawn_in_the_report(tmp_path: Path) -> None:
    data = read_run(make_run(tmp_path / "run", cscores=(0.9, 0.01)))
    page = render(data, judge(data), None)
    assert '<span class="band green">0.900</span>' in page and '<span class="band amber">0.010</span>' in page
