"""The verdict: two questions that are never mixed, and nothing good about a network that does not answer."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from scipy import stats

import heatproof as hp
from heatproof.cli import main
from heatproof.errors import UnknownNameError
from heatproof.report.page import read_report, render
from heatproof.report.pieces import Section
from heatproof.store import RunFolder
from heatproof.store.ledger import known_record
from heatproof.verdict import answers, follow
from heatproof.verdict.answers import HEADLINES, UNDECIDED, MethodAnswer, NetworkAnswer, Verdict
from heatproof.verdict.data import read_run
from heatproof.verdict.follow import FollowRule, decided, holm, p_above
from heatproof.verdict.gate import check
from heatproof.verdict.judge import FILE, IGNORES_WEIGHTS, judge
from made_run import CLASSES, EVIL, METHODS, Values, made_record, make_run
from research.calibration.thresholds import CHOSE, rates_alone, read_judged
from tiny_study import make_study

ROOT = Path(__file__).parents[2]
TESTS = ("specificity_weights", "specificity_place")
REAL = METHODS[:3]
ANY = FollowRule(informative=-math.inf, yes=0.1, no=0.0)  # judges also where no map stands out


def heatproof(*arguments: object) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)])


def scores(level: Mapping[str, float] | float = 0.6) -> Values:
    """How far maps lie above their control maps, by method."""

    def values(metric: str, method: str, random: np.random.Generator) -> np.ndarray:
        own = level if isinstance(level, float) else level.get(method, 0.6)
        return random.normal(own, 0.1, 100)

    return values


def verdict_on(folder: Path, values: Values, by: FollowRule | None = None, **options: Any) -> Verdict:
    """The verdict on a run whose network uses the object, unless another record of evidence is given."""
    options = {"metrics": TESTS, "maps": False, "images": 100, "evidence": made_record(), **options}
    return judge(read_run(make_run(folder, values, **options)), by)


# --- what is said -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("follows", ["yes", "no"])
@pytest.mark.parametrize("uses", ["yes", "no", "undecided"])
def test_headlines_and_levels(tmp_path: Path, follows: str, uses: str) -> None:
    values = scores(0.6 if follows == "yes" else -0.6)
    verdict = verdict_on(tmp_path / "run", values, ANY, evidence=made_record((uses, uses)))
    assert {m.follows for m in verdict.methods} == {follows}
    answer = "undecided" if (follows, uses) == ("no", "yes") else uses  # which needs maps that follow
    assert verdict.network.answer == answer and verdict.headline.startswith(HEADLINES[follows, answer])
    assert verdict.level == {("yes", "yes"): "clear", ("yes", "undecided"): "care"}.get(
        (follows, answer), "stop"
    )
    assert verdict.network.note in verdict.sentence
    if (follows, uses) == ("no", "yes"):
        assert verdict.network.note.endswith("chose the patches is known to follow the network")


def test_what_the_network_uses_does_not_change_whether_its_maps_follow(tmp_path: Path) -> None:
    """A finding about the network, not about its maps."""
    wrong = verdict_on(tmp_path / "run", scores(), evidence=made_record(("no", "no")))
    assert {m.follows for m in wrong.methods} == {"yes"} and wrong.headline == HEADLINES["yes", "no"]
    good = verdict_on(tmp_path / "good", scores())
    assert wrong.methods == good.methods and good.headline == HEADLINES["yes", "yes"]


def test_one_class_for_which_something_else_is_used_is_enough(tmp_path: Path) -> None:
    network = verdict_on(tmp_path / "run", scores(), evidence=made_record(("yes", "no"))).network
    assert [label.answer for label in network.classes] == ["yes", "no"] and network.answer == "no"
    assert network.read_from == ("gradcam",)
    assert network.note.startswith(f"The network uses something other than the object for {CLASSES[1]}: ")
    assert f"50 of 50 '{CLASSES[1]}' images contain patches such as these off the object" in network.note


def test_a_yes_needs_a_method_that_chose_the_patches_and_follows(tmp_path: Path) -> None:
    record = made_record(methods=("layercam",))
    verdict = verdict_on(tmp_path / "run", scores({"layercam": -0.3}), evidence=record)
    assert verdict.follow == "yes" and verdict.network.answer == "undecided" and verdict.level == "care"


def test_a_low_accuracy_stands_in_the_headline(tmp_path: Path) -> None:
    verdict = verdict_on(tmp_path / "run", scores(), wrong=0.3)
    assert verdict.follow == "yes" and verdict.level == "care"
    fault = "only 70% of the predictions match the labels (n = 100)"
    assert verdict.headline.startswith(f"{HEADLINES['yes', 'yes']}; but {fault}")
    assert verdict.as_json()["labels"] == {"accuracy": 0.7, "n": 100, "zero_recall": []}
    fair = verdict_on(tmp_path / "fair", scores(), wrong=0.2)
    assert fair.headline == HEADLINES["yes", "yes"] and fair.level == "clear"
    wrong = verdict_on(tmp_path / "wrong", scores(-0.6), ANY, wrong=0.3)
    assert wrong.headline == HEADLINES["no", "undecided"], "what maps do not follow needs no further doubt"
    assert "Only 70% of the predictions match the labels" in wrong.sentence


def test_a_class_with_a_recall_of_0_is_named_and_never_green(tmp_path: Path) -> None:
    """12 of 100 images are ships, all called cats: 88 % are right, and the mean recall is above chance."""
    labels = lambda i: 2 if i % 8 == 0 and i < 96 else i % 2  # noqa: E731
    verdict = verdict_on(
        tmp_path / "run", scores(), labels=labels, predicted=lambda i: labels(i) % 2,
        classes=("cat", "dog", "ship"),
    )  # fmt: skip
    assert verdict.follow == "yes" and not verdict.notes and verdict.level == "care"
    assert "; but no image of ship is predicted as labelled" in verdict.headline
    assert verdict.as_json()["labels"] == {"accuracy": 0.88, "n": 100, "zero_recall": ["ship"]}


def test_a_class_on_which_nothing_could_tell_is_named_and_undecided(tmp_path: Path) -> None:
    followed = scores()

    def values(metric: str, method: str, random: np.random.Generator) -> np.ndarray:
        values = followed(metric, method, random)
        return np.where(np.arange(100) % 2, values, math.nan) if metric in TESTS else values

    verdict = verdict_on(tmp_path / "run", values)
    assert {m.follows for m in verdict.methods} == {"yes"}
    assert all(m.note.startswith(f"judged without {CLASSES[0]}") for m in verdict.methods)
    (numbers,) = {test.n for m in verdict.methods for test in m.tests if test.votes}
    assert numbers == 50


def test_each_method_has_its_own_answer(tmp_path: Path) -> None:
    verdict = verdict_on(tmp_path / "run", scores({"gradcam": 0.6, "layercam": -0.3}), evidence=None)
    assert [m.follows for m in verdict.methods] == ["yes", "no", "yes"] and verdict.level == "care"
    answers = "gradcam and lime(samples=9) follow the network. layercam does not follow the network. "
    assert verdict.sentence.startswith(answers) and "was not tested" in verdict.sentence
    assert verdict.sentence.endswith("add the metric evidence to the run.")
    tests = [(t.name, t.answer, t.votes, t.n) for t in verdict.methods[1].tests]
    assert tests == [(name, "no", True, 100) for name in TESTS]
    assert verdict.methods[1].note == "no better than its control maps"
    assert verdict.network.read_from == () and not verdict.network.is_tested
    assert verdict.headline == f"{HEADLINES['yes', 'undecided']}; what it uses was not tested"


def test_blank_maps_are_counted_beside_the_others(tmp_path: Path) -> None:
    verdict = verdict_on(tmp_path / "run", scores(), blank={"layercam": 30, "lime(samples=9)": 4})
    assert [m.note for m in verdict.methods] == [
        "", "30% of its maps are blank: 30% while the map of another method that follows is not blank", "",
    ]  # fmt: skip
    assert verdict.methods[1].blank == pytest.approx(0.3)


def blank_first(count: int, methods: Sequence[str], level: Mapping[str, float] | float = 0.6) -> Values:
    """Scores where the first maps of some methods are blank: the tests that vote are not defined there."""

    def values(metric: str, method: str, random: np.random.Generator) -> np.ndarray:
        values = scores(level)(metric, method, random)
        return np.where(np.arange(100) < count, np.nan, values) if method in methods else values

    return values


def test_blank_maps_count_only_where_a_method_that_follows_shows_something(tmp_path: Path) -> None:
    silent = {"layercam": 65}
    beside = verdict_on(tmp_path / "beside", blank_first(65, ["layercam"]), blank=silent)
    assert [m.follows for m in beside.methods] == ["yes", "undecided", "yes"]
    assert beside.methods[1].note == (
        "it follows only where its maps are not blank: try another layer; "
        "65% of its maps are blank: 65% while the map of another method that follows is not blank"
    )
    others = dict.fromkeys(REAL, 65)
    together = verdict_on(tmp_path / "together", blank_first(65, REAL), blank=others)
    assert {m.follows for m in together.methods} == {"yes"}, "the network has nothing to show there"
    assert {m.note for m in together.methods} == {
        "65% of its maps are blank: 0% while the map of another method that follows is not blank"
    }
    worse = {"gradcam": -0.3, "lime(samples=9)": -0.3}
    alone = verdict_on(tmp_path / "alone", blank_first(65, ["layercam"], worse), blank=silent)
    assert [m.follows for m in alone.methods] == ["no", "yes", "no"]
    assert alone.methods[1].note == "65% of its maps are blank"
    half = verdict_on(tmp_path / "half", blank_first(55, ["layercam"]), blank={"layercam": 55})
    assert half.methods[1].follows == "yes", "not surely most of them"


def test_maps_that_random_weights_do_not_change_do_not_follow_whatever_others_do(tmp_path: Path) -> None:
    def values(metric: str, method: str, random: np.random.Generator) -> np.ndarray:
        values = scores(0.0)(metric, method, random)
        return np.zeros(100) if metric == TESTS[0] and method == "layercam" else values

    verdict = verdict_on(tmp_path / "run", values)
    assert [m.follows for m in verdict.methods] == ["undecided", "no", "undecided"]
    assert [(t.answer, t.votes) for t in verdict.methods[1].tests] == [("no", True), ("undecided", True)]
    assert verdict.methods[1].note == IGNORES_WEIGHTS and verdict.headline == UNDECIDED
    few = verdict_on(tmp_path / "few", values, images=20)
    assert {m.follows for m in few.methods} == {"undecided"}


def test_which_metrics_vote_is_a_fact_of_the_registry() -> None:
    """The name stands in no file that judges or shows."""
    assert [f"{follow.follow_metric().name}_{kind}" for kind in follow.KINDS] == [*TESTS]
    rooms = Path(follow.__file__).parents[1]
    files = [
        file for room in ("verdict", "monitor", "report", "demo") for file in (rooms / room).glob("*.py")
    ]
    for file in files:
        assert follow.follow_metric().name not in file.read_text(encoding="utf-8"), file.name


# --- undecided, and what would decide it --------------------------------------------------------------------


def undecided(verdict: Verdict) -> set[str]:
    """The notes of methods, none of which was decided."""
    assert {m.follows for m in verdict.methods} == {"undecided"} and verdict.headline == UNDECIDED
    assert verdict.level == "thin" and verdict.network.answer == "undecided"
    return {m.note for m in verdict.methods}


def test_a_run_without_the_test_says_which(tmp_path: Path) -> None:
    verdict = verdict_on(tmp_path / "run", scores(), metrics=("insertion", "pointing"))
    (why,) = undecided(verdict)
    assert "add specificity to the metrics" in why and f"are undecided ({why})" in verdict.sentence
    assert [(t.name, t.votes) for t in verdict.methods[0].tests] == [("insertion", False)]


def test_few_pictures_decide_nothing(tmp_path: Path) -> None:
    verdict = verdict_on(tmp_path / "run", scores(), images=20)
    assert undecided(verdict) == {"the test is defined on 20 images, 30 are needed"}


def test_what_is_close_to_its_shadows_stays_undecided(tmp_path: Path) -> None:
    rule = FollowRule(informative=0.1, yes=0.5, no=0.0)
    certain = scores({"layercam": 0.28})

    def values(metric: str, method: str, random: np.random.Generator) -> np.ndarray:
        uncertain = 0.4 + 0.8 * (-1.0) ** np.arange(100)
        return uncertain if method == METHODS[2] else certain(metric, method, random)

    between, near = verdict_on(tmp_path / "run", values, rule).methods[1:3]
    assert between.follows == near.follows == "undecided"
    assert between.note.startswith("between the limits of both answers on 100 images")
    assert near.note.startswith("too close to the control maps on 100 images: add images (about ")
    assert "`heatproof contrast MODEL IMAGES`" in between.note and "`heatproof contrast" in near.note
    flat = verdict_on(tmp_path / "flat", scores(), FollowRule(informative=2.0, yes=0.1, no=0.0))
    assert len(undecided(flat)) == 1, "where no map stands out, nobody is judged"


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ({"wrong": 1.0}, "better than chance: mean recall 0.0% (95 % interval 0.0% to 0.0%, n = 100), where"),
        ({"wrong": 0.5}, "not surely better than chance"),
        ({"labels": lambda i: int(i % 10 == 0), "predicted": lambda i: 0}, "where guessing has 50.0%"),
        ({"labels": lambda i: 0, "predicted": lambda i: 1}, "where guessing has 50.0%"),
        ({"confidence": math.nan}, "NaN or infinite for 100 of 100 images"),
    ],
    ids=["always wrong", "guesses", "calls all the larger class", "wrong about one class", "nan"],
)
def test_a_network_at_chance_level_gets_no_positive_answer(
    tmp_path: Path, options: dict[str, Any], note: str
) -> None:
    verdict = verdict_on(tmp_path / "run", scores(), **options)
    assert undecided(verdict) == {"see notes"} and note in " ".join(verdict.notes)


def test_a_rare_class_is_no_lack_of_skill(tmp_path: Path) -> None:
    """Right about nine tenths of both classes, with less accuracy than calling everything the larger one."""
    options: dict[str, Any] = {"labels": lambda i: int(i % 12 == 0), "wrong": 0.1}
    assert verdict_on(tmp_path / "run", scores(), **options).notes == ()


def test_answers_that_are_nan_in_every_test_decide_nothing(tmp_path: Path) -> None:
    def nothing(metric: str, method: str, random: np.random.Generator) -> np.ndarray:
        return np.full(100, math.nan)

    verdict = verdict_on(tmp_path / "run", nothing)
    assert undecided(verdict) == {"the test is defined on 0 images, 30 are needed"}


def test_real_networks_without_numbers_or_skill(tmp_path: Path) -> None:
    """Untrained weights, and weights that are NaN, in a whole run with the test that votes."""
    metrics = ["accuracy", "specificity(draws=1, steps=2)"]
    study = make_study(tmp_path / "study", 32, ["gradcam", "random"], metrics)
    weights = torch.load(tmp_path / "study/epochs/epoch02.pt", weights_only=True)
    torch.save({k: v * float("nan") for k, v in weights.items()}, tmp_path / "study/epochs/epoch02.pt")
    ended = heatproof("run", study, "--out", tmp_path / "out")
    assert ended.exit_code == 1 and f"{UNDECIDED}: heatproof verdict" in ended.output
    stored = json.loads((tmp_path / "out" / FILE).read_text())
    assert stored["checkpoint"] == "epoch02" and "NaN or infinite" in stored["notes"][-1]
    run = hp.open_run(tmp_path / "out")
    assert "better than chance" in run.verdict("epoch01").notes[-1]
    for checkpoint in ("epoch01", "epoch02"):
        assert run.verdict(checkpoint).level == "thin"


# --- the tests behind it ------------------------------------------------------------------------------------


def test_the_chance_is_that_of_a_t_test() -> None:
    values = np.random.default_rng(0).normal(0.1, 0.3, 40)
    for threshold in (-0.2, 0.1, 0.4):
        known = stats.ttest_1samp(values, threshold, alternative="greater").pvalue
        assert p_above(values, threshold) == pytest.approx(known)
        assert p_above(-values, -threshold) == pytest.approx(1 - known)
    constant = np.full(40, 0.1)
    assert [p_above(constant, t) for t in (0.0, 0.1, 0.2)] == [0.0, 1.0, 1.0]
    assert p_above(-constant, -0.1) == 1.0, "what is at the threshold is on neither side"
    p_above(constant + 1e-17 * np.arange(40), 0.2)  # and nothing is warned of


def test_many_methods_are_corrected_by_hand() -> None:
    assert holm({"a": 0.012, "b": 0.5, "c": 0.02, "d": 0.03}) == pytest.approx(
        {"a": 0.048, "c": 0.06, "d": 0.06, "b": 0.5}
    )
    assert holm({"a": 0.9, "b": 0.8}) == {"b": 1.0, "a": 1.0} and holm({}) == {}
    assert [decided(0.04, 1.0), decided(0.06, 0.04), decided(0.06, 0.06)] == ["yes", "no", "undecided"]


def test_a_crowd_makes_chance_findings_rarer() -> None:
    """A method that is just sure alone is not sure as the best of twenty."""
    rng = np.random.default_rng(3)
    wave = rng.normal(0, 1, 50)
    wave = (wave - wave.mean()) / wave.std(ddof=1) * 0.1
    edge = stats.t.isf(0.03, 49) * 0.1 / math.sqrt(50)  # p = 0.03
    rule = FollowRule(informative=-math.inf, yes=0.0, no=0.0)
    values = {"m": (wave + edge, wave + edge)}
    assert follow.answers(values, rule) == {"m": "yes"}
    crowd = {f"{i}": (wave, wave) for i in range(19)}
    assert follow.answers(values | crowd, rule)["m"] == "undecided"


def test_yes_needs_both_numbers_above_and_no_needs_one_below() -> None:
    rng = np.random.default_rng(0)
    high, low = rng.normal(0.5, 0.1, 50), rng.normal(-0.3, 0.1, 50)
    few = np.where(np.arange(50) < 29, high, np.nan)
    values = {"best": (high, high), "weights": (high, low), "place": (low, high), "few": (high, few)}
    result = follow.answers(values, FollowRule(0.1, 0.1, 0.0))
    assert result == {"best": "yes", "weights": "no", "place": "no", "few": "undecided"}


# --- the file -----------------------------------------------------------------------------------------------


def test_the_file_has_the_published_form(tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "run", scores(), metrics=TESTS, maps=False, cscores=(0.6, 0.01),
        evidence=made_record(recurring=True),
    )  # fmt: skip
    result = heatproof("verdict", run.path, "--json")
    text = (run.path / FILE).read_text(encoding="utf-8")
    content = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert len(content.pop("checksum")) == 64
    assert result.exit_code == 0 and json.loads(result.output) == content
    assert list(content) == [
        "schema", "headline", "sentence", "checkpoint", "methods", "network", "labels", "alarms", "notes",
        "warnings", "rates",
    ]  # fmt: skip
    assert content["schema"] == 2 and content["headline"] == HEADLINES["yes", "yes"]
    such = content["rates"]["such_runs"]
    assert such["looks"] == "tested once" and such["methods"] == len(content["methods"])
    assert [set(answer) for answer in content["methods"]] == [
        {"method", "follows", "blank", "note", "tests"}
    ] * 3
    assert {answer["follows"] for answer in content["methods"]} == {"yes"}
    numbers = {"name", "title", "answer", "value", "low", "high", "n", "threshold", "votes", "rates"}
    assert all(set(test) == numbers for answer in content["methods"] for test in answer["tests"])
    network = content["network"]
    assert list(network) == [
        "answer", "read_from", "has_regions", "is_tested", "inputs", "note", "rates", "classes", "evidence",
    ]  # fmt: skip
    assert network["answer"] == "yes" and list(network["classes"]) == [*CLASSES]
    for label, of in enumerate(network["classes"].values()):
        assert (of["label"], of["answer"]) == (label, "yes")
        assert all(set(test) == numbers and test["votes"] for test in of["tests"])
    assert [item["label"] for item in network["evidence"]] == [0, 1]
    assert {alarm["name"] for alarm in content["alarms"]} == {"attribution collapse"}
    assert Verdict("a", (), NetworkAnswer("undecided")).as_json()["network"]["classes"] == {}


def test_the_command_says_what_the_file_says(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", scores(), metrics=TESTS, maps=False, evidence=made_record())
    output = heatproof("verdict", run.path).output
    for word in (
        HEADLINES["yes", "yes"],
        *REAL,
        "follows",
        "uses the object",
        "95 % interval",
        f"{FILE}",
    ):
        assert word in output
    before = (run.path / FILE).read_bytes()
    early = heatproof("verdict", run.path, "--checkpoint", "epoch01")
    assert early.exit_code == 0 and "at epoch01" in early.output and "written to" not in early.output
    assert (run.path / FILE).read_bytes() == before, "the file is about the last checkpoint"
    assert heatproof("verdict", tmp_path / "nowhere").exit_code == 2
    assert heatproof("verdict", run.path, "--checkpoint", "epoch9").exit_code == 2


def test_a_folder_that_may_not_be_written_is_read_all_the_same(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", scores(), metrics=TESTS, images=40)
    (run.path / FILE).mkdir()  # also root cannot put a file there
    why = f"the verdict was not written: cannot write {run.path / FILE}"
    for result in (heatproof("verdict", run.path), heatproof("report", run.path, "-o", tmp_path / "a.html")):
        assert result.exit_code == 0 and why in result.output.replace("\n", "")
    assert heatproof("verdict", run.path, "--json").exit_code == 0
    assert hp.open_run(run.path).report(tmp_path / "b.html").is_file()


def test_a_run_in_python_keeps_its_verdict(tmp_path: Path) -> None:
    run = hp.run(make_study(tmp_path, 4, ["gradcam"], ["accuracy"]), tmp_path / "out")
    assert known_record(run.path / FILE) == run.verdict().as_json()
    shutil.rmtree(run.path / "scores")
    part = hp.run(make_study(tmp_path, 8, ["gradcam"], ["accuracy"]), tmp_path / "two", shard=(0, 2))
    assert not (part.path / FILE).exists(), "half a run is no run"


# --- the gate -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """gradcam and lime follow, layercam does not; the network uses the object for the first class alone."""
    folder, record = tmp_path_factory.mktemp("gate") / "run", made_record(("yes", "no"))
    values = scores({"layercam": -0.3})
    return make_run(folder, values, metrics=TESTS, images=100, maps=False, evidence=record)


@pytest.mark.parametrize(
    ("rule", "holds", "reason"),
    [
        ("follows gradcam", True, ""),
        ("follows Grad-CAM", True, ""),
        ("follows lime", True, ""),
        ("follows gradcam@all", True, ""),
        ("follows gradcam @ epoch01", True, ""),
        ("follows layercam", False, "layercam at epoch02: no (no better than its control maps)"),
        ("follows", False, "layercam at epoch02: no"),
        ("looks-there 0", True, ""),
        (f"looks-there '{CLASSES[0]}'", True, ""),
        ("looks-there 1", False, f"{CLASSES[1]} at epoch02: no (The network uses something other"),
        ("looks-there", False, f"{CLASSES[1]} at epoch02: no"),
        ("no-shortcut", False, "network at epoch02: no (The network uses something other than the object"),
        ("no-shortcut@all", False, "network at epoch0"),
    ],
)
def test_rules_ask_the_verdict(judged: RunFolder, rule: str, holds: bool, reason: str) -> None:
    result = check(judged, [rule])[1]
    assert result.holds is holds and len(result.reasons) == (not holds) * (2 if "shortcut@" in rule else 1)
    assert all(text.startswith(reason) for text in result.reasons)
    assert result.n == (50 if rule.startswith("looks") else 100)
    assert heatproof("gate", judged.path, "--rule", rule).exit_code == (not holds)


def test_rules_of_the_verdict_refuse_names_and_small_numbers(judged: RunFolder, tmp_path: Path) -> None:
    for rule, known in (
        ("follows gradcan", "gradcam"),
        ("follows random", "gradcam"),
        ("looks-there x", "dog"),
    ):
        with pytest.raises(UnknownNameError, match=known):
            check(judged, [rule])
        assert heatproof("gate", judged.path, "--rule", rule).exit_code == 2
    assert heatproof("gate", judged.path, "--rule", "follows gradcam layercam").exit_code == 2
    assert heatproof("gate", judged.path, "--rule", "follows gradcam@epoch7").exit_code == 2
    few = check(judged, ["follows gradcam"], min_n=101)[1]
    assert few.reasons == ("gradcam at epoch02: yes (100 images are fewer than 101)",)
    bare = make_run(tmp_path / "bare", scores(), metrics=(), maps=False)
    for rule, why in (
        ("follows", "add specificity"),
        ("looks-there 0", "add the metric evidence"),
        ("looks-there", "add the metric evidence"),
        ("no-shortcut", "add the metric evidence"),
    ):
        result = check(bare, [rule])[1]
        assert not result.holds and result.n == 0 and why in result.reasons[0]


def test_rules_and_claims_say_what_is_missing(tmp_path: Path) -> None:
    bare = make_run(tmp_path / "bare", scores(), metrics=TESTS, maps=False, classes=("cat", "ship"))
    with pytest.raises(UnknownNameError, match=r"'dog'; known: edges, [^~]*, random, cat, ship$"):
        check(bare, ["cscore.dog >= 0.5"])
    claim = judge(read_run(bare)).looks_there("pneumonia")
    assert not claim
    assert re.search(r"pneumonia: undecided, because no class was judged .* metric evidence", repr(claim))


# --- names on pages -----------------------------------------------------------------------------------------


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [name for name, _ in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_evil_names_are_shown_in_the_verdict_and_never_run(tmp_path: Path) -> None:
    """On the page, on the dashboard and in a notebook."""
    methods = (EVIL[0], EVIL[1], *METHODS)
    run = make_run(
        tmp_path / "run", scores(), metrics=TESTS, methods=methods, images=40, maps=False,
        cscores=(0.6, 0.01), evidence=made_record(("no", "no"), recurring=True),
    )  # fmt: skip
    data = read_run(run)
    verdict = judge(data)
    whole = render(data, verdict, None)
    page = whole.partition('<section class="verdict')[2].partition("</section>")[0]
    live = read_report(data, verdict, Section("pictures", "Pictures", {})).fragments()["verdict"]
    for text in (page, str(live).partition("</section>")[0], verdict._repr_html_()):
        tags = Tags(text)
        assert not {"script", "img", "b"} & set(tags.tags)
        assert not [name for name in tags.attributes if name.startswith("on")]
        assert all(name in tags.text for name in (*methods[:2], *CLASSES))
    evidence = whole.partition('id="evidence"')[2].partition("</section>")[0]
    assert evidence.count("<img") == evidence.count('<img src="data:') > 0
    tags = Tags(evidence)
    assert not {"script", "b"} & set(tags.tags) and all(name in tags.text for name in CLASSES)
    assert not [name for name in tags.attributes if name.startswith("on")]
    assert "nan" not in page.lower()
    assert str(verdict).count(EVIL[0]) == 1 + (EVIL[0] in verdict.sentence)


def test_an_empty_verdict_can_be_printed() -> None:
    empty = Verdict("epoch01", (), NetworkAnswer("undecided", note="nothing was asked"))
    assert empty.sentence == "nothing was asked." and empty.follow == "undecided" and empty.measured == ""
    test = answers.Test("t", "title", "undecided", math.nan, math.nan, math.nan, 0)
    assert str(test) == "title: not measured"
    answer = MethodAnswer("gradcam", "undecided", (test,), note="why")
    assert "gradcam is undecided (why)." in Verdict("a", (answer,), NetworkAnswer("undecided")).sentence


def test_stored_maps_alone_must_stand_out_further() -> None:
    """Any map is the best of a run without others, so it is held against a fixed scale."""
    rng = np.random.default_rng(0)
    low, high = rng.normal(0.1, 0.1, (2, 60)), rng.normal(0.4, 0.1, (2, 60))
    assert follow.answers({"m": tuple(low)}, follow.rule())["m"] == "yes"
    assert follow.answers({"m": tuple(low)}, follow.rule(), follow.ALONE)["m"] == "undecided"
    assert follow.answers({"m": tuple(high)}, follow.rule(), follow.ALONE)["m"] == "yes"


def test_the_rates_of_stored_maps_alone_are_those_of_the_published_rows() -> None:
    groups = read_judged(ROOT / "docs/results/calibration/judged.csv")
    rows = [row for name, own in groups.items() if name != CHOSE for row in own]
    assert follow.calibration()["rates_alone"] == rates_alone(rows, follow.rule())
    page = (ROOT / "docs/bring-your-own.md").read_text(encoding="utf-8")
    miss = follow.calibration()["rates_alone"]["miss"]
    assert (
        f"at most {100 * miss['share']:.1f} % ({100 * miss['low']:.1f} to {100 * miss['high']:.1f})" in page
    )
